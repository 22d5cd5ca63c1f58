"""One answer of ours, from a cold start, and its time on a clock that stops while others speak."""

from __future__ import annotations

import time
from collections.abc import Sequence

from duodecoding import backends
from duodecoding.bench.metrics import accepted_by_depth, hidden_seconds
from duodecoding.bench.peers import Said
from duodecoding.drafters.growth import BestFirst
from duodecoding.llm import LLM
from duodecoding.stream import Stream
from duodecoding.trace import Did, Lane, Timeline
from duodecoding.types import SamplingParams
from duodecoding.wire import GrowBestFirst

SETTLE_SECONDS = 1.0  # for a worker to come to rest


class Speaker:
    """An answer under way that goes on by a round when it is asked to."""

    def __init__(self, llm: LLM, prompt: Sequence[int], params: SamplingParams) -> None:
        self._llm, self._prompt, self._params = llm, prompt, params
        self._stream: Stream | None = None  # before its first round, which is no sooner than it is asked for
        self._silences: list[tuple[float, float]] = []
        self._stopped = self._seconds = 0.0
        self.tokens, self.running = 0, True

    def go_on(self) -> None:
        start = time.perf_counter()
        if self._stream is None:
            self._stream = self._llm.stream(self._prompt, self._params)
        else:
            self._silences.append((self._stopped, start))
        self.tokens += len(next(self._stream.rounds(), ()))
        if self._stream.cancelled:
            self._stream.close()
        self.running, self._stopped = self._stream.running, time.perf_counter()
        self._seconds += self._stopped - start

    @property
    def cancelled(self) -> bool:
        return self._stream is not None and self._stream.cancelled

    @property
    def timeline(self) -> Timeline:
        return self._stream.timeline.without(self._silences) if self._stream is not None else Timeline()

    def said(self) -> Said:
        assert self._stream is not None
        result, timeline = self._stream.result, self.timeline
        stats, alone = result.stats, self._llm.drafters.remote is None
        commits, steps = timeline.of(Lane.TARGET, Did.COMMIT), timeline.of(Lane.DRAFT, Did.STEP)
        gained = [commit.args["gained"] for commit in commits]
        in_turn = [step for step in steps if commits and step.begin >= commits[0].begin and alone]
        return {
            "tokens": result.token_ids,
            "finish": result.finish_reason,
            "seconds": self._seconds,
            "ttft_seconds": stats.ttft_seconds,
            "reused_tokens": stats.reused_tokens,
            "first_tokens": gained[0] if gained else 0,
            "rounds": stats.rounds,
            "drafted": stats.drafted,
            "verified": stats.verified,
            "accepted": accepted_by_depth(result.tokens, gained),
            "target_seconds": stats.target_busy_seconds,
            "draft_seconds": stats.draft_busy_seconds,
            "pass_seconds": sum(event.seconds for event in timeline.of(Lane.TARGET, Did.PASS)),
            "wait_seconds": stats.wait_seconds,
            "turn_seconds": sum(step.seconds for step in in_turn),
            "step_seconds": sum(step.seconds for step in steps),
            "hidden_seconds": hidden_seconds(timeline),
            "speculation": result.speculation,
            "draft_faults": stats.draft_faults,
        }


def forget(llm: LLM) -> None:
    """Empty the caches of target and draft: the next answer reads all of its prompt. A worker is at rest afterwards, and so are the
    threads of whoever answered before."""
    nothing, params, drafters = [min(llm.vocabulary.end_tokens, default=0)], SamplingParams(), llm.drafters
    llm.target.open(nothing, params)
    if drafters.model is not None:
        drafters.model.open(nothing, params, BestFirst(1))
    worker = drafters.remote
    if worker is not None:
        worker.open(nothing, params, GrowBestFirst(1, None, 1, 0.0), grow=False)
        end = time.monotonic() + SETTLE_SECONDS
        while worker.alive and not worker.done_at(0) and (left := end - time.monotonic()) > 0:
            worker.poll(left)  # of two openings at once it would heed the second only, and keep what it has read
    if llm.config.gpu_layers != 0:
        time.sleep(backends.BESIDE_GPU)
