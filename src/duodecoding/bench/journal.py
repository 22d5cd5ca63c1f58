"""The file that a benchmark grows: one JSON object a line, the settings first. What is on disk survives any end of the run."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec

from duodecoding.bench.metrics import Answer
from duodecoding.errors import UsageError

NAME = "results.jsonl"
FIRST = "settings"
MAY_GROW = {"questions", "peers", "peer_per_task"}  # settings that a later session may change: what is there stays true


class Journal:
    """Answers and remarks so far. Opening one that exists goes on with it, if its settings are the same."""

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        self.path = folder / NAME
        self.answers: list[Answer] = []
        self.notes: list[dict[str, Any]] = []  # everything else, by `kind`
        self.settings: dict[str, Any] = json.loads(json.dumps(settings))  # as they will be read back
        before: dict[str, Any] | None = None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            known = self.path.read_bytes() if self.path.exists() else b""
            whole = known[: known.rfind(b"\n") + 1]  # a line that was cut off is lost
            before = self._read(whole)
            self._file = self.path.open("ab")
            self._file.truncate(len(whole))
        except OSError as error:
            raise UsageError(f"cannot write to {folder}", error.strerror or str(error)) from error
        if before != self.settings:
            self.note(FIRST, settings=self.settings)

    def _read(self, data: bytes) -> dict[str, Any] | None:
        """Everything in the file. Returns its settings, if it has any that can be gone on with."""
        before: dict[str, Any] | None = None
        for number, line in enumerate(data.splitlines(), start=1):
            try:
                record = msgspec.json.decode(line, type=dict[str, Any])
                kind = record.pop("kind")
                if number == 1 or kind == FIRST:
                    before = record["settings"]
                elif kind == "answers":
                    self.answers += msgspec.convert(record["answers"], list[Answer])
                else:
                    self.notes.append({"kind": kind, **record})
            except (msgspec.MsgspecError, KeyError) as error:
                why = f"line {number}: {error}"
                raise UsageError(f"{self.path} is not a benchmark's", why, "Choose another --out.") from error
        if before is not None:
            self._check(before)
        return before

    def _check(self, before: Mapping[str, Any]) -> None:
        changed = {name for name in {*before, *self.settings} if before.get(name) != self.settings.get(name)}
        names = sorted(changed - MAY_GROW)
        if names:
            why = "; ".join(f"{name} was {before.get(name)!r}, now {self.settings.get(name)!r}" for name in names)
            raise UsageError(f"{self.path} was made with other settings", why, "Choose another --out, or the same settings.")

    def add(self, answers: Iterable[Answer]) -> None:
        """All turns of a question in one line: half a question is never on disk."""
        found = list(answers)
        if not found:
            return
        self.answers += found
        self._write({"kind": "answers", "answers": [asdict(answer) for answer in found]})

    def note(self, kind: str, **values: Any) -> None:
        record = {"kind": kind, **values}
        if kind != FIRST:
            self.notes.append(record)
        self._write(record)

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [{name: value for name, value in note.items() if name != "kind"} for note in self.notes if note["kind"] == kind]

    def _write(self, record: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(record).encode() + b"\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()
