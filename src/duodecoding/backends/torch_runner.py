"""Passes over rows of fixed shapes. On a GPU each shape is one CUDA graph; on a CPU the same code runs as it is.

Knows tokens, positions, ancestors and slots; not conversations, not sampling.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from duodecoding.backends.torch_slots import CacheShape, Slots, tree_mask

NODE_BUCKETS = (1, 8, 16, 64, 128)  # not 32: on a GPU its rows came out otherwise than one by one (benchmarks/h200_rows.py)
CONTEXT_BUCKETS = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
CHUNK = {"cpu": 512, "cuda": 4096}  # tokens of a prompt in one pass
WARM_PASSES = 2  # before a capture: kernels are compiled, libraries set themselves up

Progress = Callable[[str, float], None]


@dataclass(frozen=True, slots=True)
class Rows:
    """One pass: `parents[i]` is a row before i, or -1 for one that hangs under the committed tokens before `first`."""

    first: int  # slot and position of the first row; all committed tokens lie before it
    tokens: Sequence[int]
    parents: Sequence[int]
    depths: list[int] = field(init=False)

    def __post_init__(self) -> None:
        depths: list[int] = []
        for parent in self.parents:
            depths.append(0 if parent < 0 else depths[parent] + 1)
        object.__setattr__(self, "depths", depths)

    def path(self, row: int) -> list[int]:
        """Rows from the top down to this one."""
        rows = []
        while row >= 0:
            rows.append(row)
            row = self.parents[row]
        return rows[::-1]


class Inputs:
    """The arguments of a pass in one device buffer, filled by one copy: tokens, positions and a table of the paths.

    A line of the table: slot of the first row, depth of this row, then its ancestors (row numbers) by depth, itself the last.
    """

    def __init__(self, rows: int, device: torch.device) -> None:
        self.rows = rows
        self._host = torch.zeros((4 + rows, rows), dtype=torch.int32, pin_memory=device.type == "cuda")
        self._device = self._host.to(device) if device.type == "cuda" else self._host
        self._view, self._lines = self._host.numpy(), self._host.numpy()[2:].reshape(rows, 2 + rows)
        self._numbers = np.arange(rows)
        self.tokens, self.positions = self._device[0], self._device[1]
        self.table = self._device[2:].view(rows, 2 + rows)

    def fill(self, rows: Rows) -> None:
        """Rows beyond those given are padding: they hang beside the first row and nobody sees them."""
        count, lines = len(rows.tokens), self._lines
        depths = np.array(rows.depths)
        self._view[0, :count], self._view[0, count:] = rows.tokens, rows.tokens[0]
        self._view[1, :count], self._view[1, count:] = depths, 0
        self._view[1] += rows.first
        lines[:, 0] = rows.first
        lines[:count, 1], lines[count:, 1] = depths, 0
        lines[count:, 2] = self._numbers[count:]
        lines[self._numbers[:count], 2 + depths] = self._numbers[:count]
        parents = np.array(rows.parents)
        for depth in range(1, int(depths.max()) + 1):  # a level at a time: trees are wide rather than deep
            level = np.flatnonzero(depths == depth)
            lines[level, 2 : 2 + depth] = lines[parents[level], 2 : 2 + depth]
        if self._device is not self._host:
            self._device.copy_(self._host, non_blocking=True)


class Runner:
    """The model with its slots."""

    def __init__(self, model: Any, context: int, room: int, *, compile: bool = False, kernels: bool = True) -> None:
        self.model = model
        self.device: torch.device = next(model.parameters()).device
        self.graphs = self.device.type == "cuda"
        self.node_buckets = (*(n for n in NODE_BUCKETS if n < room), room)
        slots = context + room
        self.context_buckets = (*(n for n in CONTEXT_BUCKETS if n < slots), slots)
        self.slots = Slots(CacheShape.of(model.config.get_text_config()), slots, self.device, model.dtype)
        self._fast = None
        if self.graphs:
            from duodecoding.backends.torch_fast import Fast

            self._fast = Fast(model, self.slots, compile=compile, kernels=kernels)
        self._inputs: dict[int, Inputs] = {}
        self._captured: dict[tuple[int, int], tuple[Any, torch.Tensor]] = {}
        self._pool: Any = None

    def read(self, tokens: Sequence[int], start: int) -> torch.Tensor:
        """A stretch of text behind `start` committed tokens: the logits after its last token, (1, vocab)."""
        step = CHUNK[self.device.type]
        logits = torch.empty(0)
        for offset in range(0, len(tokens), step):
            logits = self._read_chunk(tokens[offset : offset + step], start + offset)
        return logits

    def _read_chunk(self, tokens: Sequence[int], start: int) -> torch.Tensor:
        end = start + len(tokens)
        ids = torch.tensor(tokens, dtype=torch.int32).to(self.device)
        places = torch.arange(start, end, device=self.device)
        return self._forward(ids, places, places, None, end, keep=1)

    def decode(self, rows: Rows) -> torch.Tensor:
        """The logits after every row, (rows or more, vocab) float32. Valid until the next pass."""
        count = self._bucket(len(rows.tokens))
        length = next(n for n in self.context_buckets if n >= rows.first + count)
        inputs = self._inputs.get(count)
        if inputs is None:
            inputs = self._inputs[count] = Inputs(count, self.device)
        inputs.fill(rows)
        if not self.graphs:
            return self._step(inputs, length)
        graph, logits = self._captured.get((count, length)) or self._capture(inputs, length)
        graph.replay()
        return logits

    def _bucket(self, rows: int) -> int:
        if not self.graphs:  # nothing to capture, so no reason to pad
            return rows
        return next(n for n in self.node_buckets if n >= rows)

    def _step(self, inputs: Inputs, length: int) -> torch.Tensor:
        places = inputs.table[0, 0] + torch.arange(inputs.rows, device=self.device)
        table = self._fast is not None and self._fast.takes_table
        mask = inputs.table[None, None] if table else tree_mask(inputs.table, length)
        return self._forward(inputs.tokens, inputs.positions, places, mask, length)

    def _capture(self, inputs: Inputs, length: int) -> tuple[Any, torch.Tensor]:
        """One CUDA graph for this number of rows and this much context."""
        assert self._fast is not None
        check, self.slots.check = self.slots.check, None
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream), self._fast.compiled():
            for _ in range(WARM_PASSES):
                self._step(inputs, length)
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, stream=stream):
                logits = self._step(inputs, length)
        torch.cuda.current_stream(self.device).wait_stream(stream)
        self._pool = self._pool or graph.pool()
        self.slots.check = check
        self._captured[inputs.rows, length] = graph, logits
        return graph, logits

    def prepare(self, progress: Progress, sizes: Sequence[int] = (), lengths: Sequence[int] = ()) -> None:
        """Capture ahead: all numbers of rows and amounts of context, or those given."""
        wanted = [(n, length) for length in lengths or self.context_buckets for n in sizes or self.node_buckets if n < length]
        for done, (n, length) in enumerate(wanted):
            progress(f"preparing passes over {n} tokens, context {length}", done / len(wanted))
            if self.graphs and (n, length) not in self._captured:
                self.decode(Rows(length - n, [0] * n, range(-1, n - 1)))

    @torch.no_grad()
    def _forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        places: torch.Tensor,
        mask: torch.Tensor | None,
        length: int,
        keep: int = 0,
    ) -> torch.Tensor:
        self.slots.slots, self.slots.length = places, length
        out = self.model(
            input_ids=tokens[None],
            position_ids=positions[None],
            attention_mask=mask,
            past_key_values=self.slots,
            use_cache=True,
            logits_to_keep=keep,
        )
        logits: torch.Tensor = out.logits[0].float()
        return logits

    def close(self) -> None:
        self._captured.clear()
        self._inputs.clear()
        self._fast = self._pool = None
        self.model = self.slots = None  # type: ignore[assignment]
