"""Lookup: what followed the same words earlier, in this conversation or in a store of earlier ones. No model."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from duodecoding.drafters.automaton import SuffixAutomaton
from duodecoding.drafters.record import Record
from duodecoding.drafters.store import LIMIT, SEPARATOR, Store
from duodecoding.sampling import Luck
from duodecoding.tree import Proposal
from duodecoding.types import Source

KEYS_FROM = 1 << 40  # far from the keys of a draft model
CHAINS = 2  # different continuations
LONGEST = 20  # tokens of one
FLOOR = 0.01  # no path less likely than this
# How often a copied token is right, by the length of the match in tokens (1, 2, … 8 or more); a start, experience does the rest.
ONLY = (0.3, 0.6, 0.7, 0.78, 0.82, 0.84, 0.86, 0.92)  # nothing else ever followed
MOSTLY = (0.45, 0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8)  # more often than all else together
SOMETIMES = (0.1, 0.2, 0.25, 0.3, 0.35, 0.4, 0.4, 0.4)
LENGTHS = len(ONLY)
FEW = 64  # tokens behind the text that can be looked up without reading them


class LookupDrafter:
    """Copies from the latest places where the longest match was followed by its most frequent followers.

    How likely a copied token is depends on the length of the match and on what else followed it. A token that was right makes
    the match longer, so a chain grows surer along its way.
    """

    def __init__(self, store: Store | None = None) -> None:
        self._store = store
        self._text = SuffixAutomaton(store.tokens if store is not None else ())
        self._saved = self._start = len(self._text.tokens)  # what is in the store already; where the conversation begins
        self._unread: list[int] = []  # of the conversation, not in the text yet
        self._key = KEYS_FROM
        self.record = Record(ONLY + MOSTLY + SOMETIMES)
        self._luck: Luck | None = None
        # The last guess: kind and length of the match; tokens, to be judged; how many of them were guessed; the last one's key.
        self._chains: list[tuple[int, int, list[int], int, int]] = []
        self._standing: list[tuple[list[int], int]] = []  # what is left of them below the root, if they came true: tokens, last key

    def open(self, prompt: Sequence[int], luck: Luck | None = None) -> None:
        """The prompt is read with the first guess, or before it: the first token does not wait for it. `luck`: of an answer at a
        temperature."""
        self.read()
        self._luck = luck
        self._chains, self._standing = [], []
        known = self._text.tokens[self._start :]
        if not known or array("i", prompt[: len(known)]) != known:  # not the next turn of the same conversation
            known = array("i")
            self._begin()
        self._unread = list(prompt[len(known) :])

    def read(self) -> None:
        """What was committed, into the text. Guesses do it where they must; better when there is time."""
        self._text.extend(self._unread)
        self._unread = []

    def _begin(self) -> None:
        """A new conversation. Without a store the last one is forgotten."""
        if self._store is None:
            self._text = SuffixAutomaton()
        elif len(self._text.tokens) > 2 * LIMIT:
            self.close()
            self._text = SuffixAutomaton(self._text.tokens[-LIMIT:])
            self._saved = LIMIT
        if self._text.tokens:
            self._text.extend([SEPARATOR])
        self._start = len(self._text.tokens)

    def commit(self, tokens: Sequence[int]) -> None:
        new = len(tokens)
        self._standing = [(chain[new:count], last) for _, _, chain, count, last in self._chains if chain[:new] == list(tokens)]
        for kind, length, chain, _, _ in self._chains:
            self._judge(kind, length, chain, tokens)
        self._chains = []
        self._unread += tokens

    def _judge(self, kind: int, length: int, chain: Sequence[int], tokens: Sequence[int]) -> None:
        for token, right in zip(chain, tokens, strict=False):
            self.record.observe(kind + min(length, LENGTHS) - 1, token == right)
            if token != right:
                return
            kind, length = 0, length + 1

    def guess(self, floor: float = 0.0, *, again: bool = True, in_haste: bool = False) -> list[Proposal]:
        """Chains below the root. None goes on where its path is less likely than `floor`. Not `again`: without the beginning of one
        that was guessed before the last commit and came true; it is in the tree. `in_haste`: a few tokens that were committed last
        may stay unread; what follows them within themselves is not found then."""
        if again:
            self._standing = []
        floor = max(floor, FLOOR)
        state = length = 0
        if in_haste and len(self._unread) <= FEW:
            state, length = self._text.match_with(self._unread)
        followers = self._text.followers(state) if length > 0 else []
        if not followers:
            self.read()
            state, length = self._text.match
            followers = self._text.followers(state) if length > 0 else []
        found: list[Proposal] = []
        if followers:
            total = sum(times for times, _, _ in followers)
            for times, place, _ in followers[:CHAINS]:
                kind = 0 if len(followers) == 1 else LENGTHS if 2 * times > total else 2 * LENGTHS
                self._chains.append((kind, length, *self._chain(found, place, kind, length, floor)))
        return found

    def _chain(self, found: list[Proposal], place: int, kind: int, length: int, floor: float) -> tuple[list[int], int, int]:
        """Copy from a place. Returns the tokens, among them those that have no luck; how many are guessed; the key of the last."""
        text, chances, key, source, make = self._text.tokens, self.record.chances, self._key, Source.LOOKUP, Proposal._make
        chain = text[place : place + LONGEST].tolist() + self._unread[: max(0, place + LONGEST - len(text))]
        while len(chain) < LONGEST:  # at the end of the text it goes on with the copy itself
            chain += chain[: LONGEST - len(chain)]
        position, luck, there = len(text) + len(self._unread) - self._start, self._luck, 0
        parent, path = 1 - position, 1.0
        for tokens, last in self._standing:
            if tokens and chain[: len(tokens)] == tokens:
                parent, there = last, len(tokens)
        likely: list[float] = []  # on average; these are judged, lucky or not
        for token in chain:
            p = chances[kind + (length if length < LENGTHS else LENGTHS) - 1]
            path *= p
            if (path < floor or token == SEPARATOR) and len(likely) >= there:
                break
            likely.append(p)
            kind, length = 0, length + 1
        count, path = 0, 1.0
        for token, average in zip(chain, likely, strict=False):
            p = average if luck is None else luck.chance(average, position + count, token)
            path *= p
            if path < floor and count >= there:
                break
            count += 1
            if count > there:
                key += 1
                found.append(make((key, parent, token, p, source)))
                parent = key
        self._key = key
        return chain[: len(likely)], count, parent

    def close(self) -> None:
        """Save what the store does not have yet."""
        if self._store is not None:
            self.read()
            self._store.save(self._text.tokens[self._saved :])
            self._saved = len(self._text.tokens)
