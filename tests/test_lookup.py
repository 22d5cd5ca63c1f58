"""Lookup: the automaton against a plain search, the chains that come of it, and the store across answers."""

from __future__ import annotations

import logging
import multiprocessing
import os
import random
from array import array
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from duodecoding import LLM, SamplingParams
from duodecoding.backends.scripted import ScriptedVocabulary
from duodecoding.drafters import lookup as module
from duodecoding.drafters import store as store_module
from duodecoding.drafters.automaton import DEEPEST, START, SuffixAutomaton
from duodecoding.drafters.lookup import CHAINS, FLOOR, LONGEST, MOSTLY, ONLY, SOMETIMES, LookupDrafter
from duodecoding.drafters.record import Record
from duodecoding.drafters.store import MAGIC, SEPARATOR, Store
from duodecoding.errors import UsageError
from duodecoding.sampling import Luck
from duodecoding.tree import Proposal, TokenTree
from duodecoding.types import Source

TEXTS = st.lists(st.integers(0, 3), max_size=60) | st.lists(st.sampled_from([(1, 2, 3), (1, 2, 4), (7,)]), max_size=30).map(
    lambda parts: [token for part in parts for token in part]
)
VOCABULARY = ScriptedVocabulary(40)


# The automaton


def places(text: list[int], word: list[int]) -> list[int]:
    """Where a word is followed by a token."""
    return [end for end in range(len(word), len(text)) if text[end - len(word) : end] == word]


@settings(max_examples=300)
@given(TEXTS)
def test_the_match_is_the_longest_end_that_occurred_before(text: list[int]) -> None:
    automaton = SuffixAutomaton()
    for end, token in enumerate(text, start=1):
        automaton.extend([token])
        state, length = automaton.match
        so_far = text[:end]
        assert length == max((n for n in range(end) if places(so_far, so_far[end - n :])), default=0)
        assert (state == START) == (length == 0)
        if length:
            check_followers(automaton, so_far, so_far[end - length :])


@settings(max_examples=300)
@given(TEXTS, st.lists(st.integers(0, 3), min_size=1, max_size=12))
def test_tokens_that_were_not_read_are_looked_up_in_those_that_were(text: list[int], more: list[int]) -> None:
    automaton, whole = SuffixAutomaton(text), text + more
    state, length = automaton.match_with(more)
    ends = {tuple(text[i:j]) for i in range(len(text)) for j in range(i, len(text) + 1)}
    assert length == max((n for n in range(1, len(whole) + 1) if tuple(whole[-n:]) in ends), default=0)
    followers = {token for _, _, token in automaton.followers(state)} if length else set()
    assert followers == ({text[end] for end in places(text, whole[-length:])} if length else set())
    assert list(automaton.tokens) == text


def check_followers(automaton: SuffixAutomaton, text: list[int], word: list[int]) -> None:
    ends = places(text, word)
    found = automaton.followers(automaton.match[0])
    assert {token for _, _, token in found} == {text[end] for end in ends}
    assert all(text[place] == token for _, place, token in found)
    assert found == sorted(found, reverse=True)
    if len(word) < DEEPEST:  # in a text that repeats itself for longer, some counts are too low
        for times, place, token in found:
            mine = [end for end in ends if text[end] == token]
            assert (times, place) == (len(mine), max(mine))


@given(TEXTS, st.integers(0, 60))
def test_it_does_not_matter_in_which_parts_a_text_comes(text: list[int], cut: int) -> None:
    whole, parts = SuffixAutomaton(text), SuffixAutomaton(text[:cut])
    parts.extend(text[cut:])
    assert parts.match == whole.match
    assert parts.followers(parts.match[0]) == whole.followers(whole.match[0])


