"""How often guesses of each kind were right: a prior that experience replaces. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

PRIOR_WEIGHT = 10.0  # observations that a prior counts for
MEMORY = 400.0  # observations that count; older ones fade


class Record:
    def __init__(self, priors: Sequence[float]) -> None:
        self.chances = list(priors)
        self._weights = [PRIOR_WEIGHT] * len(priors)

    def observe(self, kind: int, right: bool) -> None:
        weight = self._weights[kind]
        if weight < MEMORY:
            weight = self._weights[kind] = weight + 1
        self.chances[kind] += (right - self.chances[kind]) / weight

    def freeze(self) -> None:
        """Learn nothing. Only to see what learning is worth."""
        self._weights = [math.inf] * len(self._weights)
