"""Cost curves: measured time as a function of work, and hardware profiles made of them. Pure.

All times are seconds. `verify(n, context)` is a target pass over n tokens, the root and n - 1 guesses; `draft_step(w)` expands
w leaves.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from duodecoding.errors import UsageError

LEARNING_RATE = 0.15  # share of a surprise that a curve takes over
SHORTEST = 1e-7  # seconds; a cost is never nothing


class CostCurve:
    """Time over amount of work: measured points, straight lines between them, the last slope beyond."""

    def __init__(self, points: Mapping[int, float]) -> None:
        if not points or any(x < 0 or not y > 0 for x, y in points.items()):
            raise UsageError(f"a cost curve of {dict(points)}", "it needs points with positive times")
        self._x = sorted(points)
        self._y = [points[x] for x in self._x]
        self._known: dict[float, float] = {}  # asked before; the planner asks for the same few amounts in every round

    def __call__(self, x: float) -> float:
        known = self._known.get(x)
        if known is None:
            known = self._known[x] = self._interpolated(x)
        return known

    def _interpolated(self, x: float) -> float:
        if len(self._x) == 1 or x <= self._x[0]:
            return self._y[0]
        i = min(max(bisect_left(self._x, x), 1), len(self._x) - 1)
        x0, x1, y0, y1 = self._x[i - 1], self._x[i], self._y[i - 1], self._y[i]
        return max(y0 + (y1 - y0) * (x - x0) / (x1 - x0), 1e-9)

    def observe(self, x: float, seconds: float) -> None:
        """A measurement: move the nearest point a little towards it. One outlier (a page fault, another process) hardly counts."""
        i = min(range(len(self._x)), key=lambda k: abs(self._x[k] - x))
        surprise = seconds / self(x)
        self._y[i] *= 1 + LEARNING_RATE * (min(max(surprise, 0.5), 2.0) - 1)
        self._known.clear()

    def scale(self, factor: float) -> None:
        """Keep the shape, change the level: for a curve that was a guess until its first measurement."""
        self._y = [y * factor for y in self._y]
        self._known.clear()

    @property
    def points(self) -> dict[int, float]:
        return dict(zip(self._x, self._y, strict=True))


def stepped(curve: CostCurve, sizes: Sequence[int]) -> CostCurve:
    """The same for work that is padded to some sizes, as far as it was measured: a little more of it costs nothing, or a step."""
    points: dict[int, float] = {}
    for before, size in pairwise((0, *sizes)):
        if size <= max(curve.points):
            points |= dict.fromkeys((before + 1, size), curve(size))
    return CostCurve(points) if points else curve


@dataclass(frozen=True, slots=True)
class Longer:
    """What context adds to a draft step."""

    beyond: int  # tokens of context that the curves were measured with
    per_token: CostCurve  # seconds for each token more, over leaves per step


@dataclass(frozen=True, slots=True)
class Profile:
    """What a pair costs on a machine."""

    name: str
    about: str
    measured: bool  # False: an estimate, nobody ran it
    verify: Mapping[int, CostCurve]  # context -> curve over tokens in a pass
    draft: CostCurve  # over leaves per step
    target_prompt: float  # seconds per token of a long prompt
    draft_prompt: float
    latency: float  # of a message, one way
    settings: Mapping[str, Any] = field(default_factory=dict)
    host: CostCurve | None = None  # our own work between two passes, over tokens in a pass; None: nobody measured it
    in_turn: CostCurve | None = None  # draft steps between passes: threads have slept, caches are cold; None: nobody measured it
    longer: Longer | None = None  # draft steps with more context; None: nobody measured it
    prompts: CostCurve | None = None  # until the target's first token, over tokens of a prompt; None: nobody measured it

    def prompt_cost(self, tokens: int) -> float:
        """Of the target's reading of a prompt, before the pass that gives its first token."""
        if self.prompts is None:
            return tokens * self.target_prompt
        return max(self.prompts(tokens) - self.verify_cost(1, tokens), SHORTEST)

    @property
    def draft_in_turn(self) -> CostCurve:
        """What draft steps cost where draft and target take turns, as far as it is known."""
        return self.in_turn or self.draft

    def with_draft(self, draft: CostCurve) -> Profile:
        """The same machine with another draft's steps."""
        return replace(self, draft=draft, in_turn=None, longer=None)

    def draft_cost(self, leaves: int, context: int, *, in_turn: bool = False) -> float:
        """Of a draft step."""
        known = (self.draft_in_turn if in_turn else self.draft)(leaves)
        return known if self.longer is None else max(known + self.for_context(leaves, context), SHORTEST)

    def for_context(self, leaves: int, context: int) -> float:
        """What so much context adds to a draft step, or saves."""
        return self.longer.per_token(leaves) * (context - self.longer.beyond) if self.longer is not None else 0.0

    def draft_at(self, context: int) -> dict[int, float]:
        """The points of the curve with so much context."""
        return {leaves: self.draft_cost(leaves, context) for leaves in self.draft.points}

    def verify_at(self, context: int) -> CostCurve:
        """The curve of the nearest measured context, for observing into."""
        return self.verify[min(self.verify, key=lambda c: abs(c - context))]

    def verify_curve(self, context: int) -> Callable[[int], float]:
        """Costs at one context, for asking often."""
        if len(self.verify) == 1:
            return next(iter(self.verify.values()))
        contexts = sorted(self.verify)
        i = min(max(bisect_left(contexts, context), 1), len(contexts) - 1)
        low, high = contexts[i - 1], contexts[i]
        share = max(0.0, (context - low) / (high - low))
        a, b = self.verify[low], self.verify[high]
        return lambda tokens: max(a(tokens) + (b(tokens) - a(tokens)) * share, 1e-9)

    def round_curve(self, context: int) -> Callable[[int], float]:
        """The same of whole rounds, our own work included: what planning goes by."""
        verify, host = self.verify_curve(context), self.host
        return verify if host is None else lambda tokens: verify(tokens) + host(tokens)

    def verify_cost(self, tokens: int, context: int) -> float:
        return self.verify_curve(context)(tokens)


