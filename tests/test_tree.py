from __future__ import annotations

import math
from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from duodecoding.tree import BESIDE_MODEL, ROOT, SURER, Node, PassNode, Proposal, TokenTree, as_pass, either
from duodecoding.types import Source

TOKENS = st.integers(0, 3)  # few, so that guesses meet
PROBABILITIES = st.floats(0.0, 1.0)


def guess(key: int, parent: int, token: int, p: float = 0.5, source: Source = Source.MODEL) -> Proposal:
    return Proposal(key, parent, token, p, source)


def tree_of(*proposals: Proposal, prompt: tuple[int, ...] = (9, 9)) -> TokenTree:
    tree = TokenTree(prompt)
    for proposal in proposals:
        tree.add(proposal)
    return tree


def keys(nodes: list[Node]) -> list[int]:
    return [node.key for node in nodes]


# A tree against a naive one: nodes are token histories, nothing is remembered that cannot be read off them.


class Naive:
    """What TokenTree promises, without its bookkeeping."""

    def __init__(self, prompt: tuple[int, ...]) -> None:
        self.committed = prompt
        self.root_logp, self.root_expanded = 0.0, False
        self.live: dict[tuple[int, ...], float] = {}  # history -> logp
        self.expanded: set[tuple[int, ...]] = set()
        self.said: dict[tuple[int, ...], list[tuple[Source, float]]] = {}  # of live ones: all that anybody ever said
        self.known: dict[int, tuple[int, ...]] = {}  # key -> history, of live and committed guesses

    def parent(self, key: int) -> tuple[int, ...] | None:
        if key > 0:
            return self.known.get(key)
        return self.committed[: -key + 1] if -key < len(self.committed) else None

    def logp(self, history: tuple[int, ...]) -> float:
        return self.root_logp if history == self.committed else self.live[history]

    def add(self, proposal: Proposal) -> tuple[int, ...] | None:
        parent = self.parent(proposal.parent)
        if parent is None:
            return None
        history = (*parent, proposal.token)
        if history == self.committed[: len(history)]:
            self.known[proposal.key] = history
        if parent != self.committed and parent not in self.live:
            return None
        self.known[proposal.key] = history
        model = proposal.source is Source.MODEL
        spoken = self.root_expanded if parent == self.committed else parent in self.expanded
        if model and not spoken:
            for child in [h for h in self.live if h[:-1] == parent and not self.best_of(h)[0]]:
                self.move(child, self.logp(parent) + math.log(max(self.best_of(child)[1], 1e-9)))
        self.said.setdefault(history, []).append((proposal.source, proposal.p))
        both = (model and proposal.p > 0) or spoken
        new = both and history not in self.live and not model
        p = either(*self.best_of(history)) if both and history in self.live else self.best_of(history)[1] if new else proposal.p
        logp = self.logp(parent) + math.log(max(p, 1e-9))
        if logp > self.live.setdefault(history, logp) + SURER:
            self.move(history, logp)
        return history

    def best_of(self, history: tuple[int, ...]) -> tuple[float, float]:
        """The chance by the draft model's word, and by the surest of the others where it has spoken."""
        said = self.said[history]
        named = max((p for source, p in said if source is Source.MODEL), default=0.0)
        return named, max((p * BESIDE_MODEL[source] for source, p in said if source is not Source.MODEL), default=0.0)

    def move(self, history: tuple[int, ...], logp: float) -> None:
        """A node is likelier or less likely than was thought, and so is all below it."""
        more, self.live[history] = logp - self.live[history], logp
        for below in sorted((h for h in self.live if h[: len(history)] == history and h != history), key=len):
            self.live[below] = min(self.live[below] + more, self.live[below[:-1]])

    def commit(self, tokens: list[int]) -> None:
        now = (*self.committed, *tokens)
        if tokens:
            self.root_expanded = now in self.expanded
            self.root_logp = self.live.get(now, 0.0)
        self.committed = now
        self.live = {h: logp for h, logp in self.live.items() if len(h) > len(now) and h[: len(now)] == now}
        self.expanded &= self.live.keys()
        self.said = {h: said for h, said in self.said.items() if h in self.live}
        self.known = {key: h for key, h in self.known.items() if h in self.live or h == now[: len(h)]}

    def best(self) -> list[float]:
        """Log-probabilities in the order of a best-first walk."""
        found: list[float] = []
        reachable = [h for h in self.live if h[:-1] == self.committed]
        while reachable:
            node = max(reachable, key=self.live.__getitem__)
            found.append(self.live[node])
            reachable.remove(node)
            reachable += [h for h in self.live if h[:-1] == node]
        return found


