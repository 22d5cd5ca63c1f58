"""Draws the mean speed-up of every mode over the three shapes that `h200.py` measured: docs/images/h200_shapes.png.

python benchmarks/plot_shapes.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from common import RESULTS
from h200 import RIVALS, SHAPES, name_of

from duodecoding.cli.bench_plots import COLOURS
from duodecoding.cli.plots import FAINT, GRID, INK, _figure, _save
from duodecoding.types import Mode

PICTURE = Path(__file__).parent.parent / "docs" / "images" / "h200_shapes.png"
TITLES = {0.0: "Greedy", 0.8: "Temperature 0.8"}
MODES = (*RIVALS, Mode.DUO)
WIDTH = 0.2  # of a bar; groups are 1 apart


def found(shape: str, temperature: float) -> dict[str, Any]:
    modes: dict[str, Any] = json.loads((RESULTS / "h200_bench" / name_of(shape, temperature) / "results.json").read_text())["modes"]
    return {mode: modes[mode]["speedup"]["mean"] for mode in MODES if mode in modes}


def panel(ax: Any, temperature: float) -> None:
    rows = {shape: found(shape, temperature) for shape in SHAPES}
    for i, mode in enumerate(MODES):
        asked = [(group, row[mode]) for group, row in enumerate(rows.values()) if mode in row]  # not all modes everywhere
        places = [group + (i - (len(MODES) - 1) / 2) * WIDTH for group, _ in asked]
        means = [mean for _, mean in asked]
        values = [mean["value"] for mean in means]
        errors = [[mean["value"] - mean["low"] for mean in means], [mean["high"] - mean["value"] for mean in means]]
        ax.bar(places, values, width=0.92 * WIDTH, color=COLOURS[mode], label=mode)
        ax.errorbar(places, values, yerr=errors, fmt="none", ecolor=FAINT, elinewidth=1, capsize=2)
        for place, mean in zip(places, means, strict=True):
            bold = "bold" if mode is Mode.DUO else "normal"
            ax.annotate(
                f"{mean['value']:.2f}", (place, mean["high"]), (0, 3), textcoords="offset points", ha="center", fontsize=8,
                color=INK, fontweight=bold,
            )  # fmt: skip
    ax.axhline(1, color=INK, linewidth=1)
    ax.set_xticks(range(len(rows)), [f"{shape.upper()} shape" for shape in rows])
    ax.set_title(TITLES[temperature], fontsize=11, color=INK, loc="left")
    ax.grid(axis="y", color=GRID, linewidth=0.8)
    ax.set_axisbelow(True)


def main() -> None:
    figure, axes = _figure(10.5, 4.0, columns=2)
    for ax, temperature in zip(axes, TITLES, strict=True):
        panel(ax, temperature)
    top = max(ax.get_ylim()[1] for ax in axes)
    for ax in axes:
        ax.set_ylim(0, 1.04 * top)
    axes[0].set_ylabel("times as fast as compiled plain decoding", color=FAINT, fontsize=9)
    axes[1].legend(frameon=False, fontsize=9, ncols=len(MODES), loc="upper left", labelcolor=INK)
    _save(figure, PICTURE)
    print(f"drawn: {PICTURE.relative_to(PICTURE.parents[2])}")


if __name__ == "__main__":
    main()
