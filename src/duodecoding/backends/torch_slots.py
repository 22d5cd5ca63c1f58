"""The KV cache by slots, and the attention over it.

Committed token i lies in slot i, always. The rows of a pass (the root and its guesses) lie in the slots behind, in the order of
the pass, and a mask shows each of them the committed tokens and its own ancestors. Accepting guesses moves their few entries to
their linear place, as the first thing in the next pass; everything else is overwritten by it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.nn import functional

MANY = 64  # masked rows on a GPU that are left to a library: a padded prompt
AT_ONCE = 64  # moves that are made outside of a pass: this many, or a multiple
DEEPER = 65536  # a row and its depth in one number: this x depth + row
ATTENTION = "duodecoding"  # under this name transformers finds the attention below


Mover = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]  # keys, values, places as `Slots.move` has them


class Layer(NamedTuple):
    """One layer's buffers, each (1, heads, slots, head_dim)."""

    keys: torch.Tensor
    values: torch.Tensor


class Slots:
    """What transformers takes for its cache: it calls `update` in every layer. `first` and `length` describe the running pass."""

    is_compileable = False

    def __init__(self, shape: CacheShape, count: int, device: torch.device, dtype: torch.dtype) -> None:
        size = (shape.layers, 1, shape.heads, count, shape.head_dim)
        self._keys = torch.zeros(size, device=device, dtype=dtype)
        self._values = torch.zeros(size, device=device, dtype=dtype)
        self.layers = [Layer(k, v) for k, v in zip(self._keys, self._values, strict=True)]
        self.count = count
        self.slots = torch.zeros(1, dtype=torch.int64, device=device)  # of the rows of this pass
        self.length = count  # slots that attention looks at
        self._moves: list[tuple[int, int]] = []  # to be made before the next pass
        self._mover: Mover | None = None
        self.check: Callable[[], None] | None = None  # called in every layer; may raise to stop the pass

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer: Any, *_args: Any, **_kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the rows of this pass and hand out all that they may look at. `layer`: its number, or its buffers."""
        if self.check is not None:
            self.check()
        buffers = self.layers[layer] if isinstance(layer, int) else layer
        buffers.keys.index_copy_(2, self.slots, keys)
        buffers.values.index_copy_(2, self.slots, values)
        return buffers.keys[:, :, : self.length], buffers.values[:, :, : self.length]

    @contextmanager
    def unchecked(self) -> Iterator[None]:
        """While a graph is made: what it has recorded cannot ask."""
        check, self.check = self.check, None
        try:
            yield
        finally:
            self.check = check

    def get_seq_length(self, *_args: Any) -> int:
        return 0

    def plan(self, moves: Sequence[tuple[int, int]]) -> None:
        """Entries that must lie elsewhere before the next pass looks at them: (from, to)."""
        self.settle()
        self._moves = list(moves)

    def moves_for(self, room: int) -> list[tuple[int, int]]:
        """The planned moves, for a pass that can make so many on its way; if there are more they are made now."""
        if len(self._moves) > room:
            self.settle()
        moves, self._moves = self._moves, []
        return moves

    def settle(self) -> None:
        """Make the planned moves now."""
        if self._moves:
            spare = -len(self._moves) % AT_ONCE  # what a pass makes on its way has one size, and the rest another
            places = list(zip(*self._moves, *[(0, 0)] * spare, strict=True))
            self.move(torch.tensor(places, dtype=torch.int32).to(self._keys.device))
            self._moves = []

    def move_by(self, mover: Mover) -> None:
        """Leave moves to a kernel. It is made ready here, for any number but those of a pass: an answer has no time for that."""
        self._mover = mover
        self.move(torch.zeros((2, AT_ONCE), dtype=torch.int32, device=self._keys.device))

    @torch.no_grad()
    def move(self, places: torch.Tensor) -> None:
        """Copy entries of all layers between slots, from `places[0]` to `places[1]`; all are read before any is written."""
        if self._mover is not None and places.shape[1].bit_count() == 1:
            self._mover(self._keys, self._values, places)
            return
        source, to = places.long()
        for buffers in (self._keys, self._values):
            buffers.index_copy_(3, to, buffers.index_select(3, source))

    def save(self, count: int) -> torch.Tensor:
        """A copy of the first entries, in the memory of the CPU."""
        self.settle()
        return torch.stack([self._keys[..., :count, :], self._values[..., :count, :]]).cpu()

    def load(self, state: torch.Tensor) -> None:
        self._moves = []
        for buffers, part in zip((self._keys, self._values), state, strict=True):
            buffers[..., : part.shape[-2], :].copy_(part)


class CacheShape(NamedTuple):
    layers: int
    heads: int  # of keys and values
    head_dim: int

    @classmethod
    def of(cls, config: Any) -> CacheShape:
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        return cls(config.num_hidden_layers, heads, head_dim)

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        return 2 * self.layers * self.heads * self.head_dim * dtype.itemsize


def tree_mask(table: torch.Tensor, length: int) -> torch.Tensor:
    """Which slot each row sees: the committed ones before the first row, and its ancestors behind. (1, 1, rows, length) bool.

    `table`: see `torch_inputs.Inputs`.
    """
    rows = table.shape[0]
    index = torch.arange(rows, device=table.device)
    member, path = table[:, 3:-rows, None], table[:, None, -rows:]
    used = index[:, None, None] < table[0, 1]
    above = used & (member >= 0) & (index < member // DEEPER)
    seen = torch.eye(rows + 1, dtype=torch.bool, device=table.device)  # each row sees itself; the last one is nobody's
    seen[torch.where(above, member % DEEPER, rows).long(), torch.where(above, path, rows).long()] = True
    behind = torch.arange(length, device=table.device) - table[0, 0]
    among = seen[:rows, :rows].index_select(1, behind.clamp(0, rows - 1))
    return ((behind < 0) | ((behind >= 0) & (behind < rows) & among))[None, None]


def attention(
    _module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    **_kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface. Without a mask: a stretch of text at the end of what is there. With one: rows of a tree;
    it is either a mask (bool) or their table (integers, see `torch_inputs.Inputs`), which the GPU kernels take.

    `query` (1, heads, rows, head_dim), `key` and `value` (1, kv heads, slots, head_dim); out (1, rows, heads, head_dim).
    """
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if attention_mask is not None and attention_mask.dtype == torch.int32:
        from duodecoding.backends.torch_attention import tree_attention

        return tree_attention(query[0], key[0], value[0], attention_mask[0, 0], scale, key.shape[2])[None], None
    if attention_mask is None and softcap is None:
        out = _causal(query, key, value, scale)
    elif query.is_cuda and softcap is None and query.shape[2] >= MANY:
        key, value = _for_all_heads(query, key, value)
        out = functional.scaled_dot_product_attention(query, key, value, attn_mask=attention_mask, scale=scale)
    else:
        mask = _lower_right(query, key)[None, None] if attention_mask is None else attention_mask
        out = _masked(query, key, value, mask, scale, softcap)
    return out.transpose(1, 2).contiguous(), None


