"""Virtual time with scripted models: the answer is the recorded one in every mode, the bill adds up, two runs agree to the byte."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds import World, configs

from duodecoding.bench import simulate as bench
from duodecoding.costs import CostCurve, Longer, Profile
from duodecoding.errors import UsageError
from duodecoding.prompts import Prompt
from duodecoding.trace import Did, Lane
from duodecoding.types import EngineConfig, Mode, SamplingParams
from duodecoding.virtual import FREE, Recording, Simulation, load_profile

H200 = replace(load_profile("h200-7b"), host=None)  # without our own work between passes a bill is easy to check
WORLD = World(context=700, draft_context=700, share=0.4, memory=3)
EVERY = [*bench.MODES, bench.PEARL]


def quiet(what: str, share: float) -> None:
    assert 0 <= share <= 1


def recordings(world: World, *, answers: int = 2, tokens: int = 64, **params) -> list[Recording]:
    found = []
    for number in range(answers):
        prompt = (0, 5, 7, 2 + number // 20, 2 + number % 20)  # other answers to other prompts
        said = replace(world, prompt=prompt).plain(SamplingParams(max_tokens=tokens, ignore_eos=True, **params))
        found.append(Recording(f"task {number % 2}", prompt, tuple(said.token_ids), SamplingParams(max_tokens=tokens, **params)))
    return found


def study(world: World = WORLD, *, draft: bool = True, lookup: bool = True, **kind) -> bench.Study:
    return bench.Study(recordings(world, **kind), world.draft() if draft else None, lookup, world.size)


@pytest.fixture(scope="module")
def results() -> dict:
    return bench.simulate(study(), H200, EVERY, quiet, ablate=True)["modes"]


def test_two_runs_print_the_same_bytes(results):
    again = bench.simulate(study(), H200, EVERY, quiet, ablate=True)["modes"]
    assert json.dumps(again) == json.dumps(results)


@pytest.mark.parametrize("mode", EVERY)
def test_a_mode_does_not_depend_on_those_before_it(mode, results):
    assert bench.simulate(study(), H200, [mode], quiet)["modes"][mode] == results[mode]


def test_the_report(results):
    assert list(results) == [*(m for m in EVERY if m != FREE), *bench.ablations(), FREE]
    for name, mode in results.items():
        assert set(mode["speedup"]) == {"task 0", "task 1", "mean"}
        assert mode["speedup"]["mean"] == pytest.approx((mode["speedup"]["task 0"] + mode["speedup"]["task 1"]) / 2, abs=1e-3)
        assert mode["tokens_per_round"] >= 1
        for share in ("target_idle", "draft_idle", "hidden_draft_share"):
            assert 0 <= mode[share] <= 1, name
    assert set(results["off"]["speedup"].values()) == {1.0}
    assert results["off"]["tokens_per_round"] == 1.0
    assert results["off"]["target_idle"] == 0
    assert results["chain"]["hidden_draft_share"] == 0
    assert results["chain"]["settings"]["draft_length"] in bench.CHAIN_LENGTHS
    assert (results["serial"]["settings"]["draft_length"], results["serial"]["settings"]["draft_width"]) in bench.SERIAL_SHAPES


def test_nothing_is_faster_than_free_drafting(results):
    for name, mode in results.items():
        for task, speed in mode["speedup"].items():
            assert speed <= results[FREE]["speedup"][task] * 1.001, (name, task)


def test_a_good_draft_pays_in_every_mode(results):
    for mode in EVERY:
        if mode != Mode.OFF:
            assert results[mode]["speedup"]["mean"] > 1.05, mode


def test_where_a_draft_step_is_a_fifth_of_a_pass_both_at_once_beat_taking_turns():
    """With steps as cheap as our own engine's it is the other way round in such a world, whose draft is right or clueless: then
    nothing drafted ahead is of use, and `duo` does not wait as long for new guesses as `chain` drafts them."""
    slow = H200.with_draft(CostCurve({1: 0.00094, 2: 0.00116, 4: 0.0016}))
    found = bench.simulate(study(), slow, ["chain", "duo"], quiet)["modes"]
    assert found["duo"]["speedup"]["mean"] > found["chain"]["speedup"]["mean"]


def test_the_first_token_is_not_later_than_in_plain_decoding(results):
    assert results["duo"]["ttft_seconds"] == results["off"]["ttft_seconds"]


@pytest.mark.parametrize("free", [False, True])
@pytest.mark.parametrize("profile", ["h200-7b", "h200-32b"])
def test_a_useless_draft_costs_at_most_three_percent(profile, free):
    world = replace(WORLD, share=1.0)  # its answers hardly repeat themselves, so free guesses are of no use either
    useless = study(world, lookup=free, answers=12, tokens=256)
    found = bench.simulate(useless, load_profile(profile), ["duo"], quiet)["modes"]["duo"]
    assert found["speedup"]["mean"] >= 0.97


@pytest.mark.parametrize("lookup", [True, False])
def test_without_a_draft_model(lookup):
    repetitive = replace(WORLD, memory=1)
    found = bench.simulate(study(repetitive, draft=False, lookup=lookup), H200, EVERY, quiet)["modes"]
    for mode, result in found.items():
        assert result["draft_idle"] == 1.0
        assert result["hidden_draft_share"] == 0.0
        assert (result["speedup"]["mean"] > 1.0) == (lookup and mode != Mode.OFF)
        assert lookup or result["speedup"]["mean"] == 1.0


def test_sampled_answers_are_replayed_too():
    sampled = study(temperature=0.8, seed=5)
    found = bench.simulate(sampled, H200, ["duo", FREE], quiet)["modes"]
    assert 1 < found["duo"]["speedup"]["mean"] <= found[FREE]["speedup"]["mean"]


# One answer


def simulation(setup: bench.Setup, world: World = WORLD, profile: Profile = H200, **kind) -> Simulation:
    return next(study(world, answers=1, **kind).simulations(setup, profile))


def flat(verify: float, draft: float) -> Profile:
    return Profile("flat", "", True, {512: CostCurve({1: verify})}, CostCurve({1: draft}), 0.001, 0.0005, 1e-5)


def test_what_plain_decoding_costs():
    run = simulation(bench.setups("off")[0], profile=flat(0.01, 0.001), tokens=40)
    tally = run.run()
    assert tally.seconds == pytest.approx(5 * 0.001 + 40 * 0.01)
    assert tally.first_token == pytest.approx(5 * 0.001 + 0.01)
    assert (tally.tokens, tally.rounds, tally.draft_busy, tally.wait) == (40, 40, 0, 0)
    assert tally.target_busy == pytest.approx(tally.seconds)


def test_what_a_chain_of_a_perfect_draft_costs():
    perfect = replace(WORLD, share=0.0)
    chain = bench.Setup(EngineConfig(mode=Mode.CHAIN, draft_length=3))
    tally = simulation(chain, perfect, flat(0.01, 0.001), tokens=40).run()
    assert tally.rounds == 10
    # The draft reads the prompt, in turn, before it can guess.
    assert tally.seconds == pytest.approx(5 * (0.001 + 0.0005) + 10 * (3 * 0.001 + 0.01))
    assert tally.draft_busy == pytest.approx(0.030)
    assert tally.hidden == 0


def test_a_perfect_draft_beside_the_target_is_hidden():
    perfect = replace(WORLD, share=0.0)
    run = simulation(bench.setups("duo")[0], perfect, flat(0.01, 0.001), lookup=False, tokens=96)
    tally = run.run()
    # Ten steps fit under a pass: nearly ten tokens a round in the time of one.
    assert tally.tokens / tally.rounds > 4
    assert tally.hidden / tally.draft_busy > 0.8


@settings(max_examples=25)
@given(
    configs(list(Mode)),
    st.sampled_from([0.0, 0.3, 1.0]),
    st.sampled_from([1e-9, 0.0005, 0.004, 0.05]),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.sampled_from(["auto", "on"]),
)
def test_the_bill_adds_up(config, share, step, waits, hedges, lookup, recycling, turns):
    config = replace(config, turns=turns)
    setup = bench.Setup(config, lookup=lookup, recycling=recycling, waits=waits, hedges=hedges)
    run = simulation(setup, replace(WORLD, share=share), replace(H200, draft=CostCurve({1: step, 8: 2 * step})), tokens=48)
    tally = run.run()  # raises if the answer is not the recorded one
    assert tally.tokens == 48
    assert 0 <= tally.hidden <= tally.draft_busy * (1 + 1e-9)
    assert tally.target_busy + tally.wait <= tally.seconds * (1 + 1e-9)
    assert tally.draft_busy <= tally.seconds * (1 + 1e-9)
    assert 0 < tally.first_token <= tally.seconds
    if not waits or config.mode is not Mode.DUO or turns == "on":
        assert tally.wait == 0
    if turns == "on" and config.mode is Mode.DUO:
        assert tally.hidden == 0
    check_timeline(run)


def test_a_draft_in_turns_makes_as_many_steps_as_pay():
    duo = bench.setups("duo")[0]
    setup, perfect = replace(duo, config=replace(duo.config, turns="on"), lookup=False, recycling=False), replace(WORLD, share=0.0)
    cheap = simulation(setup, perfect, flat(0.01, 0.0001), tokens=48).run()
    assert cheap.tokens / cheap.rounds > 4
    assert cheap.first_token == pytest.approx(5 * 0.001 + 0.01), "the draft reads the prompt after it"
    assert cheap.seconds == pytest.approx(5 * (0.001 + 0.0005) + 0.01 * cheap.rounds + cheap.draft_busy)
    dear = simulation(setup, perfect, flat(0.01, 0.02), tokens=48).run()
    assert dear.draft_busy == 0
    never = simulation(replace(setup, waits=False), perfect, flat(0.01, 0.0001), tokens=48).run()
    assert never.draft_busy == 0


def test_our_own_work_between_passes_is_charged():
    setup = bench.setups("off")[0]
    free = simulation(setup, tokens=24).run()
    billed = simulation(setup, profile=replace(H200, host=CostCurve({1: 0.0005})), tokens=24).run()
    assert billed.rounds == free.rounds
    assert billed.target_busy == pytest.approx(free.target_busy)
    assert billed.seconds == pytest.approx(free.seconds + 0.0005 * free.rounds)


@pytest.mark.parametrize("mode", ["off", "duo"])
def test_reading_the_prompt_takes_what_was_measured(mode):
    run = simulation(bench.setups(mode)[0], profile=replace(H200, prompts=CostCurve({1: 0.25, 64: 0.5})), tokens=8)
    tally = run.run()
    assert tally.first_token == pytest.approx(0.25 * (1 + (len(run.recording.prompt) - 1) / 63))


@pytest.mark.parametrize("mode", ["chain", "serial", "lockstep", "duo"])
def test_draft_steps_take_longer_with_more_context(mode):
    setup, plain = bench.setups(mode)[-1], flat(0.010, 0.002)
    run = simulation(setup, profile=replace(plain, longer=Longer(5, CostCurve({1: 0.0001}))))
    run.run()
    steps = run.timeline.of(Lane.DRAFT, Did.STEP)
    assert len(steps) > 5
    seconds = [step.seconds for step in steps[:-1]]  # the last one may be cut off
    if mode == "duo":  # others may be broken off
        seconds = [taken for taken in seconds if taken > 0.0019]
    assert min(seconds) == pytest.approx(0.002, abs=0.0006)  # behind a prompt of five tokens
    assert max(seconds) > 0.002 + 0.0001 * 40
    assert simulation(setup, profile=plain).run().seconds < run.tally.seconds


@pytest.mark.parametrize("step", [0.0001, 0.002])
def test_in_lockstep_our_own_work_comes_after_the_slower_side(step):
    """A round waits for the budget's last step, then the tokens are taken in: neither hides the other."""
    costs = replace(flat(0.010, step), host=CostCurve({1: 0.003}))
    run = simulation(bench.setups("lockstep")[0], profile=costs)
    run.run()
    begun = [begin for begin, _, _ in run.passes]
    steps = run.timeline.of(Lane.DRAFT, Did.STEP)
    for begin, following in pairwise(begun):
        drafting = sum(span.end - span.begin for span in steps if begin <= span.begin < following)
        slower = max(0.010, drafting + 2 * costs.latency)
        assert following - begin == pytest.approx(slower + 0.003)


