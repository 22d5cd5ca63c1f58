"""Drafts as our exporter writes them: llama.cpp reads them, and one that knows a part of the vocabulary guesses like any other."""

from __future__ import annotations

import errno
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import tinymodels
from hypothesis import given, settings
from hypothesis import strategies as st

from duodecoding import LLM, SamplingParams
from duodecoding.backends import load_draft, load_target, read_vocabulary
from duodecoding.backends.base import Leaf
from duodecoding.backends.llamacpp_target import LlamaTarget
from duodecoding.backends.trim import TOKEN_IDS, VOCABULARY, Trim, read_trim, vocabulary_hash
from duodecoding.bench.pair import ranks
from duodecoding.distill import export
from duodecoding.drafters.model import ModelDrafter
from duodecoding.drafting import Drafters
from duodecoding.errors import DuoError, ModelUnreadable, VocabularyMismatch
from duodecoding.sampling import Sampler
from duodecoding.text import check_pair
from duodecoding.types import EngineConfig, Mode
from duodecoding.virtual import Recording

SMALL = EngineConfig(ctx_size=1024, threads=1)

LAYERS, KEPT, LEAST = 2, 20_000, 1000
Read = tuple[export.Shape, export.Weights, list[export.Field]]


@pytest.fixture(scope="module")
def read(model_path: Path) -> Read:
    return export.read_gguf(model_path)


@pytest.fixture(scope="module")
def whole_draft(read: Read, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first layers, quantised anew."""
    shape, weights, fields = read
    some = {name: data for name, data in weights.items() if not name.startswith("blk.") or int(name.split(".")[1]) < LAYERS}
    path = tmp_path_factory.mktemp("drafts") / "whole.gguf"
    export.write_gguf(path, "whole", replace(shape, layers=LAYERS), export.quantise(some, "q8_0"), fields, "q8_0")
    return path


@pytest.fixture(scope="module")
def trim(read: Read) -> Trim:
    """Without every fifth token, control tokens and bytes excepted; each that is missing is read as the one before it."""
    texts = export.texts_of(read[2])
    every = np.arange(len(texts))
    ids = every[(every < LEAST) | (every % 5 != 4)][:KEPT]
    return Trim(ids, np.searchsorted(ids, every, side="right") - 1, vocabulary_hash(texts))


@pytest.fixture(scope="module")
def trimmed_draft(read: Read, model_path: Path, trim: Trim, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target itself but for its vocabulary."""
    tensors = {tensor.name: (tensor.data, tensor.tensor_type) for tensor in gguf.GGUFReader(model_path).tensors}
    embedding, kind = tensors[export.EMBEDDING]
    tensors[export.EMBEDDING] = embedding[trim.token_ids], kind
    fields = [*export.trimmed(read[2], trim.token_ids), *export.strings(trim.metadata())]
    path = tmp_path_factory.mktemp("drafts") / "trimmed.gguf"
    export.write_gguf(path, "trimmed", replace(read[0], vocab=KEPT), tensors, fields, "q4_1")
    return path


def logits(path: Path, ids: list[int]) -> np.ndarray:
    draft = load_draft(path, SMALL, exact=True)
    draft.open(ids)
    row = draft.expand([Leaf(1, None, ids[-1], len(ids) - 1)])[0].copy()
    draft.close()
    return row


def test_an_exported_draft_computes_what_its_source_computes(model_path: Path, whole_draft: Path, tmp_path: Path) -> None:
    """The source keeps queries, keys and values apart and has other rounding."""
    cut = tinymodels.cut_layers(model_path, tmp_path / "cut.gguf", LAYERS)
    ids = read_vocabulary(model_path).tokenize("The river rose slowly through the night", special=False, bos=False)
    ours, theirs = logits(whole_draft, ids), logits(cut, ids)
    assert np.abs(ours - theirs).max() < 0.1 * theirs.std()
    check_pair(read_vocabulary(model_path), read_vocabulary(whole_draft), target_name="t", draft_name="d")


def test_a_trimmed_draft_gives_the_same_logits_for_the_tokens_it_knows(model_path: Path, trimmed_draft: Path, trim: Trim) -> None:
    ids = [400, 4000, 44, 20_000]
    assert np.array_equal(logits(model_path, ids)[trim.token_ids], logits(trimmed_draft, ids))
    unknown = [400, 4004, 45, 48_000]
    stand_ins = trim.token_ids[trim.stand_ins[unknown]].tolist()
    assert stand_ins != unknown
    assert np.array_equal(logits(trimmed_draft, unknown), logits(trimmed_draft, stand_ins))


def test_the_vocabulary_of_a_trimmed_draft_speaks_the_targets_ids(model_path: Path, trimmed_draft: Path, trim: Trim) -> None:
    whole, some = read_vocabulary(model_path), read_vocabulary(trimmed_draft)
    assert some.size == whole.size
    assert [some.piece(id) for id in (400, 4000)] == [whole.piece(id) for id in (400, 4000)]
    assert some.piece(4004) == b""
    assert some.end_tokens == whole.end_tokens & set(trim.token_ids.tolist())
    assert set(some.tokenize("a b", special=False, bos=False)) <= set(trim.token_ids.tolist())


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_tokens=32),
        SamplingParams(max_tokens=32, temperature=0.8, seed=3),
        SamplingParams(max_tokens=32, temperature=0.7, seed=1, repetition_penalty=1.2, logit_bias={4000: 2.0, 4004: 2.0}),
    ],
    ids=["greedy", "sampled", "penalties"],
)
def test_the_answer_is_the_targets(real_target: LlamaTarget, trimmed_draft: Path, params: SamplingParams) -> None:
    """Some of what the draft reads is a stand-in, and some of what it should guess it does not know."""
    prompt = [{"role": "user", "content": "Explain in two sentences how photosynthesis works."}]
    plain = LLM.of(real_target, Drafters(), replace(SMALL, mode=Mode.OFF)).chat(prompt, params)
    draft = ModelDrafter(load_draft(trimmed_draft, SMALL), vocab_limit=real_target.vocabulary.size)
    guessed = LLM.of(real_target, Drafters(model=draft), replace(SMALL, mode=Mode.SERIAL)).chat(prompt, params)
    draft.close()
    assert guessed.token_ids == plain.token_ids
    assert guessed.stats.accepted > 0


