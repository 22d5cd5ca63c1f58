"""DuoCore: the state machine of one answer. Events in, work out; no threads, no clocks, no I/O.

A driver asks `step` what to do, does it, and reports back with `nodes_arrived` or `verdict_arrived`. Which driver, which draft
and when its guesses come decide how fast the answer is, never what it is: tokens enter the answer only from a verdict.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from duodecoding.costs import Profile
from duodecoding.planner import DEAREST, Looks, Outlook, Switch, Trust, hopeless, how_many_nodes, least_chance, worth_waiting
from duodecoding.sampling import Choice
from duodecoding.tree import ROOT, Node, PassNode, Proposal, TokenTree, as_pass
from duodecoding.types import EngineConfig, FinishReason, Mode, SamplingParams, Source

FIRST_COVERAGE = 0.8  # chance that a node's guessed children hold the right token, before anything is known
COVERAGE_RATE = 0.05
UNFORESEEN = 0.5  # of what guesses promise that no model made, below a token that the draft has not expanded: about so much comes
CHILDREN = (0.6, 0.2)  # of the chance that a leaf's guesses hold the right one: its best and its second
STEPS_AHEAD = 3  # draft steps: a dear first one may pay by those behind it
PRICES_HOLD = 32  # rounds
RESTLESS, LOOKS_EVERY = 12, 4  # rounds

# The target's token after node i of a pass (ROOT: after the root). Asked only along the accepted path.
Choose = Callable[[int], Choice]


@dataclass(frozen=True, slots=True)
class Expand:
    """Work for the draft: one step."""


@dataclass(frozen=True, slots=True)
class Verify:
    """Work for the target: one pass over the root and these guesses."""

    nodes: tuple[Node, ...]
    guesses: tuple[PassNode, ...]


BARE = Verify((), ())  # a plain pass over the root


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing to do before the draft's next guesses, which should be here in `seconds`."""

    seconds: float


class Verdict(NamedTuple):
    """What a round found: the guesses that were right, and the target's token after the root and after each of them."""

    accepted: tuple[int, ...]  # indices into the pass
    choices: tuple[Choice, ...]  # one more than accepted; the last is the target's own next token, the bonus


class Committed(NamedTuple):
    """A token that is now part of the answer."""

    token: int
    source: Source
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


def places(guesses: Sequence[PassNode]) -> dict[tuple[int, int], int]:
    """Where a guess is, by what it says: its parent's place and its token."""
    return {guess: i for i, guess in enumerate(guesses)}


def walk(guesses: Sequence[PassNode], choose: Choose, child: Mapping[tuple[int, int], int] | None = None) -> Verdict:
    """The acceptance rule: take the target's token; if it was guessed here, go down to that guess, else stop. `child`: the guesses'
    `places`, where the caller had time to look for them."""
    choices = [choose(ROOT)]
    if not guesses:
        return Verdict((), tuple(choices))
    child = places(guesses) if child is None else child
    accepted: list[int] = []
    at = child.get((ROOT, choices[0].token))
    while at is not None:
        accepted.append(at)
        choices.append(choose(at))
        at = child.get((at, choices[-1].token))
    return Verdict(tuple(accepted), tuple(choices))


