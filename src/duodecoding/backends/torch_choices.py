"""The target's token after every row of a pass: sampled on the device, fetched by one copy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from duodecoding.backends import torch_sampling
from duodecoding.backends.torch_graphs import capture
from duodecoding.backends.torch_sampling import History
from duodecoding.sampling import Choice, Sampler
from duodecoding.types import SamplingParams

DEPTHS = (8, 32, 128)  # columns of the table of paths, which penalties need
KEPT_GRAPHS = 64  # of sampling; each is small, but every new setting of the parameters makes some

PathOf = Callable[[int], Sequence[int]]  # row -> the guesses that lead to it


class Voice:
    """The sampling of one answer: its parameters and what penalties must know."""

    def __init__(self, params: SamplingParams, prompt: Sequence[int], vocab: int) -> None:
        self.params = params
        self.sampler = Sampler(params, prompt, vocab)
        self.prompt = list(prompt) if params.repetition_penalty != 1 else []
        self.answer: list[int] = []
        self.counts = bool(params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty)
        self.asks = self.counts or not params.greedy  # does the device want anything but the logits?
        self.bias = {token: bias for token, bias in params.logit_bias.items() if token < vocab}
        # All that the arithmetic on the device depends on, except for the seed.
        self.kind = replace(params, max_tokens=1, seed=0, stop=(), ignore_eos=False, logit_bias={}, json_schema="", top_logprobs=0)
        self.key = repr(self.kind)

    def commit(self, tokens: Sequence[int]) -> None:
        self.sampler.commit(tokens)
        self.answer.extend(tokens)


class Table:
    """Arguments and results for a number of rows, in buffers that stay: one copy in, one out."""

    def __init__(self, rows: int, depth: int, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self.rows, self.depth = rows, depth
        self._host = torch.zeros(1 + rows * (1 + depth), dtype=torch.int64, pin_memory=pinned)
        self._view = self._host.numpy()
        self._device = self._host.to(device) if pinned else self._host
        self.seed, self.positions = self._device[0], self._device[1 : 1 + rows]
        self.paths = self._device[1 + rows :].view(rows, depth)
        self.found = torch.zeros((3, rows), dtype=torch.float64, device=device)
        self._fetched = torch.zeros((3, rows), dtype=torch.float64, pin_memory=pinned) if pinned else self.found
        self._results = memoryview(self._fetched.numpy().reshape(-1))
        self._done: Any = torch.cuda.Event() if pinned else None
        self._under_way = False

    def fill(self, seed: int, positions: Sequence[int], path_of: PathOf) -> None:
        view = self._view
        view[0] = seed
        view[1 : 1 + len(positions)] = positions
        if self.depth:
            table = view[1 + self.rows :].reshape(self.rows, self.depth)
            table[:] = -1
            for i in range(len(positions)):
                path = path_of(i)
                table[i, : len(path)] = path

    def send(self) -> None:
        """What was filled in last, to the device."""
        if self._device is not self._host:
            self._device.copy_(self._host, non_blocking=True)

    def send_back(self) -> None:
        """What the device found."""
        if self._fetched is not self.found:
            self._fetched.copy_(self.found, non_blocking=True)

    def launched(self) -> None:
        """All of that is on its way."""
        if self._done is not None:
            self._done.record()
            self._under_way = True

    def done(self) -> bool:
        """Are the results there?"""
        return not self._under_way or bool(self._done.query())

    def wait(self) -> None:
        """For the results: the one synchronisation of a round."""
        if self._under_way:
            self._done.synchronize()
            self._under_way = False

    def result(self, row: int) -> tuple[int, float, bool]:
        """Its token, that one's log-probability, and whether the device was unsure."""
        self.wait()
        found, rows = self._results, self.rows
        return int(found[row]), found[rows + row], bool(found[2 * rows + row])


