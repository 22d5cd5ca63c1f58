"""What is left of a benchmark: `results.json` with every answer, and `report.md` with the tables. Pictures are drawn elsewhere."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from duodecoding.bench.journal import Journal
from duodecoding.bench.metrics import LONG_PROMPT, Answer, compare, speedup, summary
from duodecoding.types import Mode
from duodecoding.virtual import FREE

PICTURES = {
    "speedup.png": "Speed-up over `off` by task, with 95 % intervals",
    "lanes.png": "One answer of `duo`, the one with the median number of tokens per round: what target and draft did",
    "acceptance.png": "How deep guesses are right",
    "round.png": "Where a round's time goes",
}
NAMES = {
    "mt_bench": "MT-bench", "translation": "transl.", "summarization": "summ.", "qa": "QA", "math_reasoning": "math", "rag": "RAG",
    "humaneval": "code", "mean": "**mean**",
}  # fmt: skip


def results(journal: Journal, about: Mapping[str, Any]) -> dict[str, Any]:
    """Everything that the journal says, as one record. `about`: the machine and the commit."""
    answers: dict[str, list[Answer]] = {}
    for answer in journal.answers:
        answers.setdefault(answer.who, []).append(answer)
    plain, duo = answers.get(Mode.OFF, []), answers.get(Mode.DUO, [])
    explained = {(note["who"], note["task"], note["id"], note["turn"], note["repeat"]): note for note in journal.of("gap")}
    differences = [
        explained.get((d.who, *d.place), asdict(d)) for who, found in answers.items() for d in _compared(who, found, plain)[1]
    ]
    memory = journal.of("memory")
    return {
        "benchmark": "bench",
        "when": time.strftime("%Y-%m-%d %H:%M:%S"),
        **about,
        "commits": list(dict.fromkeys(note["commit"] for note in journal.of("session"))),
        "settings": journal.settings,
        "modes": {who: summary(found, plain) for who, found in answers.items() if who in list(Mode)},
        "peers": {who: summary(found, plain) for who, found in answers.items() if who not in list(Mode)},
        "duo_over": {who: _estimates(speedup(duo, found)) for who, found in answers.items() if who != Mode.DUO and duo},
        "equality": {who: _equality(who, found, plain) for who, found in answers.items() if who != Mode.OFF},
        "differences": differences,
        "skipped": {note["peer"]: note["why"] for note in journal.of("skipped")},
        "tuned": {note["mode"]: note for note in journal.of("tuned")},
        "virtual": _virtual(journal, answers),
        "memory": {name: max(note[name] for note in memory) for name in memory[0]} if memory else {},
        "profile": next(iter(journal.of("profile")), None),
        "answers": [asdict(answer) for answer in journal.answers],
    }


def _estimates(found: Mapping[str, Any]) -> dict[str, Any]:
    return {task: estimate._asdict() for task, estimate in found.items()}


def _compared(who: str, found: Sequence[Answer], plain: Sequence[Answer]) -> tuple[int, list[Any]]:
    return (0, []) if who == Mode.OFF else compare(found, plain)


def _equality(who: str, found: Sequence[Answer], plain: Sequence[Answer]) -> dict[str, int]:
    compared, differ = _compared(who, found, plain)
    return {"compared": compared, "equal": compared - len(differ)}


def _virtual(journal: Journal, answers: Mapping[str, Sequence[Answer]]) -> dict[str, Any]:
    """Virtual time beside what was measured on the same questions, and each mode's share of the limit; or why there is none."""
    notes = journal.of("virtual")
    if not notes:
        return {"left_out": "nobody asked for it, or the run did not get so far"}
    if "speedup" not in notes[-1]:
        return notes[-1]
    asked = set(notes[-1]["questions"])
    firsts = {who: [a for a in found if a.turn == 0 and f"{a.task} {a.id}" in asked] for who, found in answers.items()}
    predicted = notes[-1]["speedup"]
    measured = {who: speedup(firsts[who], firsts[Mode.OFF])["mean"].value for who in predicted if firsts.get(who)}
    return {
        "questions": sorted(asked),
        "predicted": predicted,
        "measured": measured,
        "measured_over_predicted": {who: value / predicted[who]["mean"] for who, value in measured.items()},
        "share_of_limit": {
            who: value / predicted[FREE]["mean"] for who, value in measured.items() if FREE in predicted and who != Mode.OFF
        },
    }


