"""What a pass costs on a GPU: `verify(n)` over rows and context, beside eager transformers and the memory's floor.

    python benchmarks/h200_verify.py --shape 7b --source SmolLM2-135M-Instruct.Q4_1.gguf

Times are medians of CUDA events around a graph's replay. A round is the wall time from one verdict to the next, its host time what
it takes beyond its own graphs (a GPU that works harder is slower, so no other round's will do). The floor is the weights' bytes
over the bandwidth of a copy on the same device.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
import common
import rig

from duodecoding.backends import torch_attention, torch_kernels
from duodecoding.backends.torch import TorchTarget
from duodecoding.backends.torch_graphs import peak
from duodecoding.backends.torch_inputs import Inputs, Rows
from duodecoding.backends.torch_slots import ATTENTION, attention
from duodecoding.core import places, walk
from duodecoding.tree import PassNode
from duodecoding.types import SamplingParams

SIZES = (1, 8, 16, 32, 64, 128)
CONTEXTS = (512, 1024, 2048, 4096)
REPEATS = 30
PROMPT = 4096  # tokens, for the time to the first one
DEVICE = torch.device("cuda", 0)


class Numbers:
    """A vocabulary of numbers only."""

    end_tokens = frozenset[int]()
    chat_template = None
    bos_text = eos_text = ""

    def __init__(self, size: int) -> None:
        self.size = size

    def tokenize(self, text: str, *, special: bool, bos: bool) -> list[int]:  # noqa: ARG002 - a Vocabulary has them
        return [int(word) % self.size for word in text.split()]

    def piece(self, token: int) -> bytes:
        return f"{token} ".encode()

    def texts(self) -> list[str]:
        return [str(token) for token in range(self.size)]


def gpu_ms(work: Callable[[], object], repeats: int = REPEATS) -> float:
    """Median time on the device."""
    for _ in range(3):
        work()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for start, end in events:
        start.record()
        work()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in events)


def bandwidth() -> float:
    """Bytes a second that a large copy reads and writes."""
    a = torch.randint(0, 100, (4 * 2**30,), dtype=torch.uint8, device=DEVICE)
    b = torch.empty_like(a)
    return 2 * a.numel() / (gpu_ms(lambda: b.copy_(a), 10) / 1e3)


def eager(model: Any, context: int, tokens: int = 20) -> float:
    """Milliseconds a token of transformers as it comes, with its own growing cache."""
    from transformers import DynamicCache

    ids = torch.randint(0, 40000, (1, context), device=DEVICE)
    with torch.no_grad():
        cache = DynamicCache(config=model.config)
        model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        times = []
        for _ in range(tokens):
            torch.cuda.synchronize()
            start = time.perf_counter()
            model(ids[:, :1], past_key_values=cache, use_cache=True).logits.argmax(-1).item()
            times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times)


def forward_ms(model: Any, tokens: int) -> float:
    """transformers' own reading of a prompt, to its first token."""
    ids = torch.randint(0, 40000, (1, tokens), device=DEVICE)
    times = []
    with torch.no_grad():
        for _ in range(5):
            torch.cuda.synchronize()
            start = time.perf_counter()
            model(ids, use_cache=True, logits_to_keep=1).logits.argmax(-1).item()
            times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times[1:])


def first_token_ms(target: TorchTarget, tokens: int) -> float:
    times = []
    for _ in range(5):
        prompt = torch.randint(0, 40000, (tokens,)).tolist()
        torch.cuda.synchronize()
        start = time.perf_counter()
        conversation = target.open(prompt, SamplingParams())
        target.verify([(conversation, [])])[0](-1)
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times[1:])


def chain(n: int) -> list[PassNode]:
    return [PassNode(i - 1, 1000 + i) for i in range(n - 1)]


def bush(n: int) -> list[PassNode]:
    """A likeliest path of a dozen guesses with the others beside it, as trees are in answers."""
    return [PassNode(i - 1 if i < 12 else (5 * i) % 12 - 1, 1000 + i) for i in range(n - 1)]


class Timed:
    """A graph that notes how long the device is at it."""

    def __init__(self, graph: Any) -> None:
        self._graph, self._events = graph, list[tuple[Any, Any]]()

    def replay(self) -> None:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        self._graph.replay()
        end.record()
        self._events.append((start, end))

    def times(self) -> list[float]:
        torch.cuda.synchronize()
        return [start.elapsed_time(end) for start, end in self._events]


