"""`duo profile`: what this pair costs on this machine, as a table, a picture and a file for `duo simulate`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from duodecoding.cli.flags import (
    FLAT,
    NO_DEVICE_FLAGS,
    NO_PROFILE_FLAGS,
    DeviceFlags,
    ProfileFlags,
    ProfileOptions,
    settings,
)
from duodecoding.types import FREE_DRAFTS, EngineConfig

if TYPE_CHECKING:
    from rich.table import Table

    from duodecoding.cli.terminal import Terminal
    from duodecoding.costs import Profile


def profile(
    *,
    options: Annotated[ProfileFlags, FLAT] = NO_PROFILE_FLAGS,
    engine_flags: Annotated[DeviceFlags, FLAT] = NO_DEVICE_FLAGS,
) -> int:
    """Measure what passes of the target and steps of the draft cost here, and keep it."""
    from duodecoding.cli.plots import check_plotting, plot_profile
    from duodecoding.cli.session import leaving
    from duodecoding.cli.terminal import Terminal
    from duodecoding.costs import to_record

    chosen = settings(ProfileOptions, options)
    if chosen.plot:
        check_plotting(chosen.plot)
    terminal = Terminal()
    with leaving(terminal):
        found, where = measured(settings(EngineConfig, engine_flags), chosen.name, terminal)
    if chosen.json:
        terminal.print(json.dumps(to_record(found)))
    else:
        terminal.heading(found.about)
        terminal.draw(table(found))
        terminal.pairs(rows(found))
    if chosen.plot:
        plot_profile(found, Path(chosen.plot))
        terminal.note(f"drawn: {chosen.plot}")
    terminal.note(f"kept: {where}")
    return 0


def measured(config: EngineConfig, name: str, terminal: Terminal) -> tuple[Profile, Path]:
    """Load the pair, measure it, keep the profile."""
    from duodecoding import backends, measure, models
    from duodecoding.bench.simulate import draft_name
    from duodecoding.llm import share_threads

    target_file = models.resolve(config.model, offline=config.offline)
    drafted = draft_name(config)
    draft_file = models.resolve(drafted, offline=config.offline) if drafted not in (*FREE_DRAFTS, "none") else None
    with terminal.bar() as progress:
        progress(f"loading {target_file.name}", 0.0)
        target = backends.load_target(target_file.path, config)
        draft = backends.load_draft(draft_file.path, config) if draft_file is not None else None
        try:
            found = measure.measure(
                target,
                draft,
                name=name,
                about=about(target_file.path, draft_file.path if draft_file else None),
                settings={name: getattr(config, name) for name in measure.COSTLY},
                progress=progress,
            )
        finally:
            target.close()
            if draft is not None:
                draft.close()
    # Stored under the settings that an engine of this pair will have.
    pair = target_file.path, draft_file.path if draft_file else None
    facts = measure.facts(share_threads(config) if draft_file else config, *pair, engine=target.engine)
    return found, measure.save(found, measure.key(facts))


def about(target: Path, draft: Path | None) -> str:
    return (
        f"{target.stem} and {draft.stem}, measured here" if draft is not None else f"{target.stem} without a draft, measured here"
    )


def table(profile: Profile) -> Table:
    """Both curves: seconds over amount of work, and how many times the smallest amount that is."""
    from rich import box
    from rich.table import Table

    drawn = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False, padding=(0, 1))
    drawn.add_column("tokens\nin a pass", justify="right")
    for context in profile.verify:
        drawn.add_column(f"target at\n{context} tokens", justify="right")
        drawn.add_column("\nratio", justify="right", style="dim")
    drawn.add_column("leaves\nin a step", justify="right")
    drawn.add_column("draft\nstep", justify="right")
    drawn.add_column("\nratio", justify="right", style="dim")
    sizes = sorted({n for curve in profile.verify.values() for n in curve.points})
    steps = sorted(profile.draft.points)
    for place in range(max(len(sizes), len(steps))):
        cells = [str(sizes[place]) if place < len(sizes) else ""]
        for curve in profile.verify.values():
            cells += priced(curve.points, sizes, place)
        drawn.add_row(*cells, str(steps[place]) if place < len(steps) else "", *priced(profile.draft.points, steps, place))
    return drawn


def priced(points: dict[int, float], sizes: list[int], place: int) -> list[str]:
    seconds = points.get(sizes[place]) if place < len(sizes) else None
    if seconds is None:
        return ["", ""]
    return [in_words(seconds), f"{seconds / points[min(points)]:.2f}"]


def rows(profile: Profile) -> dict[str, str]:
    return {
        "target reads a prompt": f"{1 / profile.target_prompt:,.0f} tokens/s",
        "draft reads a prompt": f"{1 / profile.draft_prompt:,.0f} tokens/s",
        "a message, one way": in_words(profile.latency),
    }


def in_words(seconds: float) -> str:
    if seconds < 1e-4:
        return f"{seconds * 1e6:.0f} us"
    return f"{seconds * 1e3:.2f} ms" if seconds < 0.1 else f"{seconds * 1e3:.0f} ms"
