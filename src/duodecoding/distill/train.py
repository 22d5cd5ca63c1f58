"""The training loop: students learn the target's whole distribution over its own answers, several shapes from one set of labels.

A label is the target's final hidden state before an answer's token: 1 kB instead of a row of logits, which a multiplication
brings back. Labels are kept from the first epoch on. A student with a trimmed vocabulary learns the distribution over the
tokens it knows, renormalised; what the target gives to others is ignored.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from duodecoding.distill.data import Corpus
from duodecoding.distill.model import Llama, attend_within, compiled, pack
from duodecoding.distill.student import Student
from duodecoding.errors import DuoError, UsageError

LOSSES = ("forward", "reverse", "mixed")
CHUNK = 4096  # rows of logits at a time
BAD_STEPS = 3  # not a number: this many are skipped


@dataclass(frozen=True, slots=True)
class Settings:
    """`steps` 0: as many as `seconds` allow. `tokens`: in a batch, prompts included; 0: 32,768 on a GPU, 4,096 elsewhere."""

    seconds: float = 300.0
    steps: int = 0
    tokens: int = 0
    rate: float = 1.5e-3
    warmup: int = 100
    decay: float = 0.01
    clip: float = 1.0
    mean: float = 0.999  # of the weights' running mean
    loss: str = "forward"
    seed: int = 0
    evaluate_every: float = 30.0  # seconds
    checkpoint_every: float = 60.0

    def __post_init__(self) -> None:
        if self.loss not in LOSSES:
            raise UsageError(f"loss is {self.loss!r}", f"it must be {', '.join(LOSSES)}")


@dataclass(slots=True)
class Progress:
    step: int = 0
    epoch: int = 0
    seconds: float = 0.0
    bad: int = 0  # steps skipped in a row
    stopped: bool = False  # by Ctrl-C
    tokens: int = 0
    losses: list[float] = field(default_factory=list)  # of the last step, by student
    log: list[dict[str, Any]] = field(default_factory=list)


def divergence(student: torch.Tensor, target: torch.Tensor, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of the rows' divergences, and its gradient by the student's logits."""
    s, t = F.log_softmax(student.float(), -1), F.log_softmax(target.float(), -1)
    p, q = s.exp(), t.exp()
    away = (p * (s - t)).sum(-1, keepdim=True)  # reverse: how far the student's own guesses are off
    if kind == "forward":
        return (q * (t - s)).sum(), (p - q).to(student.dtype)
    reverse = p * (s - t - away)
    if kind == "reverse":
        return away.sum(), reverse.to(student.dtype)
    return ((q * (t - s)).sum() + away.sum()) / 2, ((p - q + reverse) / 2).to(student.dtype)


class Labels:
    """The target's hidden states before every token of every answer, computed when first asked for and kept."""

    def __init__(self, teacher: Llama, corpus: Corpus, dtype: torch.dtype) -> None:
        self._teacher, self._dtype = teacher, dtype
        lengths = np.array([len(t) for t in corpus.texts]) - np.array(corpus.prompts)
        self._ends = np.cumsum(lengths)
        self._starts = self._ends - lengths
        self._known = np.zeros(len(lengths), bool)
        size = (int(self._ends[-1]), teacher.shape.width)
        fits = teacher.head.device.type != "cuda" or math.prod(size) * 2 < torch.cuda.mem_get_info()[0] // 3
        self._store = torch.empty(size, dtype=dtype, device=teacher.head.device) if fits else None

    def __call__(self, batch: Batch) -> torch.Tensor:
        """(answer tokens of the batch, width)"""
        if self._store is None:
            return self._compute(batch)
        spans = [np.arange(self._starts[i], self._ends[i]) for i in batch.numbers]
        rows = torch.from_numpy(np.concatenate(spans)).to(self._store.device, non_blocking=True)
        if not self._known[batch.numbers].all():
            self._store[rows] = self._compute(batch)
            self._known[batch.numbers] = True
        return self._store[rows]

    @torch.no_grad()
    def _compute(self, batch: Batch) -> torch.Tensor:
        packed = batch.packed
        return self._teacher(packed.ids, packed.positions, attend_within(packed), self._dtype)[batch.rows]


