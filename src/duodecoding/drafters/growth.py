"""Which leaves a draft model expands next. Pure: a tree in, leaves out."""

from __future__ import annotations

from typing import Protocol

from duodecoding.costs import CostCurve
from duodecoding.planner import how_many_leaves
from duodecoding.tree import Node, TokenTree


class Growth(Protocol):
    branching: int  # guesses kept of an expanded leaf

    def leaves(self, tree: TokenTree, room: int) -> list[Node]:
        """The leaves of the next draft step, at most `room`. Empty: nothing to do until the next commit."""
        ...

    def committed(self, tree: TokenTree) -> None:
        """The tree has a new root."""
        ...


class BestFirst:
    """The likeliest leaves anywhere in the tree: how the living tree grows, and a tree drafted in turns."""

    def __init__(
        self, width: int = 2, *, curve: CostCurve | None = None, branching: int = 4, floor: float = 0.0, cover: int = 0
    ) -> None:
        """With a `curve` the planner chooses each step's width, up to `width`. Leaves less likely than `floor` are left, and so
        are those without a chance of a child among the `cover` likeliest guesses (0: all have one)."""
        self._width, self._curve, self._floor, self._cover = width, curve, floor, cover
        self.branching = branching

    def leaves(self, tree: TokenTree, room: int) -> list[Node]:
        best = tree.frontier(min(self._width, room))
        if self._cover > 0 and len(covered := tree.select(self._cover)) == self._cover:
            best = [node for node in best if node.logp > covered[-1].logp]
        likely = [p for node in best if (p := tree.probability(node)) >= self._floor]  # they come best first
        if self._curve is None or len(likely) < 2:
            return best[: len(likely)]
        return best[: how_many_leaves(likely, self._curve, self._width)]

    def committed(self, tree: TokenTree) -> None:
        pass


class LikeliestPath:
    """The end of the likeliest path and nothing else: no hedge against any other outcome."""

    def __init__(self, *, branching: int = 4) -> None:
        self.branching = branching

    def leaves(self, tree: TokenTree, room: int) -> list[Node]:
        end = _end(tree.root)
        return [end] if room > 0 and not end.expanded else []

    def committed(self, tree: TokenTree) -> None:
        pass


class Chains:
    """The published scheme: extend the chain under verification by one budget of steps, as k chains drafted in one batch.

    The chains differ in their first token; the j-th is drafted if p(first_j) > p(first_1) · p(second_1), that is, if a whole
    new chain is likelier to be needed than the second token of the best one.
    """

    branching = 4

    def __init__(self, budget: float, curve: CostCurve, *, most: int = 4) -> None:
        """`budget`: seconds of drafting per round, the time of a target pass. `most`: chains at most; 1 is PEARL."""
        self._budget, self._curve, self._most = budget, curve, most
        self._left = budget
        self._tip: Node | None = None
        self._ends: list[Node] = []

    def committed(self, tree: TokenTree) -> None:
        path = tree.likeliest_path(1 << 20)
        self._tip = path[-1] if path else tree.root
        self._ends = []
        self._left = self._budget

    def leaves(self, tree: TokenTree, room: int) -> list[Node]:
        if self._tip is None:
            self.committed(tree)
        wanted = self._wanted()[:room]
        cost = self._curve(len(wanted)) if wanted else 0.0
        spent_nothing = self._left == self._budget
        if not wanted or (self._left < cost and not spent_nothing):
            return []
        self._left -= cost
        return wanted

    def _wanted(self) -> list[Node]:
        tip = self._tip
        assert tip is not None
        if not tip.expanded:
            return [tip]
        firsts = sorted(tip.children.values(), key=lambda n: -n.logp)
        if not firsts:
            return []
        if not firsts[0].expanded:
            return firsts[:1]
        if not self._ends:
            seconds = [child.logp for child in firsts[0].children.values()]
            bar = max(seconds, default=-1e9)  # log of p(first_1) · p(second_1), both below the tip
            self._ends = [first for i, first in enumerate(firsts[: self._most]) if i == 0 or first.logp > bar]
        self._ends = [end for end in map(_end, self._ends) if not end.expanded]  # one without guesses below it is a dead end
        return self._ends


def _end(node: Node) -> Node:
    """The unexpanded end of the likeliest chain below a node."""
    while node.expanded and node.children:
        node = max(node.children.values(), key=lambda child: child.logp)
    return node
