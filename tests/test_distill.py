"""Making drafts, with a target of four tiny random layers: it repeats itself, which is all that a student has to learn."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from duodecoding.backends import load_draft, read_vocabulary
from duodecoding.backends.base import Leaf
from duodecoding.cli.main import main
from duodecoding.errors import DuoError, ModelUnreadable, UsageError
from duodecoding.text import check_pair

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from duodecoding.distill import data, export, source, student, train  # noqa: E402
from duodecoding.distill.evaluate import agreement  # noqa: E402
from duodecoding.distill.generate import Generator, Job  # noqa: E402
from duodecoding.distill.model import as_written, attend_within, enter, leave, pack  # noqa: E402
from duodecoding.distill.pipeline import Options, Run, own_prompts  # noqa: E402
from duodecoding.distill.recipes import SHARES, Recipes, Text  # noqa: E402
from duodecoding.types import EngineConfig  # noqa: E402

SMALL = EngineConfig(ctx_size=1024, threads=1)

CPU, F32, VOCAB = torch.device("cpu"), torch.float32, 800
QUICK = train.Settings(steps=30, tokens=1024, rate=4e-3, warmup=5, mean=0.9, evaluate_every=1e9, checkpoint_every=1e9)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def tiny(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with the first tokens of the built-in model's tokenizer."""
    reader = gguf.GGUFReader(model_path)
    fields, known = [], set(reader.fields["tokenizer.ggml.tokens"].contents()[:VOCAB])
    for name, value, types in export.trimmed(export._kept_fields(reader), np.arange(VOCAB)):
        merges = [m for m in value if {*m.split(" "), m.replace(" ", "")} <= known] if name.endswith("merges") else value
        fields.append((name, merges, types))
    shape = replace(export.read_shape(reader), layers=4, width=64, heads=4, kv_heads=2, head_dim=16, neurons=96, vocab=VOCAB)
    random = np.random.default_rng(0)
    weights: export.Weights = {}
    for name, size in export.matrices(shape).items():
        spread = 0.2 if name == export.EMBEDDING else 0.12
        weights[name] = (
            random.uniform(0.5, 1.5, size).astype(np.float32)
            if len(size) == 1
            else random.normal(0, spread, size).astype(np.float32)
        )
    weights[export.FINAL_NORM] *= 3
    for layer in range(4):  # apart, as others write them: transformers does not know them as one
        for part, rows in zip("qkv", np.split(weights.pop(f"blk.{layer}.attn_qkv.weight"), [64, 96]), strict=True):
            weights[f"blk.{layer}.attn_{part}.weight"] = rows
    path = tmp_path_factory.mktemp("tiny") / "tiny.gguf"
    export.write_gguf(path, "tiny", shape, export.quantise(weights, "f16"), fields, "f16")
    return path


@pytest.fixture(scope="module")
def target(tiny: Path) -> source.Source:
    return source.load(tiny)


@pytest.fixture(scope="module")
def teacher(target: source.Source) -> Any:
    return student.load(target.shape, target.weights, CPU).requires_grad_(False)