class Batch:
    def __init__(self, corpus: Corpus, numbers: np.ndarray, device: torch.device) -> None:
        self.numbers = numbers
        texts = [corpus.texts[i] for i in numbers]
        self.packed = pack(texts, device)
        ends = np.cumsum([len(text) for text in texts])
        starts = ends - [len(text) for text in texts] + [corpus.prompts[i] for i in numbers]
        # The row before an answer's token is where it is guessed.
        rows = np.concatenate([np.arange(a - 1, b - 1) for a, b in zip(starts, ends, strict=True)])
        self.rows = torch.from_numpy(rows).to(device, non_blocking=True)


def batches(corpus: Corpus, tokens: int, seed: int, epoch: int, device: torch.device) -> Iterator[Batch]:
    """The whole corpus once, in an order of its own for every epoch."""
    order = np.random.default_rng([seed, epoch]).permutation(len(corpus.texts))
    ends = np.cumsum([len(corpus.texts[i]) for i in order])
    start = 0
    while start < len(order):
        before = ends[start - 1] if start else 0
        end = max(start + 1, int(np.searchsorted(ends, before + tokens, side="right")))
        yield Batch(corpus, order[start:end], device)
        start = end


class Trainer:
    """`teacher` and students live on one device. `evaluate` gives a student's agreement by kind, `report` shows progress."""

    def __init__(self, teacher: Llama, students: list[Student], corpus: Corpus, settings: Settings, dtype: torch.dtype) -> None:
        if not corpus.texts:
            raise UsageError("there are no answers to learn from", "no time was left to make any", "Give more --minutes.")
        self._students, self._corpus, self._settings, self._dtype = students, corpus, settings, dtype
        self._device, self._teacher = teacher.head.device, teacher
        self._labels = Labels(teacher, corpus, dtype)
        self.progress = Progress()
        for student in students:
            fused = self._device.type == "cuda"
            student.optimizer = torch.optim.AdamW(
                student.model.parameters(), lr=settings.rate, betas=(0.9, 0.98), weight_decay=settings.decay, fused=fused
            )

    def run(
        self, evaluate: Callable[[Llama, Student], dict[str, Any]], report: Callable[[Progress], None], folder: Path | None
    ) -> None:
        """Until time or steps are over. Ctrl-C ends it early; what agreed best so far is kept either way."""
        began, done = time.monotonic(), self.progress.seconds
        head = self._teacher.head.detach().to(self._dtype)
        self._heads = {s.name: head if s.knows is None else head[s.knows] for s in self._students}
        total = done + self._settings.seconds
        looked = saved = began
        try:
            for batch in self._endless():
                share = self.progress.step / self._settings.steps if self._settings.steps else self.progress.seconds / total
                if share >= 1:
                    break
                self._step(batch, share)
                now = time.monotonic()
                self.progress.seconds = done + now - began
                report(self.progress)
                if now - looked > self._settings.evaluate_every:
                    self._look(evaluate)
                    looked = time.monotonic()
                if folder is not None and now - saved > self._settings.checkpoint_every:
                    self.save(folder)
                    saved = time.monotonic()
        except KeyboardInterrupt:
            self.progress.stopped = True
        self._look(evaluate)
        if folder is not None:
            self.save(folder)

    def _endless(self) -> Iterator[Batch]:
        while True:
            yield from batches(self._corpus, self._settings.tokens, self._settings.seed, self.progress.epoch, self._device)
            self.progress.epoch += 1

    def _step(self, batch: Batch, share: float) -> None:
        settings = self._settings
        labels = self._labels(batch)
        rate = (
            settings.rate * min(1.0, (self.progress.step + 1) / settings.warmup) * max(0.01, 0.5 + 0.5 * math.cos(math.pi * share))
        )
        found = torch.stack([self._learn(batch, labels, student) for student in self._students]).tolist()
        self.progress.losses = [loss for loss, _ in found]
        self.progress.step += 1
        self.progress.tokens += len(batch.packed.ids)
        if not all(math.isfinite(number) for pair in found for number in pair):
            self.progress.bad += 1
            self.progress.log.append({"step": self.progress.step, "event": "a loss was no number"})
            if self.progress.bad > BAD_STEPS:
                raise DuoError("training broke down", f"{self.progress.bad} losses in a row were no numbers", "Lower --rate.")
            return
        self.progress.bad = 0
        for student in self._students:
            for group in student.optimizer.param_groups:
                group["lr"] = rate
            student.optimizer.step()
            with torch.no_grad():
                torch._foreach_lerp_(list(student.mean.parameters()), list(student.model.parameters()), 1 - settings.mean)

    def _learn(self, batch: Batch, labels: torch.Tensor, student: Student) -> torch.Tensor:
        """Leaves gradients. Returns, on the device, the loss a token and the size of the gradient."""
        packed = batch.packed
        student.optimizer.zero_grad(set_to_none=True)
        hidden = student.model(student.ids(packed.ids), packed.positions, attend_within(packed), self._dtype)[batch.rows]
        loss, below, above = self._head(student, hidden.detach(), labels)
        hidden.backward(below)
        head = student.model.head
        head.grad = above if head.grad is None else head.grad + above
        size = torch.nn.utils.clip_grad_norm_(student.model.parameters(), self._settings.clip)
        return torch.stack([loss, size])

    def _head(self, student: Student, rows: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Loss, and its gradients by hidden states and head. Logits only ever exist for a chunk of rows, so it is done by hand."""
        measure = compiled(divergence) if self._device.type == "cuda" else divergence
        truth, weights = self._heads[student.name], student.model.head.detach().to(self._dtype)
        below, above = torch.empty_like(rows), torch.zeros_like(student.model.head)
        total = torch.zeros((), device=self._device)
        for start in range(0, len(rows), CHUNK):
            mine, theirs = rows[start : start + CHUNK], labels[start : start + CHUNK]
            loss, gradient = measure(mine @ weights.T, theirs @ truth.T, self._settings.loss)
            total += loss
            below[start : start + CHUNK] = gradient @ weights
            above += gradient.T @ mine
        return total / len(rows), below / len(rows), above / len(rows)

    def _look(self, evaluate: Callable[[Llama, Student], dict[str, Any]]) -> None:
        """How well each student agrees now, with its weights and with their mean; the best weights of all are put aside."""
        for student, loss in zip(self._students, self.progress.losses or [math.nan] * len(self._students), strict=True):
            entry: dict[str, Any] = {
                "step": self.progress.step,
                "seconds": round(self.progress.seconds, 1),
                "student": student.name,
            }
            entry["loss"] = round(loss, 4)
            for which, model in (("now", student.model), ("mean", student.mean)):
                entry[which] = evaluate(model, student)
                score = entry[which]["all"]["top1"]
                if score > student.best_score:
                    student.best_score = score
                    student.best = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
            self.progress.log.append(entry)

    def save(self, folder: Path) -> None:
        progress = {name: getattr(self.progress, name) for name in ("step", "epoch", "seconds", "tokens", "log")}
        students = {}
        for s in self._students:
            held = {"model": s.model.state_dict(), "mean": s.mean.state_dict(), "best": s.best, "best_score": s.best_score}
            students[s.name] = held | {"optimizer": s.optimizer.state_dict(), "trim": s.trim}
        unfinished = folder / ".last.pt"
        try:
            torch.save({"progress": progress, "students": students}, unfinished)
            unfinished.replace(folder / "last.pt")
        except (OSError, RuntimeError) as error:
            unfinished.unlink(missing_ok=True)
            raise DuoError(f"cannot keep a checkpoint in {folder}", str(error).partition("\n")[0]) from error

    def resume(self, folder: Path) -> bool:
        """Go on from a checkpoint, if there is one of the same students."""
        path = folder / "last.pt"
        if not path.exists():
            return False
        held = torch.load(path, map_location=self._device, weights_only=False)
        if set(held["students"]) != {student.name for student in self._students}:
            raise UsageError(f"{path} is of other drafts", ", ".join(held["students"]), "Go on with the same, or without --resume.")
        for student in self._students:
            mine = held["students"][student.name]
            student.know(mine["trim"])
            student.model.load_state_dict(mine["model"])
            student.mean.load_state_dict(mine["mean"])
            student.optimizer.load_state_dict(mine["optimizer"])
            student.best, student.best_score = mine["best"], mine["best_score"]
        for name, value in held["progress"].items():
            setattr(self.progress, name, value)
        self.progress.epoch += 1
        return True
