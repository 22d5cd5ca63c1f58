"""Peak memory of a pair with its context full, each in a process of its own.

    python benchmarks/memory.py [--draft PATH.gguf]

The peak resident set counts everything: Python, both models (files are mapped, their pages count), both KV caches.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import common

GOAL = 1000.0  # MB
TEXT = "The river ran past the mill and the miller counted the sacks of flour that the boats had left. "


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """In the child: fill the context up to the last 64 tokens, then answer."""
    from duodecoding import LLM, SamplingParams

    with LLM(args.model, draft=args.draft, mode=args.mode, ctx_size=args.context, threads=args.threads) as llm:
        text = llm.vocabulary.tokenize(TEXT, special=False, bos=False)
        prompt = (text * (args.context // len(text) + 1))[: args.context - 64]
        result = llm.generate(prompt, SamplingParams(max_tokens=64, ignore_eos=True))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return {
        "peak_mb": round(peak / 1e6, 1),
        "prompt_tokens": result.stats.prompt_tokens,
        "new_tokens": result.stats.new_tokens,
        "tokens_per_round": round(result.stats.tokens_per_round, 2),
    }


def in_a_process(args: argparse.Namespace, mode: str, draft: str) -> dict[str, Any]:
    settings = ["--model", args.model, "--threads", str(args.threads), "--context", str(args.context)]
    command = [sys.executable, __file__, "--child", "--mode", mode, "--draft", draft, *settings]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{mode} with {draft}: {done.stderr.strip().splitlines()[-1:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = common.arguments(__doc__ or "")
    parser.add_argument("--draft", default="", help="a draft's GGUF, measured beside lookup")
    parser.add_argument("--mode", default="serial")
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(measure(args)))
        return
    results: dict[str, Any] = {"off": in_a_process(args, "off", "none"), "lookup": in_a_process(args, args.mode, "lookup")}
    if args.draft:
        results[Path(args.draft).name] = in_a_process(args, args.mode, args.draft)
    worst = max(found["peak_mb"] for found in results.values())
    settings = {"model": args.model, "mode": args.mode, "context": args.context, "threads": args.threads}
    common.write("memory", settings, {**results, f"goal of {GOAL:.0f} MB met": worst < GOAL})


if __name__ == "__main__":
    main()
