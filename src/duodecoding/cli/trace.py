"""`duo trace`: the two lanes of an answer as a picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from duodecoding.cli.flags import FLAT, NO_TRACE_FLAGS, TraceFlags, TraceOptions, settings
from duodecoding.errors import UsageError
from duodecoding.trace import Timeline, from_chrome

FILE = Parameter(help="A trace that duo run --trace wrote.")


def trace(file: Annotated[str, FILE], /, *, options: Annotated[TraceFlags, FLAT] = NO_TRACE_FLAGS) -> int:
    """Draw what target and draft did, and when, as a PNG. Perfetto and chrome://tracing open the same file."""
    from duodecoding.cli.plots import check_plotting, plot_timeline
    from duodecoding.cli.terminal import Terminal

    chosen = settings(TraceOptions, options)
    out = chosen.out or str(Path(file).with_suffix(".png"))
    check_plotting(out)
    timeline = stretch(read(Path(file)), chosen.from_, chosen.to)
    plot_timeline(timeline, Path(out))
    Terminal().note(f"drawn: {out}")
    return 0


def read(path: Path) -> Timeline:
    try:
        record = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read {path}", error.strerror or str(error)) from error
    except ValueError as error:
        raise UsageError(f"{path} is not JSON", str(error)) from error
    return from_chrome(record, where=str(path))


def stretch(timeline: Timeline, begin: float, end: float) -> Timeline:
    """The part to draw. `end` 0: all the rest."""
    end = end or timeline.end
    if not 0 <= begin < end or begin >= timeline.end:
        raise UsageError(f"nothing lies between {begin:g} s and {end:g} s", f"the trace is {timeline.end:.3f} s long")
    return timeline.between(begin, end)
