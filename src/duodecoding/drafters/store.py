"""A file with the tokens of earlier conversations, for lookup across answers. Several engines may share one.

Losing it costs speed and nothing else, so no trouble with it ends an answer: a file that cannot be used is named in a warning
and left alone, unless it is a damaged store, which the next save replaces.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import tempfile
import zlib
from array import array
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from duodecoding.backends.base import Vocabulary
from duodecoding.errors import UsageError

log = logging.getLogger("duodecoding.lookup")

MAGIC = b"duo lookup store 1\n"
LIMIT = 1 << 17  # tokens; the oldest go first
SEPARATOR = -1  # between conversations; never guessed


class Store:
    def __init__(self, path: Path, vocabulary: Vocabulary) -> None:
        self._path = path.expanduser().resolve()
        if not self._path.parent.is_dir():
            raise UsageError(f"no lookup store at {path}", "there is no such folder", "Create it, or name another file.")
        texts = "\0".join(vocabulary.texts()).encode("utf-8", "surrogatepass")
        self._head = MAGIC + hashlib.sha256(texts).digest()
        self._size = vocabulary.size
        self._usable = True
        self.tokens = self._read()  # as they were when the engine started

    def save(self, tokens: array[int]) -> None:
        """Put the tokens behind what is in the file by now."""
        if not self._usable or not tokens:
            return
        try:
            with _alone(self._path.parent):
                text = self._read()
                between = array("i", [SEPARATOR] if text and tokens[0] != SEPARATOR else [])
                if self._usable:
                    self._write((text + between + tokens)[-LIMIT:])
        except OSError as error:
            log.warning("the lookup store %s could not be saved: %s", self._path, error)

    def _read(self) -> array[int]:
        try:
            data = self._path.read_bytes()
        except FileNotFoundError:
            return array("i")
        except OSError as error:
            return self._refuse(f"it cannot be read: {error.strerror or error}")
        if not data.startswith(MAGIC):
            return self._refuse("it is not a lookup store")
        if not data.startswith(self._head):
            return self._refuse("it belongs to a model with another vocabulary")
        check, body = data[len(self._head) :][:4], data[len(self._head) + 4 :]
        if len(body) % 4 == 0 and check == zlib.crc32(body).to_bytes(4, "little"):
            found = np.frombuffer(body, "<i4")
            if len(found) == 0 or (found.min() >= SEPARATOR and found.max() < self._size):
                return array("i", found.tolist())
        log.warning("the lookup store %s is damaged; a new one will be made", self._path)
        return array("i")

    def _refuse(self, why: str) -> array[int]:
        log.warning("the lookup store %s is left alone, nothing will be saved: %s", self._path, why)
        self._usable = False
        return array("i")

    def _write(self, tokens: array[int]) -> None:
        """All or nothing, and readable by its owner only."""
        body = np.array(tokens, "<i4").tobytes()
        file, name = tempfile.mkstemp(dir=self._path.parent, prefix=f".{self._path.name}.")
        try:
            with os.fdopen(file, "wb") as out:
                out.write(self._head + zlib.crc32(body).to_bytes(4, "little") + body)
                out.flush()
                os.fsync(out.fileno())
            os.replace(name, self._path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(name)
            raise


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Reading and writing as one, among all engines on this machine. The file itself is replaced, so its folder is locked."""
    import fcntl  # not everywhere; only who keeps a store needs it

    file = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        os.close(file)
