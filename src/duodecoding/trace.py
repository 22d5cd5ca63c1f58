"""The timeline of an answer: what target and draft did, and when. Pure; to and from Chrome's trace format.

Times are seconds on any clock. Perfetto and chrome://tracing open what `to_chrome` gives.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import accumulate
from typing import Any, NamedTuple

from duodecoding.errors import UsageError

MICROSECONDS = 1e6  # the unit of the format


class Lane(StrEnum):
    """Who did it."""

    TARGET = "target"
    DRAFT = "draft"


class Did(StrEnum):
    """What it was. All but `commit` take time."""

    PROMPT = "prompt"  # reading it; args: tokens
    PASS = "pass"  # of the target; args: nodes, gained
    WAIT = "wait"  # of the target, for guesses
    STEP = "step"  # of the draft; args: leaves
    COMMIT = "commit"  # the tokens of a round enter the answer; args: gained


class Event(NamedTuple):
    lane: Lane
    name: Did
    begin: float
    end: float  # of a mark: its begin
    args: Mapping[str, int]

    @property
    def seconds(self) -> float:
        return self.end - self.begin


@dataclass(slots=True)
class Timeline:
    """A recorder. Events may come in any order."""

    title: str = ""
    events: list[Event] = field(default_factory=list)

    def span(self, lane: Lane, name: Did, begin: float, end: float, **args: int) -> None:
        self.events.append(Event(lane, name, begin, max(begin, end), args))

    def mark(self, lane: Lane, name: Did, when: float, **args: int) -> None:
        self.events.append(Event(lane, name, when, when, args))

    def of(self, lane: Lane, *names: Did) -> list[Event]:
        """Events of a lane in the order of their beginning, all or of some names."""
        found = [event for event in self.events if event.lane is lane and (not names or event.name in names)]
        return sorted(found, key=lambda event: (event.begin, event.end))

    @property
    def begin(self) -> float:
        return min((event.begin for event in self.events), default=0.0)

    @property
    def end(self) -> float:
        return max((event.end for event in self.events), default=0.0)

    def between(self, begin: float, end: float) -> Timeline:
        """What happened in a stretch of time; events that reach beyond it are cut off at its ends."""
        kept = [
            Event(e.lane, e.name, max(e.begin, begin), min(e.end, end), e.args)
            for e in self.events
            if (begin <= e.begin <= end if e.name is Did.COMMIT else e.begin < end and e.end > begin)
        ]
        return Timeline(self.title, kept)

    def without(self, silences: Sequence[tuple[float, float]]) -> Timeline:
        """As if these stretches of time, in their order, had not been. No event reaches into one."""
        ends, gone = [end for _, end in silences], list(accumulate((end - begin for begin, end in silences), initial=0.0))

        def shifted(event: Event) -> Event:
            before = gone[bisect_right(ends, event.begin)]
            return event._replace(begin=event.begin - before, end=event.end - before)

        return Timeline(self.title, [shifted(event) for event in self.events])

    def from_zero(self) -> Timeline:
        """The same, with its first event at 0."""
        start = self.begin
        return Timeline(self.title, [Event(e.lane, e.name, e.begin - start, e.end - start, e.args) for e in self.events])


_THREAD = {Lane.TARGET: 1, Lane.DRAFT: 2}


def to_chrome(timeline: Timeline) -> dict[str, Any]:
    """As one JSON object in Chrome's trace format; the first event is at 0."""
    start = timeline.begin
    events: list[dict[str, Any]] = [_named("process_name", timeline.title or "duo")]
    events += [_named("thread_name", str(lane), thread) for lane, thread in _THREAD.items()]
    events += [{**_named("thread_sort_index", "", thread), "args": {"sort_index": thread}} for thread in _THREAD.values()]
    for lane in Lane:
        events += [_event(event, start) for event in timeline.of(lane)]
    return {"displayTimeUnit": "ms", "otherData": {"title": timeline.title, "made by": "duo"}, "traceEvents": events}


def _named(kind: str, name: str, thread: int = 0) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": 1, "tid": thread, "args": {"name": name}}


def _event(event: Event, start: float) -> dict[str, Any]:
    record: dict[str, Any] = {
        "name": str(event.name),
        "cat": str(event.lane),
        "pid": 1,
        "tid": _THREAD[event.lane],
        "ts": round((event.begin - start) * MICROSECONDS, 3),
        "args": dict(event.args),
    }
    if event.name is Did.COMMIT:
        return record | {"ph": "i", "s": "p"}  # an instant, drawn across both lanes
    return record | {"ph": "X", "dur": round(event.seconds * MICROSECONDS, 3)}


def from_chrome(record: object, *, where: str) -> Timeline:
    """The inverse, for a file that `to_chrome` wrote. `where` names the file in the error."""
    try:
        events = record["traceEvents"]  # type: ignore[index]
        timeline = Timeline(str(record["otherData"]["title"]), list(_events(events)))  # type: ignore[index]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UsageError(f"{where} is not a trace of duo", f"{type(error).__name__}: {error}", _MAKE) from error
    if not timeline.events:
        raise UsageError(f"{where} has nothing to draw", "no event of target or draft is in it", _MAKE)
    return timeline


_MAKE = "Make one with: duo run --trace FILE.json"


def _events(records: Iterable[Mapping[str, Any]]) -> Iterable[Event]:
    for record in records:
        if record["ph"] in ("X", "i"):
            begin = float(record["ts"]) / MICROSECONDS
            args = {str(name): int(value) for name, value in record["args"].items()}
            end = begin + float(record.get("dur", 0.0)) / MICROSECONDS
            yield Event(Lane(record["cat"]), Did(record["name"]), begin, end, args)
