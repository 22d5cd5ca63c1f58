"""Attention over a tree of rows, in two kernels, whose result for a row depends on the row's path alone (see `torch_kernels`).

Keys are taken in the order of positions, in blocks of BLOCK, folded into one another from left to right: the blocks of a split
first, then the splits. A row's own key comes last, by itself. Blocks that lie wholly before the pass are the same for all rows and
read once. The others are gathered along a path of the tree, so a guess sees its ancestors where it would see them as committed
tokens. Rows that hang under one path share what is gathered there; what a row does not see changes nothing for it.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from duodecoding.backends import torch_slots
from duodecoding.backends.torch_kernels import TILE, begin, device_room, early

BLOCK = 32  # positions folded at a time
SPLIT = 256  # positions of a split at first, folded by one program of `_partial`
SPLITS = 65_536  # positions of all key heads from which on a split has twice as many, and from four times this on four times
ALL = 1 << 16  # splits, more than there are
WIDEST = 64  # (row, query head) pairs of one program of `_partial`
LINES = 8  # programs, for each key head, that share out the blocks of the table's lines; trees seldom have more lines
SHORT = 1024  # slots up to which a single row's blocks are spread over as many programs as there are
LARGE_HEADS = 168_000  # bytes for attention with heads of 256 numbers and three loads under way
LOG2E = 1.4426950408889634
REGISTERS = 168  # for each thread of `_partial`, where there are many rows: three programs have room on a multiprocessor
DEEPER = tl.constexpr(torch_slots.DEEPER)
LOWEST = tl.constexpr(-1e38)  # the largest score of nothing; finite, so that two of them have a difference


@triton.jit
def _start(split, S: tl.constexpr, FEW: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where a split begins. They have S positions at first, 2 S from FEW * S on, 4 S from 4 * FEW * S on: by then there are enough
    of them for all multiprocessors, and each is a part to be written and read, for every row."""
    more: tl.constexpr = FEW // 2 * 3
    long, longer = tl.minimum(tl.maximum(split - FEW, 0), more), tl.maximum(split - FEW - more, 0)
    return (tl.minimum(split, FEW) + 2 * long + 4 * longer) * S


