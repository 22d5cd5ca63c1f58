"""The arguments of a pass, in buffers that stay: filled on the host, sent to the device by one copy, the first thing in a graph."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import torch

from duodecoding.backends import compiled
from duodecoding.backends.compiled import NotBuilt
from duodecoding.backends.torch_slots import DEEPER
from duodecoding.tree import ROOT

MOST_COMPILED = 128  # rows that `rows.c` has room for
MOVES = 8  # entries of the KV cache that a pass can move; more get a step of their own


@dataclass(frozen=True)
class Rows:
    """One pass: `parents[i]` is a row before i, or -1 for one that hangs under the committed tokens before `first`."""

    first: int  # slot and position of the first row; all committed tokens lie before it
    tokens: Sequence[int]
    parents: Sequence[int]

    @cached_property
    def depths(self) -> list[int]:
        depths: list[int] = []
        for parent in self.parents:
            depths.append(0 if parent < 0 else depths[parent] + 1)
        return depths

    def path(self, row: int) -> list[int]:
        """Rows from the top down to this one."""
        rows = []
        while row >= 0:
            rows.append(row)
            row = self.parents[row]
        return rows[::-1]


def paths_with_rows(parents: Sequence[int], depths: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Few paths from the top down, each with the rows that hang under one of its rows (or under nothing): every row once."""
    found: list[tuple[list[int], list[int]]] = [([], [])]
    under: list[int] = []  # of each row: the path it hangs under
    holder = [-1] * len(parents)  # of each row: the path it is part of; -1: none yet
    for row, parent in enumerate(parents):
        if parent >= 0 and holder[parent] < 0:  # the path that the parent hangs under goes on with it, or forks
            which, depth = under[parent], depths[parent]
            if len(found[which][0]) > depth:
                found.append((found[which][0][:depth], []))
                which = len(found) - 1
            found[which][0].append(parent)
            holder[parent] = which
        which = holder[parent] if parent >= 0 else 0
        found[which][1].append(row)
        under.append(which)
    return found


@cache
def compiled_rows() -> Any:
    """`duo_rows`; None where there is no compiler."""
    try:
        call = compiled.load(compiled.build("rows.c"), brief=True).duo_rows
    except NotBuilt:
        return None
    call.argtypes = [ctypes.c_void_p, *[ctypes.c_int] * 4, ctypes.c_void_p, ctypes.c_void_p]
    return call


class Inputs:
    """Tokens, positions, a table of the paths, and entries of the KV cache to move first.

    A line of the table: slot of the first row; lines in use; depth of the row of this number. Then up to `members` rows that hang
    under one path, as DEEPER x depth + row, and -1 for none; and the rows of that path by depth.
    """

    def __init__(self, rows: int, device: torch.device, members: int) -> None:
        self.rows, self.members = rows, members
        self.moves_at_most = MOVES if rows > 1 else 0  # a plain pass seldom has any, and should cost nothing more
        self._width = 3 + members + rows
        ends = rows * (2 + self._width)
        self._host = torch.zeros(ends + 2 * self.moves_at_most, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._device = self._host.to(device) if device.type == "cuda" else self._host
        self._flat = memoryview(self._host.numpy())
        self.tokens, self.positions = self._device[:rows], self._device[rows : 2 * rows]
        self.table = self._device[2 * rows : ends].view(rows, self._width)
        self.moves = self._device[ends:].view(2, self.moves_at_most)  # from, to
        self._moves = 0  # of these, not padding
        self._compiled = compiled_rows() if rows <= MOST_COMPILED else None

    def fill(self, rows: Rows, moves: Sequence[tuple[int, int]] = ()) -> None:
        """Rows beyond those given are padding: they hang beside the first row and nobody sees them. So are moves of slot 0 to
        itself. The device has nothing to do meanwhile, so this is to be quick."""
        if self._compiled is not None:
            tokens, parents = array("i", rows.tokens), array("i", rows.parents)
            given = tokens.buffer_info()[0], parents.buffer_info()[0]
            if self._compiled(self._host.data_ptr(), self.rows, len(tokens), rows.first, self.members, *given) < 0:
                raise ValueError(f"{len(tokens)} rows of {self.rows} whose parents come before them are wanted")
        else:
            self._fill(rows)
        if self.moves_at_most and (moves or self._moves):
            still = [0] * (self.moves_at_most - len(moves))
            places = [*[source for source, _ in moves], *still, *[to for _, to in moves], *still]
            self._flat[-len(places) :] = array("i", places)
            self._moves = len(moves)

    def _fill(self, rows: Rows) -> None:
        """All but the moves."""
        flat, size, first, width = self._flat, self.rows, rows.first, self._width
        count = len(rows.tokens)
        parents: Sequence[int] = rows.parents
        depths: Sequence[int] = rows.depths
        flat[:count] = array("i", rows.tokens)
        if spare := size - count:
            flat[count:size] = array("i", [rows.tokens[0]]) * spare
            parents, depths = [*parents, *[ROOT] * spare], [*depths, *[0] * spare]
        flat[size : 2 * size] = array("i", [first + depth for depth in depths])
        lines = self._lines(parents, depths)
        table, ends = 2 * size, size * (2 + width)
        flat[table:ends:width] = array("i", [first]) * size
        flat[table + 1 : ends : width] = array("i", [len(lines)]) * size
        flat[table + 2 : ends : width] = array("i", depths)
        at = table + 3
        for line in lines:
            flat[at : at + len(line)] = array("i", line)
            at += width

    def send(self) -> None:
        """What was filled in last, to the device. A graph that has this in it does not have to be told."""
        if self._device is not self._host:
            self._device.copy_(self._host, non_blocking=True)

    def _lines(self, parents: Sequence[int], depths: Sequence[int]) -> list[list[int]]:
        lines, most = [], self.members
        for path, hanging in paths_with_rows(parents, depths):
            for i in range(0, len(hanging), most):
                some = [DEEPER * depths[row] + row for row in hanging[i : i + most]]
                lines.append(some + [-1] * (most - len(some)) + path)
        return lines


class Stretch:
    """The arguments of a pass over plain text, padded to a size: tokens, then the first slot and the number of tokens."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.size = size
        self._host = torch.zeros(size + 2, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._device = self._host.to(device)
        self.tokens, self.first = self._device[:size], self._device[size]
        self.last = self._device[size + 1 :]

    def fill(self, tokens: Sequence[int], first: int) -> None:
        spare = [tokens[0]] * (self.size - len(tokens))
        self._host.numpy()[:] = array("i", [*tokens, *spare, first, len(tokens) - 1])

    def send(self) -> None:
        self._device.copy_(self._host, non_blocking=True)
