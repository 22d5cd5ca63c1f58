"""`duo bench`: every mode, and peers, on the same questions in one run; a table, results.json, report.md and pictures."""

from __future__ import annotations

import json
import math
import platform
import signal
import subprocess
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from duodecoding.cli.flags import (
    FLAT,
    NO_DEVICE_FLAGS,
    NO_REPLAY_FLAGS,
    OUTPUT,
    DeviceFlags,
    ReplayFlags,
    SimulateOptions,
    derive,
    settings,
)
from duodecoding.errors import UsageError
from duodecoding.types import EngineConfig, Mode, SamplingParams

if TYPE_CHECKING:
    from rich.table import Table

    from duodecoding.bench.run import Plan, Run
    from duodecoding.cli.terminal import Terminal

TUNE_QUESTIONS = 7  # one of each kind of task
QUICK = {"per_task": 2, "max_tokens": 96, "repeat": 12}
# With llama.cpp on a CPU answers take long and differ from one to the next: fewer and shorter ones, off and duo a round each.
QUICK_IN_TURNS = {"per_task": 2, "max_tokens": 48, "repeat": 3}
QUICK_SECONDS = 160.0  # then no question begins any more


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """What `duo bench` asks of whom, and where it leaves its results."""

    out: str = ""
    quick: bool = False
    tasks: str = ""
    modes: str = "off,chain,serial,lockstep,duo"
    per_task: int = 10
    repeat: int = 1
    tune: bool = False
    peers: str = ""
    peer_per_task: int = 0
    virtual: int = 1


BENCH_HELP = {
    "out": "Folder for results.json, report.md and pictures; one that exists is gone on with. Without it a new one here.",
    "quick": "A first look: two questions a task, 96 tokens (llama.cpp: 48), our modes, off and duo often. Ends within 3 minutes.",
    "tasks": "A folder of .jsonl files with questions (the format of Spec-Bench), instead of the package's own.",
    "modes": "Separated by commas. off is always among them: the others are measured against it.",
    "per_task": "Questions of each task.",
    "repeat": "Sessions; drafters start afresh in each.",
    "tune": "First find the best length of chain and shape of serial, on questions that are not measured.",
    "peers": "Separated by commas, or all: transformers, transformers-compiled, -assisted, -lookup, llama-server.",
    "peer_per_task": "Questions of each task for the peers. 0: all.",
    "virtual": "Questions of each task to compare with virtual time and its limit, after the run. 0: none.",
}
if TYPE_CHECKING:
    BenchFlags = BenchOptions
else:
    BenchFlags = derive(BenchOptions, BENCH_HELP, OUTPUT)
NO_BENCH_FLAGS = BenchFlags()


def bench(
    *,
    options: Annotated[BenchFlags, FLAT] = NO_BENCH_FLAGS,
    sampling: Annotated[ReplayFlags, FLAT] = NO_REPLAY_FLAGS,
    engine_flags: Annotated[DeviceFlags, FLAT] = NO_DEVICE_FLAGS,
) -> int:
    """Measure all modes on the same questions: speed-ups with intervals, where the time goes, and whether answers are equal."""
    from duodecoding.bench.journal import Journal
    from duodecoding.bench.limit import add_virtual
    from duodecoding.bench.run import Run, facts
    from duodecoding.cli.interrupts import Interrupts, exit_code
    from duodecoding.cli.terminal import Terminal

    terminal = Terminal()
    chosen = settings(BenchOptions, options)
    plan = planned(chosen, settings(SamplingParams, sampling), settings(EngineConfig, engine_flags), terminal)
    folder = Path(chosen.out or time.strftime("duo-bench-%Y%m%d-%H%M%S"))
    journal = Journal(folder, facts(plan))
    journal.note("session", when=time.strftime("%Y-%m-%d %H:%M:%S"), commit=commit())
    with terminal.bar() as progress:
        run = Run(plan, journal, progress, deadline=time.monotonic() + (QUICK_SECONDS if chosen.quick else math.inf))
        with Interrupts(run.stop, terminal.quiet) as interrupts:
            run.go()
        ended_by = interrupts.signal
        if ended_by is None and not chosen.quick:
            try:
                add_virtual(journal, plan, chosen.virtual, progress)
            except KeyboardInterrupt:
                ended_by = signal.SIGINT
    journal.close()
    report(run, folder, terminal)
    if ended_by is None:
        if not run.complete:
            terminal.warn(f"not all questions were asked, the time of --quick ({QUICK_SECONDS:.0f} s) was over")
        return 0
    terminal.warn(f"stopped early; the same command with --out {folder} goes on from here")
    return exit_code(ended_by)


