"""A draft model growing the tree. The same code in the main process, in a worker and in virtual time."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

from duodecoding.backends.base import Draft, Leaf, QuickDraft
from duodecoding.drafters.growth import Growth
from duodecoding.planner import Calibration
from duodecoding.sampling import Guess, Sampler
from duodecoding.tree import Node, Proposal, TokenTree
from duodecoding.types import SamplingParams, Source

# To pass a guess on costs as much for a faint one as for a good one. It must be this likely, or the path that it ends must be;
# but one that has a fair chance once its path has come true is kept.
FAINT, FAINT_PATH, FAIR = 0.005, 0.002, 0.025


class ModelDrafter:
    """Owns a draft backend, its own view of the tree, and what it has learnt about its own guesses."""

    def __init__(self, draft: Draft, *, vocab_limit: int = 0) -> None:
        """`vocab_limit`: the target's vocabulary size, if smaller than the draft's."""
        self._draft = draft
        self._quick = draft if isinstance(draft, QuickDraft) else None
        self._room = draft.room
        self._vocab_limit = vocab_limit or draft.vocabulary.size
        self._knows_more = self._vocab_limit < draft.vocabulary.size
        self.calibration = Calibration()

    @property
    def draft(self) -> Draft:
        return self._draft

    def can_read(self, tokens: Sequence[int], position: int) -> bool:
        """Are these tokens, the last of them at `position`, within the draft's vocabulary and context, with room for a guess?"""
        return position < self._draft.context - 1 and min(tokens) >= 0 and max(tokens) < self._draft.vocabulary.size

    def open(self, prompt: Sequence[int], params: SamplingParams, growth: Growth, unread: int = 0) -> None:
        """`unread`: tokens at the prompt's beginning that the model does not see."""
        self._start(prompt, unread)
        self._sampler = Sampler(params, prompt, self._draft.vocabulary.size)
        self._tree = TokenTree(prompt)
        self._growth = growth
        self._expanded: dict[int, Node] = {}
        self._said: dict[int, float] = {}  # what the draft said before calibration, by key of the guess
        self._keys = count(1)

    def _start(self, prompt: Sequence[int], unread: int) -> None:
        self._draft.open(prompt, unread)

    def number_from(self, first_key: int) -> None:
        """Keys of the guesses from now on. One answer may be opened twice, and a key never comes back."""
        self._keys = count(first_key)

    def read(self) -> bool:
        """Read a chunk of the prompt. False: done, the tree can grow."""
        return self._draft.read()

    def next_leaves(self) -> list[Node]:
        """What the next step would expand. Empty: nothing until a commit."""
        room = self._room - len(self._expanded)
        last = self._draft.context - 1
        return [node for node in self._growth.leaves(self._tree, room) if node.position < last] if room > 0 else []

    def grow(self, leaves: Sequence[Node]) -> list[Proposal]:
        """One draft step. Guesses come with calibrated probabilities."""
        grown: list[Proposal] = []
        add, keys, said, calibrated, source = self._tree.add, self._keys, self._said, self.calibration, Source.MODEL
        floors = [min(FAIR, max(FAINT, FAINT_PATH / max(self._tree.probability(node), FAINT))) for node in leaves]
        for node, least, guesses in zip(leaves, floors, self._guesses(leaves, floors), strict=True):
            node.expanded = True
            parent, children = node.key, node.children
            self._expanded[parent] = node
            for token, p in guesses[: self._growth.branching]:
                if p < least and children:
                    break  # they come best first
                key = next(keys)
                said[key] = p
                proposal = Proposal(key, parent, token, calibrated(p), source)
                add(proposal)
                grown.append(proposal)
        return grown

    def _guesses(self, leaves: Sequence[Node], _floors: Sequence[float]) -> Sequence[Sequence[tuple[int, float]]]:
        """`_floors`: below them a leaf's guesses do not count, but for the first."""
        work = [Leaf(n.key, n.parent.key if n.parent is not None else None, n.token, n.position) for n in leaves]
        found = self._quick_guesses(work, _floors) or self._guesses_from_logits(work, leaves)
        if not self._knows_more:
            return found
        return [[guess for guess in some if guess[0] < self._vocab_limit] for some in found]

    def _quick_guesses(self, work: Sequence[Leaf], floors: Sequence[float]) -> Sequence[Sequence[tuple[int, float]]]:
        """By a draft that finds them itself. Empty: it cannot."""
        quick, params = self._quick, self._sampler.params
        if quick is None or not self._sampler.plain or len(work) > quick.most_leaves or params.temperature > quick.hottest:
            return []
        return quick.guess(work, self._growth.branching, floors, params)

    def _guesses_from_logits(self, work: Sequence[Leaf], leaves: Sequence[Node]) -> list[list[Guess]]:
        root = self._tree.root if self._sampler.needs_path else None
        places = [(node.position + 1, node.path(root) if root is not None else ()) for node in leaves]
        guesses, k, ids = self._sampler.guesses, self._growth.branching, self._draft.token_ids
        rows = self._draft.expand(work)  # drives all else out of the CPU's caches: little is left to do behind it
        return [guesses(row, position, k, path, ids) for row, (position, path) in zip(rows, places, strict=True)]

    def commit(self, tokens: Sequence[int]) -> None:
        """Re-root at the last of `tokens`; dead branches leave the KV cache. Every guess below a committed token is now judged."""
        self._judge(tokens)
        path: list[int] = []
        for node in self._tree.commit(tokens):
            if node is None or not node.expanded:
                break
            path.append(node.key)
        self._expanded = {key: node for key, node in self._expanded.items() if self._tree.holds(node)}
        self._forget(tokens, path, [key for key in self._expanded if key != self._tree.root.key])
        self._sampler.commit(tokens)
        self._growth.committed(self._tree)

    def _judge(self, tokens: Sequence[int]) -> None:
        node: Node | None = self._tree.root
        for token in tokens:
            if node is None or not node.expanded:
                return
            for child in node.children.values():
                self.calibration.observe(self._said[child.key], child.token == token)
            node = node.children.get(token)

    def _forget(self, tokens: Sequence[int], path: Sequence[int], alive: Sequence[int]) -> None:
        self._draft.commit(tokens, path, alive)

    def close(self) -> None:
        self._draft.close()
