"""The draft that runs on llama.cpp: a tree of guesses in one KV cache."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence

from duodecoding.backends.base import Leaf, Vocabulary
from duodecoding.backends.llamacpp import BATCH, Context, LlamaModel, common_prefix, usable_context
from duodecoding.errors import Interrupted
from duodecoding.sampling import Row

DRAFT_SEQUENCES = 97  # paths: a node that is expanded, or the trunk, ends each. Every one costs time in every pass


class LlamaDraft:
    """The model that guesses. Every path of expanded nodes has a sequence; a fork copies the cells' names, not the cells.

    To name a cell takes a tenth of a microsecond, and a context has thousands: a path that dies keeps its names in the context,
    and whoever takes over its sequence copies the rest.
    """

    def __init__(self, model: LlamaModel, *, context: int, threads: int = 0, exact: bool = False) -> None:
        """`exact`: guesses do not depend on the order of the work. Nothing but virtual time's reproducibility needs that."""
        model.check_can_roll_back()
        self.model = model
        self.vocabulary: Vocabulary = model.vocabulary
        self.token_ids = model.trim.token_ids if model.trim is not None else None
        self.context = usable_context(model.trained_context, context)
        self._context = Context(model, self.context, threads, exact=exact, sequences=DRAFT_SEQUENCES)
        self.room = DRAFT_SEQUENCES - 1
        self._exact = exact
        self._tokens: list[int] = []
        self._unread = 0  # committed tokens at the beginning that are left out
        self._cached = 0  # committed tokens behind which the KV cache ends
        self._trunk = 0  # the sequence that holds them
        self._sequence: dict[int, int] = {}  # expanded node -> its path's sequence
        self._end = {self._trunk: 0}  # sequence -> position behind its last cell
        self._free = dict.fromkeys(range(1, DRAFT_SEQUENCES), 0)  # sequence -> how many committed tokens it holds nevertheless

    def open(self, prompt: Sequence[int], unread: int = 0) -> None:
        self._cached = min(common_prefix(self._tokens[: self._cached], prompt), len(prompt) - 1)
        fits = self._unread == unread if self._exact else self._unread <= unread
        if self._cached <= unread or not fits:  # nothing of use is there, or less than is asked for
            self._cached = self._unread = unread
            self._context.cut(-1, 0)
        self._tokens = list(prompt)
        self._sequence.clear()
        self._drop_sequences(self._cached)
        self._free = {sequence: min(held, self._cached) for sequence, held in self._free.items()}

    def read(self) -> bool:
        start = self._cached
        chunk = self._tokens[start : min(start + BATCH // 2, len(self._tokens) - 1)]
        if not chunk:
            return False
        self._context.decode_apart(chunk, range(start, start + len(chunk)), [self._trunk] * len(chunk), outputs=0)
        self._cached += len(chunk)
        self._end[self._trunk] = self._cached
        return self._cached < len(self._tokens) - 1

    def score(self, tokens: Sequence[int], start: int) -> Iterator[Row]:
        self.open(tokens[: start + 1])
        while self.read():
            pass
        for begin in range(start, len(tokens), BATCH // 2):
            chunk = tokens[begin : begin + BATCH // 2]
            self._context.decode_apart(chunk, range(begin, begin + len(chunk)), [self._trunk] * len(chunk), outputs=len(chunk))
            self._tokens, self._cached = list(tokens[: begin + len(chunk)]), begin + len(chunk)
            yield self._context.logits()

    def stop_on(self, flag: mmap.mmap) -> None:
        self._context.stop_on(flag)

    def expand(self, leaves: Sequence[Leaf]) -> list[Row]:
        while len(self._tokens) - self._cached > BATCH // 2:
            self.read()
        before = self._cached, dict(self._sequence), dict(self._end)
        tokens: list[int] = []
        positions: list[int] = []
        sequences: list[int] = []
        root = next((i for i, leaf in enumerate(leaves) if leaf.parent is None), None)
        if root is not None:  # its tokens come first: outputs stay at the end
            tokens, positions = self._tokens[self._cached :], list(range(self._cached, len(self._tokens)))
            sequences = [self._trunk] * len(tokens)
            self._sequence[leaves[root].key] = self._trunk
            self._cached = self._end[self._trunk] = len(self._tokens)
        for key, parent, token, position in leaves:
            if parent is not None:
                self._sequence[key] = sequence = self._place(parent, position)
                self._end[sequence] = position + 1
                tokens.append(token)
                positions.append(position)
                sequences.append(sequence)
        try:
            self._context.decode_apart(tokens, positions, sequences, outputs=len(leaves))
        except Interrupted:
            self._undo(*before)
            raise
        rows = self._context.rows()
        return [*rows[1 : root + 1], rows[0], *rows[root + 1 :]] if root else rows

    def _undo(self, cached: int, sequence: dict[int, int], end: dict[int, int]) -> None:
        """Back to before a step that was broken off."""
        for number in self._end:
            self._context.cut(number, end.get(number, cached))
        self._free |= dict.fromkeys(self._end.keys() - end, cached)
        self._cached, self._sequence, self._end = cached, sequence, end

    def _place(self, parent: int, position: int) -> int:
        """The sequence for a node at `position`: its parent's if that ends there, else a new one forked off."""
        sequence = self._sequence[parent]
        if self._end[sequence] == position:
            return sequence
        fork, held = self._free.popitem()
        self._context.copy(sequence, fork, position, held)
        return fork

    def commit(self, tokens: Sequence[int], path: Sequence[int], alive: Sequence[int]) -> None:
        held = self._cached  # by every path
        if path:
            self._trunk = self._sequence[path[-1]]
            self._cached += len(path)
        self._tokens.extend(tokens)
        kept = [*alive, path[-1]] if path and len(path) == len(tokens) else alive
        self._sequence = {key: self._sequence[key] for key in kept}
        self._drop_sequences(held)

    def _drop_sequences(self, held: int) -> None:
        """Forget the paths that no expanded node is on, but for the `held` committed tokens that each begins with. What lies behind
        the committed tokens of a bare trunk is dead too."""
        used = set(self._sequence.values())
        dead = self._end.keys() - used - {self._trunk}
        if not used and held == self._cached:
            self._context.cut(-1, held)  # all at once
        else:
            for sequence in dead:
                self._context.cut(sequence, held)
            if self._trunk not in used:
                self._context.cut(self._trunk, self._cached)
        if self._trunk not in used:
            self._end[self._trunk] = self._cached
        for sequence in dead:
            del self._end[sequence]
            self._free[sequence] = held

    def close(self) -> None:
        self._context.close()
        self.model.close()
