"""Many answers at once. Every row of the batch is a conversation of its own; one that ends makes room for the next.

Rows have cache slots of their own, so that a step is the same work whoever sits where: on a GPU it is one CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from duodecoding.distill.model import Attend, Llama, attend_within, pack

STEPS = 16  # between two looks at who has finished
PREFILL = 16384  # prompt tokens read in one pass
LENGTHS = (128, 256, 448, 704, 1024)  # prompts are sorted into these classes: attention reads all slots of a row


@dataclass(frozen=True, slots=True)
class Job:
    """A prompt to answer. Temperature 0 is greedy."""

    ids: np.ndarray
    temperature: float = 0.0
    tag: Any = None


def exact_logits(hidden: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
    """In float32: rounded to bfloat16, the best two often tie."""
    if hidden.is_cuda:
        return torch.mm(hidden, head.T, out_dtype=torch.float32)
    return F.linear(hidden.float(), head.float())


class Generator:
    def __init__(self, model: Llama, end_tokens: frozenset[int], *, rows: int, answer: int, dtype: torch.dtype) -> None:
        self.model, self.answer, self.dtype = model, answer, dtype
        self.device = model.head.device
        self.rows = rows
        self._ends = torch.tensor(sorted(end_tokens), device=self.device)
        self._every = torch.arange(rows, device=self.device)
        shape = model.shape
        size = shape.layers * rows * shape.kv_heads * shape.head_dim * (LENGTHS[-1] + answer + 64)
        self._store = [torch.zeros(size, dtype=dtype, device=self.device) for _ in range(2)]
        self._token = torch.zeros(rows, dtype=torch.long, device=self.device)
        self._length = torch.zeros_like(self._token)  # tokens in the row's cache
        self._count = torch.full_like(self._token, answer)  # tokens of its answer; full: nobody sits here
        self._temperature = torch.zeros(rows, device=self.device)
        self._said = torch.zeros(rows, answer, dtype=torch.long, device=self.device)
        self._steps: dict[int, Callable[[], None]] = {}

    def run(self, jobs: Sequence[Job], stop: Callable[[], bool] = lambda: False) -> Iterator[tuple[Job, np.ndarray]]:
        """Each job with its answer, end token included, as they finish. `stop` true: those not yet begun are left out."""
        for longest in LENGTHS:
            shorter = [length for length in LENGTHS if length < longest]
            low = max(shorter, default=0)
            yield from self._run([job for job in jobs if low < len(job.ids) <= longest], longest, stop)

    @torch.no_grad()
    def _run(self, jobs: list[Job], longest: int, stop: Callable[[], bool]) -> Iterator[tuple[Job, np.ndarray]]:
        waiting = sorted(jobs, key=lambda job: len(job.ids))
        seated: dict[int, Job] = {}
        slots = -(-(longest + self.answer) // 64) * 64
        while waiting or seated:
            free = [row for row in range(self.rows) if row not in seated]
            if stop():
                waiting.clear()
            if waiting and (len(free) >= max(1, self.rows // 8) or not seated):
                new = {row: waiting.pop() for row in free[: len(waiting)]}
                self._seat(new, slots)
                seated |= new
            if not seated:
                return
            step = self._step(slots)
            for _ in range(STEPS):
                step()
            yield from self._finished(seated)

    def _finished(self, seated: dict[int, Job]) -> Iterator[tuple[Job, np.ndarray]]:
        counts = self._count.tolist()
        said = self._said.cpu().numpy()
        ends = set(self._ends.tolist())
        for row in [row for row in seated if counts[row] >= self.answer]:
            answer = said[row]
            stops = np.flatnonzero(np.isin(answer, list(ends)))
            yield seated.pop(row), answer[: stops[0] + 1].copy() if len(stops) else answer.copy()

    def _cache(self, slots: int) -> list[torch.Tensor]:
        """Keys and values, (layers, rows, kv_heads, slots, head_dim)."""
        shape = self.model.shape
        size = (shape.layers, self.rows, shape.kv_heads, slots, shape.head_dim)
        return [store[: int(np.prod(size))].view(size) for store in self._store]

    def _seat(self, jobs: dict[int, Job], slots: int) -> None:
        """Read prompts, all but their last token, into the rows' caches; the next step begins with that one."""
        rows = list(jobs)
        on = torch.tensor(rows, device=self.device)
        prompts = [jobs[row].ids for row in rows]
        self._length[on] = torch.tensor([len(ids) - 1 for ids in prompts], device=self.device)
        self._token[on] = torch.tensor([int(ids[-1]) for ids in prompts], device=self.device)
        self._temperature[on] = torch.tensor([jobs[row].temperature for row in rows], device=self.device)
        self._count[on] = 0
        while rows:
            some, total = 0, 0
            while some < len(rows) and (not some or total + len(prompts[some]) <= PREFILL):
                total += len(prompts[some]) - 1
                some += 1
            self._read(rows[:some], [ids[:-1] for ids in prompts[:some]], slots)
            rows, prompts = rows[some:], prompts[some:]

    def _read(self, rows: list[int], texts: list[np.ndarray], slots: int) -> None:
        if not sum(map(len, texts)):
            return
        count = sum(map(len, texts))
        packed = pack(texts, self.device)
        keys, values = self._cache(slots)
        row = torch.tensor(np.repeat(rows, [len(text) for text in texts]), device=self.device)
        place = packed.positions[:count]
        within = attend_within(packed)

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            keys[layer][row, :, place] = k[:count]
            values[layer][row, :, place] = v[:count]
            return within(layer, q, k, v)

        self.model(packed.ids, packed.positions, attend, self.dtype)

    def _step(self, slots: int) -> Callable[[], None]:
        if slots not in self._steps:
            self._steps[slots] = self._captured(slots) if self.device.type == "cuda" else lambda: self._one(slots)
        return self._steps[slots]

    def _captured(self, slots: int) -> Callable[[], None]:
        state = (self._token, self._length, self._count, self._said, self._temperature)
        before = [tensor.clone() for tensor in state]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self._one(slots)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._one(slots)
        for tensor, value in zip(state, before, strict=True):  # what the trial steps did; the cells they wrote are written again
            tensor.copy_(value)
        return graph.replay

    def _one(self, slots: int) -> None:
        """A token for every row. Rows that nobody sits in compute too, and move nothing."""
        hidden = self.model(self._token, self._length, self._attend_cache(slots), self.dtype)
        logits = exact_logits(hidden, self.model.head)
        # The largest of logits plus Gumbel noise is a sample; minus the log of an exponential is such noise.
        noise = -torch.empty_like(logits).exponential_().log_()
        hot = self._temperature > 0
        scaled = logits / torch.where(hot, self._temperature, 1.0)[:, None]
        token = torch.where(hot, (scaled + noise).argmax(-1), logits.argmax(-1))
        sits = self._count < self.answer
        place = self._count.clamp(max=self.answer - 1)
        self._said[self._every, place] = torch.where(sits, token, self._said[self._every, place])
        over = (token[:, None] == self._ends).any(-1)
        self._token.copy_(torch.where(sits, token, self._token))
        self._length += sits
        self._count.copy_(torch.where(sits & over, self.answer, self._count + sits))

    def _attend_cache(self, slots: int) -> Attend:
        keys, values = self._cache(slots)
        shape = self.model.shape
        seen = torch.arange(slots, device=self.device) <= self._length[:, None]  # (rows, slots)
        mask = torch.zeros(self.rows, slots, dtype=self.dtype, device=self.device).masked_fill_(~seen, float("-inf"))[:, None, None]

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            keys[layer][self._every, :, self._length] = k
            values[layer][self._every, :, self._length] = v
            grouped = q.view(self.rows, shape.kv_heads, -1, shape.head_dim)  # heads that share keys: queries of one
            out = F.scaled_dot_product_attention(grouped, keys[layer], values[layer], attn_mask=mask)
            return out.reshape(self.rows, shape.heads, shape.head_dim)

        return attend
