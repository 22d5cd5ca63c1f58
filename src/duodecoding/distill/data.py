"""What a draft learns from: prompts in, the target's own answers out, kept in files so that a later run goes on from them."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from duodecoding.distill.generate import LENGTHS, Generator, Job
from duodecoding.distill.recipes import Recipes, Text
from duodecoding.distill.source import Source
from duodecoding.errors import DuoError, UsageError

GREEDY, WARM = 0.6, (0.8, 1.0)  # share of greedy answers; temperatures of the others
SECOND_TURN = 0.15  # share of prompts that follow another prompt and the target's answer to it
HELD_OUT = 0.02
WAVE = 20  # prompts between two files, for every row of the generator's batch
OWN_SHARE = 0.3  # of the time, at most, for what the target writes for recipes
REQUESTS = 6  # texts that the target writes for recipes, for every row
ROUNDS = 3  # that a file of prompts is gone through if nothing is added to it
NGRAM = 8  # words that a prompt may not share with those it will be judged by


Before = tuple[Text, str] | None  # the turn before a prompt: another one and its answer


class Sample(NamedTuple):
    kind: str
    prompt: np.ndarray
    answer: np.ndarray  # ends with an end token, or was cut
    greedy: bool


def read_prompts(path: Path, complain: Callable[[str], None]) -> list[Text]:
    """JSONL, plain or gzipped: `prompt`, and `source` to name its kind. Broken lines are named and left out."""
    try:
        data = path.read_bytes()
        lines = (gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data).split(b"\n")
    except (OSError, EOFError) as error:
        raise UsageError(f"cannot read prompts from {path}", getattr(error, "strerror", None) or str(error)) from error
    found: list[Text] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            prompt = record["prompt"]
            if not isinstance(prompt, str) or not prompt.strip():
                raise ValueError("the prompt is empty or no text")
            found.append(Text(str(record.get("source", "prompt")).partition("/")[0], prompt))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            complain(f"{path}, line {number} is left out: {error!r}")
    if not found:
        raise UsageError(f"{path} has no prompts", fix='Each line is one object such as {"prompt": "..."}.')
    return found


def ngrams(text: str) -> set[str]:
    words = "".join(c.lower() if c.isalnum() else " " for c in text).split()
    return {" ".join(words[i : i + NGRAM]) for i in range(len(words) - NGRAM + 1)}


class Overlap:
    """Refuses texts that share eight words in a row with a folder of prompts (JSONL, `turns` or `prompt`)."""

    def __init__(self, folder: Path | None) -> None:
        self.dropped = 0
        self._seen: set[str] = set()
        for file in sorted(folder.glob("*.jsonl")) if folder else ():
            for line in file.read_text().splitlines():
                record = json.loads(line)
                for turn in record.get("turns") or [record.get("prompt", "")]:
                    self._seen |= ngrams(turn)
        if folder and not self._seen:
            raise UsageError(f"{folder} holds no prompts to stay away from")

    def __call__(self, text: str) -> bool:
        found = bool(self._seen) and not self._seen.isdisjoint(ngrams(text))
        self.dropped += found
        return found


@dataclass
class Corpus:
    """Texts end to end. A text is a prompt and its answer; the rows before each answer's tokens are what is learnt from."""

    kinds: list[str] = field(default_factory=list)
    texts: list[np.ndarray] = field(default_factory=list)
    prompts: list[int] = field(default_factory=list)  # their lengths
    greedy: list[bool] = field(default_factory=list)

    def add(self, samples: Iterable[Sample]) -> None:
        for sample in samples:
            self.kinds.append(sample.kind)
            self.texts.append(np.concatenate([sample.prompt, sample.answer]).astype(np.int32))
            self.prompts.append(len(sample.prompt))
            self.greedy.append(sample.greedy)

    def extend(self, other: Corpus) -> None:
        self.kinds += other.kinds
        self.texts += other.texts
        self.prompts += other.prompts
        self.greedy += other.greedy

    @property
    def answer_tokens(self) -> int:
        return sum(map(len, self.texts)) - sum(self.prompts)

    def counts(self, vocab: int) -> np.ndarray:
        return np.bincount(np.concatenate(self.texts), minlength=vocab) if self.texts else np.zeros(vocab, np.int64)

    def save(self, path: Path) -> None:
        unfinished = path.with_name(f".{path.name}.{os.getpid()}.npz")
        try:
            np.savez(
                unfinished,
                kinds=np.array(self.kinds),
                tokens=np.concatenate(self.texts),
                lengths=np.array([len(text) for text in self.texts]),
                prompts=np.array(self.prompts),
                greedy=np.array(self.greedy),
            )
            unfinished.replace(path)
        except OSError as error:
            raise DuoError(f"cannot keep answers in {path.parent}", error.strerror or str(error)) from error
        finally:
            unfinished.unlink(missing_ok=True)

    def load(self, path: Path) -> None:
        with np.load(path) as held:
            self.texts += np.split(held["tokens"], np.cumsum(held["lengths"])[:-1])
            self.kinds += held["kinds"].tolist()
            self.prompts += held["prompts"].tolist()
            self.greedy += held["greedy"].tolist()


