"""What planner and tree bookkeeping cost in a round, beside the models: goal under 200 microseconds at 64 nodes.

    python benchmarks/planner.py

One round as the target's side sees it: guesses of the draft arrive and enter the tree, the planner chooses 64 nodes and weighs
waiting, the verdict is walked, the tree re-rooted.
"""

from __future__ import annotations

import random
import time
from dataclasses import replace
from itertools import count

import common

from duodecoding.core import DuoCore, Verdict, Verify
from duodecoding.costs import CostCurve
from duodecoding.planner import Outlook
from duodecoding.sampling import Choice
from duodecoding.tree import Node, Proposal
from duodecoding.types import EngineConfig, Mode, SamplingParams, Source
from duodecoding.virtual import load_profile

GOAL = 200.0  # microseconds
STEP = 4  # leaves that the draft expands at once
CHILDREN = (0.55, 0.2, 0.1, 0.05, 0.03, 0.02, 0.01, 0.01)  # chances of an expanded leaf's guesses
PARTS = ("guesses arrive", "plan", "commit")


def grow(core: DuoCore, keys: count[int], nodes: int) -> float:
    """Draft steps until the tree has `nodes` guesses. Seconds that it took to take them in; making them is the draft's work."""
    seconds, size = 0.0, len(core.tree)
    while size < nodes:
        leaves = [node for node in [core.tree.root, *core.tree.select(1000)] if not node.expanded][:STEP]  # as the draft's own tree
        message = [Proposal(next(keys), leaf.key, token, p, Source.MODEL) for leaf in leaves for token, p in enumerate(CHILDREN)]
        start = time.perf_counter()
        core.nodes_arrived(message)
        seconds += time.perf_counter() - start
        size += len(message)
    return seconds


def verdict_for(work: Verify, chance: random.Random) -> Verdict:
    """A path down the tree, as a target that agrees with the draft as often as the draft says."""
    accepted: list[int] = []
    node: Node | None = None
    index = {id(node): i for i, node in enumerate(work.nodes)}
    while True:
        children = [n for n in work.nodes if (n.parent is node if node is not None else id(n.parent) not in index)]
        picked = next((n for n in children if chance.random() < 0.6), None)
        if picked is None:
            return Verdict(tuple(accepted), (*(Choice(work.nodes[i].token, 0.0) for i in accepted), Choice(99, 0.0)))
        accepted.append(index[id(picked)])
        node = picked


def one_round(core: DuoCore, keys: count[int], chance: random.Random, nodes: int) -> tuple[dict[str, float], int]:
    """Seconds of each part, and guesses in the pass."""
    times = {"guesses arrive": grow(core, keys, nodes)}
    start = time.perf_counter()
    work = core.step(Outlook(0.0004, (core.tree.root.key,), 0.001))
    times["plan"] = time.perf_counter() - start
    if not isinstance(work, Verify):
        work = core.step()
    assert isinstance(work, Verify)
    verdict = verdict_for(work, chance)
    start = time.perf_counter()
    core.verdict_arrived(work, verdict)
    core.round_took(len(verdict.choices), 0.004)
    times["commit"] = time.perf_counter() - start
    return times, len(work.nodes)


def main() -> None:
    parser = common.arguments(__doc__ or "")
    parser.add_argument("--rounds", type=int, default=4000)
    parser.add_argument("--nodes", type=int, default=64)
    args = parser.parse_args()
    # Passes that hardly cost more for more guesses, so that all 64 are taken.
    profile = replace(load_profile("h200-7b"), verify={512: CostCurve({1: 0.005, 128: 0.0051})}, host=None)
    config = EngineConfig(mode=Mode.DUO, max_nodes=args.nodes)
    chance, keys = random.Random(0), count(1)
    rounds: list[dict[str, float]] = []
    sizes: list[int] = []
    while len(rounds) < args.rounds:
        core = DuoCore([1, 2, 3], SamplingParams(max_tokens=400), config, context=1 << 20, costs=profile)
        while core.finish_reason is None:
            times, size = one_round(core, keys, chance, args.nodes)
            rounds.append(times)
            sizes.append(size)
    totals = [1e6 * sum(times.values()) for times in rounds]
    results = {
        "microseconds a round": common.spread(totals, 1),
        "of which": {part: common.spread([1e6 * times[part] for times in rounds], 1) for part in PARTS},
        "guesses in a pass": common.spread(sizes, 1),
        "goal, microseconds": GOAL,
        "goal met by the median": sorted(totals)[len(totals) // 2] < GOAL,
    }
    common.write("planner", {"nodes": args.nodes, "rounds": len(rounds)}, results)


if __name__ == "__main__":
    main()