class DuoCore:
    """One answer: the tree, the tokens so far, and whether it has ended."""

    def __init__(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        config: EngineConfig,
        *,
        context: int,
        end_tokens: frozenset[int] = frozenset(),
        stop: Callable[[int], bool] = lambda token: False,
        drafts: bool = True,
        costs: Profile | None = None,
        switch: Switch | None = None,
        free_switch: Switch | None = None,
    ) -> None:
        """`stop` sees every token of the answer once, in order, and says whether the text ends there. `drafts`: is there a
        draft that can be asked to expand; guesses may arrive without one. `costs` and the switches belong to mode duo and
        outlive the answer; `free_switch` is for guesses that no draft model makes, which go on while it is paused."""
        self.tree = TokenTree(prompt)
        self.answer: list[Committed] = []
        self.finish_reason: FinishReason | None = None
        self.rounds = self.drafted = self.verified = self.accepted = 0
        self.accepted_by_source: Counter[Source] = Counter()
        self._config = config
        self._end_tokens = frozenset() if params.ignore_eos else end_tokens
        self._stop = stop
        self._room = min(params.max_tokens, context - len(prompt))  # tokens the answer may still get
        self.uses_drafts = config.mode is not Mode.OFF
        self._takes_turns = drafts and config.mode in (Mode.CHAIN, Mode.SERIAL)
        self._steps_left = self._steps_per_round()
        self._costs, self._switch, self._free_switch = costs, switch or Switch(), free_switch or Switch()
        self._priced = costs is not None and config.mode in (Mode.SERIAL, Mode.DUO)  # does a place in a pass have a price?
        self._looks = Looks()
        self._switch.new_answer()
        self._free_switch.new_answer()
        self._trust = Trust() if config.mode is Mode.DUO else Trust(DEAREST)
        self._coverage = FIRST_COVERAGE
        self._bare_rounds = 1  # since the last one over guesses
        self._known_prices: list[float] = []
        self._cheapest = 0.0  # place in a pass
        self._priced_until = 0

    def _steps_per_round(self) -> int:
        return self._config.draft_length if self._takes_turns else 0

    @property
    def drafting(self) -> bool:
        """Should a draft beside the target grow the tree now?"""
        return self.uses_drafts and self._switch.on

    @property
    def guessing(self) -> bool:
        """Should anyone guess now? Lookup and recycling may while the draft is paused."""
        return self.uses_drafts and (self._switch.on or self._free_switch.on)

    @property
    def looking(self) -> bool:
        """Should guesses be looked for that no model makes? Only now and then in an answer that had no use for any in many rounds,
        or to which looking brought less than it took."""
        if self._looks.every == 1:
            return self._bare_rounds < RESTLESS or self._bare_rounds % LOOKS_EVERY == 0
        return self.rounds % self._looks.every == 0

    @cached_property
    def least_chance(self) -> float:
        """Guesses less likely than this are not worth making."""
        if self._costs is None or not self._priced:
            return 0.0
        return least_chance(self._costs.round_curve(self.tree.position))

    def step(self, outlook: Outlook | None = None) -> Expand | Verify | Wait | None:
        """What to do now; None: the answer is complete. `outlook`: what a draft beside the target is doing; None: nothing."""
        if self.finish_reason is not None:
            return None
        if self._steps_left > 0 and self._room > 1:
            self._steps_left -= 1
            return Expand()
        nodes, right = self._selection()
        delay = self._worthwhile_delay(nodes, right, outlook) if outlook is not None else None
        if delay is not None:
            return Wait(delay)
        if not nodes:
            return BARE
        return Verify(*as_pass(nodes))

    def _selection(self) -> tuple[list[Node], list[float]]:
        """The guesses worth a place in the pass, best first, and their chances to be right, where places have a price. One beyond
        the answer's last possible token is not worth it."""
        config = self._config
        if not self.guessing or not len(self.tree):  # the first token waits for no price
            return [], []
        prices = self._prices() if self._priced else []
        if config.mode is Mode.CHAIN:
            nodes = self.tree.likeliest_path(config.draft_length)
        elif config.mode is Mode.LOCKSTEP:
            nodes = self.tree.likeliest_path(config.max_nodes)
        else:
            nodes = self.tree.select(config.max_nodes, hopeless(prices, self._cheapest) if prices else 0.0)
        if len(nodes) >= self._room:  # else none can be so deep
            last = self.tree.position + self._room - 1
            nodes = [node for node in nodes if node.position <= last]
        if prices:
            chances = self.tree.probabilities(nodes)
            count = how_many_nodes(chances, prices, self._cheapest, self._trust.dearest)
            return nodes[:count], chances[:count]
        return nodes, []

    def look_ahead(self) -> None:
        """While a pass runs: what the choice of the next one would have to look up."""
        if self._priced and self.guessing:
            self._prices(ahead=1)
            _ = self.least_chance

    def _prices(self, ahead: int = 0) -> list[float]:
        """What rounds cost here, by tokens in a pass. Curves change little by little, so not looked up in every round. `ahead`:
        they are to hold for so many rounds more."""
        if not self._known_prices or self.rounds + ahead >= self._priced_until:
            assert self._costs is not None
            most = 2 + self._config.max_nodes + 2 * self._config.draft_width
            self._known_prices = prices = list(map(self._costs.round_curve(self.tree.position), range(most)))
            self._cheapest = max(0.0, min(after - before for before, after in pairwise(prices[1:])))
            self._priced_until = self.rounds + PRICES_HOLD
        return self._known_prices

    def _worthwhile_delay(self, nodes: Sequence[Node], right: Sequence[float], outlook: Outlook) -> float | None:
        """How long the draft's next useful guesses take, if they bring more than that. `right`: chances of `nodes`."""
        if self._config.mode is not Mode.DUO or self._costs is None or not self.drafting or self._room <= 1:
            return None
        coming = [node for node in map(self.tree.find, outlook.expanding) if node is not None and not node.expanded]
        delay = outlook.next_in
        if not coming:  # the running step is for leaves that have died; the one after it is for ours
            coming = self._next_leaves(nodes)
            delay += outlook.step
        last = self.tree.position + self._room - 1  # of the answer: guesses behind it are of no use, however likely
        coming = [node for node in coming if node.position < last]
        worth = 1.0 if self.tree.root.expanded else UNFORESEEN  # of guesses that are there
        chances = self.tree.probabilities
        free = [worth * sum(chances(list(leaf.children.values()))) for leaf in coming]  # guessed already, by others than the draft
        gains = [max(0.0, self._coverage * p - there) for p, there in zip(chances(coming), free, strict=True)]
        hoped = [share * gain for gain in gains for share in CHILDREN]
        now, prices, tip = [worth * chance for chance in right], self._prices(), max(hoped, default=0.0)
        for ahead in range(STEPS_AHEAD):
            if worth_waiting(now, hoped, prices, delay + ahead * outlook.step):
                return delay
            tip *= CHILDREN[0]
            hoped.append(tip)  # below the best of what comes
        return None

    def _next_leaves(self, nodes: Sequence[Node]) -> list[Node]:
        """What the draft will expand next: it knows the root, and until it has expanded that nothing below."""
        if not self.tree.root.expanded:
            return [self.tree.root]
        leaves = [node for node in nodes if not node.expanded]  # they come best first
        return leaves[: self._config.draft_width] or self.tree.frontier(1)

    def all_dead(self, leaves: Sequence[int]) -> bool:
        """Is a draft step on these leaves of no use any more?"""
        return bool(leaves) and all(self.tree.find(key) is None for key in leaves)

    def nodes_arrived(self, proposals: Iterable[Proposal]) -> None:
        """Guesses from any drafter, at any time."""
        covered: dict[int, float] = {}
        add, model, count = self.tree.add, Source.MODEL, 0
        for proposal in proposals:
            node = add(proposal)
            count += 1
            if proposal.source is model and node is not None and node.parent is not None:
                node.parent.expanded = True
                covered[proposal.parent] = covered.get(proposal.parent, 0.0) + proposal.p
        self.drafted += count
        for share in covered.values():
            self._coverage += COVERAGE_RATE * (min(share, 1.0) - self._coverage)

    def round_took(self, tokens: int, seconds: float) -> None:
        """The driver's report of a whole round, waits included; the off-switch judges by it."""
        if self._config.mode is not Mode.DUO or self._costs is None:
            return
        plain, paused = self._prices()[1], not self._switch.on
        self._switch.observe(tokens, seconds, plain)
        if not self._bare_rounds:
            self._trust.observe(tokens, seconds, plain)
        if paused and not (self._bare_rounds and self._free_switch.on):  # a plain pass says nothing about the guesses it had not
            self._free_switch.observe(tokens, seconds, plain)

    def looked(self, tokens: int, seconds: float) -> None:
        """The driver's report of a round for which guesses were looked for where nothing hides that; `seconds` with the looking."""
        if self._priced and self._config.mode is Mode.DUO:
            self._looks.observe(tokens, seconds, self._prices()[1], in_vain=self._bare_rounds > 0)

    def draft_exhausted(self) -> None:
        """The draft has nothing to add in this round."""
        self._steps_left = 0

    def verdict_arrived(self, work: Verify, verdict: Verdict) -> list[Committed]:
        """Commit what the target said. Returns the tokens that the answer gained, the last one possibly its end."""
        sources = [work.nodes[i].source for i in verdict.accepted] + [Source.TARGET]
        gained: list[Committed] = []
        for choice, source in zip(verdict.choices, sources, strict=True):
            gained.append(Committed(choice.token, source, choice.logprob, choice.top))
            self._room -= 1
            self.finish_reason = self._end(choice.token)
            if self.finish_reason is not None:
                break
        self._count(work, gained)
        self.answer += gained
        self.tree.commit([committed.token for committed in gained])
        self._steps_left = self._steps_per_round()
        return gained

    def _end(self, token: int) -> FinishReason | None:
        if token in self._end_tokens or self._stop(token):
            return "stop"
        return "length" if self._room <= 0 else None

    def _count(self, work: Verify, gained: Sequence[Committed]) -> None:
        self.rounds += 1
        self._bare_rounds = 0 if work.nodes else self._bare_rounds + 1
        if not work.nodes:
            return
        self.verified += len(work.nodes)
        for committed in gained:
            if committed.source is not Source.TARGET:
                self.accepted += 1
                self.accepted_by_source[committed.source] += 1

    def cancel(self) -> None:
        if self.finish_reason is None:
            self.finish_reason = "cancelled"
