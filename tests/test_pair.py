"""`duo pair`: agreement, costs and predictions, with scripted models and a real one."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from test_bridge import Pieces, storyteller
from worlds import World

from duodecoding.backends import load_draft, scripted
from duodecoding.bench import pair
from duodecoding.bench.pair import Worth, agreement, ranks
from duodecoding.cli.main import main
from duodecoding.types import EngineConfig, SamplingParams
from duodecoding.virtual import Recording

WORLD = World(context=400, draft_context=400, size=32, share=0.2)
PARAMS = SamplingParams(max_tokens=24)


def recording(draft: scripted.ScriptedDraft, places: list[int], task: str = "qa") -> Recording:
    """An answer whose tokens have these places among the draft's guesses."""
    prompt = (0, 5, 7)
    text = list(prompt)
    for place in places:
        row = next(draft.score(text, len(text) - 1))[0]
        text.append(int(np.argsort(-row)[place]))
    return Recording(task, prompt, tuple(text[len(prompt) :]), PARAMS)


# Agreement


def test_ranks_are_the_places_of_the_answers_tokens():
    draft = WORLD.draft()
    assert ranks(draft, recording(draft, [0, 3, 1, 0, 7])) == [0, 3, 1, 0, 7]


def test_agreement_counts_by_task():
    draft = WORLD.draft()
    answers = [recording(draft, [0, 1, 2, 5]), recording(draft, [0, 0]), recording(draft, [3], task="code")]
    shares = []
    assert agreement(partial(ranks, draft), answers, shares.append) == {
        "qa": {"top1": 3 / 6, "top2": 4 / 6, "top4": 5 / 6},
        "code": {"top1": 0.0, "top2": 0.0, "top4": 1.0},
    }
    assert shares == sorted(shares)


def test_a_trimmed_vocabulary_has_no_place_for_some_tokens():
    draft = WORLD.draft()
    draft.token_ids = 2 * np.arange(WORLD.size)  # it knows the even ones
    best = int(np.argmax(next(draft.score([0, 5, 7], 2))))
    assert ranks(draft, Recording("qa", (0, 5, 7), (2 * best,), PARAMS)) == [0]
    assert ranks(draft, Recording("qa", (0, 5, 7), (2 * best + 1,), PARAMS)) == [WORLD.size]


def test_what_is_beyond_the_drafts_context_is_not_asked():
    draft = WORLD.draft()
    answer = recording(draft, [0, 1, 2, 3])
    draft.context = 5
    assert ranks(draft, answer) == [0, 1]
    draft.context = 3
    assert ranks(draft, answer) == []
    assert agreement(partial(ranks, draft), [answer], lambda share: None) == {}


def test_a_real_draft_scores_as_it_guesses(poor_draft: Path):
    draft = load_draft(poor_draft, EngineConfig(ctx_size=1024, threads=1), exact=True)
    text = draft.vocabulary.tokenize("The river rose slowly through the night. " * 60, special=False, bos=False)[:340]
    try:
        for start in (0, 1, 300):  # in several stretches, and behind a prompt of its own
            rows = [row.argmax() for stretch in draft.score(text, start) for row in stretch]
            assert len(rows) == len(text) - start
            for place in (start, start + 30, len(text) - 1):
                assert next(draft.score(text[: place + 1], place))[0].argmax() == rows[place - start]
    finally:
        draft.close()


# What is said


def worth(**speeds: float) -> Worth:
    speedups = {"here": {**speeds, "mean": sum(speeds.values()) / len(speeds)}, "h200-7b": {"qa": 1.5, "mean": 1.5}}
    tops = {"top1": 0.5, "top2": 0.6, "top4": 0.7}
    return Worth("d", agreement=dict.fromkeys(speeds, tops), speedups=speedups, threads=4)


def test_the_verdict_is_one_sentence():
    assert worth(qa=1.6, code=1.6).verdict == "right 50% of the time; 1.60× on this machine (4 draft threads); 1.50× on h200-7b"
    assert worth(qa=1.6, code=1.0).verdict.endswith("; not worth it here for code")
    assert worth(qa=0.9, code=1.0).verdict.endswith("; not worth it here")
    assert replace(worth(qa=1.6), differs="x", steps=1.25).verdict.startswith("through text (1.2 draft steps a token), right 50%")


def test_the_record_has_the_promised_shape():
    record = worth(qa=1.0, code=2.0).record()
    assert list(record) == ["draft", "compatible", "agreement", "predicted"]
    assert record["agreement"]["qa"] == {"top1": 0.5, "top2": 0.6, "top4": 0.7}
    assert record["predicted"] == {"here": 1.5, "h200-7b": 1.5}
    assert Worth("d", differs="x").record() == {"draft": "d", "compatible": False, "agreement": {}, "predicted": {}}


