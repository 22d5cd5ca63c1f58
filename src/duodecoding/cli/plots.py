"""PNG pictures: cost curves and timelines. matplotlib is optional and loaded when something is drawn."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from duodecoding.errors import BackendMissing, UsageError
from duodecoding.trace import Did, Event, Lane, Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from duodecoding.costs import CostCurve, Profile

INK, FAINT, GRID = "#22272e", "#6b7280", "#e5e7eb"
TARGET = ("#1f5fa8", "#4f8fd6", "#8db9ea")  # also by context
DRAFT = "#d9822b"
READING = "#b8bec8"
WAITING = "#c0392b"
DPI = 160


def check_plotting(name: str) -> None:
    """Say before the work begins that the picture cannot be drawn."""
    if find_spec("matplotlib") is None:
        raise BackendMissing("cannot draw pictures", "matplotlib is not installed", "Run: pip install 'duodecoding[bench]'")
    path = Path(name)
    if path.suffix.lower() != ".png":
        raise UsageError(f"cannot draw {name}", "pictures are PNG files", f"Try {path.with_suffix('.png')}.")
    if not path.parent.is_dir():
        raise UsageError(f"cannot draw {name}", f"there is no folder {path.parent}")


def _figure(width: float, height: float, columns: int = 1) -> tuple[Figure, list[Axes]]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=DPI, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    axes = [figure.add_subplot(1, columns, place + 1) for place in range(columns)]
    for ax in axes:
        ax.spines[["top", "right"]].set_visible(False)
        ax.spines[["left", "bottom"]].set_color(FAINT)
        ax.tick_params(colors=FAINT, labelsize=9)
    return figure, axes


def _save(figure: Figure, path: Path) -> None:
    try:
        figure.savefig(path, metadata={"Software": None})  # no version: the same data give the same bytes
    except OSError as error:
        raise UsageError(f"cannot write {path}", error.strerror or str(error)) from error


# Cost curves


def plot_profile(profile: Profile, path: Path) -> None:
    """Both curves side by side, in milliseconds from 0."""
    figure, (left, right) = _figure(11, 4.2, columns=2)
    several = len(profile.verify) > 1
    for colour, (context, curve) in zip(TARGET * 3, profile.verify.items(), strict=False):
        _curve(left, curve, colour, f"{context} tokens of context" if several else "")
    _proportional(left, next(iter(profile.verify.values())))
    _label(left, "A pass of the target", "tokens in the pass")
    _curve(right, profile.draft, DRAFT, "")
    _proportional(right, profile.draft)
    _label(right, "A step of the draft", "leaves in the step")
    left.legend(frameon=False, fontsize=9, labelcolor=INK)
    figure.suptitle(f"{profile.name}: {_short(profile.about)}", fontsize=11, color=INK)
    _save(figure, path)


def _curve(ax: Axes, curve: CostCurve, colour: str, label: str) -> None:
    points = curve.points
    sizes, times = list(points), [1e3 * seconds for seconds in points.values()]
    ax.plot(sizes, times, "o-", color=colour, linewidth=2, markersize=5, label=label or None)
    ends = ((sizes[-1], times[-1]),) if label else ((sizes[0], times[0]), (sizes[-1], times[-1]))  # several begin close together
    for size, time in ends:
        ax.annotate(
            f"{time:.3g}" if time < 100 else f"{time:.0f}",
            (size, time),
            (0, 7),
            textcoords="offset points",
            ha="center",
            fontsize=8,
            color=colour,
        )


def _proportional(ax: Axes, curve: CostCurve) -> None:
    """What it would cost if nothing were shared. Only as far as the measured curve goes up."""
    first, top = curve(1), 1.25e3 * max(curve.points.values())
    sizes = [2 ** (k / 8) for k in range(0, 60) if 1e3 * first * 2 ** (k / 8) <= top]
    ax.plot(sizes, [1e3 * first * n for n in sizes], "--", color=FAINT, linewidth=1, label="each one for itself")


def _label(ax: Axes, title: str, unit: str) -> None:
    ax.set_xscale("log", base=2)
    ax.set_ylim(bottom=0)
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    ax.set_title(title, fontsize=11, color=INK, loc="left")
    ax.set_xlabel(unit, color=FAINT, fontsize=9)
    ax.set_ylabel("milliseconds", color=FAINT, fontsize=9)
    ax.grid(color=GRID, linewidth=0.8)
    ax.set_axisbelow(True)


def _short(text: str, most: int = 100) -> str:
    return text if len(text) <= most else text[: most - 1].rsplit(" ", 1)[0] + " …"


# Timelines

PASSES_A_ROW = 24
MOST_ROWS = 8
UPPER, LOWER, HEIGHT = 1.15, 0.0, 0.8  # the target's lane, the draft's, and how high each is


def plot_timeline(timeline: Timeline, path: Path) -> None:
    """Both lanes over time, in as many rows as it takes to tell the passes apart."""
    passes = len(timeline.of(Lane.TARGET, Did.PASS))
    rows = min(MOST_ROWS, max(1, -(-passes // PASSES_A_ROW)))
    length = (timeline.end - timeline.begin) / rows or 1e-3
    figure, _ = _figure(13, 1.0 + 1.45 * rows, columns=0)
    for row in range(rows):
        begin = timeline.begin + row * length
        ax = figure.add_subplot(rows, 1, row + 1)
        _lanes(ax, timeline.between(begin, begin + length), begin, length)
        if row == rows - 1:
            ax.set_xlabel("milliseconds", color=FAINT, fontsize=9)
    figure.suptitle(timeline.title or "timeline of an answer", fontsize=11, color=INK, x=0.01, ha="left")
    _legend(figure)
    _save(figure, path)


def _lanes(ax: Axes, timeline: Timeline, begin: float, length: float) -> None:
    ax.spines[["top", "right", "left"]].set_visible(False)
    ax.spines["bottom"].set_color(FAINT)
    ax.tick_params(colors=FAINT, labelsize=8)
    ax.set_xlim(1e3 * begin, 1e3 * (begin + length))
    ax.set_ylim(LOWER - 0.1, UPPER + HEIGHT + 0.45)
    ax.set_yticks([UPPER + HEIGHT / 2, LOWER + HEIGHT / 2], ["target", "draft"])
    ax.tick_params(axis="y", length=0, labelcolor=INK, labelsize=9)
    for event in timeline.of(Lane.TARGET):
        _target_event(ax, event, length)
    widest = max((step.args.get("leaves", 1) for step in timeline.of(Lane.DRAFT, Did.STEP)), default=1)
    for event in timeline.of(Lane.DRAFT):
        share = event.args.get("leaves", 1) / widest if event.name is Did.STEP else 1.0
        colour = DRAFT if event.name is Did.STEP else READING
        _bar(ax, event, LOWER, HEIGHT * (0.35 + 0.65 * share), facecolor=colour, edgecolor="white", linewidth=0.5)


def _target_event(ax: Axes, event: Event, length: float) -> None:
    if event.name is Did.COMMIT:
        ax.plot([1e3 * event.begin] * 2, [LOWER + HEIGHT + 0.05, UPPER], color=INK, linewidth=0.8, solid_capstyle="butt")
    elif event.name is Did.WAIT:
        _bar(ax, event, UPPER, HEIGHT, facecolor="white", edgecolor=WAITING, hatch="/////", linewidth=0.6)
    elif event.name is Did.PASS:
        _bar(ax, event, UPPER, HEIGHT, facecolor=TARGET[0], edgecolor="white", linewidth=0.8)
        if event.seconds > length / 60:  # else there is no room to write
            middle = 1e3 * (event.begin + event.end) / 2
            ax.text(middle, UPPER + HEIGHT / 2, str(event.args["nodes"]), ha="center", va="center", fontsize=7, color="white")
            ax.text(middle, UPPER + HEIGHT + 0.08, f"+{event.args['gained']}", ha="center", va="bottom", fontsize=8, color=INK)
    else:
        _bar(ax, event, UPPER, HEIGHT, facecolor=READING, edgecolor="white", linewidth=0.8)


def _bar(ax: Axes, event: Event, bottom: float, height: float, **look: Any) -> None:
    ax.broken_barh([(1e3 * event.begin, 1e3 * event.seconds)], (bottom, height), **look)


def _legend(figure: Figure) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Any] = [
        Patch(facecolor=TARGET[0], label="pass: guesses verified, +tokens gained"),
        Patch(facecolor="white", edgecolor=WAITING, hatch="/////", label="wait for guesses"),
        Patch(facecolor=DRAFT, label="draft step, higher: more leaves"),
        Patch(facecolor=READING, label="reading the prompt"),
        Line2D([], [], color=INK, linewidth=0.8, label="commit"),
    ]
    figure.legend(handles=handles, loc="outside upper right", ncols=5, frameon=False, fontsize=8, labelcolor=FAINT)


# Agreement


def plot_agreement(drafts: Mapping[str, Mapping[str, Mapping[str, float]]], path: Path) -> None:
    """By task, a bar for each draft: how often its first guess is right, and in a fainter shade one of its first four."""
    figure, (ax,) = _figure(11, 4.2)
    tasks = list(dict.fromkeys(task for by_task in drafts.values() for task in by_task))
    width = 0.8 / max(1, len(drafts))
    for i, (colour, (name, by_task)) in enumerate(zip((TARGET[0], DRAFT, READING, WAITING, INK) * 4, drafts.items(), strict=False)):
        places = [place - 0.4 + width * (i + 0.5) for place in range(len(tasks))]
        first, four = ([100 * by_task.get(task, {}).get(top, 0.0) for task in tasks] for top in ("top1", "top4"))
        ax.bar(places, four, width * 0.92, color=colour, alpha=0.35)
        ax.bar(places, first, width * 0.92, color=colour, label=name)
        for place, share in zip(places, first, strict=True):
            ax.annotate(f"{share:.0f}", (place, share), (0, 2), textcoords="offset points", ha="center", fontsize=8, color=INK)
    ax.set_xticks(range(len(tasks)), tasks)
    ax.set_ylim(0, 100)
    ax.set_ylabel("% of tokens", color=FAINT, fontsize=9)
    ax.grid(axis="y", color=GRID, linewidth=0.8)
    ax.set_axisbelow(True)
    figure.legend(frameon=False, fontsize=9, labelcolor=INK, loc="outside lower left", ncols=4)
    ax.set_title(
        "The target's next token is the draft's first guess (faint: among its first four)", fontsize=11, color=INK, loc="left"
    )
    _save(figure, path)
