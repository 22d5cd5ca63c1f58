"""A target and a draft model on a CPU: what drafting between the passes brings, beside free guesses and the published modes.

    python benchmarks/cpu_pair.py --model TARGET.gguf --draft DRAFT [--per-task 1] [--tokens 96] [--sessions 2] [--temperature 0]

All engines share one target. Every question is asked of all of them one after the other, from a cold start, prompts included, in an
order that begins with another one each time. What drafters have learnt and the off-switch live on from question to question.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import common

from duodecoding import LLM, SamplingParams, backends, prompts
from duodecoding.backends.base import Target
from duodecoding.bench.answers import forget
from duodecoding.bench.simulate import chat_tokens
from duodecoding.types import EngineConfig, Mode, Result

CONTEXT = 2048


class Shared:
    """One target for all engines; whoever made it closes it."""

    def __init__(self) -> None:
        self.target: Target | None = None

    def load(self, path: Path, config: EngineConfig, *_: Any) -> Target:
        if self.target is None:
            self.target = backends.load_target(path, config)
        return self.target


def contenders(config: EngineConfig, shapes: list[str]) -> dict[str, EngineConfig]:
    """By name. `shapes`: trees of serial, steps x width."""
    found = {
        "off": replace(config, mode=Mode.OFF),
        "free": replace(config, draft="free"),
        "duo": replace(config, turns="on"),
        "chain": replace(config, mode=Mode.CHAIN),
    }
    for shape in shapes:
        steps, width = map(int, shape.split("x"))
        found[f"serial {shape}"] = replace(config, mode=Mode.SERIAL, draft_length=steps, draft_width=width)
    return found


def mean_ratio(times: dict[str, dict[str, list[float]]], name: str) -> dict[str, float]:
    """Times as fast as off, by task, from sums of seconds; and their mean."""
    found = {task: round(sum(of["off"]) / sum(of[name]), 3) for task, of in times.items()}
    return found | {"mean": round(statistics.mean(found.values()), 3)}


def main() -> None:
    parser = common.arguments(__doc__.partition("\n")[0])
    parser.add_argument("--draft", required=True)
    parser.add_argument("--per-task", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--sessions", type=int, default=2, help="each asks other questions")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--chain", type=int, default=4)
    parser.add_argument("--serial", nargs="*", default=["3x2"])
    parser.add_argument("--name", default="cpu_pair")
    given = parser.parse_args()
    shared = Shared()
    config = EngineConfig(given.model, given.draft, ctx_size=CONTEXT, threads=given.threads, draft_length=given.chain)
    engines = {
        name: LLM.from_config(settings, load_target=shared.load) for name, settings in contenders(config, given.serial).items()
    }
    times: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    firsts, rounds = defaultdict(list), defaultdict(list)
    equal = asked = 0
    for session in range(given.sessions):
        some = slice(session * given.per_task, (session + 1) * given.per_task)
        questions = [question for of_task in prompts.load().values() for question in of_task[some]]
        params = SamplingParams(max_tokens=given.tokens, temperature=given.temperature, seed=session)
        for number, question in enumerate(questions):
            ids = chat_tokens(engines["off"].vocabulary, question.turns[0])
            order = list(engines)[number % len(engines) :] + list(engines)[: number % len(engines)]
            said: dict[str, Result] = {}
            for name in order:
                forget(engines[name])
                said[name] = engines[name].generate(ids, params)
                times[question.task][name].append(said[name].stats.seconds)
                firsts[name].append(said[name].stats.ttft_seconds)
                rounds[name].append(said[name].stats.tokens_per_round)
            equal += sum(result.token_ids == said["off"].token_ids for result in said.values()) - 1
            asked += len(engines) - 1
            seconds = {name: round(result.stats.seconds, 2) for name, result in said.items()}
            print(f"{session + 1}/{given.sessions} {question.task}: {seconds}", flush=True)
    by_session = {
        name: [
            round(statistics.mean(sum(of["off"][part]) / sum(of[name][part]) for of in times.values()), 3)
            for part in (slice(s * given.per_task, (s + 1) * given.per_task) for s in range(given.sessions))
        ]
        for name in engines
    }
    pace = engines["duo"]._pace.costs
    common.write(
        given.name,
        vars(given) | {"model": Path(given.model).name, "draft": Path(given.draft).name},
        {
            "times as fast as off": {name: mean_ratio(times, name) for name in engines},
            "mean of each session": by_session,
            "first token over off's": {
                name: common.spread([a / b for a, b in zip(firsts[name], firsts["off"], strict=True)]) for name in engines
            },
            "tokens a round": {name: round(statistics.mean(found), 3) for name, found in rounds.items()},
            "equal to off": f"{equal} of {asked}",
            "seconds of a draft step, by leaves, as learnt": {n: round(s, 6) for n, s in pace.draft.points.items()},
            "seconds of a pass, by tokens, as learnt": {
                str(context): {n: round(s, 6) for n, s in curve.points.items()} for context, curve in pace.verify.items()
            },
            "speculation": {name: engine.speculation for name, engine in engines.items()},
        },
    )


if __name__ == "__main__":
    main()
