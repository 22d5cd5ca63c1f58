"""Models without weights, for tests: logits are a fixed function of the token history.

Both roles check that they are used as the Protocols say and raise `ProtocolBroken` otherwise, so that an engine which happens to
give the right answer for the wrong reasons is found out.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Sequence
from functools import cache

import numpy as np

from duodecoding.backends.base import Conversation, Leaf
from duodecoding.core import Choose
from duodecoding.errors import Interrupted, UsageError
from duodecoding.sampling import Choice, Ids, Row, Sampler
from duodecoding.tree import ROOT, PassNode
from duodecoding.types import SamplingParams

History = tuple[int, ...]
Script = Callable[[History], Row]  # logits (vocab,) after a history

BEGIN, END = 0, 1
# Letters, words, and bytes that make a character only together (of é, €, 😀).
PIECES = b"a|b|c| |\n|ab|bc| a|\xc3\xa9|\xc3|\xa9|\xe2|\x82\xac|\xf0\x9f|\x98|\x80|d|e|f|g|h|i|j|k|l|m|n|o|the |.".split(b"|")


class ProtocolBroken(AssertionError):
    """The engine used a model in a way that the Protocols rule out."""


def demand(holds: bool, what: str) -> None:
    if not holds:
        raise ProtocolBroken(what)


class ScriptedVocabulary:
    """Token 0 begins a text and token 1 ends it; then come `PIECES`, then characters of the private use area."""

    chat_template: str | None = "{% for message in messages %}{{ message.content }}{% endfor %}"
    bos_text, eos_text = "<begin>", "<end>"

    def __init__(self, size: int = 32) -> None:
        self.size = size
        self.end_tokens = frozenset({END})
        self._pieces = [b"", b"", *PIECES, *(chr(0xE000 + i).encode() for i in range(size))][:size]

    def tokenize(self, text: str, *, special: bool, bos: bool) -> list[int]:
        """The longest piece first. `special`: `<begin>` and `<end>` are tokens."""
        ids, rest = [BEGIN] if bos else [], text.encode()
        known = [*enumerate(self._pieces), *([(BEGIN, b"<begin>"), (END, b"<end>")] if special else [])]
        while rest:
            length, id = max(((len(piece), id) for id, piece in known if rest.startswith(piece)))
            if not length:
                raise UsageError(f"the scripted vocabulary has nothing for {rest[:4]!r}")
            ids, rest = [*ids, id], rest[length:]
        return ids

    def piece(self, token: int) -> bytes:
        demand(0 <= token < self.size, f"token {token} is outside the vocabulary")
        return self._pieces[token]

    def texts(self) -> list[str]:
        return [self.bos_text, self.eos_text, *(piece.decode("latin-1") for piece in self._pieces[2:])]


def random_script(size: int, seed: int = 0, *, memory: int = 3, spread: float = 2.0) -> Script:
    """Normal logits that depend on the last `memory` tokens, so that texts repeat themselves."""

    @cache
    def row(recent: History) -> Row:
        return (np.random.default_rng([seed, *recent]).standard_normal(size) * spread).astype(np.float32)

    return lambda history: row(history[-memory:])


def disagreeing(script: Script, other: Script, share: float, seed: int = 0) -> Script:
    """Like `script`, except for `share` of the histories: there it says what `other` says, and is as sure of it."""

    @cache
    def differs(recent: History) -> bool:
        return bool(np.random.default_rng([seed, 7, *recent]).random() < share)

    return lambda history: (other if differs(history[-3:]) else script)(history)


def table_script(rows: Sequence[Sequence[float]]) -> Script:
    """Given probabilities of the next token: row `last token` modulo the number of rows."""
    with np.errstate(divide="ignore"):
        logits = np.log(np.asarray(rows, dtype=np.float64)).astype(np.float32)  # (rows, vocab)
    return lambda history: logits[history[-1] % len(logits)]


class ScriptedConversation:
    def __init__(self, target: ScriptedTarget, prompt: Sequence[int], params: SamplingParams) -> None:
        self.tokens = list(prompt)
        same = [mine == theirs for mine, theirs in zip(target.cells, prompt[:-1], strict=False)]
        self.reused = same.index(False) if False in same else len(same)
        self.sampler = Sampler(params, prompt, target.vocabulary.size)
        self.said: list[int] | None = None  # the target's tokens along the path of the pass that waits for its commit
        self._target = target

    def commit(self, tokens: Sequence[int]) -> None:
        if self.said is None or not tokens:
            raise ProtocolBroken("a commit without a pass, or of nothing")
        right = not self._target.strict or list(tokens) == self.said[: len(tokens)]
        demand(right, f"committed {list(tokens)}, the target said {self.said}")
        self.sampler.commit(tokens)
        self.tokens.extend(tokens)
        self.said = None
        demand(len(self.tokens) <= self._target.context, "the answer is longer than the context")
        self._target.cells = self.tokens[:-1]


class ScriptedTarget:
    """`strict`: hold the acceptance rule to account too. Without it only the answer can show that the rule is wrong."""

    weights_bytes = 0
    pass_sizes: Sequence[int] = ()
    engine = "scripted"
    overlaps = False

    def __init__(self, vocabulary: ScriptedVocabulary, script: Script, *, context: int = 256, strict: bool = True) -> None:
        self.vocabulary, self.context, self.strict = vocabulary, context, strict
        self.cells: list[int] = []  # tokens in the KV cache
        self.passes: list[int] = []  # guesses of each pass
        self._script = script
        self._owner: ScriptedConversation | None = None
        self._aborted = self._closed = False

    def open(self, prompt: Sequence[int], params: SamplingParams) -> ScriptedConversation:
        demand(0 < len(prompt) < self.context, f"a prompt of {len(prompt)} tokens in a context of {self.context}")
        self._aborted = False
        self._owner = ScriptedConversation(self, prompt, params)
        self.cells = list(prompt[: self._owner.reused])
        return self._owner

    def verify(self, work: Sequence[tuple[Conversation, Sequence[PassNode]]]) -> list[Choose]:
        demand(len(work) == 1 and not self._closed, "one conversation at a time, and none after the end")
        conversation, nodes = work[0]
        if not isinstance(conversation, ScriptedConversation) or conversation is not self._owner:
            raise ProtocolBroken("the conversation belongs to another target or was replaced by a newer one")
        demand(conversation.said is None, "a second pass before the commit of the first")
        if self._aborted:
            raise Interrupted("the pass was stopped")
        self.passes.append(len(nodes))
        return [self._choose(conversation, self._paths(conversation, nodes), nodes)]

    def _paths(self, conversation: ScriptedConversation, nodes: Sequence[PassNode]) -> list[History]:
        demand(len(set(nodes)) == len(nodes), "the same guess twice in a pass")
        demand(all(0 <= node.token < self.vocabulary.size for node in nodes), "a guess outside the vocabulary")
        paths: list[History] = []
        for i, node in enumerate(nodes):
            demand(ROOT <= node.parent < i, f"guess {i} stands before its parent {node.parent}")
            paths.append((*(paths[node.parent] if node.parent != ROOT else ()), node.token))
            demand(len(conversation.tokens) + len(paths[-1]) < self.context, f"guess {i} leaves no room in the context")
        return paths

    def _choose(self, conversation: ScriptedConversation, paths: list[History], nodes: Sequence[PassNode]) -> Choose:
        said: list[int] = []
        conversation.said, start, asked = said, tuple(conversation.tokens), [ROOT]

        def choose(i: int) -> Choice:
            if self.strict and (said or i != ROOT):
                demand(bool(said) and nodes[i] == (asked[-1], said[-1]), f"asked about guess {i}, not on the accepted path")
            path = () if i == ROOT else paths[i]
            choice = conversation.sampler.choose(self._script(start + path), len(start) + len(path), path)
            said.append(choice.token)
            asked.append(i)
            return choice

        return choose

    def done(self) -> bool:
        return True

    def finish(self) -> None:
        pass

    def abort(self) -> None:
        self._aborted = True

    def close(self) -> None:
        self._closed = True


class ScriptedDraft:
    """Remembers what each expanded node stands for, as a real draft does in its KV cache."""

    def __init__(self, vocabulary: ScriptedVocabulary, script: Script, *, context: int = 256, sequences: int = 128) -> None:
        self.vocabulary, self.context = vocabulary, context
        self.token_ids: Ids | None = None
        self.room = min(96, sequences)
        self.steps: list[int] = []  # leaves of each step
        self._script, self._sequences = script, sequences
        self._flag: mmap.mmap | None = None

    def stop_on(self, flag: mmap.mmap) -> None:
        self._flag = flag

    def open(self, prompt: Sequence[int], unread: int = 0) -> None:
        demand(0 <= unread < len(prompt), "an empty prompt, or nothing of it to read")
        self._tokens = tuple(prompt)
        self._expanded: dict[int, History] = {}  # node -> history up to and with it
        self._keys: set[int] = set()  # of all nodes ever expanded

    def read(self) -> bool:
        return False

    def expand(self, leaves: Sequence[Leaf]) -> list[Row]:
        if self._flag is not None and self._flag[0]:
            raise Interrupted("the step was stopped")
        new = {leaf.key: self._history(leaf) for leaf in leaves}
        demand(len(new) == len(leaves) > 0, "a step without leaves, or a leaf twice")
        demand(self._keys.isdisjoint(new) and not set(new.values()) & set(self._expanded.values()), "a node expanded again")
        self._keys.update(new)
        self._expanded.update(new)
        demand(len(self._expanded) <= self._sequences, "more expanded nodes than sequences")
        self.steps.append(len(leaves))
        return [self._script(history) for history in new.values()]

    def score(self, tokens: Sequence[int], start: int) -> Iterator[Row]:
        yield np.stack([self._script(tuple(tokens[: end + 1])) for end in range(start, len(tokens))])

    def _history(self, leaf: Leaf) -> History:
        if leaf.parent is not None and leaf.parent not in self._expanded:
            raise ProtocolBroken(f"leaf {leaf.key} before its parent {leaf.parent}")
        history = self._tokens if leaf.parent is None else (*self._expanded[leaf.parent], leaf.token)
        right = (leaf.token, leaf.position) == (history[-1], len(history) - 1)
        demand(right and leaf.position < self.context, f"{leaf} does not fit its path {history} or the context")
        return history

    def commit(self, tokens: Sequence[int], path: Sequence[int], alive: Sequence[int]) -> None:
        now = (*self._tokens, *tokens)
        key_of = {history: key for key, history in self._expanded.items()}
        on_path = [key_of.get(now[:end]) for end in range(len(self._tokens) + 1, len(now) + 1)] + [None]
        right = on_path[: on_path.index(None)]
        below = {key for key, history in self._expanded.items() if len(history) > len(now) and history[: len(now)] == now}
        demand(list(path) == right, f"path {list(path)}, but {list(tokens)} begins with the expanded nodes {right}")
        demand(sorted(alive) == sorted(below), f"alive {sorted(alive)}, but below the new root are {sorted(below)}")
        kept = below | {key_of[now]} if now in key_of else below
        self._expanded = {key: self._expanded[key] for key in kept}
        self._tokens = now

    def close(self) -> None:
        self._expanded = {}
