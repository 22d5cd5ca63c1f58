"""What guesses without a model cost: lookup and recycling together, a commit of three tokens and the guesses after it.

    python benchmarks/free.py

Goal: under 50 microseconds a round, at contexts of 2k and 16k tokens. Also the time to read a prompt and the memory of both.
The text is that of the package's prompts, a word a token; the answer copies parts of it with changes.
"""

from __future__ import annotations

import random
import statistics
import time
import tracemalloc
from collections.abc import Iterator
from typing import Any

import common

from duodecoding import prompts
from duodecoding.drafters.automaton import SuffixAutomaton
from duodecoding.drafters.lookup import LookupDrafter
from duodecoding.drafters.recycling import MOST_ROWS, SUCCESSORS, RecyclingDrafter, Table
from duodecoding.tree import TokenTree

GOAL = 50.0  # microseconds
COMMIT = 3  # tokens a round


def words() -> list[int]:
    """The package's prompts as token ids."""
    ids: dict[str, int] = {}
    texts = [turn for found in prompts.load().values() for prompt in found for turn in prompt.turns]
    return [ids.setdefault(word, len(ids)) for text in texts for word in text.split()]


def writing(chance: random.Random) -> Iterator[int]:
    """A text without end that repeats parts of itself, as an answer does, with a new word here and there."""
    known = words()
    while True:
        start = chance.randrange(len(known))
        for token in known[start : start + chance.randrange(4, 40)]:
            yield token if chance.random() < 0.9 else chance.choice(known)


def repeated(context: int, rounds: int, repeats: int) -> dict[str, Any]:
    runs = [run(context, rounds) for _ in range(repeats)]
    times = [seconds for one in runs for seconds in one["times"]]
    return {
        "microseconds a round": common.spread(times, 1),
        "median of the quietest run": round(min(statistics.median(one["times"]) for one in runs), 1),
        "goal met by the median": statistics.median(times) < GOAL,
        "microseconds to hang them into the tree": common.spread([t for one in runs for t in one["added"]], 1),
        "guesses a round": common.spread(runs[0]["guesses"], 1),
        "tokens of the text that were guessed": round(runs[0]["right"] / (COMMIT * rounds), 3),
        "microseconds a prompt token": round(min(1e6 * one["read"] / context for one in runs), 2),
    }


def run(context: int, rounds: int) -> dict[str, Any]:
    chance = random.Random(0)
    text = writing(chance)
    prompt = [next(text) for _ in range(context)]
    lookup, recycling, tree = LookupDrafter(), RecyclingDrafter(), TokenTree(prompt)
    start = time.perf_counter()
    lookup.open(prompt)
    lookup.guess()  # reads it
    read = time.perf_counter() - start
    recycling.open(prompt)
    times, added, guesses, right = [], [], [], 0
    for _ in range(rounds):
        tokens = [next(text) for _ in range(COMMIT)]
        right += sum(node is not None for node in tree.commit(tokens))
        start = time.perf_counter()
        lookup.commit(tokens)
        recycling.commit(tokens)
        chains = lookup.guess()
        middle = time.perf_counter()
        for proposal in chains:
            tree.add(proposal)
        after = time.perf_counter()
        below = recycling.guess(tree)
        end = time.perf_counter()
        for proposal in below:
            tree.add(proposal)
        times.append(1e6 * (middle - start + end - after))
        added.append(1e6 * (after - middle + time.perf_counter() - end))
        guesses.append(len(chains) + len(below))
    return {"times": times, "added": added, "guesses": guesses, "right": right, "read": read}


def megabytes(context: int) -> float:
    """Of an automaton over so many tokens."""
    text = writing(random.Random(0))
    prompt = [next(text) for _ in range(context)]
    tracemalloc.start()
    kept = SuffixAutomaton(prompt)
    size = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    del kept
    return round(size / 1e6, 2)


def full_table() -> float:
    """Megabytes of recycling when no more rows fit."""
    tracemalloc.start()
    pairs, singles = Table(0.8), Table(0.5)
    for context in range(1 << 20, (1 << 20) + MOST_ROWS):
        pairs.say(context, {context + i: 1 / (2.5 + i) for i in range(SUCCESSORS)})
        singles.say(context, {context + i: 1 / (2.5 + i) for i in range(SUCCESSORS)})
    size = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return round(size / 1e6, 2)


def main() -> None:
    parser = common.arguments(__doc__ or "")
    parser.add_argument("--rounds", type=int, default=150)
    parser.add_argument("--repeats", type=int, default=20)
    args = parser.parse_args()
    results = {
        **{f"context {context}": repeated(context, args.rounds, args.repeats) for context in (2048, 16384)},
        "goal, microseconds": GOAL,
        "megabytes of lookup": {str(context): megabytes(context) for context in (2048, 16384, 32768, 1 << 17)},
        "megabytes of recycling at most": full_table(),
    }
    common.write("free", {"rounds": args.rounds, "repeats": args.repeats, "tokens a commit": COMMIT}, results)


if __name__ == "__main__":
    main()
