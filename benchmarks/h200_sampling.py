"""What the choice of tokens costs on a GPU: our kernels beside torch's operations, over rows, parameters and vocabularies.

    python benchmarks/h200_sampling.py

Logits are random, rounded to bf16 so that ties occur. Times are medians of CUDA events around a graph's replay. Tokens are compared
between the two, with those of the same row alone, and with numpy's choice from the same logits.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
import common
from h200_verify import DEVICE, gpu_ms, machine

from duodecoding.backends import torch_sampling
from duodecoding.backends.torch_graphs import capture
from duodecoding.sampling import Sampler
from duodecoding.types import SamplingParams

VOCABULARIES = (49_152, 151_936)
ROWS = (1, 16, 64)
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature 0.8": {"temperature": 0.8},
    "temperature 0.8, top-p 0.95": {"temperature": 0.8, "top_p": 0.95},
    "temperature 0.8, top-k 40": {"temperature": 0.8, "top_k": 40},
}
SEED = 7


def some_logits(rows: int, vocab: int) -> torch.Tensor:
    """A few tokens far above the others, as models have them."""
    logits = 2.5 * torch.randn(rows, vocab, device=DEVICE)
    logits[:, :40] += 12 * torch.rand(rows, 40, device=DEVICE)
    return logits.bfloat16().float()


def measure(vocab: int, rows: int, params: SamplingParams) -> dict[str, Any]:
    logits, stream = some_logits(rows, vocab), torch.cuda.Stream(DEVICE)
    seed, positions = torch.tensor(SEED, device=DEVICE), torch.arange(100, 100 + rows, device=DEVICE)
    has_kernels, found, times = torch_sampling._has_kernels, {}, {}
    for name, on in (("torch", False), ("kernels", True)):
        torch_sampling._has_kernels = lambda device, on=on: on  # type: ignore[assignment]
        graph, result = capture(lambda: torch_sampling.choose(logits, params, seed, positions), DEVICE, stream)
        times[f"{name}_ms"] = round(gpu_ms(graph.replay), 4)
        found[name] = result.clone()
        if on:
            alone = [torch_sampling.choose(logits[i : i + 1], params, seed, positions[i : i + 1]) for i in range(rows)]
    torch_sampling._has_kernels = has_kernels
    sampler = Sampler(params, [], vocab)
    theirs = [sampler.choose(row, 100 + i).token for i, row in enumerate(logits.cpu().numpy())]
    tokens, unsure = found["kernels"][0].long().tolist(), found["kernels"][2].tolist()
    return {
        **times,
        "as_torch": bool(torch.equal(found["kernels"][[0, 2]], found["torch"][[0, 2]])),
        "as_alone": bool(torch.equal(torch.cat(alone, dim=1)[[0, 2]], found["kernels"][[0, 2]])),
        "logprobs_as_alone": bool(torch.equal(torch.cat(alone, dim=1)[1], found["kernels"][1])),
        "as_numpy": all(ours == token or doubt for ours, token, doubt in zip(tokens, theirs, unsure, strict=True)),
        "unsure": int(sum(unsure)),
    }


def main() -> None:
    torch.manual_seed(0)
    results: dict[str, Any] = {"gpu": machine()}
    for vocab in VOCABULARIES:
        for name, settings in SETTINGS.items():
            for rows in ROWS:
                key = f"{name}, {rows} rows of {vocab}"
                results[key] = measure(vocab, rows, SamplingParams(seed=SEED, **settings))
                print(key, results[key], flush=True)
    common.write("h200_sampling", {"seed": SEED}, results)


if __name__ == "__main__":
    main()
