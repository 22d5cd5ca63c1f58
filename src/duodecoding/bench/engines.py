"""Our modes as contenders: engines that share one target and start every answer cold, and a closer look at their target."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from duodecoding import backends
from duodecoding.backends.base import Target
from duodecoding.bench.metrics import accepted_by_depth, hidden_seconds
from duodecoding.bench.peers import Said
from duodecoding.bench.simulate import setups
from duodecoding.core import walk
from duodecoding.drafters.growth import BestFirst
from duodecoding.llm import LLM, LoadTarget
from duodecoding.sampling import Choice, gumbel
from duodecoding.trace import Did, Lane, Timeline
from duodecoding.tree import ROOT, PassNode
from duodecoding.types import EngineConfig, Mode, SamplingParams
from duodecoding.wire import GrowBestFirst

Progress = Callable[[str, float], None]  # what is being done, share done
SETTLE_SECONDS = 1.0  # for a worker to come to rest
BARRED = -1e4  # a bias that keeps a token out
SWEPT = (64, 600, 1200)  # tokens of context


class Engine:
    """A mode of ours."""

    def __init__(self, llm: LLM, per_task: int = 0) -> None:
        """`per_task`: questions of each task that it gets; 0: all."""
        self.llm, self.name, self.per_task = llm, str(llm.config.mode), per_task
        self.timeline = Timeline()  # of the last answer
        self.abort, self.close = llm.abort, llm.close

    def answer(self, prompt: Sequence[int], params: SamplingParams) -> Said:
        forget(self.llm)
        start = time.perf_counter()
        stream = self.llm.stream(prompt, params)
        result = stream.run()
        seconds = time.perf_counter() - start
        stats, timeline = result.stats, stream.timeline
        self.timeline = timeline
        commits, steps = timeline.of(Lane.TARGET, Did.COMMIT), timeline.of(Lane.DRAFT, Did.STEP)
        gained = [commit.args["gained"] for commit in commits]
        in_turn = [step for step in steps if commits and step.begin >= commits[0].begin and self.llm.drafters.remote is None]
        return {
            "tokens": result.token_ids,
            "finish": result.finish_reason,
            "seconds": seconds,
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


class SharedTarget:
    """Loads a target once for all engines that can share it."""

    def __init__(self, load: LoadTarget | None = None) -> None:
        self._load = load
        self._known: dict[int, Target] = {}

    def __call__(self, path: Path, config: EngineConfig, progress: Progress) -> Target:
        on_cpu = self._load is None and config.gpu_layers == 0 and not backends.uses_torch(path, config)
        threads = config.threads if on_cpu else 0  # beside a draft it may have fewer of them
        if threads not in self._known:
            self._known[threads] = (self._load or backends.load_target)(path, config, progress)
        return self._known[threads]


def configured(config: EngineConfig, mode: Mode, settings: Mapping[str, int] | None = None) -> EngineConfig:
    """A mode with its settings: those given, else of the published scheme as published, of the others as shipped. Nothing is kept
    of earlier conversations: every answer starts cold."""
    chosen: dict[str, Any] = {"draft_length": setups(mode)[0].config.draft_length} if mode is Mode.LOCKSTEP else {}
    return replace(config, mode=mode, warmup=True, keep_mb=0, lookup_store="", **(chosen | dict(settings or {})))


def sweep(target: Target, params: SamplingParams, sizes: Sequence[int]) -> None:
    """Passes of all sizes at a few lengths: a GPU prepares something for each, which must not fall into a measurement."""
    for context in SWEPT:
        if context + len(sizes) + max(sizes) < target.context:
            conversation = target.open([2 + i % 10 for i in range(context)], params)
            for size in sizes:
                guesses = [PassNode(i - 1, 2) for i in range(size - 1)]
                verdict = walk(guesses, target.verify([(conversation, guesses)])[0])
                conversation.commit([verdict.choices[0].token])


def gap(target: Target, tokens: Sequence[int], params: SamplingParams) -> tuple[float, tuple[int, int]]:
    """How far apart the target's two best tokens after `tokens` are, in logits (noise of sampling included), and which they are.

    The log-probability of a choice is that of the unmodified distribution. So the runner-up is what is chosen when the best is
    barred, and the difference of the two is that of their logits.
    """
    best = _choice(target, tokens, params)
    second = _choice(target, tokens, replace(params, logit_bias={**params.logit_bias, best.token: BARRED}))
    apart = best.logprob - second.logprob
    if not params.greedy:
        noise = gumbel(params.seed, len(tokens), np.array([best.token, second.token]))
        apart += params.temperature * float(noise[0] - noise[1])
    return apart, (best.token, second.token)


def _choice(target: Target, tokens: Sequence[int], params: SamplingParams) -> Choice:
    target.open(tokens[:1], params)  # from a cold start
    conversation = target.open(tokens, params)
    return target.verify([(conversation, ())])[0](ROOT)


def peak_memory(engines: Sequence[Engine]) -> dict[str, int]:
    """Bytes held at most so far: by this process, by the largest of the workers, on the GPU. 0: not known, or none."""
    workers = [engine.llm.drafters.remote for engine in engines]
    return {
        "engine_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024),
        "worker_bytes": max((_peak_of(w.pid) for w in workers if w is not None and w.pid is not None), default=0),
        "gpu_bytes": _gpu_peak(),
    }


def _gpu_peak() -> int:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return 0
    from duodecoding.backends.torch_graphs import peak

    return peak()


def _peak_of(pid: int) -> int:
    status = Path(f"/proc/{pid}/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), 0)