class TreeMachine(RuleBasedStateMachine):
    @initialize(prompt=st.lists(TOKENS, min_size=1, max_size=3))
    def start(self, prompt: list[int]) -> None:
        self.naive = Naive(tuple(prompt))
        self.tree = TokenTree(prompt)
        self.key = 0
        self.sent: list[Proposal] = []

    def history(self, node: Node) -> tuple[int, ...]:
        return (*self.tree.tokens, *node.path(self.tree.root))

    def send(self, proposal: Proposal) -> None:
        expected = self.naive.add(proposal)
        node = self.tree.add(proposal)
        assert (node is None) == (expected is None)
        if node is not None:
            assert self.history(node) == expected
            assert node.logp == self.naive.live[self.history(node)]

    @rule(data=st.data(), token=TOKENS, p=PROBABILITIES, source=st.sampled_from([Source.MODEL, Source.LOOKUP, Source.RECYCLING]))
    def add(self, data: st.DataObject, token: int, p: float, source: Source) -> None:
        """Under the root, a guess, any committed position, a position to come, or a node that nobody knows."""
        self.key += 1
        newest = [*range(max(1, self.key - 8), self.key)]
        positions = [-p for p in range(len(self.tree.tokens) + 2)]
        parent = data.draw(st.sampled_from([-self.tree.position, *newest, *newest, *positions, 999]))
        self.sent.append(guess(self.key, parent, token, p, source))
        self.send(self.sent[-1])

    @rule(data=st.data())
    def send_again(self, data: st.DataObject) -> None:
        """The same message twice, however late the second one."""
        if self.sent:
            self.send(data.draw(st.sampled_from(self.sent)))

    @rule(steps=st.lists(st.integers(0, 3), max_size=4), bonus=st.none() | TOKENS)
    def commit(self, steps: list[int], bonus: int | None) -> None:
        """Down along guesses, then perhaps a token that may or may not have been guessed."""
        tokens, node = [], self.tree.root
        for step in steps:
            if not node.children:
                break
            node = list(node.children.values())[step % len(node.children)]
            tokens.append(node.token)
        guessed = len(tokens)
        tokens += [bonus] if bonus is not None else []
        before = {self.history(node): node for node in self.tree.select(10_000)}
        start = tuple(self.tree.tokens)
        path = self.tree.commit(tokens)
        self.naive.commit(tokens)
        assert len(path) == len(tokens)
        assert all(node is not None for node in path[:guessed])
        assert path == [before.get((*start, *tokens[: i + 1])) for i in range(len(tokens))]

    @rule(width=st.integers(0, 6))
    def expand(self, width: int) -> None:
        found = self.tree.frontier(width)
        closed = [-math.inf] if self.naive.root_expanded else []
        open_logps = sorted((logp for h, logp in self.naive.live.items() if h not in self.naive.expanded), reverse=True)
        if not closed:
            assert found[:1] == ([self.tree.root] if width else [])
        assert [node.logp for node in found if node is not self.tree.root] == open_logps[: max(0, width - (not closed))]
        assert len(set(map(id, found))) == len(found) <= width
        for node in found:
            node.expanded = True
            if node is self.tree.root:
                self.naive.root_expanded = True
            else:
                self.naive.expanded.add(self.history(node))

    @rule(limit=st.integers(0, 12), floor=st.sampled_from([0.0, 0.0, 0.01, 0.3, 1.0]))
    def select(self, limit: int, floor: float) -> None:
        chosen = self.tree.select(limit, floor)
        lowest = self.naive.root_logp + math.log(floor) if floor else -math.inf
        expected = [logp for logp in self.naive.best() if logp >= lowest]
        assert [node.logp for node in chosen] == expected[:limit]
        seen = {id(self.tree.root)}
        for node in chosen:
            assert id(node.parent) in seen
            seen.add(id(node))

    @invariant()
    def same_nodes(self) -> None:
        everything = self.tree.select(10_000)
        assert {self.history(node): node.logp for node in everything} == self.naive.live
        assert len(self.tree) == len(self.naive.live) == len(everything)
        assert tuple(self.tree.tokens) == self.naive.committed
        assert self.tree.root.expanded == self.naive.root_expanded
        assert all(self.tree.holds(node) for node in [self.tree.root, *everything])
        assert all(node.position == len(self.history(node)) - 1 for node in [self.tree.root, *everything])
        assert all(0 <= self.tree.probability(node) <= 1 for node in everything)