class Factory:
    """Makes answers by waves until it is stopped, each wave a file. Held-out prompts come first and are answered greedily."""

    def __init__(
        self, source: Source, generator: Generator, prompts: list[Text], folder: Path, *, overlap: Overlap, recipes: bool, seed: int
    ) -> None:
        self._source, self._generator, self._folder = source, generator, folder
        kept = [text for text in prompts if not overlap(text.prompt)]
        split = np.random.default_rng(seed).permutation(len(kept))
        self._wave = WAVE * generator.rows
        held = max(1, min(round(len(kept) * HELD_OUT), generator.rows))
        self._held = [kept[i] for i in split[:held]]
        self._texts = [kept[i] for i in split[held:]]
        self._recipes = Recipes(self._texts, overlap) if recipes else None
        self._seed = seed
        self._before: list[tuple[Text, np.ndarray]] = []  # answered prompts that a second turn may follow
        self._greedy: set[bytes] = set()  # prompts that were answered greedily: once is enough
        folder.mkdir(parents=True, exist_ok=True)
        self._check_folder(source)

    def _check_folder(self, source: Source) -> None:
        """Answers of another target would teach the wrong thing."""
        about = self._folder / "target.json"
        mine: dict[str, Any] = {"target": source.name, "vocab": source.shape.vocab}
        if about.exists() and json.loads(about.read_text()) != mine:
            raise UsageError(f"{self._folder} holds another target's answers", about.read_text(), "Name another folder.")
        about.write_text(json.dumps(mine))

    def held_out(self) -> Corpus:
        path = self._folder / "held-out.npz"
        corpus = Corpus()
        if path.exists():
            corpus.load(path)
            return corpus
        texts = list(self._held)
        if self._recipes is not None:
            texts += self._recipes.held_out(np.random.default_rng([self._seed, 1]), len(texts))
        corpus.add(answers(self._source, self._generator, texts))
        corpus.save(path)
        return corpus

    def train(self, corpus: Corpus, spent: Callable[[], float], report: Callable[[int], None]) -> None:
        """Fill the corpus from the files there are, then with new waves until the time is `spent` (1: all of it).

        A first wave is answered in any case, if only the first of it."""
        old = sorted(self._folder.glob("answers-*.npz"))
        for path in old:
            corpus.load(path)
        texts = zip(corpus.texts, corpus.prompts, corpus.greedy, strict=True)
        self._greedy |= {text[:prompt].tobytes() for text, prompt, greedy in texts if greedy}
        report(corpus.answer_tokens)
        number, rounds = len(old), ROUNDS * len(self._texts) / self._wave
        if self._recipes is not None and spent() < 1:
            self._write_own(np.random.default_rng([self._seed, 3]), lambda: spent() > OWN_SHARE)
        aside = ThreadPoolExecutor(1)  # the next wave is drawn and tokenised while this one is answered
        ready = aside.submit(self._draw, number)
        while not corpus.texts or (spent() < 1 and (self._recipes or number < rounds)):
            jobs, wave = ready.result(), Corpus()
            ready = aside.submit(self._draw, number + 1)
            wave.add(self._answer(jobs, lambda wave=wave: spent() >= 1 and bool(corpus.texts or wave.texts)))  # type: ignore[misc]
            if wave.texts:
                wave.save(self._folder / f"answers-{number:04}.npz")
                corpus.extend(wave)
            number += 1
            report(corpus.answer_tokens)
        aside.shutdown(wait=False, cancel_futures=True)

    def _write_own(self, random: np.random.Generator, stop: Callable[[], bool]) -> None:
        """Let the target write sentences, questions and passages that recipes are made of."""
        assert self._recipes is not None
        asked = self._recipes.requests(random, REQUESTS * self._generator.rows)
        jobs = [
            Job(ids, 1.0, text) for text, ids in zip(asked, encode(self._source, [(text, None) for text in asked]), strict=True)
        ]
        for job, answer in self._generator.run(jobs, stop):
            self._recipes.keep(job.tag, self._source.decode(answer))

    def _draw(self, wave: int) -> list[Job]:
        random = np.random.default_rng([self._seed, 2, wave])
        texts = self._recipes.mixed(random, self._wave) if self._recipes else _cycle(self._texts, self._wave, wave, random)
        follows = random.random(len(texts)) < SECOND_TURN
        held = self._before[-20_000:]
        before = [held[random.integers(len(held))] if yes and held else None for yes in follows]
        tags = [(text, pair and (pair[0], self._source.decode(pair[1]))) for text, pair in zip(texts, before, strict=True)]
        jobs = []
        for ids, tag in zip(encode(self._source, tags), tags, strict=True):
            greedy = random.random() < GREEDY and ids.tobytes() not in self._greedy
            if greedy:
                self._greedy.add(ids.tobytes())
            jobs.append(Job(ids, 0.0 if greedy else float(random.choice(WARM)), tag))
        return jobs

    def _answer(self, jobs: Sequence[Job], stop: Callable[[], bool]) -> Iterator[Sample]:
        for job, answer in self._generator.run(jobs, stop):
            text, earlier = job.tag
            if earlier is None and len(answer) < 120 and len(job.ids) < 400:
                self._before.append((text, answer))
            yield Sample(text.kind, job.ids, answer, job.temperature == 0)