# The command


@pytest.fixture
def files(monkeypatch, tmp_path) -> list[str]:
    """A target and two drafts that the scripted models stand behind; nothing measured before is found."""
    names = [str(tmp_path / f"{name}.gguf") for name in ("target", "one", "two")]
    for name in names:
        Path(name).write_bytes(b"GGUF" + bytes(100))
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    for task, texts in {"qa": ["abc", "bcd", "cde"], "code": ["ab ab", "fgh"]}.items():
        lines = [json.dumps({"question_id": i, "category": task, "turns": [text]}) for i, text in enumerate(texts)]
        (tasks / f"{task}.jsonl").write_text("\n".join(lines))
    monkeypatch.setenv("DUO_CACHE", str(tmp_path))
    monkeypatch.setattr("duodecoding.backends.load_target", lambda path, config: WORLD.target())
    monkeypatch.setattr("duodecoding.backends.read_vocabulary", lambda path: WORLD.draft().vocabulary)
    monkeypatch.setattr("duodecoding.backends.load_draft", lambda path, config, exact=False: WORLD.draft())
    return [*names, "--tasks", str(tasks), "--max-tokens", "24"]


def test_several_drafts_share_the_targets_answers(files, capsys, monkeypatch):
    answered = []
    monkeypatch.setattr(pair, "record", lambda *args, record=pair.record: answered.append(1) or record(*args))
    assert main(["pair", *files, "--json", "--profile", "h200-7b,h200-32b"]) == 0
    (one, two) = json.loads(capsys.readouterr().out)["pairs"]
    assert answered == [1]
    assert [one["draft"].endswith("one.gguf"), two["draft"].endswith("two.gguf")] == [True, True]
    assert one["agreement"] == two["agreement"]
    assert list(one["agreement"]) == ["code", "qa"]
    assert 0.5 < one["agreement"]["qa"]["top1"] <= one["agreement"]["qa"]["top4"] <= 1
    assert list(one["predicted"]) == ["here", "h200-7b", "h200-32b"]
    assert one["predicted"]["h200-7b"] > 1.2  # it is right four times out of five


def test_tables_and_a_picture(files, capsys, tmp_path):
    picture = tmp_path / "agreement.png"
    assert main(["pair", *files, "--profile", "none", "--plot", str(picture), "--per-task", "1"]) == 0
    out = capsys.readouterr().out
    assert "one for target" in out
    assert "two for target" in out
    assert "a draft step" in out
    assert "on this machine" in out
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_without_a_replay_there_is_no_prediction(files, capsys):
    assert main(["pair", *files, "--json", "--replay", "0"]) == 0
    assert [found["predicted"] for found in json.loads(capsys.readouterr().out)["pairs"]] == [{}, {}]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--per-task", "-1"], "--per-task is -1"),
        (["--replay", "-2"], "--replay is -2"),
        (["--profile", "h100-9b"], "no profile 'h100-9b'"),
        (["--plot", "x.jpg"], "pictures are PNG files"),
    ],
)
def test_errors_are_one_line(arguments, said, files, capsys):
    assert main(["pair", *files, *arguments]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1


def test_a_draft_is_needed(files, capsys):
    assert main(["pair", files[0]]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_draft_of_another_vocabulary_is_judged_through_text(files, capsys, monkeypatch):
    class Talking(Pieces):
        chat_template = "{{ messages[0].content }}"

    target, draft = Talking("the", " the", " cat", " sat", " on", " mat"), Pieces("th", "e ", "cat ", "sa", " mat", "d")
    monkeypatch.setattr("duodecoding.backends.read_vocabulary", lambda path: target if path.stem == "target" else draft)
    monkeypatch.setattr(
        "duodecoding.backends.load_target",
        lambda path, config: scripted.ScriptedTarget(target, storyteller(target, 0.1), context=900),
    )
    monkeypatch.setattr(
        "duodecoding.backends.load_draft",
        lambda path, config, exact=False: scripted.ScriptedDraft(draft, storyteller(draft), context=900),
    )
    assert main(["pair", *files, "--json"]) == 0
    one, two = json.loads(capsys.readouterr().out)["pairs"]
    assert one["compatible"] is False
    assert one["agreement"]["qa"]["top1"] > 0.5
    assert one["predicted"]["h200-7b"] > 1.1
    assert (one["agreement"], one["predicted"]["h200-7b"]) == (two["agreement"], two["predicted"]["h200-7b"])
    assert main(["pair", *files, "--profile", "none"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "token ids mean different text" in out or "differ in size" in out
    assert "draft steps a token), right" in out
