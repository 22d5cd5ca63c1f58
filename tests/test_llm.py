from __future__ import annotations

import gc
import math
import threading
from pathlib import Path

import pytest
import tinymodels
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds import World, configs, parameters, said, worlds

from duodecoding import LLM, SamplingParams
from duodecoding.backends import llamacpp, scripted
from duodecoding.backends.llamacpp_target import LlamaTarget
from duodecoding.errors import BackendMissing, ContextOverflow, DuoError, ModelUnreadable, UsageError
from duodecoding.types import EngineConfig, Mode, Source

SERIAL, OFF = EngineConfig(mode=Mode.SERIAL), EngineConfig(mode=Mode.OFF)

# Scripted models


@settings(max_examples=250)
@given(worlds(), parameters(), configs())
def test_every_mode_and_draft_says_what_plain_decoding_says(world: World, params: SamplingParams, config: EngineConfig) -> None:
    result = world.answer(config, params)
    assert said(result) == said(world.plain(params))
    stats = result.stats
    assert stats.new_tokens == len(result.tokens) == stats.accepted + sum(t.source is Source.TARGET for t in result.tokens)
    assert stats.prompt_tokens == len(world.prompt)
    assert stats.accepted <= stats.verified
    assert sum(stats.accepted_by_source.values()) == stats.accepted


@settings(max_examples=100)
@given(worlds(), parameters(), configs(), st.integers(0, 12))
def test_a_stream_closed_half_way_leaves_the_engine_right(
    world: World, params: SamplingParams, config: EngineConfig, taken: int
) -> None:
    llm = world.llm(config)
    stream = llm.stream(world.prompt, params)
    tokens = [token.id for token, _ in zip(stream, range(taken), strict=False)]
    stream.close()
    assert tokens == world.plain(params).token_ids[:taken]
    assert stream.result.token_ids[: len(tokens)] == tokens
    assert said(llm.generate(world.prompt, params)) == said(world.plain(params))


@settings(max_examples=100)
@given(worlds(), st.lists(parameters(), min_size=2, max_size=4), configs())
def test_answers_one_after_another(world: World, params: list[SamplingParams], config: EngineConfig) -> None:
    """Each continues the last one's conversation, as in a chat: what the models kept of it changes nothing."""
    llm, prompt = world.llm(config), list(world.prompt)
    for each in params:
        if len(prompt) >= world.context:
            break
        result = llm.generate(prompt, each)
        assert said(result) == said(world.llm(OFF).generate(prompt, each))
        prompt += result.token_ids[:5]


@settings(max_examples=60)
@given(worlds(), parameters(), configs(), st.integers(0, 6))
def test_an_abort_after_any_round_leaves_the_engine_right(
    world: World, params: SamplingParams, config: EngineConfig, rounds: int
) -> None:
    llm = world.llm(config)
    stream = llm.stream(world.prompt, params)
    for _ in zip(range(rounds), stream, strict=False):
        pass
    llm.abort()
    result = stream.run()
    assert result.finish_reason in {"cancelled", "stop", "length"}
    expected = world.plain(params)
    assert result.token_ids == expected.token_ids[: len(result.tokens)]
    assert said(llm.generate(world.prompt, params)) == said(expected)


def spelled(*texts: str, end: bool = True) -> tuple[LLM, scripted.ScriptedVocabulary]:
    """A target that says these texts, one token each, whatever it is asked."""
    vocabulary = scripted.ScriptedVocabulary(32)
    pieces = [vocabulary.piece(token) for token in range(32)]
    answer = [pieces.index(text.encode("latin-1")) for text in texts] + ([scripted.END] if end else [])

    def script(history: tuple[int, ...]) -> scripted.Row:
        row = scripted.np.zeros(32, scripted.np.float32)
        row[answer[min(len(history) - 1, len(answer) - 1)]] = 9
        return row

    return LLM.of(scripted.ScriptedTarget(vocabulary, script), World(size=32).drafters(), SERIAL), vocabulary


def texts_of(llm: LLM, **params: object) -> list[str]:
    return [token.text for token in llm.stream([0], SamplingParams(**params))]  # type: ignore[arg-type]


def test_an_end_token_has_no_text() -> None:
    llm, _ = spelled("a", "b")
    result = llm.generate([0])
    assert (result.text, result.finish_reason, result.token_ids[-1]) == ("ab", "stop", scripted.END)


