"""All drawing. The answer goes to stdout, untouched when that is a pipe; everything else goes to stderr."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import cycle

from rich.console import Console, RenderableType
from rich.measure import Measurement
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.status import Status
from rich.style import Style
from rich.table import Table
from rich.text import Text

from duodecoding.types import Result, Source, Token

PALETTE = ("green", "cyan", "magenta", "yellow", "blue")
COLOURS = dict(zip((source for source in Source if source is not Source.TARGET), cycle(PALETTE), strict=False))

# A model may write control characters. On a screen they would move the cursor or worse, so they are shown as pictures there.
_VISIBLE = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | dict.fromkeys(range(127, 160), 0xFFFD)


class Terminal:
    def __init__(self) -> None:
        for stream in (sys.stdout, sys.stderr):
            if hasattr(stream, "reconfigure"):
                stream.reconfigure(errors="replace")  # a screen without some character shows another, and the answer goes on
        self.out = Console(highlight=False, soft_wrap=True)
        self.err = Console(stderr=True, highlight=False, soft_wrap=True)
        self._status: Status | None = None
        self._open_line = False

    # The answer

    def say(self, token: Token, *, show_draft: bool = False, silent: bool = False) -> None:
        """One token of the answer, with `show_draft` in the colour of who guessed it. `silent`: not at all."""
        if silent or not token.text:
            return
        self.quiet()
        text = token.text.translate(_VISIBLE) if self.out.is_terminal else token.text
        self._open_line = not text.endswith("\n")
        if show_draft and token.source in COLOURS and self.out.color_system:
            text = Style(color=COLOURS[token.source]).render(text, color_system=self.out._color_system)
        sys.stdout.write(text)
        sys.stdout.flush()

    def end_line(self, *, interrupted: bool = False) -> None:
        """Whatever comes next starts a line of its own. `interrupted`: the screen shows a ^C that was not written here."""
        self.quiet()
        if self._open_line or (interrupted and self.out.is_terminal):
            sys.stdout.write("\n")
            sys.stdout.flush()
        self._open_line = False

    def print(self, text: str) -> None:
        """A line of output that is not an answer, such as JSON."""
        self.quiet()
        sys.stdout.write(text + "\n")
        sys.stdout.flush()

    def table(self, columns: Sequence[str], rows: Iterable[Sequence[str | Text]], *, right: Sequence[str] = ()) -> None:
        """Plain columns on stdout, with the names in `right` set flush right."""
        self.quiet()
        table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 3, 0, 0))
        for column in columns:
            table.add_column(column, justify="right" if column in right else "left", overflow="fold")
        for row in rows:
            table.add_row(*row)
        self.out.print(table, soft_wrap=False)

    def draw(self, drawing: RenderableType) -> None:
        """A table or picture on stdout. In a pipe it is as wide as it wants to be."""
        self.quiet()
        console = self.out if self.out.is_terminal else Console(file=sys.stdout, highlight=False, width=self.width_of(drawing))
        console.print(drawing, soft_wrap=False)

    def width_of(self, drawing: RenderableType) -> int:
        return Measurement.get(self.out, self.out.options.update(max_width=1000), drawing).maximum

    def fits(self, drawing: RenderableType) -> bool:
        """Is the screen wide enough?"""
        return not self.out.is_terminal or self.width_of(drawing) <= self.out.width

    def pairs(self, values: Mapping[str, str]) -> None:
        """Names and values, one a line."""
        self.quiet()
        grid = Table.grid(padding=(0, 3, 0, 0))
        grid.add_column(style="dim")
        grid.add_column(overflow="fold")
        for name, value in values.items():
            grid.add_row(name, Text(value))
        self.out.print(grid, soft_wrap=False)

    def heading(self, text: str) -> None:
        self.quiet()
        self.out.print(Text(text, style="bold"))

    def say_line(self, text: str, style: str = "") -> None:
        """Prose on stdout, wrapped to the screen, with space below."""
        self.quiet()
        self.out.print(Text(text, style=style), soft_wrap=False)
        self.out.print()

    # Everything else

    def note(self, text: str) -> None:
        self._tell(Text(text, style="dim"))

    def warn(self, text: str) -> None:
        self._tell(Text(" ".join(text.split()), style="yellow"))

    def error(self, text: str) -> None:
        self._tell(Text("duo: error: ", style="bold red") + Text(" ".join(text.split()), style="default"))

    def _tell(self, text: Text) -> None:
        self.quiet()
        self.err.print(text, soft_wrap=not self.err.is_terminal)  # one line in a log, whole words on a screen

    def gap(self) -> None:
        """Some air, on a screen."""
        if self.err.is_terminal:
            self.err.print()

    def stats(self, result: Result, more: str = "") -> None:
        self.note(stats_line(result, more))

    def legend(self) -> None:
        """Which colour stands for which source. Without colours there is nothing to explain."""
        if not self.out.color_system:
            return
        parts = [Text("guessed by ", style="dim")]
        for source, colour in COLOURS.items():
            parts += [Text("■ ", style=colour), Text(f"{source}   ", style="dim")]
        self._tell(Text.assemble(*parts, Text("■ the target itself", style="dim")))

    # Waiting

    @contextmanager
    def busy(self, what: str) -> Iterator[None]:
        """A spinner until the first word of output, where there is a screen to draw it on."""
        if self.err.is_terminal:
            self._status = Status(Text(what, style="dim"), console=self.err, spinner="dots", spinner_style="dim")
            self._status.start()
        try:
            yield
        finally:
            self.quiet()

    @contextmanager
    def bar(self) -> Iterator[Callable[[str, float], None]]:
        """A progress bar, moved by calling what is yielded with what is being done and the share done."""
        columns = TextColumn("[dim]{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn()
        with Progress(*columns, console=self.err, transient=True, disable=not self.err.is_terminal) as progress:
            task = progress.add_task("", total=1.0)
            yield lambda what, share: progress.update(task, description=what, completed=share)

    def progress(self, what: str, fraction: float = 0.0) -> None:
        """What the spinner says now."""
        if self._status is not None:
            share = f" {fraction:.0%}" if 0 < fraction < 1 else ""
            self._status.update(Text(what + share, style="dim"))

    def quiet(self) -> None:
        """Take the spinner away and show the cursor."""
        if self._status is not None:
            self._status.stop()
            self._status = None


def stats_line(result: Result, more: str = "") -> str:
    """One answer in numbers."""
    stats = result.stats
    parts = [f"{stats.new_tokens} tokens", f"{stats.tokens_per_second:.1f} tokens/s", f"first in {stats.ttft_seconds:.2f} s"]
    if stats.rounds:
        parts.append(f"{stats.tokens_per_round:.2f} tokens/round")
    if stats.verified:
        who = ", ".join(f"{source} {count}" for source, count in stats.accepted_by_source.items() if count)
        parts.append(f"accepted {stats.accepted}/{stats.verified}" + (f" ({who})" if who else ""))
    if stats.reused_tokens:
        parts.append(f"prompt reused {stats.reused_tokens}/{stats.prompt_tokens}")
    return " · ".join([*parts, *([more] if more else []), f"{result.mode}, speculation {result.speculation}"])
