"""Our own draft engine: the logits of llama.cpp, a tree that is kept right, guesses as the sampler would make them."""

from __future__ import annotations

import mmap
import os
import platform
import random
import re
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tinymodels

from duodecoding import launch, machine, models, virtual, worker
from duodecoding.backends import compiled, gguf_file, load_draft, load_target, native, native_draft
from duodecoding.backends.base import Draft, Leaf, QuickDraft
from duodecoding.backends.gguf_file import GgufFile, Tensor
from duodecoding.backends.llamacpp_draft import LlamaDraft
from duodecoding.backends.llamacpp_target import LlamaTarget
from duodecoding.backends.native_draft import NativeDraft
from duodecoding.backends.native_weights import Weights
from duodecoding.drafters.growth import BestFirst
from duodecoding.drafters.model import ModelDrafter
from duodecoding.errors import BackendFailure, BackendMissing, Interrupted, ModelUnreadable
from duodecoding.sampling import Sampler
from duodecoding.tree import ROOT
from duodecoding.types import EngineConfig, SamplingParams

SMALL = EngineConfig(ctx_size=512, threads=1)
TEXT = "In a small town by the sea there lived a clockmaker who could not sleep. Every night he counted the bells, and every night "
KINDS = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")


def tokens_of(draft: Draft, count: int) -> list[int]:
    text = draft.vocabulary.tokenize(TEXT, special=False, bos=False)
    return (text * (count // len(text) + 1))[:count]


def read_all(draft: Draft) -> None:
    while draft.read():
        pass


def alike(row: np.ndarray, right: np.ndarray) -> bool:
    """Another history gives other logits altogether."""
    return float(np.corrcoef(row, right)[0, 1]) > 0.999


@pytest.fixture(scope="module")
def embedded() -> Path:
    return models.resolve("smollm2-draft").path


@pytest.fixture(scope="module", params=[1, 3], ids=["one thread", "three threads"])
def draft(poor_draft: Path, request: pytest.FixtureRequest) -> Iterator[NativeDraft]:
    loaded = NativeDraft(poor_draft, context=512, threads=request.param)
    yield loaded
    loaded.close()


class Reference:
    """llama.cpp on the same file."""

    def __init__(self, path: Path) -> None:
        target = load_target(path, replace(SMALL, backend="llamacpp"))
        assert isinstance(target, LlamaTarget)
        self.target = target

    def __call__(self, history: Sequence[int]) -> np.ndarray:
        """The logits after a text."""
        conversation = self.target.open(history, SamplingParams())
        self.target.verify([(conversation, [])])[0](ROOT)
        return self.target._context.logits()[0].copy()


@pytest.fixture(scope="module")
def reference(poor_draft: Path) -> Iterator[Reference]:
    loaded = Reference(poor_draft)
    yield loaded
    loaded.target.close()


# Logits


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_llama_cpp(model_path: Path, tmp_path: Path, kind: str) -> None:
    path = tinymodels.requantised(model_path, tmp_path / "model.gguf", 2, gguf.GGMLQuantizationType[kind])
    assert_same_logits(path)


@pytest.fixture(scope="module")
def two_layers(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "two.gguf"
    return tinymodels.requantised(model_path, path, 2, gguf.GGMLQuantizationType.F16)


@pytest.mark.parametrize(
    ("file_type", "kind"),
    [("Q4_K_M", gguf_file.Q4_K), ("Q5_K_M", gguf_file.Q5_K), ("Q6_K", gguf_file.Q6_K), ("Q5_K_M", gguf_file.Q6_K)],
)
def test_logits_of_files_as_they_are_handed_on(two_layers: Path, tmp_path: Path, file_type: str, kind: int) -> None:
    """Of several types, where rows of 256 are common to eight blocks."""
    path = tinymodels.quantised(two_layers, tmp_path / "model.gguf", file_type)
    assert any(tensor.kind == kind for tensor in GgufFile(path).tensors.values())
    assert_same_logits(path)


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3"])
def test_logits_of_other_architectures(model_path: Path, tmp_path: Path, architecture: str) -> None:
    """Halves of heads that turn, biases, norms of heads."""
    assert_same_logits(tinymodels.as_qwen(model_path, tmp_path / "model.gguf", 3, architecture))


def test_logits_of_the_embedded_draft(embedded: Path) -> None:
    """Joint matrices, two types of weights, a trimmed vocabulary."""
    assert_same_logits(embedded)


def assert_same_logits(path: Path) -> None:
    ours = NativeDraft(path, context=512, threads=2)
    theirs = load_draft(path, SMALL, exact=True)
    text = tokens_of(ours, 300)
    rows = zip(np.concatenate([*_copies(ours, text)]), np.concatenate([*_copies(theirs, text)]), strict=True)
    close = [(float(np.corrcoef(a, b)[0, 1]), a.argmax() == b.argmax()) for a, b in rows]
    ours.close()
    theirs.close()
    assert min(like for like, _ in close) > 0.998
    assert sum(same for _, same in close) >= 0.95 * len(close)


def _copies(draft: Draft, text: Sequence[int], start: int = 5) -> Iterator[np.ndarray]:
    return (rows.copy() for rows in draft.score(text, start))


@pytest.mark.skipif(platform.machine() != "x86_64", reason="these are names of x86 processors")
@pytest.mark.parametrize(("processor", "needs"), [("x86-64", "sse2"), ("haswell", "avx2"), ("x86-64-v4", "avx512f")])
def test_other_processors_compute_the_same(embedded: Path, processor: str, needs: str) -> None:
    """Without the instructions that this machine may have."""
    if needs not in machine.cpu("flags").split() or not knows(processor):
        pytest.skip(f"this machine has no {needs}, or its compiler does not know it")
    other = NativeDraft(embedded, context=256, threads=2, library=native.load(native.build([f"-march={processor}"])))
    ours = NativeDraft(embedded, context=256, threads=2)
    text = tokens_of(ours, 60)
    here, there = np.concatenate([*_copies(ours, text, 0)]), np.concatenate([*_copies(other, text, 0)])
    other.close()
    ours.close()
    np.testing.assert_allclose(here[0], there[0], atol=1e-4)  # then roundings go their own ways
    assert all(alike(a, b) for a, b in zip(here, there, strict=True))


# The tree


def test_it_grows_and_commits_along_the_right_histories(draft: NativeDraft, reference: Reference) -> None:
    """Forks, re-rooting and dead branches at random: every leaf's logits are those of its own history."""
    dice = random.Random(1)
    committed = tokens_of(draft, 9)
    drafter = ModelDrafter(draft)
    drafter.open(committed, SamplingParams(temperature=1.5, seed=2), BestFirst(3))  # too hot for quick guesses
    for _ in range(12):
        for _ in range(dice.randrange(1, 4)):
            leaves = drafter.next_leaves()
            histories = [committed + node.path(drafter._tree.root) for node in leaves]
            work = [Leaf(n.key, n.parent.key if n.parent is not None else None, n.token, n.position) for n in leaves]
            rows = [row.copy() for row in draft.expand(work)]
            for history, row in zip(histories, rows, strict=True):
                assert alike(row, reference(history))
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
        committed = committed + tokens
        used = [line[-1] for line in draft._lines.values() if line]
        assert sorted(used + draft._free) == list(range(native_draft.NODES))


def test_virtual_time_has_the_room_of_this_engine(draft: NativeDraft) -> None:
    assert draft.room == virtual.ROOM


def test_a_step_that_was_stopped_leaves_no_trace(draft: NativeDraft, reference: Reference) -> None:
    flag = mmap.mmap(-1, mmap.PAGESIZE)
    draft.stop_on(flag)
    prompt = tokens_of(draft, 20)
    draft.open(prompt)
    steps = [[Leaf(-19, None, prompt[-1], 19)], [Leaf(1, -19, 5, 20)], [Leaf(2, 1, 6, 21), Leaf(3, -19, 7, 20)]]
    histories: list[list[list[int]]] = [[[]], [[5]], [[5, 6], [7]]]
    for leaves, ends in zip(steps, histories, strict=True):
        flag[0] = 1
        with pytest.raises(Interrupted):
            draft.expand(leaves)
        flag[0] = 0
        for row, end in zip(draft.expand(leaves), ends, strict=True):
            assert alike(row, reference([*prompt, *end]))


def test_the_root_need_not_be_the_first_leaf(draft: NativeDraft, reference: Reference) -> None:
    prompt = tokens_of(draft, 20)
    draft.open(prompt)
    draft.expand([Leaf(-19, None, prompt[-1], 19)])
    draft.commit([5], [], [])
    leaves = [Leaf(1, -20, 6, 21), Leaf(-20, None, 5, 20)]
    rows = [row.copy() for row in draft.expand(leaves)]
    for row, end in zip(rows, ([5, 6], [5]), strict=True):
        assert alike(row, reference([*prompt, *end]))
    draft.open(prompt)
    draft.expand([Leaf(-19, None, prompt[-1], 19)])
    draft.commit([5], [], [])
    guesses = draft.guess(leaves, 2, [0.0, 0.0], SamplingParams())
    assert [some[0][0] for some in guesses] == [int(row.argmax()) for row in rows]


def test_it_keeps_the_common_prefix(draft: NativeDraft, reference: Reference) -> None:
    prompt = tokens_of(draft, 40)
    for tokens in (prompt, prompt[:30], [*prompt[:20], 5, 6, 7], prompt[:20]):
        draft.open(tokens)
        while draft.read():
            pass
        (row,) = draft.expand([Leaf(-len(tokens) + 1, None, tokens[-1], len(tokens) - 1)])
        assert alike(row, reference(tokens))


def test_it_leaves_out_the_beginning_of_a_prompt(draft: NativeDraft, reference: Reference) -> None:
    """Its logits are those of the rest, wherever that lies; what is in the cache is used if it is as much as is asked for."""
    prompt = tokens_of(draft, 300)
    longer = [*prompt, *tokens_of(draft, 350)[300:]]
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
        assert alike(row, reference(tokens[begins:]))


def test_a_long_prompt_is_read_in_chunks(draft: NativeDraft, reference: Reference) -> None:
    prompt = tokens_of(draft, 400)
    right = reference(prompt)
    draft.open([7])
    draft.open(prompt)
    assert draft.read()
    assert not draft.read()
    (row,) = draft.expand([Leaf(-399, None, prompt[-1], 399)])
    assert alike(row, right)
    draft.open([7])
    draft.open(prompt)
    (row,) = draft.expand([Leaf(-399, None, prompt[-1], 399)])  # not asked to read before
    assert alike(row, right)


def test_what_is_not_there_is_refused(draft: NativeDraft, embedded: Path) -> None:
    """Memory beyond the model's is never touched."""
    vocabulary, last = draft.vocabulary.size, draft.context - 1
    prompt = tokens_of(draft, last + 1)
    for tokens in ([vocabulary, 5], [-1, 5], [*prompt, 5, 6, *[7] * 16]):
        draft.open(tokens)
        with pytest.raises(BackendFailure, match="cannot take this step"):
            read_all(draft)
    draft.open(prompt)
    draft.expand([Leaf(1, None, prompt[-1], last)])
    with pytest.raises(BackendFailure, match="cannot take this step"):
        draft.expand([Leaf(2, 1, 5, draft._model.trunk)])
    trimmed = NativeDraft(embedded, context=256, threads=1)
    trimmed.open([5, trimmed.vocabulary.size, 6])
    with pytest.raises(BackendFailure, match="cannot take this step"):
        trimmed.read()
    trimmed.close()


# Guesses


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.8, seed=3),
        SamplingParams(temperature=1.0, seed=2**40 + 1),
        SamplingParams(temperature=0.8, seed=4, top_k=20),
        SamplingParams(temperature=0.7, seed=5, top_p=0.9),
        SamplingParams(temperature=0.5, seed=6, min_p=0.05),
        SamplingParams(temperature=1e-9, seed=7),
    ],
    ids=str,
)
@pytest.mark.parametrize("threads", [1, 2])
def test_guesses_are_the_samplers(embedded: Path, params: SamplingParams, threads: int) -> None:
    """Found by the engine, and by the sampler from the engine's logits: the same tokens, nearly the same probabilities."""
    draft = NativeDraft(embedded, context=256, threads=threads)
    assert isinstance(draft, QuickDraft)
    prompt = tokens_of(draft, 30)
    sampler = Sampler(params, prompt, draft.vocabulary.size)
    leaves = [Leaf(i + 2, 1, token, 30) for i, token in enumerate(range(300, 700, 40))]
    for again in (draft.expand, lambda work: draft.guess(work, 5, [0.0] * len(work), params)):
        draft.open(prompt)
        draft.expand([Leaf(1, None, prompt[-1], 29)])
        found = again(leaves)
        if again == draft.expand:
            right = [sampler.guesses(row, 31, 5, (), draft.token_ids) for row in found]
    draft.close()
    for ours, theirs in zip(found, right, strict=True):
        assert [token for token, _ in ours] == [token for token, _ in theirs][: len(ours)]
        assert len(ours) == len(theirs)
        np.testing.assert_allclose([p for _, p in ours], [p for _, p in theirs], atol=0.02)


