from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from worlds import World, configs, parameters, said, worlds

from duodecoding import SamplingParams, realtime
from duodecoding.backends.scripted import ProtocolBroken
from duodecoding.core import BARE, LOOKS_EVERY, RESTLESS, Choose, Committed, DuoCore, Expand, Verdict, Verify, Wait, places, walk
from duodecoding.planner import Outlook
from duodecoding.sampling import Choice
from duodecoding.stream import Reader
from duodecoding.tree import ROOT, PassNode, Proposal
from duodecoding.types import EngineConfig, Mode, Source
from duodecoding.virtual import load_profile

# A drafter that says anything at any time: right guesses, wrong ones, late ones, twice, about nodes nobody knows.


@dataclass
class Chaos:
    """Knows the answer (an oracle), so that its guesses are often right and deep."""

    random: random.Random
    world: World
    answer: list[int]
    sent: list[Proposal] = field(default_factory=list)
    place: dict[int, int] = field(default_factory=dict)  # key -> position of the guess
    key: int = 0

    def burst(self, position: int) -> list[Proposal]:
        """Some guesses, about the root at `position` or anything else."""
        kinds = [self._chain, self._chain, self._under_a_guess, self._nonsense, self._again]
        return [proposal for _ in range(self.random.randrange(4)) for proposal in self.random.choice(kinds)(position)]

    def _right(self, position: int) -> int:
        """The target's token at a position, mostly."""
        i = position - len(self.world.prompt)
        if self.random.random() < 0.8 and 0 <= i < len(self.answer):
            return self.answer[i]
        return self.random.randrange(self.world.size)

    def _send(self, parent: int, position: int) -> Proposal:
        self.key += 1
        source = self.random.choice([Source.MODEL, Source.LOOKUP])
        proposal = Proposal(self.key, parent, self._right(position), self.random.random(), source)
        self.sent.append(proposal)
        self.place[self.key] = position
        return proposal

    def _chain(self, position: int) -> list[Proposal]:
        start = max(0, position - self.random.choice([0, 0, 0, 1, 4]))  # sometimes the news is old
        parent, chain = -start, []
        for depth in range(1, self.random.randrange(1, 7)):
            chain.append(self._send(parent, start + depth))
            parent = self.key
        return chain

    def _under_a_guess(self, position: int) -> list[Proposal]:
        if not self.sent:
            return []
        parent = self.random.choice(self.sent[-12:]).key
        return [self._send(parent, self.place[parent] + 1) for _ in range(2)]

    def _nonsense(self, position: int) -> list[Proposal]:
        parent = self.random.choice([10**9, -(position + 1), -(position + 50), 10**6])
        return [self._send(parent, position + 1)]

    def _again(self, position: int) -> list[Proposal]:
        return [self.random.choice(self.sent)] if self.sent else []


def play(world: World, params: SamplingParams, config: EngineConfig, chaos: Chaos) -> tuple[DuoCore, list[str]]:
    """A driver in which guesses come whenever they like, also while a pass is under way."""
    target = world.target()
    vocabulary = target.vocabulary
    reader = Reader(vocabulary.piece, params.stop)
    core = DuoCore(
        world.prompt,
        params,
        config,
        context=world.context,
        end_tokens=vocabulary.end_tokens,
        stop=reader,
        drafts=chaos.random.random() < 0.8,
    )
    conversation = target.open(world.prompt, params)
    texts: list[str] = []
    while (work := core.step()) is not None:
        core.nodes_arrived(chaos.burst(core.tree.position))
        if isinstance(work, Expand):
            if chaos.random.random() < 0.2:
                core.draft_exhausted()
            continue
        assert isinstance(work, Verify)
        choose = target.verify([(conversation, work.guesses)])[0]
        core.nodes_arrived(chaos.burst(core.tree.position))
        gained = core.verdict_arrived(work, walk(work.guesses, choose))
        conversation.commit([committed.token for committed in gained])
        texts += reader.take(len(gained), last=core.finish_reason is not None)
        core.nodes_arrived(chaos.burst(core.tree.position - len(gained)))  # sent before the verdict was known
    return core, texts


