from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds import World, parameters

from duodecoding import SamplingParams
from duodecoding.backends import scripted
from duodecoding.backends.base import Leaf
from duodecoding.drafters.growth import BestFirst
from duodecoding.drafters.model import ModelDrafter
from duodecoding.sampling import Sampler
from duodecoding.tree import PassNode, Proposal, TokenTree

# A draft model: the scripted draft checks every step and commit.


def grown(drafter: ModelDrafter) -> list[Proposal]:
    leaves = drafter.next_leaves()
    return drafter.grow(leaves) if leaves else []


@settings(max_examples=200)
@given(
    st.integers(0, 5000), parameters(), st.integers(1, 6), st.integers(1, 5), st.sampled_from([12, 40, 400]), st.integers(0, 2**32)
)
def test_growth_and_commits_in_any_order(
    seed: int, params: SamplingParams, width: int, branching: int, context: int, luck: int
) -> None:
    """Steps and commits at random, along guesses and beside them; a second tree fed with the proposals stays the same."""
    dice = random.Random(luck)
    world = World(seed=seed, draft_context=context)
    drafter = ModelDrafter(world.draft(), vocab_limit=world.size)
    drafter.open(world.prompt, params, BestFirst(width, branching=branching))
    tree = TokenTree(world.prompt)
    keys: set[int] = set()
    for _ in range(25):
        for _ in range(dice.randrange(5)):
            proposals = grown(drafter)
            assert keys.isdisjoint(proposal.key for proposal in proposals)
            assert len(proposals) <= width * branching
            assert all(0 <= proposal.token < world.size for proposal in proposals)
            keys.update(proposal.key for proposal in proposals)
            assert all(tree.add(proposal) is not None for proposal in proposals)
        tokens, node = [], tree.root
        while node.children and dice.random() < 0.7:
            node = dice.choice(list(node.children.values()))
            tokens.append(node.token)
        tokens.append(dice.randrange(world.size))
        tree.commit(tokens)
        drafter.commit(tokens)
        assert sorted((n.key, n.token) for n in tree.select(999)) == sorted((n.key, n.token) for n in drafter._tree.select(999))


def test_proposals_are_the_sampler_s_guesses_at_the_right_place() -> None:
    world = World(seed=3, share=0.0)
    params = SamplingParams(temperature=0.9, seed=4, repetition_penalty=1.3, presence_penalty=0.4)
    drafter = ModelDrafter(world.draft())
    drafter.open(world.prompt, params, BestFirst(1, branching=3))
    first = grown(drafter)
    second = grown(drafter)
    script = scripted.random_script(world.size, world.seed, memory=world.memory)
    best = max(first, key=lambda proposal: proposal.p)
    sampler = Sampler(params, world.prompt, world.size)
    after_root = sampler.guesses(script(world.prompt), len(world.prompt), 3)
    after_best = sampler.guesses(script((*world.prompt, best.token)), len(world.prompt) + 1, 3, [best.token])
    assert [p.token for p in first] == [guess.token for guess in after_root]
    assert [p.token for p in second] == [guess.token for guess in after_best]
    assert {p.parent for p in first} == {-(len(world.prompt) - 1)}
    assert {p.parent for p in second} == {best.key}


def test_no_guess_beyond_the_target_s_vocabulary() -> None:
    vocabulary = scripted.ScriptedVocabulary(20)
    padded = np.linspace(0, 5, 20, dtype=np.float32)  # the padding is what it likes best
    drafter = ModelDrafter(scripted.ScriptedDraft(vocabulary, lambda history: padded), vocab_limit=18)
    drafter.open([0], SamplingParams(), BestFirst(1))
    assert [proposal.token for proposal in grown(drafter)] == [17, 16]


def test_a_path_too_unlikely_for_a_float_grows_too() -> None:
    """Where nobody sets a floor, as while steps are timed, a draft without any idea gets that far."""
    drafter = ModelDrafter(World().draft())
    drafter.open([0, 5, 7], SamplingParams(), BestFirst(1))
    drafter.grow(drafter.next_leaves())
    [leaf] = drafter.next_leaves()
    leaf.logp = -1e4
    assert drafter._tree.probability(leaf) == 0
    assert drafter.grow([leaf])


def test_growth_ends_with_the_draft_s_context() -> None:
    world = World(draft_context=6, prompt=(0, 5, 7), share=0.0)
    draft = world.draft()
    drafter = ModelDrafter(draft)
    drafter.open(world.prompt, SamplingParams(), BestFirst(4))
    steps = 0
    while grown(drafter):
        steps += 1
        assert steps < 50
    drafter.commit([2, 3, 4])
    assert drafter.next_leaves() == []


