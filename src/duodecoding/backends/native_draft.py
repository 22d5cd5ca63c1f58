"""The draft on our own engine: a small Llama whose step takes a half to a third of what llama.cpp needs.

Committed tokens have their keys and values in "the trunk", by position; an expanded node has a place in "the tree" and knows its
ancestors there. Committing a path copies a few rows from one to the other.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator, Sequence
from ctypes import c_float, c_int32
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from duodecoding.backends import native
from duodecoding.backends.base import Leaf, Pair, Vocabulary
from duodecoding.backends.gguf_file import GgufFile, Tensor
from duodecoding.backends.llamacpp import LlamaModel, common_prefix, physical_cores, usable_context
from duodecoding.backends.native_weights import LANES, Weights
from duodecoding.errors import BackendFailure, Interrupted
from duodecoding.sampling import MIN_TEMPERATURE, Row
from duodecoding.types import SamplingParams

Ints = npt.NDArray[np.int32]

ROWS = 256  # tokens of a step at most
NODES = 256  # of a tree, expanded: more than one round of a large target sees
FEW = 16  # outputs whose likely tokens are noted beside the logits
GREEDY = SamplingParams()
STOPPED, IMPOSSIBLE = 1, 3  # what `duo_step` returns


class NativeDraft:
    """The model that guesses, without llama.cpp but for its tokenizer."""

    def __init__(
        self, path: Path, *, context: int, threads: int = 0, awake: float = 0.002, library: ctypes.CDLL | None = None
    ) -> None:
        """`awake`: seconds that threads look for more work before they sleep. To wake them takes long once cores are at rest."""
        weights = Weights(GgufFile(path))
        self._words = LlamaModel(path, vocabulary_only=True)
        self.vocabulary: Vocabulary = self._words.vocabulary
        trim = self._words.trim
        self.token_ids = trim.token_ids if trim is not None else None
        self._reads: list[int] | None = trim.stand_ins.tolist() if trim is not None else None
        self.context = usable_context(self._words, context)
        self.room, self.most_leaves, self.hottest = NODES, FEW, 1.0
        self._library, self._weights = library or native.library(), weights
        self._model = self._load(weights, threads or physical_cores(), round(1e6 * awake))
        self._tokens: list[int] = []
        self._unread = 0  # committed tokens at the beginning that are left out
        self._cached = 0  # committed tokens behind which the trunk ends
        self._lines: dict[int, tuple[int, ...]] = {}  # expanded node -> its ancestors and itself, as places in the tree
        self._free = list(range(NODES))
        self._batch = [_ints(ROWS) for _ in range(4)]  # tokens, positions, places, ends
        self._starts, self._ancestors = _ints(ROWS + 1), _ints(ROWS * 64)
        self._logits = np.zeros((LANES, self._vocab), np.float32)
        self._rows, self._logits_at = list(self._logits), self._logits.ctypes.data
        self._names = self.token_ids.astype(np.int32) if self.token_ids is not None else None
        self._wanted = Wanted(GREEDY, 1, self._names)
        self._flag: ctypes.Array[ctypes.c_char] = ctypes.create_string_buffer(1)

    def _load(self, weights: Weights, threads: int, awake: int) -> int:
        shape, library = weights.shape, self._library
        self._vocab = shape.vocabulary
        self._room = -(-self.context // LANES) * LANES  # positions of the trunk
        numbers = np.array([*shape.numbers(), self._room, NODES], np.int32)
        model = library.duo_new(numbers.ctypes.data, shape.epsilon, weights.frequencies.ctypes.data)
        if not model:
            raise _no_memory()
        try:
            fine = self._fill(model, weights) and library.duo_start(model, threads, awake)
        except BaseException:
            library.duo_free(model)
            raise
        if not fine:
            library.duo_free(model)
            raise _no_memory()
        words = weights.embeddings
        assert words.data is not None
        library.duo_embeddings(model, words.kind, words.data.ctypes.data)
        return int(model)

    def _fill(self, model: int, weights: Weights) -> bool:
        """Copy the weights into the model, but for the embeddings, which stay where they are. False: no memory."""
        library = self._library
        for number in range(weights.shape.layers):
            layer = weights.layer(number)
            fine = library.duo_norms(model, number, *map(_at, layer.norms))
            fine = fine and library.duo_extras(model, number, *map(_at, layer.extras))
            for which, matrix in enumerate(layer.matrices):
                fine = fine and self._hand_over(model, number, which, matrix)
            if not fine:
                return False
        fine = library.duo_norms(model, -1, _at(weights.last_norm), _at(weights.last_norm))
        return bool(fine) and self._hand_over(model, -1, 0, weights.head)

    def _hand_over(self, model: int, layer: int, which: int, matrix: Tensor) -> bool:
        assert matrix.data is not None
        where = matrix.data.ctypes.data
        return bool(self._library.duo_matrix(model, layer, which, matrix.kind, where, matrix.rows, matrix.columns))

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
            yield self._logits[: len(chunk)]

    def stop_on(self, flag: mmap.mmap) -> None:
        self._flag = (ctypes.c_char * 1).from_buffer(flag)
        self._library.duo_stop_on(self._model, ctypes.addressof(self._flag))

    def expand(self, leaves: Sequence[Leaf]) -> list[Row]:
        return [self._rows[i] for i in self._expand(leaves, None)]

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
        """Committed tokens as rows of the next step."""
        end, last = first + len(tokens), position + len(tokens)
        words, positions, places, ends = self._batch
        words[first:end] = self._known(tokens)
        positions[first:end] = places[first:end] = range(position, last)
        ends[first:end] = range(position + 1, last + 1)
        self._starts[first : end + 1] = [0] * (len(tokens) + 1)

    def _tree_rows(self, first: int, leaves: Sequence[Leaf], trunk: int) -> dict[int, tuple[int, ...]]:
        """Nodes as rows of the next step, and their lines. All but a row's ancestors are in the trunk, `trunk` tokens long."""
        lines = {leaf.key: (*self._lines.get(leaf.parent or 0, ()), self._free.pop()) for leaf in leaves}
        if not lines:
            return lines
        ancestors = [place for line in lines.values() for place in line]
        end = first + len(leaves)
        tokens, positions, places, ends = self._batch
        tokens[first:end] = self._known([leaf.token for leaf in leaves])
        positions[first:end] = [leaf.position for leaf in leaves]
        places[first:end] = [self._room + line[-1] for line in lines.values()]
        ends[first:end] = [trunk] * len(leaves)
        self._starts[first + 1 : end + 1] = list(accumulate(map(len, lines.values())))
        if len(ancestors) > len(self._ancestors):
            self._ancestors = _ints(2 * len(ancestors))
        self._ancestors[: len(ancestors)] = ancestors
        return lines

    def _known(self, tokens: Sequence[int]) -> Sequence[int]:
        reads = self._reads
        return tokens if reads is None else [reads[token] if 0 <= token < len(reads) else -1 for token in tokens]

    def _step(self, rows: int, outputs: int, wanted: native.Guesses | None = None) -> None:
        if outputs > len(self._logits):
            self._logits = np.zeros((outputs, self._vocab), np.float32)
            self._rows, self._logits_at = list(self._logits), self._logits.ctypes.data
        code = self._library.duo_step(
            self._model, rows, outputs, self._unread, *self._batch, self._starts, self._ancestors, self._logits_at,
            None if wanted is None else ctypes.byref(wanted),
        )  # fmt: skip
        if code == STOPPED:
            self._flag[0] = b"\0"
            raise Interrupted("the step was stopped")
        if code == IMPOSSIBLE:
            raise BackendFailure("our own draft engine cannot take this step", "a token or a position is not there")
        if code:
            raise _no_memory()

    def commit(self, tokens: Sequence[int], path: Sequence[int], alive: Sequence[int]) -> None:
        if path:
            places = np.array(self._lines[path[-1]][-len(path) :], np.int32)
            self._library.duo_keep(self._model, len(path), places.ctypes.data, self._cached)
            self._cached += len(path)
        self._tokens.extend(tokens)
        kept = [*alive, path[-1]] if path and len(path) == len(tokens) else alive
        self._lines = {key: self._lines[key][len(path) :] for key in kept}
        used = {line[-1] for line in self._lines.values() if line}
        self._free = [place for place in range(NODES) if place not in used]

    def close(self) -> None:
        if self._model:
            self._library.duo_free(self._model)
            self._model = 0
            self._words.close()


def _at(numbers: npt.NDArray[np.float32] | None) -> int | None:
    return None if numbers is None else numbers.ctypes.data


def _ints(count: int) -> Any:
    """For C to read. A few numbers are put into it faster than into numpy's."""
    return (c_int32 * count)()


class Wanted:
    """The guesses that are asked for with a step, and what was found."""

    def __init__(self, params: SamplingParams, k: int, names: Ints | None) -> None:
        self.params, self.k = params, k
        self.floors = (c_float * FEW)()
        self._ids, self._shares, self._counts = _ints(FEW * k), (c_float * (FEW * k))(), _ints(FEW)
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


def _no_memory() -> BackendFailure:
    return BackendFailure("our own draft engine got no memory", fix="Lower --ctx-size.")
