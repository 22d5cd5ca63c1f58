"""Real models, both at once: the token lists are those of plain decoding, whatever the timing and whatever the worker suffers.

A small version runs with the other tests; `make equality` runs the whole.
"""

from __future__ import annotations

import mmap
import os
import random
import signal
import threading
from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path

import numpy as np
import pytest
from workers import PATIENCE, SlowTarget, ended, engine, eventually, in_slow_process, resident, worker_of

from duodecoding import LLM, SamplingParams, prompts
from duodecoding.backends import load_draft
from duodecoding.backends.base import Leaf, Target
from duodecoding.drafters.growth import BestFirst
from duodecoding.drafters.model import ModelDrafter
from duodecoding.drafting import Drafters
from duodecoding.errors import Interrupted
from duodecoding.launch import spawn
from duodecoding.sampling import Row
from duodecoding.types import EngineConfig, Mode

SMALL = EngineConfig(ctx_size=1024, threads=1, threads_draft=1)
MODES = [Mode.DUO, Mode.LOCKSTEP]
SETTINGS = (SamplingParams(max_tokens=32), SamplingParams(max_tokens=32, temperature=0.8, seed=5))


class Plain:
    """What plain decoding says, asked once per question."""

    def __init__(self, target: Target) -> None:
        self._llm = LLM.of(target, Drafters(), replace(SMALL, mode=Mode.OFF))
        self._said: dict[tuple[str, float], list[int]] = {}

    def __call__(self, prompt: str, params: SamplingParams) -> list[int]:
        key = (prompt, params.temperature)
        if key not in self._said:
            self._said[key] = ask(self._llm, prompt, params)
        return self._said[key]


def questions(count: int) -> list[tuple[str, SamplingParams]]:
    texts = [p.turns[0][:400] for found in prompts.load().values() for p in found]
    random.Random(1).shuffle(texts)
    return list(islice(zip(cycle(texts), cycle(SETTINGS), strict=False), count))


def ask(llm: LLM, prompt: str, params: SamplingParams) -> list[int]:
    return llm.chat([{"role": "user", "content": prompt}], params).token_ids


def delays(target: Target, draft: Path, mode: Mode, count: int) -> int:
    """Answers with random delays on both sides; how many guesses were right."""
    plain, config = Plain(target), replace(SMALL, mode=mode)
    accepted = 0
    with engine(SlowTarget(target, 0.03), in_slow_process(draft, config, 0.01), config) as llm:
        for prompt, params in questions(count):
            assert ask(llm, prompt, params) == plain(prompt, params)
            assert llm._stream is not None
            accepted += llm._stream.result.stats.accepted
        assert worker_of(llm).faults == 0
    print(f"{mode}: {count} answers, {accepted} guesses right")
    return accepted


@pytest.mark.parametrize("mode", MODES)
def test_delays_on_both_sides(mode: Mode, real_target: Target, model_path: Path) -> None:
    delays(real_target, model_path, mode, 1)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("mode", MODES)
def test_delays_on_both_sides_for_100_answers(mode: Mode, real_target: Target, model_path: Path) -> None:
    assert delays(real_target, model_path, mode, 100) > 0


def kills(target: Target, draft: Path, mode: Mode, count: int) -> None:
    """SIGKILL at random moments of an answer or just behind it; the next but one has a worker again."""
    chance, plain, config = random.Random(2), Plain(target), replace(SMALL, mode=mode)
    with engine(target, spawn(draft, config), config) as llm:
        remote = worker_of(llm)
        for done, (prompt, params) in enumerate(questions(count)):
            pid = remote.pid
            assert pid is not None
            killer = threading.Timer(chance.random() ** 2 * 0.6, os.kill, (pid, signal.SIGKILL))
            killer.start()
            assert ask(llm, prompt, params) == plain(prompt, params)
            killer.join()
            assert eventually(lambda pid=pid: ended(pid))
            assert ask(llm, prompt, params) == plain(prompt, params)  # notices it now at the latest, and starts another
            assert remote.faults == done + 1
            assert remote.wait_ready(PATIENCE), remote.last_error
            assert ask(llm, prompt, params) == plain(prompt, params)
            assert remote.alive
            assert not Path(f"/proc/{pid}").exists()


def test_a_killed_worker(real_target: Target, poor_draft: Path) -> None:
    kills(real_target, poor_draft, Mode.DUO, 1)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("mode", MODES)
