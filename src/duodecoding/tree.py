"""TokenTree: the guesses that hang under the last committed token. Pure.

A node is named by a key that its maker chose and that never repeats. A late message about a pruned node is therefore harmless:
its parent is unknown and it is ignored. The committed token at position p is named by the key -p, so that guesses can be hung
under a token that nobody had guessed.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from math import log
from operator import attrgetter
from typing import NamedTuple

from duodecoding.types import Source

ROOT = -1
LEAST = 1e-9  # probability of a guess
LEAST_LOG = math.log(LEAST)
SURER = 0.03  # a second opinion counts if it is that much higher (logarithm of a probability): all below the node has to be told
# What is left of a guess that needs no model where the draft model has spoken (docs/log.md): the model names most of what is right.
BESIDE_MODEL = {Source.LOOKUP: 0.25, Source.RECYCLING: 0.05}
_likelihood = attrgetter("logp")


class PassNode(NamedTuple):
    """One guess in a target pass. `parent` is an index into the same pass, or ROOT; parents come before children."""

    parent: int
    token: int


class Proposal(NamedTuple):
    """A guess on its way into a tree: `token` follows the node or committed position `parent` with probability `p`."""

    key: int
    parent: int
    token: int
    p: float
    source: Source


def either(p: float, q: float) -> float:
    """The chance of what two witnesses say who do not know of each other."""
    return 1 - (1 - p) * (1 - q)


class Node:
    """One guess. A plain class rather than a dataclass: compiled, its fields are those of a struct."""

    __slots__ = ("beside", "children", "expanded", "key", "logp", "named", "parent", "position", "source", "token")

    def __init__(
        self,
        key: int,
        parent: Node | None,
        token: int,
        logp: float,
        position: int,
        source: Source,
        named: float = 0.0,
        beside: float = 0.0,
    ) -> None:
        self.key = key
        self.parent = parent
        self.token = token
        self.logp = logp  # of the path from the root that was current when the node came
        self.position = position  # index of the token in the context
        self.source = source
        self.named = named  # its chance if its parent is right, by the draft model alone
        self.beside = beside  # and by the surest of the others, where the model has spoken
        self.expanded = False
        self.children: dict[int, Node] = {}

    def path(self, root: Node) -> list[int]:
        """Tokens from just below `root` down to this node."""
        tokens: list[int] = []
        node: Node | None = self
        while node is not None and node is not root:
            tokens.append(node.token)
            node = node.parent
        return tokens[::-1]


class TokenTree:
    """Grown by drafters, pruned by the target."""

    def __init__(self, tokens: Sequence[int]) -> None:
        """`tokens`: what is committed, not empty. The last one is the root."""
        self.tokens = list(tokens)
        self.root = Node(-self.position, None, self.tokens[-1], 0.0, self.position, Source.TARGET)
        self._live: dict[int, Node] = {}  # guesses by key
        self._also: dict[int, Node] = {}  # the same by other keys: two drafters may know one node
        self._nodes: list[Node] = []  # the same without their keys; parents come before their children
        self._passed: dict[int, int] = {}  # guesses that were committed: key -> position
        # Heap of unexpanded nodes, most likely first; stale entries are skipped. None: not asked for since the last commit.
        self._open: list[tuple[float, int, Node]] | None = None
        self._count = 0

    def __len__(self) -> int:
        """Guesses alive."""
        return len(self._nodes)

    @property
    def position(self) -> int:
        """Index of the root in the context."""
        return len(self.tokens) - 1

    def probability(self, node: Node) -> float:
        """That the target's answer goes through this node, as far as the drafters know."""
        return math.exp(node.logp - self.root.logp)

    def probabilities(self, nodes: Sequence[Node]) -> list[float]:
        """The same for many."""
        start, exp = self.root.logp, math.exp
        return [exp(node.logp - start) for node in nodes]

    def holds(self, node: Node) -> bool:
        """Is the node the root or below it?"""
        return node is self.root or self._live.get(node.key) is node

    def find(self, key: int) -> Node | None:
        """The root or a live guess by its key."""
        if key == self.root.key or -key == self.position or self._passed.get(key) == self.position:
            return self.root
        return self._live.get(key) or self._also.get(key)

    def add(self, proposal: Proposal) -> Node | None:
        """Hang a guess into the tree. None if its parent is gone. The same token under the same parent is one node. Who named it
        counts, not in which order: the draft model and somebody else are two witnesses, of two others the surer one is believed."""
        key, under, token, p, source = proposal
        parent = self._live.get(under) or self._also.get(under) or self._home(proposal)
        if parent is None:
            return None
        if source is Source.MODEL:
            named, beside = p, 0.0
            if not parent.expanded and parent.children:
                self._doubt(parent)
        else:
            named, beside = 0.0, p * BESIDE_MODEL[source]
            p = beside if parent.expanded else p
        node = parent.children.get(token)
        if node is not None:
            return self._confirm(node, parent, proposal, named, beside)
        logp = parent.logp + (log(p) if p > LEAST else LEAST_LOG)
        node = parent.children[token] = Node(key, parent, token, logp, parent.position + 1, source, named, beside)
        self._nodes.append(node)
        self._live[key] = node
        if self._open is not None:
            self._push(node)
        return node

    def _confirm(self, node: Node, parent: Node, proposal: Proposal, named: float, beside: float) -> Node:
        """Somebody names what was named before. The surer one is called its source."""
        known = named > 0 or parent.expanded  # does the draft model's word count?
        surer = max(named, beside) > max(node.named, node.beside) if known else proposal.p > math.exp(node.logp - parent.logp)
        node.named, node.beside = max(node.named, named), max(node.beside, beside)
        chance = either(node.named, node.beside) if known else proposal.p
        logp = parent.logp + (log(chance) if chance > LEAST else LEAST_LOG)
        if logp > node.logp + SURER:
            self._move(node, logp)
        if surer:
            node.source = proposal.source
        self._also[proposal.key] = node
        return node

    def _doubt(self, parent: Node) -> None:
        """The draft model is about to say what follows `parent`. What others said counts for less then, with all below it."""
        for child in parent.children.values():
            if child.named == 0:
                self._move(child, parent.logp + (log(child.beside) if child.beside > LEAST else LEAST_LOG))

    def _move(self, node: Node, logp: float) -> None:
        """A node is likelier or less likely than was thought, and so is all below it."""
        if logp == node.logp:  # it has its place in the heap already
            return
        more, node.logp = logp - node.logp, logp
        if node.children:
            for below in self._below(node):
                assert below.parent is not None
                below.logp = min(below.logp + more, below.parent.logp)  # never likelier than its parent, though sums are rounded
            self._open = None
        else:
            self._push(node)

    def _home(self, proposal: Proposal) -> Node | None:
        """The root, if a guess hangs under it by another name. A late one that was right is remembered as committed."""
        key = proposal.parent
        position = -key if key <= 0 else self._passed.get(key)
        if position is None:
            return None
        if position < self.position and self.tokens[position + 1] == proposal.token:
            self._passed[proposal.key] = position + 1
        return self.root if position == self.position else None

    def frontier(self, width: int) -> list[Node]:
        """The `width` unexpanded nodes of highest path probability, the root included."""
        found = [self.root] if width > 0 and not self.root.expanded else []
        wanted = width - len(found)
        taken = []
        if self._open is None:
            self._open = []
            for node in self._below(self.root):
                self._push(node)
        while self._open and wanted > 0:
            entry = heapq.heappop(self._open)
            node = entry[2]
            if node.expanded or entry[0] != -node.logp:
                continue
            taken.append(entry)
            found.append(node)
            wanted -= 1
        for entry in taken:
            heapq.heappush(self._open, entry)
        return found

    def select(self, limit: int, floor: float = 0.0) -> list[Node]:
        """The `limit` nodes of highest path probability, none below `floor`, best first. Parents come before their children."""
        nodes = self._nodes
        if floor > 0:
            lowest = self.root.logp + math.log(floor)
            nodes = [node for node in nodes if node.logp >= lowest]
        return sorted(nodes, key=_likelihood, reverse=True)[:limit]

    def likeliest_path(self, limit: int) -> list[Node]:
        """From the root down, always to the likeliest child."""
        path: list[Node] = []
        node = self.root
        while node.children and len(path) < limit:
            node = max(node.children.values(), key=lambda child: child.logp)
            path.append(node)
        return path

    def commit(self, tokens: Sequence[int]) -> list[Node | None]:
        """Re-root at the last of `tokens`, keep what hangs below it, drop the rest. Returns the node of each token, or None."""
        if tokens and not self._live and not self.root.children:  # nothing was guessed
            self.tokens.extend(tokens)
            self.root = Node(-self.position, None, self.tokens[-1], 0.0, self.position, Source.TARGET)
            return [None] * len(tokens)
        path: list[Node | None] = []
        node: Node | None = self.root
        for token in tokens:
            node = node.children.get(token) if node is not None else None
            path.append(node)
        self.tokens.extend(tokens)
        self.root = node or Node(-self.position, None, self.tokens[-1], 0.0, self.position, Source.TARGET)
        self.root.parent = None
        self._prune(path)
        return path

    def _prune(self, path: Sequence[Node | None]) -> None:
        """Forget all but the live nodes and those just committed."""
        self._nodes = alive = list(self._below(self.root))
        self._live = live = {node.key: node for node in alive}
        passed = {node.key: node.position for node in path if node is not None}
        self._passed |= passed
        also, self._also = self._also, {}
        for key, node in also.items():
            if live.get(node.key) is node:
                self._also[key] = node
            elif node.key in passed:
                self._passed[key] = passed[node.key]
        self._open = None

    def _push(self, node: Node) -> None:
        if self._open is not None:
            self._count += 1
            heapq.heappush(self._open, (-node.logp, self._count, node))

    def _below(self, node: Node) -> Iterator[Node]:
        """Parents before their children."""
        level = [node]
        while level:
            level = [child for node in level if node.children for child in node.children.values()]
            yield from level


def as_pass(nodes: Sequence[Node]) -> tuple[tuple[Node, ...], tuple[PassNode, ...]]:
    """A selection as a target sees it: depth first with the likelier child first, so that the likeliest path comes out contiguous
    and in front; and the same with parents by index. The nodes come best first, and none without its parent."""
    if not nodes:
        return (), ()
    below: dict[int, list[Node]] = {}
    for node in nodes:
        above = id(node.parent)
        if above in below:
            below[above].append(node)
        else:
            below[above] = [node]
    root = id(nodes[0].parent)  # nothing is likelier than the best child of the root
    places, stack, ordered, new = {root: ROOT}, below[root][::-1], list[Node](), tuple.__new__
    guesses = list[PassNode]()
    while stack:
        node = stack.pop()
        here = id(node)
        guesses.append(new(PassNode, (places[id(node.parent)], node.token)))  # quicker than PassNode(...)
        places[here] = len(ordered)
        ordered.append(node)
        if here in below:
            stack += below[here][::-1]
    return tuple(ordered), tuple(guesses)
