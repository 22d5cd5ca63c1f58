"""llama.cpp's own server with its own speculative decoding as a peer, when `llama-server` is on the PATH."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from typing import IO, Any

from duodecoding.bench.peers import Contender, Ground, Said
from duodecoding.errors import BackendFailure, BackendMissing
from duodecoding.types import SamplingParams

PROGRAM = "llama-server"
START_SECONDS = 300.0
ANSWER_SECONDS = 600.0


def create(ground: Ground) -> Contender:
    program = shutil.which(PROGRAM)
    if program is None:
        raise BackendMissing(f"{PROGRAM} is left out", "it is not on the PATH")
    if not ground.target_file.is_file() or hasattr(ground.target, "_runner"):
        raise BackendMissing(f"{PROGRAM} is left out", "the target is not run from a GGUF file")
    config, port = ground.config, _free_port()
    command = [program, "-m", str(ground.target_file), "-c", str(config.ctx_size), "--host", "127.0.0.1", "--port", str(port)]
    command += ["-np", "1", *(["-t", str(config.threads)] if config.threads else [])]
    command += ["-ngl", "999" if config.gpu_layers < 0 else str(config.gpu_layers)]
    if ground.draft_file is not None:
        command += ["-md", str(ground.draft_file), "-ngld", "0"]
    vocabulary = ground.target.vocabulary
    end = vocabulary.tokenize(vocabulary.eos_text, special=True, bos=False)
    return LlamaServer(command, f"http://127.0.0.1:{port}", ground.per_task, end)


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


class LlamaServer:
    def __init__(self, command: Sequence[str], url: str, per_task: int, end: list[int]) -> None:
        """`end`: the end of text, a token of the answer for all others; the server leaves it out."""
        self.name, self.per_task, self._url, self._end = PROGRAM, per_task, url, end
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log)
        try:
            self._wait_ready()
        except BaseException:
            self.close()
            raise

    def _wait_ready(self) -> None:
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end:
            if self._process.poll() is not None:
                raise BackendMissing(f"{PROGRAM} is left out", f"it ended with {self._process.returncode}: {self._last_words()}")
            try:
                urllib.request.urlopen(f"{self._url}/health", timeout=5.0).close()
                return
            except OSError:  # not there yet, or still loading
                time.sleep(0.1)
        raise BackendMissing(f"{PROGRAM} is left out", f"it was not ready after {START_SECONDS:.0f} s")

    def _last_words(self) -> str:
        self._log.seek(0)
        lines = self._log.read().decode("utf-8", "replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"

    def answer(self, prompt: Sequence[int], params: SamplingParams) -> Said:
        body = {
            "prompt": list(prompt),
            "n_predict": params.max_tokens,
            "temperature": params.temperature,
            "top_k": params.top_k,
            "top_p": params.top_p,
            "min_p": params.min_p,
            "seed": params.seed,
            "cache_prompt": False,
            "return_tokens": True,
        }
        start = time.perf_counter()
        reply = self._post("/completion", body)
        seconds = time.perf_counter() - start
        timings, stopped = reply.get("timings", {}), reply.get("stop_type") != "limit"
        tokens = [int(token) for token in reply["tokens"]]
        return {
            "tokens": tokens + self._end if stopped and tokens[-len(self._end) :] != self._end else tokens,
            "finish": "stop" if stopped else "length",
            "seconds": seconds,
            "ttft_seconds": float(timings.get("prompt_ms", 0.0)) / 1e3,
            "drafted": int(timings.get("draft_n", 0)),
        }

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        request = urllib.request.Request(self._url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as reply:
                found: dict[str, Any] = json.load(reply)
                return found
        except (OSError, ValueError) as error:
            raise BackendFailure(f"{PROGRAM} gave no answer", str(error)) from error

    def abort(self) -> None:
        """The answer ends by itself."""

    def close(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(10.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()