@pytest.mark.parametrize("text", [[1] * 3000, [1, 2] * 1500, list(range(3000)), [7 * i * i % 100 for i in range(3000)]])
def test_states_grow_with_the_text_and_not_faster(text: list[int]) -> None:
    automaton = SuffixAutomaton(text)
    assert len(automaton._link) <= 2 * len(text)
    assert sum(map(len, automaton._others.values())) <= 3 * len(text)


# What it guesses


def lookup(*tokens: int) -> LookupDrafter:
    drafter = LookupDrafter()
    drafter.open(tokens)
    return drafter


def chains(proposals: list[Proposal], root: int) -> list[list[int]]:
    """Proposals as token lists, and a check that each chain hangs on the root."""
    found: list[list[int]] = []
    for before, proposal in pairwise([None, *proposals]):
        assert proposal is not None
        if proposal.parent == -root:
            found.append([])
        else:
            assert before is not None
            assert proposal.parent == before.key
        found[-1].append(proposal.token)
    return found


@given(
    st.lists(st.integers(1, 4), min_size=4, max_size=40),
    st.lists(st.integers(1, 4), min_size=1, max_size=30),
    st.randoms(),
    st.sampled_from([None, Luck(1), Luck(2)]),
)
def test_what_stands_in_the_tree_is_not_guessed_again(
    prompt: list[int], answer: list[int], chance: random.Random, luck: Luck | None
) -> None:
    """Two drafters see the same answer; the trees that they grow hold the same guesses."""
    drafters = LookupDrafter(), LookupDrafter()
    trees = TokenTree(prompt), TokenTree(prompt)
    for drafter in drafters:
        drafter.open(prompt, luck)
    at = sent = saved = 0
    while at < len(answer):
        for drafter, tree, again in zip(drafters, trees, (True, False), strict=True):
            proposals = drafter.guess(0.05, again=again)
            sent, saved = (sent + len(proposals), saved) if again else (sent, saved + len(proposals))
            for proposal in proposals:
                tree.add(proposal)
        guesses = [{tuple(node.path(tree.root)) for node in tree.select(999)} for tree in trees]
        assert guesses[1] == guesses[0]
        count = chance.randint(1, 3)
        for drafter, tree in zip(drafters, trees, strict=True):
            drafter.commit(answer[at : at + count])
            tree.commit(answer[at : at + count])
        at += count
    assert saved <= sent


def test_it_copies_what_followed() -> None:
    drafter = lookup(1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3)
    (chain,) = chains(drafter.guess(), 11)
    assert chain[:6] == [4, 5, 6, 7, 8, 9]


def test_at_the_end_of_the_text_a_copy_goes_on_with_itself() -> None:
    (chain,) = chains(lookup(*[5, 6, 7, 8] * 4).guess(), 15)
    assert chain == ([5, 6, 7, 8] * LONGEST)[: len(chain)]
    assert len(chain) > 8


def test_the_most_frequent_goes_first_then_the_latest() -> None:
    drafter = lookup(1, 2, 7, 1, 2, 8, 1, 2, 9, 0, 1, 2, 9, 5, 1, 2)
    found = chains(drafter.guess(), 15)
    assert [chain[0] for chain in found] == [9, 8, 7][:CHAINS]
    first = {proposal.token: proposal.p for proposal in drafter.guess() if proposal.parent == -15}
    assert first[9] == SOMETIMES[1]


def test_followers_are_told_apart_by_how_often_they_came() -> None:
    (only,) = [p for p in lookup(1, 2, 3, 9, 1, 2).guess() if p.parent == -5]
    assert only.p == ONLY[1]
    mostly, sometimes = [p for p in lookup(*[1, 2, 3] * 3, 1, 2, 4, 1, 2).guess() if p.parent == -13]
    assert (mostly.token, mostly.p, sometimes.token, sometimes.p) == (3, MOSTLY[1], 4, SOMETIMES[1])


def test_it_is_surer_after_longer_matches_and_further_along() -> None:
    chain = lookup(*range(1, 9), 1, 2).guess()
    assert [p.p for p in chain[:3]] == [ONLY[1], ONLY[2], ONLY[3]]
    assert lookup(*range(1, 9), 1, 2, 3, 4).guess()[0].p == ONLY[3]


