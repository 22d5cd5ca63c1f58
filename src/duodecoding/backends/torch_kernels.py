"""GPU kernels whose result for a row depends on that row alone: not on how many rows share the pass, nor on which slots hold
the row's ancestors. That is what makes an answer in half precision equal in all modes, bit for bit.

Libraries choose another algorithm for another number of rows, which adds up in another order. Here tiles, splits and the order of
every sum are fixed by the model's shape:

* `linear`: the same tiles and the same split of the inner dimension for any number of rows;
* `rms_norm`: one program for each row;
* `tree_attention`: keys are taken in the order of positions, in blocks of BLOCK, folded into one another from left to right. Blocks
  that lie wholly before the pass are the same for all rows and read once (`_shared`). The others are gathered for each row along
  its own path (`_own`), so a guess sees its ancestors where it would see them as committed tokens.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

BLOCK = 32  # positions folded at a time
SPLIT = 256  # positions folded by one program of `_shared`
TILE = 16  # rows of the smallest matrix instruction
WIDEST = 64  # rows of one program of `_shared`
SHORT = 1024  # slots up to which a single row's blocks are spread over as many programs as there are
MULTIPROCESSORS = 120  # about as many as a large GPU has; the same everywhere, so that results are
LOG2E = 1.4426950408889634


@triton.jit
def _linear(x, w, out, rows, n, k, per_split, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, EVEN: tl.constexpr):  # type: ignore[no-untyped-def]
    """out[split] = x[:, part] @ w[:, part].T. One program for N columns of one split."""
    column, split = tl.program_id(1), tl.program_id(2)
    row = tl.program_id(0) * M + tl.arange(0, M)
    col = column * N + tl.arange(0, N)
    inner = split * per_split + tl.arange(0, K)
    x_at = x + row[:, None] * k + inner[None, :]
    w_at = w + col[:, None].to(tl.int64) * k + inner[None, :]
    total = tl.zeros((M, N), dtype=tl.float32)
    for done in range(0, per_split, K):
        if EVEN:
            a = tl.load(x_at + done, mask=(row < rows)[:, None], other=0.0)
            b = tl.load(w_at + done, eviction_policy="evict_first")
        else:
            inside = inner + done < k
            a = tl.load(x_at + done, mask=(row < rows)[:, None] & inside[None, :], other=0.0)
            b = tl.load(w_at + done, mask=(col < n)[:, None] & inside[None, :], other=0.0, eviction_policy="evict_first")
        total = tl.dot(a, tl.trans(b), total)
    out_at = out + (split * rows + row[:, None]).to(tl.int64) * n + col[None, :]
    tl.store(out_at, total.to(out.dtype.element_ty), mask=(row < rows)[:, None] & (col < n)[None, :])


@triton.jit
def _rms_norm(x, weight, out, size, eps, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, WIDTH)
    values = tl.load(x + row * size + col, mask=col < size, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt_rn(tl.sum(values * values) / size + eps)
    factor = tl.load(weight + col, mask=col < size, other=0.0)
    # Rounded before the weight is applied, as transformers does.
    tl.store(out + row * size + col, (values * scale).to(factor.dtype) * factor, mask=col < size)


@triton.jit
def _empty(M: tl.constexpr, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """A partial softmax over nothing: largest score, sum of weights, weighted sum of values."""
    return tl.full((M,), float("-inf"), dtype=tl.float32), tl.zeros((M,), dtype=tl.float32), tl.zeros((M, SIZE), dtype=tl.float32)


@triton.jit
def _fold(top, mass, acc, top_2, mass_2, acc_2):  # type: ignore[no-untyped-def]
    """Two partial softmaxes into one. Written with fma so that no compiler contracts it in another way elsewhere."""
    new = tl.maximum(top, top_2)
    keep, add = tl.exp2(top - new), tl.exp2(top_2 - new)
    mass = tl.fma(mass, keep, mass_2 * add)
    acc = tl.fma(acc, tl.broadcast_to(keep[:, None], acc.shape), acc_2 * add[:, None])
    return new, mass, acc


@triton.jit
def _block(q, keys, values, slot, seen, stride, scale, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The partial softmax of one block of positions, whose entries lie in `slot`; `seen` (BLOCK,) says which count."""
    inner = tl.arange(0, SIZE)
    at = slot[:, None].to(tl.int64) * stride + inner[None, :]
    k = tl.load(keys + at, mask=seen[:, None], other=0.0)
    scores = tl.dot(q, tl.trans(k)) * scale
    scores = tl.where(seen[None, :], scores, float("-inf"))
    top = tl.max(scores, axis=1)
    weights = tl.exp2(scores - top[:, None])
    mass = tl.sum(weights, axis=1)
    v = tl.load(values + at, mask=seen[:, None], other=0.0)
    acc = tl.dot(weights.to(v.dtype), v)
    return top, mass, acc


