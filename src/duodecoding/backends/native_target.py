"""The target on our own engine, for a CPU: eight tokens in a pass cost it about twice as much as one, not four to five times.

Logits are the same to the bit however many tokens share a pass, in a tree or not (docs/design.md), so answers are the same in
every mode. They are not those of llama.cpp to the bit: both round what goes into a matrix to bytes, in another order.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from duodecoding import machine
from duodecoding.backends import native
from duodecoding.backends.base import Conversation, Vocabulary
from duodecoding.backends.choosing import chooser, depths_of, only_one
from duodecoding.backends.gguf_file import GgufFile
from duodecoding.backends.llamacpp import LlamaModel, physical_cores, usable_context
from duodecoding.backends.native_model import NODES, ROWS, Line, NativeModel, Size
from duodecoding.backends.native_weights import Weights
from duodecoding.backends.shelf import Shelf
from duodecoding.core import Choose
from duodecoding.errors import BackendMissing, ModelUnreadable, UsageError
from duodecoding.sampling import Sampler
from duodecoding.tree import ROOT, PassNode
from duodecoding.types import SamplingParams

OUTPUTS = 16  # logits that there is room for at first
AWAKE = 0.0001  # seconds: through the sampling of a token, not through a step of a draft that wants the same cores
STRETCH = 64  # positions that attention makes a part of
PARTS_BYTES = 64_000_000  # of attention, at most, while a prompt is read
BEYOND = 64  # positions behind the context, for guesses that go on past its end and for who measures passes
MOST_MEMORY = 0.8  # of the machine's


class Kept(NamedTuple):
    """A conversation's part of the cache."""

    tokens: int
    state: npt.NDArray[np.uint8]

    @property
    def nbytes(self) -> int:
        return self.state.nbytes


class NativeConversation:
    def __init__(self, target: NativeTarget, prompt: Sequence[int], params: SamplingParams) -> None:
        self.tokens = list(prompt)
        self.sampler = Sampler(params, prompt, target.vocabulary.size)
        self.cached = 0  # committed tokens in the trunk, always the first ones
        self.reused = 0
        self.nodes: Sequence[PassNode] = ()  # of the pass that waits for its commit
        self._target = target

    def commit(self, tokens: Sequence[int]) -> None:
        self.sampler.commit(tokens)
        places = {node: i for i, node in enumerate(self.nodes)}
        path: list[int] = []
        for token in tokens:
            found = places.get(PassNode(path[-1] if path else ROOT, token))
            if found is None:
                break
            path.append(found)
        self._target.keep(self, path)
        self.tokens.extend(tokens)
        self.nodes = ()


