"""The KV caches of earlier conversations, kept in memory for when they go on. Copies, so every bit of them is as it was."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

WORTH = 32  # tokens; reading fewer again costs no more than a copy

Ids = npt.NDArray[np.int32]


class State(Protocol):
    """What a backend makes of its cache."""

    @property
    def nbytes(self) -> int: ...


S = TypeVar("S", bound=State)


class Kept(NamedTuple, Generic[S]):
    tokens: Ids
    state: S


class Shelf(Generic[S]):
    """Caches by their tokens. The one not used for longest goes first."""

    def __init__(self, limit: int, save: Callable[[], S], load: Callable[[S], None]) -> None:
        """`limit` in bytes. `save` copies the cache as it is; `load` puts a copy in its place."""
        self._limit, self._save, self._load = limit, save, load
        self._kept: list[Kept[S]] = []  # the last used last

    def change(self, held: Sequence[int], wanted: Sequence[int]) -> int:
        """The cache has `held` and shall have as much of `wanted` as there is. Returns how many tokens of it that are."""
        mine, theirs = np.asarray(held, dtype=np.int32), np.asarray(wanted, dtype=np.int32)
        shared = _shared(mine, theirs)
        best = max(self._kept, key=lambda kept: _shared(kept.tokens, theirs), default=None)
        found = _shared(best.tokens, theirs) if best is not None else 0
        worth_it = best is not None and found >= shared + WORTH
        if mine.size - (0 if worth_it else shared) >= WORTH and self._limit > 0:  # else nothing much is lost
            self._keep(Kept(mine, self._save()))
        if best is None or not worth_it:
            return shared
        self._load(best.state)
        self._remove(lambda kept: kept is best)
        if found < best.tokens.size:  # two conversations begin alike: the other one may go on too
            self._keep(best)
        return found

    def _keep(self, new: Kept[S]) -> None:
        if new.state.nbytes > self._limit:
            return
        self._remove(lambda kept: _shared(kept.tokens, new.tokens) == kept.tokens.size)  # the new one begins with all of it
        self._kept.append(new)
        while sum(kept.state.nbytes for kept in self._kept) > self._limit:
            del self._kept[0]

    def _remove(self, which: Callable[[Kept[S]], bool]) -> None:
        self._kept = [kept for kept in self._kept if not which(kept)]


def _shared(a: Ids, b: Ids) -> int:
    """Tokens at the beginning that are the same."""
    size = min(a.size, b.size)
    different = np.flatnonzero(a[:size] != b[:size])
    return int(different[0]) if different.size else size
