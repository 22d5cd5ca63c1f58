"""A draft with another vocabulary: guesses through text, the same answer."""

from __future__ import annotations

import zlib
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import tinymodels
import workers
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds import parameters, said

from duodecoding import LLM, EngineConfig, Mode, SamplingParams
from duodecoding.backends.llamacpp_target import LlamaTarget
from duodecoding.backends.scripted import ScriptedDraft, ScriptedTarget
from duodecoding.drafters.bridge import BridgeDrafter, cut, whole_characters
from duodecoding.drafters.growth import BestFirst
from duodecoding.drafting import Drafters
from duodecoding.launch import spawn
from duodecoding.pace import guessed_costs

STORY = "the cat sat on the mat and the dög sat on the cat. €5 are enough for the mat 😀! ".encode()
BEGIN, END = 256, 257


class Pieces:
    """All bytes, two control tokens, then some longer pieces; the longest that fits is taken. `space`: one is put before a text."""

    chat_template, bos_text, eos_text = None, "<s>", "</s>"
    end_tokens = frozenset({END})

    def __init__(self, *longer: str, space: bool = False) -> None:
        self._pieces = [*(bytes([i]) for i in range(256)), b"", b"", *(piece.encode() for piece in longer)]
        self.size, self._space = len(self._pieces), space

    def tokenize(self, text, *, special, bos):
        ids, rest = [BEGIN] if bos else [], (" " if self._space and text else "").encode() + text.encode()
        while rest:
            named = {b"<s>": BEGIN, b"</s>": END} if special else {}
            name = next((name for name in named if rest.startswith(name)), b"")
            size, id = (len(name), named[name]) if name else self.longest(rest)
            ids, rest = [*ids, id], rest[size:]
        return ids

    def longest(self, rest):
        return max((len(piece), id) for id, piece in enumerate(self._pieces) if rest.startswith(piece))

    def piece(self, token):
        return self._pieces[token]

    def texts(self):
        return [
            self.bos_text if i == BEGIN else self.eos_text if i == END else p.decode("latin-1") for i, p in enumerate(self._pieces)
        ]


TARGET = Pieces("the", " the", " cat", " sat", " on", " mat", "and", " 😀", "ög", " eno", "ugh")
DRAFT = Pieces("th", "e ", "cat ", "sa", "t on", " mat", "d", "€5", "are ", "enough", ". ")
SPACED = Pieces(" the", "cat", " on ", "mat an", space=True)


def storyteller(vocabulary: Pieces, wrong: float = 0.0, seed: int = 0, sure: float = 9.0):
    """Goes on with the story after whatever part of it a text ends with; at a share `wrong` of the places with something else."""

    def script(history):
        text = b"".join(map(vocabulary.piece, history))[-12:]
        row = np.random.default_rng([seed, zlib.crc32(text)]).standard_normal(vocabulary.size).astype(np.float32)
        at = next((STORY.find(text[i:]) + len(text) - i for i in range(len(text)) if text[i:] in STORY), 0)
        if (zlib.crc32(text) + seed) % 100 >= 100 * wrong:
            row[vocabulary.longest((STORY * 2)[at : at + 12])[1]] += sure
        return row

    return script


def engine(config: EngineConfig, draft: Pieces = DRAFT, wrong: float = 0.0, context: int = 200, target: Pieces = TARGET) -> LLM:
    model = BridgeDrafter(ScriptedDraft(draft, storyteller(draft, wrong, 1), context=context), target)
    return LLM.of(ScriptedTarget(target, storyteller(target, 0.1), context=120), Drafters(model=model), config)


PROMPT = [BEGIN, *TARGET.tokenize("the cat", special=False, bos=False)]
MODES = [Mode.CHAIN, Mode.SERIAL]


@settings(max_examples=60)
@given(
    parameters(stops=st.just(())),
    st.sampled_from(MODES),
    st.sampled_from([DRAFT, SPACED, TARGET]),
    st.sampled_from([0.0, 0.3, 1.0]),
    st.sampled_from([8, 30, 200]),
)
def test_the_answer_is_that_without_a_draft(params, mode, draft, wrong, context):
    plain = engine(EngineConfig(mode=Mode.OFF)).generate(PROMPT, params)
    bridged = engine(EngineConfig(mode=mode), draft, wrong, context).generate(PROMPT, params)
    assert said(bridged) == said(plain)


@pytest.mark.parametrize("draft", [DRAFT, SPACED])
@pytest.mark.parametrize("mode", MODES)
def test_guesses_cross_the_bridge(mode, draft):
    stats = engine(EngineConfig(mode=mode), draft).generate(PROMPT, SamplingParams(max_tokens=60)).stats
    assert stats.tokens_per_round > 2


def drafter(draft: Pieces = DRAFT, prompt: str = "the cat sat") -> BridgeDrafter:
    made = BridgeDrafter(ScriptedDraft(draft, storyteller(draft)), TARGET)
    made.open([BEGIN, *TARGET.tokenize(prompt, special=False, bos=False)], SamplingParams(), BestFirst(1, branching=1))
    return made


def chain(made: BridgeDrafter, steps: int) -> list[int]:
    """Tokens that a few steps offer, each below the last."""
    grown = [proposal for _ in range(steps) for proposal in made.grow(made.next_leaves())]
    assert all(after.parent == before.key for before, after in pairwise(grown))
    return [proposal.token for proposal in grown]


def text(tokens: list[int]) -> str:
    return b"".join(map(TARGET.piece, tokens)).decode()


