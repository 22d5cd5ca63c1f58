"""Choosing from 49k logits: the best k, log-sum-exp, and both as the drafters and the target use them. Real logits.

python benchmarks/topk.py
"""

from __future__ import annotations

import time
from collections.abc import Callable

import common
import numpy as np

from duodecoding import SamplingParams, models
from duodecoding.backends import load_target
from duodecoding.backends.llamacpp_target import LlamaTarget
from duodecoding.sampling import Sampler, largest
from duodecoding.tree import ROOT
from duodecoding.types import EngineConfig

TEXT = "Once upon a time there was a small engine that could decode. It lived in a"
GOAL = 100.0  # microseconds for the best 4 and log-sum-exp


def real_rows(name: str, threads: int, count: int) -> list[np.ndarray]:
    """Logits along an answer."""
    target = load_target(models.resolve(name).path, EngineConfig(ctx_size=512, threads=threads))
    assert isinstance(target, LlamaTarget)
    conversation = target.open(target.vocabulary.tokenize(TEXT, special=False, bos=True), SamplingParams())
    rows = []
    for _ in range(count):
        choose = target.verify([(conversation, [])])[0]
        rows.append(target._context.logits()[0].copy())
        conversation.commit([choose(ROOT).token])
    target.close()
    return rows


def microseconds(work: Callable[[np.ndarray], object], rows: list[np.ndarray], repeats: int) -> list[float]:
    found = []
    for _ in range(repeats):
        for row in rows:
            start = time.perf_counter()
            work(row)
            found.append(1e6 * (time.perf_counter() - start))
    return found[len(rows) :]  # the first round warms


def main() -> None:
    parser = common.arguments(__doc__ or "")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=20)
    args = parser.parse_args()
    rows = real_rows(args.model, args.threads, args.rows)
    size = rows[0].size
    greedy = Sampler(SamplingParams(), [0], size)
    sampled = Sampler(SamplingParams(temperature=0.8), [0], size)
    nucleus = Sampler(SamplingParams(temperature=0.8, top_p=0.9), [0], size)
    work: dict[str, Callable[[np.ndarray], object]] = {
        "best 4 and log-sum-exp (a greedy draft's guesses)": lambda row: greedy.guesses(row, 9, 4),
        "best 4": lambda row: largest(row, 4),
        "best 256": lambda row: largest(row, 256),
        "log-sum-exp": lambda row: greedy._log_sum_exp(row, row.max()),
        "argmax and logprob (a greedy target's choice)": lambda row: greedy.choose(row, 9),
        "guesses at temperature 0.8": lambda row: sampled.guesses(row, 9, 4),
        "choice at temperature 0.8": lambda row: sampled.choose(row, 9),
        "choice at temperature 0.8, top-p 0.9": lambda row: nucleus.choose(row, 9),
        "for comparison: argpartition 4": lambda row: np.argpartition(row, -4)[-4:],
    }
    results = {name: common.spread(microseconds(do, rows, args.repeats), 1) for name, do in work.items()}
    goal = results["best 4 and log-sum-exp (a greedy draft's guesses)"]["median"] <= GOAL
    settings = {"model": args.model, "vocabulary": size, "rows": args.rows, "repeats": args.repeats, "unit": "microseconds"}
    common.write("topk", settings, {**results, f"goal of {GOAL:.0f} met": goal})


if __name__ == "__main__":
    main()
