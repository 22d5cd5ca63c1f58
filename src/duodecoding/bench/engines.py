"""Our modes as contenders: engines that share one target and start every answer cold, and a closer look at their target."""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from duodecoding import backends
from duodecoding.backends.base import Target
from duodecoding.bench.answers import Speaker, forget
from duodecoding.bench.peers import Said
from duodecoding.bench.simulate import setups
from duodecoding.core import walk
from duodecoding.llm import LLM, LoadTarget
from duodecoding.sampling import Choice, gumbel
from duodecoding.trace import Timeline
from duodecoding.tree import ROOT, PassNode
from duodecoding.types import EngineConfig, Mode, SamplingParams

Progress = Callable[[str, float], None]  # what is being done, share done
BARRED = -1e4  # a bias that keeps a token out
SWEPT = (64, 600, 1200)  # tokens of context
PROMPTS = (60, 120, 250, 380, 500, 760, 1000, 1500, 1900)  # tokens


class Engine:
    """A mode of ours."""

    def __init__(self, llm: LLM, per_task: int = 0) -> None:
        """`per_task`: questions of each task that it gets; 0: all."""
        self.llm, self.name, self.per_task = llm, str(llm.config.mode), per_task
        self.timeline = Timeline()  # of the last answer
        self.abort, self.close = llm.abort, llm.close

    def answer(self, prompt: Sequence[int], params: SamplingParams) -> Said:
        return answer_in_turns([self], [prompt], params)[0]


def answer_in_turns(engines: Sequence[Engine], prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[Said]:
    """One answer of each, cold. Several take turns, by a round, whoever has said least: a machine whose speed wanders is then as
    fast for one as for another. Each needs a target of its own, and nobody may work while another one speaks. If one is stopped
    nobody goes on, and only those that have ended have said something."""
    for engine in engines:
        forget(engine.llm)
    speakers = [Speaker(engine.llm, prompt, params) for engine, prompt in zip(engines, prompts, strict=True)]
    while going := [speaker for speaker in speakers if speaker.running]:
        min(going, key=lambda speaker: speaker.tokens).go_on()
        if any(speaker.cancelled for speaker in speakers):
            break
    for engine, speaker in zip(engines, speakers, strict=True):
        engine.timeline = speaker.timeline
    return [speaker.said() for speaker in speakers if not speaker.running]


def crossed(engines: Sequence[Engine]) -> list[Engine]:
    """The same two, each on the other's target, the other way round. One place in memory may be faster than another."""
    one, two = engines
    return [Engine(two.llm.on(one.llm.target)), Engine(one.llm.on(two.llm.target))]


class SharedTarget:
    """Loads a target once for all engines that can share it."""

    def __init__(self, load: LoadTarget | None = None, apart: Collection[Mode] = ()) -> None:
        """`apart`: modes that have a target of their own on a CPU."""
        self._load, self._apart = load, apart
        self._known: dict[tuple[int, Mode | None], Target] = {}

    def __call__(self, path: Path, config: EngineConfig, progress: Progress) -> Target:
        on_cpu = self._load is None and config.gpu_layers == 0 and not backends.uses_torch(path, config)
        own = config.mode if config.mode in self._apart else None
        key = (config.threads, own) if on_cpu else (0, None)  # beside a draft it may have fewer threads
        if key not in self._known:
            self._known[key] = (self._load or backends.load_target)(path, config, progress)
        return self._known[key]


def configured(config: EngineConfig, mode: Mode, settings: Mapping[str, int] | None = None) -> EngineConfig:
    """A mode with its settings: those given, else of the published scheme as published, of the others as shipped. Nothing is kept
    of earlier conversations: every answer starts cold."""
    chosen: dict[str, Any] = {"draft_length": setups(mode)[0].config.draft_length} if mode is Mode.LOCKSTEP else {}
    return replace(config, mode=mode, warmup=True, keep_mb=0, lookup_store="", **(chosen | dict(settings or {})))


def sweep(target: Target, params: SamplingParams, sizes: Sequence[int]) -> None:
    """Passes of all sizes at a few lengths, and prompts: a GPU prepares something for each, which must not be in a measurement."""
    for number, length in enumerate(PROMPTS):
        if length < target.context:  # each begins in its own way, so nothing of another one's is reused
            conversation = target.open([2 + number, *(2 + i % 10 for i in range(1, length))], params)
            target.verify([(conversation, ())])[0](ROOT)
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
