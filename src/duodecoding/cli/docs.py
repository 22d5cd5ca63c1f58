"""The help texts in docs/cli.md: `python -m duodecoding.cli.docs` writes them, `--check` says whether they are up to date.

A block begins with a line `<!-- help: run -->` (the command; empty for `duo` itself) and ends with `<!-- end -->`.
"""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

from rich.console import Console

from duodecoding.cli.main import app

PAGE = Path("docs/cli.md")
WIDTH = 110
_BLOCK = re.compile(r"<!-- help: ?(?P<command>[a-z -]*?) ?-->\n.*?<!-- end -->", re.DOTALL)


def help_text(command: str) -> str:
    """What `duo COMMAND --help` prints, on a screen of fixed width without colours."""
    out = io.StringIO()
    console = Console(file=out, width=WIDTH, color_system=None, force_terminal=False, highlight=False)
    app.help_print(command.split(), console=console)
    return "\n".join(line.rstrip() for line in out.getvalue().strip().splitlines())


def renew(page: str) -> str:
    """The page with every help block as the program prints it now."""

    def block(match: re.Match[str]) -> str:
        command = match["command"]
        call = " ".join(["duo", *command.split(), "--help"])
        return f"<!-- help: {command} -->\n```console\n$ {call}\n{help_text(command)}\n```\n<!-- end -->".replace(":  -->", ": -->")

    return _BLOCK.sub(block, page)


def main(arguments: list[str]) -> int:
    page = PAGE.read_text(encoding="utf-8")
    renewed = renew(page)
    if arguments == ["--check"]:
        if page != renewed:
            sys.stderr.write(f"{PAGE} is out of date. Run: python -m duodecoding.cli.docs\n")
        return int(page != renewed)
    PAGE.write_text(renewed, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
