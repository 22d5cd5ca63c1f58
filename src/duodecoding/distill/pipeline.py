"""From a target to drafts: load, let the target answer, train, write. The command and the benchmarks call this."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from duodecoding.backends.trim import Trim
from duodecoding.distill import data, export, source, student, train
from duodecoding.distill.evaluate import agreement
from duodecoding.distill.generate import Generator
from duodecoding.distill.recipes import Text
from duodecoding.errors import DuoError


@dataclass(frozen=True, slots=True)
class Candidate:
    """A draft to make: its layers as `--layers` names them, its vocabulary (0: the target's), and the type of its file."""

    name: str
    layers: str = "4"
    vocab: int = 0
    quant: str = ""


@dataclass(frozen=True, slots=True)
class Options:
    """`data_share`: of the minutes, for making answers. `seconds` in `training` are what is left of them."""

    minutes: float = 10.0
    data_share: float = 0.35
    rows: int = 0  # answers generated at once; 0: 1024 on a GPU, 8 elsewhere
    answer: int = 192
    resume: bool = False
    recipes: bool = True
    seed: int = 0
    training: train.Settings = field(default_factory=train.Settings)


Report = Callable[[str, float, str], None]  # phase, share done, details


class Run:
    """One target, its answers and its students, on one device."""

    def __init__(self, target: Path, device: torch.device, options: Options, report: Report) -> None:
        self._began = time.monotonic()
        torch.manual_seed(options.seed)
        if not options.training.tokens:
            options = replace(options, training=replace(options.training, tokens=32768 if device.type == "cuda" else 4096))
        self.target, self.options, self.report, self.device = target, options, report, device
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        report("load", 0.0, target.name)
        self.source = source.load(target)
        self.teacher = student.load(self.source.shape, self.source.weights, device, self.dtype).requires_grad_(False)
        self.teacher.quick = True
        report("load", 1.0, f"{self.elapsed:.1f} s")

    def _generator(self, answer: int) -> Generator:
        rows = self.options.rows or (1024 if self.device.type == "cuda" else 8)
        return Generator(self.teacher, self.source.end_tokens, rows=rows, answer=answer, dtype=self.dtype)

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self._began

    def generate(self, prompts: list[Text], folder: Path, held_out: Path | None) -> None:
        """Answers for training and for evaluation. Files of an earlier run count."""
        generator = self._generator(self.options.answer)
        if not self.options.resume:
            for old in [*folder.glob("answers-*.npz"), *folder.glob("held-out.npz"), *folder.glob("last.pt")]:
                old.unlink()
        overlap = data.Overlap(held_out)
        factory = data.Factory(
            self.source, generator, prompts, folder, overlap=overlap, recipes=self.options.recipes, seed=self.options.seed
        )
        self.report("generate", 0.0, f"{overlap.dropped} prompts dropped: they share {data.NGRAM} words with held-out ones")
        self.held_out = factory.held_out()
        self.corpus = data.Corpus()
        began, first = self.elapsed, -1
        room = self.options.data_share * (60 * self.options.minutes - began)

        def spent() -> float:
            return (self.elapsed - began) / room if room > 0 else 1.0

        def count(tokens: int) -> None:
            nonlocal first
            first = tokens if first < 0 else first
            speed = (tokens - first) / max(1e-3, self.elapsed - began)
            self.report("generate", min(1.0, spent()), f"{tokens} answer tokens, {speed:.0f} tokens/s")

        factory.train(self.corpus, spent, count)
        del factory, generator
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def train(self, candidates: Sequence[Candidate], folder: Path) -> list[student.Student]:
        """All candidates at once, from the same batches. Broken training keeps what was best before."""
        students = self._students(candidates)
        settings = self.options.training
        left = max(1.0, self.options.minutes * 60 - self.elapsed)
        settings = replace(settings, seconds=left) if not settings.steps else settings
        trainer = train.Trainer(self.teacher, students, self.corpus, settings, self.dtype)
        self.progress = trainer.progress
        if self.options.resume and trainer.resume(folder):
            self.report("train", 0.0, f"goes on from step {trainer.progress.step}")
        first, began = trainer.progress.step, trainer.progress.seconds

        def show(progress: train.Progress) -> None:
            spent = max(1e-3, progress.seconds - began)
            share = progress.step / settings.steps if settings.steps else spent / settings.seconds
            losses = " ".join(f"{loss:.3f}" for loss in progress.losses)
            scores = " ".join(f"{s.best_score:.3f}" for s in students)
            speed = (progress.step - first) / spent
            self.report("train", min(1.0, share), f"step {progress.step}, loss {losses}, agreement {scores}, {speed:.1f} steps/s")

        def evaluate(model: Any, of: student.Student) -> dict[str, Any]:
            return agreement(model, of, self.held_out, settings.tokens, self.dtype)

        try:
            trainer.run(evaluate, show, folder)
        except DuoError as error:
            if not any(s.best for s in students):
                raise
            self.report("train", 1.0, f"{error} The best so far is kept.")
        return students

    def _students(self, candidates: Sequence[Candidate]) -> list[student.Student]:
        counts = self.corpus.counts(self.source.shape.vocab)
        trims: dict[int, Trim | None] = {0: None}
        found = []
        for wanted in candidates:
            if wanted.vocab not in trims:
                trims[wanted.vocab] = student.trim_vocabulary(self.source, counts, wanted.vocab, self.device)
            plan = student.parse_layers(wanted.layers, self.source.shape.layers)
            found.append(student.make(self.source, wanted.name, plan, trims[wanted.vocab], self.device, wanted.quant))
        return found

    def write(self, of: student.Student, path: Path, quant: str, quant_embedding: str = "") -> None:
        fields = list(self.source.fields)
        if of.trim is not None:
            fields = [*export.trimmed(fields, of.trim.token_ids), *export.strings(of.trim.metadata())]
        tensors = export.quantise(of.weights(), quant, quant_embedding)
        export.write_gguf(path, f"{self.source.name} draft", of.model.shape, tensors, fields, quant)

    def judge(self, students: Sequence[student.Student], prompts: list[tuple[str, str]], answer: int = 128) -> dict[str, Any]:
        """Agreement with the target's greedy answers to (kind, prompt) that nothing was learnt from or chosen by."""
        corpus = data.Corpus()
        corpus.add(data.answers(self.source, self._generator(answer), [Text(*prompt) for prompt in prompts]))
        found = {}
        for of in students:
            if of.best:
                of.model.load_state_dict(of.best)
            found[of.name] = agreement(of.model, of, corpus, self.options.training.tokens, self.dtype)
        return found


def own_prompts() -> list[Text]:
    """The package's own, for want of a file."""
    from duodecoding import prompts

    return [Text(task, prompt.turns[0]) for task, some in prompts.load().items() for prompt in some]