@settings(max_examples=250)
@given(worlds(), parameters(), configs(list(Mode)), st.integers(0, 2**32))
def test_no_interleaving_changes_the_answer(world: World, params: SamplingParams, config: EngineConfig, seed: int) -> None:
    assume(len(world.prompt) < world.context)
    plain = world.plain(params)
    core, texts = play(world, params, config, Chaos(random.Random(seed), world, plain.token_ids))
    assert [committed.token for committed in core.answer] == plain.token_ids
    assert [committed.logprob for committed in core.answer] == [token.logprob for token in plain.tokens]
    assert texts == [token.text for token in plain.tokens]
    assert core.finish_reason == plain.finish_reason
    assert core.accepted == sum(core.accepted_by_source.values()) <= core.verified
    assert len(core.answer) == core.accepted + sum(committed.source is Source.TARGET for committed in core.answer)


def test_chaos_is_often_right() -> None:
    """Else the property above would say little."""
    accepted = rounds = 0
    for seed in range(20):
        world = World(seed=seed)
        params = SamplingParams(max_tokens=40, ignore_eos=True, temperature=0.8, seed=seed)
        core, _ = play(world, params, EngineConfig(), Chaos(random.Random(seed), world, world.plain(params).token_ids))
        accepted, rounds = accepted + core.accepted, rounds + core.rounds
    assert accepted > rounds // 4 > 0


# The acceptance rule


def choices_of(answers: dict[int, int]) -> Choose:
    return lambda i: Choice(answers[i], 0.0)


TREE = (PassNode(ROOT, 1), PassNode(0, 2), PassNode(0, 3), PassNode(ROOT, 4), PassNode(3, 2), PassNode(4, 5))


@pytest.mark.parametrize(
    ("answers", "accepted"),
    [
        ({ROOT: 9}, ()),
        ({ROOT: 2}, ()),  # a guess, but below another node
        ({ROOT: 1, 0: 3, 2: 7}, (0, 2)),
        ({ROOT: 1, 0: 5}, (0,)),
        ({ROOT: 4, 3: 2, 4: 5, 5: 1}, (3, 4, 5)),
    ],
)
def test_walk(answers: dict[int, int], accepted: tuple[int, ...]) -> None:
    verdict = walk(TREE, choices_of(answers))
    assert walk(TREE, choices_of(answers), places(TREE)) == verdict
    assert verdict.accepted == accepted
    assert [choice.token for choice in verdict.choices] == list(answers.values())


def test_walk_without_guesses_is_plain_decoding() -> None:
    assert walk((), choices_of({ROOT: 5})) == Verdict((), (Choice(5, 0.0),))


# Mutants of it. The target is not strict here: nothing but the equality of answers may find them.

Walk = Callable[[Sequence[PassNode], Choose], Verdict]


def below(guesses: Sequence[PassNode], at: int) -> list[int]:
    return [i for i, guess in enumerate(guesses) if guess.parent == at]


def descend(guesses: Sequence[PassNode], choose: Choose, pick: Callable[[int, int], int | None]) -> Verdict:
    """The walk with another rule: `pick(at, token)` says where to go from `at` when the target said `token`."""
    accepted: list[int] = []
    choices = [choose(ROOT)]
    at = pick(ROOT, choices[0].token)
    while at is not None:
        accepted.append(at)
        choices.append(choose(at))
        at = pick(at, choices[-1].token)
    return Verdict(tuple(accepted), tuple(choices))


def right_child(guesses: Sequence[PassNode], at: int, token: int) -> int | None:
    return next((i for i in below(guesses, at) if guesses[i].token == token), None)


def accepts_a_sibling(guesses: Sequence[PassNode], choose: Choose) -> Verdict:
    return descend(guesses, choose, lambda at, token: (below(guesses, at) or [None])[0])


def accepts_the_last_sibling(guesses: Sequence[PassNode], choose: Choose) -> Verdict:
    def pick(at: int, token: int) -> int | None:
        return below(guesses, at)[-1] if right_child(guesses, at, token) is not None else None

    return descend(guesses, choose, pick)