def test_stop_strings_across_tokens_end_the_answer_and_are_not_in_it() -> None:
    llm, _ = spelled("a", "b", " ", "c", "d", "e")
    result = llm.generate([0], SamplingParams(stop=("b cd",)))
    assert (result.text, result.finish_reason) == ("a", "stop")
    assert len(result.tokens) == 5
    assert llm.generate([0], SamplingParams(stop=("ba",))).text == "ab cde"  # a beginning that came to nothing is said
    assert llm.generate([0], SamplingParams(stop=("de!",))).text == "ab cde"  # also at the end


def test_half_a_character_waits_for_its_other_half() -> None:
    llm, _ = spelled("a", "\xc3", "\xa9", "b", end=True)
    assert texts_of(llm) == ["a", "", "é", "b", ""]
    assert texts_of(llm, max_tokens=2) == ["a", "\ufffd"]
    assert texts_of(llm, stop=("é",)) == ["a", "", ""]


def test_a_stream_of_tokens() -> None:
    world = World(share=0.0)
    stream = world.llm(SERIAL).stream(world.prompt, SamplingParams(max_tokens=20, ignore_eos=True))
    with pytest.raises(UsageError, match="not complete"):
        _ = stream.result
    tokens = list(stream)
    assert stream.result.tokens == tuple(tokens)
    assert {token.source for token in tokens} >= {Source.TARGET, Source.MODEL}
    assert all(token.logprob <= 1e-6 for token in tokens)
    assert list(stream) == []


def test_a_prompt_can_be_text() -> None:
    world = World(size=32)
    ids = scripted.ScriptedVocabulary(32).tokenize("abc", special=True, bos=True)
    assert said(world.llm(SERIAL).generate("abc")) == said(world.llm(OFF).generate(ids))


def test_chat_renders_the_template() -> None:
    llm = World(size=32).llm(SERIAL)
    messages = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "c"}]
    assert said(llm.chat(messages)) == said(llm.generate("abc"))


def test_chat_reuses_the_last_turn() -> None:
    llm = World(size=32, context=200).llm(SERIAL)
    first = llm.generate("ab", SamplingParams(max_tokens=4, ignore_eos=True))
    second = llm.generate([*llm.vocabulary.tokenize("ab", special=True, bos=True), *first.token_ids, 5])
    assert first.stats.reused_tokens == 0
    assert second.stats.reused_tokens == first.stats.prompt_tokens + 3


def test_an_empty_prompt() -> None:
    with pytest.raises(UsageError, match="empty"):
        World().llm(OFF).generate([])


def test_a_prompt_longer_than_the_context_says_by_how_much() -> None:
    llm = World(context=16).llm(OFF)
    assert len(llm.generate([0] * 15).tokens) == 1
    with pytest.raises(ContextOverflow, match="20 tokens, 5 more than fit into the context of 16"):
        llm.generate([0] * 20)


@pytest.mark.parametrize("token", [-1, 24, 10**9])
def test_token_ids_outside_the_vocabulary(token: int) -> None:
    with pytest.raises(UsageError, match="ids go from 0 to 23"):
        World().llm(OFF).generate([0, token])


def test_one_answer_at_a_time() -> None:
    world = World()
    llm = world.llm(SERIAL)
    first = llm.stream(world.prompt)
    next(first)
    with pytest.raises(UsageError, match="still running"):
        llm.stream(world.prompt)
    first.close()
    llm.generate(world.prompt)


def test_a_closed_llm_refuses() -> None:
    world = World()
    with world.llm(SERIAL) as llm:
        stream = llm.stream(world.prompt, SamplingParams(ignore_eos=True))
        next(stream)
    assert stream.result.finish_reason == "cancelled"
    with pytest.raises(UsageError, match="closed"):
        llm.generate(world.prompt)
    llm.close()


def test_speculation_says_why_it_is_off() -> None:
    assert World().llm(OFF).speculation == "off: the mode is off"
    assert World(drafts=()).llm(SERIAL).speculation == "off: there is no draft"
    assert World().answer(SERIAL, SamplingParams()).speculation == "on"


