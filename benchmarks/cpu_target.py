"""A target on the CPU, on our own engine and on llama.cpp: what a pass costs, how long answers take, how near logits are to exact.

    python benchmarks/cpu_target.py [--model NAME_OR_FILE] [--per-task 2] [--tokens 96] [--sessions 5] [--name cpu_target]

Passes and answers in turns, in one process, all on the same number of threads. llama.cpp's weights are as they are in the file, for
its answers must not depend on the mode; passes with weights repacked for this processor, as it would have them by itself, beside
them. Answers: the package's questions, whole ones, `off`
on both engines and `duo` with free guesses on ours, each cold. Logits: against the same weights as 32-bit floats, which llama.cpp
computes (a model in 32 bits must fit into memory).
"""

from __future__ import annotations

import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import common
import gguf
import numpy as np
import numpy.typing as npt

from duodecoding import LLM, SamplingParams, measure, models, prompts
from duodecoding.backends import load_target
from duodecoding.backends.base import Target
from duodecoding.backends.llamacpp import LlamaModel, physical_cores
from duodecoding.backends.llamacpp_target import LlamaTarget
from duodecoding.bench.simulate import chat_tokens
from duodecoding.core import walk
from duodecoding.drafters.lookup import LookupDrafter
from duodecoding.drafters.recycling import RecyclingDrafter
from duodecoding.drafting import Drafters
from duodecoding.pace import guessed_costs
from duodecoding.tree import ROOT, PassNode
from duodecoding.types import EngineConfig, Mode, Result, Stats

SIZES = (1, 2, 4, 8, 16, 32)
CONTEXTS = (200, 1000)
OTHER = "off, llama.cpp"
TEXT = "The river rose slowly through the night, and by the morning the lower fields were under water. "
PARAMS = SamplingParams()
Row = npt.NDArray[np.float64]


def passes(targets: dict[str, Target], rounds: int) -> dict[str, list[float]]:
    """Milliseconds; the second of two of a kind. A prompt in microseconds a token."""
    found: dict[str, list[float]] = defaultdict(list)
    for _, context, (name, target) in product(range(rounds), CONTEXTS, targets.items()):
        ids = target.vocabulary.tokenize(TEXT * 60, special=False, bos=True)
        target.open([5], PARAMS)
        conversation = target.open(ids[:context], PARAMS)
        start = time.perf_counter()
        target.verify([(conversation, ())])[0](ROOT)
        found[f"{name}, prompt of {context}, us a token"].append(1e6 * (time.perf_counter() - start) / context)
        conversation.commit([7])
        for size in SIZES:
            guesses = [PassNode(i - 1 if i % 4 else ROOT, 100 + i) for i in range(size - 1)]
            for _ in range(2):
                start = time.perf_counter()
                target.verify([(conversation, guesses)])
                milliseconds = 1e3 * (time.perf_counter() - start)
                conversation.commit([7])
            found[f"{name}, context {context}, {size} tokens, ms"].append(milliseconds)
    return found


def engines_of(targets: dict[str, Target]) -> dict[str, LLM]:
    """Cold, and with a first look at the target's passes, as at the start of `duo run`."""
    off, free = EngineConfig(mode=Mode.OFF), Drafters(lookup=LookupDrafter(), recycling=RecyclingDrafter())
    plain = {f"off, {name}": LLM.of(target, Drafters(), off) for name, target in targets.items()}
    duo = LLM.of(targets["ours"], free, EngineConfig(mode=Mode.DUO))
    duo.use_costs(replace(guessed_costs(on_gpu=False), verify=measure.quick_verify(targets["ours"])))
    return plain | {"duo, ours": duo}


def timed(llm: LLM, question: str, params: SamplingParams) -> tuple[float, Result]:
    """Milliseconds a token, the prompt included."""
    llm.target.open([5], params)  # nothing of the prompt is there
    ids = chat_tokens(llm.vocabulary, question)
    start = time.perf_counter()
    result = llm.generate(ids, params)
    return 1e3 * (time.perf_counter() - start) / len(result.token_ids), result


