"""A draft whose vocabulary is not the target's guesses through text.

It reads the committed text in its own tokens and writes on, greedily, in a chain of them; the text of that chain is cut into the
target's tokens. A token is offered once its word is complete, since the rest of a word changes how it is cut; beside it stand
the draft's other guesses, where they begin at the same place and are one token for the target too. Guesses are all that
crosses the bridge: the answer is as exact as with any other draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import NamedTuple

from duodecoding.backends.base import Draft, Leaf, Vocabulary
from duodecoding.drafters.growth import Growth
from duodecoding.drafters.model import ModelDrafter
from duodecoding.sampling import Guess
from duodecoding.tree import Node
from duodecoding.types import SamplingParams

LONGEST = 16  # tokens of the draft ahead of the committed text
RECUT = 4  # its last tokens that are cut anew when text is added: a word may have been cut in its middle
CERTAIN = 0.98  # chance of a token that the chain had spelt out before it began
UNLIKELY = 0.003  # a path that is not worth a draft step
MARGIN = 12  # bytes that show where a token ends, in writing without spaces
ANCHOR = "\n"  # some tokenizers put a space before a text, but not behind this


class Link(NamedTuple):
    """One token of the chain."""

    key: int
    token: int
    text: bytes
    p: float
    others: Sequence[Guess]  # the draft's other guesses in its place


class BridgeDrafter(ModelDrafter):
    """Tree and calibration are those of any draft model; what follows a leaf is read off the chain."""

    def __init__(self, draft: Draft, target: Vocabulary) -> None:
        super().__init__(draft, vocab_limit=target.size)
        self._target, self._names = target, target.texts()
        ends = target.tokenize(target.eos_text, special=True, bos=False)
        self._end = ends[0] if len(ends) == 1 and ends[0] in target.end_tokens else None
        self._twins: dict[int, int | None] = {}
        self.steps = 0  # of the draft, in all answers

    def open(self, prompt: Sequence[int], params: SamplingParams, growth: Growth, unread: int = 0) -> None:  # noqa: ARG002 - as any drafter's
        # Noise, penalties and biases belong to the target's ids; the draft's own ids mean other tokens.
        super().open(prompt, SamplingParams(), growth, unread)

    def can_read(self, tokens: Sequence[int], position: int) -> bool:
        return position < self._draft.context - 1 and min(tokens) >= 0 and max(tokens) < self._target.size

    def _start(self, prompt: Sequence[int], unread: int) -> None:
        self._links = count(1)
        self._reset(self._read_prompt(prompt[unread:]), b"")

    def _reset(self, ids: list[int], behind: bytes) -> None:
        self._ids = ids  # the draft's context
        self._behind = behind  # committed text behind it: what is left of a character, or lies inside a drafted token
        self._chain: list[Link] = []
        self._root: int | None = None  # key of the context's last token, once it is read
        self._ended: float | None = None  # the draft wants to end behind the chain, as likely as that
        self._draft.open(ids)

    def _read_prompt(self, prompt: Sequence[int]) -> list[int]:
        """With control tokens by their names, which the draft may know."""
        begin = self._target.tokenize("", special=False, bos=True)
        rest = prompt[len(begin) :] if list(prompt[: len(begin)]) == begin else prompt
        data = b"".join(self._target.piece(token) or self._names[token].encode() for token in rest)
        vocabulary = self._draft.vocabulary
        ids = vocabulary.tokenize(data.decode("utf-8", "ignore"), special=True, bos=True)
        return ids or vocabulary.tokenize(ANCHOR, special=False, bos=False)

    # What was committed

    def _forget(self, tokens: Sequence[int], path: Sequence[int], alive: Sequence[int]) -> None:  # noqa: ARG002 - keys of the tree
        self._behind += b"".join(self._target.piece(token) for token in tokens)
        self._take_over()
        if not self._chain_text().startswith(self._behind):
            self._read_again()
            self._tree.root.expanded = False  # what was found below it is of another chain

    def _take_over(self) -> None:
        """Links that the committed text has passed become context."""
        passed = 0
        while passed < len(self._chain) and self._behind.startswith(text := self._chain[passed].text):
            self._behind = self._behind[len(text) :]
            passed += 1
        if not passed:
            return
        done, self._chain = self._chain[:passed], self._chain[passed:]
        read = [link.key for link in done]
        if not self._chain and self._ended is None:
            read.pop()  # the last link was not read yet
        self._draft.commit([link.token for link in done], read, [link.key for link in self._chain[:-1]] + self._last_read())
        self._ids += [link.token for link in done]
        self._root = read[-1] if len(read) == passed else None

    def _last_read(self) -> list[int]:
        """The chain's last link, if it was read: it is when the draft wanted to end there."""
        return [self._chain[-1].key] if self._chain and self._ended is not None else []

    def _read_again(self) -> None:
        """The draft was wrong, or the text goes on where its chain ends: cut the end of the text anew."""
        vocabulary = self._draft.vocabulary
        kept = len(self._ids)
        while kept > max(1, len(self._ids) - RECUT) and vocabulary.piece(self._ids[kept - 1]):
            kept -= 1
        data = b"".join(map(vocabulary.piece, self._ids[kept:])) + self._behind
        end = whole_characters(data)
        text = data[:end]
        new = cut(vocabulary, text) or vocabulary.tokenize(text.decode("utf-8", "replace"), special=False, bos=False)
        self._reset(self._ids[:kept] + new, data[end:])

    # What may come

    def next_leaves(self) -> list[Node]:
        """The tree's node that the chain has led to so far, unless there is nothing to be had for it."""
        node, ahead, text = self._tree.root, self._behind, self._chain_text()
        while True:
            spelt = {child: ahead + self._target.piece(child.token) for child in node.children.values()}
            on_chain = [child for child, then in spelt.items() if then != ahead and text.startswith(then)]
            if not on_chain:
                break
            node = max(on_chain, key=lambda child: len(spelt[child]))
            ahead = spelt[node]
        more = self._ended is None and self._has_room()
        return [node] if (more or not node.expanded) and self._tree.probability(node) >= UNLIKELY else []

    def next_tokens(self) -> list[int]:
        """What it guesses to follow the committed text, likeliest first."""
        root = self._tree.root
        if not root.children and (leaves := self.next_leaves()):
            self.grow(leaves)
        return [child.token for child in sorted(root.children.values(), key=lambda child: -child.logp)]

    def _has_room(self) -> bool:
        return len(self._chain) < LONGEST and len(self._ids) + len(self._chain) < self._draft.context

    def _guesses(self, leaves: Sequence[Node], _floors: Sequence[float]) -> list[list[Guess]]:
        return [self._next(self._behind + self._spelt(node)) for node in leaves]

    def _spelt(self, node: Node) -> bytes:
        return b"".join(self._target.piece(token) for token in node.path(self._tree.root))

    def _next(self, ahead: bytes) -> list[Guess]:
        """The target's next token behind the context and `ahead`, if the chain goes there."""
        while True:
            text = self._chain_text()
            if not (text.startswith(ahead) or ahead.startswith(text)):
                return []
            rest = text[len(ahead) :]
            tokens = cut(self._target, rest[: whole_characters(rest)]) or []
            if tokens and (self._ended is not None or complete(rest[len(self._target.piece(tokens[0])) :])):
                return self._priced(tokens[0], len(ahead))
            if self._ended is not None:
                return [Guess(self._end, self._ended)] if text == ahead and self._end is not None and self._ended else []
            if not self._extend(ahead):
                return []

    def _extend(self, ahead: bytes) -> bool:
        """One more link, one that spells what is known already. False: the chain ends here."""
        if not self._has_room():
            return False
        last = self._chain[-1] if self._chain else None
        key = last.key if last is not None else next(self._links)
        token = last.token if last is not None else self._ids[-1]
        parent = self._chain[-2].key if len(self._chain) > 1 else self._root if last is not None else None
        self.steps += 1
        row = self._draft.expand([Leaf(key, parent, token, len(self._ids) + len(self._chain) - 1)])[0]
        if last is None:
            self._root = key
        guesses = self._sampler.guesses(row, 0, self._growth.branching, ids=self._draft.token_ids)
        return self._append(guesses, ahead[len(self._chain_text()) :])

    def _append(self, guesses: Sequence[Guess], known: bytes) -> bool:
        piece, ends = self._draft.vocabulary.piece, self._draft.vocabulary.end_tokens
        for guess in guesses:
            text = piece(guess.token)
            if text and (text.startswith(known) or known.startswith(text)):
                self._chain.append(Link(next(self._links), guess.token, text, guess.p, guesses))
                return True
            if not known and not text:
                self._ended = guess.p if guess.token in ends else 0.0
                return True
        self._ended = 0.0
        return True

    def _priced(self, token: int, begin: int) -> list[Guess]:
        """The token that the chain spells from byte `begin` on, and what else the draft could imagine there."""
        end, at, p, others = begin + len(self._target.piece(token)), 0, 1.0, list[Guess]()
        for link in self._chain:
            if begin <= at < end:
                p *= link.p
            if at == begin:
                others = [Guess(twin, g.p) for g in link.others if (twin := self._twin(g.token)) not in (None, token)]
            at += len(link.text)
        return [Guess(token, p if p < 1 else CERTAIN), *others]

    def _twin(self, token: int) -> int | None:
        """The target's token with the same text as one of the draft's, if the target cuts that text so."""
        if token not in self._twins:
            tokens = cut(self._target, self._draft.vocabulary.piece(token)) or []
            self._twins[token] = tokens[0] if len(tokens) == 1 else None
        return self._twins[token]

    def _chain_text(self) -> bytes:
        return b"".join(link.text for link in self._chain)


def cut(vocabulary: Vocabulary, data: bytes) -> list[int] | None:
    """The tokens of a text that stands in the middle of another. None: they would not spell it exactly."""
    for anchor in ("", ANCHOR):
        ids = vocabulary.tokenize(anchor + data.decode("utf-8", "replace"), special=False, bos=False)
        pieces = [vocabulary.piece(token) for token in ids]
        while pieces and sum(map(len, pieces)) > len(data):
            del pieces[0]
        if b"".join(pieces) == data:
            return ids[len(ids) - len(pieces) :]
    return None


def complete(rest: bytes) -> bool:
    """Is a token that this text follows at the end of its word, as far as one can see?"""
    return len(rest) >= MARGIN or any(space in rest for space in (b" ", b"\n", b"\t"))


def whole_characters(data: bytes) -> int:
    """How many bytes of a text that may end inside a character are complete."""
    for back in range(1, min(4, len(data) + 1)):
        lead = data[-back]
        if lead >= 0xC0:  # a character's first byte: it says how long the character is
            length = 2 + (lead >= 0xE0) + (lead >= 0xF0)
            return len(data) if back >= length else len(data) - back
        if lead < 0x80:
            break
    return len(data)
