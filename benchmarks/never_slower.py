"""What `duo` costs with a useless draft: answers in `off` and in `duo` with it, in turns, as a ratio of times.

    python benchmarks/never_slower.py USELESS.gguf [--pairs 14] [--threads 1] [--threads-draft 1]

Each mode has its own engine; both targets get the same number of threads. The package's questions, one of each task in
turn, each once: what was asked before would be guessed without any draft.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from common import spread, write

from duodecoding import LLM, EngineConfig, SamplingParams, prompts


def main() -> None:
    draft = Path(sys.argv[1])
    option = dict(zip(sys.argv[2::2], sys.argv[3::2], strict=True))
    pairs, threads = int(option.get("--pairs", "14")), int(option.get("--threads", "1"))
    params = SamplingParams(max_tokens=96, ignore_eos=True)
    drafting = int(option.get("--threads-draft", "1"))
    questions = [question.turns[0] for some in zip(*prompts.load().values(), strict=False) for question in some]
    ratios, first, same = [], [], True
    off = LLM.from_config(EngineConfig(mode="off", threads=threads, ctx_size=2048))
    duo = LLM.from_config(EngineConfig(mode="duo", draft=str(draft), threads=threads, threads_draft=drafting, ctx_size=2048))
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
    print(write("never_slower", {"draft": draft.name, "threads": threads, "threads_draft": drafting, "tokens": 96}, results))


if __name__ == "__main__":
    main()
