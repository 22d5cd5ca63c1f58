"""What `duo` costs with a useless draft: answers in `off` and in `duo` with it, in turns, as a ratio of times.

    python benchmarks/never_slower.py USELESS.gguf [--pairs 14] [--threads 1] [--threads-draft 1]
    python benchmarks/never_slower.py USELESS.gguf --model RIG.gguf --turns on --threads 2 --threads-draft 2 --name NAME

Each mode has its own engine; both targets get the same number of threads. The package's questions, one of each task in
turn, each once: what was asked before would be guessed without any draft.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path

from common import spread, write

from duodecoding import LLM, EngineConfig, SamplingParams, prompts


def main() -> None:
    draft = Path(sys.argv[1])
    option = dict(zip(sys.argv[2::2], sys.argv[3::2], strict=True))
    pairs, threads = int(option.get("--pairs", "14")), int(option.get("--threads", "1"))
    params = SamplingParams(max_tokens=96, ignore_eos=True)
    drafting, model = int(option.get("--threads-draft", "1")), option.get("--model", "smollm2-135m")
    both = EngineConfig(model, threads=threads, ctx_size=2048)
    questions = [question.turns[0] for some in zip(*prompts.load().values(), strict=False) for question in some]
    ratios, first, same = [], [], True
    off = LLM.from_config(replace(both, mode="off"))
    duo = LLM.from_config(replace(both, draft=str(draft), threads_draft=drafting, turns=option.get("--turns", "auto")))
    with off, duo:
        duo.generate("Hello", params)  # the worker starts, the switch learns
        for i in range(pairs):
            messages = [{"role": "user", "content": questions[i % len(questions)]}]
            times, answers = {}, []
            for name, llm in (("off", off), ("duo", duo)) if i % 2 else (("duo", duo), ("off", off)):
                start = time.perf_counter()
                result = llm.chat(messages, params)
                times[name] = time.perf_counter() - start
                answers.append(result.token_ids)
                times[f"{name} first"] = result.stats.ttft_seconds
            same = same and answers[0] == answers[1]
            ratios.append(times["duo"] / times["off"])
            first.append(times["duo first"] / times["off first"])
            print(f"{i + 1}/{pairs}: {times['duo']:.2f} s against {times['off']:.2f} s", flush=True)
    results = {"duo / off": spread(ratios), "first token, duo / off": spread(first), "same tokens": same, "answers": pairs}
    settings = {"model": Path(model).name, "draft": draft.name, "threads": threads, "threads_draft": drafting, "tokens": 96}
    print(write(option.get("--name", "never_slower"), settings | {"speculation": duo.speculation}, results))


if __name__ == "__main__":
    main()