@pytest.fixture(scope="module")
def theirs(tiny: Path) -> Any:
    """The same model in transformers."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(str(tiny.parent), gguf_file=tiny.name, dtype=F32)


@pytest.fixture(scope="module")
def corpus(teacher: Any) -> data.Corpus:
    random = np.random.default_rng(1)
    jobs = [Job(random.integers(3, VOCAB, 12).astype(np.int32)) for _ in range(48)]
    found = data.Corpus()
    generator = Generator(teacher, frozenset({0, 2}), rows=16, answer=24, dtype=F32)
    found.add(data.Sample("ab"[i % 2], job.ids, answer, True) for i, (job, answer) in enumerate(generator.run(jobs)))
    return found


def hidden(model: Any, ids: np.ndarray) -> Any:
    packed = pack([ids], CPU)
    return model(packed.ids, packed.positions, attend_within(packed), F32)


def trained(teacher: Any, students: list[Any], corpus: data.Corpus, settings: train.Settings = QUICK, **more: Any) -> train.Trainer:
    trainer = train.Trainer(teacher, students, corpus, settings, F32)
    evaluate = more.pop("evaluate", lambda model, of: agreement(model, of, corpus, 4096, F32))
    if more.pop("resume", False):
        assert trainer.resume(more["folder"])
    trainer.run(evaluate, more.pop("report", lambda progress: None), more.pop("folder", None))
    return trainer


# The target


def test_the_teacher_is_the_target(teacher: Any, theirs: Any) -> None:
    texts = [np.arange(5, 40), np.arange(300, 310)]
    packed = pack(texts, CPU)
    ours = teacher(packed.ids, packed.positions, attend_within(packed), F32) @ teacher.head.T
    expected = torch.cat([theirs(torch.tensor(text[None])).logits[0] for text in texts])
    assert torch.allclose(ours, expected, atol=1e-3)


def test_a_directory_is_read_like_its_gguf(target: source.Source, theirs: Any, tmp_path: Path) -> None:
    from transformers import LlamaForCausalLM

    plain = LlamaForCausalLM(type(theirs.config)(**theirs.config.to_dict()))  # one from a GGUF file cannot be saved
    plain.load_state_dict(theirs.state_dict())
    plain.save_pretrained(tmp_path)
    target.tokenizer.save_pretrained(tmp_path)
    read = source.load(tmp_path)
    assert read.shape == replace(target.shape, context=read.shape.context)
    for name, tensor in target.weights.items():
        assert np.allclose(read.weights[name], tensor, atol=1e-6), name
    assert read.texts == target.texts
    assert read.end_tokens >= {2}


def test_a_target_that_cannot_be_read(tmp_path: Path, model_path: Path) -> None:
    (tmp_path / "odd.gguf").write_bytes(b"GGUF, but not really")
    with pytest.raises(ModelUnreadable, match="odd"):
        source.load(tmp_path / "odd.gguf")


# Data


def test_generation_is_plain_greedy_generation(teacher: Any, theirs: Any) -> None:
    """More prompts than rows, of all lengths: whoever sits where, every answer is that of its prompt alone."""
    random = np.random.default_rng(5)
    jobs = [Job(random.integers(3, VOCAB, n).astype(np.int32)) for n in (1, 2, 9, 127, 128, 129, 200, 30, 31)]
    ends = frozenset({0, 2, 17, 23, 40})
    generator = Generator(teacher, ends, rows=3, answer=20, dtype=F32)
    answered = list(generator.run(jobs))
    assert {len(job.ids) for job, _ in answered} == {len(job.ids) for job in jobs}
    for job, answer in answered:
        ids = torch.tensor(job.ids[None].astype(np.int64))
        expected = theirs.generate(ids, max_new_tokens=20, do_sample=False, eos_token_id=sorted(ends), pad_token_id=2)
        assert answer.tolist() == expected[0, len(job.ids) :].tolist()


def test_sampled_answers_follow_the_distribution(teacher: Any) -> None:
    prompt = np.array([5, 6, 7], np.int32)
    generator = Generator(teacher, frozenset(), rows=128, answer=1, dtype=F32)
    torch.manual_seed(0)
    firsts = [int(answer[0]) for _, answer in generator.run([Job(prompt, 2.0)] * 1024)]
    p = torch.softmax((hidden(teacher, prompt)[-1] @ teacher.head.T) / 2, -1).numpy()
    seen = np.bincount(firsts, minlength=VOCAB) / len(firsts)
    top = np.argsort(-p)[:5]
    assert np.abs(seen[top] - p[top]).max() < 4 * np.sqrt(0.25 / len(firsts))


def test_broken_lines_are_named_and_left_out(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl.gz"
    lines = [
        '{"prompt": "one", "source": "t0/x"}',
        "not json",
        '{"text": "no prompt"}',
        "",
        '{"prompt": " "}',
        "[1]",
        '{"prompt": "two"}',
    ]
    path.write_bytes(gzip.compress("\n".join(lines).encode()))
    complaints: list[str] = []
    assert data.read_prompts(path, complaints.append) == [Text("t0", "one"), Text("prompt", "two")]
    assert [line.split(" line ")[1].split(" ")[0] for line in complaints] == ["2", "3", "5", "6"]
    path.write_bytes(b"{}")
    with pytest.raises(UsageError, match="no prompts"):
        data.read_prompts(path, complaints.append)
    with pytest.raises(UsageError, match="cannot read"):
        data.read_prompts(tmp_path / "missing", complaints.append)


def test_prompts_that_share_eight_words_with_held_out_ones_are_dropped(tmp_path: Path) -> None:
    turns = ["One, two, three; four FIVE six seven eight nine."]
    (tmp_path / "qa.jsonl").write_text(json.dumps({"question_id": 1, "turns": turns}) + "\n")
    overlap = data.Overlap(tmp_path)
    assert overlap("zero one two three four five six seven eight")
    assert not overlap("one two three four five six seven and eight nine")
    assert overlap.dropped == 1
    assert not data.Overlap(None)("one two three four five six seven eight nine")


def test_recipes_make_every_kind_and_keep_some_for_evaluation() -> None:
    recipes = Recipes(own_prompts(), lambda text: "Quatschwort" in text)
    recipes.keep(Text("german", ""), "Das ist ein ganz kurzer Satz. Der hier ist Quatschwort und bleibt draussen.")
    random = np.random.default_rng(0)
    mixed, held = recipes.mixed(random, 1500), recipes.held_out(random, 30)
    assert {text.kind for text in mixed} >= set(SHARES)
    assert {text.prompt for text in mixed}.isdisjoint(text.prompt for text in held)
    assert not any("{" in text.prompt for text in mixed if text.kind in ("open", "translation", "qa"))
    assert any("ganz kurzer Satz" in text.prompt for text in mixed)
    assert not any("Quatschwort" in text.prompt for text in mixed)


# Students


def test_layers_are_named(target: source.Source) -> None:
    assert student.parse_layers("4", 30) == ((0,), (1,), (28,), (29,))
    assert student.parse_layers("3", 30) == ((0,), (1,), (29,))
    assert student.parse_layers("0+1,28+29", 30) == ((0, 1), (28, 29))
    for wrong in ("0", "31", "a", "0,30", "0+1,2", "1,-1"):
        with pytest.raises(UsageError):
            student.parse_layers(wrong, 30)


def test_merged_layers_work_side_by_side(target: source.Source, teacher: Any) -> None:
    fat = student.make(target, "fat", ((1, 3),), None, CPU).model
    ids = np.arange(50, 70)
    packed = pack([ids], CPU)
    x, angles, attend = teacher.token_embd.weight[packed.ids], teacher.angles[packed.positions], attend_within(packed)
    eps, zero = target.shape.eps, torch.zeros_like(x)
    added = []
    for block in (teacher.blk[1], teacher.blk[3]):
        seen = attend(0, *enter(x, block.attn_norm.weight, block.attn_qkv.weight, angles, 4, 2, eps)).flatten(1)
        added.append(seen @ block.attn_output.weight.T)
    x = x + sum(added)
    for block in (teacher.blk[1], teacher.blk[3]):
        mlp = (block.ffn_gate.weight, block.ffn_up.weight, block.ffn_down.weight)
        nothing = torch.zeros(len(ids), 4, 16)
        added.append(leave(x, nothing, block.attn_output.weight, block.ffn_norm.weight, mlp, eps) - x)
    x = x + added[2] + added[3] + zero
    expected = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * teacher.output_norm.weight
    assert torch.allclose(hidden(fat, ids), expected, atol=1e-4)


def test_a_trimmed_vocabulary_keeps_what_it_must(target: source.Source) -> None:
    counts = np.zeros(VOCAB, np.int64)
    counts[700:720] = 5
    trim = student.trim_vocabulary(target, counts, 400, CPU)
    kept = set(trim.token_ids.tolist())
    assert kept >= {0, 1, 2, *range(700, 720)}
    assert kept >= {i for i, text in enumerate(target.texts) if len(text) == 1}
    assert np.array_equal(trim.token_ids[trim.stand_ins[trim.token_ids]], trim.token_ids)
    rows = target.weights[export.EMBEDDING]
    rows = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    missing = next(i for i in range(VOCAB) if i not in kept)
    assert trim.stand_ins[missing] == (rows[trim.token_ids] @ rows[missing]).argmax()
    with pytest.raises(UsageError, match="must stay"):
        student.trim_vocabulary(target, counts, 100, CPU)


# Training


@pytest.mark.parametrize("kind", train.LOSSES)
def test_the_gradient_by_hand_is_that_of_autograd(kind: str) -> None:
    torch.manual_seed(0)
    logits, truth = torch.randn(5, 30, requires_grad=True), torch.randn(5, 30)
    s, t = logits.log_softmax(-1), truth.log_softmax(-1)
    forward, reverse = (t.exp() * (t - s)).sum(), (s.exp() * (s - t)).sum()
    expected = {"forward": forward, "reverse": reverse, "mixed": (forward + reverse) / 2}[kind]
    expected.backward()
    loss, gradient = train.divergence(logits.detach(), truth, kind)
    assert torch.allclose(loss, expected)
    assert torch.allclose(gradient, logits.grad, atol=1e-6)


def test_training_brings_all_students_nearer(target: source.Source, teacher: Any, corpus: data.Corpus) -> None:
    trim = student.trim_vocabulary(target, corpus.counts(VOCAB), 500, CPU)
    plans = {"thin": (((0,), (3,)), None), "fat": (((0, 1), (2, 3)), None), "trimmed": (((0,), (3,)), trim)}
    students = [student.make(target, name, *plan, CPU) for name, plan in plans.items()]
    before = [agreement(s.model, s, corpus, 4096, F32)["all"]["top1"] for s in students]
    losses: list[list[float]] = []
    trainer = trained(teacher, students, corpus, report=lambda progress: losses.append(progress.losses))
    for number, of in enumerate(students):
        assert losses[-1][number] < 0.6 * losses[0][number], of.name
        assert of.best_score > before[number] + 0.1, of.name
    assert {entry["student"] for entry in trainer.progress.log} == set(plans)
    assert set(trainer.progress.log[-1]["mean"]) == {"a", "b", "all"}


def test_labels_are_the_same_when_they_are_kept(teacher: Any, corpus: data.Corpus) -> None:
    kept = train.Labels(teacher, corpus, F32)
    batch = train.Batch(corpus, np.array([3, 0, 7]), CPU)
    first = kept(batch).clone()
    assert torch.allclose(first, kept._compute(batch))
    assert torch.equal(
        kept(train.Batch(corpus, np.array([0]), CPU)), first[len(corpus.texts[3]) - 12 :][: len(corpus.texts[0]) - 12]
    )


def test_resume_goes_on(target: source.Source, teacher: Any, corpus: data.Corpus, tmp_path: Path) -> None:
    trim = student.trim_vocabulary(target, corpus.counts(VOCAB), 500, CPU)
    first = student.make(target, "d", ((0,),), trim, CPU)
    trained(teacher, [first], corpus, replace(QUICK, steps=6), folder=tmp_path)
    other = student.trim_vocabulary(target, np.arange(VOCAB), 500, CPU)  # more data may have changed the choice
    second = student.make(target, "d", ((0,),), other, CPU)
    trainer = trained(teacher, [second], corpus, replace(QUICK, steps=9), folder=tmp_path, resume=True)
    assert trainer.progress.step == 9
    assert np.array_equal(second.trim.token_ids, trim.token_ids)
    assert int(next(iter(second.optimizer.state.values()))["step"]) == 9
    assert second.best_score >= first.best_score
    stranger = train.Trainer(teacher, [student.make(target, "e", ((0,),), None, CPU)], corpus, QUICK, F32)
    with pytest.raises(UsageError, match="other drafts"):
        stranger.resume(tmp_path)


def test_losses_that_are_no_numbers(
    target: source.Source, teacher: Any, corpus: data.Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few are skipped and change nothing; when they go on, training stops with the weights as they were."""
    of = student.make(target, "d", ((0,),), None, CPU)
    real, calls = train.divergence, []

    def odd(*given: Any) -> Any:
        loss, gradient = real(*given)
        calls.append(1)
        return (loss * float("nan"), gradient * float("nan")) if len(calls) in bad else (loss, gradient)

    monkeypatch.setattr(train, "divergence", odd)
    bad: Any = (3, 4)
    trained(teacher, [of], corpus, replace(QUICK, steps=8))
    assert all(torch.isfinite(p).all() for p in of.model.parameters())
    calls.clear()
    bad = range(2, 100)
    before = [p.clone() for p in of.model.parameters()]
    with pytest.raises(DuoError, match="no numbers"):
        trained(teacher, [of], corpus, replace(QUICK, steps=8, rate=0.0, decay=0.0))
    assert all(torch.equal(p, q) for p, q in zip(before, of.model.parameters(), strict=True))
    assert of.best