def test_something_new_is_not_guessed() -> None:
    assert lookup(1, 2, 3, 4).guess() == []
    assert lookup(1).guess() == []


def test_it_learns_from_the_answer() -> None:
    drafter = lookup(1, 2)
    drafter.commit([3, 4])
    assert drafter.guess() == []
    drafter.commit([1, 2])
    assert chains(drafter.guess(), 5)[0][:2] == [3, 4]


class Fate(Luck):
    """Noise as a test wants it."""

    def __init__(self, unlucky: set[int]) -> None:
        super().__init__(0)
        self.unlucky, self.asked = unlucky, dict[int, int]()

    def uniform(self, position: int, token: int) -> float:
        self.asked[position] = token
        return 1e-12 if token in self.unlucky else 0.999


@pytest.mark.sources
def test_at_a_temperature_a_chain_ends_where_luck_does() -> None:
    """The token without luck is judged all the same: else only lucky ones were, and all would seem likelier than they are."""
    fate, drafter, twin = Fate({5}), LookupDrafter(), lookup(1, 2, 3, 4, 5, 6, 9, 1, 2)
    drafter.open([1, 2, 3, 4, 5, 6, 9, 1, 2], fate)
    found, plain = drafter.guess(), twin.guess()
    assert chains(found, 8) == [[3, 4]]
    assert chains(plain, 8)[0][:3] == [3, 4, 5]
    assert fate.asked == {9: 3, 10: 4, 11: 5}
    assert found[0].p == pytest.approx(0.999 ** ((1 - plain[0].p) / plain[0].p))
    for one in (drafter, twin):
        one.commit([3, 4, 7])
    assert drafter.record.chances == twin.record.chances


def test_a_new_conversation_forgets_the_last_one() -> None:
    drafter = lookup(1, 2, 3, 1, 2)
    drafter.open([1, 2])
    assert drafter.guess() == []


@pytest.mark.sources
def test_in_haste_the_last_tokens_stay_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = lookup(*range(1, 9))
    drafter.guess()
    drafter.commit([1, 2])
    read: list[list[int]] = []
    monkeypatch.setattr(SuffixAutomaton, "extend", lambda _self, tokens: read.append(list(tokens)))
    (chain,) = chains(drafter.guess(in_haste=True), 9)
    assert chain[:8] == [3, 4, 5, 6, 7, 8, 1, 2]  # behind the end of what was read comes what was not
    assert not read
    drafter.read()
    assert read == [[1, 2]]


@pytest.mark.parametrize("unread", [[2, 9], [9, 9, 9], [*range(20, 20 + module.FEW), 1, 2]])
def test_in_haste_what_nothing_follows_is_read(unread: list[int]) -> None:
    """The first were never read, the second are followed only by themselves, the third are many."""
    hasty, other = lookup(*range(1, 9)), lookup(*range(1, 9))
    for drafter in (hasty, other):
        drafter.guess()
        drafter.commit(unread)
    assert hasty.guess(in_haste=True) == other.guess()


@pytest.mark.sources
def test_the_next_turn_of_a_conversation_reads_only_what_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = lookup(1, 2, 3)
    drafter.commit([4, 5])
    drafter.guess()
    read: list[int] = []
    extend = SuffixAutomaton.extend

    def noted(self: SuffixAutomaton, tokens: list[int]) -> None:
        read.extend(tokens)
        extend(self, tokens)

    monkeypatch.setattr(SuffixAutomaton, "extend", noted)
    drafter.open([1, 2, 3, 4, 5, 9, 2, 3])
    assert chains(drafter.guess(), 7)[0][:2] == [4, 5]
    assert read == [9, 2, 3]


