"""Models behind two Protocols (`base`). Each backend is imported when it is first chosen, so a missing one fails only then."""

from __future__ import annotations

from pathlib import Path

from duodecoding.backends.base import Draft, Target, Vocabulary
from duodecoding.errors import BackendMissing
from duodecoding.types import EngineConfig


def read_vocabulary(path: Path) -> Vocabulary:
    """The vocabulary of a GGUF file, without its weights. Stays usable while the returned object lives."""
    from duodecoding.backends import llamacpp

    return llamacpp.LlamaModel(_gguf(path), vocabulary_only=True).vocabulary


def load_target(path: Path, config: EngineConfig) -> Target:
    from duodecoding.backends import llamacpp

    model = llamacpp.LlamaModel(_gguf(path), gpu_layers=config.gpu_layers)
    return llamacpp.LlamaTarget(model, context=config.ctx_size, threads=config.threads)


def load_draft(path: Path, config: EngineConfig, *, exact: bool = False) -> Draft:
    """On the CPU, wherever the target runs: that is the point. `exact`: its guesses do not depend on the order of the work."""
    from duodecoding.backends import llamacpp

    model = llamacpp.LlamaModel(_gguf(path))
    return llamacpp.LlamaDraft(model, context=config.ctx_size, threads=config.threads_draft or config.threads, exact=exact)


def _gguf(path: Path) -> Path:
    if path.is_dir():
        raise BackendMissing(f"{path} holds no GGUF file", "this version runs GGUF models only", "Convert it, or name a GGUF.")
    return path