class NativeTarget:
    """The model whose answer it is. One conversation at a time owns the trunk; another one takes over what they share."""

    engine = "native"
    overlaps = False
    pass_sizes: Sequence[int] = ()

    def __init__(
        self,
        path: Path,
        *,
        context: int,
        threads: int = 0,
        keep_bytes: int = 0,
        library: ctypes.CDLL | None = None,
        progress: Callable[[str, float], None] = lambda what, share: None,
    ) -> None:
        """`keep_bytes`: memory for the caches of conversations that lost their place to another."""
        weights = servable(path, context)
        self.weights_bytes = weights.memory
        self._words = LlamaModel(path, vocabulary_only=True)
        if self._words.trim is not None:
            self._words.close()
            raise ModelUnreadable(f"cannot serve {path.name}", "it is a draft, which knows a part of its target's vocabulary")
        self.vocabulary: Vocabulary = self._words.vocabulary
        self.context = usable_context(weights.shape.trained_context, context)
        size = Size(self.context + BEYOND, threads or physical_cores(), AWAKE, OUTPUTS, exact=True)
        try:
            tell = partial(progress, f"loading {path.name}")
            self._model = NativeModel(weights, library or native.library(exact=True), size, tell)
        except BaseException:
            self._words.close()
            raise
        self._flag = ctypes.create_string_buffer(1)
        self._model.stop_on(self._flag)
        self._shelf = Shelf(keep_bytes, self._save, self._load)
        self._owner: NativeConversation | None = None

    def _save(self) -> Kept:
        count = self._owner.cached if self._owner is not None else 0
        return Kept(count, self._model.save(count))

    def _load(self, kept: Kept) -> None:
        self._model.restore(kept.tokens, kept.state)

    def open(self, prompt: Sequence[int], params: SamplingParams) -> NativeConversation:
        self._flag[0] = b"\0"  # a stop that came between two passes of the last answer
        conversation = NativeConversation(self, prompt, params)
        self._attach(conversation)
        conversation.reused = conversation.cached
        return conversation

    def _attach(self, conversation: NativeConversation) -> None:
        if self._owner is not conversation:
            held = self._owner.tokens[: self._owner.cached] if self._owner is not None else []
            conversation.cached = self._shelf.change(held, conversation.tokens)
            conversation.nodes = ()
            if self._owner is not None:
                self._owner.cached = 0
            self._owner = conversation
        conversation.cached = min(conversation.cached, len(conversation.tokens) - 1)

    def keep(self, conversation: NativeConversation, path: Sequence[int]) -> None:
        """These nodes of the last pass are committed now, behind all tokens so far."""
        if self._owner is conversation:
            self._model.keep(path, len(conversation.tokens))
            conversation.cached += len(path)

    def verify(self, work: Sequence[tuple[Conversation, Sequence[PassNode]]]) -> list[Choose]:
        conversation, nodes = only_one(work, NativeConversation)
        if len(nodes) >= min(NODES, ROWS):
            raise UsageError(f"a tree of {len(nodes)} nodes", f"our own engine verifies less than {min(NODES, ROWS)} at once")
        self._attach(conversation)
        self._read_ahead(conversation, ROWS - len(nodes))
        tokens = conversation.tokens
        pending = tokens[conversation.cached :]
        self._model.trunk_rows(0, pending, conversation.cached)
        if nodes:
            lines: list[Line] = []
            for i, node in enumerate(nodes):
                lines.append((*(lines[node.parent] if node.parent != ROOT else ()), i))
            positions = [len(tokens) - 1 + depth for depth in depths_of(nodes)]
            self._model.tree_rows(len(pending), [node.token for node in nodes], positions, lines, len(tokens))
        self._model.step(len(pending) + len(nodes), 1 + len(nodes))
        conversation.cached, conversation.nodes = len(tokens), nodes
        return [chooser(conversation, nodes, self._model.rows)]

    def _read_ahead(self, conversation: NativeConversation, room: int) -> None:
        """Read committed tokens until the rest fits into a pass beside the guesses."""
        shape = self._model.shape
        a_row = 4 * shape.heads * (2 + shape.head) * -(-len(conversation.tokens) // STRETCH)
        most = min(room, max(OUTPUTS, PARTS_BYTES // a_row))
        while len(conversation.tokens) - conversation.cached > most:
            start = conversation.cached
            chunk = conversation.tokens[start : min(start + most, len(conversation.tokens) - 1)]
            self._model.trunk_rows(0, chunk, start)
            self._model.step(len(chunk), 0)
            conversation.cached += len(chunk)

    def done(self) -> bool:
        return True

    def finish(self) -> None:
        pass

    def abort(self) -> None:
        self._flag[0] = b"\1"

    def close(self) -> None:
        self._model.close()
        self._words.close()


def servable(path: Path, context: int) -> Weights:
    """The weights of a target that it can serve; else BackendMissing says why not. llama.cpp leaves weights in the file and reads
    them from there again and again if it must; here they are copied. It is the machine's memory that counts, not what of it is free
    just now: another engine's answer may be another one, and must not depend on that."""
    weights = Weights(GgufFile(path), exact=True)
    shape, most = weights.shape, machine.most_memory()
    needed = weights.memory + 4 * shape.layers * shape.kv_heads * shape.head * usable_context(shape.trained_context, context)
    if most is not None and needed > MOST_MEMORY * most:
        why = f"its weights and {context} tokens of context take {needed / 1e9:.1f} of this machine's {most / 1e9:.1f} GB"
        raise BackendMissing("our own engine has no room for this target", why, "llama.cpp may: --backend llamacpp")
    return weights