def answers(targets: dict[str, Target], per_task: int, tokens: int, sessions: int) -> dict[str, Any]:
    """Milliseconds a token and their ratios, by task."""
    params, took, same, stats = SamplingParams(max_tokens=tokens), defaultdict(list), list[bool](), list[Stats]()
    questions = [(task, question.turns[0]) for task, some in prompts.load().items() for question in some[:per_task]]
    for session in range(sessions):
        engines = engines_of(targets)
        for number, (task, question) in enumerate(questions):
            ours = sorted(engines.keys() - {OTHER}, reverse=bool((number + session) % 2))
            order = [OTHER, *ours]  # what llama.cpp leaves running or in caches hits either of ours as often
            said = {name: timed(engines[name], question, params) for name in order}
            same.append(said["off, ours"][1].token_ids == said["duo, ours"][1].token_ids)
            stats.append(said["duo, ours"][1].stats)
            for name, (milliseconds, _) in said.items() if session else ():  # the first one warms up
                took[name, task].append(milliseconds)
    tasks = list(dict.fromkeys(task for task, _ in questions))

    def ratio(slow: str, fast: str) -> dict[str, float]:
        found = {task: sum(took[slow, task]) / sum(took[fast, task]) for task in tasks}
        return {name: round(value, 3) for name, value in (found | {"mean": sum(found.values()) / len(found)}).items()}

    return {
        "ms a token": {name: common.spread([ms for task in tasks for ms in took[name, task]], 3) for name in engines},
        "off, ours over llama.cpp": ratio(OTHER, "off, ours"),
        "ours, duo over off": ratio("off, ours", "duo, ours"),
        "duo, ours over off, llama.cpp": ratio(OTHER, "duo, ours"),
        "tokens a round": round(sum(each.new_tokens for each in stats) / sum(each.rounds for each in stats), 3),
        "duo equal to off": f"{sum(same)} of {len(same)}",
    }


def logits_of(target: Target, ids: Sequence[int]) -> Row:
    """After each token, one by one."""
    sampler_rows: list[Row] = []
    conversation = target.open(ids[:1], PARAMS)
    for following in ids[1:]:
        choose = target.verify([(conversation, ())])[0]
        sampler_rows.append(_last_row(target))
        walk((), choose)
        conversation.commit([following])
    return np.stack(sampler_rows)


def _last_row(target: Any) -> Row:
    rows = target._model.logits if target.engine == "native" else target._context.logits()
    return np.asarray(rows[0], np.float64)


def nearness(path: Path, targets: dict[str, Target], tokens: int) -> dict[str, Any]:
    """To the same weights as floats: divergence in nats, error of logits in percent of their spread, likeliest tokens the same."""
    with tempfile.TemporaryDirectory() as folder:
        floats = load_target(_as_floats(path, Path(folder) / "floats.gguf"), EngineConfig(ctx_size=1024, backend="llamacpp"))
        known = prompts.load()
        texts = [question.turns[0] for task in ("rag", "humaneval", "summarization") for question in known[task][:2]]
        ids = floats.vocabulary.tokenize("\n\n".join(texts), special=False, bos=True)[:tokens]
        right = logits_of(floats, ids)
        floats.close()
    found = {}
    for name, target in targets.items():
        target.open([5], PARAMS)
        rows = logits_of(target, ids)
        error = np.sqrt(((rows - right) ** 2).mean()) / right.std(1).mean()
        agree = (rows.argmax(1) == right.argmax(1)).mean()
        divergence = (np.exp(_log_shares(right)) * (_log_shares(right) - _log_shares(rows))).sum(1).mean()
        found[name] = {
            "nats": round(float(divergence), 6),
            "percent": round(100 * float(error), 3),
            "agree": round(float(agree), 4),
        }
    return {"tokens": len(right), **found}


def _log_shares(rows: Row) -> Row:
    below: Row = rows - rows.max(1, keepdims=True)
    return below - np.log(np.exp(below).sum(1, keepdims=True))


def _as_floats(source: Path, to: Path) -> Path:
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(to, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            sub = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(name, field.contents(), field.types[0], sub_type=sub)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return to


def main() -> None:
    parser = common.arguments(__doc__ or "")
    parser.add_argument("--per-task", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--sessions", type=int, default=5, help="the first one warms up")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--compared", type=int, default=1000, help="tokens whose logits are compared; 0: none")
    parser.add_argument("--name", default="cpu_target")
    args = parser.parse_args()
    path, threads = models.resolve(args.model).path, args.threads or physical_cores()
    config = EngineConfig(ctx_size=2048, threads=threads, keep_mb=0, backend="native")
    targets = {"ours": load_target(path, config)}
    targets["llama.cpp"] = load_target(path, EngineConfig(ctx_size=2048, threads=threads, keep_mb=0, backend="llamacpp"))
    repacked = LlamaTarget(LlamaModel(path, repack=True), context=2048, threads=threads)
    timed_passes = passes(targets | {"llama.cpp, repacked": repacked}, args.rounds)
    repacked.close()
    results: dict[str, Any] = {"passes": {name: common.spread(some) for name, some in timed_passes.items()}}
    results["answers"] = answers(targets, args.per_task, args.tokens, args.sessions)
    if args.compared:
        results["logits"] = nearness(path, targets, args.compared)
    for target in targets.values():
        target.close()
    settings = {"model": path.name, "threads": threads, "tokens": args.tokens, "per task": args.per_task, "sessions": args.sessions}
    common.write(args.name, settings, results)


if __name__ == "__main__":
    main()
