"""The two lanes of a timeline in a terminal: what the target did, what the draft did, over time from left to right."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from duodecoding.trace import Did, Event, Lane, Timeline

WIDTH = 100
NAMES = 8  # columns before the lanes
HEIGHTS = "▂▃▄▅▆▇█"
PASSES = (("█", "blue"), ("▓", "bright_blue"))  # in turn, so that neighbours can be told apart
READING, WAITING = ("▒", "dim"), ("░", "red")


def first_passes(timeline: Timeline, passes: int) -> Timeline:
    """The stretch from the end of the target's prompt to the end of its n-th pass."""
    found = timeline.of(Lane.TARGET, Did.PASS)[:passes]
    return timeline.between(found[0].begin, found[-1].end) if found else timeline


def lanes(timeline: Timeline, width: int = WIDTH) -> Text:
    """Gained tokens above the target's passes; the draft's steps the higher, the more leaves; time below."""
    columns = max(width - NAMES, 20)
    begin, length = timeline.begin, (timeline.end - timeline.begin) or 1e-3
    times = [begin + length * (column + 0.5) / columns for column in range(columns)]
    passes = timeline.of(Lane.TARGET, Did.PASS)
    drawn = [_gains(passes, begin, length, columns), _line("target", _target(timeline, passes, times))]
    if timeline.of(Lane.DRAFT):
        drawn.append(_line("draft", _draft(timeline, times)))
    drawn += [_axis(begin, length, columns), _legend(timeline)]
    return Text("\n").join(drawn)


def _line(name: str, cells: Sequence[tuple[str, str]]) -> Text:
    return Text.assemble((name.ljust(NAMES), "bold"), *cells)


def _gains(passes: Sequence[Event], begin: float, length: float, columns: int) -> Text:
    row = [" "] * columns
    for event in passes:
        text = f"+{event.args['gained']}"
        middle = ((event.begin + event.end) / 2 - begin) / length * columns
        at = min(max(int(middle - len(text) / 2 + 0.5), 0), columns - len(text))
        if all(cell == " " for cell in row[max(0, at - 1) : at + len(text)]):
            row[at : at + len(text)] = text
    return Text(" " * NAMES + "".join(row), style="dim")


def _target(timeline: Timeline, passes: Sequence[Event], times: Sequence[float]) -> list[tuple[str, str]]:
    number = {id(event): i for i, event in enumerate(passes)}

    def cell(event: Event | None) -> tuple[str, str]:
        if event is None:
            return " ", ""
        if event.name is Did.PASS:
            return PASSES[number[id(event)] % 2]
        return WAITING if event.name is Did.WAIT else READING

    busy = [*passes, *timeline.of(Lane.TARGET, Did.WAIT, Did.PROMPT)]
    return [cell(event) for event in _under(busy, times)]


def _draft(timeline: Timeline, times: Sequence[float]) -> list[tuple[str, str]]:
    steps = timeline.of(Lane.DRAFT, Did.STEP)
    widest = max((step.args.get("leaves", 1) for step in steps), default=1)

    def cell(event: Event | None) -> tuple[str, str]:
        if event is None:
            return " ", ""
        if event.name is not Did.STEP:
            return READING
        share = event.args.get("leaves", 1) / widest
        return HEIGHTS[round(share * (len(HEIGHTS) - 1))], "yellow"

    return [cell(event) for event in _under(timeline.of(Lane.DRAFT, Did.STEP, Did.PROMPT), times)]


def _under(events: Sequence[Event], times: Sequence[float]) -> list[Event | None]:
    """The event at each time, if any. Both are sorted by time except for ties, so one walk finds them all."""
    ordered = sorted(events, key=lambda event: event.begin)
    found: list[Event | None] = []
    at = 0
    for time in times:
        while at < len(ordered) and ordered[at].end <= time:
            at += 1
        found.append(ordered[at] if at < len(ordered) and ordered[at].begin <= time else None)
    return found


def _axis(begin: float, length: float, columns: int, marks: int = 5) -> Text:
    row = [" "] * columns
    for mark in reversed(range(marks)):  # the last one has the unit and goes first
        text = f"{1e3 * (begin + length * mark / (marks - 1)):.0f}" + (" ms" if mark == marks - 1 else "")
        at = min(round(columns * mark / (marks - 1)), columns - len(text))
        if not "".join(row[at : at + len(text) + 1]).strip():
            row[at : at + len(text)] = text
    return Text(" " * NAMES + "".join(row).rstrip(), style="dim")


def _legend(timeline: Timeline) -> Text:
    parts: list[tuple[str, str]] = [(" " * NAMES, ""), PASSES[0], PASSES[1], (" pass, +tokens gained   ", "dim")]
    if timeline.of(Lane.TARGET, Did.WAIT):
        parts += [WAITING, (" wait for guesses   ", "dim")]
    if timeline.of(Lane.DRAFT, Did.STEP):
        parts += [("▃▅█", "yellow"), (" draft step, height: leaves   ", "dim")]
    if [*timeline.of(Lane.TARGET, Did.PROMPT), *timeline.of(Lane.DRAFT, Did.PROMPT)]:
        parts += [READING, (" prompt", "dim")]
    return Text.assemble(*parts)
