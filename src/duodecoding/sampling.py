"""Coupled sampling: logits + parameters + position -> token. Pure.

The noise of token v at position t under seed s is a fixed number, so the target's token is a function of its own logits and
nothing else: not of the draft, the mode, the timing. The draft adds the same noise to its own logits, which makes its best
guesses the tokens the target is most likely to draw; who guesses without logits knows the noise, too (`Luck`).

Gumbel noise for a whole vocabulary is dear. The `HEAD` largest logits get noise of their own; all others compete as one, since
the maximum of perturbed logits over a set is Gumbel-distributed around the set's log-sum-exp, independent of which token wins.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from duodecoding.types import SamplingParams

Row = npt.NDArray[np.float32]  # (vocab,)
Ids = npt.NDArray[np.int64]

HEAD = 256
SORTED_AT_ONCE = 120  # values that are sorted as fast as the best of them are found
GUESS_HEAD = 64  # tokens that a draft's guesses are taken from
MIN_TEMPERATURE = 1e-6  # below it noise decides nothing, and logits divided by it leave the range of float32
TAIL_NOISE = -1  # pseudo-tokens of the noise: the tail's own Gumbel, and the draw inside the tail
TAIL_DRAW = -2
SAFE_EXPONENT = 50.0  # a million times e^50 is within float32, and what falls below its range beside e^-50 does not count
EDGE = 1e-6  # a nucleus ends this much early: sums that should meet top-p exactly then cannot fall on either side by rounding

GOLDEN, MIX_1, MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
WORD = (1 << 64) - 1
_GOLDEN, _MIX_1, _MIX_2 = np.uint64(GOLDEN), np.uint64(MIX_1), np.uint64(MIX_2)


class Choice(NamedTuple):
    """The target's token after some path, and its log-probability in the unmodified distribution."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # the likeliest tokens there, where they were asked for


class Constraint(Protocol):
    """What an answer may be."""

    def commit(self, tokens: Sequence[int]) -> None: ...

    def allowed(self, path: Sequence[int]) -> npt.NDArray[np.bool_]:
        """For every token (vocab,) whether it may follow the committed ones and `path`."""
        ...


class Guess(NamedTuple):
    """A draft's guess of the next token and how likely it thinks the target agrees."""

    token: int
    p: float


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finaliser of splitmix64: every input bit reaches every output bit."""
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    return x ^ (x >> np.uint64(31))


def uniform(seed: int, position: int, tokens: Ids) -> npt.NDArray[np.float64]:
    """Numbers in (0, 1), a hash of (seed, position, token): integer arithmetic only, so the same on every device."""
    with np.errstate(over="ignore"):
        key = np.array([seed], dtype=np.uint64) * _GOLDEN + np.array([position], dtype=np.uint64)
        bits = _mix(_mix(key) + tokens.astype(np.uint64) * _GOLDEN)
    # 52 bits, not 53: with the half that keeps 0 out, the largest would round to 1, whose noise is infinite.
    return ((bits >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52


def gumbel(seed: int, position: int, tokens: Ids) -> Row:
    """Computed in float64 and rounded, so that two libraries whose logarithms differ in the last bit still agree."""
    noise: Row = (-np.log(-np.log(uniform(seed, position, tokens)))).astype(np.float32)
    return noise


class Luck:
    """The noise of an answer, one token at a time, for those that guess without logits.

    A token of probability p is drawn if its noise g lifts it above all others, the best of which, with noise, is Gumbel-distributed
    around log(1 - p). That happens with a chance of u ** ((1 - p) / p), where g = -log(-log(u)) is known to all.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed * GOLDEN
        self._keys: dict[int, int] = {}  # by position

    def uniform(self, position: int, token: int) -> float:
        """The same number as the function of that name finds, in less than a microsecond."""
        key = self._keys.get(position)
        if key is None:
            key = self._keys[position] = _mixed(self._seed + position)
        x = key + token * GOLDEN & WORD  # `_mixed`, where a call would take as long as its work
        x = (x ^ x >> 30) * MIX_1 & WORD
        x = (x ^ x >> 27) * MIX_2 & WORD
        return ((x ^ x >> 31) >> 12) * 2.0**-52 + 2.0**-53

    def chance(self, p: float, position: int, token: int) -> float:
        """That a token whose probability is `p`, more than 0, is drawn at `position`."""
        chance: float = self.uniform(position, token) ** ((1 - p) / p)
        return chance

    def without(self, shares: Mapping[int, float], position: int) -> dict[int, float]:
        """What `guesses` would have said of these tokens at another position, whose noise is not known; their sum stays."""
        plain = {token: share * -math.log(self.uniform(position, token)) for token, share in shares.items()}
        scale = sum(shares.values()) / max(sum(plain.values()), sys.float_info.min)
        return {token: min(share * scale, 1.0) for token, share in plain.items()}


def _mixed(x: int) -> int:
    """`_mix` of one number; what is beyond 64 bits does not count."""
    x &= WORD
    x = (x ^ x >> 30) * MIX_1 & WORD
    x = (x ^ x >> 27) * MIX_2 & WORD
    return x ^ x >> 31