@triton.jit
def _shared(  # type: ignore[no-untyped-def]
    q, keys, values, table, part, part_top, part_mass,
    rows, width, q_head, q_row, head_stride, slot_stride, scale, splits,
    GROUPS: tl.constexpr, SIZE: tl.constexpr, M: tl.constexpr, B: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    """Blocks before the pass: M of the (row, query head) pairs of one key head over one split."""
    head, split, tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first = tl.load(table)
    end = tl.minimum(first // B * B, (split + 1) * S)
    if split * S < end:
        pair = tile * M + tl.arange(0, M)
        real = pair < rows * GROUPS
        inner = tl.arange(0, SIZE)
        q_at = q + ((head * GROUPS + pair % GROUPS) * q_head + pair // GROUPS * q_row)[:, None] + inner[None, :]
        asked = tl.load(q_at, mask=real[:, None], other=0.0)
        top, mass, acc = _empty(M, SIZE)
        base = head.to(tl.int64) * head_stride
        for start in range(split * S, end, B):
            slot = start + tl.arange(0, B)
            t, m, a = _block(asked, keys + base, values + base, slot, slot < end, slot_stride, scale, SIZE)
            top, mass, acc = _fold(top, mass, acc, t, m, a)
        at = (head * splits + split).to(tl.int64) * rows * GROUPS + pair
        tl.store(part_top + at, top, mask=real)
        tl.store(part_mass + at, mass, mask=real)
        tl.store(part + at[:, None] * SIZE + inner[None, :], acc, mask=real[:, None])


@triton.jit
def _part(part, part_top, part_mass, at, there, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """A partial softmax that `_shared` left; an empty one where it is not there."""
    inner = tl.arange(0, SIZE)
    top = tl.load(part_top + at, mask=there, other=float("-inf"))
    mass = tl.load(part_mass + at, mask=there, other=0.0)
    acc = tl.load(part + at[:, None] * SIZE + inner[None, :], mask=there[:, None], other=0.0)
    return top, mass, acc


@triton.jit
def _own(  # type: ignore[no-untyped-def]
    q, keys, values, table, part, part_top, part_mass, out,
    rows, width, q_head, q_row, head_stride, slot_stride, scale, splits,
    GROUPS: tl.constexpr, SIZE: tl.constexpr, M: tl.constexpr, B: tl.constexpr, S: tl.constexpr, WRITTEN: tl.constexpr,
):  # fmt: skip
    """One row and one key head: fold what `_shared` left, then the blocks along the row's own path."""
    row, head = tl.program_id(0), tl.program_id(1)
    first, depth = tl.load(table), tl.load(table + row * width + 1)
    shared = first // B * B
    group = tl.arange(0, M)
    real = group < GROUPS
    inner = tl.arange(0, SIZE)
    asked = tl.load(q + ((head * GROUPS + group) * q_head + row * q_row)[:, None] + inner[None, :], mask=real[:, None], other=0.0)
    top, mass, acc = _empty(M, SIZE)
    open_top, open_mass, open_acc = top, mass, acc
    line = (head * splits * rows + row).to(tl.int64) * GROUPS + group  # of split 0; the next is rows * GROUPS further
    per_split: tl.constexpr = S // WRITTEN
    if per_split == 1:
        whole = shared // S
        for split in range(0, whole, 4):  # four loads under way at once
            for i in tl.static_range(4):
                there = real & (split + i < whole)
                t, m, a = _part(part, part_top, part_mass, line + (split + i) * rows * GROUPS, there, SIZE)
                top, mass, acc = _fold(top, mass, acc, tl.where(real, t, 0.0), m, a)
        if shared % S != 0:
            open_top, open_mass, open_acc = _part(part, part_top, part_mass, line + whole * rows * GROUPS, real, SIZE)
    else:
        for start in range(0, shared, S):
            open_top, open_mass, open_acc = _empty(M, SIZE)
            for i in tl.static_range(per_split):
                at = start // WRITTEN + i
                there = real & (at * WRITTEN < shared)
                t, m, a = _part(part, part_top, part_mass, line + at * rows * GROUPS, there, SIZE)
                open_top, open_mass, open_acc = _fold(open_top, open_mass, open_acc, tl.where(real, t, 0.0), m, a)
            if start + S <= shared:
                top, mass, acc = _fold(top, mass, acc, open_top, open_mass, open_acc)
                open_top, open_mass, open_acc = _empty(M, SIZE)
    base = head.to(tl.int64) * head_stride
    for start in range(shared, first + depth + 1, B):
        position = start + tl.arange(0, B)
        seen = position <= first + depth
        own = tl.load(table + row * width + 2 + position - first, mask=seen & (position >= first), other=0)
        slot = tl.where(position >= first, first + own, position)
        t, m, a = _block(asked, keys + base, values + base, slot, seen, slot_stride, scale, SIZE)
        open_top, open_mass, open_acc = _fold(open_top, open_mass, open_acc, t, m, a)
        if (start + B) % S == 0:
            top, mass, acc = _fold(top, mass, acc, open_top, open_mass, open_acc)
            open_top, open_mass, open_acc = _empty(M, SIZE)
    if (first + depth + 1 + B - 1) // B * B % S != 0:
        top, mass, acc = _fold(top, mass, acc, open_top, open_mass, open_acc)
    result = acc / mass[:, None]
    out_at = out + (row * tl.num_programs(1) * GROUPS + head * GROUPS + group)[:, None] * SIZE + inner[None, :]
    tl.store(out_at, result.to(out.dtype.element_ty), mask=real[:, None])


def linear_plan(n: int, k: int) -> tuple[int, int, int, int, int]:
    """Tile and split of a matrix (n, k), from its shape alone: columns, inner steps, splits, warps, stages."""
    columns, inner = (128, 64) if n > 8192 else (64, 128)
    splits = 1
    while -(-n // columns) * splits < MULTIPROCESSORS and k // (2 * splits) >= 1024:
        splits *= 2
    return columns, inner, splits, 4, 4


def _tile(rows: int, most: int) -> int:
    """Rows of one program. None has 32: with those, and no others, some rows were not what they are alone."""
    return TILE if rows <= 2 * TILE else min(max(64, triton.next_power_of_2(rows)), most)


PLANS: dict[tuple[int, int], tuple[int, int, int, int, int]] = {}  # measured ones; they override the rule


@torch.library.custom_op("duodecoding::linear", mutates_args=())
def linear(x: torch.Tensor, weight: torch.Tensor, exact: bool = True) -> torch.Tensor:
    """x (rows, k), weight (n, k) -> the parts of the product, (splits, rows, n) float32: their sum is for the caller to fuse.

    `exact`: not rounded; else a product of one part is, to what x is.
    """
    rows, k = x.shape
    n = weight.shape[0]
    columns, inner, splits, warps, stages = PLANS.get((n, k)) or linear_plan(n, k)
    per_split = -(-k // (splits * inner)) * inner
    tile = _tile(rows, 128)
    out = torch.empty((splits, rows, n), dtype=_kind(x, splits, exact), device=x.device)
    grid = (-(-rows // tile), -(-n // columns), splits)
    even = n % columns == 0 and per_split * splits == k
    sizes: dict[str, Any] = {"M": tile, "N": columns, "K": inner, "EVEN": even}
    _linear[grid](x, weight, out, rows, n, k, per_split, **sizes, num_warps=warps, num_stages=stages)
    return out


@linear.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, exact: bool = True) -> torch.Tensor:
    n, k = weight.shape
    splits = (PLANS.get((n, k)) or linear_plan(n, k))[2]
    return x.new_empty((splits, x.shape[0], n), dtype=_kind(x, splits, exact))


def _kind(x: torch.Tensor, splits: int, exact: bool) -> torch.dtype:
    return torch.float32 if exact or splits > 1 else x.dtype


@torch.library.custom_op("duodecoding::rms_norm", mutates_args=())
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Over the last dimension."""
    x = x.contiguous()
    out = torch.empty_like(x)
    size = x.shape[-1]
    _rms_norm[(x.numel() // size,)](x, weight, out, size, eps, WIDTH=triton.next_power_of_2(size), num_warps=8)
    return out


@rms_norm.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.custom_op("duodecoding::tree_attention", mutates_args=())
def tree_attention(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, table: torch.Tensor, scale: float, length: int
) -> torch.Tensor:
    """q (heads, rows, size) over the slots in keys and values (kv heads, slots, size) -> (rows, heads, size).

    `table` (rows, width) int32: slot of the first row, depth of this row, then its ancestors by depth. `length`: slots in use.
    """
    heads, rows, size = q.shape
    shared_heads = keys.shape[0]
    groups = heads // shared_heads
    written = BLOCK if rows * groups <= TILE and length <= SHORT else SPLIT  # the folds are the same, done here or there
    splits = -(-length // written)
    tile = _tile(rows * groups, WIDEST)
    part = torch.empty((shared_heads, splits, rows * groups, size), dtype=torch.float32, device=q.device)
    tops = torch.empty((2, shared_heads, splits, rows * groups), dtype=torch.float32, device=q.device)
    out = torch.empty((rows, heads, size), dtype=q.dtype, device=q.device)
    common: dict[str, Any] = {"GROUPS": groups, "SIZE": size, "B": BLOCK}
    numbers = (rows, table.shape[1], q.stride(0), q.stride(1), keys.stride(0), keys.stride(1), scale * LOG2E, splits)
    grid = (shared_heads, splits, -(-rows * groups // tile))
    wide: dict[str, Any] = {"M": tile, "S": written, "num_warps": tile // TILE, "num_stages": 3}
    _shared[grid](q, keys, values, table, part, tops[0], tops[1], *numbers, **common, **wide)
    one: dict[str, Any] = {"M": TILE, "S": SPLIT, "WRITTEN": written, "num_warps": 1, "num_stages": 2}
    _own[(rows, shared_heads)](q, keys, values, table, part, tops[0], tops[1], out, *numbers, **common, **one)
    return out


@tree_attention.register_fake
def _(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, table: torch.Tensor, scale: float, length: int) -> torch.Tensor:
    return q.new_empty((q.shape[1], q.shape[0], q.shape[2]))
