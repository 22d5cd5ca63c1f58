"""Every error a user can cause: what happened, why, what to do. Each maps to an exit code and an HTTP status."""

from __future__ import annotations


class DuoError(Exception):
    """A failure with a cause outside the program. `str()` is the one line a person reads."""

    exit_code = 1
    http_status = 500

    def __init__(self, what: str, why: str = "", fix: str = "") -> None:
        self.what, self.why, self.fix = what, why, fix
        line = what if not why else f"{what}: {why}"
        super().__init__(line if not fix else f"{line.rstrip('.')}. {fix}")


class UsageError(DuoError):
    """The request itself is wrong: a parameter out of range, an unknown name, an empty prompt."""

    exit_code = 2
    http_status = 400


class ContextOverflow(UsageError):
    """The prompt does not fit into the context."""

    def __init__(self, prompt: int, room: int, context: int) -> None:
        super().__init__(
            f"the prompt has {prompt} tokens, {prompt - room} more than fit into the context of {context}",
            fix=f"Shorten it, or raise --ctx-size to {prompt + context - room + 1} or more.",
        )
        self.prompt, self.room, self.context = prompt, room, context


class ModelNotFound(DuoError):
    """A name that leads to no file."""

    http_status = 404


class ModelUnreadable(DuoError):
    """A file that is there but cannot be used: corrupt, truncated, not a GGUF, an unsupported architecture."""


class VocabularyMismatch(DuoError):
    """Draft and target do not share a vocabulary, so token ids of one mean nothing to the other."""

    http_status = 400


class BackendMissing(DuoError):
    """An optional dependency that the chosen backend needs is not installed."""


class BackendFailure(DuoError):
    """The library underneath (llama.cpp, torch) reported an error during work."""


class OutOfMemory(BackendFailure):
    """A GPU without room for what was asked."""

    def __init__(self, what: str, need: str, free: float, total: float) -> None:
        room = f"{free / 1e9:.1f} GB of {total / 1e9:.1f} GB are free"
        super().__init__(what, f"{need}; {room}", "Lower --ctx-size, take a smaller model, or end what else uses the GPU.")
        self.free, self.total = free, total


class DownloadFailed(DuoError):
    """A model could not be fetched: no network, no such repository, no access, disk full."""


class Interrupted(DuoError):
    """The work was stopped on request (Ctrl-C, an abort callback)."""

    exit_code = 130
