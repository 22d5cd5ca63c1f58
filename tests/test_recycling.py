"""Recycling: what it remembers, below which nodes it guesses, and how sure it is of it."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds import World

from duodecoding.bench import simulate as bench
from duodecoding.core import DuoCore, Verify, walk
from duodecoding.costs import CostCurve, Profile
from duodecoding.drafters import recycling as module
from duodecoding.drafters.lookup import FLOOR
from duodecoding.drafters.recycling import CERTAIN, NODES, SUCCESSORS, RecyclingDrafter, Table
from duodecoding.planner import Switch
from duodecoding.sampling import Choice, Luck
from duodecoding.tree import Proposal, TokenTree
from duodecoding.types import EngineConfig, SamplingParams, Source
from duodecoding.virtual import Recording, load_profile

TOKENS = st.integers(0, 5)


def opened(*prompt: int) -> tuple[RecyclingDrafter, TokenTree]:
    drafter = RecyclingDrafter()
    drafter.open(prompt)
    return drafter, TokenTree(prompt)


def commit(drafter: RecyclingDrafter, tree: TokenTree, *tokens: int) -> None:
    tree.commit(tokens)
    drafter.commit(tokens)


def model(*guesses: tuple[int, int, int, float]) -> list[Proposal]:
    return [Proposal(*guess, Source.MODEL) for guess in guesses]


def tell(drafter: RecyclingDrafter, tree: TokenTree, guesses: list[Proposal]) -> None:
    for guess in guesses:
        node = tree.add(guess)
        assert node is not None
        assert node.parent is not None
        node.parent.expanded = True
    drafter.arrived(tree, guesses)


def grown(drafter: RecyclingDrafter, tree: TokenTree, floor: float = 0.0) -> dict[tuple[int, ...], float]:
    """One guess, hung into the tree: path below the root -> chance."""
    found = {}
    for proposal in drafter.guess(tree, floor):
        assert proposal.source is Source.RECYCLING
        node = tree.add(proposal)
        assert node is not None
        found[tuple(node.path(tree.root))] = tree.probability(node)
    return found


def test_nothing_is_known_at_first() -> None:
    drafter, tree = opened(1, 2, 3)
    assert drafter.guess(tree) == []


def test_what_the_target_said_after_the_same_tokens() -> None:
    drafter, tree = opened(1, 2)
    commit(drafter, tree, 3, 4, 1, 2)
    found = grown(drafter, tree)
    assert (3,) in found
    assert (3, 4) in found
    assert 0 < found[3,] < CERTAIN


def test_two_tokens_tell_more_than_one() -> None:
    drafter, tree = opened(1, 2)
    commit(drafter, tree, 3, 5, 2, 4, 1, 2)  # 3 followed 1 2, 4 followed 5 2
    found = grown(drafter, tree)
    assert (3,) in found
    assert (4,) not in found


def test_one_token_is_better_than_nothing() -> None:
    drafter, tree = opened(1, 2)
    commit(drafter, tree, 3, 9, 2)
    assert (3,) in grown(drafter, tree)


def test_what_the_draft_said_is_remembered_for_the_same_tokens() -> None:
    drafter, tree = opened(1, 2)
    tell(drafter, tree, model((1, -1, 3, 0.6), (2, -1, 4, 0.3)))
    commit(drafter, tree, 7, 1, 2)
    found = grown(drafter, tree)
    assert found[3,] > found[4,]
    assert found[4,] > found[7,] * 0.3


def test_at_a_temperature_luck_decides_among_what_was_said() -> None:
    """What the draft said had the noise of its place; it is remembered without, and guessed with the noise of another."""
    luck = Luck(7)
    likely = {3: 0.5, 4: 0.4}
    for again in range(40):
        drafter, tree = RecyclingDrafter(), TokenTree([1, 2])
        drafter.open([1, 2], luck)
        here = {token: p / -math.log(luck.uniform(2, token)) for token, p in likely.items()}
        here = {token: 0.9 * share / sum(here.values()) for token, share in here.items()}
        tell(drafter, tree, model((1, -1, 3, here[3]), (2, -1, 4, here[4])))
        commit(drafter, tree, *range(20, 20 + again), 1, 2)
        found = grown(drafter, tree)
        chances = [luck.chance(likely[token], 4 + again, token) for token in (3, 4)]
        if abs(chances[0] - chances[1]) > 0.15:  # else in one bin, perhaps
            assert (found.get((3,), 0.0) > found.get((4,), 0.0)) == (chances[0] > chances[1])


@pytest.mark.parametrize("noisy", [True, False])
def test_a_draft_without_noise_is_taken_at_its_word(noisy: bool) -> None:
    """A bridged draft knows nothing of the noise: there is none to divide out."""
    drafter, tree = RecyclingDrafter(noisy=noisy), TokenTree([1, 2])
    drafter.open([1, 2], Luck(7))
    tell(drafter, tree, model((1, -1, 3, 0.8), (2, -1, 4, 0.1)))
    _, row = drafter._find(1, 2)
    assert row is not None
    assert (row == pytest.approx({3: 0.8, 4: 0.1})) != noisy


class Fixed(Luck):
    """The same luck for all, and where it was asked for."""

    def __init__(self, u: float) -> None:
        super().__init__(0)
        self.u, self.asked = u, set[tuple[int, int]]()

    def uniform(self, position: int, token: int) -> float:
        self.asked.add((position, token))
        return self.u


@pytest.mark.sources
def test_at_a_temperature_scores_are_judged_with_their_luck() -> None:
    """The more luck a token had, the surer was the guess that is judged."""
    kinds = []
    for u in (0.9, 0.1):
        luck, drafter, tree = Fixed(u), RecyclingDrafter(), TokenTree([1, 2])
        drafter.open([1, 2], luck)
        commit(drafter, tree, 3, 1, 2)  # 3 follows 1, 2
        before, luck.asked = [list(record.chances) for record in drafter.records], set()
        commit(drafter, tree, 3)
        assert luck.asked == {(5, 3)}
        after = [record.chances for record in drafter.records]
        kinds.append([i for now, then in zip(after, before, strict=True) for i in range(len(now)) if now[i] != then[i]])
    assert min(kinds[0]) > max(kinds[1])


@pytest.mark.sources
def test_at_a_temperature_a_guess_below_a_guess_has_the_luck_of_its_own_place() -> None:
    luck, drafter, tree = Fixed(0.9), RecyclingDrafter(), TokenTree([1, 2])
    drafter.open([1, 2], luck)
    commit(drafter, tree, 3, 4, 5, 1, 2)
    luck.asked = set()
    assert (3, 4, 5) in grown(drafter, tree)
    assert {(7, 3), (8, 4), (9, 5)} <= luck.asked
    assert all((position - token) % 5 == 4 for position, token in luck.asked if token > 2)  # the copy goes on in rounds of five


def test_where_the_draft_has_guessed_it_guesses_below() -> None:
    drafter, tree = opened(1, 2)
    commit(drafter, tree, 3, 4, 1, 2)
    tell(drafter, tree, model((1, -5, 3, 0.6), (2, -5, 9, 0.3)))
    found = grown(drafter, tree)
    assert (3, 4) in found
    assert not [path for path in found if len(path) == 1]


def test_below_the_end_of_a_chain_of_lookup() -> None:
    drafter, tree = opened(1, 2)
    commit(drafter, tree, 3, 4, 8)
    tree.add(Proposal(1, -4, 2, 0.9, Source.LOOKUP))
    tree.add(Proposal(2, 1, 3, 0.9, Source.LOOKUP))
    assert (2, 3, 4) in grown(drafter, tree)


def test_a_leaf_is_expanded_once() -> None:
    drafter, tree = opened(1, 2)
    commit(drafter, tree, 3, 4, 1, 2)
    assert grown(drafter, tree)
    again = grown(drafter, tree)
    assert (3,) not in again
    commit(drafter, tree, 3)
    assert all(len(path) > 1 for path in grown(drafter, tree))  # 4 is there already


def test_no_path_less_likely_than_asked_for() -> None:
    for floor in (0.0, 0.05, 0.2, 0.9):
        drafter, tree = opened(1, 2)
        commit(drafter, tree, *[3, 4, 1, 2] * 6)
        found = grown(drafter, tree, floor)
        assert all(p > max(floor, FLOOR) for p in found.values())
        assert bool(found) == (floor < 0.9)


def test_it_learns_how_far_it_can_be_trusted() -> None:
    dice, chances = random.Random(0), []
    for answer in ([3, 1, 2] * 100, [dice.randrange(12) for _ in range(2000)]):
        drafter, tree = opened(1, 2)
        commit(drafter, tree, *answer)
        chances.append(max(grown(drafter, tree).values()))
    assert chances[0] > 0.9
    assert chances[1] < 0.2


def test_it_remembers_across_answers() -> None:
    drafter, tree = opened(1, 2)
    commit(drafter, tree, 3, 4)
    drafter.open([9, 1, 2])
    assert (3,) in grown(drafter, TokenTree([9, 1, 2]))


def test_rows_are_bounded_and_the_oldest_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_ROWS", 10)
    table = Table(0.5)
    for context in range(30):
        table.committed(context, 1)
        table.committed(0, 1)  # in use all the time
    assert set(table.rows) == {0, *range(21, 30)}
    for token in range(50):
        table.committed(0, token)
    assert len(table.rows[0]) == SUCCESSORS
    assert max(table.rows[0], key=table.rows[0].__getitem__) == 49


def test_keys_of_pruned_nodes_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_DONE", 20)
    drafter, tree = opened(1, 2)
    for _ in range(100):
        commit(drafter, tree, 3, 4, 1, 2)
        grown(drafter, tree)
    assert len(drafter._done) <= 20 + 2 * NODES


@settings(max_examples=150)
@given(st.data())
def test_any_order_of_events(data: st.DataObject) -> None:
    """Scores and chances stay probabilities, guesses hang on live nodes, keys never repeat, a round is bounded."""
    drafter, tree = opened(*data.draw(st.lists(TOKENS, min_size=1, max_size=3)))
    key, keys = 0, set[int]()
    for _ in range(data.draw(st.integers(1, 12))):
        for _ in range(data.draw(st.integers(0, 2))):
            leaf = tree.frontier(1)[0]
            tokens = data.draw(st.lists(TOKENS, min_size=1, max_size=8, unique=True))
            tell(drafter, tree, model(*((key := key + 1, leaf.key, token, 1 / (i + 1.1)) for i, token in enumerate(tokens))))
        proposals = drafter.guess(tree)
        assert len(proposals) < NODES + SUCCESSORS
        assert keys.isdisjoint(proposal.key for proposal in proposals)
        keys |= {proposal.key for proposal in proposals}
        assert all(0 <= proposal.p <= 1 and tree.add(proposal) is not None for proposal in proposals)
        commit(drafter, tree, *data.draw(st.lists(TOKENS, min_size=1, max_size=4)))
    for table in (drafter._pairs, drafter._singles):
        assert all(0 <= score <= 1 for row in table.rows.values() for score in row.values())
        assert all(0 <= chance <= 1 for chance in table.record.chances)


# While the draft is paused


def a_round(core: DuoCore, seconds: float, token: int = 7) -> Verify:
    """Lookup guesses 5 after the root; the target says `token`."""
    core.nodes_arrived([Proposal(1 << 50 | core.tree.position, -core.tree.position, 5, 0.9, Source.LOOKUP)])
    work = core.step()
    assert isinstance(work, Verify)
    core.verdict_arrived(work, walk(work.guesses, lambda i: Choice(token, 0.0)))
    core.round_took(1, seconds)
    return work


def paused(free: Switch | None = None) -> DuoCore:
    draft = Switch(on=False, _pause_left=1 << 30, _paid=1e9)
    costs = Profile("flat", "", True, {512: CostCurve({1: 1.0})}, CostCurve({1: 1.0}), 1e-3, 1e-3, 1e-5)
    return DuoCore(
        [1, 2], SamplingParams(max_tokens=4000), EngineConfig(), context=1 << 20, costs=costs, switch=draft, free_switch=free
    )


def test_free_guesses_go_on() -> None:
    core = paused()
    work = a_round(core, 1.0)
    assert not core.drafting
    assert core.guessing
    assert len(work.nodes) == 1


def test_they_are_paused_when_they_do_not_pay_and_tried_again() -> None:
    core = paused()
    sizes = [len(a_round(core, 1.2 if core.guessing else 1.0).nodes) for _ in range(600)]
    assert sizes[0] == 1
    assert 0 < sum(sizes) < 40  # 3 tokens lost at 0.2 each, then probes that grow rarer
    assert max(number for number, size in enumerate(sizes) if size) > 60


def test_a_plain_pass_says_nothing_about_them() -> None:
    free = Switch()
    core = paused(free)
    for _ in range(100):
        work = core.step()
        assert isinstance(work, Verify)
        core.verdict_arrived(work, walk(work.guesses, lambda i: Choice(7, 0.0)))
        core.round_took(1, 1.5)
    assert free.on
    assert free.pauses == 0


def test_in_virtual_time_a_slow_draft_does_not_keep_them_from_helping() -> None:
    world = World(context=700, draft_context=700, memory=1, share=1.0)
    answer = world.plain(SamplingParams(max_tokens=300, ignore_eos=True))
    recording = Recording("a task", world.prompt, tuple(answer.token_ids), SamplingParams())
    profile = replace(load_profile("h200-7b"), draft=CostCurve({1: 0.02}))
    study = bench.Study([recording], world.draft(), True, world.size)
    alone = bench.Study([recording], None, True, world.size)
    duo = bench.setups("duo")[0]
    plain, model, both, free = (
        next(which.simulations(setup, profile)).run().seconds
        for which, setup in (
            (study, bench.setups("off")[0]),
            (study, replace(duo, lookup=False, recycling=False)),
            (study, duo),
            (alone, duo),
        )
    )
    assert model < 1.03 * plain
    assert both < 0.7 * plain
    assert both < 1.1 * free