def write(folder: Path, found: Mapping[str, Any]) -> None:
    (folder / "results.json").write_text(json.dumps(found) + "\n", encoding="utf-8")
    (folder / "report.md").write_text(markdown(found, [name for name in PICTURES if (folder / name).exists()]), encoding="utf-8")


# Markdown


def markdown(found: Mapping[str, Any], pictures: Sequence[str]) -> str:
    parts = [_head(found), _speeds(found), _over(found), _inside(found), _equal(found), _settings(found), _against_virtual(found)]
    drawn = [f"![{PICTURES[name]}]({name})\n\n*{PICTURES[name]}.*" for name in pictures]
    return "\n\n".join(part for part in [parts[0], *drawn[:1], *parts[1:], *drawn[1:]] if part) + "\n"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _head(found: Mapping[str, Any]) -> str:
    settings, sampling = found["settings"], found["settings"]["sampling"]
    machine = ", ".join(
        f"{name} {value}" for name, value in found.get("machine", {}).items() if value and isinstance(value, str | int)
    )
    asked = sorted({f"{answer['task']} {answer['id']}" for answer in found["answers"]})
    draft = (settings.get("draft") or {}).get("name", settings["draft_name"])
    shape = f" in a {settings['shape'].upper()} shape" if "shape" in settings else ""
    how = "greedy" if sampling["temperature"] == 0 else f"temperature {sampling['temperature']}"
    memory = ", ".join(f"{name.removesuffix('_bytes')} {size / 1e9:.2f} GB" for name, size in found["memory"].items() if size)
    lines = [
        f"Target {settings['target']['name']}{shape}, draft {draft}; {_questions(asked)}, {how}, at most "
        f"{sampling['max_tokens']} tokens, {settings['repeats']} session{'s' if settings['repeats'] > 1 else ''}.",
        f"Commit {', '.join(found['commits']) or 'unknown'}, {found['when']}. {machine}.",
        f"Peak memory: {memory}." if memory else "",
    ]
    return "# Benchmark\n\n" + "\n".join(line for line in lines if line)


def _questions(asked: Sequence[str]) -> str:
    return f"{len(asked)} question{'s' if len(asked) != 1 else ''}"


def _everybody(found: Mapping[str, Any]) -> dict[str, Any]:
    return {**found["modes"], **found["peers"]}


def _cell(estimate: Mapping[str, float | None]) -> str:
    if estimate["low"] is None:
        return f"{estimate['value']:.2f}"
    return f"{estimate['value']:.2f} ({estimate['low']:.2f}–{estimate['high']:.2f})"


def _estimate_table(title: str, rows: Mapping[str, Mapping[str, Any]]) -> str:
    rows = {name: row for name, row in rows.items() if row}
    if not rows:
        return ""
    tasks = [*dict.fromkeys(task for row in rows.values() for task in row if task != "mean"), "mean"]
    head = [title, *(NAMES.get(task, task) for task in tasks)]
    return _table(head, ([f"`{name}`", *(_cell(row[task]) if task in row else "" for task in tasks)] for name, row in rows.items()))


def _speeds(found: Mapping[str, Any]) -> str:
    table = _estimate_table("over `off`", {name: row["speedup"] for name, row in _everybody(found).items() if name != Mode.OFF})
    explained = (
        "Tokens per second as Spec-Bench counts them (prompt included, mean over questions) over those of `off`, our plain "
        "decoding; in brackets 95 % of 1,000 bootstrap resamples of the questions. A peer counts on the questions it was asked."
    )
    return f"## Speed-up\n\n{explained}\n\n{table}"


def _over(found: Mapping[str, Any]) -> str:
    table = _estimate_table("`duo` over", {name: row for name, row in found["duo_over"].items() if name != Mode.OFF})
    return f"## `duo` over the others\n\n{table}" if table else ""


