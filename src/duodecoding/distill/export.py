"""Llama models as GGUF files: reading a target's tensors, writing a draft's.

Tensors keep GGUF's names and order of rotary pairs everywhere in this package, so nothing is permuted between a file and torch.
Queries, keys and values are one matrix: llama.cpp then has two multiplications less to synchronise its threads for.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from duodecoding.errors import BackendMissing, DuoError, ModelUnreadable, UsageError

Weights = dict[str, npt.NDArray[np.float32]]
Quantised = tuple[npt.NDArray[Any], Any]  # bytes and GGML type
Field = tuple[str, Any, list[Any]]  # name, value, GGUF types

QUANTS = ("q8_0", "q5_0", "q4_0", "f16")
EMBEDDING, FINAL_NORM, HEAD = "token_embd.weight", "output_norm.weight", "output.weight"
PER_TOKEN = ("tokenizer.ggml.tokens", "tokenizer.ggml.token_type", "tokenizer.ggml.scores")


@dataclass(frozen=True, slots=True)
class Shape:
    """A Llama. `heads` times `head_dim` need not be `width`."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    neurons: int
    vocab: int
    context: int
    rope_base: float
    eps: float


def _gguf() -> Any:
    try:
        import gguf
    except ImportError as error:
        raise BackendMissing("cannot read or write GGUF files", str(error), "Run: pip install 'duodecoding[distill]'") from error
    return gguf


def read_shape(reader: Any) -> Shape:
    def value(name: str, otherwise: Any = None) -> Any:
        field = reader.fields.get(name)
        return field.contents() if field is not None else otherwise

    architecture = value("general.architecture")
    if architecture != "llama" or "rope_freqs.weight" in {tensor.name for tensor in reader.tensors}:
        why = f"its architecture is {architecture}" if architecture != "llama" else "its rotary frequencies are scaled"
        raise ModelUnreadable("cannot make a draft of this target", why, "Only plain Llama models can be distilled.")
    width, heads = value("llama.embedding_length"), value("llama.attention.head_count")
    return Shape(
        layers=value("llama.block_count"),
        width=width,
        heads=heads,
        kv_heads=value("llama.attention.head_count_kv", heads),
        head_dim=value("llama.attention.key_length", width // heads),
        neurons=value("llama.feed_forward_length"),
        vocab=len(reader.fields["tokenizer.ggml.tokens"].data),
        context=value("llama.context_length"),
        rope_base=value("llama.rope.freq_base", 10000.0),
        eps=value("llama.attention.layer_norm_rms_epsilon"),
    )


def read_gguf(path: Path) -> tuple[Shape, Weights, list[Field]]:
    """A Llama file: its shape, its tensors, dequantised and queries, keys and values joined, its tokenizer and origin."""
    gguf = _gguf()
    try:
        reader = gguf.GGUFReader(path)
        shape = read_shape(reader)
        fields = _kept_fields(reader)
        weights = {tensor.name: gguf.quants.dequantize(tensor.data, tensor.tensor_type) for tensor in reader.tensors}
    except DuoError:
        raise
    except Exception as error:  # whatever a broken file makes the reader raise
        raise ModelUnreadable(f"cannot read {path}", str(error) or type(error).__name__, "Get the file again.") from error
    for layer in range(shape.layers):
        name = f"blk.{layer}.attn_{{}}.weight"
        if name.format("qkv") not in weights:
            weights[name.format("qkv")] = np.concatenate([weights.pop(name.format(part)) for part in "qkv"])
    return shape, weights, fields


def _kept_fields(reader: Any) -> list[Field]:
    wanted = ("tokenizer.", "general.license", "general.organization", "general.languages")
    found = reader.fields.items()
    return [(name, field.contents(), list(field.types)) for name, field in found if name.startswith(wanted)]


def texts_of(fields: Sequence[Field]) -> list[str]:
    return next(value for name, value, _ in fields if name == PER_TOKEN[0])


def trimmed(fields: Sequence[Field], kept: npt.NDArray[np.int64]) -> Iterator[Field]:
    """The tokenizer of a trimmed vocabulary. Its merges stay: a draft is given ids and reads no text."""
    place = {int(token): i for i, token in enumerate(kept)}
    for name, value, types in fields:
        if name in PER_TOKEN:
            yield name, [value[token] for token in place], types
        elif name.endswith("_token_id"):
            if value in place:
                yield name, place[value], types
        else:
            yield name, value, types


def strings(values: Mapping[str, str]) -> list[Field]:
    return [(name, value, [_gguf().GGUFValueType.STRING]) for name, value in values.items()]


def check_quant(name: str) -> None:
    if name not in QUANTS:
        raise UsageError(f"quant is {name!r}", f"it must be {', '.join(QUANTS)}")


def quantise(weights: Mapping[str, npt.NDArray[np.float32]], quant: str, embedding: str = "") -> dict[str, Quantised]:
    """Matrices in `quant`, those of the vocabulary in `embedding` (if given), norms as they are."""
    gguf = _gguf()
    found: dict[str, Quantised] = {}
    for name, data in weights.items():
        kind = gguf.GGMLQuantizationType[((embedding or quant) if name in (EMBEDDING, HEAD) else quant).upper()]
        if data.ndim == 1:
            kind = gguf.GGMLQuantizationType.F32
        found[name] = gguf.quants.quantize(np.ascontiguousarray(data, np.float32), kind), kind
    return found


def write_gguf(path: Path, name: str, shape: Shape, tensors: Mapping[str, Quantised], fields: Sequence[Field], quant: str) -> None:
    """All or nothing: a file of that name is complete."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _write(unfinished, name, shape, tensors, fields, quant)
        unfinished.replace(path)
    except OSError as error:
        why = error.strerror or str(error)
        if error.errno == errno.ENOSPC:
            why = f"no space is left, it needs {sum(data.nbytes for data, _ in tensors.values()) / 1e6:.0f} MB"
        raise DuoError(f"cannot write {path}", why, "Name another place with --out.") from error
    finally:
        unfinished.unlink(missing_ok=True)


def _write(path: Path, name: str, shape: Shape, tensors: Mapping[str, Quantised], fields: Sequence[Field], quant: str) -> None:
    gguf = _gguf()
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name(name)
    writer.add_type("model")
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{quant.upper()}"])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_block_count(shape.layers)
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.width)
    writer.add_feed_forward_length(shape.neurons)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_rope_freq_base(shape.rope_base)
    writer.add_layer_norm_rms_eps(shape.eps)
    writer.add_vocab_size(shape.vocab)
    for field, value, types in fields:
        writer.add_key_value(field, value, types[0], sub_type=types[-1] if len(types) > 1 else None)
    for tensor, (data, kind) in tensors.items():
        writer.add_tensor(tensor, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def matrices(shape: Shape) -> dict[str, tuple[int, ...]]:
    """Names and sizes of a draft's tensors."""
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    found: dict[str, tuple[int, ...]] = {EMBEDDING: (shape.vocab, shape.width), FINAL_NORM: (shape.width,)}
    for layer in range(shape.layers):
        found |= {
            f"blk.{layer}.attn_norm.weight": (shape.width,),
            f"blk.{layer}.attn_qkv.weight": (queries + 2 * keys, shape.width),
            f"blk.{layer}.attn_output.weight": (shape.width, queries),
            f"blk.{layer}.ffn_norm.weight": (shape.width,),
            f"blk.{layer}.ffn_gate.weight": (shape.neurons, shape.width),
            f"blk.{layer}.ffn_up.weight": (shape.neurons, shape.width),
            f"blk.{layer}.ffn_down.weight": (shape.width, shape.neurons),
        }
    return found
