"""How often a draft's best, two best, four best guesses hold the target's own next token, along the target's own greedy answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from duodecoding.distill.data import Corpus
from duodecoding.distill.model import Llama, attend_within
from duodecoding.distill.student import Student
from duodecoding.distill.train import CHUNK, batches

TOPS = (1, 2, 4)


@torch.no_grad()
def agreement(model: Llama, student: Student, corpus: Corpus, tokens: int, dtype: torch.dtype) -> dict[str, dict[str, float]]:
    """By kind of prompt, and `all`: the mean of the kinds."""
    found: dict[str, list[np.ndarray]] = {}
    for batch in batches(corpus, tokens, 0, 0, model.head.device):
        packed = batch.packed
        truth = packed.ids[batch.rows + 1]
        hidden = model(student.ids(packed.ids), packed.positions, attend_within(packed), dtype)[batch.rows]
        guesses = torch.cat([(part.float() @ model.head.float().T).topk(TOPS[-1]).indices for part in hidden.split(CHUNK)])
        if student.knows is not None:
            guesses = student.knows[guesses]
        right = (guesses == truth[:, None]).cpu().numpy()  # (answer tokens, 4)
        lengths = [len(corpus.texts[i]) - corpus.prompts[i] for i in batch.numbers]
        for number, hits in zip(batch.numbers, np.split(right, np.cumsum(lengths)[:-1]), strict=True):
            found.setdefault(corpus.kinds[number], []).append(hits)
    return summary(found)


def summary(hits: Mapping[str, list[np.ndarray]]) -> dict[str, dict[str, Any]]:
    kinds: dict[str, dict[str, Any]] = {}
    for kind in sorted(hits):
        rows = np.concatenate(hits[kind])
        kinds[kind] = {f"top{k}": round(float(rows[:, :k].any(1).mean()), 4) for k in TOPS} | {"tokens": len(rows)}
    mean = {f"top{k}": round(float(np.mean([kind[f"top{k}"] for kind in kinds.values()])), 4) for k in TOPS}
    return kinds | {"all": mean}
