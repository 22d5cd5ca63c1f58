"""The server beyond OpenAI's client: our extension, keys, limits, the queue, and what operators see."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest
from live import DEFAULTS, Live, eventually, live, speaker

from duodecoding import LLM
from duodecoding.errors import ModelNotFound
from duodecoding.server import app, gate, reply, run
from duodecoding.server.engines import FairQueue, Job
from duodecoding.types import Mode

CHAT = "/v1/chat/completions"


def asking(text: str = "hello", **fields: object) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": text}], **fields}


def chunks(server: Live, body: dict[str, object]) -> list[dict]:
    events = server.events(CHAT, body)
    assert events[-1] == "[DONE]"
    return [json.loads(event) for event in events[:-1]]


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with live(lambda: speaker(Mode.SERIAL)) as running:
        yield running


# Our extension


def test_tokens_and_spans_in_a_stream(server):
    got = chunks(server, asking(duo={"tokens": True, "timeline": True}))
    for chunk in got[:-1]:
        assert "".join(token["text"] for token in chunk["duo"]["tokens"]) == chunk["choices"][0]["delta"]["content"]
        assert len({token["round"] for token in chunk["duo"]["tokens"]}) == 1
    tokens = [token for chunk in got[:-1] for token in chunk["duo"]["tokens"]]
    assert set(tokens[0]) == {"id", "text", "source", "logprob", "round"}
    assert {token["source"] for token in tokens} >= {"target", "model"}
    spans = [span for chunk in got for span in chunk["duo"].get("spans", [])]
    assert {span["did"] for span in spans} >= {"prompt", "pass", "step", "commit"}
    assert all(0 <= span["start"] <= span["end"] for span in spans)
    last = got[-1]["duo"]
    assert last["mode"] == "serial"
    assert last["speculation"] == "on"
    assert sum(1 for span in spans if span["did"] in {"prompt", "pass"}) == last["stats"]["rounds"] == tokens[-1]["round"]
    assert got[-1]["timings"]["predicted_n"] == len(tokens) == last["stats"]["new_tokens"]


def test_the_same_in_one_piece(server):
    _, whole = server.chat("hello", duo={"tokens": True, "timeline": True})
    streamed = chunks(server, asking(duo={"tokens": True}))
    tokens = [token for chunk in streamed[:-1] for token in chunk["duo"]["tokens"]]
    for name in ("id", "text", "logprob"):  # who guessed them, and when, is a matter of time
        assert [token[name] for token in whole["duo"]["tokens"]] == [token[name] for token in tokens]
    assert whole["duo"]["stats"]["new_tokens"] == whole["usage"]["completion_tokens"]
    assert {span["lane"] for span in whole["duo"]["spans"]} == {"target", "draft"}


def test_only_who_asks_is_told(server):
    _, whole = server.chat("hello")
    assert "duo" not in whole
    _, whole = server.chat("hello", duo={})
    assert set(whole["duo"]) == {"stats", "mode", "speculation"}
    assert all("duo" not in chunk for chunk in chunks(server, asking()))


def test_timings_are_those_of_llama_server(server):
    _, whole = server.chat("hello there", duo={"mode": "chain"})  # which guesses whatever it costs
    timings = whole["timings"]
    assert timings["prompt_n"] + timings["cache_n"] == whole["usage"]["prompt_tokens"]
    assert timings["predicted_n"] == whole["usage"]["completion_tokens"]
    assert timings["predicted_per_second"] == pytest.approx(1e3 * timings["predicted_n"] / timings["predicted_ms"])
    assert timings["prompt_per_token_ms"] * timings["prompt_n"] == pytest.approx(timings["prompt_ms"])
    assert 0 < timings["draft_n_accepted"] <= timings["draft_n"]


def test_info(server):
    status, info = server.ask("/duo/info")
    assert status == 200
    assert info["modes"] == ["off", "chain", "serial"]
    assert (info["mode"], info["model"], info["context"]) == ("serial", "target", 512)
    assert info["defaults"]["max_tokens"] == DEFAULTS.max_tokens


# Text and tokens


def test_tokenize_and_back(server):
    assert server.ask("/tokenize", {"content": "abé"}) == (200, {"tokens": [99, 100, 197, 171]})
    assert server.ask("/tokenize", {"content": "a", "add_special": True}) == (200, {"tokens": [0, 99]})
    assert server.ask("/detokenize", {"tokens": [99, 100, 197, 171]}) == (200, {"content": "abé"})
    assert server.ask("/detokenize", {"tokens": [197]}) == (200, {"content": "\ufffd"})
    assert server.ask("/detokenize", {"tokens": [5000]})[0] == 400
    long = "ab" * app.INLINE_BYTES  # beyond what is done on the event loop
    status, answer = server.ask("/tokenize", {"content": long})
    assert (status, len(answer["tokens"])) == (200, len(long))


# Errors have one shape


@pytest.mark.parametrize(
    ("path", "body", "method", "status"),
    [
        ("/nowhere", None, "GET", 404),
        ("/v1/chat", {}, "POST", 404),
        ("/v1/models/none", None, "GET", 404),
        (CHAT, None, "GET", 405),
        ("/health", {}, "POST", 405),
        (CHAT, b"", "POST", 400),
        (CHAT, b"{", "POST", 400),
        (CHAT, b"[]", "POST", 400),
        (CHAT, b'{"messages": "\xff"}', "POST", 400),
        (CHAT, b'{"messages": "\\ud800"}', "POST", 400),
        (CHAT, b"[" * 100_000, "POST", 400),
        (CHAT, b'{"a":' * 50_000, "POST", 400),
        (CHAT, asking(temperature=float("nan")), "POST", 400),
        (CHAT, asking(max_tokens=10**40), "POST", 400),
        ("/v1/completions", {"prompt": []}, "POST", 400),
        ("/v1/completions", {"prompt": [[]]}, "POST", 400),
        ("/v1/completions", {"prompt": [1, "a"]}, "POST", 400),
        ("/v1/completions", {"prompt": ["a", "b"]}, "POST", 400),
        ("/v1/completions", {"prompt": [9999]}, "POST", 400),
        ("/v1/completions", {"prompt": "a", "echo": True}, "POST", 400),
        ("/v1/completions", {"prompt": "a", "suffix": "b"}, "POST", 400),
    ],
)
def test_an_error_has_the_one_shape(server, path, body, method, status):
    got, answer = server.ask(path, body, method=method)
    assert got == status
    assert set(answer) == {"error"}
    assert set(answer["error"]) == {"message", "type", "param", "code"}


def test_what_changes_nothing_is_accepted(server):
    neutral = {"n": 1, "tools": [], "store": False, "user": "u", "metadata": {"a": "b"}, "echo": None, "seed": None, "suffix": None}
    assert server.chat("hello", **neutral, modalities=["text"], cache_prompt=True)[0] == 200
    assert server.chat("hello", n=True)[0] == 400


def test_another_content_type(server):
    status, answer = server.ask(CHAT, asking(), headers={"Content-Type": "text/plain"})
    assert status == 400
    assert "Content-Type" in answer["error"]["message"]


def test_a_body_that_is_too_large(server):
    with live(max_body_mb=1) as small:
        assert small.ask(CHAT, asking("x" * (2 << 20)))[0] == 413
        connection = http.client.HTTPConnection(urlsplit(small.url).netloc, timeout=60)
        parts = (b"x" * (1 << 19) for _ in range(6))  # chunked: it does not say how long it is
        connection.request("POST", CHAT, parts, {"Content-Type": "application/json"}, encode_chunked=True)
        response = connection.getresponse()
        assert response.status == 413
        assert "error" in json.loads(response.read())
        connection.close()
        assert small.chat("hello")[0] == 200


def talk(server: Live, *frames: bytes) -> bytes:
    """What a server answers to bytes, until it hangs up."""
    where = urlsplit(server.url)
    with socket.create_connection((where.hostname, where.port), timeout=60) as sock:
        for frame in frames:
            sock.sendall(frame)
        answer = b""
        while data := sock.recv(1 << 16):
            answer += data
    return answer


def test_what_is_no_http(server):
    answer = talk(server, b"GET / HTTP/9\r\nnonsense\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b'{"error":{"message":' in answer


@pytest.mark.parametrize("host", [b"[", b"a b", b"evil.example"])
def test_the_host_header_decides_nothing(server, host):
    answer = talk(server, b"GET /nowhere/ HTTP/1.1\r\nHost: " + host + b"\r\nConnection: close\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 404 ")
    assert b"evil" not in answer


def test_the_page(server):
    status, data, headers = server.raw("/")
    assert status == 200
    assert b"<html" in data
    policy = dict(part.strip().split(" ", 1) for part in headers["content-security-policy"].split(";"))
    assert policy["default-src"] == policy["connect-src"] == "'self'"
    assert policy["script-src"] == "'unsafe-inline'"


def test_slow_senders_are_hung_up_on(server, monkeypatch):
    monkeypatch.setattr(gate, "BODY_SECONDS", 0.1)
    head = b"POST /tokenize HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n"
    answer = talk(server, head, b'{"content"')
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b'{"error":{"message":' in answer
    monkeypatch.setattr(run, "HEADER_SECONDS", 0.1)
    assert talk(server, b"POST /tokenize HTTP/1.1\r\nHos") == b""
    assert talk(server) == b""


# Keys and origins


def test_without_a_key_nothing_is_told():
    with live(api_key=("sésame".encode().hex(), "second")) as server:
        for given in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "second"}, {"Authorization": "Bearer sec\xf6nd"}):
            for path in (CHAT, "/v1/models", "/duo/info", "/metrics", "/version", "/openapi.json", "/nowhere", "/tokenize"):
                status, data, headers = server.raw(path, headers=given)
                assert status == 401
                assert headers["www-authenticate"] == "Bearer"
                assert b"second" not in data
                assert b"target" not in data
        assert server.ask("/health") == (200, {"status": "ok"})
        assert server.ask("/v1/models", headers={"Authorization": "bearer second"})[0] == 200


def test_other_origins():
    with live(cors_origins=("https://good.example",)) as server:
        good, bad = {"Origin": "https://good.example"}, {"Origin": "https://bad.example"}
        asks = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
        status, _, headers = server.raw(CHAT, headers=good | asks, method="OPTIONS")
        assert status == 204
        assert headers["access-control-allow-origin"] == "https://good.example"
        assert headers["access-control-allow-headers"] == "authorization"
        assert server.raw(CHAT, headers=bad | asks, method="OPTIONS")[0] == 405
        assert "access-control-allow-origin" not in server.raw("/health", headers=bad)[2]
        assert server.raw("/health", headers=good)[2]["access-control-allow-origin"] == "https://good.example"


# Loading


def test_it_listens_before_the_model_is_loaded():
    go = threading.Event()

    def load() -> LLM:
        go.wait(60)
        return speaker()

    with live(load, wait=False, api_key=("k",)) as server:
        key = {"Authorization": "Bearer k"}
        eventually(lambda: server.server.started)
        status, data, _ = server.raw("/health")
        assert status == 503
        assert b"loaded" in data
        status, _, headers = server.raw(CHAT, asking(), headers=key)
        assert status == 503
        assert int(headers["retry-after"]) > 0
        assert server.raw("/version", headers=key)[0] == 200
        go.set()
        eventually(lambda: server.ask("/health")[0] == 200)


def test_a_model_that_cannot_be_loaded_ends_the_server():
    def load() -> LLM:
        raise ModelNotFound("no such model")

    with live(load, wait=False) as server:
        eventually(lambda: server.server.should_exit)
        assert isinstance(server.engines.error, ModelNotFound)


# The queue


def test_clients_take_turns():
    queue = FairQueue()
    jobs = [Job(client, [1], DEFAULTS) for client in "aaaabbc"]
    for job in jobs:
        queue.push(job)
    assert queue.remove(jobs[4])
    assert not queue.remove(jobs[4])
    assert len(queue) == 6
    assert "".join(queue.pop().client for _ in range(6)) == "abcaaa"
    assert len(queue) == 0


def test_a_full_queue_turns_requests_away():
    with live(lambda: speaker(delay=0.02, end=-100.0), max_queue=1) as server:
        found: list[tuple[int, dict]] = []

        def ask() -> None:
            found.append(server.chat("hello", max_tokens=100))

        threads = [threading.Thread(target=ask) for _ in range(2)]
        for number, thread in enumerate(threads):
            thread.start()
            eventually(lambda n=number: server.engines.running == 1 and len(server.engines.queue) == n)
        status, data, headers = server.raw(CHAT, asking())
        assert status == 429
        assert int(headers["retry-after"]) > 0
        assert json.loads(data)["error"]["code"] == "queue_full"
        for thread in threads:
            thread.join()
        assert [status for status, _ in found] == [200, 200]
        assert found[0][1]["choices"] == found[1][1]["choices"]


def test_leaving_the_queue():
    with live(lambda: speaker(delay=0.02, end=-100.0)) as server:
        where = urlsplit(server.url)
        sockets = []
        for number in range(2):
            sockets.append(socket.create_connection((where.hostname, where.port)))
            body = json.dumps(asking(max_tokens=400)).encode()
            head = f"POST {CHAT} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            sockets[-1].sendall(head.encode() + body)
            eventually(lambda n=number: server.engines.running == 1 and len(server.engines.queue) == n)
        sockets[1].close()
        eventually(lambda: len(server.engines.queue) == 0)
        assert server.engines.running == 1
        sockets[0].close()
        eventually(lambda: server.engines.running == 0)


def test_two_engines_answer_at_the_same_time():
    with live(lambda: speaker(delay=0.01, end=-100.0), parallel=2) as server:
        found: list[str] = []
        threads = [
            threading.Thread(
                target=lambda: found.append(server.chat("hello", max_tokens=60)[1]["choices"][0]["message"]["content"])
            )
            for _ in range(2)
        ]
        for thread in threads:
            thread.start()
        eventually(lambda: server.engines.running == 2)
        for thread in threads:
            thread.join()
        assert found[0] == found[1]


# Time


def test_a_request_that_takes_too_long():
    with live(lambda: speaker(delay=0.02, end=-100.0), request_timeout=0.3) as server:
        status, answer = server.chat("hello", max_tokens=400)
        assert status == 503
        assert answer["error"]["code"] == "timeout"
        events = [json.loads(event) for event in server.events(CHAT, asking(max_tokens=400))]
        assert events[-1]["error"]["code"] == "timeout"
        assert all("error" not in event for event in events[:-1])
        eventually(lambda: server.engines.running == 0)


def test_pings_while_nothing_comes(monkeypatch):
    monkeypatch.setattr(reply, "PING_SECONDS", 0.02)
    with live(lambda: speaker(delay=0.2)) as server:
        _, data, headers = server.raw(CHAT, asking(stream=True, max_tokens=2))
        assert data.startswith(b": ping\n\n")
        assert headers["content-type"].startswith("text/event-stream")
        assert data.endswith(b"data: [DONE]\n\n")


def test_a_stream_that_outlasts_the_grace_ends_with_an_error(monkeypatch):
    monkeypatch.setattr(run, "GRACE_SECONDS", 0.2)
    with live(lambda: speaker(delay=0.02, end=-100.0)) as server:
        found: list[bytes] = []
        reader = threading.Thread(target=lambda: found.append(server.raw(CHAT, asking(stream=True, max_tokens=450))[1]))
        reader.start()
        eventually(lambda: server.engines.running == 1)
        server.server.should_exit = True
        reader.join()
        last = found[0].decode().strip().split("\n\n")[-1]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "shutting_down"


# For operators


def test_metrics(server):
    def value(name: str) -> float:
        lines = server.raw("/metrics")[1].decode().splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.split("{")[0].split()[0] == f"duo:{name}")

    names = ("drafts", "draft_tokens", "accepted_tokens", "accepted_tokens_per_pos")
    before = {name: value(f"spec_decode_num_{name}_total") for name in names}
    first, generated = value("time_to_first_token_seconds_count"), value("generation_tokens_total")
    _, answer = server.chat("hello metrics", duo={"timeline": True})
    stats = answer["duo"]["stats"]
    gained = {name: value(f"spec_decode_num_{name}_total") - before[name] for name in names}
    drafts = sum(1 for span in answer["duo"]["spans"] if span["did"] == "pass" and span["nodes"] > 1)
    assert gained == {
        "drafts": drafts,
        "draft_tokens": stats["verified"],
        "accepted_tokens": stats["accepted"],
        "accepted_tokens_per_pos": stats["accepted"],
    }
    assert value("time_to_first_token_seconds_count") == first + 1
    assert value("generation_tokens_total") == generated + stats["new_tokens"]
    assert value("num_requests_running") == value("num_requests_waiting") == 0
    for name in ("target_idle_seconds_total", "draft_idle_seconds_total", "inter_token_latency_seconds_sum"):
        assert value(name) > 0
    errors = value("request_errors_total")
    server.ask("/nowhere")
    assert value("request_errors_total") == errors + 1


def test_several_conversations_are_told_apart(server):
    """Interleaved requests say what each says alone."""
    alone = {text: server.chat(text)[1]["choices"] for text in ("one", "two", "three")}
    found: dict[str, list[object]] = {text: [] for text in alone}

    def ask(text: str) -> None:
        for _ in range(5):
            found[text].append(server.chat(text)[1]["choices"])

    threads = [threading.Thread(target=ask, args=(text,)) for text in alone]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {text: [choices] * 5 for text, choices in alone.items()}


def test_no_time_is_lost_when_idle(server):
    """A kept connection answers again and again."""
    connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=60)
    for _ in range(3):
        connection.request("GET", "/health")
        assert json.loads(connection.getresponse().read()) == {"status": "ok"}
        time.sleep(0.01)
    connection.close()