def test_a_worker_killed_25_times(mode: Mode, real_target: Target, poor_draft: Path) -> None:
    kills(real_target, poor_draft, mode, 25)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_a_worker_stopped_for_5_seconds(mode: Mode, real_target: Target, poor_draft: Path) -> None:
    plain, config = Plain(real_target), replace(SMALL, mode=mode)
    params = SamplingParams(max_tokens=600, ignore_eos=True)
    with engine(real_target, spawn(poor_draft, config), config) as llm:
        remote = worker_of(llm)
        assert remote.pid is not None
        stop, go = (threading.Timer(s, os.kill, (remote.pid, n)) for s, n in ((0.5, signal.SIGSTOP), (5.5, signal.SIGCONT)))
        stop.start()
        go.start()
        said = ask(llm, "Count to one thousand.", params)
        go.join()
        assert said == plain("Count to one thousand.", params)
        assert remote.faults == 0
        before = remote.steps
        assert ask(llm, "Count to ten.", SETTINGS[0]) == plain("Count to ten.", SETTINGS[0])
        assert remote.steps > before


def test_a_worker_of_a_useless_draft(real_target: Target, random_draft: Path) -> None:
    plain, config = Plain(real_target), replace(SMALL, mode=Mode.DUO)
    with engine(real_target, spawn(random_draft, config), config) as llm:
        for prompt, params in questions(1):
            assert ask(llm, prompt, params) == plain(prompt, params)


class Disturbed:
    """Two drafts that do the same work. One is stopped at random moments and has to do the step again; the logits must agree."""

    def __init__(self, path: Path) -> None:
        self._calm, self._other = (load_draft(path, SMALL) for _ in range(2))
        self.vocabulary, self.context, self.token_ids = self._calm.vocabulary, self._calm.context, self._calm.token_ids
        self.room = self._calm.room
        self._flag, self._chance = mmap.mmap(-1, mmap.PAGESIZE), random.Random(3)
        self._other.stop_on(self._flag)
        self.stopped, self.difference = 0, 0.0

    def open(self, prompt: Sequence[int], unread: int = 0) -> None:
        self._calm.open(prompt, unread)
        self._other.open(prompt, unread)

    def expand(self, leaves: Sequence[Leaf]) -> list[Row]:
        right = [row.copy() for row in self._calm.expand(leaves)]
        rows = self._disturbed(leaves) or self._disturbed(leaves) or self._other.expand(leaves)
        self.difference = max(self.difference, *(float(np.abs(a - b).max()) for a, b in zip(right, rows, strict=True)))
        return right

    def _disturbed(self, leaves: Sequence[Leaf]) -> list[Row]:
        timer = threading.Timer(self._chance.random() * 0.002, self._flag.__setitem__, (0, 1))
        timer.start()
        try:
            return self._other.expand(leaves)
        except Interrupted:
            self.stopped += 1
            return []
        finally:
            timer.join()
            self._flag[0] = 0

    def commit(self, tokens: Sequence[int], path: Sequence[int], alive: Sequence[int]) -> None:
        self._calm.commit(tokens, path, alive)
        self._other.commit(tokens, path, alive)

    def close(self) -> None:
        self._calm.close()
        self._other.close()


def test_a_draft_step_broken_off_leaves_no_trace(poor_draft: Path) -> None:
    draft = Disturbed(poor_draft)
    drafter = ModelDrafter(draft)
    prompt = draft.vocabulary.tokenize("The capital of France is", special=False, bos=True)
    drafter.open(prompt, SETTINGS[0], BestFirst(3))
    for step in range(40):
        grown = drafter.grow(drafter.next_leaves())
        if step % 4 == 3:
            path = drafter._tree.likeliest_path(3)
            drafter.commit([node.token for node in path] if step % 8 == 3 else [grown[0].token])
    draft.close()
    assert draft.stopped > 5
    # Cells lie elsewhere after a step that was done again, and sums in another order round differently.
    assert draft.difference < 1.0


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_memory_stays_flat_over_500_answers(real_target: Target, poor_draft: Path) -> None:
    config = replace(SMALL, mode=Mode.DUO)
    with engine(real_target, spawn(poor_draft, config), config) as llm:
        pid = worker_of(llm).pid
        assert pid is not None
        sizes = []
        for i, (prompt, params) in enumerate(questions(500)):
            ask(llm, prompt, replace(params, max_tokens=8))
            if i >= 100 and i % 50 == 0:
                sizes.append((resident(), resident(pid)))
        assert worker_of(llm).faults == 0
    for first, last in zip(sizes[0], sizes[-1], strict=True):
        assert last - first < 4 << 20, sizes
