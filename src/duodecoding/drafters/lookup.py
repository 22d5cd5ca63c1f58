"""Lookup: what followed the same words earlier in the context. No model, no cost worth counting. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import count

from duodecoding.planner import Calibration
from duodecoding.tree import Proposal
from duodecoding.types import Source

LONGEST, SHORTEST = 6, 2  # tokens of context that must agree
CONTINUATIONS = 2  # different places to copy from
# How often a copied token is right, by the length of the match; a start, the engine learns the rest.
PRIOR = {2: 0.35, 3: 0.5, 4: 0.62, 5: 0.7, 6: 0.8}
KEYS_FROM = 1 << 40  # far from the keys of a draft model


class LookupDrafter:
    """An index of every n-gram's latest places in prompt and answer."""

    def __init__(self, length: int = 8) -> None:
        self._length = length
        self._keys = count(KEYS_FROM)
        self.calibration = Calibration()
        self._chains: list[list[tuple[int, float]]] = []  # of the last guess: token, probability before calibration

    def open(self, prompt: Sequence[int]) -> None:
        self._tokens: list[int] = []
        self._places: dict[tuple[int, ...], deque[int]] = {}
        self._chains = []
        self._learn(prompt)

    def commit(self, tokens: Sequence[int]) -> None:
        for chain in self._chains:
            for (token, p), right in zip(chain, tokens, strict=False):
                self.calibration.observe(p, token == right)
                if token != right:
                    break
        self._chains = []
        self._learn(tokens)

    def _learn(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self._tokens.append(token)
            end = len(self._tokens)
            for n in range(SHORTEST, min(LONGEST, end) + 1):
                gram = tuple(self._tokens[end - n :])
                self._places.setdefault(gram, deque(maxlen=CONTINUATIONS + 1)).append(end)

    def guess(self) -> list[Proposal]:
        """Chains below the root, from the longest match first."""
        self._chains = []
        found: list[Proposal] = []
        starts: set[int] = set()
        end = len(self._tokens)
        for n in range(min(LONGEST, end), SHORTEST - 1, -1):
            for place in reversed(self._places.get(tuple(self._tokens[end - n :]), ())):
                if place < end and place not in starts and len(starts) < CONTINUATIONS:
                    starts.add(place)
                    found += self._chain(place, PRIOR[n])
        return found

    def _chain(self, place: int, p: float) -> list[Proposal]:
        parent = -(len(self._tokens) - 1)
        chain = []
        said = []
        for token in self._tokens[place : place + self._length]:
            key = next(self._keys)
            chain.append(Proposal(key, parent, token, self.calibration(p), Source.LOOKUP))
            said.append((token, p))
            parent, p = key, min(0.95, p + 0.1)  # each right guess makes the next likelier
        self._chains.append(said)
        return chain