def test_an_interrupt_keeps_the_best_so_far(target: source.Source, teacher: Any, corpus: data.Corpus) -> None:
    of = student.make(target, "d", ((0,),), None, CPU)

    def stop(progress: train.Progress) -> None:
        if progress.step == 4:
            raise KeyboardInterrupt

    trainer = trained(teacher, [of], corpus, report=stop)
    assert trainer.progress.stopped
    assert trainer.progress.step == 4
    assert of.best


def test_a_draft_for_a_coarse_file_is_trained_as_the_file_has_it(target: source.Source, teacher: Any, corpus: data.Corpus) -> None:
    weights = torch.randn(24, 96) * torch.rand(24, 1)
    weights[3] = 0
    weights.requires_grad_()
    kind = gguf.GGMLQuantizationType.Q4_0
    written = gguf.quants.dequantize(gguf.quants.quantize(weights.detach().numpy(), kind), kind)
    assert np.array_equal(as_written(weights).detach().numpy(), written)
    as_written(weights).sum().backward()
    assert torch.equal(weights.grad, torch.ones_like(weights))

    of = student.make(target, "d", ((0,), (3,)), None, CPU, student.ROUNDED)
    trained(teacher, [of], corpus)
    stored = export.quantise(of.weights(), student.ROUNDED, "f16")
    read = {name: np.array(gguf.quants.dequantize(data, kind), np.float32) for name, (data, kind) in stored.items()}
    file, ids = student.load(of.model.shape, read, CPU), corpus.texts[0][:40].astype(np.int64)
    of.model.load_state_dict(of.best)
    assert torch.allclose(hidden(of.model, ids), hidden(file, ids), atol=0.01)
    of.model.rounds = False
    assert not torch.allclose(hidden(of.model, ids), hidden(file, ids), atol=0.05)


