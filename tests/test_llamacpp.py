"""The llama.cpp backend: logits that do not depend on how the work was cut into passes, bit for bit, and a cache kept linear."""

from __future__ import annotations

import gc
import mmap
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import gguf
import llama_cpp as C
import numpy as np
import pytest
import tinymodels

from duodecoding import LLM, SamplingParams
from duodecoding.backends import load_draft, load_target, read_vocabulary, scripted
from duodecoding.backends.base import Leaf, Target
from duodecoding.backends.llamacpp import MAX_SEQUENCES, LlamaModel
from duodecoding.backends.llamacpp_draft import DRAFT_SEQUENCES, LlamaDraft
from duodecoding.backends.llamacpp_target import LlamaTarget, paths_of
from duodecoding.core import walk
from duodecoding.drafters.growth import BestFirst
from duodecoding.drafters.model import ModelDrafter
from duodecoding.drafting import Drafters
from duodecoding.errors import Interrupted, ModelUnreadable, UsageError
from duodecoding.tree import ROOT, PassNode
from duodecoding.types import EngineConfig, Mode

GREEDY = SamplingParams()
TEXT = "In a small town by the sea there lived a clockmaker who could not sleep. Every night he counted the bells, and every night "
# From the root: a chain, a branch off it, and a second branch: what lies behind the chain is displaced if it is accepted.
TREE = [
    PassNode(ROOT, 338),
    PassNode(0, 260),
    PassNode(1, 2170),
    PassNode(0, 253),
    PassNode(ROOT, 1041),
    PassNode(4, 28),
    PassNode(5, 284),
]


