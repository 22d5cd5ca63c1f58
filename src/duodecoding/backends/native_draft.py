"""The draft on our own engine: a small model whose step takes a half to a third of what llama.cpp needs."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator, Sequence
from ctypes import c_float
from pathlib import Path

import numpy as np
import numpy.typing as npt

from duodecoding.backends import native
from duodecoding.backends.base import Leaf, Pair, Vocabulary
from duodecoding.backends.gguf_file import GgufFile
from duodecoding.backends.llamacpp import LlamaModel, common_prefix, physical_cores, usable_context
from duodecoding.backends.native_model import NODES, ROWS, Line, NativeModel, Size, ints
from duodecoding.backends.native_weights import Weights
from duodecoding.errors import Interrupted
from duodecoding.sampling import MIN_TEMPERATURE, Row
from duodecoding.types import SamplingParams

Ints = npt.NDArray[np.int32]

FEW = 16  # outputs whose likely tokens are noted beside the logits
GREEDY = SamplingParams()


class NativeDraft:
    """The model that guesses, without llama.cpp but for its tokenizer."""

    def __init__(
        self, path: Path, *, context: int, threads: int = 0, awake: float = 0.002, library: ctypes.CDLL | None = None
    ) -> None:
        """`awake`: seconds that threads look for more work before they sleep."""
        weights = Weights(GgufFile(path))
        self._words = LlamaModel(path, vocabulary_only=True)
        self.vocabulary: Vocabulary = self._words.vocabulary
        trim = self._words.trim
        self.token_ids = trim.token_ids if trim is not None else None
        self._reads: list[int] | None = trim.stand_ins.tolist() if trim is not None else None
        self.context = usable_context(weights.shape.trained_context, context)
        self.room, self.most_leaves, self.hottest = NODES, FEW, 1.0
        size = Size(self.context, threads or physical_cores(), awake, outputs=FEW)
        try:
            self._model = NativeModel(weights, library or native.library(), size)
        except BaseException:
            self._words.close()
            raise
        self._tokens: list[int] = []
        self._unread = 0  # committed tokens at the beginning that are left out
        self._cached = 0  # committed tokens behind which the trunk ends
        self._lines: dict[int, Line] = {}  # of expanded nodes
        self._free = list(range(NODES))
        self._names = self.token_ids.astype(np.int32) if self.token_ids is not None else None
        self._wanted = Wanted(GREEDY, 1, self._names)

    def open(self, prompt: Sequence[int], unread: int = 0) -> None:
        self._cached = min(common_prefix(self._tokens[: self._cached], prompt), len(prompt) - 1)
        if self._cached <= unread or self._unread > unread:  # nothing of use is there, or less than is asked for
            self._cached = self._unread = unread
        self._tokens = list(prompt)
        self._lines.clear()
        self._free = list(range(NODES))

    def read(self) -> bool:
        chunk = self._tokens[self._cached : min(self._cached + ROWS, len(self._tokens) - 1)]
        if not chunk:
            return False
        self._trunk_rows(0, chunk, self._cached)
        self._step(len(chunk), 0)
        self._cached += len(chunk)
        return self._cached < len(self._tokens) - 1

    def score(self, tokens: Sequence[int], start: int) -> Iterator[Row]:
        self.open(tokens[: start + 1])
        while self.read():
            pass
        for begin in range(start, len(tokens), ROWS):
            chunk = tokens[begin : begin + ROWS]
            self._trunk_rows(0, chunk, begin)
            self._step(len(chunk), len(chunk))
            self._tokens, self._cached = list(tokens[: begin + len(chunk)]), begin + len(chunk)
            yield self._model.logits[: len(chunk)]

    def stop_on(self, flag: mmap.mmap) -> None:
        self._model.stop_on((ctypes.c_char * 1).from_buffer(flag))

    def expand(self, leaves: Sequence[Leaf]) -> list[Row]:
        return [self._model.rows[i] for i in self._expand(leaves, None)]

    def guess(self, leaves: Sequence[Leaf], k: int, floors: Sequence[float], params: SamplingParams) -> list[list[Pair]]:
        if params is not self._wanted.params or k != self._wanted.k:
            self._wanted = Wanted(params, k, self._names)
        return [self._wanted.found(i) for i in self._expand(leaves, floors)]

    def _expand(self, leaves: Sequence[Leaf], floors: Sequence[float] | None) -> Sequence[int]:
        """A step. Which output is whose. `floors`: of the guesses that are wanted; None: only logits are."""
        while len(self._tokens) - self._cached > ROWS // 2:
            self.read()
        root = next((i for i, leaf in enumerate(leaves) if leaf.parent is None), None)
        first = 0
        if root is not None:  # its tokens come first: outputs stay at the end
            chunk = self._tokens[self._cached :]
            self._trunk_rows(0, chunk, self._cached)
            first = len(chunk)
        order = range(len(leaves)) if root is None else [*range(1, root + 1), 0, *range(root + 1, len(leaves))]
        for place, floor in zip(order, floors or (), strict=floors is not None):
            self._wanted.floors[place] = floor
        trunk = len(self._tokens)
        lines = self._tree_rows(first, [leaf for leaf in leaves if leaf.parent is not None], trunk)
        try:
            self._step(first + len(lines), len(leaves), None if floors is None else self._wanted.request)
        except Interrupted:
            self._free.extend(line[-1] for line in lines.values())
            raise
        self._lines |= lines
        if root is not None:
            self._cached, self._lines[leaves[root].key] = trunk, ()
        return order

    def _trunk_rows(self, first: int, tokens: Sequence[int], position: int) -> None:
        self._model.trunk_rows(first, self._known(tokens), position)

    def _tree_rows(self, first: int, leaves: Sequence[Leaf], trunk: int) -> dict[int, Line]:
        """Nodes as rows of the next step, and their lines."""
        lines = {leaf.key: (*self._lines.get(leaf.parent or 0, ()), self._free.pop()) for leaf in leaves}
        if lines:
            tokens, at = self._known([leaf.token for leaf in leaves]), [leaf.position for leaf in leaves]
            self._model.tree_rows(first, tokens, at, list(lines.values()), trunk)
        return lines

    def _known(self, tokens: Sequence[int]) -> Sequence[int]:
        reads = self._reads
        return tokens if reads is None else [reads[token] if 0 <= token < len(reads) else -1 for token in tokens]

    def _step(self, rows: int, outputs: int, wanted: native.Guesses | None = None) -> None:
        self._model.step(rows, outputs, begin=self._unread, wanted=wanted)

    def commit(self, tokens: Sequence[int], path: Sequence[int], alive: Sequence[int]) -> None:
        if path:
            self._model.keep(self._lines[path[-1]][-len(path) :], self._cached)
            self._cached += len(path)
        self._tokens.extend(tokens)
        kept = [*alive, path[-1]] if path and len(path) == len(tokens) else alive
        self._lines = {key: self._lines[key][len(path) :] for key in kept}
        used = {line[-1] for line in self._lines.values() if line}
        self._free = [place for place in range(NODES) if place not in used]

    def close(self) -> None:
        self._model.close()
        self._words.close()


class Wanted:
    """The guesses that are asked for with a step, and what was found."""

    def __init__(self, params: SamplingParams, k: int, names: Ints | None) -> None:
        self.params, self.k = params, k
        self.floors = (c_float * FEW)()
        self._ids, self._shares, self._counts = ints(FEW * k), (c_float * (FEW * k))(), ints(FEW)
        known = names.ctypes.data if names is not None else None
        found = [ctypes.addressof(each) for each in (self.floors, self._ids, self._shares, self._counts)]
        self.request = native.Guesses(_sampling(params), k, known, *found)

    def found(self, output: int) -> list[Pair]:
        begin = output * self.k
        end = begin + self._counts[output]
        return list(zip(self._ids[begin:end], self._shares[begin:end], strict=True))


def _sampling(params: SamplingParams) -> native.Sampling:
    temperature = 0.0 if params.greedy else max(params.temperature, MIN_TEMPERATURE)
    return native.Sampling(temperature, params.top_p, params.min_p, params.top_k, params.seed % 2**64)
