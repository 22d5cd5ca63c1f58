"""The modules that run between two passes, compiled: the same tests, the same answers."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from duodecoding import machine

HERE = Path(__file__).parent
SCRIPT = HERE.parent / "scripts" / "compile.py"
ANSWER = """
import sys
from duodecoding import LLM, SamplingParams, machine
mode, _, turns = sys.argv[1].partition(", turns ")
with LLM("smollm2-135m", draft="smollm2-draft", mode=mode, turns=turns or "auto", threads=1) as llm:
    for temperature in (0.0, 0.8):
        result = llm.generate("Three rivers of Europe are", SamplingParams(max_tokens=24, temperature=temperature))
        print(machine.compiled(), result.token_ids)
"""
pytestmark = [
    pytest.mark.sources,
    pytest.mark.skipif(machine.compiled(), reason="they are compiled already"),
    pytest.mark.skipif(
        not Path(sysconfig.get_path("include"), "Python.h").exists(), reason="the headers of this Python are not installed"
    ),
    pytest.mark.timeout(600),
]


# Where pip builds a wheel, what that needs is on the path of its own process alone.
AS_PIP_DOES = """
import runpy, sys
script, folder, *paths = sys.argv[1:]
sys.path += paths
sys.argv = [script, folder]
runpy.run_path(script, run_name="__main__")
"""


def python(arguments: Sequence[str], root: Path | None = None, *, executable: str = sys.executable, **environment: str) -> str:
    """What a Python says that takes the modules from `root`; else from where this one does."""
    path = {"PYTHONPATH": str(root)} if root is not None else {}
    done = subprocess.run(
        [executable, *arguments], env={**os.environ, **path, **environment}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Without optimisation: what it computes is the same, and it is there in half the time."""
    folder = tmp_path_factory.mktemp("compiled")
    paths = [path for path in sys.path if path.endswith("site-packages")]
    bare = str(getattr(sys, "_base_executable", sys.executable))  # it does not see this environment's packages
    arguments = ["-c", AS_PIP_DOES, str(SCRIPT), str(folder), *paths]
    said = python(arguments, executable=bare, MYPYC_OPT_LEVEL="0").splitlines()
    assert any(line.startswith("duodecoding/realtime.") for line in said)
    return folder


@pytest.mark.parametrize("mode", ["duo", "duo, turns on", "serial"])
def test_answers_are_the_same(root: Path, mode: str) -> None:
    mine, plain = python(["-c", ANSWER, mode]), python(["-c", ANSWER, "off"])
    assert mine == plain
    assert python(["-c", ANSWER, mode], root) == plain.replace("False", "True")


@pytest.mark.slow
def test_a_wheel_has_them(tmp_path: Path) -> None:
    """As the README says, with nothing but what pip fetches for the build."""
    python(["-m", "pip", "wheel", "-q", "--no-deps", "-w", str(tmp_path), str(HERE.parent)], DUO_BUILD_C="1", MYPYC_OPT_LEVEL="0")
    [wheel] = tmp_path.glob("*.whl")
    assert not wheel.name.endswith("-any.whl")
    with zipfile.ZipFile(wheel) as file:
        file.extractall(tmp_path / "root")
    assert python(["-c", ANSWER, "duo"], tmp_path / "root") == python(["-c", ANSWER, "off"]).replace("False", "True")


def test_what_must_hold_holds(root: Path) -> None:
    """The tests of what was compiled, and of the draft's process, which imports it, too."""
    files = [str(HERE / f"test_{name}.py") for name in ("tree", "core", "planner", "lookup", "recycling", "worker")]
    said = python(["-m", "pytest", "-q", "-p", "no:cacheprovider", *files], root)
    assert "the modules are compiled" in said, "no test was left out, so Python ran the sources"
    assert " passed" in said