def near_top(row: Row, k: int, scale: float = 1.0) -> Ids:
    """Ids of the entries close to the maximum, by id, at least k of them: what a search for the best can be limited to.
    `scale`: what the entries will be divided by."""
    top, width = row.item(row.argmax()), 10.0 * max(1.0, scale)  # argmax takes half of the time of max
    if not math.isfinite(top):
        return np.arange(row.size)
    near: Ids = (row > top - width).nonzero()[0]
    while near.size < k and width < 1e4:
        width *= 1.7
        near = (row > top - width).nonzero()[0]
    return near if near.size >= k else np.arange(row.size)  # else: entries at minus infinity


def best_of(row: Row, ids: Ids, k: int) -> Ids:
    """The k of `ids` with the largest entries, best first, ties by id."""
    return ids[places_of_best(row[ids], k)]


def places_of_best(values: Row, k: int) -> Ids:
    """Where the k largest values are, best first, ties by place."""
    least = values.size - k
    if least <= max(3 * k, SORTED_AT_ONCE):
        return (-values).argsort(kind="stable")[:k]
    parted = values.copy()
    parted.partition(least)
    places: Ids = (values >= parted[least]).nonzero()[0]
    return places[(-values[places]).argsort(kind="stable")[:k]]


def largest(row: Row, k: int) -> Ids:
    """Ids of the k largest entries, best first, ties by id. A full sort is 20 times dearer."""
    k = min(k, row.size)
    return best_of(row, near_top(row, k), k)


