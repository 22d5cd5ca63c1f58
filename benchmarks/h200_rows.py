"""Where does a row's result depend on the rows beside it? Part by part on a GPU, bit by bit.

    python benchmarks/h200_rows.py --shape 7b --source SmolLM2-135M-Instruct.Q4_1.gguf

Each part of a pass is computed for one row and again among 8 to 64; counted are results of the first row that are not the same.
Layers run in order on real text, eagerly and compiled; the first layer that differs is taken apart.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
import common
import rig
from h200_verify import DEVICE, Numbers, machine

from duodecoding.backends import torch_attention, torch_kernels
from duodecoding.backends.torch import TorchTarget
from duodecoding.backends.torch_fast import RowLinear
from duodecoding.backends.torch_inputs import Inputs, Rows
from duodecoding.backends.torch_slots import ATTENTION, attention
from duodecoding.types import SamplingParams

COUNTS = (8, 16, 32, 64)
CONTEXTS = (33, 70, 100, 255, 300, 500, 700, 1500)


def matrices(model: Any) -> dict[str, dict[int, int]]:
    found: dict[str, dict[int, int]] = {}
    for module in model.modules():
        if isinstance(module, RowLinear) and str(tuple(module.weight.shape)) not in found:
            x = torch.randn(64, module.weight.shape[1], device=DEVICE, dtype=torch.bfloat16)
            alone = torch_kernels.linear(x[:1], module.weight)
            found[str(tuple(module.weight.shape))] = {
                n: int((torch_kernels.linear(x[:n], module.weight)[:, :1] != alone).sum()) for n in COUNTS
            }
    return found


def attentions(heads: int, kv_heads: int, size: int) -> dict[int, dict[int, int]]:
    found = {}
    for first in CONTEXTS:
        length = next(n for n in (512, 1024, 2048) if n >= first + 64)
        keys, values = torch.randn(2, kv_heads, length, size, device=DEVICE, dtype=torch.bfloat16)
        q = torch.randn(heads, 64, size, device=DEVICE, dtype=torch.bfloat16)
        results = {}
        for n in (1, *COUNTS):
            inputs = Inputs(n, DEVICE, torch_attention.members(n, heads // kv_heads))
            inputs.fill(Rows(first, [0] * n, [-1] + [0] * (n - 1)))
            inputs.send()
            shorter = 512 if first + n <= 512 else length
            results[n] = torch_attention.tree_attention(
                q[:, :n], keys[:, :shorter], values[:, :shorter], inputs.table, size**-0.5, shorter
            )[0]
        found[first] = {n: int((results[n] != results[1]).sum()) for n in COUNTS}
    return found


def rotary(model: Any) -> dict[int, int]:
    x = torch.zeros(1, 1, 8, device=DEVICE, dtype=torch.bfloat16)
    alone = model.model.rotary_emb(x, torch.tensor([[123]], device=DEVICE, dtype=torch.int32))
    found = {}
    for n in COUNTS:
        many = model.model.rotary_emb(x, 123 + torch.arange(n, device=DEVICE, dtype=torch.int32)[None])
        found[n] = sum(int((a[:, :1] != b).sum()) for a, b in zip(many, alone, strict=True))
    return found


def states(runner: Any, rows: Rows, length: int) -> list[torch.Tensor]:
    """The first row after the embedding and after every layer, then its logits."""
    model, inputs = runner.model, Inputs(len(rows.tokens), DEVICE, runner._members(len(rows.tokens)))
    inputs.fill(rows)
    inputs.send()
    runner.slots.slots = rows.first + torch.arange(inputs.rows, device=DEVICE)
    runner.slots.length = length
    hidden = model.model.embed_tokens(inputs.tokens[None])
    embeddings = model.model.rotary_emb(hidden, inputs.positions[None])
    found = [hidden[0, 0].clone()]
    for layer in model.model.layers:
        hidden = layer(
            hidden,
            attention_mask=inputs.table[None, None],
            position_ids=inputs.positions[None],
            past_key_values=runner.slots,
            use_cache=True,
            position_embeddings=embeddings,
        )
        found.append(hidden[0, 0].clone())
    found.append(model.lm_head(model.model.norm(hidden))[0, 0].clone())
    return found


def first_difference(runner: Any, first: int, tokens: list[int]) -> dict[int, Any]:
    length = next(n for n in (512, 1024, 2048) if n >= first + 64)
    alone = states(runner, Rows(first, tokens[:1], [-1]), length)
    found: dict[int, Any] = {}
    for n in COUNTS:
        among = states(runner, Rows(first, tokens[:n], [-1] + [0] * (n - 1)), length)
        unequal = [int((a != b).sum()) for a, b in zip(alone, among, strict=True)]
        at = next((i for i, count in enumerate(unequal) if count), None)
        found[n] = "equal" if at is None else {"layer": at, "entries": unequal[at], "logits": unequal[-1]}
    return found


def parts(runner: Any, first: int, tokens: list[int]) -> dict[str, int]:
    """The first layer, step by step, one row against 64."""
    layer = runner.model.model.layers[0]
    hooks, seen = [], {}
    for name, module in layer.named_modules():
        hooks.append(module.register_forward_hook(lambda m, a, out, name=name: seen.setdefault(name, []).append(out)))
    for n in (1, 64):
        inputs = Inputs(n, DEVICE, runner._members(n))
        inputs.fill(Rows(first, tokens[:n], [-1] + [0] * (n - 1)))
        inputs.send()
        runner.slots.slots, runner.slots.length = first + torch.arange(n, device=DEVICE), 512
        hidden = runner.model.model.embed_tokens(inputs.tokens[None])
        layer(
            hidden,
            attention_mask=inputs.table[None, None],
            position_ids=inputs.positions[None],
            past_key_values=runner.slots,
            use_cache=True,
            position_embeddings=runner.model.model.rotary_emb(hidden, inputs.positions[None]),
        )
    for hook in hooks:
        hook.remove()
    found = {}
    for name, outs in seen.items():
        a, b = (x[0] if isinstance(x, tuple) else x for x in outs)
        found[name or "layer"] = int((a[0, 0] != b[0, 0]).sum())
    return found


def prompt_twice(target: TorchTarget, prompts: list[list[int]]) -> list[int]:
    """The same prompt read twice: entries of the KV cache that are not the same."""
    runner, found = target._runner, []
    for prompt in prompts:
        kept = []
        for _ in range(2):
            target.open([1], SamplingParams())
            target.verify([(target.open(prompt, SamplingParams()), [])])[0](-1)
            kept.append(torch.stack([runner.slots._keys, runner.slots._values])[..., : len(prompt), :].clone())
        found.append(int((kept[0] != kept[1]).sum()))
    return found


def trees(n: int) -> dict[str, list[int]]:
    """Parents of n rows: a chain, two chains, a bush whose rows have any earlier row as their parent."""
    chance = random.Random(n)
    return {
        "chain": list(range(-1, n - 1)),
        "two chains": [-1, -1, *range(n - 2)],
        "bush": [-1, *(chance.randrange(max(0, i - 6), i) for i in range(1, n))],
    }


def cells(runner: Any, start: int, end: int) -> torch.Tensor:
    return torch.stack([t[..., start:end, :] for t in (runner.slots._keys, runner.slots._values)])


def paths(runner: Any, first: int, tokens: list[int], parents: list[int]) -> str:
    """A tree in one pass against the tokens of some paths one by one: logits, and what lies in the slots."""
    n = len(parents)
    rows = Rows(first, tokens[:n], parents)
    together = runner.decode(rows)[:n].clone()
    slots = cells(runner, first, first + n)
    bad = []
    for depth, at in ((depth, at) for row in (n - 1, n // 2, n // 3) for depth, at in enumerate(rows.path(row))):
        one = runner.decode(Rows(first + depth, [tokens[at]], [-1]))[0]
        mine = cells(runner, first + depth, first + depth + 1)[..., 0, :]
        layers = [i for i in range(mine.shape[1]) if not torch.equal(mine[:, i], slots[:, i, ..., at, :])]
        if layers or not torch.equal(one, together[at]):
            bad.append(f"row {at}, depth {depth}, layers {layers[:2]}, logits {int((one != together[at]).sum())}")
    return f"{len(bad)} bad: {bad[:3]}" if bad else "equal"


@torch.no_grad()
def main() -> None:
    parser = common.arguments(__doc__.partition("\n")[0])
    parser.add_argument("--shape", choices=list(rig.SHAPES), default="7b")
    parser.add_argument("--source", type=Path, required=True, help="the GGUF whose function the rig computes")
    parser.add_argument("--parts", action="store_true", help="every kernel and layer by itself, too")
    options = parser.parse_args()
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, attention)
    source = rig.read_gguf(options.source)
    model = rig.build(rig.SHAPES[options.shape], DEVICE, torch.bfloat16, source, ATTENTION)
    config = model.config
    target = TorchTarget(model, Numbers(source.vocab), context=2048, rows=64, compile=True, kernels=True)
    runner = target._runner
    torch.manual_seed(0)
    tokens = torch.randint(100, 40000, (400,)).tolist()
    results: dict[str, Any] = {"gpu": machine()}
    results["prompt read twice"] = prompt_twice(target, [tokens[:100], tokens[:37], tokens])
    print(results["prompt read twice"], flush=True)
    conversation = target.open(tokens[:100], SamplingParams())
    target.verify([(conversation, [])])[0](-1)
    for n in (3, 8, 16, 21, 32, 64):
        results[f"paths of {n} rows"] = {name: paths(runner, 100, tokens[100:], tree) for name, tree in trees(n).items()}
        print(n, results[f"paths of {n} rows"], flush=True)
    logits = {n: runner.decode(Rows(100, tokens[100 : 100 + n], [-1] + [0] * (n - 1)))[0].clone() for n in (1, *COUNTS)}
    results["first row"] = {n: int((logits[n] != logits[1]).sum()) for n in COUNTS}
    if options.parts:
        results |= {"linear": matrices(model), "rotary": rotary(model)}
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        results["attention"] = attentions(heads, kv_heads, config.hidden_size // heads)
        results["eager layers"] = first_difference(runner, 100, tokens[100:])
        results["parts of layer 0"] = parts(runner, 100, tokens[100:])
        with runner._fast.compiled():
            results["compiled layers"] = first_difference(runner, 100, tokens[100:])
    common.write(f"h200_rows_{options.shape}", {"shape": options.shape}, results)
    target.close()


if __name__ == "__main__":
    main()
