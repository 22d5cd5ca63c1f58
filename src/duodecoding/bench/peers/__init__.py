"""Other ways to run the same weights, measured in the same run. Each is imported when it is first chosen.

A peer that cannot take part says why with `BackendMissing`, and the benchmark goes on without it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from duodecoding.backends.base import Target
from duodecoding.errors import UsageError
from duodecoding.types import EngineConfig, SamplingParams

Said = dict[str, Any]  # the fields of `metrics.Answer` that are about the answer itself


class Contender(Protocol):
    """Who can be asked: a mode of ours or a peer."""

    name: str
    per_task: int  # questions of each task that it gets; 0: all

    def answer(self, prompt: Sequence[int], params: SamplingParams) -> Said:
        """From a cold start: nothing of an earlier prompt is reused."""
        ...

    def abort(self) -> None:
        """Make a running answer stop early, if that is possible. Callable from another thread."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Ground:
    """What peers build on: the same weights as ours."""

    target: Target
    target_file: Path
    draft_file: Path | None
    config: EngineConfig
    per_task: int = 0
    loaded: dict[str, Any] = field(default_factory=dict)  # what several peers share


Create = Callable[[Ground], Contender]


def _transformers(kind: str, ground: Ground) -> Contender:
    from duodecoding.bench.peers import transformers

    return transformers.create(kind, ground)


def _llama_server(ground: Ground) -> Contender:
    from duodecoding.bench.peers import llama_server

    return llama_server.create(ground)


PEERS: dict[str, Create] = {
    "transformers": partial(_transformers, "eager"),
    "transformers-compiled": partial(_transformers, "compiled"),
    "transformers-assisted": partial(_transformers, "assisted"),
    "transformers-lookup": partial(_transformers, "lookup"),
    "llama-server": _llama_server,
}


def check(names: Sequence[str]) -> None:
    for name in names:
        if name not in PEERS:
            raise UsageError(f"unknown peer {name!r}", f"the peers are {', '.join(PEERS)}")