def _inside(found: Mapping[str, Any]) -> str:
    head = ["", "tokens/s", "decoding alone", "tokens/round", "first token", f"first token, prompts of {LONG_PROMPT} or more"]
    head += ["target idle", "draft idle", "drafting hidden", "guesses right", "of the limit"]
    shares = found["virtual"].get("share_of_limit", {})
    rows = []
    for name, row in _everybody(found).items():
        rows.append(
            [f"`{name}`", f"{row['tokens_per_second']['mean']:.1f}", f"{row['decode_tokens_per_second']['mean']:.1f}"]
            + [_number(row.get("tokens_per_round")), _first(row["ttft_seconds"]), _first(row["ttft_seconds_long_prompts"])]
            + [_share(row.get(share)) for share in ("target_idle", "draft_idle", "hidden_draft_share", "verified_accepted")]
            + [_share(shares.get(name))]
        )
    return "## Rates and shares\n\n" + _table(head, rows)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"


def _first(value: Mapping[str, float] | None) -> str:
    return "" if value is None else f"{value['seconds'] * 1e3:.1f} ms ({value['ratio']:.2f} ×)"


def _equal(found: Mapping[str, Any]) -> str:
    rows = [[f"`{name}`", str(e["compared"]), str(e["equal"])] for name, e in found["equality"].items()]
    text = "## The same answer?\n\n" + _table(["", "answers compared with `off`", "equal"], rows)
    differ = [d for d in found["differences"] if d["who"] in list(Mode)]
    if differ:
        head = ["mode", "question", "turn", "token", "`off` said", "it said", "gap of the two best logits", "between these two"]
        text += "\n\n" + _table(head, (_difference(d) for d in differ))
    if found["peers"]:
        greedy = not found["settings"]["sampling"]["temperature"]
        why = "round in other places" if greedy else "draw other random numbers"
        text += f"\n\nPeers {why}, so theirs may be other answers without being worse."
    return text


def _difference(d: Mapping[str, Any]) -> list[str]:
    between = {None: "", True: "yes", False: "no"}[d["two_best"]]
    apart = "not computed" if d["gap"] is None else f"{d['gap']:.4f}"
    place = f"{d['task']} {d['id']}"
    return [f"`{d['who']}`", place, str(d["turn"] + 1), str(d["at"] + 1), str(d["expected"]), str(d["found"]), apart, between]


def _settings(found: Mapping[str, Any]) -> str:
    lines = [_tuned(mode, note) for mode, note in found["tuned"].items()]
    lines += [f"- `{mode}`: {_words(given)}, as given" for mode, given in found["settings"]["chosen"].items()]
    lines += [f"- `{peer}` did not take part: {why}" for peer, why in found["skipped"].items()]
    return "## Settings\n\n" + "\n".join(lines) if lines else ""


def _tuned(mode: str, note: Mapping[str, Any]) -> str:
    speeds = _words({name: round(speed, 1) for name, speed in note["tokens_per_second"].items()})
    asked = f"tokens/s on {_questions(note['questions'])} not measured"
    return f"- `{mode}` at its best: {_words(note['chosen'])} ({asked}: {speeds})"


def _words(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in values.items())


def _against_virtual(found: Mapping[str, Any]) -> str:
    virtual = found["virtual"]
    if "left_out" in virtual:
        return f"## Virtual time\n\nLeft out: {virtual['left_out']}."
    rows = [
        [
            f"`{name}`",
            f"{value:.2f}",
            f"{virtual['predicted'][name]['mean']:.2f}",
            f"{value / virtual['predicted'][name]['mean']:.2f}",
        ]
        for name, value in virtual["measured"].items()
    ]
    limit = (
        f"The limit, the same draft at no cost: {virtual['predicted'][FREE]['mean']:.2f}." if FREE in virtual["predicted"] else ""
    )
    asked = f"First turns of {_questions(virtual['questions'])}, with the costs measured at the start of this run."
    return f"## Virtual time\n\n{asked} {limit}\n\n" + _table(["", "measured", "predicted", "ratio"], rows)