def rounds(target: TorchTarget, guesses: list[PassNode], context: int, count: int = REPEATS) -> dict[str, float]:
    """Whole rounds over n rows: wall time, and how much of it is not the graphs', of the pass and of sampling."""
    n = len(guesses) + 1
    prompt = torch.randint(0, 40000, (context - n - count - 12,)).tolist()
    conversation = target.open(prompt, SamplingParams())
    target.verify([(conversation, [])])
    conversation.commit([5])
    captured, sampling = target._runner._captured, target._chooser._graphs

    def one() -> float:
        start = time.perf_counter()
        choose = target.verify([(conversation, guesses)])[0]
        verdict = walk(guesses, choose, places(guesses))  # looked for while the device works, as in an answer
        conversation.commit([verdict.choices[0].token])
        return time.perf_counter() - start

    for _ in range(3):
        one()
    key = min(key for key in captured if key[0] >= n and key[1] >= context)
    sampled = [kind for kind in sampling if kind[1] == key[0]][-1]
    graph, logits = captured[key]
    chooser = sampling[sampled]
    captured[key], sampling[sampled] = (passes := Timed(graph), logits), (choices := Timed(chooser))
    walls = [1e3 * one() for _ in range(count)]
    captured[key], sampling[sampled] = (graph, logits), chooser
    host = [wall - a - b for wall, a, b in zip(walls, passes.times(), choices.times(), strict=True)]
    numbers = {"ms": gpu_ms(graph.replay), "sampling_ms": gpu_ms(chooser.replay), "round_ms": statistics.median(walls)}
    numbers |= {"in_round_ms": statistics.median(passes.times()), "host_ms": statistics.median(host), "host_most_ms": max(host)}
    return {name: round(value, 3) for name, value in numbers.items()}


def profile(target: TorchTarget, n: int, context: int) -> dict[str, list[float]]:
    """Where the time of a pass goes: calls and microseconds a pass, by kernel."""
    captured = target._runner._captured
    target._runner.decode(Rows(context - n, [0] * n, range(-1, n - 1)))  # a graph reads what the last pass was about
    graph = captured[min(key for key in captured if key[0] >= n and key[1] >= context)][0]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as record:
        for _ in range(3):
            graph.replay()
        torch.cuda.synchronize()
    events = sorted(record.key_averages(), key=lambda event: -event.self_device_time_total)[:16]
    return {event.key[:60]: [event.count / 3, round(event.self_device_time_total / 3, 1)] for event in events}