def ignores_the_parent(guesses: Sequence[PassNode], choose: Choose) -> Verdict:
    def pick(at: int, token: int) -> int | None:
        return next((i for i, guess in enumerate(guesses) if i > at and guess.token == token), None)

    return descend(guesses, choose, pick)


def does_not_check_the_first(guesses: Sequence[PassNode], choose: Choose) -> Verdict:
    return descend(guesses, choose, lambda at, token: 0 if at == ROOT and guesses else right_child(guesses, at, token))


def accepts_one_too_many(guesses: Sequence[PassNode], choose: Choose) -> Verdict:
    verdict = walk(guesses, choose)
    at = verdict.accepted[-1] if verdict.accepted else ROOT
    more = below(guesses, at)
    return Verdict((*verdict.accepted, more[0]), (*verdict.choices, choose(more[0]))) if more else verdict


def takes_the_draft_s_token(guesses: Sequence[PassNode], choose: Choose) -> Verdict:
    verdict = walk(guesses, choose)
    more = below(guesses, verdict.accepted[-1] if verdict.accepted else ROOT)
    bonus = Choice(guesses[more[0]].token, 0.0) if more else verdict.choices[-1]
    return Verdict(verdict.accepted, (*verdict.choices[:-1], bonus))


def repeats_the_bonus(guesses: Sequence[PassNode], choose: Choose) -> Verdict:
    verdict = walk(guesses, choose)
    return Verdict(verdict.accepted, (verdict.choices[0], *verdict.choices[:-1]))


def drops_the_bonus(guesses: Sequence[PassNode], choose: Choose) -> Verdict:
    verdict = walk(guesses, choose)
    return Verdict(verdict.accepted, verdict.choices[:-1])


def skips_an_accepted_token(guesses: Sequence[PassNode], choose: Choose) -> Verdict:
    verdict = walk(guesses, choose)
    return Verdict(verdict.accepted[1:], verdict.choices[1:]) if verdict.accepted else verdict


def asks_the_parent(guesses: Sequence[PassNode], choose: Choose) -> Verdict:
    """The token after a guess taken from the row of its parent: an index off by one."""
    return walk(guesses, lambda i: choose(i if i == ROOT else guesses[i].parent))


def asks_the_neighbour(guesses: Sequence[PassNode], choose: Choose) -> Verdict:
    return walk(guesses, lambda i: choose(max(ROOT, i - 1)))


MUTANTS: list[Walk] = [
    accepts_a_sibling,
    accepts_the_last_sibling,
    ignores_the_parent,
    does_not_check_the_first,
    accepts_one_too_many,
    takes_the_draft_s_token,
    repeats_the_bonus,
    drops_the_bonus,
    skips_an_accepted_token,
    asks_the_parent,
    asks_the_neighbour,
]


def worlds_where_answers_differ(rule: Walk, monkeypatch: pytest.MonkeyPatch, *, strict: bool = False) -> int:
    """In how many of 24 worlds a rule changes the answer (or breaks the engine)."""
    monkeypatch.setattr(realtime, "walk", lambda guesses, choose, where=None: rule(guesses, choose))
    different = 0
    for seed in range(24):
        world = World(seed=seed, share=0.3)
        params = SamplingParams(max_tokens=24, temperature=(0.0, 0.8)[seed % 2], seed=seed, ignore_eos=True)
        config = EngineConfig(mode=Mode.SERIAL, draft_length=4, max_nodes=16)
        plain = EngineConfig(mode=Mode.OFF)
        try:
            different += said(world.answer(config, params, strict=strict)) != said(world.answer(plain, params, strict=strict))
        except (ValueError, ProtocolBroken):
            different += 1
    return different


@pytest.mark.sources
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_wrong_acceptance_rule_changes_the_answer(mutant: Walk, monkeypatch: pytest.MonkeyPatch) -> None:
    assert worlds_where_answers_differ(mutant, monkeypatch) > 0


def test_the_right_acceptance_rule_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    assert worlds_where_answers_differ(walk, monkeypatch) == 0


