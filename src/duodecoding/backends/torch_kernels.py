"""GPU kernels whose result for a row depends on that row alone: not on how many rows share the pass, nor on which slots hold
the row's ancestors. That is what makes an answer in half precision equal in all modes, bit for bit.

Libraries choose another algorithm for another number of rows, which adds up in another order. Here tiles, splits and the order of
every sum are fixed by the model's shape:

* `linear`: the same tiles and the same split of the inner dimension for any number of rows;
* `rms_norm`: one program for each row;
* `tree_attention`: keys are taken in the order of positions, in blocks of BLOCK, folded into one another from left to right; a
  row's own key comes last, by itself. Blocks that lie wholly before the pass are the same for all rows and read once. The others
  are gathered along a path of the tree, so a guess sees its ancestors where it would see them as committed tokens. Rows that hang
  under one path share what is gathered there; what a row does not see changes nothing for it.

Where the GPU can do it (Hopper and later) a kernel begins while the one before it ends: see `_begin`. Results are the same.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from duodecoding.backends import torch_slots

BLOCK = 32  # positions folded at a time
SPLIT = 256  # positions folded by one program of `_partial`
TILE = 16  # rows of the smallest matrix instruction
WIDEST = 64  # (row, query head) pairs of one program of `_partial`
LINES = 8  # lines of the table at work at once, for each key head; trees seldom have more
SHORT = 1024  # slots up to which a single row's blocks are spread over as many programs as there are
MULTIPROCESSORS = 120  # about as many as a large GPU has; the same everywhere, so that results are
SPARE = 12  # more of them on an H200
MOST_TOGETHER = 3  # programs on a multiprocessor
SMALLEST_ROOM = 101_376  # bytes of shared memory that every GPU with bfloat16 has
LARGE_HEADS = 168_000  # bytes for attention with heads of 256 numbers and three loads under way
LOG2E = 1.4426950408889634
FETCHED = 256  # bytes of each row of weights that are in the cache before a product begins
REGISTERS = 168  # for each thread of `_partial`, where there are many rows: three programs have room on a multiprocessor
LEAST_EVEN = 5  # programs on a multiprocessor from which on it does not matter much how many the last ones are
EARLY = True  # whether kernels begin early where they can
FUSED = True  # said, because what Triton does by itself changes from version to version
DEEPER = tl.constexpr(torch_slots.DEEPER)
LOWEST = tl.constexpr(-1e38)  # the largest score of nothing; finite, so that two of them have a difference


@triton.jit
def _begin(EARLY: tl.constexpr):  # type: ignore[no-untyped-def]
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
def _linear(  # type: ignore[no-untyped-def]
    x, w, out, rows, n, k, per_split,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, EVEN: tl.constexpr, EARLY: tl.constexpr, FETCHED: tl.constexpr,
):  # fmt: skip
    """out[split] = x[:, part] @ w[:, part].T. One program for N columns of one split."""
    column, split = tl.program_id(1), tl.program_id(2)
    if FETCHED > 0:  # weights are no kernel's result, so they need not wait for one
        each: tl.constexpr = 128 // N if N < 128 else 1  # addresses of a row: one for every thread
        line = (column * N + tl.arange(0, N)).to(tl.int64)[:, None] * k + split * per_split
        _fetch(w + line + tl.arange(0, each)[None, :] * (FETCHED // each // 2), FETCHED // each)
    _begin(EARLY)
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
def _rms_norm(x, weight, out, size, eps, WIDTH: tl.constexpr, EARLY: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, WIDTH)
    factor = tl.load(weight + col, mask=col < size, other=0.0)
    _begin(EARLY)
    values = tl.load(x + row * size + col, mask=col < size, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt_rn(tl.sum(values * values) / size + eps)
    # Rounded before the weight is applied, as transformers does.
    tl.store(out + row * size + col, (values * scale).to(factor.dtype) * factor, mask=col < size)


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


@triton.jit
def _empty(M: tl.constexpr, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """A partial softmax over nothing: largest score, sum of weights, weighted sum of values. Folded in, it changes nothing."""
    return tl.full((M,), LOWEST, dtype=tl.float32), tl.zeros((M,), dtype=tl.float32), tl.zeros((M, SIZE), dtype=tl.float32)


@triton.jit
def _fold(top, mass, acc, top_2, mass_2, acc_2):  # type: ignore[no-untyped-def]
    """Two partial softmaxes into one. Written with fma so that no compiler contracts it in another way elsewhere."""
    new = tl.maximum(top, top_2)
    keep, add = tl.exp2(top - new), tl.exp2(top_2 - new)
    mass = tl.fma(mass, keep, mass_2 * add)
    acc = tl.fma(acc, tl.broadcast_to(keep[:, None], acc.shape), acc_2 * add[:, None])
    return new, mass, acc


@triton.jit
def _block(q, keys, values, slot, there, seen, stride, scale, SIZE: tl.constexpr, WHOLE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The partial softmax of one block of positions, whose entries lie in `slot`; `there` (BLOCK,) says which have one, `seen`
    (rows, BLOCK) which count for which row. WHOLE: all do, for all."""
    at = slot[:, None] * stride + tl.arange(0, SIZE)[None, :]
    if WHOLE:
        k = tl.load(keys + at)
        scores = tl.dot(q, tl.trans(k)) * scale
        top = tl.max(scores, axis=1)
        weights = tl.exp2(scores - top[:, None])
        v = tl.load(values + at)
    else:
        k = tl.load(keys + at, mask=there[:, None], other=0.0)
        scores = tl.where(seen, tl.dot(q, tl.trans(k)) * scale, LOWEST)
        top = tl.max(scores, axis=1)
        weights = tl.where(seen, tl.exp2(scores - top[:, None]), 0.0)
        v = tl.load(values + at, mask=there[:, None], other=0.0)
    mass = tl.sum(weights, axis=1)
    acc = tl.dot(weights.to(v.dtype), v)
    return top, mass, acc