@dataclass(frozen=True, slots=True)
class Floor:
    """The least time of a pass: every weight is read once, as fast as the memory copies."""

    weights: int  # bytes
    bandwidth: float  # bytes a second, those read and those written
    where: str  # CPU or the GPU's name

    @property
    def seconds(self) -> float:
        return self.weights / self.bandwidth

    def share(self, seconds: float) -> float:
        """Of the memory's speed that such a pass reaches. Above 1: weights stayed in a cache, or not all were read."""
        return self.seconds / seconds


def to_record(profile: Profile) -> dict[str, Any]:
    """A profile as plain JSON values."""
    more = {"host": profile.host, "draft_step_in_turn": profile.in_turn, "target_prompts": profile.prompts}
    longer = profile.longer
    return {name: _points(curve) for name, curve in more.items() if curve is not None} | {
        **({"draft_step_longer": {"beyond": longer.beyond, "per_token": _points(longer.per_token)}} if longer is not None else {}),
        "name": profile.name,
        "about": profile.about,
        "measured": profile.measured,
        "verify": {str(context): _points(curve) for context, curve in profile.verify.items()},
        "draft_step": _points(profile.draft),
        "target_prompt": profile.target_prompt,
        "draft_prompt": profile.draft_prompt,
        "latency": profile.latency,
        "settings": dict(profile.settings),
    }


def from_record(record: Mapping[str, Any], *, where: str) -> Profile:
    """The inverse. `where` names the file in the error."""
    try:
        return Profile(
            name=str(record["name"]),
            about=str(record["about"]),
            measured=bool(record["measured"]),
            verify={int(context): _curve(points) for context, points in record["verify"].items()},
            draft=_curve(record["draft_step"]),
            target_prompt=float(record["target_prompt"]),
            draft_prompt=float(record["draft_prompt"]),
            latency=float(record["latency"]),
            settings=dict(record.get("settings", {})),
            host=_curve(record["host"]) if "host" in record else None,
            in_turn=_curve(record["draft_step_in_turn"]) if "draft_step_in_turn" in record else None,
            longer=_longer(record["draft_step_longer"]) if "draft_step_longer" in record else None,
            prompts=_curve(record["target_prompts"]) if "target_prompts" in record else None,
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UsageError(
            f"{where} is not a profile", f"{type(error).__name__}: {error}", "Measure one with `duo profile`."
        ) from error


def _points(curve: CostCurve) -> dict[str, float]:
    return {str(x): y for x, y in curve.points.items()}


def _curve(points: Mapping[str, float]) -> CostCurve:
    return CostCurve({int(x): float(y) for x, y in points.items()})


def _longer(record: Mapping[str, Any]) -> Longer:
    return Longer(int(record["beyond"]), _curve(record["per_token"]))


def fit(samples: Sequence[tuple[int, float]]) -> CostCurve:
    """A curve through the median time of each amount of work, never falling. What disturbs a measurement makes it longer, never
    shorter: where less work seems to cost more, the time of more work is the true one."""
    by_work: dict[int, list[float]] = {}
    for x, seconds in samples:
        by_work.setdefault(x, []).append(seconds)
    points: dict[int, float] = {}
    ceiling = math.inf
    for x in sorted(by_work, reverse=True):
        times = sorted(by_work[x])
        ceiling = points[x] = min(ceiling, times[len(times) // 2])
    return CostCurve(points)
