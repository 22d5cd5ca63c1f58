"""The target on our own engine: the same bits whatever shares a pass, the same answers in all modes, and who may be served."""

from __future__ import annotations

import platform
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import tinymodels

from duodecoding import LLM, SamplingParams, machine
from duodecoding.backends import compiled, engine_of, load_target, native, native_target
from duodecoding.backends.llamacpp_target import LlamaTarget
from duodecoding.backends.native_target import NativeConversation, NativeTarget
from duodecoding.core import walk
from duodecoding.errors import BackendMissing, Interrupted, ModelUnreadable, UsageError
from duodecoding.sampling import Row
from duodecoding.tree import ROOT, PassNode
from duodecoding.types import EngineConfig

SMALL = EngineConfig(ctx_size=512, threads=1)
GREEDY = SamplingParams()
TEXT = "In a small town by the sea there lived a clockmaker who could not sleep. Every night he counted the bells, and every night "
KINDS = ("as it comes", "Q4_0", "Q8_0", "Q4_K_M", "Q5_K_M", "qwen2 Q4_K_M", "qwen3 Q6_K")


@pytest.fixture(scope="module")
def files(model_path: Path, poor_draft: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two layers (six as it comes) in several types and architectures."""
    folder = tmp_path_factory.mktemp("models")
    floats = {"": tinymodels.requantised(model_path, folder / "llama.gguf", 2, gguf.GGMLQuantizationType.F16)}
    floats |= {name: tinymodels.as_qwen(model_path, folder / f"{name}.gguf", 2, name) for name in ("qwen2", "qwen3")}
    found = {"as it comes": poor_draft, "floats": floats[""]}
    for kind in KINDS[1:]:
        name, _, file_type = kind.rpartition(" ")
        found[kind] = tinymodels.quantised(floats[name], folder / f"{kind}.gguf", file_type)
    return found


def tokens_of(target: NativeTarget, count: int) -> list[int]:
    text = target.vocabulary.tokenize(TEXT, special=False, bos=False)
    return (text * (count // len(text) + 1))[:count]


def logits(target: NativeTarget, conversation: NativeConversation, nodes: Sequence[PassNode] = ()) -> Row:
    """Of a pass: (1 + nodes, vocabulary)."""
    target.verify([(conversation, nodes)])
    return target._model.logits[: 1 + len(nodes)].copy()


def alone(target: NativeTarget, history: Sequence[int], ahead: int) -> Row:
    """The logits after a text, of which all but the last tokens are a prompt, read at once; the others come one by one."""
    begin = max(1, len(history) - ahead)
    target.open([9], GREEDY)
    conversation = target.open(history[:begin], GREEDY)
    for token in history[begin:]:
        target.verify([(conversation, ())])
        conversation.commit([token])
    return logits(target, conversation)[0]


def some_tree(dice: random.Random, size: int, vocabulary: int) -> list[PassNode]:
    nodes: list[PassNode] = []
    for _ in range(size):
        parent = dice.randrange(-1, len(nodes)) if dice.random() < 0.5 else len(nodes) - 1
        nodes.append(PassNode(parent, dice.randrange(vocabulary)))
    return list(dict.fromkeys(nodes))


def path_to(nodes: Sequence[PassNode], at: int) -> list[int]:
    path: list[int] = []
    while at != ROOT:
        path.append(at)
        at = nodes[at].parent
    return path[::-1]


def compare(one: NativeTarget, other: NativeTarget, lengths: Sequence[int], seed: int) -> int:
    """Trees grown, accepted in part and grown again by `one`, rows of them alone by `other`. How many were compared."""
    dice, compared = random.Random(seed), 0
    for length in lengths:
        one.open([9], GREEDY)
        conversation = one.open(tokens_of(one, length), GREEDY)
        for _ in range(2):
            nodes = some_tree(dice, dice.randrange(1, 40), one.vocabulary.size)
            rows = logits(one, conversation, nodes)
            for i in (ROOT, *dice.sample(range(len(nodes)), min(2, len(nodes)))):
                history = [*conversation.tokens, *(nodes[at].token for at in path_to(nodes, i))]
                right = alone(other, history, ahead=dice.randrange(1, 6))
                assert np.array_equal(rows[i + 1], right), f"{length} tokens, node {i} of {len(nodes)}"
                compared += 1
            accepted = path_to(nodes, dice.randrange(-1, len(nodes)))
            conversation.commit([*(nodes[at].token for at in accepted), dice.randrange(one.vocabulary.size)])
            assert conversation.cached == len(conversation.tokens) - 1
    return compared


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_the_same_to_the_bit(files: dict[str, Path], kind: str) -> None:
    """In trees and in plain text, by one thread and by three, in one piece and token by token, across the ends of attention's
    stretches (64 positions)."""
    one, other = (NativeTarget(files[kind], context=512, threads=threads) for threads in (3, 1))
    assert compare(one, other, (1, 40, 60, 64, 126, 200), seed=len(kind)) > 20
    one.close()
    other.close()


@pytest.mark.skipif(platform.machine() != "x86_64", reason="these are names of x86 processors")
@pytest.mark.parametrize(("processor", "needs"), [("x86-64", "sse2"), ("haswell", "avx2"), ("alderlake", "avx_vnni")])
def test_and_on_other_processors(files: dict[str, Path], processor: str, needs: str) -> None:
    if needs not in machine.cpu("flags").split():
        pytest.skip(f"this machine has no {needs}")
    library = native.load(native.build([f"-march={processor}"], exact=True))
    one, other = (NativeTarget(files["Q4_K_M"], context=256, threads=threads, library=library) for threads in (2, 1))
    assert compare(one, other, (50, 64), seed=5) > 5
    one.close()
    other.close()


@pytest.mark.parametrize("tuning", [(), ("-DPLAIN_FOLD",)], ids=["as built here", "by a compiler that cannot shuffle vectors"])
def test_logits_are_near_those_of_llama_cpp(files: dict[str, Path], tuning: tuple[str, ...]) -> None:
    library = native.load(native.build([*compiled._tuning(), *tuning], exact=True))
    ours = NativeTarget(files["as it comes"], context=512, threads=1, library=library)
    theirs = load_target(files["as it comes"], replace(SMALL, backend="llamacpp"))
    assert isinstance(theirs, LlamaTarget)
    for length in (1, 30, 150):
        prompt = tokens_of(ours, length)
        row = logits(ours, ours.open(prompt, GREEDY))[0]
        theirs.verify([(theirs.open(prompt, GREEDY), ())])[0](ROOT)
        right = theirs._context.logits()[0]
        assert float(np.corrcoef(row, right)[0, 1]) > 0.999
        assert row.argmax() == right.argmax()
    ours.close()
    theirs.close()


# Conversations


@pytest.fixture(scope="module")
def target(files: dict[str, Path]) -> Iterator[NativeTarget]:
    loaded = NativeTarget(files["as it comes"], context=512, threads=2, keep_bytes=50_000_000)
    yield loaded
    loaded.close()


def test_a_conversation_goes_on_with_what_it_has(target: NativeTarget) -> None:
    """Behind another one, of which it shares the beginning: what was kept is there to the bit."""
    prompt = tokens_of(target, 150)
    first = target.open(prompt, GREEDY)
    right = logits(target, first)
    other = target.open([*prompt[:100], *range(50, 100)], GREEDY)
    assert other.reused == 100
    logits(target, other)
    assert np.array_equal(logits(target, target.open(prompt, GREEDY)), right)
    again = target.open([*prompt, 7], GREEDY)
    assert again.reused == 150
    target.open([3] * 60, GREEDY)
    back = target.open([*prompt, 7], GREEDY)
    assert back.reused >= 149
    assert np.array_equal(logits(target, back), logits(target, again))


def test_a_long_prompt_is_read_in_pieces(target: NativeTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = tokens_of(target, 400)
    right = alone(target, prompt, ahead=1)
    monkeypatch.setattr(native_target, "PARTS_BYTES", 1)
    assert np.array_equal(alone(target, prompt, ahead=1), right)


def test_a_stopped_pass_leaves_no_trace(target: NativeTarget) -> None:
    prompt = tokens_of(target, 50)
    right = alone(target, prompt, ahead=1)
    target.open([9], GREEDY)
    conversation = target.open(prompt, GREEDY)
    target.abort()
    with pytest.raises(Interrupted):
        target.verify([(conversation, ())])
    assert np.array_equal(logits(target, conversation)[0], right)
    target.abort()  # between two passes of an answer that has ended
    assert np.array_equal(logits(target, target.open(prompt, GREEDY))[0], right)


def test_the_token_after_a_node_is_the_samplers(target: NativeTarget) -> None:
    """Its own path counts as said: penalties know it."""
    params = SamplingParams(temperature=0.7, seed=3, repetition_penalty=1.3)
    conversation = target.open(tokens_of(target, 30), params)
    nodes = [PassNode(ROOT, 100), PassNode(0, 200), PassNode(ROOT, 300)]
    choose = target.verify([(conversation, nodes)])[0]
    rows = target._model.logits
    for i, path in ((ROOT, []), (0, [100]), (1, [100, 200]), (2, [300])):
        assert choose(i) == conversation.sampler.choose(rows[i + 1], 30 + len(path), path)


def test_more_than_it_can_verify_is_refused(target: NativeTarget) -> None:
    conversation = target.open([5, 6], GREEDY)
    with pytest.raises(UsageError, match="a tree of 256 nodes"):
        target.verify([(conversation, [PassNode(i - 1, 5) for i in range(256)])])
    with pytest.raises(UsageError, match="2 conversations"):
        target.verify([(conversation, ())] * 2)


# Answers


@pytest.mark.parametrize("params", [SamplingParams(max_tokens=40), SamplingParams(max_tokens=40, temperature=0.8, seed=5)], ids=str)
@pytest.mark.parametrize(
    ("mode", "draft"), [("chain", "smollm2-draft"), ("serial", "smollm2-draft"), ("duo", "free"), ("duo", "lookup")]
)
def test_every_mode_gives_the_same_tokens(model_path: Path, params: SamplingParams, mode: str, draft: str) -> None:
    prompts = [
        "List the numbers from one to twelve, in words, and then again.",
        "The ferry leaves the old harbour at nine. The ferry",
    ]
    with LLM(str(model_path), draft="none", mode="off", ctx_size=512, threads=1, backend="native") as llm:
        right = [llm.generate(prompt, params).token_ids for prompt in prompts]
        assert isinstance(llm.target, NativeTarget)
    with LLM(str(model_path), draft=draft, mode=mode, ctx_size=512, threads=1, backend="native", warmup=False) as llm:
        found = [llm.generate(prompt, params) for prompt in prompts]
    assert [result.token_ids for result in found] == right
    assert sum(result.stats.accepted for result in found) > 0


# Which engine


def test_who_serves_what(files: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = files["Q4_K_M"], files["floats"]
    assert isinstance(load_target(ours, SMALL), NativeTarget)
    assert isinstance(load_target(ours, replace(SMALL, backend="llamacpp")), LlamaTarget)
    assert isinstance(load_target(theirs, SMALL), LlamaTarget)
    with pytest.raises(BackendMissing, match="is of floats, which would become bytes"):
        load_target(theirs, replace(SMALL, backend="native"))
    monkeypatch.setattr(machine, "most_memory", lambda: 1_000_000)
    with pytest.raises(BackendMissing, match=r"of this machine's 0\.0 GB"):
        load_target(ours, replace(SMALL, backend="native"))
    assert isinstance(load_target(ours, SMALL), LlamaTarget)


def test_who_serves_is_known_before(files: dict[str, Path], tmp_path: Path) -> None:
    for config, expected in (
        (SMALL, "native"),
        (replace(SMALL, backend="llamacpp"), "llamacpp"),
        (replace(SMALL, gpu_layers=1), "llamacpp"),
    ):
        assert engine_of(files["Q4_K_M"], config) == expected
    assert engine_of(files["floats"], SMALL) == "llamacpp"
    assert engine_of(tmp_path, SMALL) == "torch"


@pytest.mark.parametrize("key", ["rope.scaling.factor", "rope.scale_linear", "rope.scaling.attn_factor"])
def test_scaled_positions_are_left_to_llama_cpp(files: dict[str, Path], tmp_path: Path, key: str) -> None:
    """A factor counts without a type: files of 2023 have no more than that."""
    scaled = tinymodels.with_number(files["Q4_K_M"], tmp_path / "scaled.gguf", 2, f"llama.{key}", 4.0)
    with pytest.raises(BackendMissing, match=rf"positions are scaled \({key} is 4.0\)"):
        load_target(scaled, replace(SMALL, backend="native"))
    assert engine_of(scaled, SMALL) == "llamacpp"


def test_the_shortest_context(files: dict[str, Path]) -> None:
    """Whoever measures passes at the start goes on past its end."""
    with LLM(str(files["Q4_K_M"]), draft="free", ctx_size=16, threads=1) as llm:
        assert llm.context == 16
        result = llm.generate([9, 10], SamplingParams(max_tokens=30, ignore_eos=True))
    assert len(result.token_ids) == 14


def test_where_it_is_not_fast_llama_cpp_serves(files: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    slow = (
        native.load(native.build(["-march=x86-64"], exact=True)) if platform.machine() == "x86_64" else native.library(exact=True)
    )
    monkeypatch.setattr(native, "library", lambda *, exact=False: slow)
    assert isinstance(load_target(files["Q4_K_M"], SMALL), LlamaTarget)
    assert isinstance(load_target(files["Q4_K_M"], replace(SMALL, backend="native")), NativeTarget)


def test_what_it_cannot_serve(files: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="works on the CPU"):
        load_target(files["Q4_K_M"], replace(SMALL, backend="native", gpu_layers=-1))
    with pytest.raises(UsageError, match="holds no GGUF file"):
        load_target(tmp_path, replace(SMALL, backend="native"))
    draft = Path(str(machine.__file__)).parent / "drafts" / "smollm2-draft.gguf"
    with pytest.raises(ModelUnreadable, match="it is a draft"):
        load_target(draft, replace(SMALL, backend="native"))


def test_loading_shows_how_far_it_is(files: dict[str, Path]) -> None:
    seen: list[tuple[str, float]] = []
    load_target(files["as it comes"], SMALL, lambda what, share: seen.append((what, share))).close()
    assert [share for _, share in seen] == pytest.approx([i / 6 for i in range(6)])
    assert {what for what, _ in seen} == {"loading poor.gguf"}


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="only Linux tells what is in memory")
def test_what_was_copied_of_the_file_leaves_memory(model_path: Path) -> None:
    """Weights are copied into their form; the file's own would count a second time."""

    def mapped() -> int:
        """Kilobytes of the file that are in this process's memory."""
        lines, found, inside = Path("/proc/self/smaps").read_text().splitlines(), 0, False
        for line in lines:
            if "-" in line.split()[0]:
                inside = line.endswith(model_path.name)
            elif inside and line.startswith("Rss:"):
                found += int(line.split()[1])
        return found

    before = mapped()
    serving = NativeTarget(model_path, context=256, threads=1)
    conversation = serving.open([9, 10], GREEDY)
    logits(serving, conversation)
    assert mapped() - before < model_path.stat().st_size / 1024 / 10
    serving.close()
    assert mapped() <= before, "nothing holds the file"


def test_walking_a_pass(target: NativeTarget) -> None:
    """What the target says itself, given to it as guesses, is accepted to the end."""
    prompt = tokens_of(target, 20)
    conversation, said = target.open(prompt, GREEDY), list[int]()
    for _ in range(5):
        token = target.verify([(conversation, ())])[0](ROOT).token
        conversation.commit([token])
        said.append(token)
    again = target.open(prompt, GREEDY)
    nodes = [PassNode(i - 1, token) for i, token in enumerate(said[:4])]
    verdict = walk(nodes, target.verify([(again, nodes)])[0])
    assert [choice.token for choice in verdict.choices] == said
    assert verdict.accepted == (0, 1, 2, 3)