def test_a_token_that_a_draft_does_not_know_ranks_last(trimmed_draft: Path) -> None:
    draft = load_draft(trimmed_draft, SMALL)
    found = ranks(draft, Recording("qa", (400, 4000), (1000, 1004, 1001), SamplingParams()))
    draft.close()
    assert found[1] == KEPT
    assert max(found[0], found[2]) < KEPT


def test_another_vocabulary_is_refused(model_path: Path, trimmed_draft: Path, tmp_path: Path) -> None:
    other = tinymodels.other_vocabulary(model_path, tmp_path / "other.gguf", {40: "zzz"})
    draft = read_vocabulary(trimmed_draft)
    check_pair(read_vocabulary(model_path), draft, target_name="t", draft_name="d")
    with pytest.raises(VocabularyMismatch, match="part of another"):
        check_pair(read_vocabulary(other), draft, target_name="t", draft_name="d")


def test_a_trimmed_draft_is_no_target(trimmed_draft: Path) -> None:
    with pytest.raises(ModelUnreadable, match="part of its target's vocabulary"):
        load_target(trimmed_draft, SMALL)


@pytest.mark.parametrize("broken", ["", "no base64", "AAAA", "AQAAAAEAAAA="])
def test_a_broken_map_is_refused(broken: str) -> None:
    good = Trim(np.array([1, 3]), np.array([0, 0, 1, 1]), "hash").metadata()
    assert read_trim(good.__getitem__, 2, "d") is not None
    assert read_trim((good | {VOCABULARY: ""}).__getitem__, 2, "d") is None
    with pytest.raises(ModelUnreadable, match="broken"):
        read_trim((good | {TOKEN_IDS: broken}).__getitem__, 2, "d")


@settings(max_examples=60)
@given(
    st.integers(0, 1000),
    st.sampled_from([0.0, 0.7, 1.3]),
    st.sampled_from([1.0, 1.3]),
    st.booleans(),
    st.sampled_from([1.0, 0.8]),
)
def test_guesses_of_a_part_are_those_of_the_whole_that_know_no_more(
    seed: int, temperature: float, repetition: float, biased: bool, top_p: float
) -> None:
    random = np.random.default_rng(seed)
    ids = np.sort(random.choice(300, 120, replace=False))
    row = np.full(300, -1e4, np.float32)
    row[ids] = random.normal(0, 4, 120)
    bias = {int(ids[3]): 3.0, int((set(range(300)) - set(ids.tolist())).pop()): 5.0} if biased else {}
    params = SamplingParams(
        temperature=temperature, seed=seed, repetition_penalty=repetition, frequency_penalty=0.3, logit_bias=bias, top_p=top_p
    )
    sampler = Sampler(params, [1, 2, 3, int(ids[5])], 300)
    path = [int(ids[7]), 4, 4]
    whole, part = sampler.guesses(row, 9, 4, path), sampler.guesses(row[ids], 9, 4, path, ids)
    assert [guess.token for guess in part] == [guess.token for guess in whole]
    assert np.allclose([guess.p for guess in part], [guess.p for guess in whole], atol=1e-5)


def test_a_full_disk_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(export, "_write", full)
    shape = export.Shape(1, 32, 2, 1, 16, 32, 8, 64, 1e4, 1e-5)
    tensors = export.quantise({name: np.zeros(size, np.float32) for name, size in export.matrices(shape).items()}, "q8_0")
    with pytest.raises(DuoError, match="no space is left"):
        export.write_gguf(tmp_path / "draft.gguf", "d", shape, tensors, [], "q8_0")
    assert not list(tmp_path.iterdir())
