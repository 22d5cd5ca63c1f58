"""A Llama in torch over packed texts, for target and student alike. Parameters have the names and layout of GGUF.

All texts of a pass lie one after the other in one row of tokens, so nothing is padded. What happens between queries and
attention's output is the caller's: training attends within each text, generation to its cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from inspect import signature
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from duodecoding.distill.export import Shape

Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]  # layer, q, k, v (tokens, heads, head_dim)


@dataclass(slots=True)
class Pack:
    """Texts in a row."""

    ids: torch.Tensor  # (tokens,)
    positions: torch.Tensor  # (tokens,) each in its own text
    bounds: torch.Tensor  # (texts + 1,) where each begins
    ends: list[int]
    longest: int


def pack(texts: Sequence[np.ndarray], device: torch.device) -> Pack:
    lengths = [len(text) for text in texts]
    ends = np.cumsum(lengths)
    ids = np.concatenate(texts).astype(np.int64)
    positions = np.arange(len(ids)) - np.repeat(ends - lengths, lengths)
    bounds = np.concatenate([[0], ends]).astype(np.int32)
    rows = [torch.from_numpy(array).to(device, non_blocking=True) for array in (ids, positions, bounds)]
    return Pack(rows[0], rows[1], rows[2], ends.tolist(), max(lengths))


def attend_within(packed: Pack) -> Attend:
    """Causal attention of every text to itself."""
    flash = _varlen() if packed.ids.is_cuda else None

    def attend(_layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        if flash is not None:
            bounds, longest = packed.bounds, packed.longest
            return flash(q, k, v, bounds, bounds, longest, longest)
        texts, start = [], 0
        for end in packed.ends:
            mine, keys, values = (x[start:end].transpose(0, 1)[None] for x in (q, k, v))
            texts.append(F.scaled_dot_product_attention(mine, keys, values, is_causal=True)[0].transpose(0, 1))
            start = end
        return torch.cat(texts)

    return attend


@cache
def _varlen() -> Any:
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:  # torch before 2.10: one text after the other
        return None
    # The first releases that have it say "causal" in another way.
    causal = {"is_causal": True} if "is_causal" in signature(varlen_attn).parameters else {"window_size": (-1, 0)}
    return partial(varlen_attn, **causal)


class Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))


class Block(nn.Module):
    """A layer's parameters. What is done with them is `enter` and `leave`, which torch compiles once for all layers."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.attn_norm = Norm(shape.width)
        self.attn_qkv = nn.Linear(shape.width, queries + 2 * keys, bias=False)
        self.attn_output = nn.Linear(queries, shape.width, bias=False)
        self.ffn_norm = Norm(shape.width)
        self.ffn_gate = nn.Linear(shape.width, shape.neurons, bias=False)
        self.ffn_up = nn.Linear(shape.width, shape.neurons, bias=False)
        self.ffn_down = nn.Linear(shape.neurons, shape.width, bias=False)


def normed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    y = x.float()
    return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)