def planned(options: BenchOptions, params: SamplingParams, config: EngineConfig, terminal: Terminal) -> Plan:
    """The plan that the flags stand for. Whatever is wrong with them is found here, before anything is loaded."""
    from duodecoding import backends, models
    from duodecoding.bench import order, peers
    from duodecoding.bench.run import Plan
    from duodecoding.cli.simulate import some_prompts, words

    if options.repeat < 1:
        raise UsageError(f"--repeat is {options.repeat}", "it must be at least 1")
    model = models.resolve(config.model, offline=config.offline).path
    in_turns = options.quick and config.gpu_layers == 0 and backends.engine_of(model, config) == "llamacpp"
    if options.quick:
        brief = QUICK_IN_TURNS if in_turns else QUICK
        options = replace(options, per_task=min(options.per_task, brief["per_task"]), repeat=brief["repeat"], peers="", tune=False)
        params = replace(params, max_tokens=min(params.max_tokens, brief["max_tokens"]))
    modes = [known_mode(name) for name in words(options.modes, "modes")]
    rivals = list(peers.PEERS) if options.peers == "all" else words(options.peers, "peers") if options.peers else []
    peers.check(rivals)
    vocabulary = backends.read_vocabulary(model)
    asked = [
        question
        for of_task in some_prompts(SimulateOptions(tasks=options.tasks, per_task=options.per_task)).values()
        for question in of_task
    ]
    questions, left_out = order.fitting(asked, vocabulary, config.ctx_size, params.max_tokens)
    if not questions:
        raise UsageError("every question is too long", f"the context has {config.ctx_size} tokens", "Raise --ctx-size.")
    if left_out:
        terminal.warn(f"left out, too long for the context: {', '.join(left_out)}")
    tune = TUNE_QUESTIONS if options.tune else 0
    once = [str(mode) for mode in (Mode.CHAIN, Mode.SERIAL, Mode.LOCKSTEP)] if options.quick else []
    return Plan(
        config, questions, params, modes, rivals, options.repeat, tune, options.peer_per_task,
        mode_per_task=dict.fromkeys(once, 1), once=frozenset(once), in_turns=in_turns,
    )  # fmt: skip


def known_mode(name: str) -> Mode:
    if name not in list(Mode):
        raise UsageError(f"unknown mode {name!r}", f"the modes are {', '.join(Mode)}")
    return Mode(name)


def about(machine: dict[str, Any]) -> dict[str, Any]:
    """What every result carries: the machine and the commit."""
    from duodecoding.cli.machine import own_code, versions

    used = {name: version for name, version in versions().items() if version is not None and name != "python"}
    return {"commit": commit(), "machine": {**machine, "python": platform.python_version(), "own code": own_code(), **used}}


def commit() -> str:
    """Of the source tree this runs from, `+` where it has changes of its own; else the version."""
    from duodecoding import __version__

    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty=+", "--exclude=*"]
    try:
        return subprocess.run(git, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return f"duo {__version__}"


def report(run: Run, folder: Path, terminal: Terminal) -> None:
    """Everything that can be said by now: a table here, the rest into the folder."""
    from duodecoding.bench.report import results, write
    from duodecoding.cli.bench_plots import TRACE, draw
    from duodecoding.trace import to_chrome

    if not run.journal.answers:
        terminal.warn("nothing was measured")
        return
    if run.trace is not None:
        run.trace.title = "One answer of duo"
        (folder / TRACE).write_text(json.dumps(to_chrome(run.trace)) + "\n", encoding="utf-8")
    found = results(run.journal, about(run.journal.settings["machine"]))
    pictures = draw(folder, found)
    write(folder, found)
    terminal.heading(f"{run.target_file.stem}: {len({a.question for a in run.journal.answers})} questions, speed-up over off")
    terminal.draw(table(found))
    for peer, why in found["skipped"].items():
        terminal.note(f"{peer} did not take part: {why}")
    terminal.note(f"written: {folder}/results.json, report.md{''.join(f', {name}' for name in pictures)}")


def table(found: dict[str, Any]) -> Table:
    """Speed-ups by task, then what goes with them."""
    from rich import box
    from rich.table import Table

    from duodecoding.cli.simulate import BRIEF

    rows = {**found["modes"], **found["peers"]}
    tasks = [*dict.fromkeys(task for row in rows.values() for task in row["speedup"] if task != "mean")]
    drawn = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False, padding=(0, 1))
    drawn.add_column("mode", no_wrap=True)
    for column in (
        *(BRIEF.get(task, task) for task in tasks),
        "mean",
        "95 %",
        "tokens/s",
        "tokens/\nround",
        "first\ntoken",
        "equal",
    ):
        drawn.add_column(column, justify="right", no_wrap=True)
    for name, row in rows.items():
        mean, equal = row["speedup"].get("mean"), found["equality"].get(name)
        drawn.add_row(
            name,
            *(f"{row['speedup'][task]['value']:.2f}" if task in row["speedup"] else "" for task in tasks),
            f"{mean['value']:.2f}" if mean else "",
            f"{mean['low']:.2f}–{mean['high']:.2f}" if mean and mean["low"] is not None else "",
            f"{row['tokens_per_second']['mean']:.1f}",
            f"{row['tokens_per_round']:.2f}" if "tokens_per_round" in row else "",
            f"{row['ttft_seconds']['seconds'] * 1e3:.0f} ms" if row["ttft_seconds"] else "",
            f"{equal['equal']}/{equal['compared']}" if equal else "",
        )
    return drawn
