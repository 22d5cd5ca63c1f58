"""A server that plays scripted answers, for tests of the page: the same bytes every time, at a pace of their choice."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import duodecoding

PAGE = Path(duodecoding.__file__).parent / "server" / "page.html"
INFO: dict[str, Any] = {
    "version": "0",
    "model": "scripted",
    "draft": "small",
    "mode": "duo",
    "modes": ["off", "chain", "serial", "lockstep", "duo"],
    "speculation": "on",
    "context": 4096,
    "defaults": {"temperature": 0.0, "top_p": 1.0, "max_tokens": 512, "seed": 0},
}
ANSWER = "Hello there, you and you too again."  # what HELLO says
Round = Sequence[tuple[str, str]]  # tokens with their sources
HELLO: list[Round] = [
    [("Hello", "target")],
    [(" there", "model"), (",", "model"), (" you", "target")],
    [(" and", "lookup"), (" you", "lookup"), (" too", "target")],
    [(" again", "recycling"), (".", "target")],
]


def words(text: str, source: str = "target") -> list[Round]:
    """A text as rounds of one token each: a word with the space before it."""
    parts = text.split(" ")
    return [[(part if i == 0 else " " + part, source)] for i, part in enumerate(parts)]


class Stub:
    """Answers `answers[last message]`, else HELLO. Knows what it was asked, and whether a client left in mid-answer."""

    def __init__(self) -> None:
        self.answers: dict[str, list[Round]] = {}
        self.pace = {"off": 0.0, "duo": 0.0}  # seconds between rounds
        self.go_on = threading.Event()  # cleared: an answer stands still after its first round
        self.go_on.set()
        self.key = ""
        self.fails: dict[str, Any] | None = None  # an error in mid-stream
        self.asked: list[dict[str, Any]] = []
        self.client_left = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}/"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def chunks(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        mode = body["duo"]["mode"] or INFO["mode"]
        rounds = self.answers.get(body["messages"][-1]["content"], HELLO)
        if mode == "off":
            rounds = [[(text, "target")] for tokens in rounds for text, _ in tokens]
        rounds = rounds[: body.get("max_tokens", len(rounds))]
        for number, tokens in enumerate(rounds, 1):
            time.sleep(self.pace[mode])
            if number > 1:
                self.go_on.wait(60)
            listed = [{"id": 7, "text": text, "source": source, "logprob": -0.0513, "round": number} for text, source in tokens]
            delta = {"content": "".join(text for text, _ in tokens)}
            yield {
                "choices": [{"index": 0, "delta": delta, "finish_reason": None}],
                "duo": {"tokens": listed, "spans": _spans(number, len(tokens), mode)},
            }
            if self.fails:
                yield {"error": self.fails}
                return
        yield {
            "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}],
            "duo": {"stats": _stats(rounds, mode), "mode": mode, "speculation": "on"},
        }


def _spans(number: int, gained: int, mode: str) -> list[dict[str, Any]]:
    """A round of 10 ms after a wait of 2, the prompt first, with draft steps of 3 ms."""
    start = number * 0.012
    if number == 1:
        return [{"lane": "target", "did": "prompt", "start": 0.0, "end": 0.02, "tokens": 12}]
    spans: list[dict[str, Any]] = [
        {"lane": "target", "did": "pass", "start": start, "end": start + 0.01, "nodes": 1 + 2 * (gained - 1), "gained": gained},
        {"lane": "target", "did": "commit", "start": start + 0.01, "end": start + 0.01, "gained": gained},
    ]
    if mode != "off":
        spans.append({"lane": "target", "did": "wait", "start": start - 0.002, "end": start})
        spans += [
            {"lane": "draft", "did": "step", "start": start + i * 0.004, "end": start + i * 0.004 + 0.003, "leaves": 1 + i}
            for i in range(3)
        ]
    return spans


def _stats(rounds: list[Round], mode: str) -> dict[str, Any]:
    new = sum(len(tokens) for tokens in rounds)
    accepted = new - len(rounds)
    seconds = 2.0 if mode == "off" else 0.8
    return {
        "prompt_tokens": 12,
        "reused_tokens": 11,
        "new_tokens": new,
        "seconds": seconds,
        "tokens_per_second": new / seconds,
        "rounds": len(rounds),
        "tokens_per_round": new / max(len(rounds), 1),
        "verified": 2 * accepted,
        "accepted": accepted,
    }


def _handler(stub: Stub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *args: object) -> None:
            pass

        def do_GET(self) -> None:
            if self.path == "/":
                self._send(200, PAGE.read_bytes(), "text/html; charset=utf-8")
            elif self.path == "/duo/info" and self._allowed():
                self._send(200, json.dumps(INFO).encode())

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if not self._allowed():
                return
            stub.asked.append(body)
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            try:
                self.wfile.write(b": a comment while the prompt is read\n\n")
                for chunk in stub.chunks(body):
                    self.wfile.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
                    self.wfile.flush()
                self.wfile.write(b"data: [DONE]\n\n")
            except OSError:
                stub.client_left.set()

        def _allowed(self) -> bool:
            if not stub.key or self.headers.get("Authorization") == f"Bearer {stub.key}":
                return True
            self._send(401, b'{"error": {"message": "wrong key", "type": "auth", "param": null, "code": "invalid_api_key"}}')
            return False

        def _send(self, status: int, body: bytes, kind: str = "application/json") -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    return Handler


def ask(page: Any, text: str) -> None:
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")


def ask_and_wait(page: Any, text: str) -> Any:
    """The last answer, finished."""
    ask(page, text)
    page.locator(".answer").last.locator("footer button").first.wait_for()
    return page.locator(".answer").last
