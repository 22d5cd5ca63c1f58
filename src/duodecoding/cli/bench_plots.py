"""PNG pictures of a benchmark: speed-ups, acceptance by depth, where the time goes, and the lanes of one answer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from duodecoding.bench.report import NAMES
from duodecoding.cli.plots import DRAFT, FAINT, GRID, INK, READING, TARGET, WAITING, _figure, _save, plot_timeline
from duodecoding.trace import from_chrome
from duodecoding.types import Mode

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TRACE = "trace.json"  # of the answer whose lanes are drawn
COLOURS = {
    "off": READING, "chain": TARGET[2], "serial": TARGET[1], "lockstep": TARGET[0], "duo": DRAFT,
    "transformers": "#c9d5cb", "transformers-compiled": "#8fb49a", "transformers-assisted": "#4f8a63",
    "transformers-lookup": "#2f5d41", "llama-server": "#8a7aa8",
}  # fmt: skip
MARKERS = {"chain": "s", "serial": "^", "lockstep": "D", "duo": "o"}
SOURCES = {"model": DRAFT, "lookup": "#4f8a63", "recycling": "#8a7aa8"}
PARTS = {"target pass": TARGET[0], "drafting in turn": DRAFT, "waiting for guesses": WAITING, "our own work": READING}


def draw(folder: Path, found: Mapping[str, Any]) -> list[str]:
    """All pictures that the results are enough for; their names. None without matplotlib."""
    if find_spec("matplotlib") is None:
        return []
    drawn = []
    if len(_shown(found)) > 0:
        plot_speedup(found, folder / "speedup.png")
        drawn.append("speedup.png")
    if (folder / TRACE).exists():
        plot_timeline(from_chrome(json.loads((folder / TRACE).read_text()), where=TRACE).from_zero(), folder / "lanes.png")
        drawn.append("lanes.png")
    guessing = {name: mode for name, mode in found["modes"].items() if mode.get("acceptance_by_depth")}
    if guessing:
        plot_acceptance(guessing, folder / "acceptance.png")
        drawn.append("acceptance.png")
    inside = {name: mode for name, mode in found["modes"].items() if "round_seconds" in mode}
    if inside:
        plot_round(inside, folder / "round.png")
        drawn.append("round.png")
    return drawn


def _shown(found: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Speed-ups of everybody but the baseline, the slowest peers first and our own modes last, duo at the very end."""
    peers = sorted(found["peers"].items(), key=lambda pair: pair[1]["speedup"].get("mean", {"value": 0})["value"])
    rows = [*peers, *found["modes"].items()]
    return {name: row["speedup"] for name, row in rows if name != Mode.OFF and row["speedup"]}


def plot_speedup(found: Mapping[str, Any], path: Path) -> None:
    """A group of bars for each task and a wider one for their mean, which stands apart."""
    rows = _shown(found)
    tasks = [*dict.fromkeys(task for row in rows.values() for task in row if task != "mean"), "mean"]
    figure, (ax,) = _figure(max(7.0, 2.5 + 1.35 * len(tasks)), 4.4)
    places = {task: place + (0.75 if task == "mean" else 0.0) for place, task in enumerate(tasks)}
    for i, (name, row) in enumerate(rows.items()):
        for task in row:
            width = (1.9 if task == "mean" else 0.84) / len(rows)
            x = places[task] + width * (i + 0.5 - len(rows) / 2)
            _bar(ax, x, width * 0.92, row[task], COLOURS.get(name, FAINT), label=name if task == "mean" else None)
            if name == Mode.DUO or task == "mean":
                top = row[task]["high"] or row[task]["value"]
                ax.text(x, top + 0.03, f"{row[task]['value']:.2f}", ha="center", va="bottom", fontsize=8, color=INK)
    ax.axhline(1.0, color=INK, linewidth=1, linestyle=(0, (4, 3)))
    ax.text(1.005, 1.0, "off", fontsize=9, color=INK, va="center", ha="left", transform=ax.get_yaxis_transform())
    ax.set_xticks(list(places.values()), [NAMES.get(task, task).strip("*") for task in tasks])
    ax.tick_params(axis="x", length=0, labelcolor=INK, labelsize=10)
    ax.set_xlim(-0.55, places["mean"] + 1.05)
    _frame(ax, "Speed-up over plain decoding, 95 % intervals", "times as many tokens per second")
    figure.legend(loc="outside lower center", ncols=min(6, len(rows)), frameon=False, fontsize=9, labelcolor=INK)
    _save(figure, path)