@triton.jit
def _whole(end, S: tl.constexpr, FEW: tl.constexpr):  # type: ignore[no-untyped-def]
    """How many splits end at `end` or before."""
    once: tl.constexpr = FEW * S
    long, longer = tl.minimum(tl.maximum(end - once, 0), 3 * once), tl.maximum(end - 4 * once, 0)
    return tl.minimum(end, once) // S + long // (2 * S) + longer // (4 * S)


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
    GROUPS: tl.constexpr, SIZE: tl.constexpr, M: tl.constexpr, B: tl.constexpr, S: tl.constexpr, FEW: tl.constexpr,
    LINES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Of one key head, M of the (row, query head) pairs: either one split of the blocks before the pass, folded into a part for
    each pair; or every LINES-th block of the table's lines, along their paths, a part for each pair."""
    head, job = tl.program_id(0), tl.program_id(1)
    keys += head.to(tl.int64) * head_stride
    values += head.to(tl.int64) * head_stride
    pair = tl.arange(0, M)
    inner = tl.arange(0, SIZE)
    first, lines = tl.load(table), tl.load(table + 1)
    shared = first // B * B
    begin(EARLY)
    if job < LINES:
        members: tl.constexpr = M // GROUPS
        for number in tl.range(job, lines * blocks, LINES, num_stages=1):  # the first blocks of all lines, then the second ones
            line, block = table + number % lines * width + 3, number // lines
            member = tl.load(line + pair // GROUPS, mask=pair < members * GROUPS, other=-1)
            real = member >= 0
            row = tl.where(real, member % DEEPER, 0)
            end = tl.where(real, first + member // DEEPER, 0)  # its position: it sees those before
            last = tl.max(end)
            if shared + block * B < last:
                q_at = q + ((head * GROUPS + pair % GROUPS) * q_head + row * q_row)[:, None] + inner[None, :]
                asked = tl.load(q_at, mask=real[:, None], other=0.0)
                position = shared + block * B + tl.arange(0, B)
                there = position < last
                above = tl.load(line + members + position - first, mask=there & (position >= first), other=0)
                slot = tl.where(position >= first, first + above, position)
                seen = position[None, :] < end[:, None]
                top, mass, acc = _block(asked, keys, values, slot, there, seen, slot_stride, scale, SIZE, False)
                at = (head.to(tl.int64) * blocks + block) * rows * GROUPS + row * GROUPS + pair % GROUPS
                _store(own, own_top, own_mass, at, real, top, mass, acc, SIZE)
    else:
        split, tile = splits - 1 - (job - LINES) // tiles, (job - LINES) % tiles  # the longest ones first
        left = _start(split, S, FEW)
        before = tl.minimum(shared, _start(split + 1, S, FEW))
        if left < before:
            pair += tile * M
            real = pair < rows * GROUPS
            q_at = q + ((head * GROUPS + pair % GROUPS) * q_head + pair // GROUPS * q_row)[:, None] + inner[None, :]
            asked = tl.load(q_at, mask=real[:, None], other=0.0)
            top, mass, acc = _empty(M, SIZE)
            for start in range(left, before, B):
                slot = start + tl.arange(0, B)
                t, m, a = _block(asked, keys, values, slot, None, None, slot_stride, scale, SIZE, True)
                top, mass, acc = _fold(top, mass, acc, t, m, a)
            at = (head * splits + split).to(tl.int64) * rows * GROUPS + pair
            _store(part, part_top, part_mass, at, real, top, mass, acc, SIZE)


@triton.jit
def _before(  # type: ignore[no-untyped-def]
    part, part_top, part_mass, at, step, end, SIZE: tl.constexpr, S: tl.constexpr, FEW: tl.constexpr, WRITTEN: tl.constexpr,
):  # fmt: skip
    """What is known of the blocks before the pass, a part for each WRITTEN positions: full splits folded into one; the last split
    if it is not full."""
    top, mass, acc = _empty(1, SIZE)
    open_top, open_mass, open_acc = top, mass, acc
    each: tl.constexpr = S // WRITTEN
    if each == 1:
        whole = _whole(end, S, FEW)
        for split in range(0, whole, 4):  # four loads under way at once
            for i in tl.static_range(4):
                t, m, a = _load(part, part_top, part_mass, at + (split + i) * step, (at >= 0) & (split + i < whole), SIZE)
                top, mass, acc = _fold(top, mass, acc, t, m, a)
        is_open = (at >= 0) & (_start(whole, S, FEW) < end)
        open_top, open_mass, open_acc = _load(part, part_top, part_mass, at + whole * step, is_open, SIZE)
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
    GROUPS: tl.constexpr, SIZE: tl.constexpr, B: tl.constexpr, S: tl.constexpr, FEW: tl.constexpr,
    WRITTEN: tl.constexpr, EARLY: tl.constexpr,
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
    begin(EARLY)  # all above is older than the kernel before this one
    step = rows * GROUPS  # from a part to the next
    at = row * GROUPS + query % GROUPS + tl.arange(0, 1)  # an array of one; `at >= 0` is its mask
    top, mass, acc, open_top, open_mass, open_acc = _before(
        part, part_top, part_mass, head * splits * step + at, step, shared, SIZE, S, FEW, WRITTEN
    )
    for start in range(shared, end, B):
        block = head * blocks + (start - shared) // B
        t, m, a = _load(own, own_top, own_mass, block * step + at, at >= 0, SIZE)
        open_top, open_mass, open_acc = _fold(open_top, open_mass, open_acc, t, m, a)
        if _start(_whole(start + B, S, FEW), S, FEW) == start + B:
            top, mass, acc = _fold(top, mass, acc, open_top, open_mass, open_acc)
            open_top, open_mass, open_acc = _empty(1, SIZE)
    top, mass, acc = _fold(top, mass, acc, open_top, open_mass, open_acc)
    top, mass, acc = _fold(top, mass, acc, score, tl.full((1,), 1.0, dtype=tl.float32), v)
    tl.store(out + (row * tl.num_programs(1) + query) * SIZE + inner, (acc / mass[:, None]).to(out.dtype.element_ty))


def _attention_tile(pairs: int) -> int:
    """(row, query head) pairs of one program of `_partial`; not 32 either."""
    return TILE if pairs <= 2 * TILE else WIDEST


def few_splits(heads: int) -> int:
    """How many splits of SPLIT positions there are, with so many key heads. A multiple of four."""
    return 4 * -(-SPLITS // (heads * 4 * SPLIT))


def count_splits(length: int, few: int) -> int:
    """How many there are in so many positions. See `_start`."""
    once = few * SPLIT
    long, longer = min(max(length - once, 0), 3 * once), max(length - 4 * once, 0)
    return -(-min(length, once) // SPLIT) + -(-long // (2 * SPLIT)) + -(-longer // (4 * SPLIT))


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
    few = few_splits(shared_heads)
    splits = -(-length // BLOCK) if written == BLOCK else count_splits(length, few)
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
    common: dict[str, Any] = {"GROUPS": groups, "SIZE": size, "B": BLOCK, "enable_fp_fusion": False} | early(q.device)
    stages = 3 if size <= 128 or device_room(q.device)[0] > LARGE_HEADS else 1
    wide: dict[str, Any] = {"M": tile, "S": written, "FEW": few if written == SPLIT else ALL, "LINES": lines}
    wide |= {"num_warps": tile // TILE, "num_stages": stages}
    if tile > TILE and size == 128:
        wide["maxnreg"] = REGISTERS
    _partial[(shared_heads, lines + splits * tiles)](q, keys, values, table, *parts, *numbers, tiles, **common, **wide)
    one: dict[str, Any] = {"S": SPLIT, "FEW": few, "WRITTEN": written, "num_warps": 1}
    _merge[(rows, heads)](q, keys, values, table, *parts, out, *numbers, **common, **one)
    return out


@tree_attention.register_fake
def _(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, table: torch.Tensor, scale: float, length: int) -> torch.Tensor:
    return q.new_empty((q.shape[1], q.shape[0], q.shape[2]))
