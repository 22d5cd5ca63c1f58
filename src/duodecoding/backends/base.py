"""What an engine asks of a model: the two roles, as Protocols. A backend implements one or both."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from duodecoding.core import Choose
from duodecoding.sampling import Ids, Row, Sampler
from duodecoding.tree import PassNode
from duodecoding.types import SamplingParams

Pair = tuple[int, float]  # a token and how likely it is


class Vocabulary(Protocol):
    """Text <-> token ids, and what the file says about both."""

    size: int
    end_tokens: frozenset[int]  # any of them ends the answer
    chat_template: str | None
    bos_text: str
    eos_text: str

    def tokenize(self, text: str, *, special: bool, bos: bool) -> list[int]:
        """`special`: names of control tokens in the text become those tokens. `bos`: begin of text, where the model wants it."""
        ...

    def piece(self, token: int) -> bytes:
        """The bytes of one token, which may be half a character. Control tokens are empty."""
        ...

    def texts(self) -> list[str]:
        """The raw text of every token, for comparing two vocabularies."""
        ...


class Conversation(Protocol):
    """A context that a target works on: its tokens, parameters and place in the KV cache."""

    tokens: list[int]  # committed
    reused: int  # tokens of the prompt that were in the KV cache already
    sampler: Sampler

    def commit(self, tokens: Sequence[int]) -> None:
        """Append to the committed tokens and put the KV cache right."""
        ...


class Target(Protocol):
    """The model whose answer it is."""

    vocabulary: Vocabulary
    context: int  # most tokens a conversation may have
    weights_bytes: int  # that a pass reads; 0: not known
    pass_sizes: Sequence[int]  # a pass is padded to the next of these numbers of tokens; empty: to none
    engine: str  # what runs it: native, llamacpp, torch
    overlaps: bool  # does `verify` return while the pass still runs, on a processor of its own?

    def open(self, prompt: Sequence[int], params: SamplingParams) -> Conversation:
        """Start an answer. Nothing is computed yet: the first pass reads the prompt."""
        ...

    def verify(self, work: Sequence[tuple[Conversation, Sequence[PassNode]]]) -> list[Choose]:
        """One pass over each conversation's root and guesses (and committed tokens not read so far)."""
        ...

    def done(self) -> bool:
        """Has the pass that `verify` began ended? Does not wait."""
        ...

    def finish(self) -> None:
        """Wait until the pass that `verify` began has ended."""
        ...

    def abort(self) -> None:
        """Make a running pass stop early with `Interrupted`. Callable from a signal handler or another thread."""
        ...

    def close(self) -> None: ...


class Leaf(NamedTuple):
    """A node to expand: decode `token` after `parent`. The root (no parent) decodes whatever is committed and not read yet."""

    key: int
    parent: int | None
    token: int
    position: int


class Draft(Protocol):
    """The model that guesses."""

    vocabulary: Vocabulary
    context: int
    room: int  # nodes that it keeps expanded at most
    token_ids: Ids | None  # the token of each logit, ascending; None: its place, for the draft knows all tokens

    def open(self, prompt: Sequence[int], unread: int = 0) -> None:
        """Start on a new context, keeping the KV cache of the common prefix. `unread`: tokens at its beginning to leave out."""
        ...

    def read(self) -> bool:
        """Read one chunk of committed tokens that are not in the KV cache yet. False: all but the root are there."""
        ...

    def expand(self, leaves: Sequence[Leaf]) -> list[Row]:
        """One step: the logits after each leaf. A leaf's parent was expanded before (or is the root)."""
        ...

    def score(self, tokens: Sequence[int], start: int) -> Iterator[Row]:
        """Read plain text: the logits after each of `tokens[start:]`, in stretches (tokens, vocab) that the next one overwrites."""
        ...

    def stop_on(self, flag: mmap.mmap) -> None:
        """From now on a step ends early with `Interrupted`, and leaves no trace, while the first byte of `flag` is not 0."""
        ...

    def commit(self, tokens: Sequence[int], path: Sequence[int], alive: Sequence[int]) -> None:
        """`path`: keys of the expanded nodes that `tokens` begin with. `alive`: expanded nodes still in the tree. Drop the rest."""
        ...

    def close(self) -> None: ...


@runtime_checkable
class QuickDraft(Draft, Protocol):
    """A draft that finds the best guesses itself, where its logits are."""

    most_leaves: int  # of a step like that
    hottest: float  # temperature that it knows how to guess for

    def guess(self, leaves: Sequence[Leaf], k: int, floors: Sequence[float], params: SamplingParams) -> list[list[Pair]]:
        """A step as `expand` is one. After each leaf up to k tokens that the target will most likely choose, best first, and how
        likely; below the leaf's floor only the first. No penalties, no bias."""
        ...
