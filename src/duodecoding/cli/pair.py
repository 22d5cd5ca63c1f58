"""`duo pair`: what drafts are worth for a target, as tables, a picture and JSON."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from duodecoding.cli.flags import (
    FLAT,
    NO_LENGTH_FLAGS,
    NO_PAIR_ENGINE_FLAGS,
    NO_PAIR_REPORT_FLAGS,
    LengthFlags,
    PairEngineFlags,
    PairOptions,
    PairReportFlags,
    settings,
)
from duodecoding.errors import UsageError
from duodecoding.types import EngineConfig, SamplingParams

if TYPE_CHECKING:
    from rich.table import Table

    from duodecoding.bench.pair import Worth
    from duodecoding.prompts import Prompt

TARGET = Parameter(help="The model whose answer it is: a file, a directory, a hub name or a built-in name.")
DRAFT = Parameter(help="A model to draft for it.")
MORE = Parameter(help="Other drafts to compare it with.")


def pair(
    target: Annotated[str, TARGET],
    draft: Annotated[str, DRAFT],
    /,
    *more: Annotated[str, MORE],
    options: Annotated[PairReportFlags, FLAT] = NO_PAIR_REPORT_FLAGS,
    sampling: Annotated[LengthFlags, FLAT] = NO_LENGTH_FLAGS,
    engine_flags: Annotated[PairEngineFlags, FLAT] = NO_PAIR_ENGINE_FLAGS,
) -> int:
    """Say what a draft is worth for a target: how often it guesses right, what it costs, what speed-up to expect."""
    from duodecoding.bench.pair import pairs
    from duodecoding.cli.plots import check_plotting, plot_agreement
    from duodecoding.cli.session import leaving
    from duodecoding.cli.simulate import words
    from duodecoding.cli.terminal import Terminal
    from duodecoding.virtual import load_profile

    chosen = settings(PairOptions, options)
    if chosen.plot:
        check_plotting(chosen.plot)
    profiles = [load_profile(name) for name in words(chosen.profile, "profile") if name != "none"]
    config = replace(settings(EngineConfig, engine_flags), model=target)
    params = settings(SamplingParams, sampling)
    prompts, terminal = some_prompts(chosen), Terminal()
    with leaving(terminal), terminal.bar() as progress:
        found, skipped = pairs(config, [draft, *more], prompts, params, profiles, chosen.replay, progress)
    if skipped:
        terminal.warn(f"left out, too long for the context: {', '.join(skipped)}")
    if chosen.json:
        terminal.print(json.dumps({"pairs": [worth.record() for worth in found]}))
    for worth in found if not chosen.json else ():
        terminal.heading(f"{Path(worth.draft).stem} for {Path(target).stem}")
        terminal.draw(table(worth))
        terminal.pairs(rows(worth))
        terminal.say_line(worth.verdict)
    if chosen.plot:
        plot_agreement({Path(worth.draft).stem: worth.agreement for worth in found if worth.agreement}, Path(chosen.plot))
        terminal.note(f"drawn: {chosen.plot}")
    return 0


def some_prompts(options: PairOptions) -> dict[str, list[Prompt]]:
    from duodecoding import prompts

    if options.per_task < 0 or options.replay < 0:
        name, value = ("per-task", options.per_task) if options.per_task < 0 else ("replay", options.replay)
        raise UsageError(f"--{name} is {value}", "it must be 0 or more")
    found = prompts.load(folder=Path(options.tasks) if options.tasks else None)
    return {task: of_task[: options.per_task or None] for task, of_task in found.items()}


def table(worth: Worth) -> Table:
    """Agreement and predicted speed-up by task."""
    from rich import box
    from rich.table import Table

    drawn = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False, padding=(0, 1))
    drawn.add_column("task")
    for column in ("first\nguess", "first\ntwo", "first\nfour", *(f"speed-up\n{name}" for name in worth.speedups)):
        drawn.add_column(column, justify="right", no_wrap=True)
    tops = {task: list(shares.values()) for task, shares in worth.agreement.items()}
    means = [sum(column) / len(tops) for column in zip(*tops.values(), strict=True)]
    for task, shares in (tops | {"mean": means}).items():
        speeds = [by_task.get(task) for by_task in worth.speedups.values()]
        cells = [f"{share:.1%}" for share in shares] + [f"{speed:.2f}" if speed else "" for speed in speeds]
        drawn.add_row(task, *cells, style="bold" if task == "mean" else "")
    return drawn


def rows(worth: Worth) -> dict[str, str]:
    """What it costs here."""
    if worth.costs is None:
        return {}
    verify, draft = worth.costs.verify_at(0), worth.costs.draft
    remarks = {"through text": worth.differs} if worth.differs else {}
    if len(worth.speedups) > 1:
        remarks["elsewhere"] = "with the draft steps of the profile, whatever this draft costs"
    return remarks | {
        "a draft step": ", ".join(f"{1e3 * draft(w):.2f} ms for {w}" for w in (1, 2, 4, 8)) + " leaves",
        "a target pass": ", ".join(f"{1e3 * verify(n):.1f} ms for {n}" for n in (1, 8, 64)) + " tokens",
    }
