"""Matrix products of the rig's shapes on a GPU: what tiles, splits and loads under way cost for few and for many rows.

    python benchmarks/h200_products.py [--only 7b]

`linear_plan` and `_stages` of `torch_kernels` are rules read off this table. Times are of products alone, weights out of any
cache. Every variant's first row is compared with the same row alone, bit for bit, where both split the sum alike.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
import common
import rig
from h200_verify import DEVICE, gpu_ms, machine

from duodecoding.backends import torch_kernels

ROWS = ((1, 16), (16, 16), (32, 16), (32, 64), (48, 64), (64, 64))  # rows, rows of a program
TILES = ((64, 128), (128, 64), (128, 128), (256, 64))  # columns, inner steps
STAGES = (3, 4, 5, 6)
ROOM = 227_000  # bytes of shared memory
VOCABULARY = 49_152
COMPILERS = 14  # processes
COLD = 400_000_000  # bytes of weights, more than a cache holds

Plan = tuple[int, int, int, int]  # columns, inner steps, splits, stages


def matrices(only: str) -> dict[str, tuple[int, int]]:
    found = {}
    for name, shape in rig.SHAPES.items():
        if only not in ("", name):
            continue
        found |= {
            f"{name} q, k, v": ((shape.heads + 2 * shape.kv_heads) * shape.head_dim, shape.hidden),
            f"{name} o": (shape.hidden, shape.heads * shape.head_dim),
            f"{name} gate, up": (2 * shape.mlp, shape.hidden),
            f"{name} down": (shape.hidden, shape.mlp),
            f"{name} head": (VOCABULARY, shape.hidden),
        }
    return found


def plans(n: int, k: int) -> list[Plan]:
    """Tiles with enough splits for every multiprocessor, and with enough for two programs each."""
    found = []
    for (columns, inner), stages, programs in itertools.product(TILES, STAGES, (120, 240)):
        plan = (columns, inner, torch_kernels._splits(n, k, columns, programs, least=1024), stages)
        if stages * 2 * (64 + columns) * inner <= ROOM and plan not in found:
            found.append(plan)
    return found


def split_at(k: int, plan: Plan) -> int:
    """Numbers of the sum in one split."""
    _, inner, splits, _ = plan
    return -(-k // (splits * inner)) * inner


def product(x: torch.Tensor, weight: torch.Tensor, plan: Plan, tile: int) -> torch.Tensor:
    columns, inner, splits, stages = plan
    (rows, k), n = x.shape, weight.shape[0]
    per_split = split_at(k, plan)
    out = torch.empty((splits, rows, n), dtype=torch.float32 if splits > 1 else x.dtype, device=DEVICE)
    even = n % columns == 0 and per_split * splits == k
    grid = (-(-rows // tile), -(-n // columns), splits)
    sizes: dict[str, Any] = {"M": tile, "N": columns, "K": inner, "EVEN": even, "num_warps": 4, "num_stages": stages}
    sizes |= {"EARLY": False, "FETCHED": 0, "GATED": False}
    torch_kernels._linear[grid](x, weight, out, rows, n, k, per_split, **sizes)
    return out


def variants(only: str) -> Iterator[tuple[str, int, int, Plan]]:
    return ((name, n, k, plan) for name, (n, k) in matrices(only).items() for plan in plans(n, k))


def compile_some(only: str, part: int) -> None:
    """Triton keeps what it compiled on disk, so many processes can do it for one."""
    for _, n, k, plan in itertools.islice(variants(only), part, None, COMPILERS):
        weight = torch.zeros(n, k, device=DEVICE, dtype=torch.bfloat16)
        for rows, tile in ROWS:
            product(torch.zeros(rows, k, device=DEVICE, dtype=torch.bfloat16), weight, plan, tile)


def graph_us(work: Callable[[torch.Tensor], object], weights: list[torch.Tensor]) -> float:
    for weight in weights:
        work(weight)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for weight in weights:
            work(weight)
    return round(1e3 * gpu_ms(graph.replay, 10) / len(weights), 1)


def measure(n: int, k: int) -> dict[str, Any]:
    weights = [torch.randn(n, k, device=DEVICE, dtype=torch.bfloat16) for _ in range(max(2, COLD // (2 * n * k)))]
    x = torch.randn(64, k, device=DEVICE, dtype=torch.bfloat16)
    alone: dict[int, torch.Tensor] = {}
    times, unlike = {}, 0
    for plan in plans(n, k):
        first = product(x[:1], weights[0], plan, 16)
        unlike += not torch.equal(first, alone.setdefault(split_at(k, plan), first))
        unlike += sum(not torch.equal(first[:, 0], product(x[:rows], weights[0], plan, tile)[:, 0]) for rows, tile in ROWS)
        times[str(plan)] = [graph_us(lambda w, p=plan, r=rows, t=tile: product(x[:r], w, p, t), weights) for rows, tile in ROWS]
    own = [graph_us(lambda w, r=rows: torch_kernels.linear(x[:r], w, n < 8192), weights) for rows in (1, 16, 32, 64)]
    library = [graph_us(lambda w, r=rows: torch.nn.functional.linear(x[:r], w), weights) for rows in (1, 16, 32, 64)]
    return {"times_us": times, "own_us": own, "library_us": library, "unlike": unlike}


def main() -> None:
    parser = common.arguments(__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", choices=("", *rig.SHAPES), help="the matrices of one shape")
    parser.add_argument("--part", type=int, help="only compile the variants of this part")
    options = parser.parse_args()
    if options.part is not None:
        compile_some(options.only, options.part)
        return
    running = [
        subprocess.Popen([sys.executable, __file__, f"--part={part}", f"--only={options.only}"]) for part in range(COMPILERS)
    ]
    for process in running:
        process.wait()
    results: dict[str, Any] = {"gpu": machine(), "rows_and_tile": ROWS, "matrices": {}}
    for name, (n, k) in matrices(options.only).items():
        results["matrices"][name] = found = {"n": n, "k": k, "plan": torch_kernels.linear_plan(n, k)} | measure(n, k)
        print(name, json.dumps({key: value for key, value in found.items() if key != "times_us"}), flush=True)
    settings = {"rows": "of a pass and of a program", "plan": "columns, inner steps, splits, stages", "times": "us"}
    print(common.write("_".join(filter(None, ("h200_products", options.only))), settings, results))


if __name__ == "__main__":
    main()