def _lower_right(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    rows, length = query.shape[2], key.shape[2]
    return torch.ones(rows, length, dtype=torch.bool, device=query.device).tril(length - rows)


def _for_all_heads(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    groups = query.shape[1] // key.shape[1]
    return (key, value) if groups == 1 else (key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1))


def _causal(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    key, value = _for_all_heads(query, key, value)
    if query.shape[2] == key.shape[2]:
        return functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale)
    if query.is_cuda:
        from torch.nn.attention.bias import causal_lower_right

        bias = causal_lower_right(query.shape[2], key.shape[2])
    else:
        bias = _lower_right(query, key)
    return functional.scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=scale)


def _masked(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, scale: float, softcap: float | None
) -> torch.Tensor:
    """Query heads that share a key head are rows of one product: keys are read once, never repeated."""
    _, heads, rows, size = query.shape
    shared = key.shape[1]
    groups = heads // shared
    scores = torch.matmul(query.reshape(1, shared, groups * rows, size), key.transpose(2, 3)).float() * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.view(1, shared, groups, rows, -1).masked_fill(~mask[:, :, None], -torch.inf)
    weights = torch.softmax(scores, dim=-1).to(value.dtype).view(1, shared, groups * rows, -1)
    return torch.matmul(weights, value).view(1, heads, rows, size)
