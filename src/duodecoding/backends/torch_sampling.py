"""Coupled sampling on the device: the rules of `sampling`, for all nodes of a pass at once.

The noise is equal to `sampling.gumbel` bit for bit, and on equal logits the chosen tokens are equal too. What is rare and would
need the whole vocabulary sorted (the tail won, the nucleus is larger than the head) is only reported as `unsure`: the caller
settles that node with the numpy version.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch

from duodecoding.sampling import EDGE, HEAD, MIN_TEMPERATURE, TAIL_NOISE
from duodecoding.types import SamplingParams

MAX_HEAD = 1024  # a larger top-k is left to the numpy version

_GOLDEN = 0x9E3779B97F4A7C15 - 2**64  # the constants of `sampling`, as signed numbers: torch has no unsigned arithmetic
_MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
_MIX_2 = 0x94D049BB133111EB - 2**64


class History(NamedTuple):
    """What penalties look at. `paths` is padded with -1."""

    counts: torch.Tensor  # (vocab,) float32, of the answer so far
    seen: torch.Tensor  # (vocab,) bool, tokens of the prompt; all False without a repetition penalty
    paths: torch.Tensor  # (nodes, depth) int64, each node's own guesses


def _shifted(x: torch.Tensor, bits: int) -> torch.Tensor:
    """A logical shift to the right; torch's own keeps the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: torch.Tensor) -> torch.Tensor:
    x = (x ^ _shifted(x, 30)) * _MIX_1
    x = (x ^ _shifted(x, 27)) * _MIX_2
    return x ^ _shifted(x, 31)


def uniform(seed: torch.Tensor, positions: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Numbers in (0, 1), float64, of the shape of `tokens`; `positions` has one entry for each row of them."""
    keys = _mix(seed * _GOLDEN + positions)
    bits = _mix(keys[:, None] + tokens * _GOLDEN)
    return (_shifted(bits, 12).double() + 0.5) * 2.0**-52


def gumbel(seed: torch.Tensor, positions: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Logarithms in float64, rounded to float32 at the end, like the numpy version."""
    return (-torch.log(-torch.log(uniform(seed, positions, tokens)))).float()


@cache
def _has_kernels(device: torch.device) -> bool:
    return device.type == "cuda" and find_spec("triton") is not None


def _kernels(rows: torch.Tensor, k: int) -> Any:
    """`torch_draw`, where it can find the k best of such rows; else None."""
    if not _has_kernels(rows.device):
        return None
    from duodecoding.backends import torch_draw

    return torch_draw if torch_draw.fits(rows.shape[1], k) else None


def largest(rows: torch.Tensor, k: int) -> torch.Tensor:
    """Ids of the k largest entries of each row, best first, ties by id: (rows, k)."""
    if kernels := _kernels(rows, k):
        ids = kernels.largest(rows, k)
        return _ids(_keys(rows.gather(1, ids), ids).sort(dim=1, descending=True).values)
    return _ids(_keys(rows, torch.arange(rows.shape[1], device=rows.device)).topk(k, dim=1).values)


def _keys(values: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Whole numbers in the order of the values, ties by id. No two are equal, so that who sorts them has no choice."""
    bits = (values + 0.0).view(torch.int32)  # adding turns -0 into 0
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    return (ordered << 32) | (0xFFFFFFFF - ids)


def _ids(keys: torch.Tensor) -> torch.Tensor:
    return 0xFFFFFFFF - (keys & 0xFFFFFFFF)


def penalised(logits: torch.Tensor, params: SamplingParams, history: History) -> torch.Tensor:
    """Repetition penalty, then presence and frequency, over the answer so far and each node's path."""
    counts = history.counts.repeat(logits.shape[0], 1)
    counts.scatter_add_(1, history.paths.clamp(min=0), (history.paths >= 0).float())
    present = counts > 0
    rows = logits
    if params.repetition_penalty != 1:
        changed = torch.where(rows > 0, rows / _float32(params.repetition_penalty), rows * _float32(params.repetition_penalty))
        rows = torch.where(present | history.seen, changed, rows)
    taken = counts * _float32(params.frequency_penalty)
    taken += _float32(params.presence_penalty)
    return torch.where(present, rows - taken, rows)


def _float32(value: float) -> float:
    return float(torch.tensor(value, dtype=torch.float32))


def choose(
    logits: torch.Tensor,
    params: SamplingParams,
    seed: torch.Tensor,
    positions: torch.Tensor,
    history: History | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """For every node its token, that token's log-probability, and whether it is `unsure`: (3, nodes) float64.

    `logits` (nodes, vocab) float32; `seed` one int64; `positions` (nodes,) int64; `bias` (vocab,) float32.
    """
    rows = logits if history is None else penalised(logits, params, history)
    if bias is not None:
        rows = rows + bias
    head, whole = min(HEAD, rows.shape[1]), not (params.top_k or params.top_p < 1 or params.min_p > 0)  # the distribution
    if (params.greedy or whole) and (kernels := _kernels(rows, head)):
        temperature = 0.0 if params.greedy else max(params.temperature, MIN_TEMPERATURE)
        return kernels.choose(logits, rows, temperature, seed, positions, head)
    if params.greedy:
        tokens, unsure = rows.argmax(dim=1), torch.zeros_like(positions)
    else:
        tokens, unsure = _draw(rows, params, seed, positions)
    logprobs = logits.gather(1, tokens[:, None])[:, 0] - torch.logsumexp(logits, dim=1)
    return torch.stack([tokens.double(), logprobs.double(), unsure.double()])


def _draw(
    rows: torch.Tensor, params: SamplingParams, seed: torch.Tensor, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    scaled = rows / _float32(max(params.temperature, MIN_TEMPERATURE))
    size = min(params.top_k or HEAD, rows.shape[1])
    ids = largest(scaled, min(size, MAX_HEAD))
    top = scaled.gather(1, ids)  # (nodes, head)
    noise = gumbel(seed, positions, torch.nn.functional.pad(ids, (0, 1), value=TAIL_NOISE))  # the head's, and one for all others
    scores = top + noise[:, :-1]
    if params.top_p < 1 or params.min_p > 0:
        keep = _nucleus(scaled, top, params)
        unsure = keep[:, -1] if not params.top_k and size < rows.shape[1] else torch.zeros_like(keep[:, -1])
        scores = scores.masked_fill(~keep, -torch.inf)
    elif params.top_k:
        unsure = torch.zeros_like(positions, dtype=torch.bool)
    else:
        unsure = _tail(scaled, ids, top, noise[:, -1]) > scores.amax(dim=1)
    tokens = ids.gather(1, scores.argmax(dim=1, keepdim=True))[:, 0]
    return tokens, unsure if size <= MAX_HEAD else torch.ones_like(unsure)


def _nucleus(scaled: torch.Tensor, top: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Which of the head stay under top-p and min-p: (nodes, head) bool."""
    weights = torch.exp((top - top[:, :1]).double())
    total = weights.sum(dim=1, keepdim=True) if params.top_k else torch.exp(scaled - top[:, :1]).sum(dim=1, keepdim=True).double()
    p = weights / total
    before = p.cumsum(dim=1) - p
    keep = (before < params.top_p - EDGE) & (weights >= params.min_p)
    keep[:, 0] = True
    return keep


def _tail(scaled: torch.Tensor, ids: torch.Tensor, top: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """The one number with which everything outside the head competes: (nodes,) float64."""
    weights = torch.exp(scaled - top[:, :1]).scatter(1, ids, 0.0)
    return top[:, 0].double() + torch.log(weights.sum(dim=1).double()) + noise.double()