@triton.jit
def _store(part, part_top, part_mass, at, real, top, mass, acc, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    tl.store(part_top + at, top, mask=real)
    tl.store(part_mass + at, mass, mask=real)
    place = part + at[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    tl.store(place, acc, mask=real[:, None], eviction_policy="evict_last")  # the next kernel wants it in the cache


@triton.jit
def _load(part, part_top, part_mass, at, there, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """A partial softmax as it was stored; an empty one where it is not there."""
    top = tl.load(part_top + at, mask=there, other=LOWEST)
    mass = tl.load(part_mass + at, mask=there, other=0.0)
    acc = tl.load(part + at[:, None] * SIZE + tl.arange(0, SIZE)[None, :], mask=there[:, None], other=0.0)
    return top, mass, acc


@triton.jit
def _partial(  # type: ignore[no-untyped-def]
    q, keys, values, table, part, part_top, part_mass, own, own_top, own_mass,
    rows, width, q_head, q_row, head_stride, slot_stride, scale, splits, blocks, tiles,
    GROUPS: tl.constexpr, SIZE: tl.constexpr, M: tl.constexpr, B: tl.constexpr, S: tl.constexpr, LINES: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Of one key head, M of the (row, query head) pairs: either one split of the blocks before the pass, folded into a part for
    each pair; or a line of the table, all blocks along its path, a part for each pair and block."""
    head, job = tl.program_id(0), tl.program_id(1)
    keys += head.to(tl.int64) * head_stride
    values += head.to(tl.int64) * head_stride
    pair = tl.arange(0, M)
    inner = tl.arange(0, SIZE)
    first, lines = tl.load(table), tl.load(table + 1)
    shared = first // B * B
    _begin(EARLY)
    if job < LINES:
        members: tl.constexpr = M // GROUPS
        for number in range(job, lines, LINES):
            line = table + number * width + 3
            member = tl.load(line + pair // GROUPS, mask=pair < members * GROUPS, other=-1)
            real = member >= 0
            row = tl.where(real, member % DEEPER, 0)
            end = tl.where(real, first + member // DEEPER, 0)  # its position: it sees those before
            last = tl.max(end)
            q_at = q + ((head * GROUPS + pair % GROUPS) * q_head + row * q_row)[:, None] + inner[None, :]
            asked = tl.load(q_at, mask=real[:, None], other=0.0)
            at = head.to(tl.int64) * blocks * rows * GROUPS + row * GROUPS + pair % GROUPS
            for start in tl.range(shared, last, B, num_stages=1):
                position = start + tl.arange(0, B)
                there = position < last
                above = tl.load(line + members + position - first, mask=there & (position >= first), other=0)
                slot = tl.where(position >= first, first + above, position)
                seen = position[None, :] < end[:, None]
                top, mass, acc = _block(asked, keys, values, slot, there, seen, slot_stride, scale, SIZE, False)
                place = at + (start - shared) // B * rows * GROUPS
                _store(own, own_top, own_mass, place, real, top, mass, acc, SIZE)
    else:
        split, tile = (job - LINES) // tiles, (job - LINES) % tiles
        before = tl.minimum(shared, (split + 1) * S)
        if split * S < before:
            pair += tile * M
            real = pair < rows * GROUPS
            q_at = q + ((head * GROUPS + pair % GROUPS) * q_head + pair // GROUPS * q_row)[:, None] + inner[None, :]
            asked = tl.load(q_at, mask=real[:, None], other=0.0)
            top, mass, acc = _empty(M, SIZE)
            for start in range(split * S, before, B):
                slot = start + tl.arange(0, B)
                t, m, a = _block(asked, keys, values, slot, None, None, slot_stride, scale, SIZE, True)
                top, mass, acc = _fold(top, mass, acc, t, m, a)
            at = (head * splits + split).to(tl.int64) * rows * GROUPS + pair
            _store(part, part_top, part_mass, at, real, top, mass, acc, SIZE)


@triton.jit
def _before(  # type: ignore[no-untyped-def]
    part, part_top, part_mass, at, step, end, SIZE: tl.constexpr, S: tl.constexpr, WRITTEN: tl.constexpr,
):  # fmt: skip
    """What is known of the blocks before the pass, a part for each WRITTEN positions: full splits folded into one; the last split
    if it is not full."""
    top, mass, acc = _empty(1, SIZE)
    open_top, open_mass, open_acc = top, mass, acc
    each: tl.constexpr = S // WRITTEN
    if each == 1:
        whole = end // S
        for split in range(0, whole, 4):  # four loads under way at once
            for i in tl.static_range(4):
                t, m, a = _load(part, part_top, part_mass, at + (split + i) * step, (at >= 0) & (split + i < whole), SIZE)
                top, mass, acc = _fold(top, mass, acc, t, m, a)
        open_top, open_mass, open_acc = _load(part, part_top, part_mass, at + whole * step, (at >= 0) & (end % S != 0), SIZE)
    else:
        for start in range(0, end, S):
            open_top, open_mass, open_acc = _empty(1, SIZE)
            for i in tl.static_range(each):
                n = start // WRITTEN + i
                t, m, a = _load(part, part_top, part_mass, at + n * step, (at >= 0) & (n * WRITTEN < end), SIZE)
                open_top, open_mass, open_acc = _fold(open_top, open_mass, open_acc, t, m, a)
            if start + S <= end:
                top, mass, acc = _fold(top, mass, acc, open_top, open_mass, open_acc)
                open_top, open_mass, open_acc = _empty(1, SIZE)
    return top, mass, acc, open_top, open_mass, open_acc


@triton.jit
def _merge(  # type: ignore[no-untyped-def]
    q, keys, values, table, part, part_top, part_mass, own, own_top, own_mass, out,
    rows, width, q_head, q_row, head_stride, slot_stride, scale, splits, blocks,
    GROUPS: tl.constexpr, SIZE: tl.constexpr, B: tl.constexpr, S: tl.constexpr, WRITTEN: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One row and one query head: fold all parts in the order of positions, then the row's own key."""
    row, query = tl.program_id(0), tl.program_id(1)
    head = (query // GROUPS).to(tl.int64)
    first, depth = tl.load(table), tl.load(table + row * width + 2)
    shared, end = first // B * B, first + depth
    inner = tl.arange(0, SIZE)[None, :]
    entry = head * head_stride + (first + row) * slot_stride + inner
    asked = tl.load(q + query * q_head + row * q_row + inner).to(tl.float32)
    k, v = tl.load(keys + entry).to(tl.float32), tl.load(values + entry).to(tl.float32)
    score = tl.sum(asked * k, axis=1) * scale
    _begin(EARLY)  # all above is older than the kernel before this one
    step = rows * GROUPS  # from a part to the next
    at = row * GROUPS + query % GROUPS + tl.arange(0, 1)  # an array of one; `at >= 0` is its mask
    top, mass, acc, open_top, open_mass, open_acc = _before(
        part, part_top, part_mass, head * splits * step + at, step, shared, SIZE, S, WRITTEN
    )
    for start in range(shared, end, B):
        block = head * blocks + (start - shared) // B
        t, m, a = _load(own, own_top, own_mass, block * step + at, at >= 0, SIZE)
        open_top, open_mass, open_acc = _fold(open_top, open_mass, open_acc, t, m, a)
        if (start + B) % S == 0:
            top, mass, acc = _fold(top, mass, acc, open_top, open_mass, open_acc)
            open_top, open_mass, open_acc = _empty(1, SIZE)
    top, mass, acc = _fold(top, mass, acc, open_top, open_mass, open_acc)
    top, mass, acc = _fold(top, mass, acc, score, tl.full((1,), 1.0, dtype=tl.float32), v)
    tl.store(out + (row * tl.num_programs(1) + query) * SIZE + inner, (acc / mass[:, None]).to(out.dtype.element_ty))


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
def _device(device: torch.device) -> tuple[int, int]:
    """Bytes of shared memory for a program, 227 KB on an H200, 99 on a GPU at home; and multiprocessors."""
    if device.type != "cuda":  # Triton's interpreter
        return SMALLEST_ROOM, MULTIPROCESSORS
    found = torch.cuda.get_device_properties(device)
    return int(getattr(found, "shared_memory_per_block_optin", SMALLEST_ROOM)), int(found.multi_processor_count)


def _early(device: torch.device) -> dict[str, Any]:
    """For the launch of a kernel that calls `_begin`."""
    able = device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)
    early = EARLY and able
    return {"EARLY": True, "launch_pdl": True} if early else {"EARLY": False}


def _stages(programs: int, size: int, device: torch.device) -> int:
    """Loads of `size` bytes that a program has under way. The result is the same; but if the programs can all be at work at once,
    or two on each multiprocessor where they are many, they should have the room for it."""
    room, processors = _device(device)
    together = -(-programs // processors)
    together = together if together <= MOST_TOGETHER else 2
    stages = max(3, min(6 - together, room // together // size))
    return max(1, min(stages, room // size))


def _is_even(programs: int, device: torch.device) -> bool:
    """Are all multiprocessors busy about equally long with so many?"""
    each = programs / _device(device)[1]
    return each <= MOST_TOGETHER or each >= LEAST_EVEN


def _product_tile(rows: int) -> int:
    """Rows of one program of `_linear`. None has 32: with those, and no others, some rows were not what they are alone; and two of
    TILE rows take longer than one of 64."""
    return TILE if rows <= TILE else 64 if rows <= 64 else 128


def _attention_tile(pairs: int) -> int:
    """(row, query head) pairs of one program of `_partial`; not 32 either."""
    return TILE if pairs <= 2 * TILE else WIDEST


PLANS: dict[tuple[int, int], tuple[int, int, int]] = {}  # measured ones; they override the rule


@torch.library.custom_op("duodecoding::linear", mutates_args=())
def linear(x: torch.Tensor, weight: torch.Tensor, exact: bool = True) -> torch.Tensor:
    """x (rows, k), weight (n, k) -> the parts of the product, (splits, rows, n) float32: their sum is for the caller to fuse.

    `exact`: not rounded; else a product of one part is, to what x is.
    """
    rows, k = x.shape
    n = weight.shape[0]
    columns, inner, splits = PLANS.get((n, k)) or linear_plan(n, k)
    per_split = -(-k // (splits * inner)) * inner
    tile = _product_tile(rows)
    if tile == TILE and splits == 1 and columns == 128 and _is_even(-(-n // 64), x.device):
        columns, inner = 64, 128  # the order of the sum is the same
    out = torch.empty((splits, rows, n), dtype=_kind(x, splits, exact), device=x.device)
    grid = (-(-rows // tile), -(-n // columns), splits)
    even = n % columns == 0 and per_split * splits == k
    early = _early(x.device)
    fetched = FETCHED if early["EARLY"] and even and x.element_size() * per_split >= FETCHED else 0
    sizes: dict[str, Any] = {"M": tile, "N": columns, "K": inner, "EVEN": even, "FETCHED": fetched} | early
    stages = _stages(math.prod(grid), x.element_size() * (tile + columns) * inner, x.device)
    _linear[grid](x, weight, out, rows, n, k, per_split, **sizes, num_warps=4, num_stages=stages, enable_fp_fusion=FUSED)
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
    options: dict[str, Any] = {"num_warps": 8, "enable_fp_fusion": FUSED} | _early(x.device)
    _rms_norm[(x.numel() // size,)](x, weight, out, size, eps, WIDTH=triton.next_power_of_2(size), **options)
    return out


@rms_norm.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def move(keys: torch.Tensor, values: torch.Tensor, places: torch.Tensor) -> None:
    """Entries of all layers between slots, from `places[0]` to `places[1]`; how many is a power of two. Both are (layers, 1, heads,
    slots, size) and lie alike."""
    layers, _, heads, _, size = keys.shape
    count = places.shape[1]
    strides = keys.stride(0), heads, keys.stride(2), keys.stride(3)
    warps = max(1, min(8, count // 8))
    _move[(layers * heads,)](keys, values, places, *strides, COUNT=count, SIZE=size, num_warps=warps)


def members(rows: int, groups: int) -> int:
    """Rows in a line of the table of `tree_attention`; `groups`: query heads that share a key head."""
    return _attention_tile(rows * groups) // groups


@torch.library.custom_op("duodecoding::tree_attention", mutates_args=())
def tree_attention(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, table: torch.Tensor, scale: float, length: int
) -> torch.Tensor:
    """q (heads, rows, size) over the slots in keys and values (kv heads, slots, size) -> (rows, heads, size).

    `table`: see `torch_inputs.Inputs`. `length`: slots in use.
    """
    heads, rows, size = q.shape
    shared_heads = keys.shape[0]
    groups = heads // shared_heads
    written = BLOCK if rows * groups <= TILE and length <= SHORT else SPLIT  # the folds are the same, done here or there
    splits = -(-length // written)
    blocks = -(-(BLOCK - 1 + rows) // BLOCK)  # that a path has at most, behind the last one that is the same for all
    tile = _attention_tile(rows * groups)
    tiles, lines = -(-rows * groups // tile), min(rows, LINES)
    pairs = rows * groups
    part = torch.empty((shared_heads, splits + blocks, pairs, size), dtype=torch.float32, device=q.device)
    tops = torch.empty((2, shared_heads, splits + blocks, pairs), dtype=torch.float32, device=q.device)
    own = shared_heads * splits * pairs  # where parts of the paths begin
    parts = (part, tops[0], tops[1], part.view(-1)[own * size :], tops[0].view(-1)[own:], tops[1].view(-1)[own:])
    out = torch.empty((rows, heads, size), dtype=q.dtype, device=q.device)
    numbers = (rows, table.shape[1], q.stride(0), q.stride(1), keys.stride(0), keys.stride(1), scale * LOG2E, splits, blocks)
    # No multiplication joined with an addition but those written so: which ones would be is the compiler's choice.
    common: dict[str, Any] = {"GROUPS": groups, "SIZE": size, "B": BLOCK, "enable_fp_fusion": False} | _early(q.device)
    stages = 3 if size <= 128 or _device(q.device)[0] > LARGE_HEADS else 1
    wide: dict[str, Any] = {"M": tile, "S": written, "LINES": lines, "num_warps": tile // TILE, "num_stages": stages}
    if tile > TILE and size == 128:
        wide["maxnreg"] = REGISTERS
    _partial[(shared_heads, lines + splits * tiles)](q, keys, values, table, *parts, *numbers, tiles, **common, **wide)
    one: dict[str, Any] = {"S": SPLIT, "WRITTEN": written, "num_warps": 1}
    _merge[(rows, heads)](q, keys, values, table, *parts, out, *numbers, **common, **one)
    return out


@tree_attention.register_fake
def _(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, table: torch.Tensor, scale: float, length: int) -> torch.Tensor:
    return q.new_empty((q.shape[1], q.shape[0], q.shape[2]))