def test_faint_guesses_are_left_out_but_for_the_first(embedded: Path) -> None:
    draft = NativeDraft(embedded, context=256, threads=1)
    prompt = tokens_of(draft, 30)
    draft.open(prompt)
    (all_of_them,) = draft.guess([Leaf(1, None, prompt[-1], 29)], 8, [0.0], SamplingParams())
    floor = all_of_them[2][1]
    draft.open(prompt)
    (some,) = draft.guess([Leaf(1, None, prompt[-1], 29)], 8, [floor], SamplingParams())
    draft.open(prompt)
    (first,) = draft.guess([Leaf(1, None, prompt[-1], 29)], 8, [1.1], SamplingParams())
    draft.close()
    assert len(all_of_them) == 8
    assert some == all_of_them[:3]
    assert first == all_of_them[:1]


def test_a_flat_distribution_keeps_its_best(random_draft: Path) -> None:
    """Thousands of tokens are as likely as the best."""
    draft = NativeDraft(random_draft, context=256, threads=1)
    prompt = tokens_of(draft, 10)
    draft.open(prompt)
    (row,) = draft.expand([Leaf(1, None, prompt[-1], 9)])
    best = np.argsort(-row, kind="stable")[:4].tolist()
    assert int((row > row.max() - 10).sum()) > 5000
    draft.open(prompt)
    (found,) = draft.guess([Leaf(1, None, prompt[-1], 9)], 4, [0.0], SamplingParams())
    draft.close()
    assert [token for token, _ in found] == best


