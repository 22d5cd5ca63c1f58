"""`duo simulate`: every mode in virtual time, on machines that are known by their cost curves."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from duodecoding.cli.flags import (
    FLAT,
    NO_PAIR_FLAGS,
    NO_REPLAY_FLAGS,
    NO_SIMULATE_FLAGS,
    PairFlags,
    ReplayFlags,
    SimulateFlags,
    SimulateOptions,
    settings,
)
from duodecoding.errors import UsageError
from duodecoding.types import EngineConfig, SamplingParams

if TYPE_CHECKING:
    from rich.table import Table

    from duodecoding.costs import Profile
    from duodecoding.prompts import Prompt

SHARES = ("tokens/\nround", "target\nidle", "draft\nidle", "drafting\nhidden", "first\ntoken")
# Names of tasks that would make a column too wide.
BRIEF = {"math_reasoning": "math", "summarization": "summary", "translation": "transl.", "humaneval": "code", "mt_bench": "chat"}


def simulate(
    *,
    options: Annotated[SimulateFlags, FLAT] = NO_SIMULATE_FLAGS,
    sampling: Annotated[ReplayFlags, FLAT] = NO_REPLAY_FLAGS,
    engine_flags: Annotated[PairFlags, FLAT] = NO_PAIR_FLAGS,
) -> int:
    """Say how fast this pair would be on other machines: real models, real tokens, an imagined clock."""
    from rich.text import Text

    from duodecoding.bench import simulate as bench
    from duodecoding.cli.session import leaving
    from duodecoding.cli.terminal import Terminal
    from duodecoding.virtual import load_profile

    chosen = settings(SimulateOptions, options)
    config = settings(EngineConfig, engine_flags)
    params = settings(SamplingParams, sampling)
    profiles = [load_profile(name) for name in words(chosen.profile, "profile")]
    modes = words(chosen.modes, "modes")
    for mode in modes:
        bench.setups(mode)  # a wrong name is found before anything is loaded
    prompts = some_prompts(chosen)
    terminal = Terminal()
    with leaving(terminal), terminal.bar() as progress:
        study, skipped = bench.load_study(config, prompts, params, progress)
        found = [bench.simulate(study, profile, modes, progress, ablate=chosen.ablate) for profile in profiles]
    if skipped:
        terminal.warn(f"left out, too long for the context: {', '.join(skipped)}")
    about = {
        "model": config.model,
        "draft": bench.draft_name(config),
        "prompts": len(study.recordings),
        "max_tokens": params.max_tokens,
    }
    for profile, result in zip(profiles, found, strict=True):
        if chosen.json:
            terminal.print(json.dumps({**result, **about, "temperature": params.temperature, "seed": params.seed}))
        else:
            terminal.heading(f"{profile.name}: {heading(about)}")
            terminal.draw(Text(remark(profile), style="dim"))
            whole = table(result["modes"])
            drawn = (
                [whole] if terminal.fits(whole) else [table(result["modes"], shares=False), table(result["modes"], speeds=False)]
            )
            for part in drawn:
                terminal.draw(part)
    return 0


def words(text: str, what: str) -> list[str]:
    found = list(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
    if not found:
        raise UsageError(f"--{what} is empty", "it takes one name or several, separated by commas")
    return found


def some_prompts(options: SimulateOptions) -> dict[str, list[Prompt]]:
    from duodecoding import prompts

    if options.per_task < 1:
        raise UsageError(f"--per-task is {options.per_task}", "it must be at least 1")
    found = prompts.load(folder=Path(options.tasks) if options.tasks else None)
    return {task: of_task[: options.per_task] for task, of_task in found.items()}


def heading(about: dict[str, Any]) -> str:
    guessed = "nobody guesses" if about["draft"] == "none" else f"{Path(about['draft']).stem} guesses"
    return f"{Path(about['model']).stem} answers {about['prompts']} prompts, {guessed}"


def remark(profile: Profile) -> str:
    kind = "" if profile.measured else "AN ESTIMATE. "
    return f"{kind}{profile.about}. Speed-up over plain decoding (off), by task."


def table(modes: dict[str, Any], *, speeds: bool = True, shares: bool = True) -> Table:
    """Speed-ups and where the time went. The best of each column, the limit aside, is set off."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    tasks = [task for task in next(iter(modes.values()))["speedup"] if task != "mean"] if speeds else []
    drawn = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False, padding=(0, 1))
    for column in ("mode", *(BRIEF.get(task, task) for task in tasks), "mean"):
        drawn.add_column(column, justify="left" if column == "mode" else "right", no_wrap=True)
    for column in SHARES if shares else ():
        drawn.add_column(column, justify="right", style="dim", no_wrap=True)
    for name, mode in modes.items():
        cells = [Text(f"{mode['speedup'][task]:.2f}", style=style(modes, name, task)) for task in (*tasks, "mean")]
        drawn.add_row(named(name, mode["settings"]), *cells, *(in_shares(mode) if shares else ()))
    return drawn


def named(name: str, chosen: dict[str, int]) -> str:
    """With the settings that were found best: the length of a chain, steps × width of a tree."""
    if name == "chain" and chosen:
        return f"{name} {chosen['draft_length']}"
    if name == "serial" and chosen:
        return f"{name} {chosen['draft_length']}×{chosen['draft_width']}"
    return f"  {name.removeprefix('duo, ')}" if name.startswith("duo, ") else name


def style(modes: dict[str, Any], name: str, task: str) -> str:
    speed = modes[name]["speedup"][task]
    best = max(mode["speedup"][task] for other, mode in modes.items() if other != "free")
    if speed < 0.97:
        return "red"
    return "bold green" if name != "free" and speed == best and speed > 1 else ""


def in_shares(mode: dict[str, Any]) -> Sequence[str]:
    return (
        f"{mode['tokens_per_round']:.2f}",
        f"{mode['target_idle']:.0%}",
        f"{mode['draft_idle']:.0%}",
        f"{mode['hidden_draft_share']:.0%}",
        f"{mode['ttft_seconds'] * 1000:.1f} ms",
    )
