"""What a pair costs on this machine: `verify(n)`, `draft_step(w)`, prompts and messages, measured with a real clock.

Profiles are kept per machine, models and settings, in the user's cache folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import platform
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from duodecoding import machine
from duodecoding.backends.base import Conversation, Draft, Target, Vocabulary
from duodecoding.core import walk
from duodecoding.costs import CostCurve, Floor, Longer, Profile, fit, from_record, stepped, to_record
from duodecoding.drafters.growth import BestFirst
from duodecoding.drafters.model import ModelDrafter
from duodecoding.errors import UsageError
from duodecoding.planner import DEAREST
from duodecoding.tree import ROOT, Node, PassNode, Proposal
from duodecoding.types import EngineConfig, SamplingParams
from duodecoding.wire import Nodes, main_side, worker_side

Progress = Callable[[str, float], None]  # what is being done, share done
Clock = Callable[[], float]
Tell = Callable[[Sequence[Proposal], Sequence[Node]], None]  # guesses of the last step, leaves of the next

NODES = (1, 2, 4, 8, 16, 32, 64, 128)  # tokens in a pass
QUICK_NODES = (1, 2, 4, 8, 9, 16)
QUICK_PADDED = 64  # the largest of the sizes that passes are padded to; usual ones have no more
CONTEXTS = (128, 512, 2048)
WIDTHS = (1, 2, 4, 8, 16)  # leaves in a draft step
IN_TURN = 3  # draft steps in a row; where draft and target take turns, between two passes
WIDEST_IN_TURN = 4  # leaves: no mode has more there
REPEATS = 7
GREEDY = SamplingParams()
QUICK_CONTEXT = 16
QUICK_ROUNDS, FEWER_ROUNDS = 3, 2  # of each size; of those that are rare
RARE = 8  # tokens in a pass: more are
QUICK_TURNS = 2  # of each width
QUICK_LIMIT = 0.2  # seconds; after a pass this long no larger one is tried
SLOW = 0.3  # seconds of a pass
BRANCHING = 8
NOTHING = 1e-12  # seconds for a token
ECHOES = 200  # messages there and back
COPIED = 1 << 27  # bytes; more than a CPU's caches hold
# Settings that change it.
COSTLY = ("threads", "threads_draft", "draft_engine", "gpu_layers", "ctx_size", "backend", "device", "dtype", "compile")
GUESSES = (401, 402)  # tokens as good as any
PROMPTS = (48, 96, 192, 384, 768)  # tokens: between the sizes that a GPU pads them to
LONG_PROMPT = 0.25  # seconds
WORDS = "one two three four five six seven eight nine ten eleven twelve "  # what is in a prompt does not change its price


def measure(
    target: Target,
    draft: Draft | None,
    *,
    name: str = "here",
    about: str = "",
    settings: Mapping[str, Any] | None = None,
    nodes: Sequence[int] = NODES,
    contexts: Sequence[int] = CONTEXTS,
    widths: Sequence[int] = WIDTHS,
    repeats: int = REPEATS,
    params: SamplingParams = GREEDY,
    progress: Progress = lambda what, share: None,
    clock: Clock = time.perf_counter,
) -> Profile:
    """Both cost curves and the rest of a profile. Contexts too long for the target are left out; without a draft its numbers are
    those of the target. `params`: choosing a token costs both sides more at a temperature."""
    contexts = _possible(contexts, target.context, room=max(nodes) + 4 * len(nodes) * (repeats + 1))
    steps = len(contexts) + 3
    verify = {}
    for done, context in enumerate(contexts):
        progress(f"passes of the target at {context} tokens", done / steps)
        passes = list(verify_samples(target, context, nodes, repeats, clock, params))
        verify[context] = stepped(fit(passes), target.pass_sizes)
    progress("prompts", (steps - 3) / steps)
    target_prompt = _target_prompt(target, contexts[-1], clock)
    read = [*prompt_samples(target, contexts[-1], clock, params), (contexts[-1], contexts[-1] * target_prompt)]
    draft_prompt = _draft_prompt(draft, min(contexts[-1], draft.context - 1), clock) if draft is not None else target_prompt
    progress("draft steps", (steps - 2) / steps)
    samples = beside_samples(draft, contexts[0], widths, repeats, clock, params) if draft is not None else ()
    drafted = fit(list(samples)) if draft is not None else CostCurve(verify[contexts[0]].points)
    longer = _longer(draft, drafted, contexts[0], contexts[-1], repeats, clock, params) if draft is not None else None
    in_turn = fit(list(turn_samples(target, draft, contexts[0], widths, repeats, clock, params))) if draft is not None else None
    progress("messages", (steps - 1) / steps)
    return Profile(
        name,
        about,
        True,
        verify,
        drafted,
        target_prompt,
        draft_prompt,
        latency(clock=clock),
        dict(settings or {}),
        in_turn=in_turn,
        longer=longer,
        prompts=fit(read),
    )


def _possible(contexts: Sequence[int], limit: int, room: int) -> list[int]:
    """`room`: tokens that the measurement itself adds."""
    found = [context for context in contexts if context + room < limit]
    if not found and limit <= room + 1:
        raise UsageError(f"a context of {limit} tokens is too short to measure", f"it takes {room + 2}", "Raise --ctx-size.")
    return found or [limit - room - 1]


def quick_verify(target: Target, *, clock: Clock = time.perf_counter) -> dict[int, CostCurve]:
    """A first look at `verify(n)`, well under a second: few sizes, one short context. For the start of an engine."""
    conversation = target.open(_prompt(target.vocabulary, QUICK_CONTEXT), SamplingParams())
    _round(target, conversation, 1, clock)  # reads the prompt and warms up
    shortest: dict[int, float] = {}
    sizes = tuple(size for size in target.pass_sizes if size <= QUICK_PADDED) or QUICK_NODES
    padded = bool(target.pass_sizes)
    for n in (size for size in sizes for _ in range(QUICK_ROUNDS if padded or size <= RARE else FEWER_ROUNDS)):
        seconds = _round(target, conversation, n, clock)  # caches are warm behind a pass of its kind
        shortest[n] = min(shortest.get(n, seconds), seconds)  # what disturbs a pass makes it longer, never shorter
        dear = not padded and seconds > DEAREST * shortest[1]  # no guesses are worth it
        if len(shortest) > 1 and (dear or seconds > QUICK_LIMIT):
            break
    return {QUICK_CONTEXT: stepped(fit(list(shortest.items())), target.pass_sizes)}


def quick_turns(target: Target, draft: Draft, *, clock: Clock = time.perf_counter) -> CostCurve:
    """A first look at draft steps between passes."""
    return fit(list(turn_samples(target, draft, QUICK_CONTEXT, WIDTHS, QUICK_TURNS, clock, GREEDY)))


# The target


def verify_samples(
    target: Target, context: int, nodes: Sequence[int], repeats: int, clock: Clock, params: SamplingParams
) -> Iterator[tuple[int, float]]:
    """(tokens in the pass, seconds), sizes in turn so that a busy moment of the machine hits all of them. On a CPU the second of
    two: behind a large one caches hold little of what a small one reads."""
    conversation = target.open(_prompt(target.vocabulary, context), params)
    _round(target, conversation, 1, clock)  # reads the prompt
    slow: set[int] = set()  # three will do
    for turn in range(repeats + 1):
        for n in nodes:
            if n in slow and turn > 3:
                continue
            for _ in range(1 if target.overlaps or n in slow else 2):
                seconds = _round(target, conversation, n, clock)
            if turn > 0:  # the first of each size may compile something
                yield n, seconds
            if seconds > SLOW:
                slow.add(n)


def _round(target: Target, conversation: Conversation, n: int, clock: Clock) -> float:
    """Seconds of a pass over n tokens, with its verdict and commit."""
    guesses = _tree(n - 1, *GUESSES if target.vocabulary.size > max(GUESSES) else (2, 3))
    start = clock()
    verdict = walk(guesses, target.verify([(conversation, guesses)])[0])
    conversation.commit([choice.token for choice in verdict.choices])
    return clock() - start


def _tree(count: int, a: int, b: int) -> list[PassNode]:
    """Guesses in a tree that forks everywhere, as a drafted one does."""
    return [PassNode(i // 2 - 1, a if i % 2 == 0 else b) for i in range(count)]


def _target_prompt(target: Target, context: int, clock: Clock) -> float:
    conversation = target.open(_prompt(target.vocabulary, context, backwards=True), SamplingParams())
    start = clock()
    target.verify([(conversation, ())])[0](ROOT)
    return (clock() - start) / max(1, context - conversation.reused)


def prompt_samples(target: Target, context: int, clock: Clock, params: SamplingParams = GREEDY) -> Iterator[tuple[int, float]]:
    """Shorter prompts: tokens and seconds. One that takes long is the last; from there on it is so much for each token."""
    for i, tokens in enumerate(size for size in PROMPTS if size < context):
        seconds = []
        for turn in range(2):  # the first may have to make ready for this size
            other = 1 + 2 * i + turn  # begins unlike those before, or it would be found in the cache
            conversation = target.open(_prompt(target.vocabulary, tokens + other)[other:], params)
            start = clock()
            target.verify([(conversation, ())])[0](ROOT)
            seconds.append(clock() - start)
        yield tokens, min(seconds)
        if min(seconds) > LONG_PROMPT:
            return


def _prompt(vocabulary: Vocabulary, length: int, *, backwards: bool = False) -> list[int]:
    ids = (
        list(range(2, min(14, vocabulary.size))) if vocabulary.size < 256 else vocabulary.tokenize(WORDS, special=False, bos=False)
    )
    repeated = (ids * (length // len(ids) + 1))[:length]
    return repeated[::-1] if backwards else repeated


# The draft


def _longer(draft: Draft, near: CostCurve, at: int, far: int, repeats: int, clock: Clock, params: SamplingParams) -> Longer | None:
    """From the same steps with more context. None: there is no room for much more."""
    at, far = _context(draft, at), _context(draft, far)
    if far < 2 * at:
        return None
    found = fit(list(beside_samples(draft, far, list(near.points), repeats, clock, params)))
    per_token = {leaves: max((seconds - near(leaves)) / (far - at), NOTHING) for leaves, seconds in found.points.items()}
    return Longer(at, CostCurve(per_token))


class Telling:
    """What a draft worker does between two steps: it sends its guesses and looks for messages."""

    def __init__(self) -> None:
        here, there = socket.socketpair()
        self._worker, self._engine = worker_side(here), main_side(there)

    def __call__(self, grown: Sequence[Proposal], leaves: Sequence[Node]) -> None:
        nodes = [proposal[:4] for proposal in grown]
        self._worker.send(Nodes(1, nodes, len(leaves), 0.0, 0, time.monotonic(), [leaf.key for leaf in leaves]))
        self._worker.receive()

    def heard(self) -> None:
        self._engine.receive()

    def close(self) -> None:
        self._worker.close()
        self._engine.close()


def beside_samples(
    draft: Draft, context: int, widths: Sequence[int], repeats: int, clock: Clock, params: SamplingParams
) -> Iterator[tuple[int, float]]:
    """(leaves in the step, seconds) as in a worker beside the target."""
    with contextlib.closing(Telling()) as tell:
        yield from draft_samples(draft, context, widths, repeats, clock, params, tell.heard, tell)


def turn_samples(
    target: Target, draft: Draft, context: int, widths: Sequence[int], repeats: int, clock: Clock, params: SamplingParams
) -> Iterator[tuple[int, float]]:
    """The same in turn, with a pass of the target before every few steps: meanwhile the draft's threads sleep and its caches grow
    cold."""
    conversation = target.open(_prompt(target.vocabulary, context), params)
    _round(target, conversation, 1, clock)  # reads the prompt
    narrow = [width for width in widths if width <= WIDEST_IN_TURN] or widths[:1]
    return draft_samples(draft, context, narrow, repeats, clock, params, lambda: _round(target, conversation, 1, clock))


def draft_samples(
    draft: Draft,
    context: int,
    widths: Sequence[int],
    repeats: int,
    clock: Clock,
    params: SamplingParams,
    between: Callable[[], object],
    tell: Tell = lambda grown, leaves: None,
) -> Iterator[tuple[int, float]]:
    """Our own work on the guesses included: a few steps of each width, in turn so that a busy moment of the machine hits all of
    them. `between` comes before every few steps, `tell` in each."""
    drafter = ModelDrafter(draft)
    prompt = _prompt(draft.vocabulary, _context(draft, context))
    for turn in range(repeats + 1):
        for width in widths:
            steps = _steps(drafter, prompt, params, width, clock, tell)
            next(steps, None)  # a tree as wide as that
            between()
            if (some := list(islice(steps, IN_TURN))) and turn > 0:  # the first ones may set something up
                yield width, statistics.mean(some)


def _context(draft: Draft, context: int) -> int:
    """Of steps that are timed: some room is for the tree."""
    return min(context, draft.context // 2)


def _steps(
    drafter: ModelDrafter, prompt: Sequence[int], params: SamplingParams, width: int, clock: Clock, tell: Tell
) -> Iterator[float]:
    """Seconds of steps with exactly `width` leaves, as long as a tree has any. A full tree makes room for another."""
    while True:
        drafter.open(prompt, params, BestFirst(width, branching=BRANCHING))
        while drafter.read():
            pass
        before, start = 0, clock()
        grown: list[Proposal] = []
        while leaves := drafter.next_leaves():
            tell(grown, leaves)
            grown = drafter.grow(leaves)
            if len(leaves) == width and leaves[0].parent is not None:  # the root may have more to read than itself
                before += 1
                yield clock() - start
            start = clock()
        if not before:
            return  # never so wide: too few guesses


def _draft_prompt(draft: Draft, context: int, clock: Clock) -> float:
    draft.open(_prompt(draft.vocabulary, context, backwards=True))
    start = clock()
    while draft.read():
        pass
    return max(clock() - start, 1e-9) / context


# Memory


def floor(target: Target, *, on_gpu: bool, device: str = "auto", threads: int = 0) -> Floor | None:
    """The least time of the target's passes, from a copy in its memory. None: unknown, or on a GPU that torch cannot reach."""
    if not target.weights_bytes:
        return None
    bandwidth = gpu_bandwidth(device) if on_gpu else ("CPU", cpu_bandwidth(threads))
    return Floor(target.weights_bytes, bandwidth[1], bandwidth[0]) if bandwidth else None