def test_no_path_less_likely_than_asked_for() -> None:
    drafter = lookup(*[1, 2, 3] * 3, 1, 2, 4, 1, 2)
    for floor in (0.0, 0.1, 0.3, 0.9):
        path: dict[int, float] = {-13: 1.0}
        for proposal in drafter.guess(floor):
            path[proposal.key] = path[proposal.parent] * proposal.p
        assert all(p >= max(floor, FLOOR) for p in path.values())
        assert (len(path) == 1) == (floor == 0.9)


def test_success_and_failure_are_remembered() -> None:
    right, wrong = lookup(1, 2, 3, 9, 1, 2), lookup(1, 2, 3, 9, 1, 2)
    for drafter, token in ((right, 3), (wrong, 8)):
        drafter.guess()
        drafter.commit([token])
    assert right.record.chances[1] > ONLY[1] > wrong.record.chances[1]
    assert right.record.chances[2:] == wrong.record.chances[2:]


@settings(max_examples=150)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.lists(st.integers(1, 5), max_size=8))
def test_chains_against_a_plain_search(tokens: list[int], cuts: list[int]) -> None:
    """However the text came in: every chain copies from a place where the longest match was followed."""
    drafter = LookupDrafter()
    drafter.open(tokens[:1])
    rest = tokens[1:]
    for size in cuts:
        drafter.commit(rest[:size])
        rest = rest[size:]
        drafter.guess()
    drafter.commit(rest)
    proposals = drafter.guess()
    assert len({proposal.key for proposal in proposals}) == len(proposals)
    assert all(proposal.source is Source.LOOKUP and 0 < proposal.p < 1 for proposal in proposals)
    found = chains(proposals, len(tokens) - 1)
    length = max((n for n in range(len(tokens)) if places(tokens, tokens[len(tokens) - n :])), default=0)
    assert bool(found) == bool(length)
    assert len(found) <= CHAINS
    copies = [(tokens[end:] * LONGEST)[:LONGEST] for end in places(tokens, tokens[len(tokens) - length :])] if length else []
    assert all(any(copy[: len(chain)] == chain for copy in copies) for chain in found)


@given(st.floats(0, 1), st.lists(st.booleans(), max_size=600))
def test_a_record_stays_a_probability_and_goes_where_experience_goes(prior: float, seen: list[bool]) -> None:
    record = Record([prior, 0.5])
    for right in seen:
        record.observe(0, right)
    assert 0 <= record.chances[0] <= 1
    assert record.chances[1] == 0.5
    if len(seen) >= 200 and len(set(seen)) == 1:
        assert abs(record.chances[0] - seen[0]) < 0.06
    record.freeze()
    before = list(record.chances)
    record.observe(0, True)
    assert record.chances == before


# Across answers


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "seen.duo"


def kept(path: Path) -> list[int]:
    return Store(path, VOCABULARY).tokens.tolist()


def session(path: Path, *conversations: list[int]) -> None:
    drafter = LookupDrafter(Store(path, VOCABULARY))
    for first, *rest in conversations:
        drafter.open([first])
        drafter.commit(rest)
    drafter.close()


def test_a_later_session_copies_from_an_earlier_one(path: Path) -> None:
    session(path, [1, 2, 3, 4, 5])
    drafter = LookupDrafter(Store(path, VOCABULARY))
    drafter.open([9, 2, 3])
    assert chains(drafter.guess(), 2) == [[4, 5]]  # and not beyond the end of that conversation


def test_conversations_are_kept_in_order_and_apart(path: Path) -> None:
    session(path, [1, 2, 3], [4, 5])
    session(path, [6, 7])
    assert kept(path) == [1, 2, 3, SEPARATOR, 4, 5, SEPARATOR, 6, 7]


def test_a_session_is_saved_once(path: Path) -> None:
    drafter = LookupDrafter(Store(path, VOCABULARY))
    drafter.open([1, 2, 3])
    drafter.close()
    drafter.close()
    assert kept(path) == [1, 2, 3]


