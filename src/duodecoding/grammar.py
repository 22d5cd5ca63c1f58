"""Answers that follow a JSON Schema: which tokens may come next, by llguidance.

What is allowed after a path of guesses depends on that path and on nothing else, so speculation stays exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from duodecoding.errors import BackendMissing, UsageError

if TYPE_CHECKING:
    from llguidance import LLMatcher
    from llguidance._lib import JsonCompileOptions

    from duodecoding.backends.base import Vocabulary

# As most JSON is written. Were whitespace free, a small model could go on with it for ever.
_LAYOUT: JsonCompileOptions = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class _Tokenizer:
    """A vocabulary as llguidance wants to see it."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self.tokens = [vocabulary.piece(token) for token in range(vocabulary.size)]
        self.special_token_ids = [token for token, piece in enumerate(self.tokens) if not piece]
        self.eos_token_id = min(vocabulary.end_tokens)

    def __call__(self, text: bytes) -> list[int]:
        return self._vocabulary.tokenize(text.decode("utf-8", "replace"), special=False, bos=False)


class Grammars:
    """JSON Schemas for one vocabulary. The first takes a moment: llguidance walks through all tokens."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        if find_spec("llguidance") is None:
            fix = "Run: pip install 'duodecoding[server]'"
            raise BackendMissing("cannot follow a JSON Schema", "llguidance is not installed", fix)
        if not vocabulary.end_tokens:
            raise UsageError("cannot follow a JSON Schema", "this model has no token that ends an answer")
        from llguidance import LLTokenizer, TokenizerWrapper

        self._vocabulary = vocabulary
        self._tokenizer = LLTokenizer(TokenizerWrapper(_Tokenizer(vocabulary)), eos_token=sorted(vocabulary.end_tokens))

    def constraint(self, schema: str) -> JsonConstraint:
        """What an answer may be, by a JSON Schema as JSON text."""
        from llguidance import LLMatcher

        try:
            grammar = LLMatcher.grammar_from_json_schema(schema, overrides=_LAYOUT)
        except ValueError as error:
            raise UsageError("cannot follow this JSON Schema", _first_line(error)) from error
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0)
        if matcher.is_error():
            raise UsageError("cannot follow this JSON Schema", _first_line(matcher.get_error()))
        constraint = JsonConstraint(matcher, self._vocabulary)
        constraint.allowed(())  # some schemas admit nothing, which shows only here
        return constraint


class JsonConstraint:
    """The tokens that may come next in one answer."""

    def __init__(self, matcher: LLMatcher, vocabulary: Vocabulary) -> None:
        self._matcher, self._ends = matcher, vocabulary.end_tokens
        self._bits = np.zeros((vocabulary.size + 31) // 32, dtype=np.int32)
        self._size = vocabulary.size
        self._ahead: list[int] = []  # tokens that the matcher has read beyond the committed ones
        self._ended = False

    def commit(self, tokens: Sequence[int]) -> None:
        self._ended = self._ended or not self._ends.isdisjoint(tokens)
        if not self._ended:
            self._read(tokens)
            self._ahead = []

    def allowed(self, path: Sequence[int]) -> npt.NDArray[np.bool_]:
        """For every token whether it may follow the committed ones and `path`."""
        if self._ended or not self._ends.isdisjoint(path):  # whatever follows an end is cut off
            return np.isin(np.arange(self._size), list(self._ends))
        self._read(path)
        self._matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
        if self._matcher.is_error():
            raise UsageError("cannot follow this JSON Schema any further", _first_line(self._matcher.get_error()))
        return np.unpackbits(self._bits.view(np.uint8), bitorder="little")[: self._size].astype(np.bool_)

    def _read(self, path: Sequence[int]) -> None:
        """Bring the matcher to the end of `path`; mostly it has read all but the last token of it already."""
        same = 0
        while same < min(len(path), len(self._ahead)) and path[same] == self._ahead[same]:
            same += 1
        self._matcher.rollback(len(self._ahead) - same)
        self._matcher.consume_tokens(list(path[same:]))
        self._ahead = list(path)


def _first_line(error: object) -> str:
    return str(error).strip().splitlines()[0][:300]
