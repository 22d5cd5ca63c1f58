"""The command in this process, with a scripted engine in place of a model."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
from dataclasses import fields

import pytest

from duodecoding import llm as llm_module
from duodecoding.backends.native import load
from duodecoding.cli import flags, reader
from duodecoding.cli.doctor import _cuda_line, _engine_line, _floor_line
from duodecoding.cli.interrupts import Interrupts
from duodecoding.cli.main import main
from duodecoding.cli.terminal import COLOURS, Terminal, stats_line
from duodecoding.costs import Floor
from duodecoding.errors import ContextOverflow, ModelNotFound, OutOfMemory
from duodecoding.trace import Did, Lane, Timeline
from duodecoding.types import EngineConfig, Mode, Result, SamplingParams, Source, Stats, Token

STATS_KEYS = {
    "prompt_tokens", "new_tokens", "seconds", "ttft_seconds", "tokens_per_second", "rounds", "tokens_per_round", "drafted",
    "accepted", "accepted_by_source", "target_busy_seconds", "draft_busy_seconds",
}  # fmt: skip


class FakeStream:
    def __init__(self, owner: FakeLLM, words: list[str]) -> None:
        self.owner, self.words, self.said = owner, words, []
        self.cancelled = False

    def __iter__(self):
        for number, word in enumerate(self.words):
            if self.owner.before_token:
                self.owner.before_token(number)
            if self.cancelled:
                return
            token = Token(number, word, Source.LOOKUP if number % 2 else Source.TARGET, -0.5)
            self.said.append(token)
            yield token

    def close(self) -> None:
        self.cancelled |= len(self.said) < len(self.words)

    @property
    def timeline(self) -> Timeline:
        timeline = Timeline()
        for begin in range(len(self.said)):
            timeline.span(Lane.TARGET, Did.PASS, begin, begin + 0.008)
        return timeline

    @property
    def result(self) -> Result:
        n = len(self.said)
        stats = Stats(9, 3, n, 0.5, 0.1, n / 0.5, max(1, n // 2), 2.0, 8, 6, n // 2, {"lookup": n // 2}, 0.4, 0.0)
        reason = "cancelled" if self.cancelled else "stop"
        return Result("".join(t.text for t in self.said), tuple(self.said), reason, self.owner.config.mode, "on", stats)


class FakeLLM:
    """Answers with the words it was given and notes what it was asked."""

    words = ("Hello", " there", ",", " friend")
    before_token = None  # called before each token, with its number
    error = None
    last: FakeLLM

    @classmethod
    def from_config(cls, config, *, progress=None):
        if cls.error:
            raise cls.error
        self = cls()
        FakeLLM.last = self
        self.config, self.asked, self.closed = config, [], False
        self.model_name, self.draft_name, self.context, self.speculation = config.model, "lookup", 100, "on"
        progress("loading", 0.5)
        return self

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.closed = True

    def stream(self, prompt, params):
        return self._start(prompt, params)

    def stream_chat(self, messages, params):
        return self._start([dict(message) for message in messages], params)

    def _start(self, prompt, params):
        self.asked.append((prompt, params))
        self.running = FakeStream(self, list(self.words))
        return self.running

    def floor(self):
        return Floor(weights=100_000_000, bandwidth=20e9, where="CPU")  # 5 ms

    def abort(self):
        self.running.cancelled = True


@pytest.fixture(autouse=True)
def fake(monkeypatch):
    for name in [name for name in os.environ if name.startswith(flags.ENV_PREFIX)]:
        monkeypatch.delenv(name)

    class Fake(FakeLLM):
        pass

    monkeypatch.setattr(llm_module, "LLM", Fake)
    return Fake


@pytest.fixture
def stdin(monkeypatch):
    def give(data: bytes, *, tty: bool = False) -> None:
        stream = io.TextIOWrapper(io.BytesIO(data))
        stream.isatty = lambda: tty
        monkeypatch.setattr(sys, "stdin", stream)

    return give


# run


def test_the_answer_alone_is_on_stdout(capsys):
    assert main(["run", "hi"]) == 0
    assert capsys.readouterr() == ("Hello there, friend\n", "")
    assert FakeLLM.last.asked == [([{"role": "user", "content": "hi"}], SamplingParams())]
    assert FakeLLM.last.closed


def test_system_and_raw(capsys):
    main(["run", "hi", "--system", "Be brief."])
    assert FakeLLM.last.asked[0][0][0] == {"role": "system", "content": "Be brief."}
    main(["run", "--raw", "hi"])
    assert FakeLLM.last.asked[0][0] == "hi"
    assert main(["run", "--raw", "--system", "x", "hi"]) == 2
    assert "--system with --raw" in capsys.readouterr().err


def test_stats_are_one_line_on_stderr(capsys):
    assert main(["run", "hi", "--stats"]) == 0
    out, err = capsys.readouterr()
    assert out == "Hello there, friend\n"
    assert err.count("\n") == 1
    for part in ("4 tokens", "8.0 tokens/s", "2.00 tokens/round", "accepted 2/6 (lookup 2)", "duo, speculation on"):
        assert part in err
    assert "pass 8.0 ms, 62% of the CPU memory's speed" in err


def test_stats_without_a_floor(fake, capsys):
    fake.floor = lambda self: None
    assert main(["run", "hi", "--stats"]) == 0
    assert "memory" not in capsys.readouterr().err


def test_json_is_one_object(capsys):
    assert main(["run", "hi", "--json"]) == 0
    out, err = capsys.readouterr()
    record = json.loads(out)
    assert list(record) == ["text", "tokens", "finish_reason", "mode", "speculation", "stats"]
    assert record["stats"].keys() >= STATS_KEYS
    assert (record["text"], record["tokens"]) == ("Hello there, friend", [0, 1, 2, 3])
    assert err == ""


@pytest.mark.parametrize("arguments", [["run"], ["run", "-"], ["run", "--raw", "-"], ["run", "-", "--stop", "-"]])
def test_prompt_from_stdin(arguments, stdin):
    stdin("Grüße\n".encode())
    assert main(arguments) == 0
    asked, params = FakeLLM.last.asked[0]
    assert asked == ("Grüße\n" if "--raw" in arguments else [{"role": "user", "content": "Grüße"}])
    assert params.stop == (("-",) if "--stop" in arguments else ())


@pytest.mark.parametrize(
    ("data", "tty", "said"),
    [
        (b"hi \xff there", False, "stdin is not valid UTF-8: byte 4 of 10 (0xff)"),
        (b"", False, "the prompt is empty"),
        (b" \n", False, "the prompt is empty"),
        (b"", True, "no prompt"),
    ],
)
def test_bad_stdin_is_refused(data, tty, said, stdin, capsys):
    stdin(data, tty=tty)
    assert main(["run"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"duo: error: {said}")
    assert err.count("\n") == 1


def test_a_prompt_that_is_not_utf8_is_refused(capsys):
    assert main(["run", b"bad \xff".decode("utf-8", "surrogateescape")]) == 2
    assert "character 5" in capsys.readouterr().err


# Flags, environment, errors


def test_flags_reach_the_engine():
    words = "-m m.gguf -d none --mode off --ctx-size 99 --threads 3 --threads-draft 2 --gpu-layers -1 --offline"
    main(["run", "hi", *words.split()])
    assert FakeLLM.last.config == EngineConfig(
        model="m.gguf", draft="none", mode=Mode.OFF, ctx_size=99, threads=3, threads_draft=2, gpu_layers=-1, offline=True
    )


def test_flags_reach_the_sampler():
    words = "-n 5 --temperature 0.5 --top-k 4 --top-p 0.9 --min-p 0.1 --seed 7 --stop a --stop -b --logit-bias 4=-2.5"
    main(["run", "hi", *words.split(), "--presence-penalty", "-1", "--repetition-penalty", "1.1", "--frequency-penalty", "0.2"])
    assert FakeLLM.last.asked[0][1] == SamplingParams(
        max_tokens=5, temperature=0.5, top_k=4, top_p=0.9, min_p=0.1, seed=7, stop=("a", "-b"), logit_bias={4: -2.5},
        presence_penalty=-1, repetition_penalty=1.1, frequency_penalty=0.2,
    )  # fmt: skip


@pytest.mark.parametrize("schema", ['{"type": "object"}', "\n {}", "true"])
def test_a_json_schema_is_given_itself_or_in_a_file(schema, tmp_path):
    file = tmp_path / "schema.json"
    file.write_text(schema)
    for given in (schema, str(file)):
        assert main(["run", "hi", "--json-schema", given]) == 0
        assert FakeLLM.last.asked[0][1].json_schema == schema


def test_without_flags_the_records_have_their_own_defaults():
    main(["run", "hi"])
    assert FakeLLM.last.config == EngineConfig()
    assert FakeLLM.last.asked[0][1] == SamplingParams()


def test_environment_variables(monkeypatch):
    monkeypatch.setenv("DUO_TOP_K", "4")
    monkeypatch.setenv("DUO_SEED", "1")
    monkeypatch.setenv("DUO_STOP", "two words")
    monkeypatch.setenv("DUO_LOGIT_BIAS", "1=2 3=4")
    monkeypatch.setenv("DUO_RAW", "1")
    monkeypatch.setenv("DUO_MODE", "")
    assert main(["run", "hi", "--seed", "2"]) == 0
    prompt, params = FakeLLM.last.asked[0]
    assert params == SamplingParams(top_k=4, seed=2, stop=("two words",), logit_bias={1: 2.0, 3: 4.0})
    assert prompt == "hi"


@pytest.mark.parametrize("command", ["run", "chat", "models", "doctor"])
def test_every_flag_has_help_and_a_variable(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    assert main([command, "--help"]) == 0
    rows = [row for row in capsys.readouterr().out.splitlines() if row.startswith("│ --")]
    assert rows
    for row in rows:
        name = row.split()[1]
        assert f"[env var: DUO_{name[2:].replace('-', '_').upper()}]" in row
        assert len(row.split("[env var")[0].split()) > 4


ELSEWHERE = {"keep_mb", "top_logprobs"}  # what only a server needs, or its clients


def test_every_field_is_a_flag():
    for record, flagged in ((EngineConfig, flags.EngineFlags), (SamplingParams, flags.SamplingFlags)):
        assert [f.name for f in fields(record) if f.name not in ELSEWHERE] == [f.name for f in fields(flagged)]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run", "hi", "--tempreture", "1"], "unknown option: --tempreture. Did you mean --temperature?"),
        (["run", "hi", "--top-k", "many"], 'invalid value for --top-k: unable to convert "many" into int'),
        (["run", "hi", "--mode", "warp"], 'invalid value "warp" for --mode'),
        (["run", "hi", "--temperature", "-1"], "temperature is -1.0: it must be between 0 and 100"),
        (["run", "hi", "--temperature", "nan"], "temperature is nan"),
        (["run", "hi", "--logit-bias", "x"], "logit_bias is 'x'"),
        (["run", "hi", "there"], "'there' is one argument too many"),
        (["run", "hi", "--json-schema", "nowhere.json"], "cannot read the JSON Schema 'nowhere.json': No such file"),
        (["run", "hi", "--json-schema", "."], "cannot read the JSON Schema '.': Is a directory"),
        (["run", "hi", "-n"], "requires an argument"),
        (["rnu"], 'unknown command "rnu"'),
        (["run", ""], "the prompt is empty"),
    ],
)
def test_wrong_usage_is_one_line_and_code_2(arguments, said, capsys):
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err
    assert err.startswith("duo: error: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize(("error", "code"), [(ModelNotFound("no such\nfile", "why"), 1), (ContextOverflow(20, 10, 11), 2)])
def test_an_error_of_the_engine_is_one_line(error, code, fake, capsys):
    fake.error = error
    assert main(["run", "hi"]) == code
    assert capsys.readouterr().err == f"duo: error: {' '.join(str(error).split())}\n"


def test_out_of_memory_says_how_much():
    said = str(OutOfMemory("big does not fit on GPU", "it needs 20.0 GB for its weights", 1.5e9, 80e9))
    assert said.startswith(
        "big does not fit on GPU: it needs 20.0 GB for its weights; 1.5 GB of 80.0 GB are free. Lower --ctx-size"
    )


def test_version_and_help(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("duo 0.")
    assert main([]) == 0
    assert "Usage: duo COMMAND" in capsys.readouterr().out


def test_a_reader_that_goes_away_ends_it_quietly(monkeypatch, capsys):
    def gone(*_, **__):
        raise BrokenPipeError

    monkeypatch.setattr("duodecoding.cli.terminal.Terminal.say", gone)
    monkeypatch.setattr("duodecoding.cli.main._close_stdout", lambda: None)
    assert main(["run", "hi"]) == 141
    assert capsys.readouterr().err == ""
    assert FakeLLM.last.running.cancelled


# Signals


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("json_flag", [[], ["--json"]])
def test_a_signal_keeps_what_was_said(number, code, json_flag, fake, capsys):
    def interrupt(_llm, token):
        if token == 2:
            os.kill(os.getpid(), number)
            while not FakeLLM.last.running.cancelled:
                pass

    fake.before_token = interrupt
    before = signal.getsignal(number)
    assert main(["run", "hi", *json_flag]) == code
    out = capsys.readouterr().out
    assert (json.loads(out)["text"] + "\n" if json_flag else out) == "Hello there\n"
    if json_flag:
        assert json.loads(out)["finish_reason"] == "cancelled"
    assert signal.getsignal(number) is before


def test_interrupts_note_the_signal_and_leave_no_thread():
    calls = []
    with Interrupts(lambda: calls.append("stop"), lambda: None) as interrupts:
        os.kill(os.getpid(), signal.SIGINT)
        while not calls:
            pass
    assert interrupts.signal == signal.SIGINT
    assert not interrupts._thread.is_alive()


# Drawing


def test_stats_without_guesses():
    stats = Stats(5, 0, 0, 0.0, 0.0, 0.0, 0, 0.0, 0, 0, 0, {}, 0.0, 0.0)
    line = stats_line(Result("", (), "cancelled", Mode.OFF, "off: the mode is off", stats))
    assert line == "0 tokens · 0.0 tokens/s · first in 0.00 s · off, speculation off: the mode is off"


def test_every_source_but_the_target_has_a_colour():
    assert set(COLOURS) == set(Source) - {Source.TARGET}


def test_colours_and_control_characters_on_a_screen(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    terminal = Terminal()
    terminal.say(Token(1, "a\x1b[2J", Source.TARGET, 0.0), show_draft=True)
    terminal.say(Token(2, "b", Source.LOOKUP, 0.0), show_draft=True)
    terminal.end_line()
    assert capsys.readouterr().out == "a␛[2J\x1b[36mb\x1b[0m\n"


# chat


def chat(stdin, lines: str, *arguments: str) -> int:
    stdin(lines.encode())
    return main(["chat", *arguments])


def test_chat_keeps_the_conversation(stdin, capsys):
    assert chat(stdin, "one\n\ntwo \\\nthree\n", "--system", "Be brief.") == 0
    out, err = capsys.readouterr()
    assert out == "Hello there, friend\n" * 2
    assert err.count("tokens/s") == 2
    assert FakeLLM.last.asked[1][0] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "Hello there, friend"},
        {"role": "user", "content": "two \nthree"},
    ]


def test_chat_commands(stdin, capsys):
    lines = (
        "one\n/clear\n/set temperature 0.7\n/set stop \\n\\n\n/set ignore-eos on\n/set system Hm\n/show\n/help\ntwo\n/exit\nthree\n"
    )
    assert chat(stdin, lines) == 0
    out, err = capsys.readouterr()
    assert "temperature = 0.7" in err
    assert "0 of 100 tokens used" in out
    assert "/set KEY VALUE" in out
    messages, params = FakeLLM.last.asked[-1]
    assert messages == [{"role": "system", "content": "Hm"}, {"role": "user", "content": "two"}]
    assert params == SamplingParams(temperature=0.7, stop=("\n\n",), ignore_eos=True)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("/sett x", "unknown command /sett. There are /help, /clear, /set, /show, /exit."),
        ("/set", "/set needs a name and a value"),
        ("/set temperature -1", "it must be between 0 and 100"),
        ("/set top_k few", "it must be a whole number"),
        ("/set ignore_eos maybe", "it must be on or off"),
        ("/set mode off", "mode is fixed while the model is loaded"),
        ("/set wings 2", "no setting is called 'wings'"),
    ],
)
def test_chat_mistakes_are_explained(line, said, stdin, capsys):
    assert chat(stdin, line + "\n") == 2
    assert said in capsys.readouterr().err


def test_an_unanswered_question_is_taken_back(fake, stdin, monkeypatch):
    monkeypatch.setattr(fake, "words", ())
    chat(stdin, "one\ntwo\n")
    assert FakeLLM.last.asked[1][0] == [{"role": "user", "content": "two"}]


def test_the_editor_sends_and_begins_lines(monkeypatch, tmp_path):
    from prompt_toolkit.application import create_app_session
    from prompt_toolkit.input import create_pipe_input
    from prompt_toolkit.output import DummyOutput

    monkeypatch.setattr(reader, "data_dir", lambda: tmp_path / "data")
    with create_pipe_input() as keys, create_app_session(input=keys, output=DummyOutput()):
        editor = reader.Editor()
        keys.send_text("one\\\rtwo\x1b\rthree\r")
        assert editor.read() == "one\ntwo\nthree"
        keys.send_text("gone\x03")
        with pytest.raises(KeyboardInterrupt):
            editor.read()
        keys.send_text("\x04")
        with pytest.raises(EOFError):
            editor.read()
    assert (tmp_path / "data" / "history").stat().st_mode & 0o077 == 0


# models


def test_models(capsys):
    assert main(["models"]) == 0
    assert "smollm2-135m" in capsys.readouterr().out
    assert main(["models", "--json"]) == 0
    names = [model["name"] for model in json.loads(capsys.readouterr().out)]
    assert "smollm2-135m" in names


def test_doctor(capsys):
    assert main(["doctor", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["cores"]["physical"] >= 1
    assert facts["versions"]["numpy"]
    assert facts["bandwidth"]["cpu"] > 0
    assert main(["doctor"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert facts["outlook"].split(",")[0] in said
    assert "main memory" in said


def test_doctor_says_who_runs_drafts(capsys, monkeypatch, tmp_path):
    assert main(["doctor", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["own_engine"] == {"engine": "native", "why": ""}
    monkeypatch.setattr("duodecoding.backends.native.library", lambda **_: load(tmp_path / "draft.so"))
    assert main(["doctor"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "on the CPU run llama.cpp, not our own engine" in said
    assert "our own engine" in _engine_line({"engine": "native", "why": ""})


def test_doctor_weighs_a_model_against_the_memory(capsys):
    arguments = ["doctor", "-m", "smollm2-135m", "--threads", "1"]
    assert main([*arguments, "--json"]) == 0
    model = json.loads(capsys.readouterr().out)["model"]
    assert 70e6 < model["weights_bytes"] < 110e6
    assert model["floor_of"] == "CPU"
    assert model["floor_share"] == pytest.approx(model["floor_seconds"] / model["pass_seconds"]["1"])
    assert main(arguments) == 0
    assert f"to read {model['weights_bytes'] / 1e6:.0f} MB of weights from the CPU's memory" in " ".join(
        capsys.readouterr().out.split()
    )


def test_a_floor_that_cannot_be_measured_says_why():
    model = {"weights_bytes": 5_000_000_000, "floor_seconds": None}
    assert _floor_line(model) == "not known: 5.0 GB of weights, and torch cannot measure the GPU's memory"


def test_gpus_with_their_memory():
    gpu = {"name": "Big One", "total_bytes": 150_100_000_000, "free_bytes": 20_000_000_000}
    assert _cuda_line([gpu]) == "Big One, 20.0 GB of 150.1 GB free"
    assert _cuda_line([]) == "torch sees no CUDA device"
    assert _cuda_line(None) == "torch is not installed"