def test_unknown_settings_and_modes() -> None:
    with pytest.raises(UsageError, match="unknown setting 'colour'"):
        LLM("smollm2-135m", colour="red")
    with pytest.raises(UsageError, match="unknown mode"):
        LLM("smollm2-135m", mode="fast")


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"top_p": 0.0},
        {"top_k": -1},
        {"min_p": 1.0},
        {"max_tokens": 0},
        {"seed": -1},
        {"seed": 2**63},
        {"repetition_penalty": 0.0},
        {"stop": "text"},
        {"stop": ("",)},
        {"logit_bias": {-1: 1.0}},
        {"logit_bias": {1: math.inf}},
    ],
)
def test_parameters_out_of_range(wrong: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        SamplingParams(**wrong)  # type: ignore[arg-type]


# Real models

QUESTION = [{"role": "user", "content": "Name three colours."}]
SHORT = SamplingParams(max_tokens=8)


def small(model: Path | str, **settings: object) -> LLM:
    return LLM(str(model), ctx_size=256, threads=1, **settings)


def test_two_in_one_process(model_path: Path, random_draft: Path) -> None:
    with small(model_path, mode="serial", draft="lookup") as one, small(model_path, mode="chain", draft=str(random_draft)) as two:
        streams = one.stream_chat(QUESTION, SHORT), two.stream_chat(QUESTION, SHORT)
        tokens = [(a.id, b.id) for a, b in zip(*streams, strict=True)]  # in turns
        assert [a for a, _ in tokens] == [b for _, b in tokens]
        one.close()
        assert [token.id for token in two.stream_chat(QUESTION, SHORT)] == [a for a, _ in tokens]


def test_what_loading_left_behind_is_not_searched_for_garbage_in_an_answer(model_path: Path) -> None:
    """With torch that takes half a second, and came in the midst of passes."""

    def beside(path: Path, config: EngineConfig, progress: object) -> LlamaTarget:
        target = LlamaTarget(llamacpp.LlamaModel(path), context=256, threads=1)
        target.overlaps = True
        return target

    config = EngineConfig(model=str(model_path), mode=Mode.OFF, ctx_size=256, threads=1)
    before = gc.get_freeze_count()
    with LLM.from_config(config) as plain:
        assert gc.get_freeze_count() == before
        assert plain.context
    with LLM.from_config(config, load_target=beside):
        assert gc.get_freeze_count() > before + 10_000
    assert gc.get_freeze_count() == 0


def test_vocabularies_that_differ(model_path: Path, tmp_path: Path) -> None:
    other = tinymodels.other_vocabulary(model_path, tmp_path / "other.gguf", {100: "bonjour", 4000: "monde"})
    with small(model_path, draft=str(other), mode="serial") as llm:
        assert llm.speculation == "on: through text, the vocabularies differ"


def truncated(model: Path, to: Path, share: float) -> Path:
    to.write_bytes(model.read_bytes()[: int(model.stat().st_size * share)])
    return to


@pytest.mark.parametrize("share", [0.00002, 0.001, 0.5, 0.99])
def test_a_truncated_file(model_path: Path, tmp_path: Path, share: float) -> None:
    cut = truncated(model_path, tmp_path / "cut.gguf", share)
    with pytest.raises(ModelUnreadable) as error:
        small(cut)
    assert "cut.gguf" in str(error.value)
    with pytest.raises(DuoError):
        small(model_path, draft=str(cut), mode="serial")


def test_a_corrupt_header(model_path: Path, tmp_path: Path) -> None:
    data = bytearray(model_path.read_bytes())
    data[24:4096] = bytes(4096 - 24)
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(data)
    with pytest.raises(ModelUnreadable, match=r"broken\.gguf"):
        small(broken)


@pytest.mark.parametrize("content", [b"", b"hello", b"\x00" * 5000, b"GGUF", b"GGUF\x03\x00\x00\x00" + b"\xff" * 64])
def test_not_a_gguf(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "notes.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelUnreadable):
        small(path)


def test_a_context_larger_than_trained_is_cut(model_path: Path) -> None:
    with LLM(str(model_path), mode="off", threads=1, ctx_size=100_000) as llm:
        assert llm.context == 8192


def test_an_abort_from_another_thread(model_path: Path) -> None:
    with small(model_path, mode="serial", draft="lookup") as llm:
        expected = llm.chat(QUESTION, SHORT).token_ids
        stream = llm.stream_chat(QUESTION, SamplingParams(max_tokens=200, ignore_eos=True))
        next(stream)
        timer = threading.Timer(0.05, llm.abort)
        timer.start()
        result = stream.run()
        timer.join()
        assert result.finish_reason == "cancelled"
        assert result.token_ids[: len(expected)] == expected[: len(result.tokens)]
        assert llm.chat(QUESTION, SHORT).token_ids == expected


def test_layers_for_a_gpu_that_llama_cpp_cannot_use_are_refused(model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llamacpp, "supports_gpu", lambda: False)
    with pytest.raises(BackendMissing, match="CPU only"):
        LLM(str(model_path), draft="none", gpu_layers=-1)
