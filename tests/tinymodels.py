"""Small GGUF files made from another one, for tests: fewer layers, random weights, another vocabulary."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf
import llama_cpp
import numpy as np

from duodecoding.backends import llamacpp

SKIPPED = {"general.architecture"}  # the writer sets it


def cut_layers(source: Path, to: Path, layers: int) -> Path:
    """The first `layers` layers of a model with its embeddings and final norm: a poor draft of it."""
    return _write(source, to, layers, lambda tensor: (tensor.data, tensor.tensor_type))


def with_number(source: Path, to: Path, layers: int, name: str, number: float) -> Path:
    """The same model, which says one thing more."""
    return _write(source, to, layers, lambda tensor: (tensor.data, tensor.tensor_type), numbers={name: number})


def random_weights(source: Path, to: Path, layers: int = 2, seed: int = 0) -> Path:
    """The shape of a model with fewer layers, and weights that mean nothing (F16, norms in F32)."""
    random = np.random.default_rng(seed)

    def fill(tensor: gguf.ReaderTensor) -> tuple[np.ndarray, gguf.GGMLQuantizationType]:
        shape = tuple(int(n) for n in reversed(tensor.shape))
        if len(shape) == 1:
            return np.ones(shape, np.float32), gguf.GGMLQuantizationType.F32
        return (random.standard_normal(shape, np.float32) * 0.04).astype(np.float16), gguf.GGMLQuantizationType.F16

    return _write(source, to, layers, fill)


def requantised(source: Path, to: Path, layers: int, kind: gguf.GGMLQuantizationType) -> Path:
    """The first `layers` layers with every matrix in another type."""

    def convert(tensor: gguf.ReaderTensor) -> tuple[np.ndarray, gguf.GGMLQuantizationType]:
        if tensor.tensor_type == gguf.GGMLQuantizationType.F32:
            return tensor.data, tensor.tensor_type
        return gguf.quants.quantize(gguf.quants.dequantize(tensor.data, tensor.tensor_type), kind), kind

    return _write(source, to, layers, convert)


def quantised(source: Path, to: Path, kind: str) -> Path:
    """A float model in any type that llama.cpp can write."""
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = gguf.LlamaFileType[f"MOSTLY_{kind}"]
    params.nthread = 1
    llamacpp.LlamaModel(source, vocabulary_only=True).close()  # quiets llama.cpp
    if llama_cpp.llama_model_quantize(bytes(source), bytes(to), ctypes.byref(params)):
        raise RuntimeError(f"llama.cpp could not write {kind}")
    return to


def other_vocabulary(source: Path, to: Path, changes: Mapping[int, str], layers: int = 1) -> Path:
    """The same model, in which some token ids mean another text."""

    def rename(name: str, value: Any) -> Any:
        if name != gguf.Keys.Tokenizer.LIST:
            return value
        return [changes.get(id, text) for id, text in enumerate(value)]

    return _write(source, to, layers, lambda tensor: (tensor.data, tensor.tensor_type), rename)


def other_tokenizer(source: Path, to: Path, layers: int, *, shift: int = 1000, merges: int = 20_000) -> Path:
    """The same model, in which every text has another id and words are cut into smaller pieces."""

    def renumber(name: str, value: Any) -> Any:
        if name in (gguf.Keys.Tokenizer.LIST, gguf.Keys.Tokenizer.TOKEN_TYPE):
            return value[-shift:] + value[:-shift]
        if name.startswith("tokenizer.") and name.endswith("_token_id"):
            return value + shift
        return value[:merges] if name == gguf.Keys.Tokenizer.MERGES else value

    def move(tensor: gguf.ReaderTensor) -> tuple[np.ndarray, gguf.GGMLQuantizationType]:
        embedding = tensor.name == "token_embd.weight"
        return np.roll(tensor.data, shift, axis=0) if embedding else tensor.data, tensor.tensor_type

    return _write(source, to, layers, move, renumber)


def as_qwen(source: Path, to: Path, layers: int, architecture: str, seed: int = 0) -> Path:
    """A Llama's first layers as a Qwen 2, with biases of queries, keys and values, or a Qwen 3, with norms of their heads. F16.

    Both turn the two halves of a head by a position where a Llama turns neighbours."""
    random, floats = np.random.default_rng(seed), gguf.GGMLQuantizationType.F32
    values = gguf.GGUFReader(source).fields
    heads = {"attn_q": "head_count", "attn_k": "head_count_kv"}
    count = {name: int(values[f"llama.attention.{key}"].contents()) for name, key in heads.items()}
    head = int(values["llama.embedding_length"].contents()) // count["attn_q"]

    def convert(tensor: gguf.ReaderTensor) -> tuple[np.ndarray, gguf.GGMLQuantizationType]:
        if tensor.tensor_type == floats:
            return tensor.data, floats
        data = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        if (of := count.get(tensor.name.split(".")[-2])) is not None:
            data = data.reshape(of, head // 2, 2, -1).swapaxes(1, 2).reshape(data.shape)
        return data.astype(np.float16), gguf.GGMLQuantizationType.F16

    sizes = {"attn_q": head * count["attn_q"], "attn_k": head * count["attn_k"], "attn_v": head * count["attn_k"]}
    more: dict[str, np.ndarray] = {}
    for begin in (f"blk.{layer}." for layer in range(layers)):
        if architecture == "qwen2":
            more |= {f"{begin}{name}.bias": random.normal(0, 0.3, size).astype(np.float32) for name, size in sizes.items()}
        else:
            more |= {f"{begin}{name}_norm.weight": random.normal(1, 0.3, head).astype(np.float32) for name in count}
    return _write(source, to, layers, convert, architecture=architecture, more=more)


Fill = Callable[[gguf.ReaderTensor], tuple[np.ndarray, gguf.GGMLQuantizationType]]


def _write(
    source: Path,
    to: Path,
    layers: int,
    fill: Fill,
    change: Callable[[str, Any], Any] = lambda name, value: value,
    *,
    architecture: str | None = None,
    more: Mapping[str, np.ndarray] = MappingProxyType({}),
    numbers: Mapping[str, float] = MappingProxyType({}),
) -> Path:
    """`architecture`: another one than the source has. `more` and `numbers`: tensors and values that the source has not."""
    reader = gguf.GGUFReader(source)
    old = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(to, architecture or old)
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in SKIPPED:
            continue
        value = layers if name == f"{old}.block_count" else change(name, field.contents())
        new = name.replace(f"{old}.", f"{architecture}.", 1) if architecture and name.startswith(f"{old}.") else name
        writer.add_key_value(new, value, field.types[0], sub_type=field.types[-1] if len(field.types) > 1 else None)
    for name, number in numbers.items():
        writer.add_float32(name, number)
    for tensor in _first_layers(reader, layers):
        data, kind = fill(tensor)
        writer.add_tensor(tensor.name, data, raw_dtype=kind)
    for name, data in more.items():
        writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType.F32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return to


def _first_layers(reader: gguf.GGUFReader, layers: int) -> Iterator[gguf.ReaderTensor]:
    for tensor in reader.tensors:
        block = tensor.name.split(".")[1] if tensor.name.startswith("blk.") else "-1"
        if int(block) < layers:
            yield tensor
