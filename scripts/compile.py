"""Compiles what runs between two passes of the target and between two steps of the draft: the same Python, through mypyc, as C.

    python scripts/compile.py DIR

DIR becomes a package root with everything in src/ and, beside the sources, the compiled modules, which Python prefers. Takes about
a minute. A wheel built with DUO_BUILD_C=1 has the same modules (build_hook.py).
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

NEEDS = ("mypy>=2.0", "setuptools", "numpy>=2.0", "msgspec>=0.20")  # beside a C compiler; the last two for their types
ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "src"
HEADERS = Path(sysconfig.get_path("include"), "Python.h")
# Not worker.py, which `python -m` starts, nor wire.py, whose records msgspec makes; nothing that users subclass.
MODULES = (
    "tree", "sampling", "costs", "planner", "trace", "core",
    "drafters.record", "drafters.automaton", "drafters.lookup", "drafters.recycling",
    "drafters.growth", "drafters.model", "drafters.bridge",
    "session", "remote", "drafting", "between", "realtime", "virtual",
)  # fmt: skip


def compile_into(folder: Path) -> list[Path]:
    """Build the modules in a copy of the sources at `folder`. Returns the compiled files, relative to it."""
    if not HEADERS.exists():
        sys.exit(f"error: {HEADERS} is missing\nInstall the headers of this Python (Debian, Ubuntu: apt install python3-dev).")
    shutil.copytree(SOURCES, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__", "*.so", "*.egg-info"))
    files = [str(Path("duodecoding", *module.split(".")).with_suffix(".py")) for module in MODULES]
    with tempfile.TemporaryDirectory() as cache:
        # What the modules import need not be installed here, nor is it checked: `make lint` does that.
        lenient = ["--follow-imports", "silent", "--ignore-missing-imports"]
        options = ["--config-file", str(ROOT / "pyproject.toml"), "--cache-dir", cache, *lenient]
        command = [sys.executable, "-m", "mypyc", *options, *files]
        environment = {"MYPYC_DEBUG_LEVEL": "0", **os.environ, "MYPYPATH": "", "PYTHONPATH": where_needs_are()}
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    shutil.rmtree(folder / "build", ignore_errors=True)
    if done.returncode:
        sys.exit(f"error: mypyc failed\n{(done.stdout + done.stderr)[-4000:]}")
    return sorted(path.relative_to(folder) for path in folder.rglob("*.so"))


def where_needs_are() -> str:
    """While pip builds a wheel they are in folders that it shows to its own process alone."""
    found = (importlib.util.find_spec(need.partition(">")[0]) for need in NEEDS)
    folders = {Path(spec.origin).parent.parent: None for spec in found if spec is not None and spec.origin is not None}
    return os.pathsep.join(map(str, folders))


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit((__doc__ or "").partition("\n\n")[2])
    for file in compile_into(Path(sys.argv[1]).resolve()):
        print(file)
