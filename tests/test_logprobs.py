"""The likeliest tokens told with each token: the target's own distribution, in every mode and backend."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds import World, configs, parameters, worlds

from duodecoding import LLM, SamplingParams
from duodecoding.backends.base import Target
from duodecoding.backends.llamacpp_target import LlamaTarget
from duodecoding.drafters.lookup import LookupDrafter
from duodecoding.drafting import Drafters
from duodecoding.errors import UsageError
from duodecoding.sampling import Sampler
from duodecoding.types import EngineConfig, Mode

COLOURS = "red green blue red green blue red"


@settings(max_examples=60)
@given(worlds(), parameters(), configs(), st.integers(1, 20))
def test_every_mode_tells_the_same(world: World, params: SamplingParams, config: EngineConfig, count: int) -> None:
    asked = replace(params, top_logprobs=count)
    result, plain = world.answer(config, asked), world.plain(asked)
    assert [token.top for token in result.tokens] == [token.top for token in plain.tokens]
    assert result.token_ids == world.plain(params).token_ids
    assert all(len(token.top) == min(count, world.size) for token in result.tokens)
    assert [token.round for token in plain.tokens] == list(range(1, len(plain.tokens) + 1))


def test_they_are_the_largest_of_the_unmodified_distribution():
    logits = np.random.default_rng(0).standard_normal(300).astype(np.float32)
    params = SamplingParams(top_logprobs=5, temperature=0.5, top_k=1, logit_bias={7: 100.0})
    choice = Sampler(params, [1], 300).choose(logits, 3)
    expected = logits.astype(np.float64) - np.log(np.exp(logits.astype(np.float64)).sum())
    assert choice.token == 7
    assert [id for id, _ in choice.top] == np.argsort(-logits, kind="stable")[:5].tolist()
    assert [p for _, p in choice.top] == pytest.approx([expected[id] for id, _ in choice.top], abs=1e-4)
    assert choice.logprob == pytest.approx(expected[7], abs=1e-4)


@pytest.mark.parametrize("count", [-1, 21])
def test_how_many_there_may_be(count):
    with pytest.raises(UsageError, match="top_logprobs"):
        SamplingParams(top_logprobs=count)


def both_modes(target: Target, prompt: list[int]) -> None:
    params = SamplingParams(max_tokens=12, top_logprobs=4, ignore_eos=True)
    llms = [LLM.of(target, Drafters(lookup=LookupDrafter()), EngineConfig(mode=mode)) for mode in (Mode.OFF, Mode.SERIAL)]
    plain, quick = (llm.generate(prompt, params) for llm in llms)
    assert plain.token_ids == quick.token_ids
    assert [token.top[0] for token in plain.tokens] == [(token.id, token.logprob) for token in plain.tokens]  # greedy
    assert [[id for id, _ in token.top] for token in plain.tokens] == [[id for id, _ in token.top] for token in quick.tokens]


def test_with_llama_cpp(llama_target: LlamaTarget):
    both_modes(llama_target, llama_target.vocabulary.tokenize(COLOURS, special=True, bos=True))


def test_with_our_own_engine(real_target: Target):
    both_modes(real_target, real_target.vocabulary.tokenize(COLOURS, special=True, bos=True))


def test_with_torch():
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from test_torch import Numbers, tiny

    from duodecoding.backends.torch import TorchTarget

    both_modes(TorchTarget(tiny(), Numbers(), context=256, rows=16), [5, 6, 7, 8] * 4)
