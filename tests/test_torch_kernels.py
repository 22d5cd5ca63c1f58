"""The GPU kernels, run by Triton's interpreter: what they compute. That rows do not know of each other, bit for bit, is for a GPU
to show (`benchmarks/h200_rows.py`)."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import textwrap
from importlib.metadata import version

import pytest

NUMPY = tuple(int(part) for part in version("numpy").split(".")[:2])
pytestmark = [
    pytest.mark.skipif(
        not all(map(importlib.util.find_spec, ("torch", "triton"))), reason="needs torch and triton, which come with a GPU"
    ),
    pytest.mark.skipif(NUMPY >= (2, 4), reason="Triton's interpreter takes arrays of one number for numbers"),
]

ATTENTION = """
    import random
    import torch
    from duodecoding.backends import torch_attention
    from duodecoding.backends.torch_inputs import Inputs, Rows

    CPU = torch.device("cpu")
    torch.manual_seed(0)
    chance = random.Random(0)
    torch_attention.SPLITS = 1  # splits of 256 positions up to 1024, of 512 up to 4096

    def check(heads, kv_heads, size, rows, first, length):
        groups = heads // kv_heads
        q = torch.randn(heads, rows, size).to(torch.float16)
        keys, values = torch.randn(2, kv_heads, length, size).to(torch.float16)
        parents = [-1, *(chance.randrange(max(-1, i - 6), i) for i in range(1, rows))]
        tree = Rows(first, [0] * rows, parents)
        inputs = Inputs(rows, CPU, torch_attention.members(rows, groups))
        inputs.fill(tree)
        found = torch_attention.tree_attention(q, keys, values, inputs.table, size**-0.5, length).float()
        for row in range(rows):
            slots = [*range(first), *(first + above for above in tree.path(row))]
            k, v = (x[:, slots].float().repeat_interleave(groups, 0) for x in (keys, values))
            weights = torch.softmax((q[:, row, None].float() @ k.transpose(1, 2)) * size**-0.5, -1)
            expected = (weights @ v)[:, 0]
            assert torch.allclose(found[row], expected, atol=0.005), (rows, first, row, (found[row] - expected).abs().max())

    for case in CASES:
        check(*case)
"""


def interpret(script: str) -> None:
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-2000:]


@pytest.mark.parametrize(
    "case",
    [
        (2, 2, 32, 1, 0, 64),  # a single row: parts of blocks
        (2, 2, 32, 1, 77, 128),
        (4, 2, 32, 1, 300, 512),
        (2, 2, 64, 24, 5, 64),  # a tree: parts of splits
        (5, 1, 32, 24, 250, 512),  # its paths cross the end of a split
        (2, 2, 32, 40, 600, 768),
        (1, 1, 16, 40, 1020, 1536),  # and where splits become longer
        (1, 1, 16, 40, 1500, 2048),
        (1, 1, 16, 1, 1537, 2048),
        (2, 2, 16, 3, 5118, 6144),
    ],
)
def test_attention_over_a_tree_is_attention_over_each_path(case: tuple[int, ...]) -> None:
    interpret(ATTENTION.replace("CASES", repr([case])))


PRODUCTS = """
    import torch
    from duodecoding.backends import torch_kernels

    torch.manual_seed(0)
    for rows, n, k in ((1, 96, 200), (17, 64, 128), (40, 200, 4096), (70, 64, 256)):
        x, weight = torch.randn(rows, k).to(torch.float16), (torch.randn(n, k) / k**0.5).to(torch.float16)
        found = torch_kernels.linear(x, weight).sum(0)
        assert torch.allclose(found, x.float() @ weight.float().T, atol=0.01), (rows, n, k)
    x, weight = torch.randn(5, 100).to(torch.float16), torch.rand(100).to(torch.float16)
    expected = x.float() * torch.rsqrt((x.float() ** 2).mean(-1, keepdim=True) + 1e-5) * weight.float()
    assert torch.allclose(torch_kernels.rms_norm(x, weight, 1e-5).float(), expected, atol=0.01)
    for splits in (1, 3):
        parts = torch.randn(splits, 5, 100)
        both, found = torch_kernels.add_norm(parts, x, weight, 1e-5)
        assert torch.equal(both, x + parts.sum(0).to(x.dtype)) and torch.equal(found, torch_kernels.rms_norm(both, weight, 1e-5))
    for rows, n, k in ((1, 96, 200), (17, 64, 128), (70, 256, 256)):
        x, weight = torch.randn(rows, k).to(torch.float16), (torch.randn(n, k) / k**0.5).to(torch.float16)
        gate, up = torch_kernels.linear(x, weight, False)[0].chunk(2, -1)
        assert torch.allclose(torch_kernels.gated(x, weight), torch.nn.functional.silu(gate) * up, atol=0.002), (rows, n, k)
