"""A draft model between the target's passes: mode duo where both would want the same few cores.

The rule that lets a target wait for a draft beside it decides here whether one more draft step comes before the next pass.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from duodecoding.core import DuoCore
from duodecoding.drafters.growth import BestFirst
from duodecoding.drafters.model import ModelDrafter
from duodecoding.drafting import LEAF_FLOOR, Drafters, model_guessed
from duodecoding.pace import Pace
from duodecoding.planner import Outlook, tokens_unread
from duodecoding.trace import Did, Lane, Timeline
from duodecoding.tree import Node
from duodecoding.types import EngineConfig, SamplingParams

READING_PASSES = 2  # of the target, that the draft may take to read a prompt: nothing hides it
LEAST_READ = 64  # tokens of it that are read in any case


class Between:
    """The draft's part in one answer. It reads the prompt after the first token, and hears nothing while drafting is paused."""

    def __init__(
        self,
        core: DuoCore,
        model: ModelDrafter,
        free: Drafters,
        config: EngineConfig,
        pace: Pace,
        timeline: Timeline,
        prompt: Sequence[int],
        params: SamplingParams,
    ) -> None:
        """`free`: who guesses without a model."""
        self._core, self._model, self._free, self._pace, self._timeline = core, model, free, pace, timeline
        self._config, self._prompt, self._params = config, prompt, params
        self._started = False
        self._able = model.can_read(prompt, len(prompt) - 1)  # not any more behind a token that the draft does not know
        self._untold: list[int] = []
        self._leaves: Sequence[Node] = ()
        self._unread = 0  # tokens at the prompt's beginning that are left out

    def start(self) -> None:
        """Read the prompt, if that was not done, drafting may begin and the draft can."""
        if self._started or not self._core.drafting or not self._able:
            return
        prompt, costs, begin = self._prompt, self._pace.costs, time.perf_counter()
        a_pass = costs.verify_cost(1, len(prompt))
        self._unread = tokens_unread(len(prompt), a_pass, costs.draft_prompt, passes=READING_PASSES, least=LEAST_READ)
        growth = BestFirst(self._config.draft_width, curve=costs.draft, branching=self._config.branching, floor=LEAF_FLOOR)
        self._model.open(prompt, self._params, growth, self._unread)
        while self._model.read():
            pass
        end, read = time.perf_counter(), len(prompt) - self._unread
        self._pace.draft_read(read, end - begin)
        self._timeline.span(Lane.DRAFT, Did.PROMPT, begin, end, tokens=read)
        self._started = True

    def commit(self, tokens: Sequence[int]) -> None:
        self._untold += tokens

    def outlook(self) -> Outlook | None:
        """What the next step would be. None: there is none, or it is not wanted."""
        if not self._started or not self._core.drafting:
            return None
        if self._untold:
            self._able = self._able and self._model.can_read(self._untold, self._core.tree.position)
            if not self._able:
                return None
            self._model.commit(self._untold)
            self._untold = []
        self._leaves = self._model.next_leaves()
        if not self._leaves:
            return None
        takes = self._pace.costs.draft_cost(len(self._leaves), self._context)
        first = self._pace.first_step if not self._core.tree.root.expanded else 0.0
        return Outlook(first or takes, tuple(leaf.key for leaf in self._leaves), takes)

    def step(self) -> float:
        """Draft what `outlook` spoke of. Seconds that it took."""
        begin, first = time.perf_counter(), not self._core.tree.root.expanded
        guesses = self._model.grow(self._leaves)
        drafted = time.perf_counter()
        model_guessed(self._core, self._free, guesses)
        self._timeline.span(Lane.DRAFT, Did.STEP, begin, drafted, leaves=len(self._leaves))
        seconds = time.perf_counter() - begin
        if first:
            self._pace.draft_began(seconds)
        else:
            self._pace.draft_step(len(self._leaves), seconds, self._context)
        return seconds

    @property
    def _context(self) -> int:
        return self._core.tree.position - self._unread
