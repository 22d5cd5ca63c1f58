"""The hardware-aware budget: six decisions, each a small pure function, and what they learn from.

Probabilities here are of acceptance: drafters calibrate theirs before they hand out guesses. Times are seconds.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from duodecoding.costs import CostCurve

BINS = 16
EDGES = [1 / (1 + math.exp(6 - 12 * i / BINS)) for i in range(1, BINS)]  # even in log-odds: the ends matter as much as the middle
PRIOR_WEIGHT = 6.0  # observations that the draft's own word counts for
FORGET = 0.998  # per observation in a bin
CAUTION = 1.1  # times the tokens a second of a bare pass that a pass over guesses must promise
UNTRIED, LEAST_TRUSTED, DEAREST = 3.0, 2.6, 4.0  # bare passes that one over guesses may take: at first, after losses, after gains
PROBE_PAYS = 120  # rounds between two probes, for each token that one costs
LEAST_READ = 256  # tokens of a prompt that the draft reads in any case
READING_PASSES = 8  # of the target, that it may take for more


class Calibration:
    """Draft probabilities are not acceptance probabilities: the share of guesses that were right, by what the draft said."""

    def __init__(self) -> None:
        self._right = [0.0] * BINS
        self._seen = [0.0] * BINS

    def __call__(self, p: float) -> float:
        i = bisect_right(EDGES, p)
        return (self._right[i] + PRIOR_WEIGHT * p) / (self._seen[i] + PRIOR_WEIGHT)

    def observe(self, p: float, right: bool) -> None:
        i = bisect_right(EDGES, p)
        self._right[i] = self._right[i] * FORGET + right
        self._seen[i] = self._seen[i] * FORGET + 1


class Uncalibrated(Calibration):
    """Takes the draft at its word. Only to see what calibration is worth."""

    def __call__(self, p: float) -> float:
        return p

    def observe(self, p: float, right: bool) -> None:
        pass


def how_many_nodes(probabilities: Sequence[float], prices: Sequence[float], cheapest: float = 0.0, dearest: float = DEAREST) -> int:
    """Decision 1: how many guesses maximise (1 + expected accepted) / price of a pass. Probabilities come best first.

    `prices`: of passes over 0, 1, 2, … tokens. `cheapest`: no place in a pass costs less. A guess that would not pay there ends the
    search, and so all behind it. What promises little more than a bare pass is not worth its risk: of all that might have been
    verified it was chosen because it looked good. Nor is a pass that takes as long as many bare ones (`dearest`), as on a CPU: a
    long chain brings little more there than a short one, and loses more.
    """
    best, best_rate, expected = 0, CAUTION / prices[1], 1.0
    for n, (p, price) in enumerate(zip(probabilities, prices[2:], strict=False), start=1):
        if p < cheapest * best_rate or price > dearest * prices[1]:
            break
        expected += p
        rate = expected / price
        if rate > best_rate:
            best, best_rate = n, rate
    return best


def hopeless(prices: Sequence[float], cheapest: float) -> float:
    """The probability below which `how_many_nodes` takes no guess, whatever stands before it."""
    return cheapest * CAUTION / prices[1]


@dataclass(slots=True)
class Trust:
    """How dear a pass over guesses may be in this answer: what such passes have won, in tokens of `off`, may be risked again. Where
    guesses cost hardly more than a bare pass, as on a GPU, it does not matter."""

    dearest: float = UNTRIED

    def observe(self, tokens: int, seconds: float, plain: float) -> None:
        """A round over guesses gave `tokens` in `seconds`; a token in `off` takes `plain`."""
        self.dearest = min(max(self.dearest + tokens - seconds / plain, LEAST_TRUSTED), DEAREST)


def least_chance(verify: Callable[[int], float]) -> float:
    """The probability below which no guess pays: what the cheapest place in a pass costs, in passes over one token."""
    sizes = (1, 2, 4, 8, 16, 32, 64)
    return max(0.0, min((verify(b) - verify(a)) / (b - a) for a, b in pairwise(sizes)) / verify(1))


def worth_waiting(now: Sequence[float], hoped: Sequence[float], prices: Sequence[float], delay: float) -> bool:
    """Decision 2: does waiting `delay` for the `hoped` guesses beat going `now`? Both are probabilities; the best of all would be
    verified, as many as pay, so a better guess may take a worse one's place. `prices`: as in `how_many_nodes`."""
    least, expected = sum(now, 1.0) / prices[1 + len(now)], 1.0
    for p, price in zip(sorted([*now, *hoped], reverse=True), prices[2:], strict=False):
        expected += p
        if expected > least * (price + delay):
            return True
    return False


def how_many_leaves(probabilities: Sequence[float], draft: CostCurve, widest: int) -> int:
    """Decision 3: the width of a draft step that adds expected tokens fastest. Probabilities of the best leaves, best first."""
    best, best_rate, gain = 1, 0.0, 0.0
    for width, p in enumerate(probabilities[:widest], start=1):
        gain += p
        rate = gain / draft(width)
        if rate > best_rate:
            best, best_rate = width, rate
    return best


