"""Half precision on a GPU: is an answer with guesses the answer without, token for token?

    python benchmarks/h200_equality.py --shape 7b --source SmolLM2-135M-Instruct.Q4_1.gguf --prompts prompts.json

`prompts.json` is a list of {"task", "id", "tokens"}. Each prompt is answered greedily one token a pass, then again with trees that
hold the right continuation among wrong guesses, in random order and of random size, so that paths are accepted in part, in
whole and not at all, from all places of a pass. For every first difference the gap between the two best logits is recorded.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
import common
import rig
from h200_verify import DEVICE, Numbers, machine

from duodecoding.backends.torch import TorchTarget
from duodecoding.backends.torch_slots import ATTENTION, attention
from duodecoding.core import walk
from duodecoding.tree import ROOT, PassNode
from duodecoding.types import SamplingParams

END = {0, 2}
SIZES = (1, 3, 7, 15, 31, 63)  # guesses of a tree at most


def grown(answer: Sequence[int], at: int, chance: random.Random, vocab: int) -> list[PassNode]:
    """A tree below position `at` of a known answer: the right path to some depth, wrong guesses around it, shuffled."""
    size = chance.choice(SIZES)
    nodes: list[PassNode] = []
    right, below = ROOT, at
    while len(nodes) < size:
        if below < len(answer) and chance.random() < 0.4:
            nodes.append(PassNode(right, answer[below]))
            right, below = len(nodes) - 1, below + 1
        else:
            parent = chance.randrange(ROOT, len(nodes)) if nodes else ROOT
            token = chance.randrange(vocab)
            if (parent, token) not in {(node.parent, node.token) for node in nodes}:
                nodes.append(PassNode(parent, token))
    return nodes


class Watch:
    """Fingerprints of what lies in the KV cache for every committed token, layer by layer, and which pass put it there."""

    def __init__(self, target: TorchTarget) -> None:
        self._slots = target._runner.slots
        self.prints: list[torch.Tensor] = []  # (layers, 2) of each position
        self.made: list[str] = []

    def look(self, cached: int, how: str) -> None:
        for position in range(len(self.prints), cached):
            cells = [t[:, 0, :, position].contiguous().view(torch.int16).long() for t in (self._slots._keys, self._slots._values)]
            weights = torch.arange(1, cells[0].shape[-1] + 1, device=DEVICE)
            self.prints.append(torch.stack([(cell * weights).sum((1, 2)) for cell in cells], 1))
            self.made.append(how)

    def first_difference(self, other: Watch) -> dict[str, Any] | None:
        for position, (mine, theirs) in enumerate(zip(self.prints, other.prints, strict=False)):
            if not torch.equal(mine, theirs):
                layer, part = (mine != theirs).nonzero()[0].tolist()
                return {
                    "position": position,
                    "layer": layer,
                    "part": "kv"[part],
                    "made": [self.made[position], other.made[position]],
                }
        return None


def answer(
    target: TorchTarget,
    prompt: list[int],
    count: int,
    known: Sequence[int] | None,
    chance: random.Random,
    watch: Watch | None = None,
) -> list[int]:
    """`known`: an answer to make trees of; None: one token a pass."""
    target.open([1], SamplingParams())  # forget the last prompt: no answer may depend on what came before
    conversation = target.open(prompt, SamplingParams())
    tokens: list[int] = []
    while len(tokens) < count and not END & set(tokens[-1:]):
        nodes = [] if known is None else grown(known, len(tokens), chance, target.vocabulary.size)
        verdict = walk(nodes, target.verify([(conversation, nodes)])[0])
        gained = [choice.token for choice in verdict.choices][: count - len(tokens)]
        end = next((i for i, token in enumerate(gained) if token in END), len(gained) - 1)
        conversation.commit(gained[: end + 1])
        tokens += gained[: end + 1]
        if watch is not None:
            watch.look(conversation.cached, f"{1 + len(nodes)} rows, accepted {list(verdict.accepted)}")
    return tokens


def gap(target: TorchTarget, tokens: list[int]) -> float:
    """Between the two best logits after `tokens`."""
    target.open([1], SamplingParams())
    conversation = target.open(tokens, SamplingParams())
    target.verify([(conversation, [])])
    best = target._runner.read(tokens[-1:], len(tokens) - 1)[0].topk(2).values
    return float(best[0] - best[1])


def compare(
    target: TorchTarget, prompts: list[dict[str, Any]], count: int, seconds: float, *, watch: bool = False
) -> dict[str, Any]:
    chance, start = random.Random(0), time.perf_counter()
    equal: Counter[str] = Counter()
    asked: Counter[str] = Counter()
    differences = []
    length = 0
    for prompt in prompts:
        if time.perf_counter() - start > seconds:
            break
        first, second = (Watch(target), Watch(target)) if watch else (None, None)
        alone = answer(target, prompt["tokens"], count, None, chance, first)
        guessed = answer(target, prompt["tokens"], count, alone, chance, second)
        asked[prompt["task"]] += 1
        if first is not None and second is not None:
            third = Watch(target)
            again = answer(target, prompt["tokens"], count, None, chance, third)
            print(len(prompt["tokens"]), again == alone, first.first_difference(third), first.first_difference(second), flush=True)
        length += len(alone)
        if alone == guessed:
            equal[prompt["task"]] += 1
            continue
        at = next(i for i, (a, b) in enumerate(zip([*alone, -1], [*guessed, -1], strict=False)) if a != b)
        differences.append(
            {"task": prompt["task"], "id": prompt["id"], "at": at, "gap": gap(target, prompt["tokens"] + alone[:at])}
        )
        print(differences[-1], flush=True)
    return {
        "prompts": sum(asked.values()),
        "tokens": length,
        "equal": sum(equal.values()),
        "equal_by_task": {task: f"{equal[task]} of {asked[task]}" for task in asked},
        "differences": differences,
    }


def main() -> None:
    parser = common.arguments(__doc__.partition("\n")[0])
    parser.add_argument("--shape", choices=list(rig.SHAPES), default="7b")
    parser.add_argument("--source", type=Path, required=True, help="the GGUF whose function the rig computes")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--kernels", choices=("own", "library"), default="own")
    parser.add_argument("--seconds", type=float, default=1e9, help="stop after this long")
    parser.add_argument("--watch", action="store_true", help="compare the KV cache, too, and the plain answer with itself")
    options = parser.parse_args()
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, attention)
    source = rig.read_gguf(options.source)
    model = rig.build(rig.SHAPES[options.shape], DEVICE, torch.bfloat16, source, ATTENTION)
    target = TorchTarget(model, Numbers(source.vocab), context=4096, rows=64, compile=True, kernels=options.kernels == "own")
    prompts = json.loads(options.prompts.read_text())
    random.Random(1).shuffle(prompts)
    results = {"gpu": machine(), **compare(target, prompts, options.tokens, options.seconds, watch=options.watch)}
    target.close()
    settings = {key: value.name if isinstance(value, Path) else value for key, value in vars(options).items()}
    common.write(f"h200_equality_{options.shape}_{options.kernels}", settings, results)


if __name__ == "__main__":
    main()
