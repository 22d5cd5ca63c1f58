"""The torch backend on a CPU, without graphs: trees, sampling, vocabularies, refusals. Its GPU kernels where there is a GPU."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinymodels
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="torch is not installed: make torch installs it")
pytest.importorskip("transformers", reason="transformers is not installed: make torch installs it")

from workers import engine  # noqa: E402

from duodecoding import LLM, EngineConfig, Mode, SamplingParams, measure, prompts, sampling  # noqa: E402
from duodecoding.backends import load_draft, load_target, on_gpu, read_vocabulary, torch_graphs, torch_model, torch_sampling  # noqa: E402
from duodecoding.backends.torch import TorchTarget  # noqa: E402
from duodecoding.backends.torch_choices import Chooser, Voice  # noqa: E402
from duodecoding.backends.torch_fast import Fast, RowLinear  # noqa: E402
from duodecoding.backends.torch_inputs import MOVES, Inputs, Rows, Stretch, compiled_rows, paths_with_rows  # noqa: E402
from duodecoding.backends.torch_runner import Runner  # noqa: E402
from duodecoding.backends.torch_slots import ATTENTION, DEEPER, CacheShape, Slots, attention, tree_mask  # noqa: E402
from duodecoding.backends.torch_text import TransformersVocabulary  # noqa: E402
from duodecoding.bench.simulate import chat_tokens  # noqa: E402
from duodecoding.core import walk  # noqa: E402
from duodecoding.drafters.lookup import LookupDrafter  # noqa: E402
from duodecoding.drafters.model import ModelDrafter  # noqa: E402
from duodecoding.drafting import Drafters  # noqa: E402
from duodecoding.errors import BackendMissing, DuoError, Interrupted, ModelUnreadable, OutOfMemory, UsageError  # noqa: E402
from duodecoding.launch import spawn  # noqa: E402
from duodecoding.pace import guessed_costs  # noqa: E402
from duodecoding.tree import ROOT, PassNode  # noqa: E402

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
import rig  # noqa: E402
import torch_vs_llamacpp  # noqa: E402

CPU = torch.device("cpu")
VOCAB = 300
SMALL = EngineConfig(ctx_size=512, threads=1, threads_draft=1, max_nodes=16)
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "mistral-within-its-window": {"sliding_window": 512},
    "qwen2": {},
    "qwen3": {},
    "gemma": {},
    "gemma2": {"sliding_window": 512},
    "phi3": {"pad_token_id": 0},
    "smollm3": {"pad_token_id": 0},
    "olmo2": {},
}


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> None:
    torch.set_num_threads(1)


def tiny(family: str = "llama", **more: Any) -> Any:
    """A model of random weights, as the loader would leave it."""
    from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

    AttentionInterface.register(ATTENTION, attention)
    torch.manual_seed(0)
    config = AutoConfig.for_model(family.partition("-")[0], **{**SHAPE, **FAMILIES.get(family, {}), **more})
    model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION).eval().requires_grad_(False)
    for weight in model.parameters():
        weight.mul_(3.0)  # as they come, such models say nearly the same about everything
    return model


class Numbers:
    """A vocabulary of numbers."""

    size = VOCAB
    end_tokens = frozenset[int]()
    chat_template = None
    bos_text = eos_text = ""

    def tokenize(self, text: str, *, special: bool, bos: bool) -> list[int]:
        return [int(word) for word in text.split()]

    def piece(self, token: int) -> bytes:
        return f"{token} ".encode()

    def texts(self) -> list[str]:
        return [str(token) for token in range(self.size)]


@pytest.fixture(scope="module")
def target() -> TorchTarget:
    return TorchTarget(tiny(), Numbers(), context=256, rows=32)


def tokens(seed: int, count: int) -> list[int]:
    return random.Random(seed).choices(range(VOCAB), k=count)


# Slots and masks


def test_a_row_sees_the_committed_tokens_and_its_ancestors() -> None:
    inputs = Inputs(5, CPU, 2)
    inputs.fill(Rows(3, [7, 8, 9, 8], [ROOT, 0, 0, 1]))  # and one row of padding
    seen = tree_mask(inputs.table, 10)[0, 0].int().tolist()
    assert seen == [
        [1, 1, 1, 1, 0, 0, 0, 0, 0, 0],
        [1, 1, 1, 1, 1, 0, 0, 0, 0, 0],
        [1, 1, 1, 1, 0, 1, 0, 0, 0, 0],
        [1, 1, 1, 1, 1, 0, 1, 0, 0, 0],
        [1, 1, 1, 0, 0, 0, 0, 1, 0, 0],
    ]
    assert inputs.positions.tolist() == [3, 4, 4, 5, 3]


TREES = st.lists(st.integers(0, 10**6), min_size=1, max_size=40).map(
    lambda choices: [choice % (i + 1) - 1 for i, choice in enumerate(choices)]
)


def without_compiler(rows: int, members: int) -> Inputs:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("duodecoding.backends.torch_inputs.compiled_rows", lambda: None)
        return Inputs(rows, CPU, members)


@given(TREES, st.integers(0, 50), st.sampled_from([1, 3, 16]), st.booleans())
def test_the_table_shows_each_row_its_path(parents: list[int], first: int, members: int, compiled: bool) -> None:
    rows = Rows(first, [0] * len(parents), parents)
    inputs = Inputs(len(parents), CPU, members) if compiled else without_compiler(len(parents), members)
    inputs.fill(Rows(9, [0] * len(parents), [ROOT, *[0] * (len(parents) - 1)]))  # what an earlier pass left there
    inputs.fill(rows)
    found: dict[int, list[int]] = {}
    table = inputs.table.tolist()
    assert [line[2] for line in table] == rows.depths
    for line in table[: table[0][1]]:
        assert line[0] == first
        for depth, row in (divmod(member, DEEPER) for member in line[3 : 3 + members] if member >= 0):
            assert row not in found
            found[row] = [*line[3 + members :][:depth], row]
    assert found == {row: rows.path(row) for row in range(len(parents))}


@given(TREES, st.integers(0, 50), st.sampled_from([1, 3, 16, 32]), st.integers(0, 88))
def test_compiled_or_not_the_arguments_are_the_same(parents: list[int], first: int, members: int, padding: int) -> None:
    rows = Rows(first, [31 * i + 7 for i in range(len(parents))], parents)
    size = len(parents) + padding
    ours, plain = Inputs(size, CPU, members), without_compiler(size, members)
    for inputs in (ours, plain):
        inputs.fill(rows, [(9, 4), (8, 5)] if size > 1 else [])
    assert torch.equal(ours.tokens, plain.tokens)
    assert torch.equal(ours.positions, plain.positions)
    assert torch.equal(ours.table, plain.table)
    assert torch.equal(ours.moves, plain.moves)


def test_rows_before_their_parents_are_refused() -> None:
    if compiled_rows() is None:
        pytest.skip("no compiler")
    for parents in ([0], [ROOT, 2, 0], [ROOT] * 5):
        with pytest.raises(ValueError, match="parents come before"):
            Inputs(4, CPU, 4).fill(Rows(0, parents, parents))


def test_planned_moves_are_forgotten_after_their_pass() -> None:
    inputs = Inputs(2, CPU, 1)
    inputs.fill(Rows(3, [1, 2], [ROOT, 0]), [(7, 6)])
    assert inputs.moves.tolist() == [[7, *[0] * (MOVES - 1)], [6, *[0] * (MOVES - 1)]]
    inputs.fill(Rows(3, [1, 2], [ROOT, 0]))
    assert not inputs.moves.any()


def test_rows_that_hang_under_one_path_share_a_line() -> None:
    beside = [ROOT, 0, 1, 2, 0, 0, 1, 2, 3, 3]  # a path of four, and guesses beside it
    assert paths_with_rows(beside, Rows(0, beside, beside).depths) == [([0, 1, 2, 3], list(range(10)))]
    assert paths_with_rows([ROOT, 0, 0, 1, 2, 2], [0, 1, 1, 2, 2, 2]) == [([0, 1], [0, 1, 2, 3]), ([0, 2], [4, 5])]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tree_gives_the_logits_of_plain_text(family: str) -> None:
    model, text = tiny(family), tokens(1, 30)
    plain = model(torch.tensor([text]), use_cache=False).logits[0].float()
    runner = Runner(model, 128, 16)
    assert torch.allclose(runner.read(text[:20], 0)[0], plain[19], atol=1e-3)
    wrong = (text[21] + 1) % VOCAB
    logits = runner.decode(Rows(20, [text[20], wrong, text[21], 5, text[22]], [ROOT, 0, 0, 1, 2]))
    for row, position in ((0, 20), (2, 21), (4, 22)):
        assert torch.allclose(logits[row], plain[position], atol=1e-3)
    runner.slots.plan([(22, 21), (24, 22)])  # the accepted path to its linear place
    logits = runner.decode(Rows(23, [text[23], wrong, text[24]], [ROOT, 0, 0]))
    assert torch.allclose(logits[2], plain[24], atol=1e-3)
    assert float(plain.std()) > 0.05  # not all the same anyway


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_padded_to_a_size_is_the_prompt(family: str) -> None:
    """What a GPU captures for prompts, run as it is."""
    model, text = tiny(family), tokens(3, 50)
    expected = Runner(model, 128, 16).read(text, 0)
    runner = Runner(model, 128, 16)
    runner.read(text[:11], 0)
    stretch = Stretch(64, CPU)
    stretch.fill(text[11:], 11)
    assert torch.allclose(runner._stretch_step(stretch, 128), expected, atol=1e-3)
    after = runner.decode(Rows(50, [7, 8], [ROOT, 0]))
    plain = model(torch.tensor([[*text, 7, 8]]), use_cache=False).logits[0, -2:].float()
    assert torch.allclose(after, plain, atol=1e-3)  # the padding left nothing that is seen
    assert float(expected.std()) > 0.05


def test_a_prompt_in_chunks_is_the_prompt_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    model, text = tiny(), tokens(2, 50)
    whole = Runner(model, 128, 16).read(text, 0)
    monkeypatch.setitem(sys.modules["duodecoding.backends.torch_runner"].CHUNK, "cpu", 16)
    assert torch.allclose(Runner(model, 128, 16).read(text, 0), whole, atol=1e-4)


# Answers


def grown(answer: Sequence[int], at: int, chance: random.Random) -> list[PassNode]:
    """The right path to some depth among wrong guesses, so that paths are accepted from all places of a pass."""
    nodes: list[PassNode] = []
    right, below = ROOT, at
    for _ in range(chance.choice((0, 1, 4, 12, 31))):
        if below < len(answer) and chance.random() < 0.5:
            nodes.append(PassNode(right, answer[below]))
            right, below = len(nodes) - 1, below + 1
        else:
            nodes.append(PassNode(chance.randrange(ROOT, len(nodes)), chance.randrange(VOCAB)))
    return nodes


def answer(
    target: TorchTarget, prompt: list[int], params: SamplingParams, known: Sequence[int] | None = None, seed: int = 0
) -> list[int]:
    chance, found = random.Random(seed), list[int]()
    conversation = target.open(prompt, params)
    while len(found) < params.max_tokens:
        nodes = [] if known is None else grown(known, len(found), chance)
        verdict = walk(nodes, target.verify([(conversation, nodes)])[0])
        gained = [choice.token for choice in verdict.choices][: params.max_tokens - len(found)]
        conversation.commit(gained)
        found += gained
    return found


PARAMS = (
    SamplingParams(max_tokens=24),
    SamplingParams(max_tokens=24, temperature=1.2, seed=4),
    SamplingParams(max_tokens=24, temperature=0.9, seed=1, top_k=20, top_p=0.9),
    SamplingParams(max_tokens=24, temperature=0.7, repetition_penalty=1.3, presence_penalty=0.2, frequency_penalty=0.3),
    SamplingParams(max_tokens=24, repetition_penalty=1.5, logit_bias={5: 3.0, 7: -100.0}),
)


@pytest.mark.parametrize("params", PARAMS, ids=str)
def test_guesses_do_not_change_the_answer(target: TorchTarget, params: SamplingParams) -> None:
    for seed in range(3):
        prompt = tokens(seed, 5 + 20 * seed)
        alone = answer(target, prompt, params)
        assert answer(target, prompt, params, alone, seed) == alone
        assert len(set(alone)) > 3


@pytest.mark.parametrize("params", PARAMS, ids=str)
def test_the_answer_is_that_of_the_numpy_sampler(target: TorchTarget, params: SamplingParams) -> None:
    prompt = tokens(7, 12)
    found = answer(target, prompt, params)
    sampler = sampling.Sampler(params, prompt, VOCAB)
    for i, token in enumerate(found):
        text = torch.tensor([prompt + found[:i]])
        logits = target._runner.model(text, use_cache=False).logits[0, -1].float().numpy()
        assert sampler.choose(logits, len(prompt) + i).token == token
        sampler.commit([token])


def test_log_probabilities_are_those_of_the_model(target: TorchTarget) -> None:
    prompt = tokens(3, 9)
    conversation = target.open(prompt, SamplingParams(temperature=1.5))
    choice = target.verify([(conversation, [])])[0](ROOT)
    plain = target._runner.model(torch.tensor([prompt]), use_cache=False).logits[0, -1].log_softmax(-1)
    assert choice.logprob == pytest.approx(float(plain[choice.token]), abs=1e-4)


def test_on_a_cpu_a_pass_is_over_when_it_returns_and_is_not_padded(target: TorchTarget) -> None:
    target.verify([(target.open(tokens(3, 9), SamplingParams()), [])])
    assert target.done()
    assert (target.overlaps, target.pass_sizes) == (False, ())


def test_a_common_prefix_is_reused(target: TorchTarget) -> None:
    prompt, params = tokens(8, 40), SamplingParams(max_tokens=8)
    first = answer(target, prompt, params)
    target.open([1], params)
    longer = [*prompt, *first, 3, 4]
    fresh = answer(target, longer, params)
    target.open([1], params)
    answer(target, prompt, params)
    conversation = target.open(longer, params)
    assert conversation.reused == len(prompt) + len(first) - 1  # the last token's entry was not needed yet
    assert answer(target, longer, params) == fresh


def test_two_conversations_in_turn(target: TorchTarget) -> None:
    params = SamplingParams(max_tokens=6)
    prompts = [tokens(1, 20), tokens(1, 10) + tokens(2, 10)]
    alone = [answer(target, prompt, params) for prompt in prompts]
    conversations = [target.open(prompt, params) for prompt in prompts]
    found: list[list[int]] = [[], []]
    for _ in range(6):
        for conversation, said in zip(conversations, found, strict=True):
            token = target.verify([(conversation, [])])[0](ROOT).token
            conversation.commit([token])
            said.append(token)
    assert found == alone


def test_a_pass_without_a_commit_can_be_repeated(target: TorchTarget) -> None:
    conversation = target.open(tokens(4, 15), SamplingParams())
    nodes = [PassNode(ROOT, 3), PassNode(0, 4)]
    first = [target.verify([(conversation, nodes)])[0](i) for i in (ROOT, 0, 1)]
    second = [target.verify([(conversation, nodes)])[0](i) for i in (ROOT, 0, 1)]
    assert [choice.token for choice in first] == [choice.token for choice in second]


def test_an_abort_stops_a_pass_and_spoils_nothing(target: TorchTarget) -> None:
    prompt, params = tokens(5, 30), SamplingParams(max_tokens=6)
    alone = answer(target, prompt, params)
    conversation = target.open(tokens(6, 30), params)
    target.abort()
    with pytest.raises(Interrupted):
        target.verify([(conversation, [])])
    layers = iter(range(100))
    check, target._runner.slots.check = target._runner.slots.check, lambda: target.abort() if next(layers) == 1 else check()
    with pytest.raises(Interrupted):
        target.verify([(target.open(tokens(6, 30), params), [])])
    target._runner.slots.check = check
    assert answer(target, prompt, params) == alone


def test_it_serves_one_conversation_of_its_own_at_a_time(target: TorchTarget) -> None:
    conversation = target.open([1, 2], SamplingParams())
    with pytest.raises(UsageError, match="one at a time"):
        target.verify([(conversation, []), (conversation, [])])
    with pytest.raises(UsageError, match="another backend"):
        target.verify([(object(), [])])  # type: ignore[list-item]


def test_closing_gives_everything_back() -> None:
    target = TorchTarget(tiny(), Numbers(), context=64, rows=8)
    target.open([1, 2], SamplingParams())
    target.close()
    assert target._runner.model is None
    assert target._runner.slots is None


# Sampling

seeds = st.integers(0, 2**63 - 1)


@given(seeds, st.lists(st.integers(0, 2**31), min_size=1, max_size=4), st.lists(st.integers(-2, 2**20), min_size=1, max_size=9))
def test_the_noise_is_bit_for_bit_that_of_numpy(seed: int, positions: list[int], ids: list[int]) -> None:
    table = torch.tensor(ids).repeat(len(positions), 1)
    found = torch_sampling.gumbel(torch.tensor(seed), torch.tensor(positions), table)
    for row, position in zip(found.numpy(), positions, strict=True):
        assert np.array_equal(row, sampling.gumbel(seed, position, np.array(ids)))


params_of = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    top_k=st.sampled_from([0, 1, 5, 40, 2000]),
    top_p=st.sampled_from([1.0, 0.99, 0.9, 0.5, 0.1]),
    min_p=st.sampled_from([0.0, 0.05, 0.3]),
    repetition_penalty=st.sampled_from([1.0, 1.2, 0.8]),
    presence_penalty=st.sampled_from([0.0, 0.7, -0.4]),
    frequency_penalty=st.sampled_from([0.0, 0.3]),
    logit_bias=st.sampled_from([{}, {3: 4.0, 11: -50.0}]),
    seed=seeds,
)


@settings(max_examples=150)
@given(params_of, st.integers(0, 2**32), st.sampled_from([7, 300, 3000]), st.sampled_from([0.0, 0.5, 3.0, 8.0]), st.booleans())
def test_on_equal_logits_it_chooses_as_numpy_does(
    params: SamplingParams, seed: int, vocab: int, spread: float, coarse: bool
) -> None:
    random_ = np.random.default_rng(seed)
    logits = (random_.standard_normal((3, vocab)) * spread).astype(np.float32)
    if coarse:  # many ties
        logits = np.round(logits)
    prompt = random_.integers(0, vocab, 9).tolist()
    said = random_.integers(0, vocab, 5).tolist()
    paths = [[], random_.integers(0, vocab, 1).tolist(), random_.integers(0, vocab, 2).tolist()]
    voice = Voice(params, prompt, vocab)
    chooser = Chooser(CPU, vocab)
    chooser.commit(voice, said)
    choose = chooser.choose(torch.from_numpy(logits), voice, [20, 21, 22], lambda i: paths[i])
    sampler = sampling.Sampler(params, prompt, vocab)
    sampler.commit(said)
    for i, row in enumerate(logits):
        expected = sampler.choose(row, 20 + i, paths[i])
        assert choose(i).token == expected.token
        assert choose(i).logprob == pytest.approx(expected.logprob, abs=1e-4)


def test_what_is_rare_is_settled_by_numpy() -> None:
    logits = torch.zeros(1, 3000)  # flat: nearly all of it is tail
    params = SamplingParams(temperature=1.0)
    unsure = torch_sampling.choose(logits, params, torch.tensor(1), torch.tensor([5]))[2]
    assert unsure.tolist() == [1.0]
    wide = torch_sampling.choose(logits, replace(params, top_p=0.9), torch.tensor(1), torch.tensor([5]))[2]
    assert wide.tolist() == [1.0]


# Files


def write_model(folder: Path, model: Any, tokenizer: bool = True) -> Path:
    model.config._attn_implementation = "sdpa"
    model.save_pretrained(folder)
    if tokenizer:
        byte_level().save_pretrained(folder)
    return folder


def byte_level() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {character: i for i, character in enumerate(["<s>", "</s>", *alphabet])}
    vocab["ab"] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab, [("a", "b")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    return fast


def sentence_pieces() -> Any:
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    pieces = ["<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "▁", "h", "i", "▁h", "hi", "▁hi"]
    merges = [("▁", "h"), ("h", "i"), ("▁h", "i")]
    tokenizer = Tokenizer(models.BPE({p: i for i, p in enumerate(pieces)}, merges, byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("tiny"), tiny(eos_token_id=[1, 7]))


def test_a_folder_becomes_a_target(folder: Path) -> None:
    target = load_target(folder, SMALL)
    assert isinstance(target, TorchTarget)
    assert target.context == 512
    with LLM(str(folder), mode="serial", draft="lookup", ctx_size=64, threads=1) as llm:
        llm.use_costs(guessed_costs(on_gpu=True))  # so small a model has no steady prices
        result = llm.chat([{"role": "user", "content": "ab ab ab ab"}], SamplingParams(max_tokens=20, ignore_eos=True))
    with LLM(str(folder), mode="off", ctx_size=64, threads=1) as llm:
        plain = llm.chat([{"role": "user", "content": "ab ab ab ab"}], SamplingParams(max_tokens=20, ignore_eos=True))
    assert result.token_ids == plain.token_ids
    assert result.stats.verified > 0


def test_the_vocabulary_of_a_folder(folder: Path) -> None:
    vocabulary = read_vocabulary(folder)
    assert vocabulary.size == VOCAB
    assert vocabulary.end_tokens == {1, 7}
    assert vocabulary.chat_template is not None
    assert (vocabulary.bos_text, vocabulary.eos_text) == ("<s>", "</s>")
    ids = vocabulary.tokenize("abé 漢<s>", special=False, bos=True)
    assert b"".join(vocabulary.piece(token) for token in ids) == "abé 漢<s>".encode()
    assert vocabulary.tokenize("<s>a", special=True, bos=False)[0] == 0
    assert vocabulary.piece(0) == b""
    assert vocabulary.piece(VOCAB - 1) == b""
    texts = vocabulary.texts()
    assert len(texts) == VOCAB
    assert texts[-1] == f"[PAD{VOCAB - 1}]"


def test_a_vocabulary_of_sentence_pieces(tmp_path: Path) -> None:
    sentence_pieces().save_pretrained(tmp_path)
    vocabulary = TransformersVocabulary(tmp_path)
    assert b"".join(map(vocabulary.piece, vocabulary.tokenize("▁hi▁hié", special=False, bos=False))) == " hi hié".encode()


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    write_model(tmp_path, tiny(), tokenizer=False)
    with pytest.raises(ModelUnreadable, match="tokenizer"):
        read_vocabulary(tmp_path)


def changed(folder: Path, to: Path, **changes: Any) -> Path:
    for file in folder.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    config = json.loads((to / "config.json").read_text())
    (to / "config.json").write_text(json.dumps({**config, **changes}))
    return to


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_hidden_layers": 4}, "lack .*layers.3"),
        ({"num_hidden_layers": 2}, "surplus .*layers.2"),
        ({"intermediate_size": 128}, "."),
        ({"model_type": "llamar"}, "llamar"),
    ],
)
def test_weights_that_do_not_match_the_config(folder: Path, tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ModelUnreadable, match=reason):
        load_target(changed(folder, tmp_path, **changes), SMALL)


def test_a_damaged_file(folder: Path, tmp_path: Path) -> None:
    copy = changed(folder, tmp_path)
    (copy / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:1000])
    with pytest.raises(ModelUnreadable, match="cannot load"):
        load_target(copy, SMALL)


def settings_of(**more: Any) -> Any:
    from transformers import LlamaConfig

    config = LlamaConfig(**SHAPE)
    for name, value in more.items():
        setattr(config, name, value)
    return config


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"is_encoder_decoder": True}, "encoder"),
        ({"sliding_window": 100}, "slides over the last 100 tokens and the context is 512. Lower --ctx-size to 100"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "linear_attention layers"),
        ({"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 64}, "slides"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic rope"),
    ],
)
def test_what_cannot_be_served_exactly_is_refused(more: dict[str, Any], reason: str) -> None:
    with pytest.raises(ModelUnreadable, match=reason):
        torch_model.check_config("it", settings_of(**more), 512)


def test_a_window_that_the_context_fits_into_is_no_window() -> None:
    torch_model.check_config("it", settings_of(sliding_window=100), 100)
    torch_model.check_config("it", settings_of(sliding_window=100, use_sliding_window=False), 512)


def test_a_recurrent_model_is_refused(tmp_path: Path) -> None:
    from transformers import MambaConfig, MambaForCausalLM

    MambaForCausalLM(MambaConfig(vocab_size=50, hidden_size=16, num_hidden_layers=1, state_size=4)).save_pretrained(tmp_path)
    with pytest.raises(ModelUnreadable, match=r"state|attention"):
        torch_model.load_model(tmp_path, CPU, torch.float32, 64, 8)


def test_a_model_whose_trees_are_not_its_text_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    target = TorchTarget(tiny(), Numbers(), context=64, rows=8)
    decode = target._runner.decode
    monkeypatch.setattr(target._runner, "decode", lambda rows: decode(rows) * 1.1)
    with pytest.raises(ModelUnreadable, match=r"in a tree are .*% off"):
        target.prepare(False, lambda what, share: None)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_cuda() -> None:
    assert torch_model.choose_device("auto").type == "cpu"
    with pytest.raises(BackendMissing, match="cuda is not there"):
        torch_model.choose_device("cuda")
    assert torch_model.choose_dtype("auto", CPU) == torch.float32


@pytest.mark.parametrize("device", ["gpu", "mps", "cuda:x", ""])
def test_unknown_devices(device: str) -> None:
    with pytest.raises(UsageError, match="device is"):
        torch_model.choose_device(device)


def test_unknown_types() -> None:
    with pytest.raises(UsageError, match="dtype is 'int8'"):
        torch_model.choose_dtype("int8", CPU)


def test_a_gpu_without_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "an old one")
    assert torch_model.choose_dtype("auto", torch.device("cuda")) == torch.float16
    with pytest.raises(UsageError, match="an old one has no arithmetic for it"):
        torch_model.choose_dtype("bfloat16", torch.device("cuda"))


def test_a_model_too_large_for_the_gpu_says_how_much(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (10_000, 80 * 10**9))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "GPU")
    with pytest.raises(DuoError, match=r"needs .* GB for its weights .*; 0.0 GB of 80.0 GB are free"):
        torch_model._check_memory(folder, settings_of(), torch.device("cuda"), torch.bfloat16, 600)


def test_a_gguf_too_large_for_the_gpu(model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (10**8, 10**9))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "GPU")
    with pytest.raises(OutOfMemory, match=r"needs 0\.3 GB for its weights .*; 0\.1 GB of 1\.0 GB are free"):
        torch_model._check_memory(model_path, settings_of(), torch.device("cuda"), torch.bfloat16, 600)


def test_a_full_gpu_has_no_measured_floor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "GPU")
    monkeypatch.setattr(torch_model, "choose_device", torch.device)
    monkeypatch.setattr(torch_model, "copy_bandwidth", lambda device: 4.3e12)
    assert measure.gpu_bandwidth("cuda:0") == ("GPU", 4.3e12)
    monkeypatch.setattr(torch_model, "copy_bandwidth", Exhausted)
    assert measure.gpu_bandwidth("cuda:0") is None


def test_what_a_pass_reads() -> None:
    tied, untied = tiny(tie_word_embeddings=True), tiny(tie_word_embeddings=False)
    embedding = VOCAB * SHAPE["hidden_size"] * 4
    assert torch_model.weights_bytes(tied) == sum(p.nbytes for p in tied.parameters())
    assert torch_model.weights_bytes(untied) == sum(p.nbytes for p in untied.parameters()) - embedding


class Exhausted:
    """Stands for what allocates on a full GPU."""

    def __init__(self, *_args: Any, **_settings: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 3 GiB")


def failing(error: Exception) -> Any:
    def fails(*_args: Any, **_settings: Any) -> None:
        raise error

    return fails


@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB."), OutOfMemory, "2.50 GiB more"),
        (RuntimeError("CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation'"), OutOfMemory, "out of memory"),
        (RuntimeError("something else"), RuntimeError, "something else"),
    ],
)
def test_after_a_pass_that_failed_the_next_is_served(
    target: TorchTarget, monkeypatch: pytest.MonkeyPatch, error: Exception, kind: type[Exception], said: str
) -> None:
    prompt, params = tokens(1, 12), SamplingParams(max_tokens=4)
    expected = answer(target, prompt, params)
    with monkeypatch.context() as patch:
        patch.setattr(target._runner, "_forward", failing(error))
        with pytest.raises(kind, match=said):
            answer(target, tokens(2, 12), params)
    assert answer(target, prompt, params) == expected


def test_a_closed_target_keeps_nothing() -> None:
    target = TorchTarget(tiny(), Numbers(), context=256, rows=32, keep_bytes=10**6)
    answer(target, tokens(1, 12), SamplingParams(max_tokens=4))
    kept = [weakref.ref(thing) for thing in (target._runner.model, target._runner.slots)]
    target.close()
    assert [reference() for reference in kept] == [None, None]
    assert target._runner not in torch_model.SERVED


@pytest.mark.parametrize(
    ("place", "kind", "said"),
    [
        ("duodecoding.backends.torch.Runner", OutOfMemory, r"cannot load .*: it needs 2\.50 GiB more; 0\.0 GB of 0\.0 GB are free"),
        ("duodecoding.backends.torch.TorchTarget.prepare", OutOfMemory, r"it needs 2\.50 GiB more"),
        ("duodecoding.backends.torch_model._check_class", OutOfMemory, r"it needs 2\.50 GiB more"),
    ],
)
def test_a_load_that_fails_leaves_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, place: str, kind: type[DuoError], said: str
) -> None:
    from transformers import AutoModelForCausalLM

    alive: list[weakref.ref[Any]] = []
    load = AutoModelForCausalLM.from_pretrained

    def remembered(*args: Any, **settings: Any) -> Any:
        found = load(*args, **settings)
        alive.append(weakref.ref(found[0]))
        return found

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", remembered)
    monkeypatch.setattr(place, Exhausted)
    with pytest.raises(kind, match=said) as error:
        load_target(folder, SMALL)
    assert error.value.__traceback__ is not None  # the error is still there, and all it has seen
    assert [reference() for reference in alive] == [None]


def test_which_backend_serves_what(folder: Path, model_path: Path) -> None:
    assert not on_gpu(folder, replace(SMALL, device="cpu"))
    assert on_gpu(model_path, replace(SMALL, gpu_layers=-1))
    with pytest.raises(UsageError, match="holds no GGUF"):
        load_target(folder, replace(SMALL, backend="llamacpp"))


# The real model


@pytest.fixture(scope="module")
def source(model_path: Path) -> rig.Source:
    return rig.read_gguf(model_path)


def built(source: rig.Source, model_path: Path) -> TorchTarget:
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, attention)
    model = rig.build(source.shape, CPU, torch.float32, source, ATTENTION)
    return TorchTarget(model, read_vocabulary(model_path), context=512, rows=17)


@pytest.fixture(scope="module")
def real(source: rig.Source, model_path: Path) -> Iterator[TorchTarget]:
    """SmolLM2 in float32."""
    target = built(source, model_path)
    yield target
    target.close()


@pytest.fixture(scope="module")
def cut(source: rig.Source, model_path: Path) -> Iterator[TorchTarget]:
    """Its first eight layers."""
    target = built(replace(source, shape=replace(source.shape, layers=8)), model_path)
    yield target
    target.close()


QUESTION = [{"role": "user", "content": "Count from one to nine in words, then do it again."}]


GREEDY, SAMPLED = SamplingParams(max_tokens=24), SamplingParams(max_tokens=24, temperature=0.8, seed=3)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_all_modes_give_the_same_tokens(cut: TorchTarget, poor_draft: Path, params: SamplingParams) -> None:
    compare_modes(cut, poor_draft, params)


@pytest.mark.slow
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_all_modes_give_the_same_tokens_with_the_whole_model(real: TorchTarget, poor_draft: Path, params: SamplingParams) -> None:
    compare_modes(real, poor_draft, replace(params, max_tokens=128))


def compare_modes(real: TorchTarget, poor_draft: Path, params: SamplingParams) -> None:
    alone = LLM.of(real, Drafters(), replace(SMALL, mode=Mode.OFF)).chat(QUESTION, params).token_ids
    draft = ModelDrafter(load_draft(poor_draft, SMALL), vocab_limit=real.vocabulary.size)
    for mode, guessing in (
        (Mode.CHAIN, Drafters(model=draft)),
        (Mode.SERIAL, Drafters(model=draft)),
        (Mode.SERIAL, Drafters(lookup=LookupDrafter())),
    ):
        result = LLM.of(real, guessing, replace(SMALL, mode=mode)).chat(QUESTION, params)
        assert result.token_ids == alone, mode
        assert result.stats.verified > 0
    draft.close()
    for mode in (Mode.LOCKSTEP, Mode.DUO):
        config = replace(SMALL, mode=mode)
        with engine(real, spawn(poor_draft, config), config) as llm:
            assert llm.chat(QUESTION, params).token_ids == alone, mode


def test_it_is_the_model_that_llama_cpp_serves(real: TorchTarget, real_target: Any) -> None:
    """Up to quantised activations: the same likeliest tokens, nearly the same probabilities."""
    prompt = real.vocabulary.tokenize("The capital of France is", special=False, bos=True)
    ours = real.verify([(real.open(prompt, SamplingParams()), [])])[0](ROOT)
    theirs = real_target.verify([(real_target.open(prompt, SamplingParams()), [])])[0](ROOT)
    assert ours.token == theirs.token
    assert ours.logprob == pytest.approx(theirs.logprob, abs=0.2)


@pytest.mark.slow
def test_in_float32_both_backends_part_at_near_ties_only(model_path: Path, tmp_path: Path) -> None:
    pair = torch_vs_llamacpp.targets(torch_vs_llamacpp.float_copy(model_path, tmp_path / "f32.gguf"))
    for task in ("qa", "humaneval", "translation"):
        prompt = chat_tokens(pair["torch"].vocabulary, prompts.load(task)[task][0].turns[0])
        found = torch_vs_llamacpp.compare(pair, prompt, 64)
        assert found["equal"] or (found["same_two"] and min(found["lead"].values()) <= 2 * found["apart"] < 0.2), found
    for target in pair.values():
        target.close()


def test_a_gguf_by_torch(model_path: Path, tmp_path: Path) -> None:
    path = tinymodels.cut_layers(model_path, tmp_path / "cut.gguf", 1)
    target = load_target(path, replace(SMALL, backend="torch"))
    assert isinstance(target, TorchTarget)
    theirs = load_target(path, SMALL)
    prompt = target.vocabulary.tokenize("one two three", special=False, bos=False)
    found = [t.verify([(t.open(prompt, SamplingParams()), [])])[0](ROOT) for t in (target, theirs)]
    assert found[0].token == found[1].token
    target.close()
    theirs.close()


# A GPU


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "phi3"])
def test_joint_projections_compute_the_same_and_keep_nothing(family: str) -> None:
    """What is done to a model for a GPU, but with the libraries' kernels, on a CPU."""
    plain, text = tiny(family), torch.tensor([tokens(1, 12)])
    expected = plain(text, use_cache=False).logits
    slots = Slots(CacheShape.of(plain.config), 64, CPU, torch.float32)
    assert not Fast(plain, slots, compile=False, kernels=True).groups  # full precision: not for our kernels
    assert torch.allclose(plain(text, use_cache=False).logits, expected, atol=1e-4)
    joints = [module for module in plain.modules() if isinstance(module, RowLinear)]
    assert len(joints) > 3
    assert all(getattr(joint, "result", None) is None for joint in joints)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_in_half_precision_guesses_do_not_change_the_answer_either() -> None:
    model = tiny(head_dim=32, hidden_size=128).to("cuda", torch.bfloat16)
    target = TorchTarget(model, Numbers(), context=512, rows=32, compile=True)
    for seed in range(4):
        prompt, params = tokens(seed, 20 + 60 * seed), SamplingParams(max_tokens=60, temperature=seed / 4, seed=seed)
        alone = answer(target, prompt, params)
        assert answer(target, prompt, params, alone, seed) == alone
    target.close()


