"""A small model's function inside a larger Llama shape: the text of SmolLM2, the cost of 7, 13 or 32 billion parameters.

Speculation needs a large target, and its gain depends on real text. The rig computes what its source computes, with every
dimension padded:

* the residual stream is wider; the new part stays zero, so norms are rescaled for the larger mean (weight and epsilon);
* heads are more and wider: a source frequency sits at every m-th place of the rotary embedding, queries are scaled for the
  larger 1/sqrt(d); new heads and new value dimensions meet zero columns of the output projection;
* the MLP is wider; new units meet zero columns of the down projection;
* new layers have output projections of zero.

Weights that cannot reach the output are random, not zero: a GPU is faster on zeros.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

Weights = Mapping[str, torch.Tensor]
SPREAD = 0.02  # of the random weights


@dataclass(frozen=True, slots=True)
class Shape:
    hidden: int
    mlp: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int = 128


SHAPES = {
    "7b": Shape(4096, 11008, 32, 32, 32),
    "13b": Shape(5120, 13824, 40, 40, 40),
    "32b": Shape(5120, 27648, 64, 40, 8),
}


@dataclass(frozen=True, slots=True)
class Source:
    """A Llama model's settings and weights, by their transformers names."""

    shape: Shape
    vocab: int
    eps: float
    rope_theta: float
    context: int
    weights: Weights


def read_gguf(path: Path) -> Source:
    """A Llama GGUF, dequantised."""
    import gguf

    reader = gguf.GGUFReader(path)

    def number(name: str) -> Any:
        return reader.fields[f"llama.{name}"].contents()

    heads, kv_heads, hidden = number("attention.head_count"), number("attention.head_count_kv"), number("embedding_length")
    shape = Shape(hidden, number("feed_forward_length"), number("block_count"), heads, kv_heads, hidden // heads)
    weights: dict[str, torch.Tensor] = {}
    for tensor in reader.tensors:
        data = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy())
        count = {"attn_q": heads, "attn_k": kv_heads}.get(tensor.name.split(".")[-2])
        weights[_name(tensor.name)] = data if count is None else _rotary_order(data, count)
    eps, theta = number("attention.layer_norm_rms_epsilon"), number("rope.freq_base")
    return Source(shape, weights["model.embed_tokens.weight"].shape[0], eps, theta, number("context_length"), weights)


_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "token_embd": "embed_tokens",
    "output_norm": "norm",
}


def _name(name: str) -> str:
    parts = name.split(".")
    if parts[0] == "output":
        return "lm_head.weight"
    layer = f"layers.{parts[1]}." if parts[0] == "blk" else ""
    return f"model.{layer}{_NAMES[parts[-2]]}.weight"


def _rotary_order(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """GGUF has the two halves of a rotary pair side by side, transformers half a head apart."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def build(shape: Shape, device: torch.device | str, dtype: torch.dtype, source: Source, attention: str = "sdpa") -> Any:
    """The model, made directly on its device."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    _check(shape, source.shape)
    config = LlamaConfig(
        vocab_size=source.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.mlp,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        rms_norm_eps=source.eps * source.shape.hidden / shape.hidden,
        max_position_embeddings=source.context,
        rope_parameters={"rope_type": "default", "rope_theta": source.rope_theta},
        tie_word_embeddings=False,
        attn_implementation=attention,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model = model.to(dtype).to_empty(device=device)
    model.model.rotary_emb = LlamaRotaryEmbedding(config).to(device)
    model.eval().requires_grad_(False)
    _fill(model, shape, source)
    return model


def _check(shape: Shape, small: Shape) -> None:
    groups, had = shape.heads // shape.kv_heads, small.heads // small.kv_heads
    needed = small.kv_heads * -(-had // groups)
    fits = shape.hidden >= small.hidden and shape.mlp >= small.mlp and shape.layers >= small.layers
    if not fits or needed > shape.kv_heads or shape.head_dim % small.head_dim:
        raise ValueError(f"{small} does not fit into {shape}")


@torch.no_grad()
def _fill(model: Any, shape: Shape, source: Source) -> None:
    torch.manual_seed(0)
    small, weights = source.shape, source.weights
    rows = _rotary_rows(shape, small)
    norm = math.sqrt(small.hidden / shape.hidden)
    state = model.state_dict()
    for tensor in state.values():
        tensor.normal_(0, SPREAD)

    def put(name: str, value: torch.Tensor) -> None:
        state[name][: value.shape[0]] = value.to(state[name].device, state[name].dtype)

    embedding = weights["model.embed_tokens.weight"]
    state["model.embed_tokens.weight"].zero_()
    state["model.embed_tokens.weight"][:, : small.hidden] = embedding.to(model.device)
    state["lm_head.weight"][:, : small.hidden] = weights.get("lm_head.weight", embedding).to(model.device)
    put("model.norm.weight", weights["model.norm.weight"] * norm)
    for number in range(shape.layers):
        layer = f"model.layers.{number}."
        state[layer + "self_attn.o_proj.weight"].zero_()
        state[layer + "mlp.down_proj.weight"].zero_()
        if number >= small.layers:
            continue
        put(layer + "input_layernorm.weight", weights[layer + "input_layernorm.weight"] * norm)
        put(layer + "post_attention_layernorm.weight", weights[layer + "post_attention_layernorm.weight"] * norm)
        for part in ("gate_proj", "up_proj"):
            state[f"{layer}mlp.{part}.weight"][: small.mlp, : small.hidden] = weights[f"{layer}mlp.{part}.weight"].to(model.device)
        state[layer + "mlp.down_proj.weight"][: small.hidden, : small.mlp] = weights[layer + "mlp.down_proj.weight"].to(
            model.device
        )
        _fill_attention(state, layer + "self_attn.", weights, shape, small, rows)


def _rotary_rows(shape: Shape, small: Shape) -> torch.Tensor:
    """Where a source head's dimensions go in a target head, so that each keeps its frequency."""
    factor, half = shape.head_dim // small.head_dim, small.head_dim // 2
    places = torch.arange(half) * factor
    return torch.cat([places, places + shape.head_dim // 2])


def _fill_attention(state: Any, layer: str, weights: Weights, shape: Shape, small: Shape, rows: torch.Tensor) -> None:
    q, k, v, o = (state[f"{layer}{part}_proj.weight"] for part in "qkvo")
    device, size, had, width = q.device, shape.head_dim, small.head_dim, small.hidden
    scale = math.sqrt(size / had)
    parts = {part: weights[f"{layer}{part}_proj.weight"].to(device) for part in "qkvo"}
    for mine, theirs, head, kv_head in _placement(shape, small):
        at, to = mine * had, head * size
        q[(to + rows).to(device), :width] = (parts["q"][at : at + had] * scale).to(q.dtype)
        o[:width, to : to + had] = parts["o"][:, at : at + had].to(o.dtype)
        at, to = theirs * had, kv_head * size
        k[to : to + size] = 0  # queries are random in the places between
        k[(to + rows).to(device), :width] = parts["k"][at : at + had].to(k.dtype)
        v[to : to + had, :width] = parts["v"][at : at + had].to(v.dtype)


def _placement(shape: Shape, small: Shape) -> list[tuple[int, int, int, int]]:
    """Source head and its key head -> target head and its key head. A key head that serves more here than there is repeated."""
    groups, had = shape.heads // shape.kv_heads, small.heads // small.kv_heads
    repeats = -(-had // groups)
    placed = []
    for head in range(small.heads):
        theirs, inside = divmod(head, had)
        kv_head = theirs * repeats + inside // groups
        placed.append((head, theirs, kv_head * groups + inside % groups, kv_head))
    return placed
