"""Models from the Hugging Face hub, or from its library's cache where the hub is out of reach."""

from __future__ import annotations

import errno
import glob
import re
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath

from duodecoding.errors import DownloadFailed, DuoError, ModelNotFound, ModelUnreadable, UsageError
from duodecoding.model_files import (
    Installed,
    ModelFile,
    from_file,
    gguf_models,
    is_transformers,
    missing_parts,
)

PREFERRED_QUANTS = ("Q4_K_M", "Q4_0", "Q8_0")
_QUANT = re.compile(r"(?<![A-Z0-9])((?:UD-)?(?:I?Q\d\w*|TQ\d_\d|MXFP4\w*|BF16|F16|F32))(?![A-Z0-9_])", re.IGNORECASE)
_API_SECONDS = 10.0
_HTTP_LIBRARIES = {"httpx", "httpx2", "httpcore", "httpcore2"}


def from_hub(name: str, repo: str, quant: str | None, offline: bool) -> ModelFile:
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
    groups = gguf_models(sizes)
    if not groups and quant is None and is_transformers(sizes):
        files = [file for file in sizes if _belongs_to_transformers(file)]
        return ModelFile(name, _download(repo, files, sizes).parent, "directory", "hub")
    if not groups:
        raise ModelNotFound(f"{repo} holds no GGUF file", fix=f"Look for a repository named like {repo}-GGUF.")
    first = _choose(groups, quant, repo)
    if first is None:
        what = f"{repo} has no {quant}" if quant else f"{repo} has {len(groups)} models and none is {' or '.join(PREFERRED_QUANTS)}"
        labels = list(_labels(groups).values())
        raise UsageError(what, f"it has {', '.join(labels)}", f"Name one: {repo}:{labels[0]}")
    return from_file(name, _download(repo, groups[first], sizes), "hub")


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
    return {first: parts for first, parts in gguf_models(names).items() if set(names).issuperset(parts)}


def _from_cache(name: str, repo: str, quant: str | None) -> ModelFile | None:
    for cached, folder, names in _snapshots():
        if cached.lower() != repo.lower():
            continue
        groups = _complete(names)
        first = _choose(groups, quant, repo)
        if first is not None:
            return from_file(name, folder / first, "hub")
        weights = [file for file in names if file.endswith(".safetensors")]
        if not groups and quant is None and is_transformers(names) and not missing_parts(weights):
            return ModelFile(name, folder, "directory", "hub")
    return None


def _not_cached(repo: str, quant: str | None) -> DownloadFailed:
    have = [name for name in installed_from_hub() if name.lower().startswith(f"{repo.lower()}:")]
    fix = f"Name one that is: {', '.join(have)}" if have else "Run once without --offline and HF_HUB_OFFLINE to fetch it."
    return DownloadFailed(f"{repo}:{quant}" if quant else repo, "it is not on this machine, and downloads are off", fix)


def installed_from_hub() -> dict[str, Installed]:
    found: dict[str, Installed] = {}
    for repo, folder, sizes in _snapshots():
        groups = _complete(sizes)
        for first, label in _labels(groups).items():
            name = f"{repo}:{label}"
            found.setdefault(name, Installed(name, "hub", folder / first, sum(sizes[part] for part in groups[first])))
    return found
