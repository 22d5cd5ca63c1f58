"""The package's prompts are whole, and a user's broken file is named with its line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from duodecoding import prompts
from duodecoding.errors import UsageError

GOOD = '{"question_id": 1, "category": "qa", "turns": ["Why?"]}'


def write(folder: Path, text: str | bytes, name: str = "mine.jsonl") -> Path:
    (folder / name).write_bytes(text.encode() if isinstance(text, str) else text)
    return folder


def test_every_task_has_prompts() -> None:
    found = prompts.load()
    assert tuple(found) == prompts.TASKS
    assert all(len(items) >= 6 for items in found.values())


def test_ids_are_unique() -> None:
    ids = [prompt.id for items in prompts.load().values() for prompt in items]
    assert len(ids) == len(set(ids))


def test_texts_are_unique() -> None:
    texts = [turn for items in prompts.load().values() for prompt in items for turn in prompt.turns]
    assert len(texts) == len(set(texts))


def test_turns() -> None:
    for task, items in prompts.load().items():
        expected = 2 if task == "mt_bench" else 1
        assert {len(prompt.turns) for prompt in items} == {expected}, task
        assert {prompt.task for prompt in items} == {task}


@pytest.mark.parametrize("task", prompts.TASKS)
def test_one_task(task: str) -> None:
    assert prompts.load(task) == {task: prompts.load()[task]}


def test_code_prompts_are_open_functions() -> None:
    for prompt in prompts.load("humaneval")["humaneval"]:
        compile(prompt.turns[0] + "    pass\n", prompt.id, "exec")
        assert ">>> " in prompt.turns[0]


def test_articles_are_long_enough_to_summarise() -> None:
    for prompt in prompts.load("summarization")["summarization"]:
        assert 200 <= len(prompt.turns[0].split()) <= 420


def test_unknown_task() -> None:
    with pytest.raises(UsageError, match=r"'poetry'.*mt_bench"):
        prompts.load("poetry")


def test_own_folder(tmp_path: Path) -> None:
    write(tmp_path, GOOD + '\n\n{"question_id": "x", "turns": ["a", "b"]}\n')
    found = prompts.load(folder=tmp_path)
    assert found == {"qa": [prompts.Prompt("1", "qa", ("Why?",))], "mine": [prompts.Prompt("x", "mine", ("a", "b"))]}


def test_files_are_read_in_order_of_name(tmp_path: Path) -> None:
    write(tmp_path, '{"question_id": 2, "category": "qa", "turns": ["B"]}', "b.jsonl")
    write(tmp_path, GOOD, "a.jsonl")
    assert [prompt.id for prompt in prompts.load("qa", tmp_path)["qa"]] == ["1", "2"]


def test_byte_order_mark_carriage_returns_and_line_separators(tmp_path: Path) -> None:
    text = json.dumps({"question_id": 1, "category": "qa", "turns": ["one\u2028two"]}, ensure_ascii=False)
    write(tmp_path, b"\xef\xbb\xbf" + text.encode() + b"\r\n")
    assert prompts.load(folder=tmp_path)["qa"][0].turns == ("one\u2028two",)


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ('{"question_id": 1, "turns": ["a"', "not JSON"),
        (b'{"question_id": 1, "turns": ["\xff"]}', "not JSON"),
        ("[1, 2]", "not a JSON object"),
        ('{"turns": ["a"]}', "question_id is None"),
        ('{"question_id": true, "turns": ["a"]}', "question_id is True"),
        ('{"question_id": "", "turns": ["a"]}', "question_id is ''"),
        ('{"question_id": 2}', "turns must be"),
        ('{"question_id": 2, "turns": []}', "turns must be"),
        ('{"question_id": 2, "turns": "text"}', "turns must be"),
        ('{"question_id": 2, "turns": ["  "]}', "turns must be"),
        ('{"question_id": 2, "turns": [3]}', "turns must be"),
        ('{"question_id": 2, "category": 7, "turns": ["a"]}', "category is 7"),
        (GOOD, "was there before"),
    ],
)
def test_broken_line_is_named(tmp_path: Path, line: str | bytes, complaint: str) -> None:
    broken = line.encode() if isinstance(line, str) else line
    write(tmp_path, GOOD.encode() + b"\n\n" + broken + b"\n")
    with pytest.raises(UsageError) as caught:
        prompts.load(folder=tmp_path)
    assert "mine.jsonl, line 3" in str(caught.value)
    assert complaint in str(caught.value)


def test_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such folder"):
        prompts.load(folder=tmp_path / "nowhere")


def test_file_instead_of_folder(tmp_path: Path) -> None:
    write(tmp_path, GOOD)
    with pytest.raises(UsageError, match="it is a file"):
        prompts.load(folder=tmp_path / "mine.jsonl")


def test_folder_without_files(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no \.jsonl file"):
        prompts.load(folder=tmp_path)


def test_folder_with_empty_files(tmp_path: Path) -> None:
    write(tmp_path, "\n\n")
    with pytest.raises(UsageError, match="empty"):
        prompts.load(folder=tmp_path)