class Sampler:
    """The sampling of one answer. Knows the tokens so far, for the penalties; `commit` adds to them."""

    def __init__(self, params: SamplingParams, prompt: Sequence[int], vocab_size: int) -> None:
        self.params = params
        self.constraint: Constraint | None = None
        self._prompt = np.unique(np.asarray(prompt, dtype=np.int64)) if params.repetition_penalty != 1 else None
        self._counts: Counter[int] = Counter()
        self._biased = np.array([t for t in params.logit_bias if t < vocab_size], dtype=np.int64)
        self._bias = np.array([params.logit_bias[int(t)] for t in self._biased], dtype=np.float32)
        self._counting = bool(self._prompt is not None or params.presence_penalty or params.frequency_penalty)
        self._weights = np.empty(vocab_size, dtype=np.float32)  # scratch

    def commit(self, tokens: Sequence[int]) -> None:
        if self._counting:
            self._counts.update(tokens)
        if self.constraint is not None:
            self.constraint.commit(tokens)

    @property
    def needs_row(self) -> bool:
        """Must `choose` see the logits, whoever could choose without it?"""
        return self.constraint is not None or self.params.top_logprobs > 0

    @property
    def plain(self) -> bool:
        """Are the logits taken as they are?"""
        return not self._counting and not self.params.logit_bias

    @property
    def needs_path(self) -> bool:
        """Do guesses depend on the tokens since the last commit?"""
        return self._counting

    def choose(self, logits: Row, position: int, path: Sequence[int] = ()) -> Choice:
        """The token at `position`, after the committed tokens and `path`."""
        row = self._penalised(logits, path)
        if self.constraint is not None:
            row = np.where(self.constraint.allowed(path), row, np.float32(-np.inf))
        token = int(row.argmax()) if self.params.greedy else self._draw(row, position)
        top = logits[token] if self.params.greedy and row is logits else logits.max()
        total = self._log_sum_exp(logits, top)
        likeliest = largest(logits, self.params.top_logprobs).tolist() if self.params.top_logprobs else ()
        return Choice(token, float(logits[token] - total), tuple((id, float(logits[id] - total)) for id in likeliest))

    def guesses(self, logits: Row, position: int, k: int, path: Sequence[int] = (), ids: Ids | None = None) -> list[Guess]:
        """The k tokens the target will most likely choose at `position`, judged by the draft's logits.

        `ids`: the token of each logit, ascending, if the draft does not know all tokens.

        A step of a small draft takes a millisecond, so only the best tokens are looked at: what they leave out is in the tail,
        and probabilities are calibrated later anyway.
        """
        params = self.params
        row = logits if self.plain else self._penalised(logits, path, ids)
        near = near_top(row, min(k, row.size), params.temperature)
        values = row[near]
        best = places_of_best(values, k if params.greedy else GUESS_HEAD)
        values -= values[best[0]]
        tokens = near[best] if ids is None else ids[near[best]]
        if params.greedy:
            weights = np.exp(values)
            p = weights[best] / np.add.reduce(weights)
        else:
            tokens, p = self._perturbed(tokens, values[best], values, position, k)
        return list(map(Guess, tokens.tolist(), p.tolist()))

    def _perturbed(self, ids: Ids, best: Row, near: Row, position: int, k: int) -> tuple[Ids, Row]:
        """The k best with the noise of this position, and their shares. `best`: logits of `ids` below the first, `near`: of all."""
        params, scale = self.params, np.float32(max(self.params.temperature, MIN_TEMPERATURE))
        scores = best / scale
        limited = params.top_k > 0 or params.top_p < 1 or params.min_p > 0  # then no other token has a chance
        rest = 0.0 if limited else float(np.exp(near / scale).sum() - np.exp(scores).sum())
        ids, scores = self._likely(ids, scores)
        scores = scores + gumbel(params.seed, position, ids)
        order = np.argsort(-scores, kind="stable")
        ids, scores = ids[order], scores[order]
        weights = np.exp(scores - max(scores[0], 0))
        return ids[:k], weights[:k] / (weights.sum() + max(rest, 0) * np.exp(-max(scores[0], 0)))

    def _likely(self, ids: Ids, scaled: Row) -> tuple[Ids, Row]:
        """Top-k, top-p and min-p among the best tokens, as if there were no others. The best one always stays."""
        params = self.params
        keep = np.ones(ids.size, dtype=bool)
        if params.top_k:
            keep[params.top_k :] = False
        if params.top_p < 1 or params.min_p > 0:
            p = np.exp(scaled - scaled[0]) * keep
            p /= p.sum()
            keep &= (np.cumsum(p) - p < params.top_p) & (p >= params.min_p * p[0])
            keep[0] = True  # a top-p of less than float32 knows is 0 there
        return ids[keep], scaled[keep]

    def _penalised(self, logits: Row, path: Sequence[int], ids: Ids | None = None) -> Row:
        """Repetition penalty, then presence and frequency, then bias. The caller's row is left alone."""
        if not self._counting and not self._biased.size:
            return logits
        if ids is not None:
            whole = np.zeros_like(self._weights)
            whole[ids] = logits
            return self._penalised(whole, path)[ids]
        row, params = logits.copy(), self.params
        if self._counting:
            counts = self._counts + Counter(path)
            ids = np.fromiter(counts, dtype=np.int64, count=len(counts))
            if self._prompt is not None:
                seen = np.union1d(self._prompt, ids)
                penalty = np.float32(params.repetition_penalty)
                row[seen] = np.where(row[seen] > 0, row[seen] / penalty, row[seen] * penalty)
            times = np.fromiter(counts.values(), dtype=np.float32, count=len(counts))
            row[ids] -= np.float32(params.presence_penalty) + np.float32(params.frequency_penalty) * times
        row[self._biased] += self._bias
        return row

    def _draw(self, row: Row, position: int) -> int:
        ids, scores, tail = self._contest(row, position, HEAD)
        best = int(scores.argmax())
        if tail <= scores[best]:
            return int(ids[best])
        # The tail won as a whole: one more draw inside it, by its own probabilities. Float32 would lose small steps of the sum.
        u = float(uniform(self.params.seed, position, np.array([TAIL_DRAW]))[0])
        mass = np.cumsum(self._weights, dtype=np.float64)
        return int(np.searchsorted(mass, u * mass[-1], side="right").clip(0, row.size - 1))

    def _contest(self, row: Row, position: int, head: int) -> tuple[Ids, Row, float]:
        """Who can win at this position: token ids, their perturbed logits, and the tail's one number (-inf: no tail).

        Leaves the tail's weights in `_weights` when there is a tail.
        """
        params = self.params
        scaled = row / np.float32(max(params.temperature, MIN_TEMPERATURE))
        ids = largest(scaled, params.top_k or head)
        tail = -np.inf
        if params.top_p < 1 or params.min_p > 0:
            ids = self._nucleus(scaled, ids)
        elif not params.top_k:
            np.exp(scaled - scaled[ids[0]], out=self._weights)
            self._weights[ids] = 0
            mass = float(self._weights.sum())
            if mass > 0:
                noise = float(gumbel(params.seed, position, np.array([TAIL_NOISE]))[0])
                tail = float(scaled[ids[0]]) + float(np.log(mass)) + noise
        return ids, scaled[ids] + gumbel(params.seed, position, ids), tail

    def _nucleus(self, scaled: Row, ids: Ids) -> Ids:
        """Top-p, then min-p, among the top-k (all tokens where top-k is off). The best token always stays."""
        params = self.params
        best = scaled[ids[0]]
        if params.top_k:
            total = float(np.exp((scaled[ids] - best).astype(np.float64)).sum())
        else:
            total = float(np.exp(scaled - best, out=self._weights).sum())
        while True:
            weights = np.exp((scaled[ids] - best).astype(np.float64))
            p = weights / total
            before = np.cumsum(p) - p  # mass ahead of each token
            keep = (before < params.top_p - EDGE) & (weights >= params.min_p)
            keep[0] = True
            if params.top_k or not keep[-1] or ids.size == scaled.size:
                kept: Ids = ids[keep]
                return kept
            ids = largest(scaled, 8 * ids.size)  # the nucleus may go on past the head

    def _log_sum_exp(self, row: Row, top: np.float32) -> float:
        """`top`: the row's maximum, which the caller knows: to look for it takes as long as to add up."""
        if -SAFE_EXPONENT < top < SAFE_EXPONENT:  # one walk over the row less
            return float(np.log(np.exp(row, out=self._weights).sum()))
        np.subtract(row, top, out=self._weights)
        np.exp(self._weights, out=self._weights)
        return float(top) + float(np.log(self._weights.sum()))
