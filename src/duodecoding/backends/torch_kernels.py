"""GPU kernels whose result for a row depends on that row alone: not on how many rows share the pass, nor on which slots hold
the row's ancestors. That is what makes an answer in half precision equal in all modes, bit for bit.

Libraries choose another algorithm for another number of rows, which adds up in another order. Here tiles, splits and the order of
every sum are fixed by the model's shape:

* `linear`, `gated`: the same split of the inner dimension and the same order within for any number of rows;
* `rms_norm`, `add_norm`: one program for each row;
* `tree_attention`, in `torch_attention`: positions one after the other.

Where the GPU can do it (Hopper and later) a kernel begins while the one before it ends: see `begin`. Results are the same.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

TILE = 16  # rows of the smallest matrix instruction
MULTIPROCESSORS = 120  # about as many as a large GPU has; the same everywhere, so that results are
SPARE = 12  # more of them on an H200
MOST_TOGETHER = 3  # programs on a multiprocessor
SMALLEST_ROOM = 101_376  # bytes of shared memory that every GPU with bfloat16 has
FETCHED = 256  # bytes of each row of weights that are in the cache before a product begins
LEAST_EVEN = 5  # programs on a multiprocessor from which on it does not matter much how many the last ones are
EARLY = True  # whether kernels begin early where they can
FUSED = True  # said, because what Triton does by itself changes from version to version


@triton.jit
def begin(EARLY: tl.constexpr):  # type: ignore[no-untyped-def]
    """Wait for the kernel before this one, whose programs may still run, and let the next one begin.

    In this order: so what runs at the same time is two kernels at most, and the one before those has ended. The compiler's
    kernels rely on that.
    """
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def _fetch(at, size):  # type: ignore[no-untyped-def]
    """So many bytes behind each address, into the GPU's cache."""
    asm: tl.constexpr = "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;"
    tl.inline_asm_elementwise(asm, "=r,l,r", [at.to(tl.int64), size], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _line(col, n, GATED: tl.constexpr):  # type: ignore[no-untyped-def]
    """The row of the weights for a column of the product."""
    return col // 2 + col % 2 * (n // 2) if GATED else col


@triton.jit
def _linear(  # type: ignore[no-untyped-def]
    x, w, out, rows, n, k, per_split,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, EVEN: tl.constexpr, GATED: tl.constexpr,
    EARLY: tl.constexpr, FETCHED: tl.constexpr,
):  # fmt: skip
    """out[split] = x[:, part] @ w[:, part].T. One program for N columns of one split.

    GATED: silu(x @ the first half of w) * (x @ the second half). Columns of both take turns, so a thread has what belongs together.
    """
    column, split = tl.program_id(1), tl.program_id(2)
    if FETCHED > 0:  # weights are no kernel's result, so they need not wait for one
        each: tl.constexpr = 128 // N if N < 128 else 1  # addresses of a row: one for every thread
        line = _line(column * N + tl.arange(0, N), n, GATED).to(tl.int64)[:, None] * k + split * per_split
        _fetch(w + line + tl.arange(0, each)[None, :] * (FETCHED // each // 2), FETCHED // each)
    begin(EARLY)
    row = tl.program_id(0) * M + tl.arange(0, M)
    col = column * N + tl.arange(0, N)
    inner = split * per_split + tl.arange(0, K)
    x_at = x + row[:, None] * k + inner[None, :]
    w_at = w + _line(col, n, GATED)[:, None].to(tl.int64) * k + inner[None, :]
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
    kind: tl.constexpr = out.dtype.element_ty
    if GATED:  # rounded where transformers rounds
        gate, up = tl.split(tl.reshape(total, (M, N // 2, 2)))
        gate, up = gate.to(kind).to(tl.float32), up.to(kind).to(tl.float32)
        gate = (gate / (1.0 + tl.exp(-gate))).to(kind).to(tl.float32)
        col = column * (N // 2) + tl.arange(0, N // 2)
        out_at = out + row[:, None].to(tl.int64) * (n // 2) + col[None, :]
        tl.store(out_at, (gate * up).to(kind), mask=(row < rows)[:, None] & (col < n // 2)[None, :])
    else:
        out_at = out + (split * rows + row[:, None]).to(tl.int64) * n + col[None, :]
        tl.store(out_at, total.to(kind), mask=(row < rows)[:, None] & (col < n)[None, :])


@triton.jit
def _normed(values, factor, size, eps):  # type: ignore[no-untyped-def]
    scale = 1.0 / tl.sqrt_rn(tl.sum(values * values) / size + eps)
    return (values * scale).to(factor.dtype) * factor  # rounded before the weight is applied, as transformers does


@triton.jit
def _rms_norm(x, weight, out, size, eps, WIDTH: tl.constexpr, EARLY: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, WIDTH)
    factor = tl.load(weight + col, mask=col < size, other=0.0)
    begin(EARLY)
    values = tl.load(x + row * size + col, mask=col < size, other=0.0).to(tl.float32)
    tl.store(out + row * size + col, _normed(values, factor, size, eps), mask=col < size)


@triton.jit
def _add_norm(  # type: ignore[no-untyped-def]
    parts, residual, weight, both, out, rows, size, eps, SPLITS: tl.constexpr, WIDTH: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """both = residual + the sum of the parts, out = norm(both); each step rounded where modules of their own would round."""
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, WIDTH)
    kind: tl.constexpr = both.dtype.element_ty
    factor = tl.load(weight + col, mask=col < size, other=0.0)
    begin(EARLY)
    total = tl.load(parts + row * size + col, mask=col < size, other=0.0).to(tl.float32)
    for split in tl.static_range(1, SPLITS):
        total += tl.load(parts + (split * rows + row) * size + col, mask=col < size, other=0.0)
    before = tl.load(residual + row * size + col, mask=col < size, other=0.0)
    total = (before.to(tl.float32) + total.to(kind).to(tl.float32)).to(kind)
    tl.store(both + row * size + col, total, mask=col < size)
    tl.store(out + row * size + col, _normed(total.to(tl.float32), factor, size, eps), mask=col < size)


@triton.jit
def _move(keys, values, places, layer, heads, head, slot, COUNT: tl.constexpr, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Entries of one layer and head to other slots, all read before any is written. A move to where it comes from is none."""
    number = tl.program_id(0)
    which = tl.arange(0, COUNT)
    source, to = tl.load(places + which), tl.load(places + COUNT + which)
    moves = (source != to)[:, None]
    if tl.max((source != to).to(tl.int32)) > 0:
        start = (number // heads).to(tl.int64) * layer + (number % heads).to(tl.int64) * head + tl.arange(0, SIZE)[None, :]
        at, back = start + source[:, None] * slot, start + to[:, None] * slot
        k, v = tl.load(keys + at, mask=moves), tl.load(values + at, mask=moves)
        tl.debug_barrier()
        tl.store(keys + back, k, mask=moves)
        tl.store(values + back, v, mask=moves)


def linear_plan(n: int, k: int) -> tuple[int, int, int]:
    """Tile and split of a matrix (n, k), from its shape alone: columns, inner steps, splits. `benchmarks/h200_products.py`."""
    columns, inner = (128, 64) if n > 16384 else (64, 128)
    splits = _splits(n, k, columns, MULTIPROCESSORS, least=1024)
    if -(-n // columns) * splits > MULTIPROCESSORS + SPARE and k > 2 * n:  # few long rows: more programs even out
        columns, inner = 128, 64
        splits = _splits(n, k, columns, 2 * MULTIPROCESSORS, least=1536)
    return columns, inner, splits


def _splits(n: int, k: int, columns: int, programs: int, least: int) -> int:
    splits = 1
    while -(-n // columns) * splits < programs and k // (2 * splits) >= least:
        splits *= 2
    return splits


@cache
def device_room(device: torch.device) -> tuple[int, int]:
    """Bytes of shared memory for a program, 227 KB on an H200, 99 on a GPU at home; and multiprocessors."""
    if device.type != "cuda":  # Triton's interpreter
        return SMALLEST_ROOM, MULTIPROCESSORS
    found = torch.cuda.get_device_properties(device)
    return int(getattr(found, "shared_memory_per_block_optin", SMALLEST_ROOM)), int(found.multi_processor_count)


def early(device: torch.device) -> dict[str, Any]:
    """For the launch of a kernel that calls `begin`."""
    able = device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)
    return {"EARLY": True, "launch_pdl": True} if EARLY and able else {"EARLY": False}


def _stages(programs: int, size: int, device: torch.device) -> int:
    """Loads of `size` bytes that a program has under way. The result is the same; but if the programs can all be at work at once,
    or two on each multiprocessor where they are many, they should have the room for it."""
    room, processors = device_room(device)
    together = -(-programs // processors)
    together = together if together <= MOST_TOGETHER else 2
    stages = max(3, min(6 - together, room // together // size))
    return max(1, min(stages, room // size))


def _is_even(programs: int, device: torch.device) -> bool:
    """Are all multiprocessors busy about equally long with so many?"""
    each = programs / device_room(device)[1]
    return each <= MOST_TOGETHER or each >= LEAST_EVEN


def _product_tile(rows: int) -> int:
    """Rows of one program of `_linear`. None has 32: with those, and no others, some rows were not what they are alone; and two of
    TILE rows take longer than one of 64."""
    return TILE if rows <= TILE else 64 if rows <= 64 else 128


PLANS: dict[tuple[int, int], tuple[int, int, int]] = {}  # measured ones; they override the rule


def _plan(n: int, k: int) -> tuple[int, int, int]:
    return PLANS.get((n, k)) or linear_plan(n, k)


@torch.library.custom_op("duodecoding::linear", mutates_args=())
def linear(x: torch.Tensor, weight: torch.Tensor, exact: bool = True) -> torch.Tensor:
    """x (rows, k), weight (n, k) -> the parts of the product, (splits, rows, n) float32: their sum is for the caller to fuse.

    `exact`: not rounded; else a product of one part is, to what x is.
    """
    splits, n = _plan(*weight.shape)[2], weight.shape[0]
    out = torch.empty((splits, x.shape[0], n), dtype=_kind(x, splits, exact), device=x.device)
    _multiply(x, weight, out, gated=False)
    return out


@linear.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, exact: bool = True) -> torch.Tensor:
    splits = _plan(*weight.shape)[2]
    return x.new_empty((splits, x.shape[0], weight.shape[0]), dtype=_kind(x, splits, exact))


@torch.library.custom_op("duodecoding::gated", mutates_args=())
def gated(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """silu(x @ gate.T) * (x @ up.T), where weight is gate above up. For products that `linear` does in one part."""
    out = torch.empty((x.shape[0], weight.shape[0] // 2), dtype=x.dtype, device=x.device)
    _multiply(x, weight, out, gated=True)
    return out


@gated.register_fake
def _(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x.new_empty((x.shape[0], weight.shape[0] // 2))


def _multiply(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, *, gated: bool) -> None:
    (rows, k), n = x.shape, weight.shape[0]
    columns, inner, splits = _plan(n, k)
    per_split = -(-k // (splits * inner)) * inner
    tile = _product_tile(rows)
    if tile == TILE and splits == 1 and columns == 128 and _is_even(-(-n // 64), x.device):
        columns, inner = 64, 128  # the order of the sum is the same
    grid = (-(-rows // tile), -(-n // columns), splits)
    even = n % columns == 0 and per_split * splits == k
    start = early(x.device)
    fetched = FETCHED if start["EARLY"] and even and x.element_size() * per_split >= FETCHED else 0
    sizes: dict[str, Any] = {"M": tile, "N": columns, "K": inner, "EVEN": even, "GATED": gated, "FETCHED": fetched} | start
    stages = _stages(math.prod(grid), x.element_size() * (tile + columns) * inner, x.device)
    _linear[grid](x, weight, out, rows, n, k, per_split, **sizes, num_warps=4, num_stages=stages, enable_fp_fusion=FUSED)


def _kind(x: torch.Tensor, splits: int, exact: bool) -> torch.dtype:
    return torch.float32 if exact or splits > 1 else x.dtype


@torch.library.custom_op("duodecoding::rms_norm", mutates_args=())
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Over the last dimension."""
    x = x.contiguous()
    out = torch.empty_like(x)
    size = x.shape[-1]
    options: dict[str, Any] = {"num_warps": 8, "enable_fp_fusion": FUSED} | early(x.device)
    _rms_norm[(x.numel() // size,)](x, weight, out, size, eps, WIDTH=triton.next_power_of_2(size), **options)
    return out


@rms_norm.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.custom_op("duodecoding::add_norm", mutates_args=())
def add_norm(parts: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """What `linear` found, added to a residual of the same rows; and the norm of that."""
    residual = residual.contiguous()
    both, out = torch.empty_like(residual), torch.empty_like(residual)
    splits, rows, size = parts.shape
    options: dict[str, Any] = {"num_warps": 8, "enable_fp_fusion": FUSED} | early(residual.device)
    sizes = {"SPLITS": splits, "WIDTH": triton.next_power_of_2(size)}
    _add_norm[(rows,)](parts, residual, weight, both, out, rows, size, eps, **sizes, **options)
    return both, out


@add_norm.register_fake
def _(parts: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    out = torch.empty_like(residual, memory_format=torch.contiguous_format)
    return out, torch.empty_like(out)


def move(keys: torch.Tensor, values: torch.Tensor, places: torch.Tensor) -> None:
    """Entries of all layers between slots, from `places[0]` to `places[1]`; how many is a power of two. Both are (layers, 1, heads,
    slots, size) and lie alike."""
    layers, _, heads, _, size = keys.shape
    count = places.shape[1]
    strides = keys.stride(0), heads, keys.stride(2), keys.stride(3)
    warps = max(1, min(8, count // 8))
    _move[(layers * heads,)](keys, values, places, *strides, COUNT=count, SIZE=size, num_warps=warps)
