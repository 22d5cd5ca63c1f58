"""What a GGUF file holds: its numbers and strings, and where its tensors lie. Nothing is computed, nothing is copied."""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from duodecoding.errors import ModelUnreadable

Bytes = npt.NDArray[np.uint8]

F32, F16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K, BF16 = 0, 1, 2, 3, 6, 7, 8, 12, 13, 14, 30
BLOCK_BYTES = {
    F32: (1, 4),
    F16: (1, 2),
    Q4_0: (32, 18),
    Q4_1: (32, 20),
    Q5_0: (32, 22),
    Q5_1: (32, 24),
    Q8_0: (32, 34),
    Q4_K: (256, 144),
    Q5_K: (256, 176),
    Q6_K: (256, 210),
    BF16: (1, 2),
}  # weights in a block, bytes of one
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
OLDEST = 2  # version; before it counts had 32 bits


@dataclass(frozen=True, slots=True)
class Tensor:
    kind: int  # GGUF's number of the type
    rows: int
    columns: int
    data: Bytes | None  # None: of a type that is not in BLOCK_BYTES


class GgufFile:
    """`values`: numbers and strings by name; arrays are left out. `tensors`: by name, views of the mapped file."""

    def __init__(self, path: Path) -> None:
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise ModelUnreadable(f"cannot load {path}", str(error), "Get the file again or choose another.") from error
        self.values: dict[str, Any] = {}
        self.tensors: dict[str, Tensor] = {}
        try:
            self._read()
        except (struct.error, ValueError, IndexError, UnicodeDecodeError) as error:
            raise ModelUnreadable(f"cannot read {path.name}", f"its header is broken ({error})", "Get the file again.") from error

    def forget(self) -> None:
        """What was read so far need not stay in memory; what is wanted once more comes from the file again."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)

    def _read(self) -> None:
        self._at = 0
        magic, version, tensors, values = self._take("<4sIQQ")
        if magic != b"GGUF" or version < OLDEST:
            raise ValueError(f"{magic!r}, version {version}")
        for _ in range(values):
            name = self._string()
            value = self._value(self._take("<I")[0])
            if value is not None:
                self.values[name] = value
        described = [self._tensor() for _ in range(tensors)]
        step = int(self.values.get("general.alignment", 32))
        begin = -(-self._at // step) * step
        for name, shape, kind, offset in described:
            self.tensors[name] = self._view(shape, kind, begin + offset)

    def _take(self, form: str) -> tuple[Any, ...]:
        found = struct.unpack_from(form, self._map, self._at)
        self._at += struct.calcsize(form)
        return found

    def _string(self) -> str:
        (length,) = self._take("<Q")
        self._at += length
        if self._at > len(self._map):
            raise ValueError("a string goes on past the end")
        return self._map[self._at - length : self._at].decode("utf-8", "replace")

    def _value(self, kind: int) -> Any:
        if kind == STRING:
            return self._string()
        if kind == ARRAY:
            inner, count = self._take("<IQ")
            self._skip(inner, count)
            return None
        return self._take("<" + NUMBERS[kind])[0] if kind in NUMBERS else self._unknown(kind)

    def _skip(self, kind: int, count: int) -> None:
        if kind in NUMBERS:
            self._at += count * struct.calcsize("<" + NUMBERS[kind])
            return
        skip: Callable[[], object] = self._string_over if kind == STRING else lambda: self._value(kind)
        for _ in range(count):
            skip()

    def _string_over(self) -> None:
        self._at += 8 + int.from_bytes(self._map[self._at : self._at + 8], "little")

    def _unknown(self, kind: int) -> None:
        raise ValueError(f"a value of type {kind}")

    def _tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        (dimensions,) = self._take("<I")
        shape = self._take(f"<{dimensions}Q")
        return (name, shape, *self._take("<IQ"))

    def _view(self, shape: tuple[int, ...], kind: int, start: int) -> Tensor:
        columns, rows = shape[0], int(np.prod(shape[1:], dtype=np.int64))
        if kind not in BLOCK_BYTES:
            return Tensor(kind, rows, columns, None)
        block, size = BLOCK_BYTES[kind]
        if columns % block:
            raise ValueError("a tensor's rows end within a block")
        count = rows * columns // block * size
        if start + count > len(self._map):
            raise ValueError("a tensor goes on past the end")
        return Tensor(kind, rows, columns, np.frombuffer(self._map, np.uint8, count, start))