@pytest.mark.sources
@pytest.mark.parametrize("mutant", [accepts_a_sibling, ignores_the_parent, does_not_check_the_first, takes_the_draft_s_token])
def test_the_scripted_target_notices_too(mutant: Walk, monkeypatch: pytest.MonkeyPatch) -> None:
    assert worlds_where_answers_differ(mutant, monkeypatch, strict=True) > 0


# Ends


def core_of(answer: list[int], *, context: int = 64, mode: Mode = Mode.SERIAL, **params: object) -> tuple[DuoCore, list[Committed]]:
    """An answer for which every token is guessed rightly in one pass of a chain."""
    stop = params.pop("stop_at", None)
    core = DuoCore(
        [0, 0],
        SamplingParams(**params),  # type: ignore[arg-type]
        EngineConfig(mode=mode, max_nodes=32, draft_length=32),
        context=context,
        end_tokens=frozenset({1}),
        stop=lambda token: token == stop,
        drafts=False,
    )
    core.nodes_arrived(Proposal(i + 1, -1 if i == 0 else i, token, 0.9, Source.MODEL) for i, token in enumerate(answer[:-1]))
    work = core.step()
    assert isinstance(work, Verify)
    verdict = walk(work.guesses, lambda i: Choice(answer[i + 1], -1.0))
    return core, core.verdict_arrived(work, verdict)


@pytest.mark.parametrize("mode", [Mode.CHAIN, Mode.SERIAL])
def test_an_end_token_in_the_middle_of_an_accepted_path(mode: Mode) -> None:
    core, gained = core_of([5, 6, 1, 7, 8], mode=mode)
    assert [committed.token for committed in gained] == [5, 6, 1]
    assert core.finish_reason == "stop"
    assert core.step() is None
    assert core.accepted == 3


def test_an_end_token_can_be_ignored() -> None:
    core, gained = core_of([5, 6, 1, 7, 8], ignore_eos=True)
    assert [committed.token for committed in gained] == [5, 6, 1, 7, 8]
    assert core.finish_reason is None


def test_a_stop_in_the_middle_of_an_accepted_path() -> None:
    core, gained = core_of([5, 6, 7, 8], stop_at=6)
    assert [committed.token for committed in gained] == [5, 6]
    assert core.finish_reason == "stop"


@pytest.mark.parametrize("limit", [1, 2, 3, 4])
def test_max_tokens_in_the_middle_of_a_chain(limit: int) -> None:
    core, gained = core_of([5, 6, 7, 8, 9], max_tokens=limit)
    assert [committed.token for committed in gained] == [5, 6, 7, 8, 9][:limit]
    assert core.finish_reason == "length"
    assert core.verified == limit - 1  # a guess of the last token would tell nothing


def test_the_end_of_the_context() -> None:
    core, gained = core_of([5, 6, 7, 8, 9], context=5)
    assert [committed.token for committed in gained] == [5, 6, 7]
    assert core.finish_reason == "length"
    assert core.tree.tokens == [0, 0, 5, 6, 7]


def test_sources_and_counts() -> None:
    core, gained = core_of([5, 6, 7])
    assert [committed.source for committed in gained] == [Source.MODEL, Source.MODEL, Source.TARGET]
    assert (core.rounds, core.drafted, core.verified, core.accepted) == (1, 2, 2, 2)
    assert core.accepted_by_source == {Source.MODEL: 2}


def test_cancel_ends_an_answer_and_leaves_a_complete_one() -> None:
    core, _ = core_of([5, 6, 7])
    core.cancel()
    assert core.finish_reason == "cancelled"
    assert core.step() is None
    core, _ = core_of([5, 1])
    core.cancel()
    assert core.finish_reason == "stop"


def test_off_verifies_nothing_whatever_arrives() -> None:
    core = DuoCore([0], SamplingParams(), EngineConfig(mode=Mode.OFF), context=9)
    core.nodes_arrived([Proposal(1, 0, 5, 0.9, Source.LOOKUP)])
    work = core.step()
    assert isinstance(work, Verify)
    assert work.guesses == ()