# All of it


def test_the_written_draft_computes_what_torch_computes(tiny: Path, corpus: data.Corpus, tmp_path: Path) -> None:
    run = Run(tiny, CPU, Options(training=QUICK), lambda *_: None)
    counts = corpus.counts(VOCAB)
    trim = student.trim_vocabulary(run.source, counts, 500, CPU)
    ids = corpus.texts[0][:20].astype(np.int64)
    for name, plan, some in (("fat", ((0, 1), (2, 3)), None), ("trimmed", ((0,), (3,)), trim)):
        of = student.make(run.source, name, plan, some, CPU)
        path = tmp_path / f"{name}.gguf"
        run.write(of, path, "q8_0")
        draft = load_draft(path, SMALL)
        draft.open(ids.tolist())
        row = draft.expand([Leaf(1, None, int(ids[-1]), len(ids) - 1)])[0]
        read = ids if some is None else some.stand_ins[ids]
        expected = (hidden(of.model, read)[-1] @ of.model.head.T).detach().numpy()
        assert np.abs(row - expected).max() < 0.2 * expected.std(), name  # activations have eight bits
        check_pair(read_vocabulary(tiny), draft.vocabulary, target_name="tiny", draft_name=name)
        draft.close()


def test_the_command(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "draft.gguf"
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"Say {i}"}) + "\n" for i in range(9)) + "broken\n")
    words = ["--layers", "0,3", "--prompts", str(prompts), "--minutes", "0.1", "--device", "cpu", "--json", "--quant", "q4_0"]
    assert main(["distill", str(tiny), "--out", str(out), *words]) == 0
    said = capsys.readouterr()
    found = json.loads(said.out)
    assert found["bytes"] == out.stat().st_size
    assert found["steps"] > 0
    assert "line 10 is left out" in said.err
    assert main(["distill", str(tiny), "--out", str(out), *words, "--resume"]) == 0
    assert json.loads(capsys.readouterr().out)["steps"] > found["steps"]
    assert not [path for path in tmp_path.rglob("*") if path.name.startswith(".")]


def test_wrong_usage_of_the_command(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = ["--out", str(tmp_path / "d.gguf")]
    for words in ([], [*out, "--quant", "q9"], [*out, "--minutes", "0"], [*out, "--loss", "backward"], [*out, "--device", "tpu"]):
        assert main(["distill", str(tiny), *words]) == 2, words
        assert "duo: error: " in capsys.readouterr().err