def check_attention(heads: int = 32, size: int = 128) -> dict[str, bool]:
    """The same of `tree_attention`: chains of rows, each beside the pass in which it is alone."""
    q = torch.randn(heads, 128, size, device=DEVICE, dtype=torch.bfloat16)
    keys, values = torch.randn(2, heads, 4608, size, device=DEVICE, dtype=torch.bfloat16)
    found = {}
    for first, length in ((0, 512), (333, 512), (333, 2048), (1700, 2048), (2000, 4608), (2500, 4608)):
        equal = []
        for n in SIZES:
            every = torch_attention.tree_attention(q[:, :n], keys, values, _chain_table(first, n), 0.1, length)
            for i in (0, n // 2, n - 1):
                alone = torch_attention.tree_attention(q[:, i : i + 1], keys, values, _chain_table(first + i, 1), 0.1, length)
                equal.append(torch.equal(alone[0], every[i]))
        found[f"attention_{first}_{length}"] = all(equal)
    return found


def _chain_table(first: int, rows: int) -> torch.Tensor:
    inputs = Inputs(rows, DEVICE, torch_attention.members(rows, 1))
    inputs.fill(Rows(first, [0] * rows, range(-1, rows - 1)))
    inputs.send()
    return inputs.table


def check_rows() -> dict[str, bool]:
    """Is a row's result the same among 1, 8, 16, 32, 64 and 128 rows, bit for bit? For both kinds of tile."""
    x = torch.randn(128, 4096, device=DEVICE, dtype=torch.bfloat16)
    found = {}
    for n in (4096, 12288):
        w = torch.randn(n, 4096, device=DEVICE, dtype=torch.bfloat16) / 64
        every = torch_kernels.linear(x, w).sum(0)
        found[f"linear_{n}_right"] = (every - x.float() @ w.float().T).abs().max().item() < 0.01
        found[f"linear_{n}"] = all(torch.equal(torch_kernels.linear(x[:rows], w).sum(0), every[:rows]) for rows in SIZES)
    norm = torch_kernels.rms_norm(x, w[0], 1e-5)
    found["rms_norm"] = all(torch.equal(torch_kernels.rms_norm(x[:rows], w[0], 1e-5), norm[:rows]) for rows in SIZES)
    w = torch.randn(22016, 4096, device=DEVICE, dtype=torch.bfloat16) / 64
    gate, up = torch_kernels.linear(x, w, False)[0].chunk(2, -1)
    every = torch_kernels.gated(x, w)
    found["gated_right"] = (every.float() - (torch.nn.functional.silu(gate) * up).float()).abs().max().item() < 0.05
    found["gated"] = all(torch.equal(torch_kernels.gated(x[:rows], w), every[:rows]) for rows in SIZES)
    return found


def measure(target: TorchTarget, contexts: tuple[int, ...], sizes: tuple[int, ...]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for context in contexts:
        for n in sizes:
            start = time.perf_counter()
            found[f"{n}@{context}"] = rounds(target, chain(n), context)
            if n == 64:
                found[f"{n} bush@{context}"] = rounds(target, bush(n), context)
            print(f"verify({n}) at {context}:", found[f"{n}@{context}"], f"{time.perf_counter() - start:.1f} s", flush=True)
    return found


def earlier(file: Path, now: dict[str, Any]) -> dict[str, Any]:
    """Cells that the last run of this shape measured and this one did not, with where they come from."""
    if not file.exists():
        return {}
    record = json.loads(file.read_text())
    cells = record["results"].get("earlier", {}).get("verify", {}) | record["results"]["verify"]
    return {
        "when": record["when"],
        "commit": record["commit"],
        "verify": {name: cell for name, cell in cells.items() if name not in now},
    }


def machine() -> dict[str, Any]:
    total = torch.cuda.mem_get_info()[1]
    driver = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], capture_output=True, text=True, check=False
    )
    return {
        "gpu": torch.cuda.get_device_name(DEVICE),
        "memory_gb": round(total / 1e9, 1),
        "driver": driver.stdout.strip(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }


def arguments() -> Any:
    parser = common.arguments(__doc__.partition("\n")[0])
    parser.add_argument("--shape", choices=list(rig.SHAPES), default="7b")
    parser.add_argument("--source", type=Path, required=True, help="the GGUF whose function the rig computes")
    parser.add_argument("--contexts", type=int, nargs="+", default=list(CONTEXTS))
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES))
    parser.add_argument("--kernels", choices=("own", "library"), default="own")
    parser.add_argument("--profile", action="store_true", help="also the time of each kernel")
    parser.add_argument("--no-eager", action="store_true", help="skip eager transformers")
    parser.add_argument("--out", default="", help="name of the result file")
    return parser


def main() -> None:
    options = arguments().parse_args()
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, attention)
    results: dict[str, Any] = {"gpu": machine(), "rows_independent": check_rows() | check_attention()}
    print(results, flush=True)
    shape, source = rig.SHAPES[options.shape], rig.read_gguf(options.source)
    rate = bandwidth()
    torch.cuda.empty_cache()
    model = rig.build(shape, DEVICE, torch.bfloat16, source)
    weights = sum(p.numel() * p.element_size() for name, p in model.named_parameters() if "embed_tokens" not in name)
    results |= {
        "copy_tb_s": round(rate / 1e12, 3),
        "weights_gb": round(weights / 1e9, 3),
        "floor_ms": round(weights / rate * 1e3, 3),
    }
    if not options.no_eager:
        results["eager_ms"] = {str(c): round(eager(model, c), 3) for c in (512, 4096)}
        results["forward_4096_ms"] = round(forward_ms(model, PROMPT), 2)
    print(results, flush=True)
    model.set_attn_implementation(ATTENTION)
    start = time.perf_counter()
    target = TorchTarget(
        model, Numbers(source.vocab), context=max(options.contexts) + 256, compile=True, kernels=options.kernels == "own"
    )
    results["verify"] = measure(target, tuple(options.contexts), tuple(options.sizes))
    results["prepared_s"] = round(time.perf_counter() - start, 1)
    if max(options.contexts) >= PROMPT:
        results["first_token_4096_ms"] = round(first_token_ms(target, PROMPT), 2)
    results["memory_gb"] = round(peak() / 1e9, 2)
    if options.profile:
        results["kernels_us"] = {f"{n}@{c}": profile(target, n, c) for c in options.contexts for n in (1, 64)}
    target.close()
    settings = {key: value.name if isinstance(value, Path) else value for key, value in vars(options).items()}
    name = options.out or f"h200_verify_{options.shape}_{options.kernels}"
    results["earlier"] = earlier(common.RESULTS / f"{name}.json", results["verify"])
    common.write(name, settings, results)


if __name__ == "__main__":
    main()