def test_drafting_stops_when_the_draft_has_nothing() -> None:
    core = DuoCore([0], SamplingParams(), EngineConfig(mode=Mode.SERIAL, draft_length=3), context=99)
    assert isinstance(core.step(), Expand)
    core.draft_exhausted()
    assert isinstance(core.step(), Verify)


def test_no_drafting_for_the_last_token() -> None:
    core = DuoCore([0], SamplingParams(max_tokens=1), EngineConfig(mode=Mode.SERIAL), context=99)
    assert isinstance(core.step(), Verify)


def test_the_pass_has_at_most_max_nodes() -> None:
    core = DuoCore([0], SamplingParams(), EngineConfig(mode=Mode.SERIAL, max_nodes=3), context=99, drafts=False)
    core.nodes_arrived(Proposal(i, 0, i, 0.1, Source.MODEL) for i in range(1, 9))
    work = core.step()
    assert isinstance(work, Verify)
    assert len(work.nodes) == 3


# Cases that once were, or could be, trouble


@settings(max_examples=50)
@given(st.integers(0, 1000), st.sampled_from([Mode.CHAIN, Mode.SERIAL]))
@example(0, Mode.CHAIN)
def test_a_draft_that_is_the_target_is_always_right(seed: int, mode: Mode) -> None:
    world = World(seed=seed, share=0.0, drafts=("model",))
    params = SamplingParams(max_tokens=30, temperature=0.9, seed=seed, ignore_eos=True)
    result = world.answer(EngineConfig(mode=mode, draft_length=4), params)
    assert said(result) == said(world.plain(params))
    assert result.stats.rounds <= 30 // 2  # how far a path goes is the budget's choice, that it is right is not


@settings(max_examples=50)
@given(st.integers(0, 1000))
def test_a_draft_with_a_context_shorter_than_the_prompt(seed: int) -> None:
    world = World(seed=seed, prompt=(0, 3, 4, 5, 6), draft_context=3, drafts=("model",))
    result = world.answer(EngineConfig(), SamplingParams(max_tokens=12))
    assert said(result) == said(world.plain(SamplingParams(max_tokens=12)))
    assert result.stats.drafted == 0


def test_more_tokens_give_a_longer_version_of_the_same_answer() -> None:
    world = World(seed=5)
    params = SamplingParams(max_tokens=40, temperature=0.8, ignore_eos=True)
    long = world.answer(EngineConfig(), params).token_ids
    for tokens in (1, 7, 39):
        assert world.answer(EngineConfig(), replace(params, max_tokens=tokens)).token_ids == long[:tokens]


@pytest.mark.parametrize(("left", "waits"), [(50, True), (4, True), (3, False), (2, False)])
def test_nobody_waits_for_guesses_behind_the_answers_end(left: int, waits: bool) -> None:
    """Two sure guesses are there; the draft is about to say what follows the second one."""
    params, costs = SamplingParams(max_tokens=left, ignore_eos=True), load_profile("h200-32b")
    core = DuoCore([1, 2], params, EngineConfig(mode=Mode.DUO), context=4096, costs=costs)
    core.nodes_arrived([Proposal(1, -1, 7, 0.99, Source.MODEL), Proposal(2, 1, 8, 0.99, Source.MODEL)])
    found = core.step(Outlook(next_in=1e-4, expanding=(2,), step=1e-3))
    assert isinstance(found, Wait if waits else Verify)


@pytest.mark.parametrize(("foreseen", "step", "waits"), [(False, 4e-4, True), (True, 4e-4, False), (False, 3e-3, False)])
def test_copies_below_a_surprise_are_believed_by_half(foreseen: bool, step: float, waits: bool) -> None:
    """A chain was copied below the root, or below a token that the model has named; the model is about to say what follows there. A
    pass takes 18 ms."""
    params, costs = SamplingParams(max_tokens=50, ignore_eos=True), load_profile("h200-32b")
    core = DuoCore([1, 2], params, EngineConfig(mode=Mode.DUO), context=4096, costs=costs)
    above = 1 if foreseen else -1
    if foreseen:
        core.nodes_arrived([Proposal(1, -1, 7, 0.99, Source.MODEL)])
    core.nodes_arrived([Proposal(10 + i, above if i == 0 else 9 + i, 20 + i, 0.9, Source.LOOKUP) for i in range(6)])
    found = core.step(Outlook(next_in=step, expanding=(above,), step=step))
    assert isinstance(found, Wait if waits else Verify)


