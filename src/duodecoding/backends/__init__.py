"""Models behind two Protocols (`base`). Each backend is imported when it is first chosen, so a missing one fails only then."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from duodecoding.backends.base import Draft, Target, Vocabulary
from duodecoding.errors import BackendMissing, UsageError
from duodecoding.types import EngineConfig

BESIDE_GPU, BESIDE_TARGET, IN_TURN = 0.03, 0.002, 0.00005  # seconds

Progress = Callable[[str, float], None]  # what is being done, share done


def read_vocabulary(path: Path) -> Vocabulary:
    """The vocabulary of a model, without its weights."""
    if path.is_dir():
        _require_torch(path)
        from duodecoding.backends.torch_text import TransformersVocabulary

        return TransformersVocabulary(path)
    from duodecoding.backends import llamacpp

    return llamacpp.read_vocabulary(path)


def uses_torch(path: Path, config: EngineConfig) -> bool:
    """Whether the target at `path` will be run by torch."""
    if config.backend == "native" and config.gpu_layers != 0:
        raise UsageError(
            "layers were to go to a GPU", "the backend native works on the CPU", "Leave out --gpu-layers or --backend."
        )
    if config.backend in {"llamacpp", "native"} and path.is_dir():
        raise UsageError(f"the backend is {config.backend}", f"{path} holds no GGUF file", "Name a GGUF, or leave out --backend.")
    return config.backend == "torch" or path.is_dir()


def on_gpu(path: Path, config: EngineConfig) -> bool:
    """Whether the target at `path` will work on a GPU."""
    if not uses_torch(path, config):
        return config.gpu_layers != 0
    _require_torch(path)
    from duodecoding.backends.torch_model import choose_device

    return choose_device(config.device).type == "cuda"


def engine_of(path: Path, config: EngineConfig) -> str:
    """What will run the target at `path`: native, llamacpp or torch. The same on a machine at any time."""
    if uses_torch(path, config):
        return "torch"
    if config.backend == "llamacpp" or config.gpu_layers != 0:
        return "llamacpp"
    from duodecoding.backends import native, native_target

    try:
        (native.library if config.backend == "native" else native.fast_library)(exact=True)
        native_target.servable(path, config.ctx_size)
    except BackendMissing:
        if config.backend == "native":
            raise
        return "llamacpp"
    return "native"


def load_target(path: Path, config: EngineConfig, progress: Progress = lambda what, share: None) -> Target:
    if uses_torch(path, config):
        _require_torch(path)
        from duodecoding.backends import torch

        return torch.load(path, read_vocabulary(path), config, progress)
    if engine_of(path, config) == "native":
        from duodecoding.backends.native_target import NativeTarget

        keep, threads = config.keep_mb * 1_000_000, config.threads
        return NativeTarget(path, context=config.ctx_size, threads=threads, keep_bytes=keep, progress=progress)
    from duodecoding.backends import llamacpp

    if config.gpu_layers != 0 and not llamacpp.supports_gpu():
        why = "the installed llama.cpp was built for the CPU only"
        build = "CMAKE_ARGS=-DGGML_CUDA=on pip install --no-cache-dir --force-reinstall llama-cpp-python"
        fix = f"Leave out --gpu-layers, or build it with a GPU: {build}"
        raise BackendMissing("layers were to go to a GPU", why, fix)
    from duodecoding.backends.llamacpp_target import LlamaTarget

    model = llamacpp.LlamaModel(path, gpu_layers=config.gpu_layers)
    return LlamaTarget(model, context=config.ctx_size, threads=config.threads, keep_bytes=config.keep_mb * 1_000_000)


def load_draft(path: Path, config: EngineConfig, *, exact: bool = False) -> Draft:
    """On the CPU, wherever the target runs: that is the point. `exact`: its guesses do not depend on the order of the work, and
    llama.cpp makes them."""
    from duodecoding.backends.llamacpp import LlamaModel
    from duodecoding.backends.llamacpp_draft import LlamaDraft

    if not exact and config.draft_engine != "llamacpp":
        from duodecoding.backends import native
        from duodecoding.backends.native_draft import NativeDraft

        try:
            library = native.library() if config.draft_engine == "native" else native.fast_library()
            threads = config.threads_draft or config.threads
            return NativeDraft(_gguf(path), context=config.ctx_size, threads=threads, awake=_awake(config), library=library)
        except BackendMissing:
            if config.draft_engine == "native":
                raise
    model = LlamaModel(_gguf(path), repack=not exact)
    return LlamaDraft(model, context=config.ctx_size, threads=config.threads_draft or config.threads, exact=exact)


def _awake(config: EngineConfig) -> float:
    """Seconds that a draft's threads look for more work: through a pass on the GPU; hardly where the target wants their cores."""
    if config.gpu_layers != 0:
        return BESIDE_GPU
    return BESIDE_TARGET if config.beside else IN_TURN


def _gguf(path: Path) -> Path:
    if path.is_dir():
        raise BackendMissing(f"{path} holds no GGUF file", "drafts are GGUF files", "Convert it, or name a GGUF.")
    return path


def _require_torch(path: Path) -> None:
    missing = [name for name in ("torch", "transformers") if find_spec(name) is None]
    if missing:
        why = f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed"
        raise BackendMissing(f"{path} needs torch", why, "Run: pip install 'duodecoding[torch]'")
