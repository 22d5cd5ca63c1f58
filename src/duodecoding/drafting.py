"""Who guesses in an answer and how: shared by the drivers, whatever their clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from duodecoding.core import DuoCore
from duodecoding.costs import Profile
from duodecoding.drafters.growth import BestFirst, Growth
from duodecoding.drafters.lookup import LookupDrafter
from duodecoding.drafters.model import ModelDrafter
from duodecoding.drafters.recycling import VISITS, RecyclingDrafter
from duodecoding.remote import RemoteDrafter
from duodecoding.sampling import Luck
from duodecoding.tree import Proposal
from duodecoding.types import EngineConfig, Mode, SamplingParams
from duodecoding.wire import GrowBestFirst, GrowChains, GrowthPlan

LEAF_FLOOR = 0.003  # leaves less likely than this are not worth a draft step


@dataclass(slots=True)
class Drafters:
    """Who guesses. Any part may be missing."""

    model: ModelDrafter | None = None
    lookup: LookupDrafter | None = None
    remote: RemoteDrafter | None = None  # in a worker, for modes that overlap
    recycling: RecyclingDrafter | None = None

    @property
    def free(self) -> Drafters:
        """Those that need no model."""
        return Drafters(lookup=self.lookup, recycling=self.recycling)

    def open(self, prompt: Sequence[int], params: SamplingParams, growth: Growth, unread: int = 0) -> None:
        if self.model is not None:
            self.model.open(prompt, params, growth, unread)
        luck = Luck(params.seed) if not params.greedy else None
        if self.lookup is not None:
            self.lookup.open(prompt, luck)
        if self.recycling is not None:
            self.recycling.open(prompt, luck)

    def commit(self, tokens: Sequence[int]) -> None:
        if self.model is not None:
            self.model.commit(tokens)
        if self.lookup is not None:
            self.lookup.commit(tokens)
        if self.recycling is not None:
            self.recycling.commit(tokens)

    def close(self) -> None:
        if self.model is not None:
            self.model.close()
        if self.remote is not None:
            self.remote.close()
        if self.lookup is not None:
            self.lookup.close()


def growth_plan(config: EngineConfig, costs: Profile, context: int, unread: int = 0) -> GrowthPlan:
    """How a draft beside the target grows the tree. `unread`: tokens of the context that it has left out."""
    steps = costs.draft_at(context - unread)
    if config.mode is Mode.LOCKSTEP:
        return GrowChains(costs.verify_cost(1 + config.draft_length, context), steps, config.draft_width)
    return GrowBestFirst(config.draft_width, steps, config.branching, LEAF_FLOOR)


def growth_of(config: EngineConfig) -> Growth:
    """How the draft grows the tree in this mode."""
    if config.mode is Mode.CHAIN:
        return BestFirst(width=1, branching=1)
    return BestFirst(width=config.draft_width, branching=config.branching)


def guess_for_free(core: DuoCore, drafters: Drafters, visits: int = VISITS, *, in_haste: bool = False) -> None:
    """After the tokens of a round are out, so that none waits for it: what can be guessed without a model. `in_haste`: a GPU is
    waiting."""
    if not core.looking:
        return
    if core.guessing and drafters.lookup is not None:
        core.nodes_arrived(drafters.lookup.guess(core.least_chance, again=False, in_haste=in_haste))
    recycle(core, drafters, visits)


def recycle(core: DuoCore, drafters: Drafters, visits: int = VISITS) -> None:
    """Below the leaves that are there by now."""
    if core.guessing and drafters.recycling is not None:
        core.nodes_arrived(drafters.recycling.guess(core.tree, core.least_chance, visits))


def model_guessed(core: DuoCore, drafters: Drafters, guesses: Sequence[Proposal]) -> None:
    core.nodes_arrived(guesses)
    if drafters.recycling is not None:
        drafters.recycling.arrived(core.tree, guesses)