def _bar(ax: Axes, x: float, width: float, estimate: Mapping[str, float | None], colour: str, label: str | None) -> None:
    value, low, high = estimate["value"] or 0.0, estimate["low"], estimate["high"]
    ax.bar(x, value, width, color=colour, label=label)
    if low is not None and high is not None:
        ax.errorbar(x, value, [[value - low], [high - value]], color=INK, linewidth=1, capsize=min(2.5, 20 * width))


def _frame(ax: Axes, title: str, unit: str) -> None:
    ax.set_title(title, fontsize=11, color=INK, loc="left")
    ax.set_ylabel(unit, color=FAINT, fontsize=9)
    ax.set_ylim(bottom=0)
    ax.grid(axis="y", color=GRID, linewidth=0.8)
    ax.set_axisbelow(True)


def plot_acceptance(modes: Mapping[str, Any], path: Path) -> None:
    """Left: in how many rounds at least d guesses were right. Right: who made those of duo."""
    deep = modes.get(Mode.DUO) or list(modes.values())[-1]
    figure, (left, right) = _figure(11, 4.2, columns=2)
    for name, mode in modes.items():
        shares = [100 * share for share in mode["acceptance_by_depth"]]
        look: dict[str, Any] = {
            "color": COLOURS.get(name, FAINT),
            "marker": MARKERS.get(name, "."),
            "linewidth": 2,
            "markersize": 5,
        }
        left.plot(range(1, len(shares) + 1), shares, label=name, **look)
    bottom = [0.0] * len(deep["acceptance_by_depth"])
    for source, shares in deep["acceptance_by_depth_and_source"].items():
        heights = [100 * share for share in shares]
        right.bar(range(1, len(shares) + 1), heights, 0.8, bottom, color=SOURCES.get(source, FAINT), label=source)
        bottom = [below + height for below, height in zip(bottom, heights, strict=True)]
    for ax, title in ((left, "Rounds in which at least d guesses were right"), (right, "Who guessed them, in duo")):
        _frame(ax, title, "% of rounds")
        ax.set_xlabel("d, guesses below the root", color=FAINT, fontsize=9)
        ax.set_xticks(range(1, 1 + max(len(mode["acceptance_by_depth"]) for mode in modes.values())))
        ax.legend(frameon=False, fontsize=9, labelcolor=INK)
    top = max(left.get_ylim()[1], right.get_ylim()[1])
    left.set_ylim(0, top)
    right.set_ylim(0, top)
    _save(figure, path)


def plot_round(modes: Mapping[str, Any], path: Path) -> None:
    """What the critical path of a round is made of; on the right the same for a token, which is what counts."""
    figure, axes = _figure(11, 1.5 + 0.42 * len(modes), columns=2)
    names = list(modes)[::-1]
    for ax, title in zip(axes, ("A round", "A token"), strict=True):
        left = [0.0] * len(names)
        shares = [1.0 if title == "A round" else modes[name]["tokens_per_round"] for name in names]
        for part, colour in PARTS.items():
            widths = [1e3 * modes[name]["round_seconds"][part] / share for name, share in zip(names, shares, strict=True)]
            ax.barh(names, widths, 0.62, left, color=colour, label=part if title == "A round" else None)
            left = [before + width for before, width in zip(left, widths, strict=True)]
        for place, total in enumerate(left):
            ax.text(total, place, f" {total:.2f}", va="center", fontsize=8.5, color=INK)
        ax.set_title(f"{title}, after the first", fontsize=11, color=INK, loc="left")
        ax.set_xlabel("milliseconds", color=FAINT, fontsize=9)
        ax.tick_params(axis="y", length=0, labelcolor=INK, labelsize=10)
        ax.set_xlim(0, 1.12 * max(left))
        ax.grid(axis="x", color=GRID, linewidth=0.8)
        ax.set_axisbelow(True)
    figure.legend(loc="outside lower center", ncols=len(PARTS), frameon=False, fontsize=9, labelcolor=INK)
    _save(figure, path)
