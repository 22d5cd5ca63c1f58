"""Passes over rows of fixed shapes. On a GPU each shape is one CUDA graph; on a CPU the same code runs as it is.

Knows tokens, positions, ancestors and slots; not conversations, not sampling.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from duodecoding.backends.torch_slots import CacheShape, Slots, tree_mask
from duodecoding.tree import ROOT

NODE_BUCKETS = (1, 8, 16, 32, 64, 128)
CONTEXT_BUCKETS = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
CHUNK = {"cpu": 512, "cuda": 4096}  # tokens of a prompt in one pass
PROMPT_BUCKETS = (64, 128, 256, 512, 1024, 2048)  # of a GPU: longer ones keep it busy without a graph
MOVES = 8  # entries of the KV cache that a pass can move; more get a step of their own
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
    """The arguments of a pass in one device buffer, filled by one copy: tokens, positions, a table of the paths, and entries of the
    KV cache to move first.

    A line of the table: slot of the first row, depth of this row, then its ancestors (row numbers) by depth, itself the last.
    """

    def __init__(self, rows: int, device: torch.device) -> None:
        self.rows = rows
        self.moves_at_most = MOVES if rows > 1 else 0  # a plain pass seldom has any, and should cost nothing more
        ends = 2 * rows + rows * (2 + rows)
        self._host = torch.zeros(ends + 2 * self.moves_at_most, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._device = self._host.to(device) if device.type == "cuda" else self._host
        self._flat = memoryview(self._host.numpy())
        self.tokens, self.positions = self._device[:rows], self._device[rows : 2 * rows]
        self.table = self._device[2 * rows : ends].view(rows, 2 + rows)
        self.moves = self._device[ends:].view(2, self.moves_at_most)  # from, to

    def fill(self, rows: Rows, moves: Sequence[tuple[int, int]] = ()) -> None:
        """Rows beyond those given are padding: they hang beside the first row and nobody sees them. So are moves of slot 0 to
        itself."""
        flat, size, first = self._flat, self.rows, rows.first
        spare = size - len(rows.tokens)
        flat[:size] = array("i", [*rows.tokens, *[rows.tokens[0]] * spare])
        flat[size : 2 * size] = array("i", [*[first + depth for depth in rows.depths], *[first] * spare])
        paths: list[list[int]] = []
        at = 2 * size
        for row, parent in enumerate([*rows.parents, *[ROOT] * spare]):
            path = [*paths[parent], row] if parent >= 0 else [row]
            paths.append(path)
            flat[at : at + 2 + len(path)] = array("i", [first, len(path) - 1, *path])
            at += 2 + size
        if self.moves_at_most:
            still = [0] * (self.moves_at_most - len(moves))
            flat[at:] = array("i", [*[source for source, _ in moves], *still, *[to for _, to in moves], *still])
        if self._device is not self._host:
            self._device.copy_(self._host, non_blocking=True)


class Stretch:
    """The arguments of a pass over plain text, padded to a size: tokens, then the first slot and the number of tokens."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.size = size
        self._host = torch.zeros(size + 2, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._device = self._host.to(device)
        self.tokens, self.first = self._device[:size], self._device[size]
        self.last = self._device[size + 1 :]

    def fill(self, tokens: Sequence[int], first: int) -> None:
        spare = [tokens[0]] * (self.size - len(tokens))
        self._host.numpy()[:] = array("i", [*tokens, *spare, first, len(tokens) - 1])
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
        self._stretches: dict[int, Stretch] = {}
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
        self.slots.settle()
        if self.graphs and (size := self._stretch_size(len(tokens), start)):
            return self._read_stretch(tokens, start, size)
        ids = torch.tensor(tokens, dtype=torch.int32).to(self.device)
        places = torch.arange(start, end, device=self.device)
        return self._forward(ids, places, places, None, end, keep=1)

    def _stretch_size(self, count: int, start: int) -> int:
        """Tokens of the graph for a stretch of text; 0: it has none. What it writes beyond the text must fit into the slots."""
        return next((size for size in PROMPT_BUCKETS if size >= count and start + size <= self.slots.count), 0)

    def _read_stretch(self, tokens: Sequence[int], start: int, size: int) -> torch.Tensor:
        """As a graph: hundreds of small kernels take longer to start than to run."""
        length = next(n for n in self.context_buckets if n >= start + size)
        stretch = self._stretches.get(size)
        if stretch is None:
            stretch = self._stretches[size] = Stretch(size, self.device)
        stretch.fill(tokens, start)
        key = -size, length
        graph, logits = self._captured.get(key) or self._capture(key, lambda: self._stretch_step(stretch, length))
        graph.replay()
        return logits

    def _stretch_step(self, stretch: Stretch, length: int) -> torch.Tensor:
        """Tokens beyond the text lie behind it, where nobody looks and the next pass writes."""
        places = stretch.first + torch.arange(stretch.size, device=self.device)
        mask = torch.arange(length, device=self.device) <= places[:, None]
        return self._forward(stretch.tokens, places, places, mask[None, None], length, keep=stretch.last)

    def decode(self, rows: Rows) -> torch.Tensor:
        """The logits after every row, (rows or more, vocab) float32. Valid until the next pass."""
        count = self._bucket(len(rows.tokens))
        length = next(n for n in self.context_buckets if n >= rows.first + count)
        inputs = self._inputs.get(count)
        if inputs is None:
            inputs = self._inputs[count] = Inputs(count, self.device)
        captured = self._captured.get((count, length))
        once = captured is not None or not self.graphs  # a capture runs the pass several times
        inputs.fill(rows, self.slots.moves_for(inputs.moves_at_most if once else 0))
        if not self.graphs:
            return self._step(inputs, length)
        graph, logits = captured or self._capture((count, length), lambda: self._step(inputs, length), compiled=True)
        graph.replay()
        return logits

    def _bucket(self, rows: int) -> int:
        if not self.graphs:  # nothing to capture, so no reason to pad
            return rows
        return next(n for n in self.node_buckets if n >= rows)

    def _step(self, inputs: Inputs, length: int) -> torch.Tensor:
        if inputs.moves_at_most:
            self.slots.move(inputs.moves)
        places = inputs.table[0, 0] + torch.arange(inputs.rows, device=self.device)
        table = self._fast is not None and self._fast.takes_table
        mask = inputs.table[None, None] if table else tree_mask(inputs.table, length)
        return self._forward(inputs.tokens, inputs.positions, places, mask, length)

    def _capture(
        self, key: tuple[int, int], work: Callable[[], torch.Tensor], *, compiled: bool = False
    ) -> tuple[Any, torch.Tensor]:
        """One CUDA graph for this number of rows (of plain text: less than 0) and this much context."""
        assert self._fast is not None
        check, self.slots.check = self.slots.check, None
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream), self._fast.compiled() if compiled else nullcontext():
            for _ in range(WARM_PASSES):
                work()
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, stream=stream):
                logits = work()
        torch.cuda.current_stream(self.device).wait_stream(stream)
        self._pool = self._pool or graph.pool()
        self.slots.check = check
        self._captured[key] = graph, logits
        return graph, logits

    def prepare(self, progress: Progress, sizes: Sequence[int] = (), lengths: Sequence[int] = ()) -> None:
        """Capture ahead: all numbers of rows and amounts of context, or those given."""
        wanted = [(n, length) for length in lengths or self.context_buckets for n in sizes or self.node_buckets if n < length]
        for done, (n, length) in enumerate(wanted):
            progress(f"preparing passes over {n} tokens, context {length}", done / len(wanted))
            if self.graphs and (n, length) not in self._captured:
                self.decode(Rows(length - n, [0] * n, range(-1, n - 1)))
        for size in PROMPT_BUCKETS:
            if self.graphs and not sizes and size <= self.slots.count:
                progress(f"preparing prompts of {size} tokens", 1.0)
                self._read_stretch([0], 0, size)

    @torch.no_grad()
    def _forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        places: torch.Tensor,
        mask: torch.Tensor | None,
        length: int,
        keep: int | torch.Tensor = 0,
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
        self._stretches.clear()
        self._fast = self._pool = None
        self.model = self.slots = None  # type: ignore[assignment]
