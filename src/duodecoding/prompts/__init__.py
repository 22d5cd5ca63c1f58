"""Prompts to measure with: the package's own, of the seven task kinds, or a user's folder in the format of Spec-Bench.

One JSON object a line: `question_id`, `category` (the task; the file's name where it is missing) and `turns`, a list of texts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from duodecoding.errors import UsageError

TASKS = ("mt_bench", "translation", "summarization", "qa", "math_reasoning", "rag", "humaneval")
OWN = Path(__file__).parent
FORMAT = 'Each line is one object such as {"question_id": 1, "category": "qa", "turns": ["..."]}.'


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a user says, turn by turn. Most prompts have one turn."""

    id: str
    task: str
    turns: tuple[str, ...]


def load(task: str | None = None, folder: Path | None = None) -> dict[str, list[Prompt]]:
    """Prompts by task: all of them or one task, from `folder` or the package."""
    files = [OWN / f"{name}.jsonl" for name in TASKS] if folder is None else _files(folder)
    found: dict[str, list[Prompt]] = {}
    seen: set[tuple[str, str]] = set()
    for file in files:
        for where, prompt in _read(file):
            if (prompt.task, prompt.id) in seen:
                raise UsageError(f"{where}: question_id {prompt.id} was there before", "ids of a task must differ")
            seen.add((prompt.task, prompt.id))
            found.setdefault(prompt.task, []).append(prompt)
    if not found:
        raise UsageError(f"{folder} has no prompts", "its .jsonl files are empty", FORMAT)
    if task is None:
        return found
    if task not in found:
        raise UsageError(f"no prompts for task {task!r}", f"there are {', '.join(found)}")
    return {task: found[task]}


def _files(folder: Path) -> list[Path]:
    if not folder.is_dir():
        why = "it is a file" if folder.exists() else "there is no such folder"
        raise UsageError(f"cannot read prompts from {folder}", why, "Name a folder of .jsonl files.")
    files = sorted(path for path in folder.glob("*.jsonl") if path.is_file())
    if not files:
        raise UsageError(f"{folder} has no prompts", "it holds no .jsonl file", FORMAT)
    return files


def _read(file: Path) -> Iterator[tuple[str, Prompt]]:
    """Each prompt of a file, with the place to name in a complaint. Blank lines are skipped."""
    try:
        # Lines are cut at "\n" alone: a JSON string may hold other line separators as they are.
        lines = file.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n")
    except OSError as error:
        raise UsageError(f"cannot read {file}", error.strerror or str(error)) from error
    for number, line in enumerate(lines, start=1):
        if line.strip():
            where = f"{file}, line {number}"
            yield where, _prompt(line, where, file.stem)


def _prompt(line: bytes, where: str, stem: str) -> Prompt:
    try:
        record = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{where} is not JSON", str(error), FORMAT) from error
    if not isinstance(record, dict):
        raise UsageError(f"{where} is not a JSON object", fix=FORMAT)
    task = record.get("category", stem)
    if not isinstance(task, str) or not task:
        raise UsageError(f"{where}: category is {task!r}", "it must be the name of a task", FORMAT)
    return Prompt(_id(record, where), task, _turns(record, where))


def _id(record: dict[str, Any], where: str) -> str:
    value = record.get("question_id")
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        raise UsageError(f"{where}: question_id is {value!r}", "it must be a number or a text", FORMAT)
    return str(value)


def _turns(record: dict[str, Any], where: str) -> tuple[str, ...]:
    turns = record.get("turns")
    if not isinstance(turns, list) or not turns or any(not isinstance(turn, str) or not turn.strip() for turn in turns):
        raise UsageError(f"{where}: turns must be a list of texts, none of them empty", fix=FORMAT)
    return tuple(turns)
