"""The five decisions, and what they learn from."""

from __future__ import annotations

import random
from itertools import accumulate

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from duodecoding.costs import CostCurve
from duodecoding.planner import (
    CAUTION,
    DEAREST,
    LEAST_TRUSTED,
    Calibration,
    DraftClock,
    Looks,
    Switch,
    Trust,
    Uncalibrated,
    cores_for_draft,
    hopeless,
    how_many_leaves,
    how_many_nodes,
    tokens_unread,
    worth_waiting,
)

SHARES = st.floats(0.0, 1.0)
BEST_FIRST = st.lists(SHARES, max_size=24).map(lambda found: sorted(found, reverse=True))
TIMES = st.floats(1e-4, 1.0)


# 1. How many nodes


def linear(first: float, each: float) -> list[float]:
    return [first + each * (n - 1) for n in range(30)]


@given(BEST_FIRST, TIMES, st.lists(st.floats(0.0, 0.1), min_size=24, max_size=24))
def test_the_number_of_nodes_is_the_best_of_all(probabilities, first, steps):
    prices = [first, *accumulate(steps, initial=first)]
    chosen = how_many_nodes(probabilities, prices, min(steps))
    rates = [
        (1 + sum(probabilities[:n])) / prices[1 + n] for n in range(len(probabilities) + 1) if prices[1 + n] <= DEAREST * first
    ]
    assert 0 <= chosen < len(rates)
    assert rates[chosen] == pytest.approx(max(rates)) or (chosen == 0 and max(rates) <= CAUTION * rates[0] * 1.000001)


def test_guesses_that_promise_little_are_not_worth_the_risk():
    assert how_many_nodes([0.71], [0.0, 1.0, 1.6]) == 0  # 7 % more
    assert how_many_nodes([0.8], [0.0, 1.0, 1.6]) == 1  # 12.5 %
    assert how_many_nodes([0.95] * 20, linear(1.0, 0.5)) == 6  # a pass of four bare ones


def test_what_was_won_may_be_risked_again():
    trust, prices = Trust(), linear(1.0, 0.5)
    assert how_many_nodes([0.95] * 20, prices, dearest=trust.dearest) == 4  # untried: a pass of three bare ones
    trust.observe(5, 3.0, 1.0)  # all of it right: five tokens in the time of three
    assert trust.dearest == DEAREST
    assert how_many_nodes([0.95] * 20, prices, dearest=trust.dearest) == 6
    trust.observe(1, 4.0, 1.0)  # all wrong
    assert trust.dearest == LEAST_TRUSTED  # never nothing: it must be able to win again
    assert how_many_nodes([0.95] * 20, prices, dearest=trust.dearest) == 3
    assert how_many_nodes([0.5] * 20, linear(0.005, 0.00001), dearest=trust.dearest) == 20  # where guesses are cheap it is no limit


@given(BEST_FIRST, st.lists(st.floats(0.0, 0.5), min_size=40, max_size=40))
def test_the_hopeless_ones_need_not_be_asked(probabilities, steps):
    prices = [0.0, *accumulate(steps, initial=1.0)]
    least = hopeless(prices, min(steps))
    kept = [p for p in probabilities if p >= least]
    assert how_many_nodes(kept, prices, min(steps)) == how_many_nodes(probabilities, prices, min(steps))


def test_free_nodes_are_all_verified_and_dear_ones_are_not():
    assert how_many_nodes([0.9, 0.5, 0.1], linear(0.01, 0.0)) == 3
    assert how_many_nodes([0.9, 0.5, 0.1], linear(0.01, 0.01)) == 0
    assert how_many_nodes([0.9, 0.5, 0.1], linear(0.01, 0.003)) == 2
    assert how_many_nodes([], linear(0.01, 0.0)) == 0


# 2. Go or wait


@given(st.lists(st.floats(0, 1), max_size=6), st.lists(st.floats(0, 1), max_size=6), st.lists(TIMES, min_size=16), TIMES)
def test_waiting_pays_if_the_rate_is_higher(now, hoped, prices, delay):
    least = (1 + sum(now)) / prices[1 + len(now)]
    best = sorted(now + hoped, reverse=True)
    rates = [(1 + sum(best[:n])) / (prices[1 + n] + delay) for n in range(1, len(best) + 1)]
    assume(all(abs(rate / least - 1) > 1e-9 for rate in rates))
    assert worth_waiting(now, hoped, prices, delay) == any(rate > least for rate in rates)


def test_waiting_for_nothing_never_pays():
    flat = [0.01] * 9
    assert not worth_waiting([0.5], [], flat, 0.001)
    assert worth_waiting([], [0.8], flat, 0.001)
    assert not worth_waiting([1.0, 1.0, 1.0], [0.3], flat, 0.001)  # a full tree does not wait for a little more