def rotated(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Neighbouring dimensions are a pair. x (tokens, heads, head_dim), angles (tokens, head_dim / 2, 2): cosine and sine."""
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = angles[:, None].unbind(-1)
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2).to(x.dtype)


def enter(
    x: torch.Tensor, norm: torch.Tensor, qkv: torch.Tensor, angles: torch.Tensor, heads: int, kv_heads: int, eps: float
) -> Any:
    joined = F.linear(normed(x, norm, eps), qkv.to(x.dtype)).unflatten(-1, (heads + 2 * kv_heads, -1))
    q, k, v = joined.split((heads, kv_heads, kv_heads), dim=1)
    return rotated(q, angles), rotated(k, angles), v.contiguous()


def leave(
    x: torch.Tensor, attended: torch.Tensor, out: torch.Tensor, norm: torch.Tensor, mlp: Sequence[torch.Tensor], eps: float
) -> Any:
    x = x + F.linear(attended.flatten(1), out.to(x.dtype))
    gate, up, down = (weight.to(x.dtype) for weight in mlp)
    y = normed(x, norm, eps)
    return x + F.linear(F.silu(F.linear(y, gate)) * F.linear(y, up), down)


BLOCK, STEPS_DOWN, STEPS = 32, 8, 15  # of Q4_0: weights that share a scale, and the whole numbers from -8 to 7 that they become


def as_written(weight: torch.Tensor) -> torch.Tensor:
    """What Q4_0 makes of a matrix; gradients pass as if it were the matrix itself."""
    blocks = weight.detach().unflatten(-1, (-1, BLOCK))
    largest = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True))
    scale = largest / -STEPS_DOWN
    steps = torch.where(scale == 0, 0.0, blocks / scale + STEPS_DOWN + 0.5).floor().clamp(0, STEPS) - STEPS_DOWN
    written = (steps * scale.half().float()).flatten(-2)
    return weight + (written - weight.detach())


@cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """With gradients and without, and every student's shape: a variant each. The number of tokens is left open."""
    import torch._dynamo

    torch._dynamo.config.recompile_limit = 64
    ready = torch.compile(function)

    def call(x: torch.Tensor, *rest: Any) -> Any:
        for tensor in (x, *rest):
            if isinstance(tensor, torch.Tensor) and tensor.shape[0] == x.shape[0] and not isinstance(tensor, nn.Parameter):
                torch._dynamo.maybe_mark_dynamic(tensor, 0)
        return ready(x, *rest)

    return call


class Llama(nn.Module):
    def __init__(self, shape: Shape, *, tied: bool = True) -> None:
        super().__init__()
        self.shape = shape
        self.quick = False  # compile passes without gradients too: pays for a teacher, not for an evaluation now and then
        self.rounds = False  # compute with the layers' matrices as a file in Q4_0 will have them
        self.token_embd = nn.Embedding(shape.vocab, shape.width)
        self.blk = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.output_norm = Norm(shape.width)
        self.output = None if tied else nn.Linear(shape.width, shape.vocab, bias=False)
        self.register_buffer("angles", _angles(shape, 2048), persistent=False)

    @property
    def head(self) -> nn.Parameter:
        return self.token_embd.weight if self.output is None else self.output.weight

    def forward(self, ids: torch.Tensor, positions: torch.Tensor, attend: Attend, dtype: torch.dtype) -> torch.Tensor:
        """Final hidden states (tokens, width), normed: times `head` they are the logits."""
        shape = self.shape
        quick = ids.is_cuda and (self.quick or torch.is_grad_enabled())
        pieces: tuple[Callable[..., Any], ...] = (enter, leave, normed, as_written)
        first, last, end, written = (compiled(piece) if quick else piece for piece in pieces)
        seen: Callable[[torch.Tensor], torch.Tensor] = written if self.rounds else lambda weight: weight
        x = F.embedding(ids, self.token_embd.weight).to(dtype)
        angles = self.angles[positions]
        for number, block in enumerate(self.blk):
            q, k, v = first(x, block.attn_norm.weight, seen(block.attn_qkv.weight), angles, shape.heads, shape.kv_heads, shape.eps)
            mlp = tuple(seen(linear.weight) for linear in (block.ffn_gate, block.ffn_up, block.ffn_down))
            x = last(x, attend(number, q, k, v), seen(block.attn_output.weight), block.ffn_norm.weight, mlp, shape.eps)
        return end(x, self.output_norm.weight, shape.eps)


def _angles(shape: Shape, length: int) -> torch.Tensor:
    """(positions, head_dim / 2, 2)"""
    frequencies = shape.rope_base ** (-torch.arange(0, shape.head_dim, 2, dtype=torch.float64) / shape.head_dim)
    turns = torch.arange(length, dtype=torch.float64)[:, None] * frequencies
    return torch.stack((turns.cos(), turns.sin()), -1).float()
