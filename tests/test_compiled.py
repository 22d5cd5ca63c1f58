"""The modules that run between two passes, compiled: the same tests, the same answers."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import pytest

from duodecoding import machine

HERE = Path(__file__).parent
SCRIPT = HERE.parent / "scripts" / "compile.py"
ANSWER = """
import sys
from duodecoding import LLM, SamplingParams, machine
with LLM("smollm2-135m", draft="smollm2-draft", mode=sys.argv[1], threads=1) as llm:
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


def python(arguments: Sequence[str], root: Path | None = None, **environment: str) -> str:
    """What a Python says that takes the modules from `root`; else from where this one does."""
    path = {"PYTHONPATH": str(root)} if root is not None else {}
    done = subprocess.run(
        [sys.executable, *arguments], env={**os.environ, **path, **environment}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Without optimisation: what it computes is the same, and it is there in half the time."""
    folder = tmp_path_factory.mktemp("compiled")
    said = python([str(SCRIPT), str(folder)], MYPYC_OPT_LEVEL="0").splitlines()
    assert any(line.startswith("duodecoding/realtime.") for line in said)
    return folder


@pytest.mark.parametrize("mode", ["duo", "serial"])
def test_answers_are_the_same(root: Path, mode: str) -> None:
    mine, plain = python(["-c", ANSWER, mode]), python(["-c", ANSWER, "off"])
    assert mine == plain
    assert python(["-c", ANSWER, mode], root) == plain.replace("False", "True")


def test_what_must_hold_holds(root: Path) -> None:
    """The tests of what was compiled, and of the draft's process, which imports it, too."""
    files = [str(HERE / f"test_{name}.py") for name in ("tree", "core", "planner", "lookup", "recycling", "worker")]
    said = python(["-m", "pytest", "-q", "-p", "no:cacheprovider", *files], root)
    assert "the modules are compiled" in said, "no test was left out, so Python ran the sources"
    assert " passed" in said