def test_a_better_guess_may_take_the_place_of_a_worse_one():
    """Where every place has its price, what comes need not be verified beside what is there."""
    stairs = [0.01, 0.01, 0.01, 0.01, 0.03, 0.05]
    assert worth_waiting([0.5, 0.1], [0.4], stairs, 0.001)
    assert not worth_waiting([0.5, 0.4], [0.3], stairs, 0.001)


# 3. Leaves per draft step


@given(BEST_FIRST, st.integers(1, 16))
def test_the_width_is_the_best_of_all(probabilities, widest):
    draft = CostCurve({1: 0.001, 2: 0.0013, 4: 0.0019, 8: 0.003, 16: 0.0053})
    chosen = how_many_leaves(probabilities, draft, widest)
    assert 1 <= chosen <= widest
    rates = [sum(probabilities[:w]) / draft(w) for w in range(1, min(widest, len(probabilities)) + 1)]
    if rates and max(rates) > 0:
        assert rates[chosen - 1] == pytest.approx(max(rates))


def test_a_sure_leaf_goes_alone_and_equal_ones_go_together():
    draft = CostCurve({1: 0.001, 8: 0.003})
    assert how_many_leaves([0.95, 0.02, 0.01], draft, 8) == 1
    assert how_many_leaves([0.3, 0.3, 0.3, 0.3], draft, 8) == 4
    assert how_many_leaves([0.3, 0.3, 0.3, 0.3], draft, 2) == 2


# 4. Is it worth it at all


def play(switch: Switch, rounds: int, tokens, seconds) -> float:
    """Time over that of `off`. While the switch is off a round is a plain one."""
    spent = worth = 0.0
    for number in range(rounds):
        gained, took = (tokens(number), seconds(number)) if switch.on else (1, 1.0)
        switch.observe(gained, took, plain=1.0)
        spent += took
        worth += gained
    return spent / worth


@pytest.mark.parametrize("slower", [1.01, 1.05, 1.2, 1.5, 2.0, 4.0])
def test_a_useless_draft_costs_little_over_a_long_run(slower):
    assert play(Switch(), 4000, lambda i: 1, lambda i: slower) <= 1.03


def test_a_useless_draft_is_probed_less_and_less():
    switch = Switch()
    play(switch, 20_000, lambda i: 1, lambda i: 1.5)
    assert switch.pauses < 16


@pytest.mark.parametrize("slower", [1.01, 1.2, 1.5, 2.0, 4.0])
def test_a_useless_draft_costs_little_although_every_answer_is_a_new_chance(slower):
    switch = Switch()
    spent = []
    for _ in range(60):
        switch.new_answer()
        spent.append(play(switch, 96, lambda i: 1, lambda i: slower))
    assert sum(spent[10:]) / len(spent[10:]) <= 1.015


def test_a_draft_that_is_good_for_the_next_answer_is_found_soon():
    switch = Switch()
    play(switch, 4000, lambda i: 1, lambda i: 1.5)
    assert not switch.on
    waited = 0
    switch.new_answer()
    while not switch.on:
        switch.observe(1, 1.0, plain=1.0)
        waited += 1
    assert waited <= 128  # tokens: within an answer of some length


@given(st.integers(0, 1000))
def test_a_good_draft_is_never_paused(seed):
    chance = random.Random(seed)
    switch = Switch()
    rounds = [chance.choice([1, 2, 2, 3, 4]) for _ in range(600)]
    ratio = play(switch, 600, lambda i: rounds[i], lambda i: 1.3)
    assert switch.pauses == 0
    assert ratio < 0.7


def test_a_draft_that_becomes_good_is_found_again():
    switch = Switch()
    play(switch, 500, lambda i: 1, lambda i: 1.5)
    assert switch.pauses > 0
    before = switch.pauses
    play(switch, 3000, lambda i: 3, lambda i: 1.2)
    assert switch.on
    assert switch.pauses == before


def test_a_draft_that_becomes_bad_is_paused_soon():
    switch = Switch()
    play(switch, 500, lambda i: 4, lambda i: 1.2)
    bad = 0
    while switch.on and bad < 1000:
        switch.observe(1, 1.5, plain=1.0)
        bad += 1
    assert bad < 40


# 5. Threads and cores


def test_the_targets_core_is_its_own_beside_a_gpu():
    assert cores_for_draft([3, 1, 2], target_on_gpu=True) == ([1], [2, 3])
    assert cores_for_draft([0, 1], target_on_gpu=False) == ([0, 1], [0, 1])
    assert cores_for_draft([5], target_on_gpu=True) == ([5], [5])


# Calibration


@given(SHARES)
def test_before_anything_is_known_the_draft_is_believed(p):
    assert Calibration()(p) == pytest.approx(p)
    assert Uncalibrated()(p) == p


@given(st.lists(st.tuples(SHARES, st.booleans()), max_size=200), SHARES)
def test_calibrated_values_are_probabilities(seen, p):
    calibration = Calibration()
    for said, right in seen:
        calibration.observe(said, right)
    assert 0 <= calibration(p) <= 1


