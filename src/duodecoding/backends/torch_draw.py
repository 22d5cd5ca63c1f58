"""GPU kernels for `torch_sampling`: a token for every row in two launches, whatever the number of rows.

A row is cut into parts. The first kernel finds the largest of each part, the second those of the row among them, and draws. What
is found for a row depends on that row alone, as in `torch_kernels`.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from duodecoding.sampling import TAIL_NOISE

PART = 4096  # logits of one program
MOST = 16384  # candidates of a row; more are left to torch
LOWEST = tl.constexpr(-1e38)  # finite, so that two of them have a difference
NOBODY = tl.constexpr(2**31 - 1)  # an id that no token has
TAIL = tl.constexpr(TAIL_NOISE)
GOLDEN, MIX_1, MIX_2 = (  # the constants of `sampling`
    tl.constexpr(0x9E3779B97F4A7C15),
    tl.constexpr(0xBF58476D1CE4E5B9),
    tl.constexpr(0x94D049BB133111EB),
)
UNIT = tl.constexpr(2.0**-52)


@triton.jit
def _mix(x):  # type: ignore[no-untyped-def]
    x = (x ^ (x >> 30)) * MIX_1
    x = (x ^ (x >> 27)) * MIX_2
    return x ^ (x >> 31)


@triton.jit
def _gumbel(seed, position, token):  # type: ignore[no-untyped-def]
    """The noise of `sampling.gumbel`, bit for bit; all three are int64."""
    key = _mix(seed.to(tl.uint64) * GOLDEN + position.to(tl.uint64))
    bits = _mix(key + token.to(tl.uint64) * GOLDEN)
    u = ((bits >> 12).to(tl.float64) + 0.5) * UNIT
    return (-tl.log(-tl.log(u))).to(tl.float32)


@triton.jit
def _rank(x, there):  # type: ignore[no-untyped-def]
    """Whole numbers in the order of the floats; what is not there comes last."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.uint32, bitcast=True)  # -0 counts as 0
    bits = tl.where(bits >> 31 == 1, bits ^ 0xFFFFFFFF, bits | 0x80000000)
    return tl.where(there, bits, 0)


@triton.jit
def _are_best(ranks, k):  # type: ignore[no-untyped-def]
    """Which k are the largest, ties by place. The k-th largest is found from its highest bits down, two at a time."""
    least = tl.full((), 0, dtype=tl.uint32)
    for i in tl.static_range(16):
        a, b, c = least + (1 << (30 - 2 * i)), least + (2 << (30 - 2 * i)), least + (3 << (30 - 2 * i))
        found = (ranks >= a).to(tl.int64) + ((ranks >= b).to(tl.int64) << 20) + ((ranks >= c).to(tl.int64) << 40)
        counts = tl.sum(found)
        least = tl.where((counts & 0xFFFFF) >= k, a, least)
        least = tl.where(((counts >> 20) & 0xFFFFF) >= k, b, least)
        least = tl.where((counts >> 40) >= k, c, least)
    above, ties = ranks > least, ranks == least
    left = k - tl.sum(above.to(tl.int32))
    return above | (ties & (tl.cumsum(ties.to(tl.int32), 0) <= left))


@triton.jit
def _parts(  # type: ignore[no-untyped-def]
    logits, rows, temperature, tops, masses, values, ids, rests, row_tops, vocab, stride, row_stride, k,
    PART: tl.constexpr, DRAWS: tl.constexpr,
):  # fmt: skip
    """Of one part of a row: what its logits add up to; and its best token, or its k best and what the others add up to."""
    row, part, parts = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    place = part * PART + tl.arange(0, PART)
    there = place < vocab
    at = row * parts + part
    x = tl.load(logits + row * stride + place, mask=there, other=float("-inf"))
    top = tl.maximum(tl.max(x), LOWEST)
    tl.store(tops + at, top)
    tl.store(masses + at, tl.sum(tl.exp(x - top)))
    x = tl.load(rows + row * row_stride + place, mask=there, other=float("-inf"))
    if DRAWS:
        x = tl.div_rn(x, temperature)
        top = tl.maximum(tl.max(x), LOWEST)
        best = _are_best(_rank(x, there), k)
        to = at * k + tl.cumsum(best.to(tl.int32), 0) - 1
        tl.store(values + to, x, mask=best)
        tl.store(ids + to, tl.where(there, place, NOBODY), mask=best)
        tl.store(rests + at, tl.sum(tl.where(best, 0.0, tl.exp(x - top))))
        tl.store(row_tops + at, top)
    else:
        top = tl.max(x)
        tl.store(values + at, top)
        tl.store(ids + at, tl.min(tl.where(there & (x == top), place, NOBODY)))


@triton.jit
def _log_sum(tops, masses, there, at):  # type: ignore[no-untyped-def]
    top = tl.load(tops + at, mask=there, other=LOWEST)
    mass = tl.load(masses + at, mask=there, other=0.0)
    most = tl.max(top)
    return most + tl.log(tl.sum(mass * tl.exp(top - most)))


