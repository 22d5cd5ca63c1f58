"""A trimmed vocabulary: a draft that knows some of its target's tokens, and how its file says which.

In strings, because llama.cpp hands out those of a file's metadata and not arrays.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from duodecoding.errors import ModelUnreadable

TOKEN_IDS = "duodecoding.draft.token_ids"
STAND_INS = "duodecoding.draft.stand_ins"
VOCABULARY = "duodecoding.draft.vocabulary"


@dataclass(frozen=True, slots=True)
class Trim:
    """`vocabulary`: the hash of the target's, whole."""

    token_ids: npt.NDArray[np.int64]  # (kept,) target id of each draft id, ascending
    stand_ins: npt.NDArray[np.int64]  # (target's vocabulary,) draft id to read for each target id
    vocabulary: str

    def metadata(self) -> dict[str, str]:
        numbers = ((TOKEN_IDS, self.token_ids), (STAND_INS, self.stand_ins))
        return {name: base64.b64encode(ids.astype("<u4").tobytes()).decode() for name, ids in numbers} | {
            VOCABULARY: self.vocabulary
        }


def vocabulary_hash(texts: Sequence[str]) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()


def read_trim(value: Callable[[str], str], tokens: int, name: str) -> Trim | None:
    """`value`: of a key of the file's metadata. `tokens`: how many the file has. None: its vocabulary is whole."""
    if not value(VOCABULARY):
        return None
    try:
        ids, stand_ins = (np.frombuffer(base64.b64decode(value(key), validate=True), "<u4") for key in (TOKEN_IDS, STAND_INS))
    except (binascii.Error, ValueError):
        ids = stand_ins = np.zeros(0, np.uint32)
    inside = len(ids) == tokens <= len(stand_ins) and ids.max() < len(stand_ins) and stand_ins.max() < tokens
    if not inside or (np.diff(ids.astype(np.int64)) <= 0).any():
        raise ModelUnreadable(f"cannot use {name}", "its map of a trimmed vocabulary is broken", "Get the file again.")
    return Trim(ids.astype(np.int64), stand_ins.astype(np.int64), value(VOCABULARY))
