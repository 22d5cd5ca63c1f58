"""Model files on this machine: which of them belong together, what their names tell, whether they are what they seem.

Knows files, not what is inside a model: only its first bytes are looked at.
"""

from __future__ import annotations

import glob
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal

from duodecoding.errors import ModelNotFound, ModelUnreadable, UsageError

Origin = Literal["file", "directory", "hub", "builtin"]


@dataclass(frozen=True, slots=True)
class ModelFile:
    """A model that is on this machine. `path` of a split GGUF is its first part."""

    name: str
    path: Path
    kind: Literal["gguf", "directory"]
    origin: Origin


def size_of(path: Path) -> int:
    """Bytes of a model that is here, all parts together."""
    if path.is_dir():
        return sum(file.stat().st_size for file in path.iterdir() if file.is_file())
    part = _PART.search(path.name)
    parts = path.parent.glob(f"{glob.escape(path.name[: part.start()])}-*-of-{part[2]}*") if part else (path,)
    return sum(file.stat().st_size for file in parts)


@dataclass(frozen=True, slots=True)
class Installed:
    """A line of `duo models`. `name` is what `resolve` takes; without a path, `hint` says how to get it."""

    name: str
    origin: Origin
    path: Path | None
    size: int | None  # bytes, all parts together
    hint: str = ""


_PART = re.compile(r"-(\d{5})-of-(\d{5})(?=\.(?:gguf|safetensors)$)", re.IGNORECASE)
_NOT_MODELS = ("mmproj", "imatrix")  # GGUF files that accompany a model: image projectors, quantisation statistics
# Beginnings in lower case -> what the file is, what to do.
_OTHER_FORMATS = (
    ((b"version https://git-lfs",), "a Git LFS pointer, a note in place of the file", "Run: git lfs pull"),
    ((b"<!doctype", b"<html", b"<?xml"), "an HTML page", "Fetch it again, with the link that downloads the file itself."),
    ((b"pk\x03\x04", b"\x80\x02"), "a PyTorch checkpoint or a zip archive", "Convert it to GGUF first."),
    ((b"tjgg", b"fmgg", b"lmgg"), "a GGML file, the format before GGUF", "Look for a GGUF of the same model."),
    ((b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"\xfd7zxz"), "a compressed archive", "Unpack it first."),
)
_HEADER_BYTES = 24  # magic, version, two counts


def gguf_models(names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """The GGUF models among file names: first part -> all parts it should have."""
    found: dict[str, tuple[str, ...]] = {}
    for name in sorted(names):
        if name.lower().endswith(".gguf") and not any(word in PurePosixPath(name).name.lower() for word in _NOT_MODELS):
            parts = _parts(name)
            found[parts[0]] = parts
    return found


def _parts(name: str) -> tuple[str, ...]:
    """All file names of the model that this file is a part of."""
    match = _PART.search(name)
    if not match:
        return (name,)
    head, tail = name[: match.start()], name[match.end() :]
    return tuple(f"{head}-{number:05d}-of-{match[2]}{tail}" for number in range(1, max(1, int(match[2])) + 1))


def is_transformers(names: Collection[str]) -> bool:
    return "config.json" in names and any(name.endswith(".safetensors") and "/" not in name for name in names)


def missing_parts(names: Collection[str]) -> list[str]:
    return sorted({part for name in names for part in _parts(name)} - set(names))


def exists(path: Path) -> bool:
    try:
        return path.exists()
    except PermissionError as error:
        raise _unreadable(path, error) from error
    except OSError:  # no file can have such a name
        return False


def _unreadable(path: Path, error: OSError) -> ModelUnreadable:
    fix = "Check who owns it and who may read it." if isinstance(error, PermissionError) else ""
    return ModelUnreadable(f"{path} cannot be read", (error.strerror or str(error)).lower(), fix)


def from_file(name: str, path: Path, origin: Origin) -> ModelFile:
    parts = [path.with_name(part) for part in _parts(path.name)] if path.suffix.lower() == ".gguf" else [path]
    missing = [part.name for part in parts if not exists(part)]
    if missing:
        why = f"{len(missing)} of its {len(parts)} parts are missing: {', '.join(missing[:4])}"
        raise ModelUnreadable(f"{name} is incomplete", why, f"Put all parts into {path.parent}.")
    for part in parts:
        check_gguf(part)
    return ModelFile(name, parts[0], "gguf", origin)


def from_directory(name: str, path: Path) -> ModelFile:
    try:
        names = {entry.name for entry in path.iterdir()}
    except OSError as error:
        raise _unreadable(path, error) from error
    groups = gguf_models(names)
    if len(groups) == 1:
        return from_file(name, path / next(iter(groups.values()))[0], "directory")
    if groups:
        raise UsageError(f"{name} holds {len(groups)} models", ", ".join(groups), f"Name one: {path / next(iter(groups))}")
    if not is_transformers(names):
        raise ModelNotFound(f"{name} holds no model", "neither a .gguf file nor a config.json with .safetensors files")
    missing = missing_parts([file for file in names if file.endswith(".safetensors")])
    if missing:
        raise ModelUnreadable(f"{name} is incomplete", f"missing: {', '.join(missing[:4])}")
    return ModelFile(name, path, "directory", "directory")


def check_gguf(path: Path) -> None:
    """Fail early and in words on a file that is no GGUF; the backend would only say that it cannot load it."""
    if not path.is_file():
        raise ModelUnreadable(f"{path} is not a GGUF file", "it is not a regular file")
    try:
        with path.open("rb") as file:
            head = file.read(256)
    except OSError as error:
        raise _unreadable(path, error) from error
    if not head:
        raise ModelUnreadable(f"{path} is empty", fix="Fetch it again.")
    if not head.startswith(b"GGUF"):
        raise ModelUnreadable(f"{path} is not a GGUF file", *_what_it_looks_like(head))
    if len(head) < _HEADER_BYTES:
        raise ModelUnreadable(f"{path} is truncated", f"it ends after {len(head)} bytes", "Fetch it again.")


def _what_it_looks_like(head: bytes) -> tuple[str, str]:
    """Why it is no GGUF, and what to do."""
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") < 2**32:
        return "it looks like a safetensors file", "Give the folder that holds it and its config.json."
    if not head.strip(b"\0"):
        return "it begins with zero bytes, like a download that was not finished", "Fetch it again."
    start = head.lstrip().lower()
    for beginnings, kind, fix in _OTHER_FORMATS:
        if start.startswith(beginnings):
            return f"it looks like {kind}", fix
    return f"it begins with {head[:8]!r}", ""