# Which engine


def test_a_draft_that_it_cannot_run_goes_to_llama_cpp(two_layers: Path, tmp_path: Path) -> None:
    path = tinymodels.quantised(two_layers, tmp_path / "odd.gguf", "Q2_K")
    draft = load_draft(path, SMALL)
    assert isinstance(draft, LlamaDraft)
    draft.close()
    with pytest.raises(BackendMissing, match="of type 11"):
        load_draft(path, EngineConfig(ctx_size=512, draft_engine="native"))


Change = Callable[[dict[str, Any], dict[str, Tensor]], object]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (
            lambda values, tensors: values.update({"general.architecture": "gemma"}),
            "architecture is gemma, not llama, qwen2, qwen3",
        ),
        (lambda values, tensors: values.update({"llama.expert_count": 4}), "experts"),
        (lambda values, tensors: values.update({"llama.rope.scaling.type": "yarn"}), "scaled (rope.scaling.type is yarn)"),
        (lambda values, tensors: values.update({"llama.rope.dimension_count": 32}), "a part of a head"),
        (lambda values, tensors: values.update({"llama.attention.key_length": 40}), "its heads are of 40"),
        (lambda values, tensors: values.update({"llama.attention.head_count_kv": 2}), "its shape is"),
        (lambda values, tensors: values.update({"llama.block_count": 4}), "no blk.2.attn_norm.weight"),
        (lambda values, tensors: values.update({"llama.feed_forward_length": 1024}), "not 1024 x 576"),
        (lambda values, tensors: values.pop("llama.embedding_length"), "does not say its llama.embedding_length"),
        (lambda values, tensors: tensors.pop("token_embd.weight"), "no token_embd.weight"),
        (lambda values, tensors: tensors.pop("blk.1.attn_k.weight"), "no blk.1.attn_k.weight"),
        (lambda values, tensors: tensors.update({"blk.0.ffn_gate.bias": Tensor(0, 1, 1536, None)}), "it has blk.0.ffn_gate.bias"),
        (lambda values, tensors: tensors.update({"blk.0.attn_q_norm.weight": Tensor(0, 1, 64, None)}), "not all of its queries"),
        (
            lambda values, tensors: tensors.update(
                {f"blk.{i}.attn_{n}_norm.weight": Tensor(0, 1, 576, None) for i in (0, 1) for n in "qk"}
            ),
            "blk.0.attn_q_norm.weight is 1 x 576, not 1 x 64",
        ),
        (lambda values, tensors: tensors.update({"blk.0.attn_q.bias": Tensor(8, 1, 576, None)}), "of type 8, not floats"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_it_cannot_run_is_said(two_layers: Path, change: Change, why: str) -> None:
    """Before anything is read that is not there."""
    file = GgufFile(two_layers)
    file.values["llama.block_count"] = 2
    Weights(file)
    change(file.values, file.tensors)
    with pytest.raises(BackendMissing, match=re.escape(why)):
        Weights(file)


def knows(processor: str) -> bool:
    nothing = [*compiled.compiler(), f"-march={processor}", "-x", "c", "-E", os.devnull]
    return subprocess.run(nothing, capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(platform.machine() != "x86_64", reason="these are names of x86 processors")
@pytest.mark.parametrize(("processor", "fast"), [("x86-64", False), ("haswell", True), ("alderlake", True), ("x86-64-v4", True)])
def test_where_it_is_not_fast_llama_cpp_drafts(embedded: Path, monkeypatch: pytest.MonkeyPatch, processor: str, fast: bool) -> None:
    """Built for other processors, asked and not run."""
    if not knows(processor):
        pytest.skip(f"this compiler does not know {processor}")
    library = native.load(native.build([f"-march={processor}"]))
    assert bool(library.duo_is_fast()) == fast
    monkeypatch.setattr(native, "library", lambda **_: library)
    if fast:
        assert native.fast_library() is library
        return
    draft = load_draft(embedded, SMALL)
    assert isinstance(draft, LlamaDraft)
    draft.close()
    chosen = load_draft(embedded, replace(SMALL, draft_engine="native"))
    assert isinstance(chosen, NativeDraft)
    chosen.close()


def test_the_engine_can_be_chosen(embedded: Path) -> None:
    for engine, kind in (("auto", NativeDraft), ("native", NativeDraft), ("llamacpp", LlamaDraft)):
        draft = load_draft(embedded, EngineConfig(ctx_size=256, threads=1, draft_engine=engine))  # type: ignore[arg-type]
        assert isinstance(draft, kind)
        draft.close()


def test_a_model_that_cannot_be_read_to_the_end_is_given_back(embedded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    freed: list[int] = []

    class Watched:
        def __getattr__(self, name: str) -> Any:
            return freed.append if name == "duo_free" else getattr(native.library(), name)

    def refuse(*_: Any) -> None:
        raise BackendMissing("no such weights")

    monkeypatch.setattr(Weights, "layer", refuse)
    with pytest.raises(BackendMissing, match="no such weights"):
        NativeDraft(embedded, context=256, threads=1, library=Watched())  # type: ignore[arg-type]
    assert len(freed) == 1
    native.library().duo_free(freed[0])


@pytest.mark.parametrize(
    ("mode", "gpu_layers", "awake"), [("duo", 0, 0.002), ("lockstep", 0, 0.002), ("chain", 0, 0.00005), ("serial", -1, 0.03)]
)
def test_how_long_threads_stay_awake(
    embedded: Path, monkeypatch: pytest.MonkeyPatch, mode: str, gpu_layers: int, awake: float
) -> None:
    """Through a pass of a GPU; not while the target wants their cores."""
    given: dict[str, float] = {}
    monkeypatch.setattr(native_draft, "NativeDraft", lambda path, **options: given.update(options))
    load_draft(embedded, EngineConfig(mode=mode, gpu_layers=gpu_layers))  # type: ignore[arg-type]
    assert given["awake"] == awake


@pytest.mark.parametrize(("gpu_layers", "awake"), [(0, 0.002), (-1, 0.03)])
def test_a_worker_knows_whether_the_target_wants_its_cores(
    embedded: Path, monkeypatch: pytest.MonkeyPatch, gpu_layers: int, awake: float
) -> None:
    """What an engine starts it with says so."""
    commands: list[list[str]] = []
    monkeypatch.setattr(launch, "process", commands.append)
    launch.spawn(embedded, EngineConfig(ctx_size=256, threads=1, gpu_layers=gpu_layers))
    given: dict[str, float] = {}

    def load(_path: Path, **options: Any) -> None:
        given.update(options)
        raise ModelUnreadable("enough seen")

    monkeypatch.setattr(native_draft, "NativeDraft", load)
    monkeypatch.setattr(worker, "_settle", lambda options: None)
    ours, theirs = socket.socketpair()
    with ours, tempfile.TemporaryFile() as flag:
        arguments = commands[0][commands[0].index("duodecoding.worker") + 1 :]
        worker.main([*arguments, f"--fd={theirs.detach()}", f"--flag-fd={flag.fileno()}", f"--parent={os.getpid()}"])
    assert given["awake"] == awake


@pytest.fixture
def unbuilt(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[pytest.MonkeyPatch]:
    monkeypatch.setenv("DUO_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("CC", raising=False)
    native.library.cache_clear()
    yield monkeypatch
    native.library.cache_clear()


def test_without_a_compiler_drafts_run_on_llama_cpp(unbuilt: pytest.MonkeyPatch, embedded: Path, tmp_path: Path) -> None:
    unbuilt.setenv("PATH", str(tmp_path))
    draft = load_draft(embedded, SMALL)
    assert isinstance(draft, LlamaDraft)
    draft.close()
    with pytest.raises(BackendMissing, match="no C compiler"):
        load_draft(embedded, EngineConfig(ctx_size=512, draft_engine="native"))


def test_a_compiler_that_fails_is_quoted(unbuilt: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiler = tmp_path / "cc"
    compiler.write_text("#!/bin/sh\necho 'native.c:1: error: no such machine' >&2\nexit 1\n")
    compiler.chmod(0o755)
    unbuilt.setenv("CC", str(compiler))
    with pytest.raises(BackendMissing, match="no such machine"):
        native.library()
    assert list((tmp_path / "cache" / "native").iterdir()) == []


def test_a_cache_that_is_no_folder(unbuilt: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    unbuilt.setenv("DUO_CACHE", str(tmp_path / "file"))
    with pytest.raises(BackendMissing, match="cannot be built"):
        native.library()


def test_it_is_built_once(unbuilt: pytest.MonkeyPatch, tmp_path: Path) -> None:
    first = native.build()
    unbuilt.setattr(compiled, "_compile", lambda *_: pytest.fail("built again"))
    assert native.build() == first
    assert first.parent == tmp_path / "cache" / "native"


# Threads, files


def test_threads_sleep_wake_and_leave(embedded: Path) -> None:
    before = len(list(Path("/proc/self/task").iterdir()))
    draft = NativeDraft(embedded, context=256, threads=4)
    prompt = tokens_of(draft, 30)
    rows = []
    for pause in (0.0, 0.05, 0.0):
        time.sleep(pause)
        draft.open([7])
        draft.open(prompt)
        rows.append(draft.expand([Leaf(1, None, prompt[-1], 29)])[0].copy())
    assert len(list(Path("/proc/self/task").iterdir())) == before + 3
    draft.close()
    draft.close()
    assert len(list(Path("/proc/self/task").iterdir())) == before
    assert np.array_equal(rows[0], rows[1])
    assert np.array_equal(rows[0], rows[2])


def test_two_models_at_once(embedded: Path) -> None:
    drafts = [NativeDraft(embedded, context=256, threads=2) for _ in range(2)]
    prompt, rows = tokens_of(drafts[0], 40), {}

    def work(name: int) -> None:
        for _ in range(20):
            drafts[name].open([7])
            drafts[name].open(prompt)
            rows[name] = drafts[name].expand([Leaf(1, None, prompt[-1], 39)])[0].copy()

    threads = [threading.Thread(target=work, args=(name,)) for name in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for draft in drafts:
        draft.close()
    assert np.array_equal(rows[0], rows[1])


def test_a_file_that_ends_early(embedded: Path, tmp_path: Path) -> None:
    whole = embedded.read_bytes()
    for size in (30, 1000, 500_000, 5_000_000, len(whole) - 1000):
        short = tmp_path / "short.gguf"
        short.write_bytes(whole[:size])
        with pytest.raises(ModelUnreadable, match="header is broken"):
            GgufFile(short)


def test_what_a_file_holds(embedded: Path) -> None:
    file, right = GgufFile(embedded), gguf.GGUFReader(embedded)
    assert file.values["llama.block_count"] == 3
    assert {tensor.name for tensor in right.tensors} == set(file.tensors)
    for tensor in right.tensors:
        ours = file.tensors[tensor.name]
        assert ours.data is not None
        assert (ours.kind, ours.columns) == (int(tensor.tensor_type), int(tensor.shape[0]))
        assert np.array_equal(ours.data, tensor.data.reshape(-1).view(np.uint8))