def test_guesses_that_do_not_pay_for_our_own_work_are_left_out():
    dear = replace(H200, host=CostCurve({1: 1e-5, 2: 1.0}))
    run = simulation(bench.setups("duo")[0], profile=dear, tokens=24).run()
    assert run.tokens == run.rounds


def check_timeline(run: Simulation) -> None:
    line, tally = run.timeline, run.tally
    passes = line.of(Lane.TARGET, Did.PASS)
    assert len(passes) == tally.rounds
    assert sum(event.args["gained"] for event in passes) == tally.tokens
    assert sum(event.seconds for event in line.of(Lane.TARGET, Did.PASS, Did.PROMPT)) == pytest.approx(tally.target_busy)
    assert sum(event.seconds for event in line.of(Lane.TARGET, Did.WAIT)) == pytest.approx(tally.wait)
    assert sum(event.seconds for event in line.of(Lane.DRAFT, Did.STEP)) == pytest.approx(tally.draft_busy)
    assert len(line.of(Lane.TARGET, Did.COMMIT)) == tally.rounds
    assert line.end == pytest.approx(tally.seconds, abs=2.1 * H200.latency)  # lockstep ends with messages
    for lane in Lane:
        busy = [event for event in line.of(lane) if event.name is not Did.COMMIT]
        for before, after in pairwise(busy):
            assert before.end <= after.begin + 1e-12, (before, after)


