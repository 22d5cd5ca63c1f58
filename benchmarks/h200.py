"""Every mode, and peers, on a GPU machine: SmolLM2's function in shapes of 7, 13 and 32 billion parameters.

    python benchmarks/h200.py --target SmolLM2.gguf --draft DRAFT.gguf --tasks TASKS --budget-seconds 400 [--peers all]
    python benchmarks/h200.py --target SmolLM2.gguf --draft DRAFT.gguf --tasks TASKS --finish   # no GPU: virtual time, pictures

A step is one shape at one temperature. Each has a folder of its own under --out and goes on where it ended, so a call may be cut
short by its budget and repeated. Nothing is written for the target: the rig makes it in GPU memory. Estimates are printed before
each step; they are sums of what passes are known to cost and replace nothing that is measured.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import common

from duodecoding import prompts
from duodecoding.backends import read_vocabulary
from duodecoding.bench import order, peers
from duodecoding.bench.journal import NAME, Journal
from duodecoding.bench.limit import add_virtual
from duodecoding.bench.report import results, write
from duodecoding.bench.run import Plan, Run, facts
from duodecoding.trace import to_chrome
from duodecoding.types import EngineConfig, Mode, SamplingParams

CONTEXT = 1984  # with 64 rows of a pass it fills 2,048 slots
ROWS = 64
SHAPES = ("7b", "13b", "32b")
RIVALS = (Mode.CHAIN, Mode.SERIAL, Mode.LOCKSTEP)
# Seconds, for estimates only. A plain token: benchmarks/results/h200_verify_*.json (13b between them); building and capturing:
# seen in earlier runs; speed-ups: docs/results.md, virtual time; what peers take for a token: eager passes of h200_verify.
PLAIN = {"7b": 0.0046, "13b": 0.0085, "32b": 0.0185}
READY = {"7b": 45.0, "13b": 60.0, "32b": 90.0}
GAINS = {"off": 1.0, "chain": 1.3, "serial": 1.5, "lockstep": 1.4, "duo": 2.2}
PEER = {
    "transformers": 0.1,
    "transformers-compiled": 0.02,
    "transformers-assisted": 0.06,
    "transformers-lookup": 0.06,
    "llama-server": 0.0,
}
PEER_READY = {"transformers-compiled": 90.0}
MEAN_SHARE = 0.85  # of --max-tokens that an answer has


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--target", type=Path, required=True, help="the GGUF whose function and vocabulary the rig has")
    parser.add_argument("--draft", type=Path, required=True, help="GGUF of the draft")
    parser.add_argument("--tasks", type=Path, required=True, help="folder of .jsonl files in the format of Spec-Bench")
    parser.add_argument("--out", type=Path, default=common.RESULTS / "h200_bench")
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8])
    parser.add_argument("--modes", nargs="+", default=[str(mode) for mode in Mode], choices=[str(mode) for mode in Mode])
    parser.add_argument("--peers", nargs="*", default=[], help=f"all, or some of {', '.join(peers.PEERS)}; greedy steps only")
    parser.add_argument("--per-task", type=int, default=10)
    parser.add_argument("--peer-per-task", type=int, default=1, help="eager transformers is slow")
    parser.add_argument("--rival-per-task", type=int, default=0, help="for chain, serial and lockstep; 0: like off and duo")
    parser.add_argument("--sampled-per-task", type=int, default=0, help="for all modes at a temperature over 0; 0: like --per-task")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--tune", type=int, default=0, help="questions for the best settings of chain and serial")
    parser.add_argument(
        "--chain", type=int, nargs="+", help="length of a chain, as duo simulate found it, or one for each temperature"
    )
    parser.add_argument("--serial", nargs="+", help="steps and width of a tree, as in 3x2, or one for each temperature")
    parser.add_argument("--threads-draft", type=int, default=0, help="0: all cores but one")
    parser.add_argument("--budget-seconds", type=float, default=480.0, help="of this call; nothing begins after it")
    parser.add_argument("--estimate", action="store_true", help="only say how long it would take")
    parser.add_argument("--finish", action="store_true", help="only virtual time, reports and pictures of what is there; no GPU")
    parser.add_argument("--virtual", type=int, default=2, help="with --finish: questions of each task in virtual time")
    return parser.parse_args(argv)


def plan(options: argparse.Namespace, temperature: float) -> Plan:
    """`--chain` and `--serial` count as settings; a draft's threads are those of the worker and of the modes that take turns."""
    given: dict[str, dict[str, int]] = {}
    place = options.temperatures.index(temperature) if temperature in options.temperatures else 0
    if options.chain:
        given["chain"] = {"draft_length": options.chain[min(place, len(options.chain) - 1)]}
    if options.serial:
        steps, width = map(int, options.serial[min(place, len(options.serial) - 1)].split("x"))
        given["serial"] = {"draft_length": steps, "draft_width": width}
    config = EngineConfig(
        model=str(options.target), draft=str(options.draft), ctx_size=CONTEXT, gpu_layers=-1, max_nodes=ROWS - 1,
        threads=1 if options.threads_draft else 0, threads_draft=options.threads_draft,
    )  # fmt: skip
    params = SamplingParams(max_tokens=options.max_tokens, temperature=temperature)
    folder = prompts.load(folder=options.tasks)
    per_task = options.sampled_per_task if temperature and options.sampled_per_task else options.per_task
    asked = [question for of_task in folder.values() for question in of_task[:per_task]]
    questions, left_out = order.fitting(asked, read_vocabulary(options.target), CONTEXT, options.max_tokens)
    if left_out:
        print("left out, too long:", ", ".join(left_out))
    rivals = [] if temperature else list(peers.PEERS) if options.peers == ["all"] else options.peers
    peers.check(rivals)
    modes = [Mode(name) for name in options.modes]
    fewer = {str(mode): options.rival_per_task for mode in modes if mode in RIVALS and options.rival_per_task}
    return Plan(config, questions, params, modes, rivals, 1, options.tune, options.peer_per_task, given, fewer)