def test_the_peak_of_memory_is_not_forgotten_by_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    used = [500, 0, 300]  # in use at most: before a capture, in the middle of it, afterwards
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device=None: used[0])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device=None: used.pop(0))
    peak = torch_graphs.Peak()
    assert peak() == 500
    peak.count_anew(CPU)
    assert (used, peak()) == ([0, 300], 500)
    peak.forget()
    assert peak() == 300


def test_a_graph_asks_for_its_memory_before_it_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    rooms = iter([100 << 20, 300 << 20])
    emptied: list[bool] = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (next(rooms), 1 << 30))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(True))
    torch_graphs.demand(200 << 20, CPU)  # there is enough once torch has let go of what it keeps
    assert emptied == [True]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (100 << 20, 1 << 30))
    with pytest.raises(torch.OutOfMemoryError) as error:
        torch_graphs.demand(200 << 20, CPU)
    assert torch_model.is_out_of_memory(error.value)
    assert "needs 200 MiB more" in str(torch_model.out_of_memory("a pass", error.value))


COMPILED = """
import torch
from functools import partial
from torch._dynamo.utils import counters
from duodecoding.backends.torch_fuse import compile_fused

backend = partial(compile_fused, options={"emulate_precision_casts": True})
with torch.inference_mode():
    torch.compile(torch.nn.Linear(8, 8), backend=backend, dynamic=False, fullgraph=True)(torch.zeros(2, 8))
print(counters["inductor"]["fxgraph_cache_hit"], counters["inductor"]["fxgraph_cache_miss"])
"""


def test_the_second_start_finds_what_the_first_one_compiled(tmp_path: Path) -> None:
    """On disk, through the way our layers are compiled."""
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    found = [
        subprocess.run([sys.executable, "-c", COMPILED], env=environment, capture_output=True, text=True, check=True).stdout.split()
        for _ in range(2)
    ]
    assert found == [["0", "1"], ["1", "0"]]
