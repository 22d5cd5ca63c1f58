"""`duo models`: which names lead to a model here."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

from rich.text import Text

from duodecoding.cli.flags import FLAT, NO_REPORT_FLAGS, ReportFlags, ReportOptions, settings

if TYPE_CHECKING:
    from duodecoding.model_files import Installed


def models(*, options: Annotated[ReportFlags, FLAT] = NO_REPORT_FLAGS) -> int:
    """List the models on this machine, and the built-in ones that are one command away."""
    from duodecoding.cli.terminal import Terminal
    from duodecoding.models import installed

    terminal = Terminal()
    found = installed()
    if settings(ReportOptions, options).json:
        terminal.print(json.dumps([_record(model) for model in found], ensure_ascii=False, indent=2))
        return 0
    terminal.table(("name", "from", "size", "where"), [_row(model) for model in found], right=("size",))
    terminal.note("Besides these: any .gguf file, and owner/repo[:QUANT] from the hub.")
    return 0


def _record(model: Installed) -> dict[str, Any]:
    return {
        "name": model.name,
        "origin": model.origin,
        "path": str(model.path) if model.path else None,
        "size_bytes": model.size,
        "hint": model.hint,
    }


def _row(model: Installed) -> tuple[Text, Text, Text, Text]:
    if model.path is None:
        return Text(model.name), Text(model.origin), Text("-"), Text(f"not here; {model.hint}", style="yellow")
    return Text(model.name, style="bold"), Text(model.origin), Text(in_words(model.size or 0)), Text(str(model.path), style="dim")


def in_words(size: int) -> str:
    """A size in bytes, as people say it."""
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.0f} MB"
