"""A model on our own engine: its weights handed over, a step's rows put together, a step made. Drafts and targets share it.

Committed tokens have their keys and values in "the trunk", by position; a node of a tree has a place of its own and knows its
ancestors there. Committing a path copies a few rows from one to the other.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from ctypes import c_int32
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from duodecoding.backends import native
from duodecoding.backends.gguf_file import Tensor
from duodecoding.backends.native_weights import LANES, Weights
from duodecoding.errors import BackendFailure, Interrupted
from duodecoding.sampling import Row

ROWS = 256  # tokens of a step at most
NODES = 256  # of a tree: more than one round of a large target sees
STOPPED, IMPOSSIBLE = 1, 3  # what `duo_step` returns
Line = tuple[int, ...]  # a node's ancestors in the tree and itself, as places


class Size(NamedTuple):
    """What a model is to have room for, and how it is to work."""

    context: int
    threads: int
    awake: float  # seconds that threads look for more work before they sleep. To wake them takes long once cores are at rest
    outputs: int  # logits that there is room for from the beginning
    exact: bool = False  # the same bits, however the work is put together


class NativeModel:
    def __init__(
        self, weights: Weights, library: ctypes.CDLL, size: Size, progress: Callable[[float], None] = lambda share: None
    ) -> None:
        self._library, self._handle, self._progress = library, 0, progress
        self.shape = weights.shape
        self.trunk = -(-size.context // LANES) * LANES  # its positions
        self._handle = self._load(weights, size)
        self._embeddings: Tensor | None = weights.embeddings  # stay in the file, which stays open
        self._batch = [ints(ROWS) for _ in range(4)]  # tokens, positions, places, ends
        self._starts, self._ancestors = ints(ROWS + 1), ints(ROWS * 64)
        self._make_logits(size.outputs)
        self._flag: ctypes.Array[ctypes.c_char] = ctypes.create_string_buffer(1)

    def _make_logits(self, outputs: int) -> None:
        self.logits: Row = np.zeros((outputs, self.shape.vocabulary), np.float32)
        self.rows, self._logits_at = list(self.logits), self.logits.ctypes.data

    def _load(self, weights: Weights, size: Size) -> int:
        library = self._library
        numbers = np.array([*self.shape.numbers(), self.trunk, NODES, size.exact], np.int32)
        model = library.duo_new(numbers.ctypes.data, self.shape.epsilon, weights.frequencies.ctypes.data)
        if not model:
            raise _no_memory()
        try:
            fine = self._fill(model, weights) and library.duo_start(model, size.threads, round(1e6 * size.awake))
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
            self._progress(number / weights.shape.layers)
            layer = weights.layer(number)
            fine = library.duo_norms(model, number, *map(_at, layer.norms))
            fine = fine and library.duo_extras(model, number, *map(_at, layer.extras))
            for which, matrix in enumerate(layer.matrices):
                fine = fine and self._hand_over(model, number, which, matrix)
            if not fine:
                return False
            weights.forget()
        fine = library.duo_norms(model, -1, _at(weights.last_norm), _at(weights.last_norm))
        fine = fine and self._hand_over(model, -1, 0, weights.head)
        weights.forget()
        return bool(fine)

    def _hand_over(self, model: int, layer: int, which: int, matrix: Tensor) -> bool:
        assert matrix.data is not None
        where = matrix.data.ctypes.data
        return bool(self._library.duo_matrix(model, layer, which, matrix.kind, where, matrix.rows, matrix.columns))

    def trunk_rows(self, first: int, tokens: Sequence[int], position: int) -> None:
        """Committed tokens as rows of the next step."""
        end, last = first + len(tokens), position + len(tokens)
        words, positions, places, ends = self._batch
        words[first:end] = tokens
        positions[first:end] = places[first:end] = range(position, last)
        ends[first:end] = range(position + 1, last + 1)
        self._starts[first : end + 1] = [0] * (len(tokens) + 1)

    def tree_rows(self, first: int, tokens: Sequence[int], at: Sequence[int], lines: Sequence[Line], trunk: int) -> None:
        """Nodes at the positions `at` as rows of the next step. All but their ancestors are in the trunk, `trunk` tokens long."""
        ancestors = [place for line in lines for place in line]
        end = first + len(lines)
        words, positions, places, ends = self._batch
        words[first:end] = tokens
        positions[first:end] = at
        places[first:end] = [self.trunk + line[-1] for line in lines]
        ends[first:end] = [trunk] * len(lines)
        self._starts[first + 1 : end + 1] = list(accumulate(map(len, lines)))
        if len(ancestors) > len(self._ancestors):
            self._ancestors = ints(2 * len(ancestors))
        self._ancestors[: len(ancestors)] = ancestors

    def step(self, rows: int, outputs: int, *, begin: int = 0, wanted: native.Guesses | None = None) -> None:
        """Over so many rows, none of which sees what lies before `begin`. Logits of the last `outputs`."""
        if outputs > len(self.logits):
            self._make_logits(outputs)
        code = self._library.duo_step(
            self._handle, rows, outputs, begin, *self._batch, self._starts, self._ancestors, self._logits_at,
            None if wanted is None else ctypes.byref(wanted),
        )  # fmt: skip
        if code == STOPPED:
            self._flag[0] = b"\0"
            raise Interrupted("the step was stopped")
        if code == IMPOSSIBLE:
            raise BackendFailure("our own engine cannot take this step", "a token or a position is not there")
        if code:
            raise _no_memory()

    def keep(self, places: Sequence[int], position: int) -> None:
        """Nodes become part of the trunk, at positions from `position` on."""
        if places:
            numbers = np.array(places, np.int32)
            self._library.duo_keep(self._handle, len(numbers), numbers.ctypes.data, position)

    def save(self, count: int) -> npt.NDArray[np.uint8]:
        """A copy of the trunk's first positions."""
        state = np.empty(self._library.duo_save(self._handle, count, None), np.uint8)
        self._library.duo_save(self._handle, count, state.ctypes.data)
        return state

    def restore(self, count: int, state: npt.NDArray[np.uint8]) -> None:
        self._library.duo_restore(self._handle, count, state.ctypes.data)

    def stop_on(self, flag: ctypes.Array[ctypes.c_char]) -> None:
        """While its first byte is not 0 a step ends early, with `Interrupted`."""
        self._flag = flag
        self._library.duo_stop_on(self._handle, ctypes.addressof(flag))

    def close(self) -> None:
        if self._handle:
            self._library.duo_free(self._handle)
            self._handle, self._embeddings = 0, None


def _at(numbers: npt.NDArray[np.float32] | None) -> int | None:
    return None if numbers is None else numbers.ctypes.data


def ints(count: int) -> Any:
    """For C to read. A few numbers are put into it faster than into numpy's."""
    return (c_int32 * count)()


def _no_memory() -> BackendFailure:
    return BackendFailure("our own engine got no memory", fix="Lower --ctx-size.")
