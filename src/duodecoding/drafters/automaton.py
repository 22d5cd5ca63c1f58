"""A suffix automaton of a growing text: after every token it knows the longest end of the text that occurred before, and what
followed it. Amortised constant time a token, 100 to 180 bytes a token. Pure.

A state stands for the words (runs of tokens) that end at the same places. Nearly all states are followed by one token only, the
one behind their first place, so successors need a dictionary only where the text branched.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from itertools import islice

Follower = tuple[int, int, int]  # a token that followed a word: how often, the latest place, the token

START = 0  # the state of the empty word
DEEPEST = 16  # states, longest words first, that a new token counts for; only a text that repeats itself has more
WIDEST = 24  # successors looked at, newest first


class SuffixAutomaton:
    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self.tokens = array("i")
        self._link, self._length = array("i", [-1]), array("i", [0])  # to the state of the longest shorter ending; longest word
        self._first, self._after = array("i", [-1]), array("i", [-1])  # where its words ended first; the state behind that
        self._others: dict[int, dict[int, int]] = {}  # state -> token -> state, for tokens that followed only later
        self._count, self._latest = array("i", [0]), array("i", [-1])
        self._whole = START  # the state of the whole text
        self.extend(tokens)

    @property
    def match(self) -> tuple[int, int]:
        """The longest end of the text that occurred before: its state, and its length in tokens."""
        state = self._link[self._whole]
        return (state, self._length[state]) if state > START else (START, 0)

    def match_with(self, tokens: Iterable[int]) -> tuple[int, int]:
        """The same if these tokens came next, without reading them: the longest end of all that occurs in the text as it is."""
        link, length = self._link, self._length
        state, long = self.match
        for token in tokens:
            while (after := self._step(state, token)) < 0 and state > START:
                state = link[state]
                long = length[state]
            state, long = (after, long + 1) if after >= 0 else (START, 0)
        return state, long

    def followers(self, state: int) -> list[Follower]:
        """What came after the words of a state, the most frequent first, of equals the latest."""
        count, latest = self._count, self._latest
        found = [(count[after], latest[after], token) for token, after in self._successors(state)]
        if len(found) > 1:
            found.sort(reverse=True)
        return found

    def _successors(self, state: int) -> Iterator[tuple[int, int]]:
        place = self._first[state] + 1
        if place < len(self.tokens):
            yield self.tokens[place], self._after[state]
        if others := self._others.get(state):
            yield from islice(reversed(others.items()), WIDEST)

    def extend(self, tokens: Iterable[int]) -> None:
        text, others, first, behind = self.tokens, self._others, self._first, self._after
        link, count, latest = self._link, self._count, self._latest
        for token in tokens:
            end, at = len(text), self._whole
            text.append(token)
            new = self._whole = self._state(START, end + 1, end)
            behind[at] = new  # nothing had followed the whole text
            at = link[at]
            while at >= 0:  # ever shorter words, to one that the token followed before
                known = others.get(at)
                if text[first[at] + 1] == token or (known is not None and token in known):
                    link[new] = self._shared(at, token)
                    break
                if known is None:
                    others[at] = {token: new}
                else:
                    known[token] = new
                at = link[at]
            state, left = new, DEEPEST
            while state > START and left > 0:
                count[state] += 1
                latest[state] = end
                state, left = link[state], left - 1

    def _shared(self, at: int, token: int) -> int:
        """The state of the longest word of `at` and the token, alone: it has now ended at one more place than longer words."""
        after = self._step(at, token)
        return after if self._length[at] + 1 == self._length[after] else self._split(at, token, after)

    def _step(self, state: int, token: int) -> int:
        """The state of a word with one token more; -1: it never occurred."""
        place = self._first[state] + 1
        if place < len(self.tokens) and self.tokens[place] == token:
            return self._after[state]
        others = self._others.get(state)
        return -1 if others is None else others.get(token, -1)

    def _state(self, link: int, length: int, first: int) -> int:
        self._link.append(link)
        self._length.append(length)
        self._first.append(first)
        self._after.append(-1)
        self._count.append(0)
        self._latest.append(-1)
        return len(self._link) - 1

    def _split(self, at: int, token: int, old: int) -> int:
        """The shorter words of state `old` have now ended at one more place than its longer ones: a state of their own."""
        link, others = self._link, self._others
        new = self._state(link[old], self._length[at] + 1, self._first[old])
        for values in (self._after, self._count, self._latest):
            values[new] = values[old]
        if old in others:
            others[new] = others[old].copy()
        link[old] = new
        while at >= 0 and self._step(at, token) == old:
            if self.tokens[self._first[at] + 1] == token:
                self._after[at] = new
            else:
                others[at][token] = new
            at = link[at]
        return new