def answers(source: Source, generator: Generator, texts: Sequence[Text]) -> Iterator[Sample]:
    """The target's greedy ones."""
    ids = encode(source, [(text, None) for text in texts])
    for job, answer in generator.run([Job(*work) for work in zip(ids, [0.0] * len(ids), texts, strict=True)]):
        yield Sample(job.tag.kind, job.ids, answer, True)


def encode(source: Source, texts: Sequence[tuple[Text, Before]]) -> list[np.ndarray]:
    conversations = []
    for text, before in texts:
        turns = [] if before is None else [("user", before[0].prompt), ("assistant", before[1])]
        conversations.append([{"role": role, "content": said} for role, said in [*turns, ("user", text.prompt)]])
    return [_cut(ids) for ids in source.encode(conversations)]


def _cut(ids: np.ndarray) -> np.ndarray:
    """A prompt that is too long loses its middle: its beginning has the system's words, its end asks for the answer."""
    longest = LENGTHS[-1]
    return ids if len(ids) <= longest else np.concatenate([ids[: longest // 2], ids[len(ids) - (longest - longest // 2) :]])


def _cycle(texts: list[Text], size: int, wave: int, random: np.random.Generator) -> list[Text]:
    if len(texts) <= size:
        return [texts[i] for i in random.permutation(len(texts))]
    return [texts[i % len(texts)] for i in range(wave * size, (wave + 1) * size)]
