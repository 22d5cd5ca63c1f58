"""A draft model growing the tree, best leaf first. The same code in the main process, in a worker and in virtual time."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

from duodecoding.backends.base import Draft, Leaf
from duodecoding.sampling import Sampler
from duodecoding.tree import Node, Proposal, TokenTree
from duodecoding.types import SamplingParams, Source

MAX_EXPANDED = 96  # live nodes with KV cells of their own; bounds the sequences a draft must keep apart


class ModelDrafter:
    """Owns a draft backend and its own view of the tree; hands out proposals."""

    def __init__(self, draft: Draft, *, branching: int = 4, limit: int = 0) -> None:
        """`branching`: guesses kept per expanded node. `limit`: the target's vocabulary size, if smaller than the draft's."""
        self._draft = draft
        self._branching = branching
        self._vocab_limit = limit or draft.vocabulary.size
        self._keys = count(1)

    def open(self, prompt: Sequence[int], params: SamplingParams) -> None:
        self._draft.open(prompt)
        self._tree = TokenTree(prompt)
        self._sampler = Sampler(params, prompt, self._draft.vocabulary.size)
        self._expanded: dict[int, Node] = {}
        self._keys = count(1)

    def read(self) -> bool:
        """Read a chunk of the prompt. False: done, the tree can grow."""
        return self._draft.read()

    @property
    def room(self) -> int:
        """Nodes that can still be expanded before a commit makes room."""
        at_end = self._tree.position >= self._draft.context - 1
        return 0 if at_end else MAX_EXPANDED - len(self._expanded)

    def grow(self, width: int) -> list[Proposal]:
        """One draft step: expand the `width` best leaves. Empty when there is nothing (more) to expand."""
        leaves = [node for node in self._tree.frontier(min(width, self.room)) if node.position < self._draft.context - 1]
        if not leaves:
            return []
        work = [Leaf(n.key, n.parent.key if n.parent is not None else None, n.token, n.position) for n in leaves]
        rows = self._draft.expand(work)
        grown: list[Proposal] = []
        for node, row in zip(leaves, rows, strict=True):
            node.expanded = True
            self._expanded[node.key] = node
            guesses = self._sampler.guesses(row, node.position + 1, self._branching, node.path(self._tree.root))
            known = [guess for guess in guesses if guess.token < self._vocab_limit]
            grown += [Proposal(next(self._keys), node.key, guess.token, guess.p, Source.MODEL) for guess in known]
        for proposal in grown:
            self._tree.add(proposal)
        return grown

    def commit(self, tokens: Sequence[int]) -> None:
        """Re-root at the last of `tokens`; dead branches leave the KV cache."""
        path: list[int] = []
        nodes = self._tree.commit(tokens)
        for node in nodes:
            if node is None or not node.expanded:
                break
            path.append(node.key)
        root = self._tree.root
        alive = {key: node for key, node in self._expanded.items() if self._tree.holds(node)}
        self._draft.commit(tokens, path, [key for key in alive if key != root.key])
        self._expanded = alive
        self._sampler.commit(tokens)

    def close(self) -> None:
        self._draft.close()
