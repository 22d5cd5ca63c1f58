"""What targets whose logits come to Python have in common: whose work it is, and the token after each node of a pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from duodecoding.backends.base import Conversation
from duodecoding.core import Choose
from duodecoding.errors import UsageError
from duodecoding.sampling import Choice, Row
from duodecoding.tree import ROOT, PassNode

C = TypeVar("C", bound=Conversation)


def only_one(work: Sequence[tuple[Conversation, Sequence[PassNode]]], kind: type[C]) -> tuple[C, Sequence[PassNode]]:
    """The conversation that a pass is for, and its guesses."""
    if len(work) != 1:
        raise UsageError(f"{len(work)} conversations in one pass", "this backend serves one at a time")
    conversation, nodes = work[0]
    if not isinstance(conversation, kind):
        raise UsageError("this conversation belongs to another backend")
    return conversation, nodes


def depths_of(nodes: Sequence[PassNode]) -> list[int]:
    """How far below the root each node is."""
    depth = [0] * len(nodes)
    for i, node in enumerate(nodes):
        depth[i] = 1 if node.parent == ROOT else depth[node.parent] + 1
    return depth


def chooser(conversation: Conversation, nodes: Sequence[PassNode], rows: Sequence[Row] | Row) -> Choose:
    """`rows`: the logits after the root and after each node."""
    end = len(conversation.tokens)
    if not nodes:
        return lambda _: conversation.sampler.choose(rows[0], end)
    depth = depths_of(nodes)

    def choose(i: int) -> Choice:
        path: list[int] = []
        at = i
        while at != ROOT:
            path.append(nodes[at].token)
            at = nodes[at].parent
        path.reverse()
        return conversation.sampler.choose(rows[i + 1], end + (0 if i == ROOT else depth[i]), path)

    return choose
