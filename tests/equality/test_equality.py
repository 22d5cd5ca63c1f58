"""Real models: every mode with every draft gives the token list of plain decoding, always.

The whole suite is `make equality`; a small version of it runs with the other tests. A new mode or draft is one line in the
tables below.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from workers import PATIENCE, Eager

from duodecoding import LLM, SamplingParams, prompts
from duodecoding.backends import load_draft, load_target, read_vocabulary
from duodecoding.backends.base import Target
from duodecoding.backends.llamacpp import physical_cores
from duodecoding.drafters.lookup import LookupDrafter
from duodecoding.drafters.model import ModelDrafter
from duodecoding.drafters.recycling import RecyclingDrafter
from duodecoding.drafting import Drafters
from duodecoding.launch import spawn
from duodecoding.remote import RemoteDrafter
from duodecoding.types import EngineConfig, Mode, Result

PLAIN = Mode.OFF
TAKING_TURNS = (Mode.CHAIN, Mode.SERIAL)
OVERLAPPING = (Mode.LOCKSTEP, Mode.DUO)


def in_worker(path: Path, config: EngineConfig) -> Drafters:
    remote = RemoteDrafter(spawn(path, replace(config, threads_draft=1)), read_vocabulary(path).size)
    remote.start()
    assert remote.wait_ready(PATIENCE), remote.last_error
    return Drafters(remote=remote)


def free(drafters: Drafters | None = None) -> Drafters:
    return replace(drafters or Drafters(), lookup=LookupDrafter(), recycling=RecyclingDrafter())


DRAFTS: dict[str, Callable[[Path, Path, EngineConfig], Drafters]] = {
    "lookup": lambda model, poor, config: Drafters(lookup=LookupDrafter()),
    "free": lambda model, poor, config: free(),
    "itself": lambda model, poor, config: Drafters(model=ModelDrafter(load_draft(model, config))),
    "six layers": lambda model, poor, config: Drafters(model=ModelDrafter(load_draft(poor, config))),
    "six layers and free": lambda model, poor, config: free(Drafters(model=ModelDrafter(load_draft(poor, config)))),
    "itself in a worker": lambda model, poor, config: in_worker(model, config),
    "six layers in a worker": lambda model, poor, config: in_worker(poor, config),
    "six layers in a worker and free": lambda model, poor, config: free(in_worker(poor, config)),
}
WORKERS = ("itself in a worker", "six layers in a worker", "six layers in a worker and free")
FREE = ("lookup", "free")
WHOLE = (*FREE, "itself", "six layers", *WORKERS)
SMALL = ("lookup", "itself", "six layers and free", "six layers in a worker and free")

GREEDY = SamplingParams(max_tokens=96)
SAMPLED = tuple(SamplingParams(max_tokens=96, temperature=0.8, seed=seed) for seed in (1, 2, 3))
SETTINGS = (GREEDY, *SAMPLED)

# Beside the package's prompts of the seven tasks: completions without a chat template, of the kinds that go wrong.
RAW = {
    "one token": "The",
    "repetition": "one two three four one two three four one two three four one two",
    "code": "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "list": "1. apple\n2. banana\n3. cherry\n4.",
    "characters of many bytes": "日本語のテキスト: こんにちは、世界。 Ελληνικά 😀😀 русский",
    "longer than a batch": "The quick brown fox jumps over the lazy dog. " * 60,
}
PROMPTS_PER_TASK = 3


def cases(drafts: tuple[str, ...]) -> list[tuple[Mode, str]]:
    """Drafts in a worker beside the target, drafts in the process in turns with it, those without a model with both."""
    beside = [draft for draft in drafts if draft in WORKERS or draft in FREE]
    in_turns = [draft for draft in drafts if draft not in WORKERS]
    return [*product(TAKING_TURNS, in_turns), *product(OVERLAPPING, beside)]


def all_prompts() -> dict[str, str]:
    tasks = prompts.load()
    chats = {f"{task} {p.id}": p.turns[0] for task, found in tasks.items() for p in found[:PROMPTS_PER_TASK]}
    return {**chats, **RAW}


@dataclass
class Models:
    """One target and each draft, loaded once and shared by all modes, with whatever the last answer left in their caches."""

    target: Target
    drafts: dict[str, Drafters]
    config: EngineConfig
    answers: int = 0
    tokens: int = 0
    different: int = 0
    started: float = field(default_factory=time.perf_counter)
    per_round: dict[str, Counter[str]] = field(default_factory=dict)

    def answer(self, mode: Mode, draft: str | None, name: str, prompt: str, params: SamplingParams) -> Result:
        drafters = self.drafts[draft] if draft is not None else Drafters()
        llm = LLM.of(self.target, drafters, replace(self.config, mode=mode))
        llm._pace = Eager()
        if name in RAW:
            return llm.generate(prompt, params)
        return llm.chat([{"role": "user", "content": prompt}], params)

    def compare(self, name: str, prompt: str, params: SamplingParams, drafts: tuple[str, ...]) -> list[str]:
        """Which modes and drafts said something else than plain decoding."""
        plain = self.answer(PLAIN, None, name, prompt, params)
        wrong = []
        for mode, draft in cases(drafts):
            result = self.answer(mode, draft, name, prompt, params)
            self.count(f"{mode} {draft}", result)
            if (result.token_ids, result.text, result.finish_reason) != (plain.token_ids, plain.text, plain.finish_reason):
                same = next((i for i, (a, b) in enumerate(zip(plain.token_ids, result.token_ids, strict=False)) if a != b), -1)
                wrong.append(f"{mode} with {draft}, {params}: differs from token {same} on")
        self.different += len(wrong)
        return wrong

    def count(self, case: str, result: Result) -> None:
        self.answers += 1
        self.tokens += len(result.tokens)
        self.per_round.setdefault(case, Counter()).update(tokens=len(result.tokens), rounds=result.stats.rounds)

    def summary(self) -> str:
        rounds = ", ".join(f"{case} {n['tokens'] / n['rounds']:.2f}" for case, n in self.per_round.items() if n["rounds"])
        seconds = time.perf_counter() - self.started
        counts = f"{self.answers} answers, {self.tokens} tokens compared with plain decoding, {self.different} different"
        return f"equality: {counts}, {seconds:.0f} s; tokens per round: {rounds}"


def load(model: Path, poor: Path, drafts: tuple[str, ...], config: EngineConfig) -> Models:
    target = load_target(model, config)
    return Models(target, {name: DRAFTS[name](model, poor, config) for name in drafts}, config)


def close(loaded: Models, request: pytest.FixtureRequest) -> None:
    plugins = request.config.pluginmanager
    with plugins.get_plugin("capturemanager").global_and_fixture_disabled():
        plugins.get_plugin("terminalreporter").write_line(f"\n{loaded.summary()}")
    for drafters in loaded.drafts.values():
        drafters.close()
    loaded.target.close()


@pytest.fixture(scope="module")
def whole(model_path: Path, poor_draft: Path, request: pytest.FixtureRequest) -> Iterator[Models]:
    threads = int(os.environ.get("DUO_THREADS", "0")) or max(1, physical_cores() - 1)  # one core for the worker
    backend: Any = os.environ.get("DUO_BACKEND", "auto")
    config = EngineConfig(ctx_size=2048, threads=threads, max_nodes=16, backend=backend)  # larger trees take a CPU long
    loaded = load(model_path, poor_draft, WHOLE, config)
    yield loaded
    close(loaded, request)


@pytest.fixture(scope="module", params=["auto", "llamacpp"])
def small(model_path: Path, poor_draft: Path, request: pytest.FixtureRequest) -> Iterator[Models]:
    config = EngineConfig(ctx_size=512, threads=1, max_nodes=8, draft_length=3, backend=request.param)
    loaded = load(model_path, poor_draft, SMALL, config)
    yield loaded
    close(loaded, request)


def test_the_suite_is_large_enough() -> None:
    assert len(all_prompts()) >= 24
    assert len({name.split()[0] for name in all_prompts()} - set(RAW)) >= len(prompts.TASKS)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", all_prompts())
def test_equal_token_lists(whole: Models, name: str) -> None:
    wrong = [line for params in SETTINGS for line in whole.compare(name, all_prompts()[name], params, WHOLE)]
    assert wrong == []


@pytest.mark.parametrize("params", [GREEDY, SAMPLED[0]], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", ["repetition", "a question"])
def test_equal_token_lists_in_small(small: Models, name: str, params: SamplingParams) -> None:
    prompt = RAW.get(name, "Which planet is the largest?")
    assert small.compare(name, prompt, replace(params, max_tokens=24), SMALL) == []
