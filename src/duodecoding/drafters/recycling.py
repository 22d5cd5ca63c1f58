"""Recycling: what draft and target said after the same one or two tokens before, in any answer of this engine. No model. Pure.

A table from the last two tokens, or else the last one, to their likeliest successors. Draft and target fill it as they go; it
guesses below every promising leaf that the draft has not reached yet. After Token Recycling (Luo et al. 2024).
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import groupby, islice
from math import exp, log

from duodecoding.drafters.lookup import FLOOR, KEYS_FROM
from duodecoding.drafters.record import Record
from duodecoding.sampling import Luck
from duodecoding.tree import Node, Proposal, TokenTree
from duodecoding.types import Source

Row = dict[int, float]  # successor -> score, from 0 to 1
# Minus its chance, key, the token before it, its token, its position, the node if there is one.
Leaf = tuple[float, int, int, int, int, Node | None]

SUCCESSORS = 6
MOST_ROWS = 1 << 14  # of each table; the one written longest ago goes first
MOST_DONE = 1 << 12  # keys, before those of pruned nodes are forgotten
NODES = 24  # guesses a round, or a few more
VISITS = 48  # nodes looked at in a round
FEW_VISITS = 12  # where a look was had at the tree while the last pass ran
CERTAIN = 0.4  # what one token of the target counts for, against all that was said before
PROMISING = 5  # times the floor: a node less likely has hardly a successor above the floor
BINS = 16
NOTHING = -1  # before the first token


class Table:
    """Successors by context, and how often one with such a score was right."""

    def __init__(self, trust: float) -> None:
        """`trust`: in scores before anything is known. Rather too little: a table without worth must cost nothing."""
        self.rows: dict[int, Row] = {}
        self.record = Record([trust * ((i + 0.5) / BINS) ** 2 for i in range(BINS)] + [trust])

    def say(self, context: int, row: Row) -> None:
        self.rows.pop(context, None)
        self.rows[context] = row
        if len(self.rows) > MOST_ROWS:
            del self.rows[next(iter(self.rows))]

    def committed(self, context: int, token: int) -> None:
        row = self.rows.get(context, {})
        for successor in row:
            row[successor] *= 1 - CERTAIN
        row[token] = row.get(token, 0.0) + CERTAIN
        if len(row) > SUCCESSORS:
            del row[min(row, key=row.__getitem__)]
        self.say(context, row)

    def judge(self, row: Row, token: int, position: int, luck: Luck | None) -> None:
        for successor, score in row.items():
            if score > FLOOR:  # else it is never guessed
                here = score if luck is None else luck.chance(score, position, successor)
                self.record.observe(int(BINS * here**0.5), successor == token)  # finer where scores are small


class RecyclingDrafter:
    def __init__(self, *, noisy: bool = True) -> None:
        """`noisy`: the draft model adds the noise of an answer at a temperature to what it says, as all but bridged ones do."""
        self._noisy = noisy
        self._pairs, self._singles = Table(trust=0.8), Table(trust=0.5)
        self._before = self._last = NOTHING
        self._position = 0  # of the next token
        self._luck: Luck | None = None
        self._key = KEYS_FROM << 1
        self._done: set[int] = set()  # keys of nodes below which it has guessed

    @property
    def records(self) -> tuple[Record, Record]:
        return self._pairs.record, self._singles.record

    def open(self, prompt: Sequence[int], luck: Luck | None = None) -> None:
        """`luck`: of an answer at a temperature. A row says what follows on average; who is drawn depends on the place."""
        self._before, self._last = (NOTHING, *prompt)[-2:]
        self._position, self._luck = len(prompt), luck
        self._done = set()

    def commit(self, tokens: Sequence[int]) -> None:
        before, last = self._before, self._last
        for token in tokens:
            table, row = self._find(before, last)
            if row is not None:
                table.judge(row, token, self._position, self._luck)
            self._pairs.committed(before << 20 | last, token)
            if table is self._singles:  # it is asked only where two tokens are new
                self._singles.committed(last, token)
            before, last = last, token
            self._position += 1
        self._before, self._last = before, last

    def _find(self, before: int, last: int) -> tuple[Table, Row | None]:
        row = self._pairs.rows.get(before << 20 | last)
        return (self._pairs, row) if row is not None else (self._singles, self._singles.rows.get(last))

    def arrived(self, tree: TokenTree, proposals: Sequence[Proposal]) -> None:
        """A draft model's guesses, which are in the tree by now; those of one leaf together, best first."""
        for parent, guesses in groupby(proposals, key=lambda proposal: proposal.parent):
            node = tree.find(parent)
            if node is not None:
                row = {guess.token: guess.p for guess in islice(guesses, SUCCESSORS)}
                if self._luck is not None and self._noisy:
                    row = self._luck.without(row, node.position + 1)
                before = node.parent.token if node.parent is not None else _before_root(tree)
                self._pairs.say(before << 20 | node.token, row)
                self._singles.say(node.token, row.copy())

    def guess(self, tree: TokenTree, floor: float = 0.0, visits: int = VISITS) -> list[Proposal]:
        """Below the likeliest nodes that neither the draft nor this table has expanded, best first. No path less likely than
        `floor`."""
        if len(self._done) > MOST_DONE:
            self._done = {key for key in self._done if tree.find(key) is not None}
        root, floor = tree.root, max(floor, FLOOR)
        lowest = root.logp + log(PROMISING * floor)
        found: list[Proposal] = []
        heap: list[Leaf] = [(-1.0, root.key, _before_root(tree), root.token, root.position, root)]
        for _ in range(visits):
            if not heap or len(found) >= NODES:
                break
            leaf = heappop(heap)
            _, key, _, token, _, node = leaf
            for child in node.children.values() if node is not None else ():
                if child.logp > lowest:
                    heappush(heap, (-exp(child.logp - root.logp), child.key, token, child.token, child.position, child))
            if key not in self._done and (node is None or not node.expanded):
                self._done.add(key)
                self._expand(leaf, heap, found, floor)
        return found

    def _expand(self, leaf: Leaf, heap: list[Leaf], found: list[Proposal], floor: float) -> None:
        chance, parent, before, token, position, node = leaf
        table, row = self._find(before, token)
        if row is None:
            return
        chances, key, source, make, luck = table.record.chances, self._key, Source.RECYCLING, Proposal._make, self._luck
        there = node.children if node is not None else ()  # they are visited as what they are
        least, promising = -floor / chance, -PROMISING * floor / chance
        for successor, score in row.items():
            here = score if luck is None or score <= FLOOR else luck.chance(score, position + 1, successor)
            p = chances[int(BINS * here**0.5)]
            if p > least:
                key += 1
                found.append(make((key, parent, successor, p, source)))
                if p > promising and successor not in there:
                    heappush(heap, (chance * p, key, token, successor, position + 1, None))
        self._key = key


def _before_root(tree: TokenTree) -> int:
    return tree.tokens[-2] if len(tree.tokens) > 1 else NOTHING