@pytest.mark.parametrize(("width", "waits"), [(4, True), (1, False)])
def test_the_draft_is_expected_to_expand_as_many_leaves_as_it_may(width: int, waits: bool) -> None:
    """What it is at has died; its next step takes a quarter of a pass, which only guesses below both of its leaves are worth."""
    params, costs = SamplingParams(max_tokens=50, ignore_eos=True), load_profile("h200-32b")
    core = DuoCore([1, 2], params, EngineConfig(mode=Mode.DUO, draft_width=width), context=4096, costs=costs)
    core.nodes_arrived([Proposal(1, -1, 7, 0.4, Source.MODEL), Proposal(2, -1, 8, 0.35, Source.MODEL)])
    found = core.step(Outlook(next_in=0.0, expanding=(999,), step=4.5e-3))
    assert isinstance(found, Wait if waits else Verify)


def test_what_is_never_of_use_is_looked_for_less_often() -> None:
    core = DuoCore([1, 2], SamplingParams(max_tokens=100), EngineConfig(mode=Mode.DUO), context=1000)
    looked = []
    for _ in range(RESTLESS + 4 * LOOKS_EVERY):
        looked.append(core.looking)
        core.verdict_arrived(BARE, Verdict((), (Choice(5, 0.0),)))
    assert all(looked[: RESTLESS - 1])
    assert sum(looked[RESTLESS:]) == 4
    core.nodes_arrived([Proposal(1, -core.tree.position, 7, 0.9, Source.LOOKUP)])
    work = core.step()
    assert isinstance(work, Verify)
    core.verdict_arrived(work, Verdict((), (Choice(5, 0.0),)))
    assert core.looking, "a pass over guesses, right or wrong, and all is as in the beginning"


def test_where_looking_costs_more_than_it_brings_it_is_rare() -> None:
    costs = load_profile("h200-7b")
    core = DuoCore([1, 2], SamplingParams(max_tokens=300), EngineConfig(mode=Mode.DUO), context=1000, costs=costs)
    plain, looked = costs.verify_cost(1, 2), 0
    for number in range(200):
        looking = core.looking
        core.nodes_arrived([Proposal(number + 1, -core.tree.position, 7, 0.9, Source.LOOKUP)])  # so not for want of guesses
        work = core.step()
        assert isinstance(work, Verify)
        core.verdict_arrived(work, Verdict((), (Choice(5, 0.0),)))
        if looking:
            looked += 1
            core.looked(1, 1.1 * plain)
    assert 10 < looked < 40


@pytest.mark.sources
def test_a_pass_that_runs_is_time_to_look_up_prices(monkeypatch: pytest.MonkeyPatch) -> None:
    costs = load_profile("h200-7b")
    looked: list[int] = []
    curve = type(costs).round_curve
    monkeypatch.setattr(type(costs), "round_curve", lambda self, context: looked.append(context) or curve(self, context))
    core = DuoCore([1, 2, 3], SamplingParams(max_tokens=99), EngineConfig(mode=Mode.DUO), context=512, costs=costs)
    assert core.step() is BARE
    assert not looked  # the first token does not wait for it
    core.look_ahead()
    assert looked
    core.verdict_arrived(BARE, Verdict((), (Choice(4, 0.0),)))
    for key in range(40):
        core.look_ahead()
        before = len(looked)
        core.nodes_arrived([Proposal(key + 1, -core.tree.position, 5, 0.9, Source.MODEL)])
        assert core.least_chance > 0
        work = core.step()
        assert isinstance(work, Verify)
        assert work.nodes
        core.verdict_arrived(work, Verdict((), (Choice(4, 0.0),)))
        assert len(looked) == before, key
    assert len(looked) > 2  # they are looked up again now and then