def gpu_bandwidth(device: str = "auto") -> tuple[str, float] | None:
    """A GPU's name and the bytes a second that a copy on it reads and writes. None: no torch, no GPU, or no room."""
    if find_spec("torch") is None:
        return None
    import torch

    from duodecoding.backends.torch_model import choose_device, copy_bandwidth

    if not torch.cuda.is_available():
        return None
    chosen = choose_device("cuda" if device == "cpu" else device)
    try:
        return str(torch.cuda.get_device_name(chosen)), copy_bandwidth(chosen)
    except torch.OutOfMemoryError:  # a model fills it
        return None


def cpu_bandwidth(threads: int = 0, *, size: int = COPIED, clock: Clock = time.perf_counter) -> float:
    """Bytes a second that a large copy in main memory reads and writes, by as many threads as a model would use."""
    workers = threads or _cores()
    source, to = np.ones(size, np.uint8), np.zeros(size, np.uint8)  # filled: pages that were never written are not there
    slices = [slice(i * size // workers, (i + 1) * size // workers) for i in range(workers)]
    shortest = math.inf
    with ThreadPoolExecutor(workers) as pool:
        for _ in range(REPEATS):
            start = clock()
            list(pool.map(lambda part: np.copyto(to[part], source[part]), slices))  # numpy lets other threads run meanwhile
            shortest = min(shortest, clock() - start)
    return 2 * size / shortest


# Messages


def latency(echoes: int = ECHOES, *, clock: Clock = time.perf_counter) -> float:
    """Seconds of a small message one way through a local socket: half of a round trip, the median of many."""
    here, there = socket.socketpair()
    with here, there:
        echo = threading.Thread(target=_echo, args=(there, echoes), daemon=True)
        echo.start()
        times = []
        for _ in range(echoes):
            start = clock()
            here.sendall(b"x" * 64)
            here.recv(64)
            times.append(clock() - start)
        echo.join()
    return max(statistics.median(times) / 2, 1e-9)


def _echo(end: socket.socket, count: int) -> None:
    for _ in range(count):
        end.sendall(end.recv(64))


# Keeping profiles


def facts(config: EngineConfig, target: Path, draft: Path | None, *, device: str = "", engine: str = "") -> dict[str, Any]:
    """All that a profile depends on. `device`: the GPU's name, if one is used. `engine`: what runs the target, if known."""
    return {
        "machine": {"cpu": machine.cpu("model name"), "cores": _cores(), "system": platform.system(), "device": device},
        "target": _identity(target),
        "draft": _identity(draft) if draft is not None else None,
        "settings": {name: getattr(config, name) for name in COSTLY} | ({"backend": engine} if engine else {}),
    }


def key(facts: Mapping[str, Any]) -> str:
    """A short name for facts, the same for the same facts in any order."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def save(profile: Profile, key: str) -> Path:
    """Keep a profile. A reader never sees half of one."""
    path = _place(key)
    path.parent.mkdir(parents=True, exist_ok=True)
    half = path.with_suffix(f".{os.getpid()}")
    half.write_text(json.dumps(to_record(profile), indent=1) + "\n", "utf-8")
    half.replace(path)
    return path


def load(key: str) -> Profile | None:
    """A kept profile. None: there is none that can be read, measure again."""
    path = _place(key)
    try:
        return from_record(json.loads(path.read_text("utf-8")), where=str(path))
    except (OSError, ValueError, UsageError):
        return None


def _place(key: str) -> Path:
    return machine.cache_folder() / "profiles" / f"{key}.json"


def _identity(path: Path) -> dict[str, Any]:
    """Which model a file is, without reading all of it: its header names it, its size tells quantisations apart."""
    files = sorted(file for file in path.iterdir() if file.is_file()) if path.is_dir() else [path]
    found = hashlib.sha256()
    for file in files:
        with file.open("rb") as stream:
            found.update(stream.read(1 << 16))
    return {"name": path.name, "bytes": sum(file.stat().st_size for file in files), "begins": found.hexdigest()[:16]}


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
