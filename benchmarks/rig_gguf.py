"""A small Llama's function in a larger shape, as a GGUF: SmolLM2's text at the price of a billion parameters, on a CPU.

    python benchmarks/rig_gguf.py SOURCE.gguf OUT.gguf [--width 2048] [--mlp 5632] [--layers 32] [--heads 32] [--kv-heads 8]

What is stored is copied, not quantised again: rows get zeros behind them, in whole blocks.

* The residual stream is wider; the new part stays zero, so norms are rescaled for the larger mean (weight and epsilon).
* New heads and new units of the MLP meet zeros in the projections behind them; new layers add nothing.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
F32 = gguf.GGMLQuantizationType.F32


class Rig:
    def __init__(self, reader: gguf.GGUFReader, to: dict[str, int]) -> None:
        field = {name: value.contents() for name, value in reader.fields.items() if name.startswith("llama.")}
        self.tensors = {tensor.name: tensor for tensor in reader.tensors}
        self.layers = field["llama.block_count"]
        self.heads, self.kv_heads = field["llama.attention.head_count"], field["llama.attention.head_count_kv"]
        self.width, self.mlp = field["llama.embedding_length"], field["llama.feed_forward_length"]
        self.head, self.eps = self.width // self.heads, field["llama.attention.layer_norm_rms_epsilon"]
        self.to = to
        smaller = to["width"] < self.width or to["mlp"] < self.mlp or to["layers"] < self.layers or to["kv_heads"] < self.kv_heads
        if smaller or to["heads"] // to["kv_heads"] < self.heads // self.kv_heads or to["heads"] % to["kv_heads"]:
            raise SystemExit("the new shape must hold the old one, its key heads and the heads of each included")

    def slots(self) -> list[int]:
        """Where each head goes: those that share a key head stay together."""
        group, new = self.heads // self.kv_heads, self.to["heads"] // self.to["kv_heads"]
        return [head // group * new + head % group for head in range(self.heads)]

    def tensor(self, name: str) -> tuple[Bytes, Any]:
        """A tensor of the new shape. Those of new layers are the first layer's, with nothing coming out."""
        layer = int(name.split(".")[1]) if name.startswith("blk.") else 0
        source = self.tensors[name if layer < self.layers else name.replace(f"blk.{layer}.", "blk.0.")]
        kind, part = source.tensor_type, name.split(".")[-2]
        if source.data.ndim == 1:
            wide = np.ones(self.to["width"], np.float32)
            wide[: self.width] = source.data * math.sqrt(self.width / self.to["width"])
            return wide, F32
        rows, columns = self._sizes(part)
        silent = layer >= self.layers and part in ("attn_output", "ffn_down")
        data = source.data.view(np.uint8).reshape(source.data.shape[0], -1)
        found = np.zeros((rows, _bytes(columns, kind)), np.uint8)
        if not silent:
            self._fill(found, data, part, kind)
        return found if kind is not F32 else found.view(np.float32), kind

    def _sizes(self, part: str) -> tuple[int, int]:
        width, mlp, queries, keys = (
            self.to["width"], self.to["mlp"], self.to["heads"] * self.head, self.to["kv_heads"] * self.head
        )  # fmt: skip
        known = {
            "attn_q": (queries, width), "attn_k": (keys, width), "attn_v": (keys, width), "attn_output": (width, queries),
            "ffn_gate": (mlp, width), "ffn_up": (mlp, width), "ffn_down": (width, mlp),
        }  # fmt: skip
        return known.get(part) or (self.tensors["token_embd.weight"].data.shape[0], width)

    def _fill(self, found: Bytes, data: Bytes, part: str, kind: Any) -> None:
        size = _bytes(self.head, kind)  # of a head's columns
        for head, slot in enumerate(self.slots()):
            if part == "attn_q":
                found[slot * self.head :][: self.head, : data.shape[1]] = data[head * self.head :][: self.head]
            elif part == "attn_output":
                found[: len(data), slot * size :][:, :size] = data[:, head * size :][:, :size]
        if part not in ("attn_q", "attn_output"):
            found[: len(data), : data.shape[1]] = data

    def write(self, reader: gguf.GGUFReader, out: Path) -> None:
        writer = gguf.GGUFWriter(out, "llama")
        new = {
            "llama.block_count": self.to["layers"], "llama.embedding_length": self.to["width"],
            "llama.feed_forward_length": self.to["mlp"], "llama.attention.head_count": self.to["heads"],
            "llama.attention.head_count_kv": self.to["kv_heads"], "llama.rope.dimension_count": self.head,
            "llama.attention.layer_norm_rms_epsilon": self.eps * self.width / self.to["width"],
            "general.name": f"{out.stem}, the function of {Path(reader.data.filename).stem}",
        }  # fmt: skip
        for name, value in reader.fields.items():
            if name.startswith("GGUF.") or name == "general.architecture":
                continue
            types = value.types
            writer.add_key_value(name, new.get(name, value.contents()), types[0], sub_type=types[-1] if len(types) > 1 else None)
        for name in ("llama.attention.key_length", "llama.attention.value_length"):
            if name not in reader.fields:
                writer.add_key_value(name, self.head, gguf.GGUFValueType.UINT32)
        layers = [f"blk.{i}.{part}" for i in range(self.to["layers"]) for part in _parts(self.tensors)]
        for name in [*layers, *(name for name in self.tensors if not name.startswith("blk."))]:
            data, kind = self.tensor(name)
            writer.add_tensor(name, data, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file(progress=True)
        writer.close()


def _bytes(columns: int, kind: Any) -> int:
    block, size = gguf.GGML_QUANT_SIZES[kind]
    return columns // block * size


def _parts(tensors: dict[str, Any]) -> list[str]:
    return [name.removeprefix("blk.0.") for name in tensors if name.startswith("blk.0.")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    for name, value in (("width", 2048), ("mlp", 5632), ("layers", 32), ("heads", 32), ("kv-heads", 8)):
        parser.add_argument(f"--{name}", type=int, default=value)
    given = parser.parse_args()
    reader = gguf.GGUFReader(given.source)
    to = {name: getattr(given, name) for name in ("width", "mlp", "layers", "heads", "kv_heads")}
    Rig(reader, to).write(reader, given.out)
    print(f"{given.out}: {given.out.stat().st_size / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