@triton.jit
def _settle(  # type: ignore[no-untyped-def]
    logits, tops, masses, values, ids, rests, row_tops, seed, positions, found, head, vocab, stride, k, parts,
    CANDIDATES: tl.constexpr, PARTS: tl.constexpr, DRAWS: tl.constexpr, HEAD: tl.constexpr,
):  # fmt: skip
    """One row: its token, that one's log-probability, and whether the tail would have won; or its k best tokens, by id."""
    row, rows = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    place, part = tl.arange(0, CANDIDATES), tl.arange(0, PARTS)
    each = k if DRAWS else 1
    inside = place < parts * each
    x = tl.load(values + row * parts * each + place, mask=inside, other=float("-inf"))
    token = tl.load(ids + row * parts * each + place, mask=inside, other=NOBODY)
    there = token != NOBODY
    unsure = 0.0
    if DRAWS:
        best = _are_best(_rank(x, there), k)
        if HEAD:
            tl.store(head + row * k + tl.cumsum(best.to(tl.int32), 0) - 1, token.to(tl.int64), mask=best)
        else:
            position, key = tl.load(positions + row), tl.load(seed)
            scores = tl.where(best, x + _gumbel(key, position, token.to(tl.int64)), float("-inf"))
            most = tl.max(scores)
            others = tl.load(row_tops + row * parts + part, mask=part < parts, other=LOWEST)
            rest = tl.load(rests + row * parts + part, mask=part < parts, other=0.0)
            top = tl.max(others)
            mass = tl.sum(tl.where(best, 0.0, tl.exp(x - top))) + tl.sum(rest * tl.exp(others - top))
            noise = _gumbel(key, position, tl.full((), TAIL, dtype=tl.int64))
            tail = top.to(tl.float64) + tl.log(mass.to(tl.float64)) + noise.to(tl.float64)
            unsure = (tail > most.to(tl.float64)).to(tl.float64)
            x = tl.where(scores == most, x, float("-inf"))  # of equal scores the likelier token's counts
    winner = tl.min(tl.where(there & (x == tl.max(x)), token, NOBODY))
    winner = tl.minimum(winner, vocab - 1)
    chosen = tl.load(logits + row * stride + winner)
    part_at = row * parts + part
    tl.store(found + row, winner.to(tl.float64))
    tl.store(found + rows + row, (chosen - _log_sum(tops, masses, part < parts, part_at)).to(tl.float64))
    tl.store(found + 2 * rows + row, unsure)


def fits(vocab: int, k: int) -> bool:
    """Is a row of that many logits, of which the k best are wanted, something for these kernels?"""
    return k <= PART and triton.next_power_of_2(-(-vocab // PART) * k) <= MOST


def choose(
    logits: torch.Tensor, rows: torch.Tensor, temperature: float, seed: torch.Tensor, positions: torch.Tensor, k: int
) -> torch.Tensor:
    """For every row its token, that token's log-probability in `logits`, and whether the tail won: (3, rows) float64. `rows`: the
    logits as penalties and biases left them. `temperature` 0: the best; else drawn among the k best."""
    return _run(logits, rows, temperature, seed, positions, k, head=False)[0]


def largest(rows: torch.Tensor, k: int) -> torch.Tensor:
    """Ids of the k best of each row, by id: (rows, k)."""
    nothing = torch.empty(rows.shape[0], dtype=torch.int64, device=rows.device)
    return _run(rows, rows, 1.0, nothing[0], nothing, k, head=True)[1]


def _run(
    logits: torch.Tensor, rows: torch.Tensor, temperature: float, seed: torch.Tensor, positions: torch.Tensor, k: int, *, head: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    count, vocab = logits.shape
    draws, parts, device = temperature > 0, -(-vocab // PART), logits.device
    each = k if draws else 1
    sums = torch.empty((4, count, parts), dtype=torch.float32, device=device)  # tops, masses, rests, tops of `rows`
    values = torch.empty((count, parts, each), dtype=torch.float32, device=device)
    ids = torch.empty((count, parts, each), dtype=torch.int32, device=device)
    found = torch.empty((3, count), dtype=torch.float64, device=device)
    best = torch.empty((count, k if head else 0), dtype=torch.int64, device=device)
    first: dict[str, Any] = {"PART": PART, "DRAWS": draws, "num_warps": 8, "enable_fp_fusion": False}
    strides = logits.stride(0), rows.stride(0)
    _parts[(count, parts)](
        logits, rows, temperature or 1.0, sums[0], sums[1], values, ids, sums[2], sums[3], vocab, *strides, k, **first
    )
    candidates = max(16, triton.next_power_of_2(parts * each))
    second: dict[str, Any] = {
        "CANDIDATES": candidates,
        "PARTS": max(16, triton.next_power_of_2(parts)),
        "DRAWS": draws,
        "HEAD": head,
    }
    second |= {"num_warps": min(16, max(1, candidates // 512)), "enable_fp_fusion": False}
    _settle[(count,)](
        logits, sums[0], sums[1], values, ids, sums[2], sums[3], seed, positions, found, best, vocab, logits.stride(0), k, parts,
        **second,
    )  # fmt: skip
    return found, best