def test_without_waiting_the_target_never_waits():
    setup = replace(bench.setups("duo")[0], waits=False)
    assert simulation(setup).run().wait == 0


def test_without_hedging_only_one_leaf_is_expanded_at_a_time():
    run = simulation(replace(bench.setups("duo")[0], hedges=False))
    run.run()
    assert {event.args["leaves"] for event in run.timeline.of(Lane.DRAFT, Did.STEP)} == {1}


# Recording


def test_answers_are_recorded_through_the_chat_template():
    prompts = {
        "qa": [Prompt("1", "qa", ("abc", "ignored")), Prompt("2", "qa", ("a" * 600,))],
        "rag": [Prompt("1", "rag", ("def",))],
    }
    found, skipped = bench.record(WORLD.target(), prompts, SamplingParams(max_tokens=200), quiet)
    assert [recording.task for recording in found] == ["qa", "rag"]
    assert skipped == ["qa 2"]
    target = WORLD.target()
    assert found[0].prompt == tuple(bench.chat_tokens(target.vocabulary, "abc"))
    assert found[0].prompt[0] == 0  # begin of text, once


def test_prompts_that_are_all_too_long():
    with pytest.raises(UsageError, match="every prompt is too long"):
        bench.record(WORLD.target(), {"qa": [Prompt("1", "qa", ("a" * 699,))]}, SamplingParams(), quiet)


def test_unknown_modes_are_refused():
    with pytest.raises(UsageError, match="unknown mode 'warp'"):
        bench.setups("warp")
