"""Draws what `h200_verify.py` measured, and makes the shipped profiles of it.

    python benchmarks/plot_h200.py              # docs/images/h200_verify.png
    python benchmarks/plot_h200.py --profiles   # also src/duodecoding/profiles/h200-*.json; their draft's numbers are kept

A profile takes whole rounds, from one verdict to the next, since an engine pays for those; the picture shows the graphs alone and
the floor they are held against: the weights' bytes over the bandwidth of a copy.
"""

from __future__ import annotations

import argparse
import json
import statistics
from itertools import pairwise
from pathlib import Path
from typing import Any

from common import RESULTS

from duodecoding.cli.plots import DRAFT, FAINT, GRID, INK, READING, TARGET, _figure, _label, _save
from duodecoding.costs import CostCurve, fit, from_record, stepped, to_record

ROOT = Path(__file__).parent.parent
PICTURE = ROOT / "docs" / "images" / "h200_verify.png"
BENCH = RESULTS / "h200_bench"
PROFILES = ROOT / "src" / "duodecoding" / "profiles"
PROMPT_CLASSES = (64, 128, 256, 512, 1024, 2048)  # tokens: prompts up to these are taken together; the runs padded them so
SHAPES = {"7b": "7B shape", "13b": "13B shape", "32b": "32B shape"}
COLOURS = dict(zip((512, 1024, 2048, 4096), ("#163f70", *TARGET), strict=True))  # by context


def newest(folder: Path = RESULTS) -> dict[str, dict[str, Any]]:
    """The latest record of each shape, measured with our own kernels."""
    found: dict[str, dict[str, Any]] = {}
    for file in folder.glob("h200_verify*.json"):
        record = json.loads(file.read_text())
        shape = record["settings"]["shape"]
        if record["settings"]["kernels"] == "own" and record["when"] >= found.get(shape, {"when": ""})["when"]:
            found[shape] = record | {"file": file.name}
    return {shape: found[shape] for shape in SHAPES if shape in found}


def cells(results: dict[str, Any]) -> dict[str, Any]:
    """All that was measured, what an earlier run alone did included."""
    found: dict[str, Any] = results.get("earlier", {}).get("verify", {}) | results["verify"]
    return found


def curves(results: dict[str, Any], time: str) -> dict[int, CostCurve]:
    """context -> seconds over rows. `time`: "ms" of the graph alone, "round_ms" of a whole round."""
    samples: dict[int, list[tuple[int, float]]] = {}
    for name, cell in cells(results).items():
        rows, _, context = name.partition("@")
        if rows.isdecimal():  # chains; a bush of as many rows has an entry of its own
            samples.setdefault(int(context), []).append((int(rows), cell[time] / 1e3))
    return {context: fit(samples[context]) for context in sorted(samples)}


# The picture


def plot(records: dict[str, dict[str, Any]], path: Path) -> None:
    figure, axes = _figure(3.6 * (len(records) + 1), 4.0, columns=len(records) + 1)
    for ax, (shape, record) in zip(axes, records.items(), strict=False):
        results = record["results"]
        measured = curves(results, "ms")
        for context, curve in measured.items():
            colour, rows = COLOURS.get(context, FAINT), list(curve.points)
            old = [n for n in rows if f"{n}@{context}" not in results["verify"]]
            line = "--" if len(old) == len(rows) else "-"
            times = [1e3 * s for s in curve.points.values()]
            ax.plot(rows, times, "o", linestyle=line, color=colour, markersize=4, label=f"{context:,}")
            ax.plot(old, [times[rows.index(n)] for n in old], "o", color=colour, markersize=4, markerfacecolor="white")
        ax.axhline(results["floor_ms"], linestyle="--", color=DRAFT, linewidth=1.2)
        ax.annotate(
            f"floor {results['floor_ms']:.2f}",
            (1, results["floor_ms"]),
            (0, -11),
            textcoords="offset points",
            fontsize=8,
            color=DRAFT,
        )
        _label(ax, f"{SHAPES[shape]}: one pass", "rows: the root and its guesses")
        ax.legend(
            title="context (hollow: an earlier run)", frameon=False, fontsize=8, title_fontsize=8, loc="upper left", labelcolor=INK
        )
        ax.set_xticks(list(next(iter(measured.values())).points))
        ax.set_ylim(0, 1.3e3 * max(max(curve.points.values()) for curve in measured.values()))
    _bars(axes[-1], records)
    gpu = next(iter(records.values()))["results"]["gpu"]
    figure.suptitle(
        f"Verifying guesses on an {gpu['gpu']}, bfloat16, torch {gpu['torch']}", fontsize=11, color=INK, x=0.01, ha="left"
    )
    _save(figure, path)