def tokens_of(target: Target, count: int) -> list[int]:
    text = target.vocabulary.tokenize(TEXT, special=False, bos=False)
    return (text * (count // len(text) + 1))[:count]


def path_of(nodes: Sequence[PassNode], i: int) -> list[int]:
    return [] if i == ROOT else [*path_of(nodes, nodes[i].parent), nodes[i].token]


def forget(target: LlamaTarget) -> None:
    """Empty the cache."""
    target._owner = None
    target._context.cut(-1, 0)


def logits(target: LlamaTarget) -> np.ndarray:
    return target._context.logits().copy()  # (outputs, vocab)


def linear(target: LlamaTarget, prompt: Sequence[int], tokens: Sequence[int]) -> list[np.ndarray]:
    """Logits after the prompt and after each token, decoded one by one."""
    conversation = target.open(prompt, GREEDY)
    rows = []
    for token in [*tokens, 0]:
        target.verify([(conversation, [])])
        rows.append(logits(target)[0])
        conversation.commit([token])
    return rows


def check_linear(target: LlamaTarget, tokens: int) -> None:
    """The cache holds the first `tokens` committed tokens in sequence 0, and nothing else."""
    memory = target._context.memory
    assert C.llama_memory_seq_pos_max(memory, 0) == tokens - 1
    assert C.llama_memory_seq_pos_min(memory, 0) == (0 if tokens else -1)
    assert all(C.llama_memory_seq_pos_max(memory, sequence) == -1 for sequence in range(1, MAX_SEQUENCES))


# Passes


@pytest.fixture(scope="module")
def reference(poor_draft: Path) -> Iterator[LlamaTarget]:
    """A model of 6 layers: all kernels of the real one in a fifth of the time."""
    loaded = load_target(poor_draft, EngineConfig(ctx_size=1024, threads=1, backend="llamacpp"))
    assert isinstance(loaded, LlamaTarget)
    yield loaded
    loaded.close()


@pytest.mark.parametrize("context", [1, 20, 520])  # beyond 512 cells attention may split its work
def test_a_tree_pass_gives_the_logits_of_a_linear_decode(llama_target: LlamaTarget, context: int) -> None:
    prompt = tokens_of(llama_target, context)
    expected = {i: linear(llama_target, prompt, path_of(TREE, i))[-1] for i in (ROOT, 2, 3, 6)}
    between = {0: 2, 1: 2, 4: 6, 5: 6}
    for i, below in between.items():
        expected[i] = linear(llama_target, prompt, path_of(TREE, below))[len(path_of(TREE, i))]
    conversation = llama_target.open(prompt, GREEDY)
    llama_target.verify([(conversation, TREE)])
    rows = logits(llama_target)
    assert rows.shape == (1 + len(TREE), llama_target.vocabulary.size)
    for i, row in expected.items():
        assert np.array_equal(rows[i + 1], row), f"node {i}"


@pytest.mark.parametrize(
    ("accepted", "kept"), [([338, 260, 2170], 3), ([338, 253], 1), ([1041, 28, 284], 0), ([], 0), ([338], 1)], ids=str
)
@pytest.mark.parametrize("context", [20, 520])
def test_replay_after_a_commit(reference: LlamaTarget, context: int, accepted: list[int], kept: int) -> None:
    """Accepted tokens that do not lie behind the prompt in the cache are read again with the next pass."""
    prompt = tokens_of(reference, context)
    expected = linear(reference, prompt, [*accepted, 9, 338, 260])
    conversation = reference.open(prompt, GREEDY)
    reference.verify([(conversation, TREE)])
    conversation.commit([*accepted, 9])
    assert conversation.cached == context + kept
    check_linear(reference, context + kept)
    reference.verify([(conversation, TREE[:2])])
    rows = logits(reference)
    for row, right in zip(rows, expected[len(accepted) + 1 :], strict=True):
        assert np.array_equal(row, right)


@pytest.mark.parametrize("order", [[0, 4, 1, 3, 5, 2, 6], [0, 3, 1, 4, 5, 6, 2], [4, 0, 3, 1, 5, 2, 6]], ids=str)
def test_a_pass_in_any_order_of_nodes(llama_target: LlamaTarget, order: list[int]) -> None:
    """Parents before children is all that a pass promises. In the second order a leaf comes before the front goes on."""
    nodes = [PassNode(order.index(TREE[i].parent) if TREE[i].parent != ROOT else ROOT, TREE[i].token) for i in order]
    prompt = tokens_of(llama_target, 20)
    for leaf in (2, 3, 6):
        path = path_of(TREE, leaf)
        expected = linear(llama_target, prompt, [*path, 9, 11])
        conversation = llama_target.open(prompt, GREEDY)
        llama_target.verify([(conversation, nodes)])
        assert np.array_equal(logits(llama_target)[1 + order.index(leaf)], expected[len(path)])
        conversation.commit([*path, 9])
        check_linear(llama_target, conversation.cached)
        llama_target.verify([(conversation, [PassNode(ROOT, 11)])])
        assert np.array_equal(logits(llama_target)[0], expected[-2])
        assert np.array_equal(logits(llama_target)[1], expected[-1])


def test_a_prompt_in_pieces(reference: LlamaTarget) -> None:
    prompt = tokens_of(reference, 560)
    rows = []
    for pieces in ([560], [1, 7, 300, 559, 560], [512, 513, 560]):
        forget(reference)
        for end in pieces:
            conversation = reference.open(prompt[:end], GREEDY)
            reference.verify([(conversation, [])])
            conversation.commit([prompt[end]] if end < 560 else [9])
        reference.open(prompt, GREEDY)
        conversation = reference.open(prompt, GREEDY)
        assert conversation.reused == 559
        reference.verify([(conversation, [])])
        rows.append(logits(reference)[0])
    assert all(np.array_equal(row, rows[0]) for row in rows)


def test_the_number_of_threads_changes_nothing(model_path: Path, llama_target: LlamaTarget) -> None:
    prompt = tokens_of(llama_target, 6)
    two = load_target(model_path, EngineConfig(ctx_size=256, threads=2, backend="llamacpp"))
    assert isinstance(two, LlamaTarget)
    expected = linear(llama_target, prompt, [338])
    assert all(np.array_equal(a, b) for a, b in zip(linear(two, prompt, [338]), expected, strict=True))
    two.close()


@pytest.fixture(scope="module")
def float_model(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers in F16."""
    return tinymodels.requantised(model_path, tmp_path_factory.mktemp("models") / "f16.gguf", 2, gguf.GGMLQuantizationType.F16)


# Where rows are too short for K-quants, llama.cpp takes Q5_0 or Q8_0: here all matrices but one a layer.
@pytest.mark.parametrize("kind", ["F16", "Q8_0", "Q4_0", "Q4_K_M", "Q5_K_M", "Q6_K", "IQ4_XS"])
def test_other_quantisations(kind: str, float_model: Path, tmp_path: Path) -> None:
    """A pass of few tokens, of many, and of one: whatever kernels llama.cpp has for them."""
    path = tinymodels.quantised(float_model, tmp_path / "small.gguf", kind)
    target = load_target(path, EngineConfig(ctx_size=256, threads=1, backend="llamacpp"))
    assert isinstance(target, LlamaTarget)
    prompt = tokens_of(target, 24)
    siblings = [PassNode(ROOT, token) for token in range(2000, 2010)]
    right = {i: linear(target, prompt, path_of(TREE, i))[-1] for i in range(ROOT, len(TREE))}
    for nodes in (TREE, TREE + siblings, TREE[:1], TREE[:3], siblings):
        conversation = target.open(prompt, GREEDY)
        target.verify([(conversation, nodes)])
        rows = logits(target)
        assert np.array_equal(rows[0], right[ROOT])
        assert all(np.array_equal(rows[i + 1], right[i]) for i, node in enumerate(nodes) if node in TREE)
    conversation = target.open([*prompt, 338, 260], GREEDY)
    target.verify([(conversation, [])])
    assert np.array_equal(logits(target)[0], right[1])
    target.close()


@pytest.mark.parametrize(
    "params", [GREEDY, SamplingParams(temperature=0.9, seed=7, repetition_penalty=1.2)], ids=["greedy", "sampled"]
)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_passes_of_random_trees_commit_the_plain_answer(llama_target: LlamaTarget, params: SamplingParams, seed: int) -> None:
    """Trees with the right tokens somewhere in them, in any order, among wrong ones; some rounds bare."""
    dice = random.Random(seed)
    prompt = tokens_of(llama_target, 12)
    plain = answer(llama_target, prompt, params, 24, lambda answered: [])
    right = [*plain, *plain]

    def guess(answered: int) -> list[PassNode]:
        nodes: list[PassNode] = []
        trunk = ROOT
        for depth in range(dice.randrange(5)):
            noise = [PassNode(dice.choice([ROOT, *range(len(nodes))]), dice.randrange(2000)) for _ in range(dice.randrange(3))]
            nodes += [node for node in noise if node not in nodes]
            child = PassNode(trunk, right[answered + depth])
            if child not in nodes:
                nodes.append(child)
            trunk = nodes.index(child)
        return nodes

    assert answer(llama_target, prompt, params, 24, guess)[:24] == plain[:24]


def answer(target: LlamaTarget, prompt: list[int], params: SamplingParams, length: int, guess: object) -> list[int]:
    """A small engine of its own, without core or drafters."""
    conversation = target.open(prompt, params)
    while len(conversation.tokens) < len(prompt) + length:
        nodes = guess(len(conversation.tokens) - len(prompt))  # type: ignore[operator]
        verdict = walk(nodes, target.verify([(conversation, nodes)])[0])
        conversation.commit([choice.token for choice in verdict.choices])
        check_linear(target, conversation.cached)
        assert len(conversation.tokens) - len(verdict.choices) <= conversation.cached < len(conversation.tokens)
    return conversation.tokens[len(prompt) :]


def test_the_first_path_is_the_one_that_the_pass_begins_with() -> None:
    """What is accepted of it stays in the cache, in sequence 0."""
    assert paths_of([PassNode(ROOT, 1), PassNode(ROOT, 2), PassNode(0, 3), PassNode(2, 4), PassNode(0, 5)]) == [
        [0, 1],
        [2],
        [0],
        [0],
        [1],
    ]


def test_paths_share_their_beginning() -> None:
    assert paths_of(TREE) == [[0, 1], [0], [0], [1], [2], [2], [2]]
    assert paths_of([]) == []


def test_too_many_paths_and_foreign_conversations_are_refused(llama_target: LlamaTarget) -> None:
    conversation = llama_target.open([1, 2, 3], GREEDY)
    with pytest.raises(UsageError, match="129 paths"):
        llama_target.verify([(conversation, [PassNode(ROOT, token) for token in range(MAX_SEQUENCES + 1)])])
    with pytest.raises(UsageError, match="one at a time"):
        llama_target.verify([(conversation, []), (conversation, [])])
    vocabulary = scripted.ScriptedVocabulary(16)
    foreign = scripted.ScriptedTarget(vocabulary, scripted.random_script(16)).open([1], GREEDY)
    with pytest.raises(UsageError, match="another backend"):
        llama_target.verify([(foreign, [])])


# Prefix reuse, interruptions


def test_the_next_turn_does_not_read_the_common_prefix_again(llama_target: LlamaTarget) -> None:
    forget(llama_target)
    llm = LLM.of(llama_target, Drafters(), EngineConfig(mode=Mode.OFF))
    params = SamplingParams(max_tokens=6, temperature=0.7, seed=3)
    prompt = tokens_of(llama_target, 40)
    first = llm.generate(prompt, params)
    longer = [*prompt, *first.token_ids, *tokens_of(llama_target, 5)]
    second = llm.generate(longer, params)
    assert (first.stats.reused_tokens, second.stats.reused_tokens) == (0, 40 + 5)
    fork = llm.generate([*prompt[:30], 99, 100], params)
    assert fork.stats.reused_tokens == 30
    again = llm.generate(longer, params)
    assert again.stats.reused_tokens == 30
    forget(llama_target)
    fresh = llm.generate(longer, params)
    assert fresh.stats.reused_tokens == 0
    assert fresh.token_ids == second.token_ids == again.token_ids


def test_two_conversations_in_turns(llama_target: LlamaTarget) -> None:
    """The cache goes from one to the other and back; both answers are as if alone."""
    prompts = tokens_of(llama_target, 10), tokens_of(llama_target, 14)[3:]
    alone = [answer(llama_target, prompt, GREEDY, 4, lambda answered: []) for prompt in prompts]
    conversations = [llama_target.open(prompt, GREEDY) for prompt in prompts]
    for _ in range(4):
        for conversation in conversations:
            choose = llama_target.verify([(conversation, [])])[0]
            conversation.commit([choose(ROOT).token])
    assert [c.tokens[len(p) :] for c, p in zip(conversations, prompts, strict=True)] == alone


@pytest.mark.parametrize("nodes", [[], TREE], ids=["bare", "tree"])
def test_an_abort_ends_a_pass_and_the_next_answer_is_right(llama_target: LlamaTarget, nodes: list[PassNode]) -> None:
    prompt = tokens_of(llama_target, 30)
    expected = answer(llama_target, prompt, GREEDY, 5, lambda answered: [])
    conversation = llama_target.open(prompt, GREEDY)
    choose = llama_target.verify([(conversation, [])])[0]
    conversation.commit([choose(ROOT).token])
    llama_target.abort()
    with pytest.raises(Interrupted):
        llama_target.verify([(conversation, nodes)])
    check_linear(llama_target, conversation.cached)
    choose = llama_target.verify([(conversation, [])])[0]  # the same conversation can go on
    assert choose(ROOT).token == expected[1]
    assert answer(llama_target, prompt, GREEDY, 5, lambda answered: []) == expected


def test_an_abort_while_reading_a_prompt(llama_target: LlamaTarget) -> None:
    forget(llama_target)
    conversation = llama_target.open(tokens_of(llama_target, 700), GREEDY)
    llama_target.abort()
    with pytest.raises(Interrupted):
        llama_target.verify([(conversation, [])])
    check_linear(llama_target, 0)


def test_an_abort_between_answers_does_not_hit_the_next(llama_target: LlamaTarget) -> None:
    prompt = tokens_of(llama_target, 10)
    expected = answer(llama_target, prompt, GREEDY, 2, lambda answered: [])
    llama_target.abort()
    assert answer(llama_target, prompt, GREEDY, 2, lambda answered: []) == expected


def test_a_stream_closed_half_way(llama_target: LlamaTarget, random_draft: Path) -> None:
    config = EngineConfig(mode=Mode.SERIAL, threads=1, ctx_size=256)
    drafters = Drafters(model=ModelDrafter(load_draft(random_draft, config)))
    llm = LLM.of(llama_target, drafters, config)
    params = SamplingParams(max_tokens=6, temperature=0.8)
    forget(llama_target)
    expected = llm.generate(TEXT, params).token_ids
    stream = llm.stream(TEXT + "he", SamplingParams(max_tokens=50))
    for _ in zip(range(3), stream, strict=False):
        pass
    stream.close()
    assert llm.generate(TEXT, params).token_ids == expected
    drafters.close()


# The draft


@pytest.mark.parametrize(
    ("info", "repack", "expected"),
    [
        (b"CPU : AVX512 = 1 | REPACK = 1 | ", True, True),
        (b"CPU : AVX512 = 1 | REPACK = 1 | ", False, False),
        (b"CPU : AVX512 = 1 | AMX_INT8 = 1 | REPACK = 1 | ", True, False),
    ],
)
def test_weights_are_not_repacked_for_amx(
    info: bytes, repack: bool, expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(C, "llama_print_system_info", lambda: info)
    monkeypatch.setattr(C, "llama_model_load_from_file", lambda _path, params: asked.append(params.use_extra_bufts))
    with pytest.raises(ModelUnreadable):
        LlamaModel(tmp_path / "none.gguf", repack=repack)
    assert asked == [expected]


@pytest.fixture(scope="module")
def draft(poor_draft: Path) -> Iterator[LlamaDraft]:
    loaded = load_draft(poor_draft, EngineConfig(ctx_size=512, threads=1, draft_engine="llamacpp"))
    assert isinstance(loaded, LlamaDraft)
    yield loaded
    loaded.close()


def alike(row: np.ndarray, right: np.ndarray) -> bool:
    """A draft need not be exact; another history gives other logits altogether."""
    return float(np.corrcoef(row, right)[0, 1]) > 0.999


def test_a_draft_grows_and_commits_along_the_right_histories(draft: LlamaDraft, reference: LlamaTarget) -> None:
    """Forks, re-rooting and dead branches at random: every leaf's logits are those of its own history."""
    dice = random.Random(1)
    prompt = tokens_of(draft, 9)  # type: ignore[arg-type]
    drafter = ModelDrafter(draft)
    drafter.open(prompt, SamplingParams(temperature=1.5, seed=2), BestFirst(3))
    committed = list(prompt)
    for _ in range(12):
        for _ in range(dice.randrange(1, 4)):
            leaves = drafter.next_leaves()
            histories = [committed + node.path(drafter._tree.root) for node in leaves]
            work = [Leaf(n.key, n.parent.key if n.parent is not None else None, n.token, n.position) for n in leaves]
            rows = [row.copy() for row in draft.expand(work)]
            for history, row in zip(histories, rows, strict=True):
                assert alike(row, linear(reference, history, [])[0])
            draft.expand = lambda work, rows=rows: rows  # type: ignore[method-assign]
            drafter.grow(leaves)
            del draft.expand
        tokens, node = [], drafter._tree.root
        while node.children and dice.random() < 0.7:
            node = dice.choice(list(node.children.values()))
            tokens.append(node.token)
        if not tokens or dice.random() < 0.4:
            tokens.append(dice.randrange(1000))
        drafter.commit(tokens)
        committed += tokens
        assert_sequences_hold_what_they_should(draft)


def test_a_step_that_was_stopped_leaves_no_trace(draft: LlamaDraft, reference: LlamaTarget) -> None:
    """The root's own step, and one with a fork."""
    flag = mmap.mmap(-1, mmap.PAGESIZE)
    draft.stop_on(flag)
    prompt = tokens_of(draft, 20)  # type: ignore[arg-type]
    draft.open(prompt)
    steps = [[Leaf(-19, None, prompt[-1], 19)], [Leaf(1, -19, 5, 20)], [Leaf(2, 1, 6, 21), Leaf(3, -19, 7, 20)]]
    histories = [[[]], [[5]], [[5, 6], [7]]]
    for leaves, ends in zip(steps, histories, strict=True):
        flag[0] = 1
        with pytest.raises(Interrupted):
            draft.expand(leaves)
        flag[0] = 0
        assert_sequences_hold_what_they_should(draft)
        for row, end in zip(draft.expand(leaves), ends, strict=True):
            assert alike(row, linear(reference, [*prompt, *end], [])[0])
        assert_sequences_hold_what_they_should(draft)


def test_the_root_need_not_be_the_first_leaf(draft: LlamaDraft, reference: LlamaTarget) -> None:
    prompt = tokens_of(draft, 20)  # type: ignore[arg-type]
    draft.open(prompt)
    draft.expand([Leaf(-19, None, prompt[-1], 19)])
    draft.commit([5], [], [])
    rows = draft.expand([Leaf(1, -20, 6, 21), Leaf(-20, None, 5, 20)])
    for row, end in zip(rows, ([5, 6], [5]), strict=True):
        assert alike(row, linear(reference, [*prompt, *end], [])[0])


def assert_sequences_hold_what_they_should(draft: LlamaDraft) -> None:
    """A path in use reaches to its end; one that is free names committed tokens only, those that it is said to."""
    memory = draft._context.memory
    ends = draft._end | draft._free
    assert sorted(ends) == list(range(DRAFT_SEQUENCES))
    assert max(draft._free.values()) <= draft._cached
    assert {sequence: 1 + C.llama_memory_seq_pos_max(memory, sequence) for sequence in ends} == ends


def test_a_draft_keeps_the_common_prefix(draft: LlamaDraft, reference: LlamaTarget) -> None:
    prompt = tokens_of(draft, 40)  # type: ignore[arg-type]
    for tokens in (prompt, prompt[:30], [*prompt[:20], 5, 6, 7], prompt[:20]):
        draft.open(tokens)
        while draft.read():
            pass
        (row,) = draft.expand([Leaf(-len(tokens) + 1, None, tokens[-1], len(tokens) - 1)])
        assert alike(row, linear(reference, tokens, [])[0])


def test_a_draft_leaves_out_the_beginning_of_a_prompt(draft: LlamaDraft, reference: LlamaTarget) -> None:
    """Its logits are those of the rest, wherever that lies; what is in the cache is used if it is as much as is asked for."""
    prompt = tokens_of(draft, 300)  # type: ignore[arg-type]
    longer = [*prompt, *tokens_of(draft, 350)[300:]]  # type: ignore[arg-type]
    for tokens, unread, begins, reads in (
        (prompt, 100, 100, True),
        (prompt[:280], 0, 0, True),
        (prompt, 100, 0, False),
        (longer, 320, 320, True),
        (longer, 330, 320, False),
    ):
        draft.open(tokens, unread)
        assert (draft._cached <= unread) is reads
        while draft.read():
            pass
        (row,) = draft.expand([Leaf(-len(tokens) + 1, None, tokens[-1], len(tokens) - 1)])
        assert alike(row, linear(reference, tokens[begins:], [])[0])
        assert C.llama_memory_seq_pos_min(draft._context.memory, draft._trunk) == begins


def test_growth_behind_a_prompt_whose_beginning_is_left_out(draft: LlamaDraft, reference: LlamaTarget) -> None:
    prompt = tokens_of(draft, 300)  # type: ignore[arg-type]
    drafter = ModelDrafter(draft)
    drafter.open(prompt, SamplingParams(), BestFirst(2, branching=2), unread=260)
    for _ in range(3):
        best = next(iter([drafter.grow(drafter.next_leaves()) for _ in range(3)]))[0]
        right = linear(reference, prompt[260:], [])[0]
        assert best.token in np.argsort(right)[-2:]
        drafter.commit([best.token])
        prompt.append(best.token)


def test_a_draft_reads_a_long_prompt_in_chunks(draft: LlamaDraft, reference: LlamaTarget) -> None:
    prompt = tokens_of(draft, 400)  # type: ignore[arg-type]
    draft.open([7])
    draft.open(prompt)
    assert draft.read()
    assert not draft.read()
    (row,) = draft.expand([Leaf(-399, None, prompt[-1], 399)])
    right = linear(reference, prompt, [])[0]
    assert alike(row, right)
    draft.open([7])
    draft.open(prompt)
    (row,) = draft.expand([Leaf(-399, None, prompt[-1], 399)])  # not asked to read before
    assert alike(row, right)


# Vocabulary, files


def test_pieces_put_together_are_the_text(llama_target: LlamaTarget) -> None:
    vocabulary = llama_target.vocabulary
    for text in (TEXT, "naïve café 日本語 😀", "  two  spaces\n\n\ttab", "a" * 500):
        ids = vocabulary.tokenize(text, special=False, bos=False)
        assert b"".join(vocabulary.piece(token) for token in ids).decode() == text


def test_control_tokens(llama_target: LlamaTarget) -> None:
    vocabulary = llama_target.vocabulary
    (end,) = vocabulary.tokenize("<|im_end|>", special=True, bos=False)
    assert end in vocabulary.end_tokens
    assert vocabulary.piece(end) == b""
    assert len(vocabulary.tokenize("<|im_end|>", special=False, bos=False)) > 1
    assert vocabulary.eos_text == "<|im_end|>"
    assert len(vocabulary.texts()) == vocabulary.size


def test_a_vocabulary_without_weights_is_the_same(model_path: Path, llama_target: LlamaTarget) -> None:
    light = read_vocabulary(model_path)
    assert (light.size, light.end_tokens, light.chat_template) == (
        llama_target.vocabulary.size,
        llama_target.vocabulary.end_tokens,
        llama_target.vocabulary.chat_template,
    )
    assert light.texts() == llama_target.vocabulary.texts()


def test_a_vocabulary_takes_its_tables_along_when_it_goes(model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    freed: list[object] = []
    free = C.llama_model_free
    monkeypatch.setattr(C, "llama_model_free", lambda handle: (freed.append(handle), free(handle)))
    light = read_vocabulary(model_path)
    gc.collect()
    assert light.tokenize("Hello", special=False, bos=False)
    assert not freed
    del light
    gc.collect()
    assert len(freed) == 1


def test_a_file_that_lacks_a_layer(poor_draft: Path, tmp_path: Path) -> None:
    short = tmp_path / "short.gguf"
    short.write_bytes(poor_draft.read_bytes().replace(b"blk.0.ffn_up", b"blk.0.ffn_xx"))
    with pytest.raises(ModelUnreadable, match=r"short\.gguf.*blk\.0\.ffn_up"):
        load_target(short, EngineConfig())
