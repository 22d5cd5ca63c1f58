"""Passes over rows of fixed shapes. On a GPU each shape is one CUDA graph; on a CPU the same code runs as it is.

Knows tokens, positions, ancestors and slots; not conversations, not sampling.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from duodecoding.backends.torch_graphs import capture
from duodecoding.backends.torch_inputs import Inputs, Rows, Stretch
from duodecoding.backends.torch_slots import CacheShape, Slots, tree_mask

NODE_BUCKETS = (1, 8, 16, 32, 64, 128)
CONTEXT_BUCKETS = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
CHUNK = {"cpu": 512, "cuda": 4096}  # tokens of a prompt in one pass
PROMPT_BUCKETS = (64, 128, 256, 384, 512, 768, 1024, 1536, 2048)  # of a GPU: longer ones keep it busy without a graph
MEMBERS = 16  # rows in a line of the table of paths, where no kernel asks for another number

Progress = Callable[[str, float], None]


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
        self._groups = self._fast.groups if self._fast is not None else 0
        self._inputs: dict[int, Inputs] = {}
        self._stretches: dict[int, Stretch] = {}
        self._captured: dict[tuple[int, int], tuple[Any, torch.Tensor]] = {}
        self._pool: Any = None
        self.stream = torch.cuda.Stream(self.device) if self.graphs else None  # of captures: libraries keep memory for each

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
        stretch.send()
        places = stretch.first + torch.arange(stretch.size, device=self.device)
        mask = torch.arange(length, device=self.device) <= places[:, None]
        return self._forward(stretch.tokens, places, places, mask[None, None], length, keep=stretch.last)

    def decode(self, rows: Rows) -> torch.Tensor:
        """The logits after every row, (rows or more, vocab) float32. Valid until the next pass."""
        count = self._bucket(len(rows.tokens))
        length = next(n for n in self.context_buckets if n >= rows.first + count)
        inputs = self._inputs.get(count)
        if inputs is None:
            inputs = self._inputs[count] = Inputs(count, self.device, self._members(count))
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

    def _members(self, rows: int) -> int:
        if not self._groups:
            return MEMBERS
        from duodecoding.backends.torch_attention import members

        return members(rows, self._groups)

    def _step(self, inputs: Inputs, length: int) -> torch.Tensor:
        inputs.send()
        if inputs.moves_at_most:
            self.slots.move(inputs.moves)
        places = inputs.table[0, 0] + torch.arange(inputs.rows, device=self.device)
        mask = inputs.table[None, None] if self._groups else tree_mask(inputs.table, length)
        return self._forward(inputs.tokens, inputs.positions, places, mask, length)

    def _capture(
        self, key: tuple[int, int], work: Callable[[], torch.Tensor], *, compiled: bool = False
    ) -> tuple[Any, torch.Tensor]:
        """One CUDA graph for this number of rows (of plain text: less than 0) and this much context."""
        assert self._fast is not None
        with self._fast.compiled() if compiled else nullcontext(), self.slots.unchecked():
            graph, logits = capture(work, self.device, self.stream, self._pool)
        self._pool = self._pool or graph.pool()
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