"""


def test_products_and_norms() -> None:
    interpret(PRODUCTS)


FUSED = """
    from contextlib import nullcontext
    import torch
    from torch import nn
    from torch.nn import functional
    import transformers
    from transformers import AttentionInterface
    from duodecoding.backends import torch_fast, torch_kernels
    from duodecoding.backends.torch_fuse import fuse
    from duodecoding.backends.torch_inputs import Rows
    from duodecoding.backends.torch_runner import Runner
    from duodecoding.backends.torch_slots import ATTENTION, attention

    torch.manual_seed(0)

    # A pass over a tree, with a cache: through the layers as they are and through the joined ones, compiled once for all layers.
    AttentionInterface.register(ATTENTION, attention)
    graphs = []

    def no_compiler(graph, inputs, options):
        graphs.append(graph.code)
        return graph.forward

    torch._inductor.compile = no_compiler
    sizes = dict(hidden_size=64, intermediate_size=128, num_attention_heads=2, num_key_value_heads=1, num_hidden_layers=3)
    sizes |= dict(vocab_size=64, head_dim=32, pad_token_id=0)
    torch_kernels.PLANS[64, 128] = 64, 64, 2  # columns, inner steps, splits
    joined = {"Llama": 2, "Qwen3": 2, "Phi3": 2, "Olmo2": 1, "Gemma": 0}  # other norms, other activations
    for splits, (name, count) in [*((1, item) for item in joined.items()), (2, ("Llama", 2))]:
        torch_kernels.PLANS[64, 64] = 64, 64 // splits, splits
        torch._dynamo.reset()
        graphs.clear()
        config = getattr(transformers, name + "Config")(**sizes)
        model = getattr(transformers, name + "ForCausalLM")(config).half().eval()
        model.set_attn_implementation(ATTENTION)
        runner = Runner(model, 60, 4)
        runner._fast = torch_fast.Fast(model, runner.slots, compile=True, kernels=True)
        runner._groups = runner._fast.groups
        runner.read(range(20), 0)
        start, results = runner.slots.save(64), []
        for way in (nullcontext, runner._fast.compiled):
            runner.slots.load(start)
            with way():
                logits = runner.decode(Rows(20, [5, 6, 7, 8], [-1, 0, 0, 1]))
            results.append((logits, runner.slots.save(64)))
        (plain, stored), (found, again) = results
        assert torch.allclose(plain, found, atol=0.01) and torch.allclose(stored, again, atol=0.01), name
        assert not torch.equal(stored, start) and len(graphs) == 1, name
        (code,) = graphs
        assert [word in code for word in ("ops.duodecoding.gated", "ops.duodecoding.add_norm")] == [count > 0, count > 1], name
        assert "silu" not in code and code.count("ops.duodecoding.linear") == 4 - (count > 0), name

    class Odd(nn.Module):
        def __init__(self, kind):
            super().__init__()
            self.gate_proj, self.up_proj = nn.Linear(64, 64, bias=kind == "bias"), nn.Linear(64, 64, bias=kind == "bias")
            self.kind = kind

        def forward(self, x):
            gate, up = self.gate_proj(x), self.up_proj(x)
            if self.kind == "bias":
                return functional.silu(gate) * up
            if self.kind == "twice":
                return functional.silu(gate) * up + gate
            return functional.silu(up) * gate if self.kind == "swapped" else functional.silu(gate) * up.flip(-1)

    for kind in ("bias", "twice", "swapped", "flipped"):
        odd = nn.Sequential(Odd(kind)).half().requires_grad_(False)
        torch_fast._join(odd, True)
        counts, x = [], torch.randn(1, 3, 64).half()
        expected = odd(x)
        odd.compile(backend=lambda graph, inputs: counts.append(fuse(graph)) or graph.forward, fullgraph=True, dynamic=False)
        assert torch.allclose(odd(x), expected) and counts == [0], kind