def test_two_engines_lose_nothing_of_each_other(path: Path) -> None:
    one, two = (LookupDrafter(Store(path, VOCABULARY)) for _ in range(2))
    for drafter, tokens in ((one, [1, 2, 3]), (two, [4, 5, 6])):
        drafter.open(tokens)
        drafter.close()
    assert kept(path) == [1, 2, 3, SEPARATOR, 4, 5, 6]


def _save(path: Path, token: int) -> None:
    for _ in range(10):
        Store(path, VOCABULARY).save(array("i", [token]))


def test_many_writers_at_once(path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=_save, args=(path, token)) for token in (1, 2, 3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
    tokens = kept(path)
    assert [tokens.count(token) for token in (1, 2, 3)] == [10, 10, 10]
    assert os.listdir(path.parent) == [path.name]


def test_it_is_bounded_on_disk_and_in_memory(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LIMIT", 50)
    monkeypatch.setattr(store_module, "LIMIT", 50)
    drafter = LookupDrafter(Store(path, VOCABULARY))
    for start in range(30):
        drafter.open([start, *range(10)])
        drafter.guess()
        assert len(drafter._text.tokens) <= 2 * 50 + 12
    drafter.close()
    tokens = kept(path)
    assert len(tokens) == 50
    assert tokens[-11:] == [29, *range(10)]


def test_the_file_is_for_its_owner(path: Path) -> None:
    session(path, [1, 2, 3])
    assert path.stat().st_mode & 0o077 == 0


def test_a_damaged_store_is_replaced(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    session(path, [1, 2, 3])
    good = path.read_bytes()
    for bad in (good[:-1], good[:-4], good[: len(MAGIC) + 33], good[:-1] + b"x"):
        path.write_bytes(bad)
        caplog.clear()
        session(path, [4, 5])
        assert "damaged" in caplog.text
        assert kept(path) == [4, 5]


def test_tokens_that_the_model_does_not_have_are_damage(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    Store(path, VOCABULARY).save(array("i", [1, 40]))
    assert kept(path) == []
    assert "damaged" in caplog.text


@pytest.mark.parametrize("kind", ["another vocabulary", "not a lookup store", "cannot be read"])
def test_a_foreign_file_is_left_alone(kind: str, path: Path, caplog: pytest.LogCaptureFixture) -> None:
    if kind == "another vocabulary":
        Store(path, ScriptedVocabulary(30)).save(array("i", [1, 2]))
    elif kind == "cannot be read":
        path.mkdir()
    else:
        path.write_bytes(b"GGUF and so on")
    before = path.read_bytes() if path.is_file() else None
    session(path, [4, 5])
    assert kind in caplog.text
    assert (path.read_bytes() if path.is_file() else None) == before


def test_a_store_that_cannot_be_written_is_a_warning(path: Path, caplog: pytest.LogCaptureFixture, monkeypatch) -> None:
    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    session(path, [1, 2])
    monkeypatch.setattr(os, "fsync", full)
    with caplog.at_level(logging.WARNING):
        session(path, [3, 4])
    assert "No space left" in caplog.text
    monkeypatch.undo()
    assert kept(path) == [1, 2]
    assert os.listdir(path.parent) == [path.name]


def test_a_folder_that_does_not_exist_is_the_user_s_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such folder"):
        Store(tmp_path / "nowhere" / "seen", VOCABULARY)


def test_engines_share_a_store(path: Path, model_path: Path) -> None:
    rounds, said = [], []
    for _ in range(2):
        with LLM(str(model_path), ctx_size=256, threads=1, mode="chain", draft="lookup", lookup_store=str(path)) as llm:
            result = llm.chat([{"role": "user", "content": "Name three colours."}], SamplingParams(max_tokens=24))
            rounds.append(result.stats.rounds)
            said.append(result.token_ids)
    assert said[0] == said[1]
    assert rounds[1] < 0.6 * rounds[0]