def _bars(ax: Any, records: dict[str, dict[str, Any]]) -> None:
    """One token: the floor, this backend, and transformers as it comes."""
    rows: list[tuple[str, float, str]] = []
    for shape, record in records.items():
        results = record["results"]
        context, curve = next(iter(curves(results, "round_ms").items()))
        eager = results.get("eager_ms", {}).get(str(context))
        rows += [(f"{shape} floor", results["floor_ms"], DRAFT), (f"{shape} ours", 1e3 * curve(1), TARGET[0])]
        rows += [(f"{shape} eager", eager, READING)] if eager else []
    places = range(len(rows))
    ax.barh(places, [value for _, value, _ in rows], color=[colour for _, _, colour in rows], height=0.7)
    for place, (_, value, _) in zip(places, rows, strict=True):
        ax.annotate(f"{value:.3g}", (value, place), (4, 0), textcoords="offset points", va="center", fontsize=8, color=INK)
    ax.set_yticks(places, [name for name, _, _ in rows])
    ax.set_ylim(len(rows) - 0.4, -0.6)
    ax.set_xlim(0, 1.18 * max(value for _, value, _ in rows))
    ax.set_title("One token, whole round", fontsize=11, color=INK, loc="left")
    ax.set_xlabel("milliseconds", color=FAINT, fontsize=9)
    ax.grid(axis="x", color=GRID, linewidth=0.8)
    ax.set_axisbelow(True)


# Profiles


def steps(results: dict[str, Any]) -> dict[str, dict[str, float]]:
    """context -> seconds over rows, of a pass with its sampling. Passes are padded to the sizes that were measured; the largest
    usual one is timed with a tree as answers have them. Contexts that only an earlier run measured are left out: slower kernels
    between faster ones would have passes grow cheaper with the context."""
    found: dict[str, dict[str, float]] = {}
    known = cells(results)
    new = {name.partition("@")[2] for name in results["verify"]}
    for context, curve in curves(results, "ms").items():
        if str(context) not in new:
            continue
        used = {n: known.get(f"{n} bush@{context}") or known[f"{n}@{context}"] for n in curve.points}
        passes = CostCurve({n: round((cell["ms"] + cell["sampling_ms"]) / 1e3, 6) for n, cell in used.items()})
        found[str(context)] = {str(n): seconds for n, seconds in stepped(passes, list(used)).points.items()}
    return found


def first_tokens(answers: list[dict[str, Any]]) -> dict[str, float]:
    """Tokens of a prompt -> seconds to the first token of plain decoding: the median of those of a class, at their mean length."""
    found: dict[str, float] = {}
    for low, high in pairwise((0, *PROMPT_CLASSES)):
        own = [a for a in answers if a["who"] == "off" and not a["reused_tokens"] and low < a["prompt_tokens"] <= high]
        if own:
            length = round(statistics.mean(a["prompt_tokens"] for a in own))
            found[str(length)] = round(statistics.median(a["ttft_seconds"] for a in own), 6)
    return found


def profile(shape: str, record: dict[str, Any], shipped: dict[str, Any]) -> dict[str, Any]:
    """A shipped profile with the target's side measured anew."""
    results, settings = record["results"], record["settings"]
    drafted = shipped["about"].partition("draft step:")[2]
    about = (
        f"verify: measured on an {results['gpu']['gpu']}, {SHAPES[shape]} in bfloat16, compiled, CUDA graphs padded to the sizes "
        f"that are steps here, sampling included (benchmarks/results/{record['file']}); draft step:{drafted}"
    )
    rest = {name: value for name, value in shipped["settings"].items() if name != "note"}
    made = shipped | {
        "about": about,
        "measured": True,
        "verify": steps(results),
        "settings": rest | {"kernels": settings["kernels"]},
    }
    if "first_token_4096_ms" in results:
        made["target_prompt"] = round(results["first_token_4096_ms"] / 4096 / 1e3, 9)
    return to_record(from_record(made, where=record["file"]))


def with_prompts(shape: str, shipped: dict[str, Any]) -> dict[str, Any]:
    """A profile with the first tokens of the benchmark's own run, and one of a long prompt."""
    asked = BENCH / f"{shape}-greedy" / "results.json"
    if not asked.exists():
        return shipped
    long = {"4096": round(4096 * shipped["target_prompt"], 6)}
    return shipped | {"target_prompts": first_tokens(json.loads(asked.read_text())["answers"]) | long}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--profiles", action="store_true", help="also write the shipped profiles")
    options = parser.parse_args()
    records = newest()
    PICTURE.parent.mkdir(exist_ok=True)
    plot(records, PICTURE)
    print(f"drawn: {PICTURE.relative_to(ROOT)} ({', '.join(records)})")
    for shape in SHAPES if options.profiles else ():
        path = PROFILES / f"h200-{shape}.json"
        shipped = json.loads(path.read_text())
        made = profile(shape, records[shape], shipped) if shape in records else shipped
        path.write_text(json.dumps(with_prompts(shape, made), indent=1) + "\n")
        print(f"written: {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