def test_growth_ends_where_the_draft_cannot_keep_more_paths_apart() -> None:
    world = World(draft_context=1000)
    draft = world.draft()
    drafter = ModelDrafter(draft)
    drafter.open(world.prompt, SamplingParams(temperature=1.0), BestFirst(7))
    while grown(drafter):
        pass
    assert sum(draft.steps) == draft.room
    drafter.commit([2])
    assert drafter.next_leaves() != []


def test_a_second_conversation_starts_afresh() -> None:
    world = World(seed=8)
    drafter = ModelDrafter(world.draft())
    drafter.open(world.prompt, SamplingParams(), BestFirst(2))
    first = [grown(drafter) for _ in range(3)]
    drafter.commit([first[0][0].token, 2, 2])
    grown(drafter)
    drafter.open(world.prompt, SamplingParams(), BestFirst(2))
    again = [grown(drafter) for _ in range(3)]
    assert [p.token for p in again[0]] == [p.token for p in first[0]]


# The scripted models hold their users to the Protocols


def scripted_draft() -> scripted.ScriptedDraft:
    draft = World().draft()
    draft.open([0, 5])
    return draft


ROOT_LEAF = Leaf(-1, None, 5, 1)


@pytest.mark.parametrize(
    "steps",
    [
        [[Leaf(1, -1, 4, 2)]],  # before its parent
        [[ROOT_LEAF, Leaf(1, -1, 4, 2)]],  # in the same step as its parent
        [[ROOT_LEAF], [ROOT_LEAF]],
        [[Leaf(-1, None, 6, 1)]],  # the root is another token
        [[ROOT_LEAF], [Leaf(1, -1, 4, 3)]],  # a position too far
        [[ROOT_LEAF], [Leaf(1, -1, 4, 2), Leaf(2, -1, 6, 2)], [Leaf(3, -1, 4, 2)]],  # a path twice
        [[]],
    ],
)
def test_a_scripted_draft_refuses_wrong_leaves(steps: list[list[Leaf]]) -> None:
    draft = scripted_draft()
    *right, wrong = steps
    for leaves in right:
        draft.expand(leaves)
    with pytest.raises(scripted.ProtocolBroken):
        draft.expand(wrong)


@pytest.mark.parametrize(
    ("tokens", "path", "alive"),
    [
        ([4, 7], [], []),  # 1 was right
        ([4, 7], [1, 2], []),  # 2 was not
        ([4], [1], []),  # 2 is alive
        ([4], [1], [2, 3]),  # 3 is not
        ([6], [3], [1]),
    ],
)
def test_a_scripted_draft_refuses_wrong_commits(tokens: list[int], path: list[int], alive: list[int]) -> None:
    draft = scripted_draft()
    draft.expand([ROOT_LEAF])
    draft.expand([Leaf(1, -1, 4, 2), Leaf(3, -1, 6, 2)])
    draft.expand([Leaf(2, 1, 5, 3)])
    with pytest.raises(scripted.ProtocolBroken):
        draft.commit(tokens, path, alive)


def test_a_scripted_draft_takes_right_commits() -> None:
    draft = scripted_draft()
    draft.expand([ROOT_LEAF])
    draft.expand([Leaf(1, -1, 4, 2), Leaf(3, -1, 6, 2)])
    draft.expand([Leaf(2, 1, 5, 3)])
    draft.commit([4], [1], [2])
    draft.expand([Leaf(5, 2, 9, 4)])
    draft.commit([5, 9, 9], [2, 5], [])
    draft.expand([Leaf(-5, None, 9, 5)])


def test_a_scripted_target_refuses_wrong_passes() -> None:
    target = World(context=8).target()
    conversation = target.open([0, 5], SamplingParams())
    for nodes in ([(0, 4)], [(-1, 4), (-1, 4)], [(-1, 99)], [(-1, 2), (0, 2), (1, 2), (2, 2), (3, 2), (4, 2)]):
        with pytest.raises(scripted.ProtocolBroken):
            target.verify([(conversation, [PassNode(*node) for node in nodes])])
    with pytest.raises(scripted.ProtocolBroken):
        conversation.commit([3])
    choose = target.verify([(conversation, [])])[0]
    with pytest.raises(scripted.ProtocolBroken):
        target.verify([(conversation, [])])
    token = choose(-1).token
    with pytest.raises(scripted.ProtocolBroken):
        conversation.commit([token + 1])
    conversation.commit([token])
    target.open([0], SamplingParams())
    with pytest.raises(scripted.ProtocolBroken):
        target.verify([(conversation, [])])
