"""Scripted models and everything an answer can depend on, as hypothesis strategies."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import combinations

from hypothesis import strategies as st

from duodecoding import LLM, SamplingParams
from duodecoding.backends import scripted
from duodecoding.drafters.lookup import LookupDrafter
from duodecoding.drafters.model import ModelDrafter
from duodecoding.drafters.recycling import RecyclingDrafter
from duodecoding.drafting import Drafters
from duodecoding.types import MAX_SEED, EngineConfig, Mode, Result

SPECULATIVE = [mode for mode in Mode if mode is not Mode.OFF]


@dataclass(frozen=True)
class World:
    """A target, a draft that disagrees with it on a share of the histories, and a prompt."""

    seed: int = 0
    size: int = 24
    memory: int = 2
    context: int = 64
    prompt: tuple[int, ...] = (0, 5, 7)
    share: float = 0.3
    draft_padding: int = 0  # ids that the draft has more than the target
    draft_context: int = 64
    drafts: tuple[str, ...] = ("model", "lookup")

    def target(self, *, strict: bool = True) -> scripted.ScriptedTarget:
        script = scripted.random_script(self.size, self.seed, memory=self.memory)
        return scripted.ScriptedTarget(scripted.ScriptedVocabulary(self.size), script, context=self.context, strict=strict)

    def draft(self) -> scripted.ScriptedDraft:
        size = self.size + self.draft_padding
        # The larger table draws other numbers, so a padded draft agrees by chance only; that is a draft too.
        mine = scripted.random_script(size, self.seed, memory=self.memory)
        other = scripted.random_script(size, self.seed + 1, memory=self.memory)
        script = scripted.disagreeing(mine, other, self.share, self.seed)
        return scripted.ScriptedDraft(scripted.ScriptedVocabulary(size), script, context=self.draft_context)

    def drafters(self) -> Drafters:
        return Drafters(
            model=ModelDrafter(self.draft(), vocab_limit=self.size) if "model" in self.drafts else None,
            lookup=LookupDrafter() if "lookup" in self.drafts else None,
            recycling=RecyclingDrafter() if "recycling" in self.drafts else None,
        )

    def llm(self, config: EngineConfig, *, strict: bool = True) -> LLM:
        return LLM.of(self.target(strict=strict), self.drafters(), config)

    def answer(self, config: EngineConfig, params: SamplingParams, *, strict: bool = True) -> Result:
        return self.llm(config, strict=strict).generate(list(self.prompt), params)

    def plain(self, params: SamplingParams) -> Result:
        return self.answer(EngineConfig(mode=Mode.OFF), params)


def said(result: Result) -> tuple[object, ...]:
    """All of a result that must not depend on mode, draft or timing."""
    return result.token_ids, result.text, [t.text for t in result.tokens], [t.logprob for t in result.tokens], result.finish_reason


def worlds() -> st.SearchStrategy[World]:
    sizes = st.sampled_from([16, 24, 40, 300])  # the last one has a tail behind the head of 256
    return sizes.flatmap(
        lambda size: st.builds(
            World,
            seed=st.integers(0, 10_000),
            size=st.just(size),
            memory=st.integers(1, 3),
            context=st.integers(12, 64),
            prompt=st.lists(st.integers(0, size - 1), min_size=1, max_size=11).map(tuple),
            share=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
            draft_padding=st.sampled_from([0, 0, 3]),
            draft_context=st.integers(1, 64),
            drafts=st.sampled_from([drafts for n in range(4) for drafts in combinations(("model", "lookup", "recycling"), n)]),
        )
    )


STOPS = st.lists(st.text("abc é€😀.\n", min_size=1, max_size=3), max_size=3).map(tuple)
SEEDS = st.integers(0, 50) | st.integers(MAX_SEED - 2, MAX_SEED)


def parameters(*, stops: st.SearchStrategy[tuple[str, ...]] = STOPS) -> st.SearchStrategy[SamplingParams]:
    simple = st.builds(SamplingParams, max_tokens=st.integers(1, 40), temperature=st.sampled_from([0.0, 0.7, 1.0]), seed=SEEDS)
    rich = st.builds(
        SamplingParams,
        max_tokens=st.integers(1, 40),
        temperature=st.just(0.0) | st.floats(0.01, 5.0),
        top_k=st.sampled_from([0, 0, 1, 2, 5, 400]),
        top_p=st.just(1.0) | st.floats(0.05, 1.0),
        min_p=st.just(0.0) | st.floats(0.0, 0.9),
        repetition_penalty=st.just(1.0) | st.floats(0.5, 3.0),
        presence_penalty=st.just(0.0) | st.floats(-2.0, 2.0),
        frequency_penalty=st.just(0.0) | st.floats(-2.0, 2.0),
        logit_bias=st.dictionaries(st.integers(0, 45), st.floats(-8.0, 8.0), max_size=3),
        seed=SEEDS,
        stop=stops,
        ignore_eos=st.booleans(),
    )
    return simple | rich


def configs(modes: list[Mode] = SPECULATIVE) -> st.SearchStrategy[EngineConfig]:
    return st.builds(
        EngineConfig,
        mode=st.sampled_from(modes),
        draft_length=st.integers(1, 6),
        draft_width=st.integers(1, 4),
        max_nodes=st.integers(1, 24),
    )


def longer(params: SamplingParams, tokens: int) -> SamplingParams:
    return replace(params, max_tokens=tokens)