def test_a_token_is_offered_when_text_behind_it_is_drafted():
    made = drafter()
    tokens = chain(made, 3)
    assert text(tokens) == " on the mat"
    assert tokens == TARGET.tokenize(" on the mat", special=False, bos=False)
    drafted = "".join(link.text.decode() for link in made._chain)
    assert drafted.startswith(" on the mat") and len(drafted) > len(" on the mat")  # noqa: PT018 - one fact


def test_a_right_guess_costs_no_reading_twice():
    made = drafter()
    tokens = chain(made, 4)
    steps = len(made._draft.steps)
    made.commit(tokens[:3])
    assert made._draft.steps[steps:] == []
    assert text(chain(made, 2)) == "and the"
    drafted = sum(len(link.text) for link in made._chain) - len(made._behind)
    made.commit(tokens[3:])
    assert sum(len(link.text) for link in made._chain) - len(made._behind) == drafted - 1  # the rest of the chain stands


def test_a_wrong_guess_is_read_over():
    made = drafter()
    chain(made, 2)
    made.commit(TARGET.tokenize(" and the d", special=False, bos=False))
    assert text(chain(made, 2)) == "ög sat"


def test_inside_a_character_it_waits_for_the_rest():
    made = drafter(prompt="the d")
    half = "ö".encode()[0]
    made.commit([half])
    assert made._behind == bytes([half])
    assert chain(made, 1) == []  # there is no text that begins inside a character
    made.commit(["ö".encode()[1]])
    assert text(chain(made, 2)) == "g sat"


def test_the_end_is_guessed_as_the_targets_own():
    class Ender(ScriptedDraft):
        def expand(self, leaves):
            rows = super().expand(leaves)
            return [np.where(np.arange(DRAFT.size) == END, 50, row).astype(np.float32) for row in rows]

    made = BridgeDrafter(Ender(DRAFT, storyteller(DRAFT)), TARGET)
    made.open(PROMPT, SamplingParams(), BestFirst(1))
    assert made.grow(made.next_leaves())[0].token == END


def test_other_guesses_stand_beside_the_best():
    made = BridgeDrafter(ScriptedDraft(TARGET, storyteller(TARGET, sure=6.0)), TARGET)
    made.open(PROMPT, SamplingParams(), BestFirst(1, branching=4))
    best, *others = made.grow(made.next_leaves())
    assert TARGET.piece(best.token) == b" sat"
    assert 0 < len(others) < 4
    assert best.p > max(other.p for other in others)


# Cutting


def test_control_tokens_cross_by_name():
    named = Pieces("<tool>")
    named._pieces[BEGIN] = b""
    made = BridgeDrafter(ScriptedDraft(DRAFT, storyteller(DRAFT)), named)
    made.open([BEGIN, *b"hi", END, *b"yo"], SamplingParams(), BestFirst(1))
    assert made._ids == [BEGIN, *b"hi", END, *b"yo"]


@given(st.text("the cat€😀ö\n", max_size=12))
@pytest.mark.parametrize("vocabulary", [TARGET, DRAFT, SPACED])
def test_a_cut_text_spells_itself(vocabulary, words):
    assert b"".join(map(vocabulary.piece, cut(vocabulary, words.encode()))) == words.encode()


@given(st.text("a€😀ö", max_size=6), st.integers(0, 30))
def test_whole_characters(words, cut_at):
    data = words.encode()[:cut_at]
    end = whole_characters(data)
    assert data[:end].decode() == data.decode("utf-8", "ignore")
    assert 0 <= len(data) - end < 4


# Real models


@pytest.fixture(scope="module")
def foreign_draft(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tinymodels.other_tokenizer(model_path, tmp_path_factory.mktemp("models") / "foreign.gguf", layers=30)


TEXT, SHORT = "The capital of France is Paris. The capital of Italy is", SamplingParams(max_tokens=40)


def test_a_real_draft_of_another_vocabulary(model_path: Path, foreign_draft: Path, real_target: LlamaTarget) -> None:
    plain = LLM.of(real_target, Drafters(), EngineConfig(mode=Mode.OFF)).generate(TEXT, SHORT)
    settings = {"ctx_size": 512, "threads": 1, "threads_draft": 1, "draft_length": 2}
    with LLM(str(model_path), draft=str(foreign_draft), mode=Mode.SERIAL, **settings) as llm:
        assert llm.speculation == "on: through text, the vocabularies differ"
        llm.use_costs(guessed_costs(on_gpu=True))  # guesses cost next to nothing, so it makes use of them
        bridged = llm.generate(TEXT, SHORT)
    assert bridged.token_ids == plain.token_ids
    assert bridged.stats.accepted_by_source["model"] > 5


@pytest.mark.parametrize("mode", [Mode.LOCKSTEP, Mode.DUO])
def test_a_worker_with_another_vocabulary(model_path: Path, foreign_draft: Path, real_target: LlamaTarget, mode: Mode) -> None:
    plain = LLM.of(real_target, Drafters(), EngineConfig(mode=Mode.OFF)).generate(TEXT, SHORT)
    config = EngineConfig(mode=mode, ctx_size=512, threads=1, threads_draft=1)
    with workers.engine(real_target, spawn(foreign_draft, config, bridge=model_path), config) as llm:
        for _ in range(5):  # on a busy machine it may miss a short answer
            bridged = llm.generate(TEXT, SHORT)
            assert bridged.token_ids == plain.token_ids
            if bridged.stats.accepted:
                return
    pytest.fail("no guess crossed the bridge")
