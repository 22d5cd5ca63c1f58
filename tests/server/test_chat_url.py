"""`duo chat --url`: a conversation with a server."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator

import pytest
from live import Live, eventually, live, speaker

from duodecoding import SamplingParams
from duodecoding.cli import flags
from duodecoding.cli.main import main
from duodecoding.cli.served import ServedLLM
from duodecoding.errors import DuoError, UsageError
from duodecoding.types import Mode

PARAMS = SamplingParams(max_tokens=40, temperature=0.7, seed=5, logit_bias={99: 1.0}, stop=("zz",), top_k=20)
ASKED = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with live(lambda: speaker(Mode.SERIAL), api_key=("key",)) as running:
        yield running


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch):
    for name in [name for name in os.environ if name.startswith(flags.ENV_PREFIX)]:
        monkeypatch.delenv(name)


def chat(monkeypatch, lines: str, *arguments: str) -> int:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines.encode())))
    return main(["chat", *arguments])


def test_it_says_what_an_engine_here_would_say(server):
    alone = speaker(Mode.OFF).chat(ASKED, PARAMS)
    with ServedLLM(server.url, "key") as llm:
        stream = llm.stream_chat(ASKED, PARAMS)
        assert [token.id for token in stream] == alone.token_ids
        result = stream.result
        stream.close()
    assert (result.text, result.finish_reason, result.mode) == (alone.text, alone.finish_reason, Mode.SERIAL)
    assert result.stats.accepted == sum(token.source != "target" for token in result.tokens) > 0
    assert (llm.model_name, llm.context, llm.speculation) == ("target", 512, "on")


def test_a_conversation(server, monkeypatch, capsys):
    arguments = ("--url", server.url, "--api-key", "key", "-n", "12", "--temperature", "0.5")
    assert chat(monkeypatch, "one\n/show\ntwo\n", *arguments) == 0
    out = capsys.readouterr().out
    here = speaker(Mode.OFF)
    params = SamplingParams(max_tokens=12, temperature=0.5)
    first = here.chat([{"role": "user", "content": "one"}], params).text
    turns = [{"role": "user", "content": "one"}, {"role": "assistant", "content": first}, {"role": "user", "content": "two"}]
    assert out.startswith(first + "\n")
    assert out.endswith(here.chat(turns, params).text + "\n")
    assert "target" in out


def test_settings_of_an_engine_are_the_servers(server, monkeypatch, capsys):
    assert chat(monkeypatch, "one\n", "--url", f"{server.url}/v1/", "--api-key", "key", "--threads", "3") == 0
    assert "The server decides about threads" in capsys.readouterr().err


@pytest.mark.parametrize(("url", "error"), [("http://", UsageError), ("ftp://x", UsageError), ("http://127.0.0.1:9", DuoError)])
def test_nobody_there(url, error):
    with pytest.raises(error):
        ServedLLM(url)


def test_refusals_are_passed_on(server, monkeypatch, capsys):
    assert chat(monkeypatch, "hi\n", "--url", server.url, "--api-key", "wrong") == 1
    assert "API key" in capsys.readouterr().err
    with ServedLLM(server.url, "key") as llm, pytest.raises(DuoError, match="context"):
        llm.stream_chat([{"role": "user", "content": "x" * 600}], PARAMS)


def test_hanging_up_keeps_what_was_said():
    with live(lambda: speaker(delay=0.01, end=-100.0)) as server, ServedLLM(server.url) as llm:
        stream = llm.stream_chat(ASKED, SamplingParams(max_tokens=400))
        said = []
        for token in stream:
            said.append(token)
            if len(said) == 5:
                llm.abort()
        assert len(said) < 400
        assert stream.result.finish_reason == "cancelled"
        assert stream.result.text == "".join(token.text for token in said)
        assert stream.result.stats.new_tokens == len(said)
        eventually(lambda: server.engines.running == 0)


def test_a_server_that_fails_in_the_middle():
    with live(lambda: speaker(end=-100.0, fails_at=5)) as server, ServedLLM(server.url) as llm:
        stream = llm.stream_chat(ASKED, SamplingParams(max_tokens=100))
        with pytest.raises(DuoError, match="the engine failed"):
            list(stream)