TestTree = TreeMachine.TestCase
TestTree.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


# What the machine does not say in so many words


def test_select_takes_the_best_path_probability_not_the_best_edge() -> None:
    tree = tree_of(guess(1, -1, 0, 0.6), guess(2, -1, 1, 0.3), guess(3, 1, 2, 0.4), guess(4, 2, 3, 0.9))
    assert keys(tree.select(9)) == [1, 2, 4, 3]
    assert keys(tree.select(2)) == [1, 2]
    assert keys(tree.select(9, floor=0.25)) == [1, 2, 4]
    assert tree.select(0) == []


def test_the_same_token_under_the_same_parent_is_one_node() -> None:
    tree = tree_of(guess(1, -1, 5, 0.2), guess(2, -1, 5, 0.7, Source.LOOKUP))
    (node,) = tree.select(9)
    assert node.source is Source.LOOKUP
    assert tree.probability(node) == pytest.approx(0.7)
    tree.add(guess(3, 1, 6))
    tree.add(guess(4, 2, 7))
    assert sorted(node.children) == [6, 7]


def test_a_lower_second_opinion_changes_nothing() -> None:
    tree = tree_of(guess(1, -1, 5, 0.7), guess(2, -1, 5, 0.2, Source.LOOKUP))
    (node,) = tree.select(9)
    assert (node.source, tree.probability(node)) == (Source.MODEL, pytest.approx(0.7))


def test_what_others_say_counts_for_less_once_the_draft_model_has_spoken() -> None:
    """As often as they were right there (docs/log.md)."""
    tree = tree_of(guess(1, -1, 5, 0.8, Source.LOOKUP), guess(2, 1, 6, 0.5, Source.LOOKUP), guess(3, -1, 7, 0.4, Source.RECYCLING))
    below, lookup = tree.find(2), BESIDE_MODEL[Source.LOOKUP]
    assert below is not None
    assert tree.probability(below) == pytest.approx(0.4)
    tree.add(guess(4, -1, 8, 0.3))
    tree.root.expanded = True
    assert tree.probability(below) == pytest.approx(0.4 * lookup)
    assert tree.probability(tree.root.children[7]) == pytest.approx(0.4 * BESIDE_MODEL[Source.RECYCLING])
    tree.add(guess(5, -1, 5, 0.2))  # the model names it, too
    assert tree.probability(tree.root.children[5]) == pytest.approx(1 - (1 - 0.2) * (1 - 0.8 * lookup))
    for key in (6, 7):  # said late, and twice: once is enough
        tree.add(guess(key, -1, 8, 0.5, Source.LOOKUP))
        assert tree.probability(tree.root.children[8]) == pytest.approx(1 - (1 - 0.3) * (1 - 0.5 * lookup))
    tree.add(guess(8, -1, 9, 0.6, Source.LOOKUP))
    assert tree.probability(tree.root.children[9]) == pytest.approx(0.6 * lookup)


@pytest.mark.parametrize("named", [0.0, 0.1, 0.5])
def test_the_order_of_witnesses_does_not_matter(named: float) -> None:
    """Recycling, a little surer than lookup, does not take lookup's word away."""
    said = [guess(1, -1, 5, 0.9, Source.LOOKUP), guess(2, -1, 5, 0.95, Source.RECYCLING)]
    said.append(guess(3, -1, 5, named) if named else guess(3, -1, 6, 0.3))
    for order in permutations(said):
        tree = tree_of()
        for proposal in order:
            tree.add(proposal)
            tree.root.expanded = tree.root.expanded or proposal.source is Source.MODEL
        node = tree.root.children[5]
        assert tree.probability(node) == pytest.approx(either(named, 0.9 * BESIDE_MODEL[Source.LOOKUP]))
        assert (node.source is Source.MODEL) == (named > 0.9 * BESIDE_MODEL[Source.LOOKUP])


def test_guesses_below_the_new_root_survive_a_commit() -> None:
    tree = tree_of(guess(1, -1, 0), guess(2, 1, 1), guess(3, 2, 2), guess(4, -1, 3))
    root, second = tree.commit([0, 1])
    assert root is not None
    assert second is tree.root
    assert keys(tree.select(9)) == [3]
    assert not tree.holds(root)
    assert tree.probability(tree.select(1)[0]) == pytest.approx(0.5)


def test_a_bare_root_when_nobody_guessed_the_bonus() -> None:
    tree = tree_of(guess(1, -1, 0), guess(2, 1, 1))
    assert tree.commit([0, 7])[1] is None
    assert len(tree) == 0
    assert (tree.root.token, tree.root.position, tree.root.key) == (7, 3, -3)


