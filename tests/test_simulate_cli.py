"""`duo simulate`, with scripted models in place of files."""

from __future__ import annotations

import json

import pytest
from worlds import World

from duodecoding.cli.main import main
from duodecoding.cli.simulate import named, style, table, words
from duodecoding.cli.terminal import Terminal
from duodecoding.costs import to_record
from duodecoding.errors import UsageError
from duodecoding.virtual import load_profile

WORLD = World(context=512, draft_context=512, share=0.3, memory=2)
MODES = ["off", "chain", "serial", "lockstep", "duo", "free"]
MODE_KEYS = ["speedup", "tokens_per_round", "target_idle", "draft_idle", "hidden_draft_share"]


@pytest.fixture
def pair(monkeypatch, tmp_path):
    """Arguments for a pair of models and a folder of tasks, all small."""
    for name in ("target", "draft"):
        (tmp_path / f"{name}.gguf").write_bytes(b"GGUF" + bytes(100))
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    for task, texts in {"qa": ["abc", "bcd", "cde"], "code": ["ab ab", "fgh"]}.items():
        lines = [json.dumps({"question_id": i, "category": task, "turns": [text]}) for i, text in enumerate(texts)]
        (tasks / f"{task}.jsonl").write_text("\n".join(lines))
    monkeypatch.setattr("duodecoding.backends.load_target", lambda path, config: WORLD.target())
    monkeypatch.setattr("duodecoding.backends.read_vocabulary", lambda path: WORLD.draft().vocabulary)
    monkeypatch.setattr("duodecoding.backends.load_draft", lambda path, config, exact: WORLD.draft())
    return ["-m", str(tmp_path / "target.gguf"), "-d", str(tmp_path / "draft.gguf"), "--tasks", str(tasks), "--max-tokens", "24"]


def run(capsys, *arguments: str) -> list[dict]:
    assert main(["simulate", "--json", *arguments]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_one_object_for_a_profile(pair, capsys):
    (found,) = run(capsys, *pair)
    assert found["profile"] == "h200-7b"
    assert list(found["modes"]) == MODES
    for mode in found["modes"].values():
        assert list(mode)[:5] == MODE_KEYS
        assert list(mode["speedup"]) == ["code", "qa", "mean"]
    assert found["prompts"] == 4  # two of each task
    assert found["max_tokens"] == 24


def test_two_runs_print_the_same_bytes(pair, capsys):
    outputs = []
    for _ in range(2):
        assert main(["simulate", "--json", "--ablate", "--profile", "h200-7b,h200-32b", *pair]) == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1]
    assert outputs[0].count("\n") == 2


def test_several_profiles_and_a_file(pair, capsys, tmp_path):
    mine = tmp_path / "mine.json"
    mine.write_text(json.dumps(to_record(load_profile("h200-13b")) | {"name": "mine"}))
    found = run(capsys, *pair, "--profile", f"h200-7b, {mine}", "--modes", "duo", "--per-task", "1")
    assert [result["profile"] for result in found] == ["h200-7b", "mine"]
    assert [list(result["modes"]) for result in found] == [["duo"], ["duo"]]
    assert found[0]["prompts"] == 2


def test_the_ablation_adds_rows(pair, capsys):
    (found,) = run(capsys, *pair, "--modes", "duo,pearl", "--ablate", "--per-task", "1")
    parts = ["no waiting", "no calibration", "width 1", "no hedging", "no lookup", "no recycling", "model only"]
    assert list(found["modes"]) == ["duo", "pearl", *(f"duo, {part}" for part in parts)]


@pytest.mark.parametrize("draft", ["lookup", "free", "none"])
def test_without_a_draft_model(draft, pair, capsys):
    pair[3] = draft
    (found,) = run(capsys, *pair, "--modes", "duo")
    assert found["draft"] == draft
    assert found["modes"]["duo"]["draft_idle"] == 1.0


