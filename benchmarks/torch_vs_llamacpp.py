"""One model's weights in float32, answered by torch and by llama.cpp: equal up to near-ties?

    python benchmarks/torch_vs_llamacpp.py [--model smollm2-135m] [--per-task 1] [--tokens 64]

Writes the model as an F32 GGUF and answers the package's prompts greedily with both. At every first difference each backend
says by how much its best token leads the second there, and how far apart the two are on the same tokens: a lead smaller than
that is a near-tie. (llama.cpp keeps keys in BF16 and values in F16, so it is not float32 throughout.)
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import common
import gguf

from duodecoding import models, prompts
from duodecoding.backends import load_target
from duodecoding.backends.base import Target
from duodecoding.bench.simulate import chat_tokens
from duodecoding.drafting import Drafters
from duodecoding.llm import LLM
from duodecoding.tree import ROOT
from duodecoding.types import EngineConfig, Mode, SamplingParams

F32 = gguf.GGMLQuantizationType.F32


def float_copy(source: Path, to: Path) -> Path:
    """The same model with every tensor in F32."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(to, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name not in ("general.architecture", "general.file_type"):
            writer.add_key_value(name, field.contents(), field.types[0], sub_type=field.types[-1] if len(field.types) > 1 else None)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, gguf.quants.dequantize(tensor.data, tensor.tensor_type), raw_dtype=F32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return to


def targets(path: Path, threads: int = 1, context: int = 2048) -> dict[str, Target]:
    config = EngineConfig(ctx_size=context, threads=threads, device="cpu", dtype="float32")
    both = replace(config, backend="torch"), replace(config, backend="llamacpp")
    return {chosen.backend: load_target(path, chosen) for chosen in both}


def compare(pair: dict[str, Target], prompt: list[int], tokens: int) -> dict[str, Any]:
    """Both answers to a prompt: how long they agree, and where they part the leads and the distance."""
    said = {
        name: LLM.of(target, Drafters(), EngineConfig(mode=Mode.OFF)).generate(prompt, SamplingParams(max_tokens=tokens)).token_ids
        for name, target in pair.items()
    }
    first, second = said.values()
    if first == second:
        return {"tokens": len(first), "equal": True}
    at = next((i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second)))
    tops = {name: top_two(target, prompt + first[:at]) for name, target in pair.items()}
    shared = set.intersection(*(set(top) for top in tops.values()))
    one, two = tops.values()
    return {
        "tokens": len(first),
        "equal": False,
        "at": at,
        "lead": {name: round(max(top.values()) - min(top.values()), 5) for name, top in tops.items()},
        "apart": round(max((abs(one[token] - two[token]) for token in shared), default=float("nan")), 5),
        "same_two": set(one) == set(two),
    }


def top_two(target: Target, tokens: list[int]) -> dict[int, float]:
    """The two likeliest tokens and their log-probabilities."""
    target.open([1], SamplingParams())  # read all of it anew
    return dict(target.verify([(target.open(tokens, SamplingParams(top_logprobs=2)), [])])[0](ROOT).top)


def main() -> None:
    parser = common.arguments(__doc__.partition("\n")[0])
    parser.add_argument("--per-task", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=64)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        pair = targets(float_copy(models.resolve(options.model).path, Path(folder) / "f32.gguf"), options.threads or 1)
        found = []
        for task, of_task in prompts.load().items():
            for prompt in of_task[: options.per_task]:
                start = time.perf_counter()
                result = compare(pair, chat_tokens(pair["torch"].vocabulary, prompt.turns[0]), options.tokens)
                found.append({"task": task, "id": prompt.id, **result})
                print(found[-1], f"{time.perf_counter() - start:.0f} s", flush=True)
        for target in pair.values():
            target.close()
    equal = sum(result["equal"] for result in found)
    results = {
        "prompts": len(found),
        "equal": equal,
        "tokens": sum(result["tokens"] for result in found),
        "largest_lead": max((min(r["lead"].values()) for r in found if not r["equal"]), default=0.0),
        "answers": found,
    }
    common.write("torch_vs_llamacpp", vars(options), results)


if __name__ == "__main__":
    main()
