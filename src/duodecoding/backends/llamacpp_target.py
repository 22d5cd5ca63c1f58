"""The target that runs on llama.cpp: trees of guesses beside the committed tokens of one KV cache."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from duodecoding.backends.base import Conversation, Vocabulary
from duodecoding.backends.choosing import chooser, only_one
from duodecoding.backends.llamacpp import BATCH, MAX_SEQUENCES, Context, LlamaModel, usable_context
from duodecoding.backends.shelf import Shelf
from duodecoding.core import Choose
from duodecoding.errors import ModelUnreadable, UsageError
from duodecoding.sampling import Sampler
from duodecoding.tree import ROOT, PassNode
from duodecoding.types import SamplingParams

# general.file_type of Q4_0, Q4_1, Q8_0, Q5_0, Q5_1, Q4_K, Q5_K and Q6_K: their matrices have one kernel for any number of tokens.
SAME_ALONE = frozenset({2, 3, 7, 8, 9, 14, 15, 16, 17, 18})


def paths_of(nodes: Sequence[PassNode]) -> list[list[int]]:
    """For each node the sequences it belongs to, one for every leaf below it. Sequence 0 is the path that the pass begins with."""
    parents = {node.parent for node in nodes}
    paths: list[list[int]] = []  # indices from the root down to each node
    for i, node in enumerate(nodes):
        paths.append([*(paths[node.parent] if node.parent != ROOT else ()), i])
    sequences: list[list[int]] = [[] for _ in nodes]
    for number, path in enumerate(sorted(path for i, path in enumerate(paths) if i not in parents)):
        for i in path:
            sequences[i].append(number)
    return sequences


class LlamaConversation:
    def __init__(self, target: LlamaTarget, prompt: Sequence[int], params: SamplingParams) -> None:
        self.tokens = list(prompt)
        self.sampler = Sampler(params, prompt, target.vocabulary.size)
        self.cached = 0  # committed tokens in the KV cache, always the first ones and in order
        self.reused = 0
        self.nodes: Sequence[PassNode] = ()  # of the pass that waits for its commit
        self._target = target

    def commit(self, tokens: Sequence[int]) -> None:
        self.sampler.commit(tokens)
        kept = 0
        # The front of the pass lies right behind the committed cells: what was accepted of it may stay where it is.
        while kept < min(len(tokens), len(self.nodes)) and self.nodes[kept] == PassNode(kept - 1, tokens[kept]):
            kept += 1
        self.cached = len(self.tokens) + kept
        self.tokens.extend(tokens)
        if self.nodes:  # a bare pass leaves nothing to drop
            self.nodes = ()
            self._target.trim(self)


class LlamaTarget:
    """The model whose answer it is. One conversation at a time owns the KV cache; another one takes over what they share."""

    engine = "llamacpp"
    overlaps = False
    pass_sizes: Sequence[int] = ()

    def __init__(self, model: LlamaModel, *, context: int, threads: int = 0, keep_bytes: int = 0) -> None:
        """`keep_bytes`: memory for the caches of conversations that lost their place to another."""
        if model.trim is not None:
            raise ModelUnreadable(f"cannot serve {model.path.name}", "it is a draft, which knows a part of its target's vocabulary")
        model.check_can_roll_back()
        self.model = model
        self.vocabulary: Vocabulary = model.vocabulary
        self.context = usable_context(model.trained_context, context)
        self._context = Context(model, self.context, threads, exact=True)
        self._shelf = Shelf(keep_bytes, self._context.save, self._context.load)
        self.weights_bytes = model.weights_bytes
        self._owner: LlamaConversation | None = None
        self._never_alone = model.gpu_layers == 0 and self._alone_is_different()

    def _alone_is_different(self) -> bool:
        """Does this model compute a single token in another way than several? Two passes tell where the last matrix does; inside,
        rounding hides most differences."""
        if self.model.file_type not in SAME_ALONE:
            return True
        rows = []
        for tokens in (1, 2):
            self._context.decode([0] * tokens, [0] * tokens, [(i,) for i in range(tokens)], outputs=tokens)
            rows.append(self._context.logits()[0].copy())
            self._context.cut(-1, -1)
        return not np.array_equal(rows[0], rows[1])

    def open(self, prompt: Sequence[int], params: SamplingParams) -> LlamaConversation:
        self._context.clear_abort()  # one that came between two passes of the last answer
        conversation = LlamaConversation(self, prompt, params)
        self._attach(conversation)
        conversation.reused = conversation.cached
        return conversation

    def _attach(self, conversation: LlamaConversation) -> None:
        if self._owner is conversation:
            return
        held: list[int] = []
        if self._owner is not None:
            self.trim(self._owner)
            held = self._owner.tokens[: self._owner.cached]
            self._owner.cached = 0
        conversation.cached = min(self._shelf.change(held, conversation.tokens), len(conversation.tokens) - 1)
        self._owner = conversation
        self.trim(conversation)

    def trim(self, conversation: LlamaConversation) -> None:
        """Leave the committed tokens of this conversation in the cache and nothing else."""
        if self._owner is conversation:
            self._context.cut(0, conversation.cached)
            self._context.keep_only(0)

    def verify(self, work: Sequence[tuple[Conversation, Sequence[PassNode]]]) -> list[Choose]:
        conversation, nodes = only_one(work, LlamaConversation)
        return [self._pass(conversation, nodes)]

    def _pass(self, conversation: LlamaConversation, nodes: Sequence[PassNode]) -> Choose:
        self._attach(conversation)
        try:
            self._read_ahead(conversation, room=len(nodes) or 1)
            self._decode_tree(conversation, nodes)
        except BaseException:
            self.trim(conversation)
            raise
        conversation.nodes = nodes
        return chooser(conversation, nodes, self._context.logits())

    def _read_ahead(self, conversation: LlamaConversation, room: int) -> None:
        """Decode committed tokens without logits until the rest fits into one pass with `room` guesses."""
        while len(conversation.tokens) - conversation.cached > BATCH - room:
            start = conversation.cached
            chunk = conversation.tokens[start : min(start + BATCH, len(conversation.tokens) - 1)]
            self._context.decode(chunk, range(start, start + len(chunk)), [(0,)] * len(chunk), outputs=0)
            conversation.cached += len(chunk)

    def _decode_tree(self, conversation: LlamaConversation, nodes: Sequence[PassNode]) -> None:
        start, end = conversation.cached, len(conversation.tokens)
        if not nodes and not self._never_alone:
            self._context.decode(conversation.tokens[start:], range(start, end), [(0,)] * (end - start), outputs=1)
            return
        paths = paths_of(nodes)
        every = sorted({sequence for ids in paths for sequence in ids}) or [0]
        if len(every) > MAX_SEQUENCES:
            raise UsageError(f"a tree with {len(every)} paths", f"llama.cpp verifies at most {MAX_SEQUENCES} at once")
        for sequence in every[1:]:
            self._context.copy(0, sequence, start)
        positions = list(range(start, end))
        for node in nodes:
            positions.append(end if node.parent == ROOT else positions[end - start + node.parent] + 1)
        tokens = conversation.tokens[start:] + [node.token for node in nodes]
        sequences: list[Sequence[int]] = [*([every] * (end - start)), *paths]
        alone = self._never_alone and not nodes  # one row of logits, however many tokens: the last layer works on those alone
        if alone:
            tokens, positions, sequences = tokens + tokens[-1:], positions + positions[-1:], [*sequences, (1,)]
        self._context.decode(tokens, positions, sequences, outputs=1 + (len(nodes) or alone))
        if alone:
            self._context.cut(1, -1)

    def done(self) -> bool:
        return True

    def finish(self) -> None:
        pass

    def abort(self) -> None:
        self._context.abort()

    def close(self) -> None:
        self._context.close()
        self.model.close()