def estimate(shape: str, plan: Plan, answered: int, ready: float) -> dict[str, float]:
    """Seconds of a step, by part. `answered`: answers that the journal has already. `ready`: until the target is there."""
    turns = sum(len(question.turns) for question in plan.questions)
    few = sum(len(question.turns) for question in order.first_of(plan.questions, plan.peer_per_task))
    token = PLAIN[shape] * plan.params.max_tokens * MEAN_SHARE
    share = {mode: len(order.first_of(plan.questions, plan.per_task(mode))) / len(plan.questions) for mode in plan.all_modes}
    modes = {str(mode): share[mode] * turns * token / GAINS[mode] for mode in plan.all_modes}
    tuning = plan.tune * 12 * 64 * PLAIN[shape] / 1.3
    rivals = {
        name: few * PEER.get(name, 0.1) * plan.params.max_tokens * MEAN_SHARE + PEER_READY.get(name, 2.0) for name in plan.peers
    }
    left = max(0.0, 1 - answered / (turns * sum(share.values())))
    return {"getting ready": ready, "tuning": tuning, **{name: seconds * left for name, seconds in modes.items()}, **rivals}


class Rig:
    """The target of one shape, made in GPU memory when it is first needed. Engines that use it do not close it."""

    def __init__(self, shape: str, gguf: Path) -> None:
        self.shape, self._gguf = shape, gguf
        self._target: Any = None

    @property
    def wants_seconds(self) -> float:
        """To be ready, as far as one knows."""
        return READY[self.shape] if self._target is None else 5.0

    def load(self, *_: Any) -> Any:
        if self._target is None:
            self._target = self._build()
        return Kept(self._target)

    def _build(self) -> Any:
        import rig
        import torch
        from h200_verify import DEVICE
        from transformers import AttentionInterface

        from duodecoding.backends.torch import TorchTarget
        from duodecoding.backends.torch_graphs import peak
        from duodecoding.backends.torch_slots import ATTENTION, attention

        AttentionInterface.register(ATTENTION, attention)
        peak.forget()
        start = time.monotonic()
        model = rig.build(rig.SHAPES[self.shape], DEVICE, torch.bfloat16, rig.read_gguf(self._gguf), ATTENTION)
        built = time.monotonic()
        target = TorchTarget(model, read_vocabulary(self._gguf), context=CONTEXT, rows=ROWS, compile=True)
        target.prepare(True, Said())
        print(f"{self.shape}: built in {built - start:.0f} s, graphs in {time.monotonic() - built:.0f} s", flush=True)
        return target

    def close(self) -> None:
        if self._target is not None:
            self._target.close()


