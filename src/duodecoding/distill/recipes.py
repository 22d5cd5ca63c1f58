"""Prompts of our own, for kinds of tasks that a file of prompts has too little of. No outside text: they are made of what the
prompts contain, of what the target itself writes when asked, and of the lists in recipes.json, which were written for this."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

OF_FILE = 0.42  # share of prompts as they are in the file
HELD = 50  # one in so many of our own prompts is for evaluation only
SHARES = {"summary": 0.24, "rag": 0.2, "qa": 0.15, "translation": 0.15, "open": 0.12, "code": 0.07, "math": 0.07}


class Text(NamedTuple):
    kind: str
    prompt: str


class Recipes:
    def __init__(self, texts: Sequence[Text], refuse: Callable[[str], bool]) -> None:
        """`refuse`: true for text that must not be learnt from."""
        self._lists: dict[str, Any] = json.loads(Path(__file__).with_name("recipes.json").read_text())
        self._refuse = refuse
        self._by_kind: dict[str, list[Text]] = {}
        for text in texts:
            self._by_kind.setdefault(text.kind, []).append(text)
        prose = [text.prompt for text in texts if "def " not in text.prompt and len(re.findall(r"\d+", text.prompt)) < 12]
        self._problems = [text for text in prose if re.search(r"\d.*\d.*\?\s*$", text, re.DOTALL) and len(text) < 600]
        prose = sorted(set(prose) - set(self._problems))
        self._passages = [passage for text in prose for passage in passages(text)]
        self._questions = [question for text in prose for question in questions(text)]
        self._pairs = [(passages(text)[0], questions(text)[-1]) for text in prose if passages(text) and questions(text)]
        self.own: dict[str, list[str]] = {}

    def requests(self, random: np.random.Generator, count: int) -> list[Text]:
        """What the target is to write. `keep` takes its answers."""
        asked = [self._any(random, "requests") for _ in range(count)]
        return [Text(kind, self._filled(random, request)) for kind, request in asked]

    def keep(self, request: Text, answer: str) -> None:
        found = {"passage": passages, "question": questions}.get(request.kind, sentences)(answer)
        self.own.setdefault(request.kind, []).extend(text for text in found if not self._refuse(text))
        pool = {"passage": self._passages, "question": self._questions}.get(request.kind)
        if pool is not None:
            pool.extend(text for text in found if not self._refuse(text))

    def mixed(self, random: np.random.Generator, count: int) -> list[Text]:
        """Prompts of the file and our own. Large kinds of the file are drawn less often than their size."""
        kinds = sorted(self._by_kind)
        weights = np.sqrt([len(self._by_kind[kind]) for kind in kinds])
        drawn = random.choice(len(kinds), round(count * OF_FILE), p=weights / weights.sum())
        of_file = [self._by_kind[kinds[k]][random.integers(len(self._by_kind[kinds[k]]))] for k in drawn]
        return of_file + self._draw(random, count - len(of_file), held=False)

    def held_out(self, random: np.random.Generator, count: int) -> list[Text]:
        return self._draw(random, count, held=True)

    def _draw(self, random: np.random.Generator, count: int, *, held: bool) -> list[Text]:
        kinds = [kind for kind in SHARES if self._possible(kind)]
        p = np.array([SHARES[kind] for kind in kinds])
        found: list[Text] = []
        while len(found) < count:
            kind = kinds[random.choice(len(kinds), p=p / p.sum())]
            prompt = getattr(self, f"_{kind}")(random)
            # Long prompts consist of parts that were checked alone.
            if (zlib.crc32(prompt.encode()) % HELD == 0) == held and not (len(prompt) < 800 and self._refuse(prompt)):
                found.append(Text(kind, prompt))
        return found

    def _possible(self, kind: str) -> bool:
        needs = {"summary": self._passages, "rag": self._passages, "math": self._problems}
        return bool(needs.get(kind, True))

    def _any(self, random: np.random.Generator, name: str) -> Any:
        values = self._lists[name]
        return values[random.integers(len(values))]

    def _filled(self, random: np.random.Generator, form: str) -> str:
        return form.replace("{topic}", self._any(random, "topics")).replace("{other}", self._any(random, "topics"))

    def _summary(self, random: np.random.Generator) -> str:
        return str(self._any(random, "summary")).replace("{passage}", _pick(random, self._passages))

    def _rag(self, random: np.random.Generator) -> str:
        some = [_pick(random, self._passages)[:1200] for _ in range(random.integers(1, 4))]
        question = self._question(random)
        if self._pairs and random.random() < 0.7:  # one of the passages has the answer
            passage, question = self._pairs[random.integers(len(self._pairs))]
            some[random.integers(len(some))] = passage[:1500]
        return str(self._any(random, "rag")).replace("{question}", question).replace("{passages}", "\n".join(some))

    def _qa(self, random: np.random.Generator) -> str:
        return str(self._any(random, "qa")).replace("{question}", self._question(random))

    def _question(self, random: np.random.Generator) -> str:
        if self._questions and random.random() < 0.8:
            return _pick(random, self._questions)
        return self._filled(random, self._any(random, "questions")) + ("?" if random.random() < 0.5 else "")

    def _translation(self, random: np.random.Generator) -> str:
        form = str(self._any(random, "translate"))
        languages = {"german": self._german, "french": self._french, "english": self._english}
        for name, write in languages.items():
            if f"{{{name}}}" in form:
                form = form.replace(f"{{{name}}}", write(random))
        return form

    def _german(self, random: np.random.Generator) -> str:
        which = random.random()
        if which < 0.4 and self.own.get("german"):
            return _pick(random, self.own["german"])
        if which < 0.5:
            return str(self._any(random, "german"))
        predicate = str(self._any(random, "predicates")).replace("{time}", self._any(random, "times"))
        return f"{self._any(random, 'subjects')} {predicate}{self._any(random, 'clauses')}".replace(",", " ,").replace("  ", " ")

    def _french(self, random: np.random.Generator) -> str:
        return _pick(random, self.own.get("french", []) + self._lists["french"])

    def _english(self, random: np.random.Generator) -> str:
        if self._passages and random.random() < 0.8:
            return _pick(random, sentences(_pick(random, self._passages)) or [self._lists["open"][0]])
        return self._filled(random, self._any(random, "open"))

    def _open(self, random: np.random.Generator) -> str:
        if self.own.get("open") and random.random() < 0.25:
            return _pick(random, self.own["open"])
        return self._filled(random, self._any(random, "open"))

    def _code(self, random: np.random.Generator) -> str:
        doc, arguments = self._any(random, "code"), self._any(random, "arguments")
        name = "_".join(re.findall(r"[a-z]+", doc.lower())[1 : 3 + int(random.integers(2))])
        frame = str(self._any(random, "frames"))
        return frame.replace("{name}", name).replace("{arguments}", arguments).replace("{doc}", doc)

    def _math(self, random: np.random.Generator) -> str:
        """A problem of the file with other numbers. Its answer may be odd; the target answers all the same."""

        def other(match: re.Match[str]) -> str:
            return str(max(1, round(int(match[0]) * random.uniform(0.5, 2)))) if len(match[0]) < 7 else match[0]

        return re.sub(r"\d+", other, _pick(random, self._problems))


def _pick(random: np.random.Generator, values: Sequence[str]) -> str:
    return values[int(random.integers(len(values)))]


def passages(text: str) -> list[str]:
    """Paragraphs of at least 40 words that end like prose."""
    parts = (" ".join(part.split()) for part in text.split("\n\n"))
    return [part for part in parts if part.count(" ") >= 39 and part[-1] in '.!?"']


def questions(text: str) -> list[str]:
    found = re.findall(r"\b((?:Who|What|When|Where|Why|Which|How|Is|Are|Did|Does|Can)\b[^.?!\n:]{10,160}\?)", text)
    return [" ".join(question.split()) for question in found]


def sentences(text: str) -> list[str]:
    found = re.split(r"(?<=[.!?])\s+", " ".join(text.split()))
    return [sentence for sentence in found if 4 <= sentence.count(" ") <= 40]
