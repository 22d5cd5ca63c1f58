"""What we cost where we cannot help: mode `off` on llama.cpp against its own loops, in turns, token by token, in one process.

    python benchmarks/overhead.py

A ratio above 1 means that we take longer for a token. Time runs from the first token to the last: no prompt, no loading.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import common
import llama_cpp as C

from duodecoding import LLM, SamplingParams, models
from duodecoding.backends.llamacpp import TYPE_BF16, TYPE_F16, LlamaModel, physical_cores

QUESTION = [{"role": "user", "content": "Tell me how a bicycle stays upright, in as much detail as you can."}]
Loop = Callable[[list[int], int], Iterator[int]]


def ours(llm: LLM) -> Loop:
    def loop(prompt: list[int], count: int) -> Iterator[int]:
        for token in llm.stream(prompt, SamplingParams(max_tokens=count, ignore_eos=True)):
            yield token.id

    return loop


def plain_loop(model: LlamaModel, context: int, threads: int, type_k: int) -> Loop:
    """llama_decode of one token and the greedy sampler, as in llama.cpp's examples/simple."""
    params = C.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch = context, 512, 512
    params.n_threads = params.n_threads_batch = threads
    params.flash_attn_type = C.LLAMA_FLASH_ATTN_TYPE_ENABLED
    params.type_k, params.type_v = type_k, TYPE_F16
    params.no_perf = True
    handle = C.llama_init_from_model(model.handle, params)
    sampler = C.llama_sampler_chain_init(C.llama_sampler_chain_default_params())
    C.llama_sampler_chain_add(sampler, C.llama_sampler_init_greedy())

    def loop(prompt: list[int], count: int) -> Iterator[int]:
        C.llama_memory_clear(C.llama_get_memory(handle), True)
        tokens = (C.llama_token * len(prompt))(*prompt)
        C.llama_decode(handle, C.llama_batch_get_one(tokens, len(prompt)))
        one = (C.llama_token * 1)()
        for _ in range(count - 1):
            one[0] = C.llama_sampler_sample(sampler, handle, -1)
            yield one[0]
            C.llama_decode(handle, C.llama_batch_get_one(one, 1))
        yield C.llama_sampler_sample(sampler, handle, -1)

    return loop


def high_level(path: str, context: int, threads: int) -> Loop:
    """llama-cpp-python's `Llama.generate`."""
    llama = C.Llama(
        path,
        n_ctx=context,
        n_threads=threads,
        n_threads_batch=threads,
        flash_attn=True,
        type_k=TYPE_BF16,
        type_v=TYPE_F16,
        verbose=False,
    )

    def loop(prompt: list[int], count: int) -> Iterator[int]:
        llama.reset()
        for token, _ in zip(llama.generate(prompt, temp=0.0, repeat_penalty=1.0), range(count), strict=False):
            yield token

    return loop


def race(
    loops: dict[str, Loop], prompt: list[int], count: int, clock: Callable[[], float]
) -> tuple[dict[str, float], dict[str, list[int]]]:
    """Seconds a token after the first, and the tokens. Loops take turns token by token, so that a busy machine is fair."""
    running = {name: loop(prompt, count) for name, loop in loops.items()}
    said = {name: [next(tokens)] for name, tokens in running.items()}
    seconds = dict.fromkeys(loops, 0.0)
    names = list(loops)
    for turn in range(count - 1):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            start = clock()
            said[name].append(next(running[name]))
            seconds[name] += (clock() - start) / (count - 1)
    for tokens in running.values():
        list(tokens)
    return seconds, said


def main() -> None:
    parser = common.arguments(__doc__ or "")
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument(
        "--cpu-time", action="store_true", help="count the process's own time: for a busy machine, with --threads 1"
    )
    args = parser.parse_args()
    threads = args.threads or physical_cores()
    path = models.resolve(args.model).path
    llm = LLM(args.model, mode="off", ctx_size=args.context, threads=threads, backend="llamacpp")
    prompt = llm.vocabulary.tokenize(QUESTION[0]["content"], special=False, bos=True)
    model = LlamaModel(path)
    loops = {
        "off": ours(llm),
        "llama.cpp": plain_loop(model, args.context, threads, TYPE_BF16),
        "llama.cpp, cache in F16": plain_loop(model, args.context, threads, TYPE_F16),
        "Llama.generate": high_level(str(path), args.context, threads),
    }
    clock = time.process_time if args.cpu_time else time.perf_counter
    race(loops, prompt, 8, clock)  # warm
    times: dict[str, list[float]] = {name: [] for name in loops}
    for _ in range(args.pairs):
        seconds, said = race(loops, prompt, args.tokens, clock)
        for name, taken in seconds.items():
            times[name].append(taken)
    results: dict[str, Any] = {
        "milliseconds per token": {name: common.spread([1000 * t for t in found], 3) for name, found in times.items()},
        "ratio of off to": {
            name: common.spread([mine / theirs for mine, theirs in zip(times["off"], times[name], strict=True)])
            for name in loops
            if name != "off"
        },
        "same tokens as off": {name: said[name] == said["off"] for name in loops if name != "off"},
        "pairs": args.pairs,
    }
    clock_name = "CPU time of the process" if args.cpu_time else "wall"
    settings = {
        "clock": clock_name,
        "model": args.model,
        "threads": threads,
        "context": args.context,
        "tokens": args.tokens,
        "cache": "K BF16, V F16",
    }
    common.write("overhead", settings, results)
    llm.close()


if __name__ == "__main__":
    main()
