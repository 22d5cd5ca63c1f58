"""Pace: what a pair costs on this machine, learnt round by round, and whether drafting pays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from duodecoding.costs import SHORTEST, CostCurve, Profile
from duodecoding.planner import Switch

OWN_WORK = {1: 1e-4, 8: 3e-4, 64: 8e-4}  # seconds between two passes, by tokens of a pass, until rounds tell better

READ_RATE = 0.3  # of what is learnt from one more prompt
RATE = 0.1  # from one more first step


class Pace:
    """What this pair costs on this machine, learnt as it goes, and whether it pays. Outlives the answers."""

    def __init__(
        self,
        costs: Profile | None = None,
        *,
        verify: Mapping[int, CostCurve] | None = None,
        draft: CostCurve | None = None,
        on_gpu: bool = False,
    ) -> None:
        """From a measured profile, from the curves that are known, or from nothing."""
        guess = guessed_costs(on_gpu)
        self.costs = costs or replace(guess, verify=verify or guess.verify, draft=draft or guess.draft)
        if self.costs.host is None:
            self.costs = replace(self.costs, host=CostCurve(OWN_WORK))
        self._guessed_target, self._guessed_draft = costs is None and not verify, costs is None and draft is None
        self._guessed_reading = costs is None
        self.first_step = 0.0  # seconds of a round's first draft step between passes; 0: none was made yet
        self.switch, self.free_switch = Switch(), Switch()

    def target_pass(self, tokens: int, seconds: float, context: int, *, alone: bool) -> None:
        """A pass took so long. `alone`: the draft was at rest; on a shared CPU only that tells what a plain pass costs."""
        curve = self.costs.verify_at(context)
        if self._guessed_target:
            curve.scale(seconds / curve(tokens))
            self._guessed_target = False
        elif alone or tokens > 1:
            curve.observe(tokens, seconds)
        if seconds < curve(1):  # with or without a draft beside it: a plain pass does not take longer than this one
            curve.observe(1, seconds)

    def between(self, tokens: int, seconds: float) -> None:
        """Our own work around a pass over so many tokens took so long."""
        if self.costs.host is not None:
            self.costs.host.observe(tokens, max(seconds, SHORTEST))

    def draft_read(self, tokens: int, seconds: float) -> None:
        """The draft read so much of a prompt, with nobody beside it."""
        if tokens > 0:
            known = self.costs.draft_prompt
            found = seconds / tokens
            self.costs = replace(self.costs, draft_prompt=found if self._guessed_reading else known + READ_RATE * (found - known))
            self._guessed_reading = False

    def draft_began(self, seconds: float) -> None:
        """The first draft step of a round between passes took so long: caches are cold, and it reads what was committed."""
        self.first_step += RATE * (seconds - self.first_step) if self.first_step else seconds

    def draft_step(self, width: int, seconds: float, context: int) -> None:
        seconds = max(seconds - self.costs.for_context(width, context), SHORTEST)
        if self._guessed_draft:
            self.costs.draft.scale(seconds / self.costs.draft(width))
            self._guessed_draft = False
        else:
            self.costs.draft.observe(width, seconds)

    def draft_step_unfinished(self, width: int, seconds: float, context: int) -> None:
        """A step that was broken off or waited for in vain takes at least so long. Without this a draft slower than the target
        would never be seen to finish a step, and be taken for fast."""
        curve = self.costs.draft
        seconds -= self.costs.for_context(width, context)
        if width == 0 or seconds < curve(width):
            return
        if self._guessed_draft:
            curve.scale(seconds / curve(width))
        else:
            curve.observe(width, seconds)


def guessed_costs(on_gpu: bool) -> Profile:
    """Shapes without levels, for a pair that nobody has measured: a GPU verifies many tokens in the time of one, a CPU does not."""
    slope = 0.003 if on_gpu else 0.1  # of a pass over one token, for each token more
    verify = CostCurve({n: 0.01 * (1 + slope * (n - 1)) for n in (1, 2, 4, 8, 16, 32, 64, 128)})
    draft = CostCurve({1: 0.001, 2: 0.0013, 4: 0.0019, 8: 0.003, 16: 0.0053})
    return Profile("here", "a guess, refined by every round", False, {512: verify}, draft, 1e-4, 1e-4, 5e-5)