@pytest.mark.parametrize(("said", "true"), [(0.9, 0.5), (0.3, 0.6), (0.02, 0.1), (0.99, 0.97)])
def test_it_learns_how_often_the_draft_is_right(said, true):
    calibration, chance = Calibration(), random.Random(1)
    for _ in range(2000):
        calibration.observe(said, chance.random() < true)
    assert calibration(said) == pytest.approx(true, abs=0.05)


def test_other_probabilities_are_left_alone():
    calibration = Calibration()
    for _ in range(500):
        calibration.observe(0.9, False)
    assert calibration(0.1) == pytest.approx(0.1)
    assert calibration(0.9) < 0.05


def test_it_forgets():
    calibration = Calibration()
    for right in (False, True):
        for _ in range(2500):
            calibration.observe(0.5, right)
    assert calibration(0.5) > 0.9


def test_uncalibrated_learns_nothing():
    stubborn = Uncalibrated()
    for _ in range(100):
        stubborn.observe(0.5, False)
    assert stubborn(0.5) == 0.5


# The draft's clock

CURVE = CostCurve({1: 0.010, 2: 0.014})


def test_nothing_is_expected_of_a_draft_that_was_never_heard():
    assert DraftClock(CURVE, 0.001).outlook(0.0) is None


def test_a_running_step_is_due_after_its_cost():
    clock = DraftClock(CURVE, 0.001)
    clock.began(1.0, [4, 5])
    outlook = clock.outlook(1.004)
    assert outlook is not None
    assert outlook.next_in == pytest.approx(0.010)
    assert outlook.expanding == (4, 5)
    assert outlook.step == pytest.approx(0.011)
    late = clock.outlook(2.0)
    assert late is not None
    assert late.next_in == 0.0


def test_an_idle_draft_is_silent_until_a_commit():
    clock = DraftClock(CURVE, 0.001)
    clock.began(1.0, [])
    assert clock.outlook(1.0) is None
    clock.committed(2.0, interrupted=False)
    outlook = clock.outlook(2.0)
    assert outlook is not None
    assert outlook.next_in == pytest.approx(0.001)
    assert outlook.expanding == ()


def test_an_interrupted_step_is_over_at_once():
    clock = DraftClock(CURVE, 0.001)
    clock.began(1.0, [4])
    clock.committed(1.002, interrupted=False)
    assert clock.expanding == (4,)
    clock.committed(1.003, interrupted=True)
    outlook = clock.outlook(1.003)
    assert outlook is not None
    assert outlook.next_in == pytest.approx(0.001)
    assert clock.expanding == ()


def test_waiting_in_vain_is_not_repeated():
    clock = DraftClock(CURVE, 0.001)
    clock.began(1.0, [4])
    clock.silent()
    assert clock.outlook(1.0) is None
    clock.began(1.5, [6])
    assert clock.outlook(1.5) is not None


@pytest.mark.parametrize(
    ("prompt", "passes", "read", "unread"),
    [
        (200, 0.0045, 1.5e-4, 0),  # short prompts are read whole
        (1000, 0.0045, 1.5e-4, 744),  # eight passes are 240 tokens
        (1000, 0.018, 1.5e-4, 40),  # 960 while a slow target takes eight
        (1000, 0.018, 1e-5, 0),
        (1000, 0.0045, 0.0, 0),  # reading costs nothing
    ],
)
def test_how_much_of_a_prompt_a_draft_reads(prompt: int, passes: float, read: float, unread: int) -> None:
    assert tokens_unread(prompt, passes, read) == unread


# Looking for guesses where nothing hides it


def looked_in_vain(looks: Looks, rounds: int, cost: float) -> float:
    """Tokens of `off` that looks cost in so many plain rounds."""
    lost = 0.0
    for number in range(rounds):
        if number % looks.every == 0:
            looks.observe(1, 1 + cost, 1.0, in_vain=True)
            lost += cost
    return lost


@pytest.mark.parametrize("cost", [0.02, 0.08, 0.3])
def test_looks_in_vain_cost_little(cost: float) -> None:
    looks = Looks()
    lost = looked_in_vain(looks, 400, cost)
    assert looks.every > 1
    assert lost <= looks.credit + cost + 400 * max(0.012, cost / looks.rarest)
    assert lost >= looks.credit, "it goes on looking, now and then"


def test_one_success_and_looks_are_frequent_again() -> None:
    looks = Looks()
    looked_in_vain(looks, 50, 0.08)
    assert looks.every > 1
    looks.observe(3, 1.3, 1.0, in_vain=False)
    assert looks.every == 1
    for _ in range(100):
        looks.observe(2, 1.2, 1.0, in_vain=False)
    assert looked_in_vain(looks, 200, 0.08) < 200 * 0.025, "an old success does not pay for a long loss"
