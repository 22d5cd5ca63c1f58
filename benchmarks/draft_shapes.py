"""What a step of drafts of many shapes costs, before any is trained: random weights, real sizes, real steps (draft_step.py).

python benchmarks/draft_shapes.py TARGET.gguf [--threads 4,8,14] [--widths 1,2,4,8] [--shapes 4x1,3x1,2x1,2x2,3x2,2x3]
    [--vocabs 49152,16384,8192] [--quants q8_0,q4_0] [--apart 4x1] [--seconds 0.35] [--repack yes]
    [--folder DIR] [--name draft_shapes]

A shape is layers x merged target layers in each. `--apart`: shapes to time also with queries, keys and values in three matrices.
Each file is written, timed and removed (kept in --folder). All of it: shapes x vocabularies x quants x threads x widths x seconds.
"""

from __future__ import annotations

import os
import sys
import tempfile
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import numpy as np
from common import spread, write
from draft_step import TEXT, steps

from duodecoding.backends.llamacpp import LlamaModel, physical_cores
from duodecoding.backends.llamacpp_draft import LlamaDraft
from duodecoding.distill import export
from duodecoding.drafters.model import ModelDrafter

CONTEXT = 400


def shape_of(target: export.Shape, layers: int, merged: int, vocab: int) -> export.Shape:
    return replace(
        target,
        layers=layers,
        heads=target.heads * merged,
        kv_heads=target.kv_heads * merged,
        neurons=target.neurons * merged,
        vocab=min(vocab, target.vocab),
    )


def random_tensors(shape: export.Shape, quant: str, *, apart: bool) -> dict[str, export.Quantised]:
    """Of each size of matrix one; the final norm is large, so that a row of logits has a few candidates, as after training."""
    found: dict[str, export.Quantised] = {}
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    for name, size in export.matrices(shape).items():
        if len(size) == 1:
            found |= export.quantise({name: np.full(size, 6 if name == export.FINAL_NORM else 1, np.float32)}, quant)
            continue
        rows, kind = random_matrix(size, quant)
        first, parts = 0, {name: size[0]}
        if apart and "qkv" in name:
            parts = {name.replace("qkv", part): count for part, count in zip("qkv", (queries, keys, keys), strict=True)}
        for part, count in parts.items():
            found[part] = rows[first : first + count], kind
            first += count
    return found


@lru_cache(maxsize=64)
def random_matrix(size: tuple[int, ...], quant: str) -> export.Quantised:
    rows = np.random.default_rng(size[0]).standard_normal(size, np.float32) * np.float32(0.04)
    return export.quantise({"matrix": rows}, quant)["matrix"]


def make(folder: Path, target: export.Shape, fields: list[export.Field], option: tuple[str, int, str, bool]) -> tuple[str, Path]:
    form, vocab, quant, apart = option
    layers, merged = (int(n) for n in form.split("x"))
    shape = shape_of(target, layers, merged, vocab)
    name = f"{form}-{shape.vocab}-{quant}{'-apart' if apart else ''}"
    kept = np.arange(shape.vocab)
    path = folder / f"{name}.gguf"
    export.write_gguf(path, name, shape, random_tensors(shape, quant, apart=apart), list(export.trimmed(fields, kept)), quant)
    return name, path


def timed(
    path: Path, threads: list[int], widths: list[int], seconds: float, *, repack: bool
) -> dict[str, dict[str, dict[str, float]]]:
    found = {}
    for count in threads:
        draft = LlamaDraft(LlamaModel(path, repack=repack), context=4096, threads=count)
        drafter = ModelDrafter(draft)
        ids = draft.vocabulary.tokenize(TEXT * 60, special=False, bos=True)[:CONTEXT]
        steps(drafter, ids, max(widths), 0.1)  # the first steps allocate
        found[str(count)] = {str(w): spread([1e3 * t for t in steps(drafter, ids, w, seconds)]) for w in widths}
        draft.close()
    return found


def main() -> None:
    source = Path(sys.argv[1])
    option = dict(zip(sys.argv[2::2], sys.argv[3::2], strict=True))
    threads = [int(n) for n in option.get("--threads", str(physical_cores())).split(",")]
    widths = [int(n) for n in option.get("--widths", "1,2,4,8").split(",")]
    forms = option.get("--shapes", "4x1,3x1,2x1,2x2,3x2,2x3").split(",")
    vocabs = [int(n) for n in option.get("--vocabs", "49152,16384,8192").split(",")]
    quants = option.get("--quants", "q8_0,q4_0").split(",")
    apart = [form for form in option.get("--apart", "4x1").split(",") if form]
    seconds = float(option.get("--seconds", "0.35"))
    repack = option.get("--repack", "yes") == "yes"  # as the engine loads drafts
    target, _, fields = export.read_gguf(source)
    options = [(form, vocab, quant, False) for vocab in vocabs for quant in quants for form in forms]
    options += [(form, vocabs[0], quant, True) for quant in quants for form in apart]
    results = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(option.get("--folder", temporary))
        for chosen in options:
            name, path = make(folder, target, fields, chosen)
            size = path.stat().st_size
            results[name] = {"megabytes": round(size / 1e6, 1), "ms": timed(path, threads, widths, seconds, repack=repack)}
            if "--folder" not in option:
                path.unlink()
            medians = {count: [row[w]["median"] for w in row] for count, row in results[name]["ms"].items()}
            print(f"{name:26} {size / 1e6:5.1f} MB", medians, flush=True)
    settings = {"target": source.name, "context": CONTEXT, "widths": widths, "branching": 8, "seconds": seconds, "repack": repack}
    print(write(option.get("--name", "draft_shapes"), settings | {"cpus": os.cpu_count()}, results))


if __name__ == "__main__":
    main()
