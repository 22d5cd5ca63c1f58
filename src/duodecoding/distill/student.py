"""The draft to be: which layers of the target it starts from, which tokens it knows, its weights and their running mean."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from duodecoding.backends.trim import Trim, vocabulary_hash
from duodecoding.distill.export import EMBEDDING, FINAL_NORM, HEAD, Shape, Weights
from duodecoding.distill.model import Llama
from duodecoding.distill.source import Source
from duodecoding.errors import UsageError

Plan = tuple[tuple[int, ...], ...]  # for each student layer the target's layers that it starts as


def parse_layers(text: str, available: int) -> Plan:
    """`4`: a default choice. `0,1,28,29`: these. `0+1,28+29`: a student layer does the work of two side by side."""
    try:
        numbers = tuple(tuple(int(n) for n in part.split("+")) for part in text.split(","))
    except ValueError:
        raise UsageError(f"layers is {text!r}", "it must be a number, or numbers such as 0,1,28,29 or 0+1,28+29") from None
    if len(numbers) == 1 and len(numbers[0]) == 1 and "," not in text:
        return _default(numbers[0][0], available)
    if any(not 0 <= n < available for part in numbers for n in part):
        raise UsageError(f"layers is {text!r}", f"the target's layers are 0 to {available - 1}")
    if len({len(part) for part in numbers}) > 1:
        raise UsageError(f"layers is {text!r}", "each layer must merge as many of the target's as the others")
    return numbers


def _default(count: int, available: int) -> Plan:
    """Half from the beginning, half from the end: what lies between changes the text least."""
    if not 1 <= count <= available:
        raise UsageError(f"layers is {count}", f"it must be 1 to {available}")
    first = -(-count // 2)
    return tuple((n,) for n in [*range(first), *range(available - (count - first), available)])


def initial(source: Source, plan: Plan) -> tuple[Shape, Weights]:
    """A student's shape and first weights, with the target's whole vocabulary."""
    merged = len(plan[0])
    old = source.shape
    shape = replace(old, layers=len(plan), heads=old.heads * merged, kv_heads=old.kv_heads * merged, neurons=old.neurons * merged)
    names = (EMBEDDING, FINAL_NORM, HEAD)
    weights = {name: source.weights[name] for name in names if name in source.weights}
    for number, layers in enumerate(plan):
        weights |= {f"blk.{number}.{name}": data for name, data in _layer(source, layers).items()}
    return shape, weights


def _layer(source: Source, layers: tuple[int, ...]) -> Weights:
    """Target layers side by side: all read the same, their outputs add up. Norm weights move into the matrices behind them,
    since side by side there is one norm for all."""
    shape = source.shape
    parts = [{name: source.weights[f"blk.{n}.{name}.weight"] for name in LAYER} for n in layers]
    if len(parts) == 1:
        return {f"{name}.weight": data for name, data in parts[0].items()}
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    split = [np.split(part["attn_qkv"] * part["attn_norm"], [queries, queries + keys]) for part in parts]
    ones = np.ones(shape.width, np.float32)
    return {
        "attn_norm.weight": ones,
        "attn_qkv.weight": np.concatenate([rows for kind in zip(*split, strict=True) for rows in kind]),
        "attn_output.weight": np.concatenate([part["attn_output"] for part in parts], 1),
        "ffn_norm.weight": ones.copy(),
        "ffn_gate.weight": np.concatenate([part["ffn_gate"] * part["ffn_norm"] for part in parts]),
        "ffn_up.weight": np.concatenate([part["ffn_up"] * part["ffn_norm"] for part in parts]),
        "ffn_down.weight": np.concatenate([part["ffn_down"] for part in parts], 1),
    }


LAYER = ("attn_norm", "attn_qkv", "attn_output", "ffn_norm", "ffn_gate", "ffn_up", "ffn_down")


def trim_vocabulary(source: Source, counts: np.ndarray, size: int, device: torch.device) -> Trim:
    """The `size` most frequent tokens, control tokens and single bytes among them, in the order of their ids."""
    always = source.always_kept
    if not len(always) <= size <= source.shape.vocab:
        raise UsageError(f"vocab is {size}", f"it must be {len(always)} (tokens that must stay) to {source.shape.vocab}")
    counts = counts.astype(np.int64)
    counts[always] = counts.max() + 1
    kept = np.sort(np.argsort(-counts, kind="stable")[:size])
    rows = torch.nn.functional.normalize(torch.from_numpy(source.weights[EMBEDDING]).to(device))
    known = rows[torch.from_numpy(kept).to(device)]
    stand_ins = torch.cat([(part @ known.T).argmax(1) for part in rows.split(8192)]).cpu().numpy()
    stand_ins[kept] = np.arange(size)
    return Trim(kept, stand_ins, vocabulary_hash(source.texts))


@dataclass
class Student:
    """`mean`: the same model with the running mean of the weights. `best`: the weights that agreed best so far."""

    name: str
    model: Llama
    mean: Llama
    trim: Trim | None = None
    optimizer: Any = None
    best: dict[str, torch.Tensor] = field(default_factory=dict)
    best_score: float = -1.0

    def __post_init__(self) -> None:
        self.know(self.trim)

    def know(self, trim: Trim | None) -> None:
        device = self.model.head.device
        self.trim, self.reads, self.knows = trim, None, None  # reads: draft id of a target id; knows: target id of a draft id
        if trim is not None:
            self.reads = torch.from_numpy(trim.stand_ins).to(device)
            self.knows = torch.from_numpy(trim.token_ids).to(device)

    def ids(self, ids: torch.Tensor) -> torch.Tensor:
        return ids if self.reads is None else self.reads[ids]

    def weights(self) -> Weights:
        chosen = self.best or self.model.state_dict()
        return {name: tensor.float().cpu().numpy() for name, tensor in chosen.items()}


ROUNDED = "q4_0"  # the type that is so coarse that a draft is trained as the file will have it


def make(source: Source, name: str, plan: Plan, trim: Trim | None, device: torch.device, quant: str = "") -> Student:
    shape, weights = initial(source, plan)
    if trim is not None:
        kept = trim.token_ids
        weights |= {key: weights[key][kept] for key in (EMBEDDING, HEAD) if key in weights}
        shape = replace(shape, vocab=len(kept))
    model = load(shape, weights, device)
    model.rounds = quant == ROUNDED
    return Student(name, model, copy.deepcopy(model).requires_grad_(False), trim)


def load(shape: Shape, weights: Weights, device: torch.device, dtype: torch.dtype = torch.float32) -> Llama:
    with torch.device(device):
        model = Llama(shape, tied=HEAD not in weights)
    model.load_state_dict({name: torch.tensor(data) for name, data in weights.items()})
    for parameter in model.parameters():  # not the rotary angles: they need their precision
        parameter.data = parameter.data.to(dtype)
    return model