def test_late_children_of_a_committed_guess_find_home() -> None:
    tree = tree_of(guess(1, -1, 0))
    tree.commit([0])
    assert tree.add(guess(2, 1, 4)) is tree.root.children[4]
    tree.commit([4, 5])
    assert tree.add(guess(3, 2, 5)) is None  # was right, and is committed by now
    assert tree.add(guess(4, 3, 6)) is tree.root.children[6]  # so its children still count
    assert tree.add(guess(5, 1, 8)) is None  # was wrong
    assert tree.add(guess(6, 5, 9)) is None


def test_children_of_pruned_and_unknown_nodes_are_ignored() -> None:
    tree = tree_of(guess(1, -1, 0), guess(2, -1, 1))
    tree.commit([0])
    assert tree.add(guess(3, 2, 4)) is None
    assert tree.add(guess(4, 77, 4)) is None
    assert tree.add(guess(5, -50, 4)) is None
    assert len(tree) == 0


def test_guesses_under_a_position() -> None:
    tree = TokenTree([3])
    assert tree.add(guess(1, 0, 8)) is not None
    tree.commit([8])
    assert tree.add(guess(2, -1, 9)) is not None
    assert tree.add(guess(3, -2, 9)) is None


def test_a_probability_of_zero_is_a_small_one() -> None:
    tree = tree_of(guess(1, -1, 0, 0.0), guess(2, 1, 1, 0.5))
    assert keys(tree.select(9)) == [1, 2]


def test_frontier_asks_for_the_root_first() -> None:
    tree = tree_of(guess(1, -1, 0, 0.9), guess(2, -1, 1, 0.4))
    assert tree.frontier(2) == [tree.root, tree.root.children[0]]
    assert tree.frontier(0) == []
    tree.root.expanded = True
    assert keys(tree.frontier(5)) == [1, 2]
    assert keys(tree.frontier(5)) == [1, 2]  # asking takes nothing away
    tree.root.children[0].expanded = True
    assert keys(tree.frontier(5)) == [2]


def test_a_guess_that_nobody_believes_in_is_found_once() -> None:
    """What the model says about its brother puts it where it was: at the least probability there is."""
    tree = TokenTree([9, 9])
    tree.frontier(0)
    tree.add(guess(1, -1, 5, p=0.0))
    tree.add(guess(2, -1, 6, p=0.0))
    assert keys(tree.frontier(5)) == [-1, 1, 2]


def test_likeliest_path_goes_down_by_the_best_child() -> None:
    tree = tree_of(guess(1, -1, 0, 0.6), guess(2, -1, 1, 0.4), guess(3, 1, 2, 0.1), guess(4, 2, 3, 0.9), guess(5, 1, 4, 0.3))
    assert keys(tree.likeliest_path(9)) == [1, 5]
    assert keys(tree.likeliest_path(1)) == [1]
    assert TokenTree([1]).likeliest_path(9) == []


@st.composite
def grown(draw: st.DrawFn) -> TokenTree:
    tree = TokenTree([0])
    for key in range(1, draw(st.integers(1, 30))):
        tree.add(guess(key, draw(st.integers(0, key - 1)), draw(TOKENS), draw(PROBABILITIES)))
    return tree


@given(grown(), st.integers(0, 30))
def test_a_pass_has_parents_before_children_and_the_likeliest_path_in_front(tree: TokenTree, limit: int) -> None:
    chosen = tree.select(limit)
    ordered, guesses = as_pass(chosen)
    assert set(map(id, ordered)) == set(map(id, chosen))
    for i, (node, guessed) in enumerate(zip(ordered, guesses, strict=True)):
        assert ROOT <= guessed.parent < i
        assert guessed.token == node.token
        assert (tree.root if guessed.parent == ROOT else ordered[guessed.parent]) is node.parent
    front = tree.likeliest_path(limit)
    wanted = next((i for i, node in enumerate(front) if node not in chosen), len(front))
    assert [node.logp for node in ordered[:wanted]] == [node.logp for node in front[:wanted]]
    assert all(guesses[i].parent == i - 1 for i in range(wanted))


def test_a_pass_names_parents_by_index() -> None:
    tree = tree_of(guess(1, -1, 0, 0.5), guess(2, -1, 1, 0.4), guess(3, 1, 2, 0.9))
    assert as_pass(tree.select(9))[1] == (PassNode(ROOT, 0), PassNode(0, 2), PassNode(ROOT, 1))
    assert as_pass([]) == ((), ())