def test_short_answers_unless_more_is_asked_for(pair, capsys, monkeypatch):
    del pair[-2:]
    (found,) = run(capsys, *pair, "--modes", "off", "--seed", "3")
    assert (found["max_tokens"], found["seed"]) == (128, 3)


def test_sampling_has_its_flags(pair, capsys):
    (one,) = run(capsys, *pair, "--modes", "duo", "--temperature", "1", "--seed", "1")
    (two,) = run(capsys, *pair, "--modes", "duo", "--temperature", "1", "--seed", "2")
    assert one["temperature"] == 1.0
    assert one["modes"] != two["modes"]


def test_the_table(pair, capsys):
    assert main(["simulate", *pair, "--ablate", "--profile", "rtx4090-8b-q4"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "rtx4090-8b-q4: target answers 4 prompts, draft guesses" in out
    assert "AN ESTIMATE" in out
    rows = [line.split() for line in out.splitlines()]
    first = [row[0] for row in rows if row]
    assert [name for name in first if name in MODES] == ["off", "chain", "serial", "lockstep", "duo", "free"]
    assert ["no", "waiting"] in [row[:2] for row in rows]
    assert all("…" not in line for line in out.splitlines())  # nothing is cut off in a pipe


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--profile", "abacus"], "no profile 'abacus'"),
        (["--profile", ","], "--profile is empty"),
        (["--modes", "off,warp"], "unknown mode 'warp'"),
        (["--modes", ""], "--modes is empty"),
        (["--per-task", "0"], "--per-task is 0"),
        (["--tasks", "/no/such/folder"], "cannot read prompts"),
        (["--max-tokens", "0"], "max_tokens is 0"),
        (["--max-tokens", "600"], "every prompt is too long"),
    ],
)
def test_errors_are_one_line(arguments, said, pair, capsys):
    given = dict(zip(pair[::2], pair[1::2], strict=True)) | {arguments[0]: arguments[1]}
    assert main(["simulate", *(word for flag in given.items() for word in flag)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err
    assert err.count("\n") == 1


def test_prompts_that_do_not_fit_are_named(pair, capsys, tmp_path):
    with (tmp_path / "tasks" / "long.jsonl").open("w") as file:
        file.write(json.dumps({"question_id": 9, "category": "long", "turns": ["a" * 500]}))
    assert main(["simulate", "--json", "--modes", "off", *pair]) == 0
    assert "left out, too long for the context: long 9" in capsys.readouterr().err


# Drawing


def modes() -> dict:
    def mode(mean: float, **settings: int) -> dict:
        shares = {"tokens_per_round": 2.0, "target_idle": 0.1, "draft_idle": 0.2, "hidden_draft_share": 0.9, "ttft_seconds": 0.01}
        return {"speedup": {"qa": mean, "mean": mean}, **shares, "settings": settings}

    return {
        "off": mode(1.0),
        "chain": mode(0.9, draft_length=3),
        "serial": mode(1.5, draft_length=2, draft_width=4),
        "duo": mode(2.0),
        "free": mode(3.0),
    }


def test_the_best_is_set_off_and_a_loss_too():
    found = modes()
    assert [style(found, name, "qa") for name in found] == ["", "red", "", "bold green", ""]


def test_names_carry_the_settings_that_were_found():
    found = modes()
    assert [named(name, mode["settings"]) for name, mode in found.items()] == ["off", "chain 3", "serial 2×4", "duo", "free"]
    assert named("duo, no waiting", {}) == "  no waiting"


def test_a_narrow_screen_gets_two_tables():
    terminal = Terminal()
    whole, speeds = table(modes()), table(modes(), shares=False)
    assert terminal.width_of(speeds) < terminal.width_of(whole)
    assert len(table(modes(), speeds=False).columns) == 7


def test_lists_of_words():
    assert words(" a, b,a,", "modes") == ["a", "b"]
    with pytest.raises(UsageError):
        words(" , ", "modes")