class Chooser:
    """Samples for one voice at a time; its counts and biases are on the device."""

    def __init__(self, device: torch.device, vocab: int, stream: Any = None) -> None:
        """`stream`: for captures of graphs; None: there are none."""
        self._device, self._stream = device, stream
        self._tables: dict[tuple[int, int], Table] = {}
        self._graphs: dict[tuple[Any, ...], Any] = {}
        self._voice: Voice | None = None
        self._running: Table | None = None
        self._counts = torch.zeros(vocab, device=device)
        self._seen = torch.zeros(vocab, dtype=torch.bool, device=device)
        self._bias = torch.zeros(vocab, device=device)

    def attach(self, voice: Voice) -> None:
        self._voice = voice
        if voice.counts:
            self._counts.zero_()
            self._count(voice.answer)
            self._seen.zero_()
            self._seen[torch.tensor(voice.prompt, dtype=torch.int64).to(self._device)] = True
        if voice.bias:
            ids = torch.tensor(list(voice.bias)).to(self._device)
            self._bias.zero_()
            self._bias[ids] = torch.tensor(list(voice.bias.values()), dtype=torch.float32).to(self._device)

    def commit(self, voice: Voice, tokens: Sequence[int]) -> None:
        voice.commit(tokens)
        if voice.counts and voice is self._voice:
            self._count(tokens)

    def _count(self, tokens: Sequence[int]) -> None:
        ids = torch.tensor(tokens, dtype=torch.int64).to(self._device)
        self._counts.index_add_(0, ids, torch.ones(len(tokens), device=self._device))

    def choose(
        self, logits: torch.Tensor, voice: Voice, positions: Sequence[int], path_of: PathOf, *, stays: bool = True
    ) -> Callable[[int], Choice]:
        """`logits` (rows or more, vocab); `positions` of the chosen tokens.

        `stays`: the logits will be in the same place next time, so that a graph pays. Returns while the device still computes;
        the first question waits for it, and must be asked before the next pass.
        """
        if voice is not self._voice:
            self.attach(voice)
        deepest = max(positions) - min(positions) + 1  # a path is at most that long
        depth = next(d for d in DEPTHS if d >= deepest) if voice.counts else 0
        key = logits.shape[0], depth
        table = self._tables.get(key)
        if table is None:
            table = self._tables[key] = Table(*key, self._device)
        if voice.asks:
            table.fill(voice.params.seed, positions, path_of)
        self._run(logits, voice, table, stays=stays)
        table.launched()
        self._running = table

        def choice(i: int) -> Choice:
            token, logprob, unsure = table.result(i)
            if unsure or voice.sampler.needs_row:
                return voice.sampler.choose(logits[i].cpu().numpy(), positions[i], path_of(i))
            return Choice(token, logprob)

        return choice

    def done(self) -> bool:
        """Are the last pass's tokens there?"""
        return self._running is None or self._running.done()

    def finish(self) -> None:
        """Wait for the last pass's tokens."""
        if self._running is not None:
            self._running.wait()

    def _run(self, logits: torch.Tensor, voice: Voice, table: Table, *, stays: bool) -> None:
        if self._stream is None or not stays:
            self._compute(logits, voice, table)
            return
        key = logits.data_ptr(), table.rows, table.depth, voice.key, bool(voice.bias)
        graph = self._graphs.get(key)
        if graph is None:
            graph = self._capture(key, logits, voice, table)
        graph.replay()

    @torch.no_grad()
    def _compute(self, logits: torch.Tensor, voice: Voice, table: Table) -> None:
        if voice.asks:
            table.send()
        history = History(self._counts, self._seen, table.paths) if voice.counts else None
        bias = self._bias if voice.bias else None
        table.found.copy_(torch_sampling.choose(logits, voice.kind, table.seed, table.positions, history, bias))
        table.send_back()

    def _capture(self, key: tuple[Any, ...], logits: torch.Tensor, voice: Voice, table: Table) -> Any:
        graph, _ = capture(lambda: self._compute(logits, voice, table), self._device, self._stream)
        while len(self._graphs) >= KEPT_GRAPHS:
            self._graphs.pop(next(iter(self._graphs)))
        self._graphs[key] = graph
        return graph

    def close(self) -> None:
        self._running = None
        self._graphs.clear()
        self._tables.clear()