"""


def test_what_is_joined_computes_the_same_and_only_what_is_known_is_joined() -> None:
    interpret(FUSED)


MOVES = """
    import torch
    from duodecoding.backends import torch_kernels
    from duodecoding.backends.torch_slots import CacheShape, Slots

    torch.manual_seed(0)
    for moves in ([(9, 7), (7, 6), (20, 8)], [(12 + 3 * i, 10 + i) for i in range(20)]):  # from where another one goes, too
        found, expected = (Slots(CacheShape(3, 2, 16), 80, torch.device("cpu"), torch.float16) for _ in range(2))
        found.move_by(torch_kernels.move)
        for a, b in ((found._keys, expected._keys), (found._values, expected._values)):
            b.copy_(a.normal_())
        for slots in (found, expected):
            slots.plan(moves)
            slots.settle()
        assert torch.equal(found._keys, expected._keys) and torch.equal(found._values, expected._values)
"""


def test_moves_read_everything_before_they_write() -> None:
    interpret(MOVES)


CHOICES = """
    from dataclasses import replace
    import torch
    from duodecoding.backends import torch_sampling
    from duodecoding.sampling import Sampler
    from duodecoding.types import SamplingParams

    torch.manual_seed(0)

    def choose(on, logits, params, history=None, bias=None):
        torch_sampling._has_kernels = lambda device: on
        positions = torch.arange(len(logits)) + 11
        return torch_sampling.choose(logits, params, torch.tensor(params.seed), positions, history, bias)

    def check(vocab, rounded, **settings):
        params, logits = SamplingParams(seed=5, **settings), 4 * torch.randn(4, vocab)
        logits = logits.bfloat16().float() if rounded else logits  # many are equal then
        logits[0, : vocab // 3], logits[1, 7], logits[1, 9] = -torch.inf, -0.0, 0.0
        bias = torch.zeros(vocab).index_fill(0, torch.tensor([3]), 2.0)
        history = torch_sampling.History(torch.zeros(vocab), torch.zeros(vocab, dtype=torch.bool), torch.tensor([[1, 2]] * 4))
        cases = ((logits, params), (logits, params, None, bias), (logits, replace(params, presence_penalty=1.5), history))
        for case in cases:
            ours, theirs = choose(True, *case), choose(False, *case)
            assert torch.equal(ours[[0, 2]], theirs[[0, 2]]), (vocab, settings, ours, theirs)
            assert torch.allclose(ours[1], theirs[1], atol=1e-5)
        sampler = Sampler(params, [], vocab)
        ours = choose(True, logits, params)
        for i, row in enumerate(logits.numpy()):
            assert ours[2, i] or sampler.choose(row, 11 + i).token == ours[0, i]
        return int(ours[2].sum())

    kinds = ({}, {"temperature": 0.8}, {"temperature": 1e-9}, {"temperature": 0.8, "top_k": 40}, {"temperature": 0.9, "top_p": 0.9})
    for vocab in (20, 300, 4096, 9000):
        for rounded in (False, True):
            for kind in kinds:
                check(vocab, rounded, **kind)
    assert check(20_000, False, temperature=3.0)  # the tail wins, and is told so

    logits = torch.cat([torch.zeros(1, 5000), torch.full((1, 5000), -torch.inf)])  # all equal: by id
    torch_sampling._has_kernels = lambda device: True
    assert torch_sampling.largest(logits, 7).tolist() == [list(range(7))] * 2
"""


def test_choices_are_those_of_torch_and_numpy() -> None:
    interpret(CHOICES)