@dataclass(slots=True)
class Switch:
    """Decision 4: is speculation worth it at all? Keeps an account of time lost and won against `off`, in tokens of `off`.

    A loss beyond the limit pauses drafting; gains are remembered only so far, so an old success does not pay for a long loss.
    Each failed probe doubles the pause: a useless draft costs `limit` tokens once and then a vanishing share. A new answer may be
    about something else, so it does not wait for the end of a long pause.
    """

    limit: float = 3.0  # tokens lost before the first pause
    probe_limit: float = 0.75  # tokens lost before a probe is given up
    memory: float = 6.0  # tokens won that count
    shortest_pause: int = 48  # rounds
    longest_pause: int = 3072
    on: bool = True
    pauses: int = 0
    _lost: float = 0.0
    _pause: int = 0  # length of the last pause; 0: none, or trusted again since
    _pause_left: int = 0
    _paid: float = 0.0  # tokens lost when it was last paused

    def new_answer(self) -> None:
        """So long a pause that one more probe like the last costs less than a hundredth."""
        self._pause_left = min(self._pause_left, max(self.shortest_pause, round(PROBE_PAYS * self._paid)))

    def observe(self, tokens: int, seconds: float, plain: float) -> None:
        """A round gave `tokens` in `seconds`; a token in `off` takes `plain`."""
        if not self.on:
            self._pause_left -= 1
            self.on = self._pause_left <= 0
            return
        self._lost = max(self._lost + seconds / plain - tokens, -self.memory)
        if self._lost > (self.probe_limit if self._pause else self.limit):
            self._pause = self._pause_left = min(max(self.shortest_pause, 2 * self._pause), self.longest_pause)
            self._paid, self._lost = self._lost, 0.0
            self.on = False
            self.pauses += 1
        elif self._lost < -self.limit:
            self._pause = 0


@dataclass(slots=True)
class Looks:
    """How often guesses are looked for that no model makes, where nobody's pass hides the looking.

    An account, in tokens of `off`, of what rounds with a look won and what they took beyond a plain round. Where it is overdrawn,
    looks are so rare that they cost a hundredth, or, dear ones, one in `rarest` rounds. An account is for one answer: the next one
    may repeat itself.
    """

    credit: float = 0.3
    memory: float = 2.0
    share: float = 0.01  # of the time, for looks when they do not pay
    margin: float = 0.02  # tokens that a look must win beyond what it takes: what is next to nothing is not worth its risk
    rarest: int = 16  # rounds
    _won: float = 0.0
    _cost: float = 0.08  # of a look in vain

    @property
    def every(self) -> int:
        """A look is worth having in one of so many rounds."""
        return 1 if self._won > -self.credit else min(math.ceil(self._cost / self.share), self.rarest)

    def observe(self, tokens: int, seconds: float, plain: float, *, in_vain: bool) -> None:
        """A round for which guesses were looked for gave `tokens` in `seconds`, looking included. `in_vain`: none was verified."""
        if in_vain:
            self._cost += 0.2 * (max(0.0, seconds / plain - 1) - self._cost)
        self._won = min(max(self._won + tokens - seconds / plain - self.margin, -2 * self.credit), self.memory)


def cores_for_draft(allowed: Sequence[int], target_on_gpu: bool) -> tuple[list[int], list[int]]:
    """Decision 5: (cores that drive the target, cores of the draft). The target's driver is never disturbed by the draft."""
    cores = sorted(allowed)
    if len(cores) == 1:
        return cores, cores
    if target_on_gpu:
        return cores[:1], cores[1:]
    return cores, cores  # both compute on the CPU and share it; the switch decides whether that pays


def tokens_unread(
    prompt: int, pass_seconds: float, read_seconds: float, *, passes: float = READING_PASSES, least: int = LEAST_READ
) -> int:
    """Decision 6: tokens at the beginning of a prompt that the draft leaves out, to be ready after a few `passes` of the target.
    What comes just before the answer tells it most, and lookup repeats the rest. `read_seconds`: of the draft, for one token."""
    affordable = passes * pass_seconds / read_seconds if read_seconds > 0 else math.inf
    return int(max(0, prompt - max(least, affordable)))


@dataclass(frozen=True, slots=True)
class Outlook:
    """What the draft is doing, as far as the target's side can know."""

    next_in: float  # until the running step's guesses come
    expanding: tuple[int, ...]  # the leaves of that step; some may have died since
    step: float  # what a further step takes


class DraftClock:
    """Keeps the outlook from what the draft was last heard to begin, and the cost of a step."""

    def __init__(self, draft: Callable[[int], float], latency: float) -> None:
        self._draft, self._latency = draft, latency
        self._due = 0.0  # when the running step's guesses come
        self._expanding: tuple[int, ...] = ()
        self._silent = True

    def began(self, when: float, expanding: Sequence[int]) -> None:
        """Word came at `when` that the draft began to expand these leaves. None: it is idle until a commit."""
        self._expanding = tuple(expanding)
        self._silent = not expanding
        self._due = when + self._draft(len(expanding)) if expanding else when

    def committed(self, now: float, *, interrupted: bool) -> None:
        """A commit went out. It is heeded after the running step, or at once if that was interrupted or the draft is idle."""
        heeded = now + self._latency
        self._due = heeded if interrupted else max(self._due, heeded)
        self._expanding = () if interrupted else self._expanding
        self._silent = False

    @property
    def expanding(self) -> tuple[int, ...]:
        return self._expanding

    def silent(self) -> None:
        """Waited in vain. Expect nothing until it speaks again."""
        self._silent = True

    def outlook(self, now: float) -> Outlook | None:
        """None: nothing to expect."""
        return None if self._silent else Outlook(max(0.0, self._due - now), self._expanding, self._draft(1) + self._latency)
