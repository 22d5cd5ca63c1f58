"""What our own engine can run, and a file's weights in the order and the form in which it wants them.

It turns neighbours of a head by a position. Models that turn its two halves (Qwen) get the rows of their queries and keys in
another order, the same for both, which changes none of their products.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from duodecoding.backends.gguf_file import BF16, BLOCK_BYTES, F16, F32, Q4_0, Q4_1, Q4_K, Q8_0, GgufFile, Tensor
from duodecoding.errors import BackendMissing

Floats = npt.NDArray[np.float32]
Tensors = Mapping[str, Tensor]

LANES = 16  # of a matrix, rows that are computed together at most
FLOATS = (F32, F16, BF16)
BITS = {Q4_0: 4.5, Q4_1: 5.0, Q4_K: 5.0, Q8_0: 8.5}  # of a weight in memory; other types become bytes, as Q8_0
HALVES = {"llama": False, "qwen2": True, "qwen3": True}  # architecture: are the halves of a head turned, not neighbours?
# What a file says of its positions where they are as they are; a factor counts without a type, too.
UNSCALED: dict[str, set[Any]] = {
    "rope.scaling.type": {None, "none"},
    "rope.scaling.factor": {None, 0.0, 1.0},
    "rope.scale_linear": {None, 0.0, 1.0},
    "rope.scaling.attn_factor": {None, 1.0},
}
NEEDED = ("embedding_length", "attention.head_count", "feed_forward_length", "block_count")
QUERIES_KEYS_VALUES = ("attn_q", "attn_k", "attn_v")
OTHERS = ("attn_output", "ffn_gate", "ffn_up", "ffn_down")
HEAD_NORMS = ("attn_q_norm", "attn_k_norm")


class Shape:
    """A model's numbers, as its file has them."""

    def __init__(self, file: GgufFile) -> None:
        self.architecture = str(file.values["general.architecture"])
        value = {name.removeprefix(f"{self.architecture}."): value for name, value in file.values.items()}
        self.width, self.heads = int(value["embedding_length"]), int(value["attention.head_count"])
        self.kv_heads = int(value.get("attention.head_count_kv", self.heads))
        self.head = int(value.get("attention.key_length", self.width // self.heads))
        self.feed, self.layers = int(value["feed_forward_length"]), int(value["block_count"])
        self.vocabulary = file.tensors["token_embd.weight"].rows
        self.epsilon = float(value.get("attention.layer_norm_rms_epsilon", 1e-5))
        self.trained_context = int(value.get("context_length", 0))
        self.base = float(value.get("rope.freq_base", 10_000.0))

    def numbers(self) -> list[int]:
        return [self.width, self.heads, self.kv_heads, self.head, self.feed, self.layers, self.vocabulary]


class LayerWeights(NamedTuple):
    norms: tuple[Floats, Floats]  # of attention, of the feed-forward part
    extras: tuple[Floats | None, Floats | None, Floats | None]  # biases of queries, keys and values; norms of their heads
    matrices: list[Tensor]  # queries, keys, values, output, gate, up, down


class Weights:
    """Raises BackendMissing if our own engine cannot run the model."""

    def __init__(self, file: GgufFile, *, exact: bool = False) -> None:
        """`exact`: of a target, whose floats are not to become bytes."""
        why = next(_reasons(file, exact), "")
        if why:
            role, option = ("target", "--backend") if exact else ("draft", "--draft-engine")
            raise BackendMissing(f"our own engine cannot run this {role}", why, f"llama.cpp can: {option} llamacpp")
        self._tensors, self.shape, self.forget = file.tensors, Shape(file), file.forget
        self.embeddings = file.tensors["token_embd.weight"]
        self.head = file.tensors.get("output.weight", self.embeddings)
        self.last_norm = _floats(file.tensors["output_norm.weight"])
        self.frequencies = self._frequencies()

    @property
    def memory(self) -> int:
        """Bytes that they take here, which are read for every token: without embeddings that are nothing else."""
        inner = [tensor for name, tensor in self._tensors.items() if name.startswith("blk.") and tensor.rows > 1]
        return round(sum(BITS.get(each.kind, BITS[Q8_0]) * each.rows * each.columns for each in [self.head, *inner]) / 8)

    def _frequencies(self) -> Floats:
        """Of the turns by a position. (head / 2)"""
        head, factors = self.shape.head, self._tensors.get("rope_freqs.weight")
        plain = (self.shape.base ** -(np.arange(0, head, 2) / head)).astype(np.float32)
        return plain if factors is None else (plain / _floats(factors)).astype(np.float32)

    def layer(self, number: int) -> LayerWeights:
        begin, tensors = f"blk.{number}.", self._tensors
        attention, feed = (_floats(tensors[f"{begin}{name}.weight"]) for name in ("attn_norm", "ffn_norm"))
        others = [tensors[f"{begin}{name}.weight"] for name in OTHERS]
        return LayerWeights((attention, feed), self._extras(begin), [*self._attention(begin), *others])

    def _attention(self, begin: str) -> list[Tensor]:
        """Queries, keys and values, which may lie in one matrix."""
        shape, whole = self.shape, self._tensors.get(f"{begin}attn_qkv.weight")
        heads = (shape.heads, shape.kv_heads, shape.kv_heads)
        if whole is not None:
            parts, at = [], 0
            for count in heads:
                parts.append(_some_rows(whole, np.arange(at, at + count * shape.head)))
                at += count * shape.head
        else:
            parts = [self._tensors[f"{begin}{name}.weight"] for name in QUERIES_KEYS_VALUES]
        queries, keys, values = parts
        return [_some_rows(queries, self._order(shape.heads)), _some_rows(keys, self._order(shape.kv_heads)), values]

    def _extras(self, begin: str) -> tuple[Floats | None, Floats | None, Floats | None]:
        shape, tensors = self.shape, self._tensors
        found = [tensors.get(f"{begin}{name}.bias") for name in QUERIES_KEYS_VALUES]
        bias = None
        if any(part is not None for part in found):
            orders = (self._order(shape.heads), self._order(shape.kv_heads), np.arange(shape.kv_heads * shape.head))
            parts = [np.zeros(len(order)) if part is None else _floats(part) for part, order in zip(found, orders, strict=True)]
            bias = np.concatenate([part[order] for part, order in zip(parts, orders, strict=True)]).astype(np.float32)
        norms = [tensors.get(f"{begin}{name}.weight") for name in HEAD_NORMS]
        query, key = (None if norm is None else _floats(norm)[self._order(1)] for norm in norms)
        return bias, query, key

    def _order(self, heads: int) -> npt.NDArray[np.int64]:
        """Rows of so many heads as the engine wants them."""
        head = self.shape.head
        inside = np.arange(head)
        if HALVES[self.shape.architecture]:
            inside = inside.reshape(2, -1).T.reshape(-1)  # a number, and the one that turns with it
        return (np.arange(heads)[:, None] * head + inside).reshape(-1)


def _reasons(file: GgufFile, exact: bool) -> Iterator[str]:
    """Why not, if so. A later question counts on what the earlier ones have found."""
    values, tensors = file.values, file.tensors
    architecture = values.get("general.architecture")
    if architecture not in HALVES:
        yield f"its architecture is {architecture}, not {', '.join(HALVES)}"
    for name in NEEDED:
        if f"{architecture}.{name}" not in values:
            yield f"it does not say its {architecture}.{name}"
    if "token_embd.weight" not in tensors:
        yield "it has no token_embd.weight"
    known = {f"{name}.bias" for name in QUERIES_KEYS_VALUES}
    for name, tensor in tensors.items():
        if not name.endswith(".weight") and name.split(".", 2)[-1] not in known:
            yield f"it has {name}"
        if tensor.kind not in BLOCK_BYTES:
            yield f"its weights are of type {tensor.kind} (floats, Q4_0 to Q8_0 and Q4_K to Q6_K it could read)"
        if exact and tensor.rows > 1 and tensor.kind in FLOATS:
            yield f"its {name} is of floats, which would become bytes"
    if values.get(f"{architecture}.expert_count"):
        yield "it has experts"
    for name, plain in UNSCALED.items():
        if (found := values.get(f"{architecture}.{name}")) not in plain:
            yield f"its positions are scaled ({name} is {found})"
    yield from _of_shape(Shape(file), values)
    if sum(name.split(".")[-2] in HEAD_NORMS for name in tensors) not in (0, 2 * Shape(file).layers):
        yield "not all of its queries and keys have norms"
    yield from _of_tensors(Shape(file), tensors)


def _of_shape(shape: Shape, values: dict[str, Any]) -> Iterator[str]:
    begin = shape.architecture
    if values.get(f"{begin}.attention.value_length", shape.head) != shape.head or shape.head % LANES or shape.head > 256:
        yield f"its heads are of {shape.head}"
    if values.get(f"{begin}.rope.dimension_count", shape.head) != shape.head:
        yield "a part of a head has no position"
    if shape.width % 32 or shape.feed % 32 or shape.heads % shape.kv_heads or shape.heads // shape.kv_heads > 8:
        yield f"its shape is {shape.numbers()}"


def _of_tensors(shape: Shape, tensors: Tensors) -> Iterator[str]:
    """What is copied must be there, and as large as it will be taken for."""
    for name, (rows, columns) in _expected(shape, tensors):
        tensor = tensors.get(name)
        if tensor is None:
            yield f"it has no {name}"
        elif (tensor.rows, tensor.columns) != (rows, columns):
            yield f"its {name} is {tensor.rows} x {tensor.columns}, not {rows} x {columns}"
        elif rows == 1 and tensor.kind not in FLOATS:
            yield f"its {name} is of type {tensor.kind}, not floats"


def _expected(shape: Shape, tensors: Tensors) -> Iterator[tuple[str, tuple[int, int]]]:
    """Names, rows and columns. Which of the tensors that not every model has are there decides what else must be."""
    width, feed, queries, keys = shape.width, shape.feed, shape.heads * shape.head, shape.kv_heads * shape.head
    some = {"output.weight": (shape.vocabulary, width), "rope_freqs.weight": (1, shape.head // 2)}
    yield from {"token_embd.weight": (shape.vocabulary, width), "output_norm.weight": (1, width)}.items()
    yield from ((name, size) for name, size in some.items() if name in tensors)
    inside = {"attn_norm.weight": (1, width), "ffn_norm.weight": (1, width), "attn_output.weight": (width, queries)}
    inside |= {"ffn_gate.weight": (feed, width), "ffn_up.weight": (feed, width), "ffn_down.weight": (width, feed)}
    parts = dict(zip(QUERIES_KEYS_VALUES, (queries, keys, keys), strict=True))
    for begin in (f"blk.{number}." for number in range(shape.layers)):
        matrices = {f"{name}.weight": (rows, width) for name, rows in parts.items()}
        if f"{begin}attn_qkv.weight" in tensors:
            matrices = {"attn_qkv.weight": (queries + 2 * keys, width)}
        extras = {f"{name}.bias": (1, rows) for name, rows in parts.items()} | {
            f"{name}.weight": (1, shape.head) for name in HEAD_NORMS
        }
        there = {name: size for name, size in extras.items() if begin + name in tensors}
        yield from ((begin + name, size) for name, size in (inside | matrices | there).items())


def _some_rows(matrix: Tensor, rows: npt.NDArray[np.int64]) -> Tensor:
    """In this order. What is as it should be is not copied."""
    assert matrix.data is not None
    first, count = int(rows[0]), len(rows)
    lines = matrix.data.reshape(matrix.rows, -1)
    in_place = np.array_equal(rows, np.arange(first, first + count))
    data = lines[first : first + count] if in_place else lines[rows]
    return Tensor(matrix.kind, count, matrix.columns, data.reshape(-1))


def _floats(tensor: Tensor) -> Floats:
    assert tensor.data is not None
    if tensor.kind == F32:
        return tensor.data.view("<f4")
    if tensor.kind == F16:
        return tensor.data.view("<f2").astype(np.float32)
    assert tensor.kind == BF16
    return (tensor.data.view("<u2").astype(np.uint32) << 16).view(np.float32)
