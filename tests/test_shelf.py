"""Conversations that take turns keep their KV caches, every bit of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from duodecoding import LLM, SamplingParams
from duodecoding.backends import load_target
from duodecoding.backends.base import Target
from duodecoding.backends.llamacpp_target import LlamaTarget
from duodecoding.backends.native_target import NativeTarget
from duodecoding.backends.shelf import WORTH, Shelf
from duodecoding.drafting import Drafters
from duodecoding.types import EngineConfig, Mode

OFF = EngineConfig(mode=Mode.OFF)


class Cache:
    """A cache of numbers, with a shelf."""

    def __init__(self, limit: int) -> None:
        self.held: list[int] = []
        self.shelf = Shelf(limit, lambda: np.array(self.held, dtype=np.int32), self._load)
        self.loads = 0

    def _load(self, state: np.ndarray) -> None:
        self.held = state.tolist()
        self.loads += 1

    def open(self, wanted: list[int]) -> int:
        """As a target does: keep what is shared, then read the rest."""
        shared = self.shelf.change(self.held, wanted)
        assert self.held[:shared] == wanted[:shared]
        self.held = list(wanted)
        return shared

    @property
    def bytes(self) -> int:
        return sum(kept.state.nbytes for kept in self.shelf._kept)


def talk(number: int, length: int) -> list[int]:
    return [number * 1000 + i for i in range(length)]


def test_a_conversation_finds_its_cache_again():
    cache = Cache(1 << 20)
    assert cache.open(talk(1, 100)) == 0
    assert cache.open(talk(2, 100)) == 0
    assert cache.open(talk(1, 120)) == 100
    assert cache.open(talk(2, 120)) == 100
    assert cache.open(talk(2, 130)) == 120
    assert cache.loads == 2


def test_conversations_that_begin_alike_do_not_take_each_others_cache():
    cache = Cache(1 << 20)
    system = talk(9, 200)
    cache.open(system + talk(1, 100))
    cache.open(talk(3, 50))
    assert cache.open(system + talk(2, 50)) == 200
    assert cache.open(system + talk(1, 110)) == 300
    assert cache.open(system + talk(2, 60)) == 250


def test_the_one_not_used_for_longest_goes():
    cache = Cache(4 * 250)  # two of a hundred tokens
    for number in (1, 2, 3, 4):
        cache.open(talk(number, 100))
    assert cache.bytes == 4 * 200
    assert cache.open(talk(3, 101)) == 100
    assert cache.open(talk(1, 101)) == 0


def test_one_that_is_larger_than_the_limit_does_not_push_the_others_out():
    cache = Cache(4 * 250)
    for number, length in ((1, 100), (2, 300), (3, 100)):
        cache.open(talk(number, length))
    assert cache.open(talk(1, 101)) == 100


def test_little_is_not_worth_a_copy():
    cache = Cache(1 << 20)
    cache.open(talk(1, WORTH - 1))
    cache.open(talk(2, 100))
    assert cache.bytes == 0
    none = Cache(0)
    none.open(talk(1, 100))
    none.open(talk(2, 100))
    assert none.open(talk(1, 100)) == 0
    assert none.bytes == 0


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 120)), max_size=30), st.sampled_from([0, 600, 5000]))
def test_what_is_said_to_be_there_is_there(turns: list[tuple[int, int]], limit: int) -> None:
    cache = Cache(limit)
    for number, length in turns:
        cache.open(talk(0, 40 if number % 2 else 0) + talk(number, length))
        assert cache.bytes <= limit


def in_turns(target: Target, forget: Target) -> None:
    """Two conversations of two turns each: nothing is read twice, and every bit is as in a cache that never changed hands."""
    vocabulary = target.vocabulary.size
    random = np.random.default_rng(0)
    prompts = [random.integers(5, vocabulary, 60).tolist() for _ in range(2)]
    more = random.integers(5, vocabulary, 7).tolist()
    params = SamplingParams(max_tokens=6, temperature=0.8, seed=3, ignore_eos=True)
    llm, plain = LLM.of(target, Drafters(), OFF), LLM.of(forget, Drafters(), OFF)
    first = [llm.generate(prompt, params) for prompt in prompts]
    longer = [[*prompt, *said.token_ids, *more] for prompt, said in zip(prompts, first, strict=True)]
    second = [llm.generate(prompt, params) for prompt in longer]
    assert [said.stats.reused_tokens for said in second] == [65, 65]  # the last token of an answer was not read yet
    for before, prompt, *both in zip(prompts, longer, first, second, strict=True):
        plain.generate([1, 2], params)
        for said, alone in zip(both, [plain.generate(before, params), plain.generate(prompt, params)], strict=True):
            assert [(token.id, token.logprob) for token in said.tokens] == [(token.id, token.logprob) for token in alone.tokens]


@pytest.fixture(scope="module")
def keeping(model_path: Path) -> Iterator[LlamaTarget]:
    target = load_target(model_path, EngineConfig(ctx_size=512, threads=1, keep_mb=50, backend="llamacpp"))
    assert isinstance(target, LlamaTarget)
    yield target
    target.close()


def test_llama_cpp_restores_every_bit(keeping: LlamaTarget, llama_target: LlamaTarget) -> None:
    in_turns(keeping, llama_target)


def test_llama_cpp_restores_logits_bit_for_bit(keeping: LlamaTarget) -> None:
    random, rows = np.random.default_rng(1), []
    prompts = [random.integers(5, 40_000, 50).tolist() for _ in range(2)]
    for tokens in (prompts[0], prompts[1], prompts[0]):  # read, put aside, restored
        conversation = keeping.open([*tokens, 7], SamplingParams())
        keeping.verify([(conversation, ())])[0](-1)
        rows.append(keeping._context.logits()[0].copy())
        conversation.commit([3])
        keeping.verify([(conversation, ())])[0](-1)
        conversation.commit([4])
    assert conversation.reused == 50
    assert np.array_equal(rows[0], rows[2])
    assert not np.array_equal(rows[0], rows[1])


def test_our_own_engine_restores_every_bit(model_path: Path) -> None:
    keeping, forgetting = (NativeTarget(model_path, context=512, threads=1, keep_bytes=size) for size in (50_000_000, 0))
    in_turns(keeping, forgetting)
    keeping.close()
    forgetting.close()


def test_torch_restores_every_bit():
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from test_torch import Numbers, tiny

    from duodecoding.backends.torch import TorchTarget

    in_turns(*(TorchTarget(tiny(), Numbers(), context=256, rows=8, keep_bytes=keep) for keep in (10**7, 0)))