class Kept:
    """A target without its end."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    def close(self) -> None:
        pass


class Said:
    """Progress on a log: a line now and then."""

    def __init__(self, every: float = 5.0) -> None:
        self._every, self._last = every, 0.0

    def __call__(self, what: str, share: float) -> None:
        if time.monotonic() - self._last > self._every:
            self._last = time.monotonic()
            print(f"  {share:4.0%} {what}", flush=True)


def settle(run: Run, folder: Path, about: dict[str, Any]) -> dict[str, Any]:
    """Write what there is. Pictures need matplotlib, which a GPU machine may lack: --finish draws them."""
    from duodecoding.cli.bench_plots import TRACE, draw

    if run.trace is not None:
        run.trace.title = "One answer of duo"
        (folder / TRACE).write_text(json.dumps(to_chrome(run.trace)) + "\n")
    found = results(run.journal, about)
    draw(folder, found)
    write(folder, found)
    return found


def tell(found: dict[str, Any]) -> None:
    for name, row in {**found["modes"], **found["peers"]}.items():
        mean = row["speedup"].get("mean")
        if mean:
            interval = f" ({mean['low']:.2f}-{mean['high']:.2f})" if mean["low"] is not None else ""
            equal = found["equality"].get(name)
            same = f", equal {equal['equal']}/{equal['compared']}" if equal else ""
            print(f"  {name}: {mean['value']:.2f}{interval}, {row['tokens_per_second']['mean']:.1f} tokens/s{same}")


def name_of(shape: str, temperature: float) -> str:
    return f"{shape}-greedy" if temperature == 0 else f"{shape}-t{temperature:g}"


def step(temperature: float, options: argparse.Namespace, rig: Rig, end: float) -> bool:
    """Ask all that is left of one shape at one temperature. False: there is no time to begin it."""
    from h200_verify import machine

    name, planned, device = name_of(rig.shape, temperature), plan(options, temperature), machine()
    about = {"commit": common.commit(), "machine": {**common.machine(), **device}, "shape": rig.shape}
    journal = Journal(options.out / name, {**facts(planned), "shape": rig.shape, "gpu": device["gpu"]})
    journal.note("session", when=time.strftime("%Y-%m-%d %H:%M:%S"), commit=about["commit"])
    run = Run(planned, journal, Said(), load=rig.load, deadline=end)
    if not run.complete and end - time.monotonic() < rig.wants_seconds:
        print(f"{name}: no time left to begin it")
        return False
    try:
        run.go()
    except KeyboardInterrupt:
        run.stop()
    journal.close()
    print(f"{name}: {'complete' if run.complete else 'not complete, call again'}", flush=True)
    if journal.answers:
        tell(settle(run, options.out / name, about))
    return not run.stopped


def steps(options: argparse.Namespace) -> None:
    end = time.monotonic() + options.budget_seconds
    for shape in options.shapes:
        rig = Rig(shape, options.target)
        for temperature in options.temperatures:
            name = name_of(shape, temperature)
            ready = READY[shape] if temperature == options.temperatures[0] else 0.0
            parts = estimate(shape, plan(options, temperature), _answered(options.out / name), ready)
            words = ", ".join(f"{part} {seconds:.0f}" for part, seconds in parts.items() if seconds >= 0.5)
            print(f"{name}: about {sum(parts.values()):.0f} s ({words}); {end - time.monotonic():.0f} s left", flush=True)
            if not options.estimate and not step(temperature, options, rig, end):
                rig.close()
                return
        rig.close()


def _answered(folder: Path) -> int:
    file = folder / NAME
    lines = file.read_text().splitlines() if file.exists() else []
    records = [json.loads(line) for line in lines if line.startswith('{"kind": "answers"')]
    return sum(1 for record in records for answer in record["answers"] if answer["who"] in list(Mode))


def finish(options: argparse.Namespace) -> None:
    """Virtual time, report and pictures for every step that has results."""
    for folder in sorted(path.parent for path in options.out.glob(f"*/{NAME}")):
        before = json.loads((folder / "results.json").read_text())
        lines = [line for line in (folder / NAME).read_text().splitlines() if line.startswith('{"kind": "settings"')]
        settings = json.loads(lines[-1])["settings"]
        planned = plan(options, settings["sampling"]["temperature"])
        planned = replace(planned, params=SamplingParams(**settings["sampling"]))
        journal = Journal(folder, settings)
        add_virtual(journal, planned, options.virtual, Said())
        journal.close()
        run = Run(planned, journal, Said())
        print(folder.name)
        tell(settle(run, folder, {name: before[name] for name in ("commit", "machine", "shape")}))


if __name__ == "__main__":
    chosen = arguments()
    finish(chosen) if chosen.finish else steps(chosen)
