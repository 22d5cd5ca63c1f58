"""Install llama-cpp-python into a virtual environment, showing how far the compile is.

    python3 scripts/install_llama.py .venv/bin/python constraints.txt

The registry has no wheel for it, so pip compiles llama.cpp, silently and for minutes. This runs the same pip, keeps all it says
in llama-build.log inside the environment, and turns its compiler output into one progress line. Standard library only: it runs
before anything is installed.
"""

from __future__ import annotations

import os
import queue
import re
import subprocess
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import IO

PACKAGE = "llama-cpp-python"
WHY = "no wheel on the registry: llama.cpp is compiled for this CPU, once, ~5-10 minutes"
HELP = """What usually helps:
  - no C++ compiler: install one (Debian, Ubuntu: apt install g++; Fedora: dnf install gcc-c++; macOS: xcode-select --install)
  - killed, out of memory: fewer jobs at once, CMAKE_BUILD_PARALLEL_LEVEL=1 make ...
  - no network: pip needs its package index; set PIP_INDEX_URL to one that can be reached"""
LINE_EVERY = 15.0  # seconds between progress lines when the output is not a terminal
TAIL = 20
NINJA = re.compile(r"^\s*\[(\d+)/(\d+)\]")
MAKE = re.compile(r"^\s*\[\s*(\d+)%\]")


class Progress:
    """What pip is doing, from its own words, and one line about it."""

    def __init__(self, out: IO[str]) -> None:
        self.out = out
        self.live = out.isatty()
        self.start = self.shown = time.monotonic()
        self.stage = "asking the registry"
        self.compiling = False
        self.cached = False

    def read(self, line: str) -> None:
        if match := NINJA.match(line):
            self.stage = f"compiling llama.cpp, step {match[1]} of {match[2]}"
        elif match := MAKE.match(line):
            self.stage = f"compiling llama.cpp, {match[1]} %"
        elif f"Building wheel for {PACKAGE}" in line and not self.compiling:
            self.compiling = True
            self.stage = "configuring llama.cpp"
            self.say(f"{PACKAGE}: {WHY}")
        elif "Using cached llama_cpp_python" in line and ".whl" in line:
            self.cached = True
        elif "Installing build dependencies" in line:
            self.stage = "fetching the build tools"
        elif line.lstrip().startswith("Downloading"):
            self.stage = "downloading " + line.split()[1].rsplit("/", 1)[-1]
        elif "Installing collected packages" in line:
            self.stage = "installing"

    def tick(self) -> None:
        """Called a few times a second. On a terminal the line is redrawn; elsewhere a new one is printed now and then."""
        now = time.monotonic()
        if self.live:
            width = os.get_terminal_size(self.out.fileno()).columns or 80  # some terminals do not know
            self.out.write(f"\r\x1b[K{self._line()[: width - 1]}")
            self.out.flush()
        elif now - self.shown >= LINE_EVERY:
            self.shown = now
            self.say(self._line())

    def say(self, text: str) -> None:
        print(("\r\x1b[K" if self.live else "") + text, file=self.out, flush=True)

    def done(self) -> None:
        if self.compiling:
            self.say(f"{PACKAGE}: compiled and installed in {self._elapsed()}")
        elif self.cached:
            self.say(f"{PACKAGE}: using the compiled copy from pip's cache")
        elif self.live:
            self.out.write("\r\x1b[K")

    def _line(self) -> str:
        return f"  {self._elapsed()}  {self.stage}"

    def _elapsed(self) -> str:
        minutes, seconds = divmod(int(time.monotonic() - self.start), 60)
        return f"{minutes}:{seconds:02d}"


def command(python: str, constraints: str) -> list[str]:
    pip = [python, "-m", "pip", "install", "-v", "--disable-pip-version-check", "--progress-bar", "off", "-c", constraints]
    if os.environ.get("CMAKE_ARGS"):
        pip.append("--no-cache-dir")  # the cached copy may have been compiled with other options
    return [*pip, PACKAGE]


def run(arguments: list[str], log: Path, progress: Progress) -> tuple[int, list[str]]:
    """Run pip to its end. Returns its exit code and the last lines it wrote."""
    tail: deque[str] = deque(maxlen=TAIL)
    lines: queue.Queue[str | None] = queue.Queue()
    # pip's verbose lines must come as they are written; its own colours would hide them from the patterns above.
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "NO_COLOR": "1"}
    with (
        log.open("w", encoding="utf-8") as kept,
        subprocess.Popen(
            arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", env=environment
        ) as pip,
    ):
        threading.Thread(target=_pump, args=(pip.stdout, lines), daemon=True).start()
        try:
            while (line := _next(lines, progress)) is not None:
                kept.write(line)
                tail.append(line.rstrip())
                progress.read(line)
        except KeyboardInterrupt:
            pip.terminate()
            raise
    return pip.returncode, list(tail)


def _pump(stream: IO[str], lines: queue.Queue[str | None]) -> None:
    for line in stream:
        lines.put(line)
    lines.put(None)


def _next(lines: queue.Queue[str | None], progress: Progress) -> str | None:
    """The next line; while there is none, the clock goes on."""
    while True:
        try:
            line = lines.get(timeout=0.25)
        except queue.Empty:
            progress.tick()
        else:
            progress.tick()
            return line


def main() -> int:
    if len(sys.argv) != 3:
        print("usage: install_llama.py VENV_PYTHON CONSTRAINTS", file=sys.stderr)
        return 2
    python, constraints = sys.argv[1:]
    log = Path(python).parent.parent / "llama-build.log"
    progress = Progress(sys.stdout)
    try:
        code, tail = run(command(python, constraints), log, progress)
    except KeyboardInterrupt:
        progress.say(f"{PACKAGE}: stopped")
        return 130
    if code == 0:
        progress.done()
        return 0
    progress.say(f"error: {PACKAGE} could not be installed. The last lines of {log}:")
    print("\n".join(f"  {line}" for line in tail), file=sys.stderr)
    print(HELP, file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
