"""The rig computes what its source computes, whatever it was padded to."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: make torch installs it")
pytest.importorskip("transformers", reason="transformers is not installed: make torch installs it")

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
import rig  # noqa: E402

from duodecoding.backends import read_vocabulary  # noqa: E402

PADDED = {
    "wider": rig.Shape(768, 1792, 32, 12, 6, 64),
    "wider heads, one key head each": rig.Shape(640, 1600, 31, 10, 10, 128),
    "five heads share a key head": rig.Shape(640, 1600, 30, 20, 4, 128),
}


@pytest.fixture(scope="module")
def source(model_path: Path) -> rig.Source:
    torch.set_num_threads(1)
    return rig.read_gguf(model_path)


@pytest.fixture(scope="module")
def plain(source: rig.Source) -> Any:
    return rig.build(source.shape, "cpu", torch.float32, source)


def greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    ids, cache = torch.tensor([prompt]), None
    found: list[int] = []
    with torch.no_grad():
        for _ in range(count):
            out = model(ids, past_key_values=cache, use_cache=True)
            cache, ids = out.past_key_values, out.logits[:, -1:].argmax(-1)
            found.append(int(ids))
    return found


@pytest.mark.parametrize("name", PADDED)
def test_a_padded_model_computes_what_its_source_computes(source: rig.Source, plain: Any, model_path: Path, name: str) -> None:
    model = rig.build(PADDED[name], "cpu", torch.float32, source)
    prompt = read_vocabulary(model_path).tokenize("Once upon a time there was a small", special=False, bos=False)
    with torch.no_grad():
        apart = (model(torch.tensor([prompt])).logits - plain(torch.tensor([prompt])).logits).abs().max()
    assert float(apart) < 1e-3
    assert greedy(model, prompt, 12) == greedy(plain, prompt, 12)
    zeros = sum(int((weight == 0).sum()) for weight in model.parameters())
    assert zeros < 0.75 * sum(weight.numel() for weight in model.parameters())  # what cannot reach the output is random


def test_the_large_shapes_hold_the_small_model(source: rig.Source) -> None:
    for shape in rig.SHAPES.values():
        rig._check(shape, source.shape)
    with pytest.raises(ValueError, match="does not fit"):
        rig._check(rig.Shape(512, 1536, 30, 9, 3, 64), source.shape)
    with pytest.raises(ValueError, match="does not fit"):
        rig._check(rig.Shape(640, 1536, 30, 10, 2, 64), source.shape)  # too few key heads
