"""The timeline, its file format, and its two drawings."""

from __future__ import annotations

import json

import pytest
from rich.console import Console

from duodecoding.cli.lanes import first_passes, lanes
from duodecoding.cli.main import main
from duodecoding.errors import UsageError
from duodecoding.trace import Did, Lane, Timeline, from_chrome, to_chrome


def timeline(start: float = 10.0) -> Timeline:
    """Three passes with a wait between the last two, and four draft steps."""
    line = Timeline("an answer")
    line.span(Lane.DRAFT, Did.PROMPT, start, start + 0.001, tokens=7)
    line.span(Lane.TARGET, Did.PROMPT, start, start + 0.002, tokens=7)
    for begin, gained in ((0.002, 1), (0.007, 3), (0.014, 2)):
        line.span(Lane.TARGET, Did.PASS, start + begin, start + begin + 0.005, nodes=2 * gained, gained=gained)
        line.mark(Lane.TARGET, Did.COMMIT, start + begin + 0.005, gained=gained)
    line.span(Lane.TARGET, Did.WAIT, start + 0.012, start + 0.014)
    for begin, leaves in ((0.002, 1), (0.004, 2), (0.006, 4), (0.013, 1)):
        line.span(Lane.DRAFT, Did.STEP, start + begin, start + begin + 0.002, leaves=leaves)
    return line


def test_stretches_of_silence_can_be_left_out():
    line = Timeline("an answer")
    for begin in (1.0, 4.0, 4.5, 9.0):
        line.span(Lane.TARGET, Did.PASS, begin, begin + 0.25, nodes=int(10 * begin))
    found = line.without([(0.0, 0.5), (1.25, 4.0), (5.0, 8.5)])
    assert [(e.begin, e.end, e.args["nodes"]) for e in found.events] == [
        (0.5, 0.75, 10),
        (0.75, 1.0, 40),
        (1.25, 1.5, 45),
        (2.25, 2.5, 90),
    ]
    assert line.without([]).events == line.events


def test_the_file_is_what_chrome_reads():
    record = json.loads(json.dumps(to_chrome(timeline())))
    events = record["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X", "i"}
    names = {(e["tid"], e["args"]["name"]) for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    assert names == {(1, "target"), (2, "draft")}
    for event in events:
        assert event["pid"] == 1
        if event["ph"] == "X":
            assert event["ts"] >= 0
            assert event["dur"] > 0
        if event["ph"] == "i":
            assert event["s"] == "p"
    passes = [event for event in events if event["name"] == "pass"]
    assert [(e["ts"], e["dur"]) for e in passes] == [(2000, 5000), (7000, 5000), (14000, 5000)]  # microseconds from the first event
    assert passes[1]["args"] == {"nodes": 6, "gained": 3}


def test_reading_is_the_inverse_of_writing():
    line = timeline().from_zero()
    again = from_chrome(to_chrome(line), where="x")
    assert again.title == line.title
    assert len(again.events) == len(line.events)
    for lane in Lane:
        for name in Did:
            for mine, theirs in zip(line.of(lane, name), again.of(lane, name), strict=True):
                assert mine.args == theirs.args
                assert (mine.begin, mine.end) == pytest.approx((theirs.begin, theirs.end), abs=1e-9)


@pytest.mark.parametrize(
    "record",
    [
        [],
        7,
        {},
        {"traceEvents": 3, "otherData": {"title": ""}},
        {"traceEvents": [], "otherData": {"title": ""}},
        {"traceEvents": [{"ph": "X", "cat": "moon", "name": "pass", "ts": 0, "dur": 1, "args": {}}], "otherData": {"title": ""}},
        {"traceEvents": [{"ph": "X", "cat": "target", "name": "pass", "ts": "?", "args": {}}], "otherData": {"title": ""}},
    ],
)
def test_other_files_are_refused(record):
    with pytest.raises(UsageError, match=r"t\.json"):
        from_chrome(record, where="t.json")


def test_a_stretch_is_cut_at_its_ends():
    part = timeline(0.0).between(0.004, 0.013)
    assert (part.begin, part.end) == (0.004, 0.013)
    assert [(e.begin, e.end) for e in part.of(Lane.TARGET, Did.PASS)] == [(0.004, 0.007), (0.007, 0.012)]
    assert len(part.of(Lane.TARGET, Did.COMMIT)) == 2
    assert not part.of(Lane.TARGET, Did.PROMPT)
    assert [e.args["leaves"] for e in part.of(Lane.DRAFT, Did.STEP)] == [2, 4]


def drawn(line: Timeline, width: int = 60) -> list[str]:
    console = Console(width=200, color_system=None)
    with console.capture() as capture:
        console.print(lanes(line, width))
    return capture.get().splitlines()


def test_lanes_in_the_terminal():
    rows = drawn(timeline())
    assert [row.split()[0] for row in rows[1:3]] == ["target", "draft"]
    assert rows[0].split() == ["+1", "+3", "+2"]
    target = rows[1]
    assert len(target) == 60
    # 19 ms in 52 columns: prompt 2 ms, passes of 5 ms, 2 ms of waiting.
    assert target.count("▒") == pytest.approx(52 * 2 / 19, abs=1)
    assert target.count("░") == pytest.approx(52 * 2 / 19, abs=1)
    assert target.count("█") == pytest.approx(52 * 10 / 19, abs=2)
    assert target.count("▓") == pytest.approx(52 * 5 / 19, abs=1)
    assert "█" in rows[2]  # the widest step
    assert rows[3].split()[-2:] == ["10019", "ms"]


def test_a_lane_without_a_draft_is_left_out():
    line = Timeline()
    line.span(Lane.TARGET, Did.PASS, 0.0, 0.01, nodes=0, gained=1)
    rows = drawn(line)
    assert not any(row.startswith("draft") for row in rows)
    assert not any("wait" in row for row in rows)


def test_the_first_passes():
    part = first_passes(timeline(0.0), 2)
    assert (part.begin, part.end) == (0.002, 0.012)
    assert first_passes(Timeline(), 3).events == []


# duo trace


@pytest.fixture
def trace_file(tmp_path):
    path = tmp_path / "answer.json"
    path.write_text(json.dumps(to_chrome(timeline())))
    return path


def test_the_picture(trace_file, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    assert main(["trace", str(trace_file)]) == 0
    beside = tmp_path / "answer.png"
    assert beside.read_bytes().startswith(b"\x89PNG")
    assert str(beside) in capsys.readouterr().err
    other = tmp_path / "part.png"
    assert main(["trace", str(trace_file), "--out", str(other), "--from", "0.005", "--to", "0.012"]) == 0
    assert other.read_bytes() != beside.read_bytes()
    before = other.read_bytes()
    main(["trace", str(trace_file), "--out", str(other), "--from", "0.005", "--to", "0.012"])
    assert other.read_bytes() == before  # the same data, the same bytes


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["missing.json"], "cannot read missing.json"),
        (["{file}", "--out", "picture.jpg"], "pictures are PNG files"),
        (["{file}", "--out", "/no/such/folder/x.png"], "no folder"),
        (["{file}", "--from", "7"], "nothing lies between"),
        (["{file}", "--from", "0.01", "--to", "0.002"], "nothing lies between"),
    ],
)
def test_what_cannot_be_drawn_is_said(arguments, said, trace_file, capsys, monkeypatch, tmp_path):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    assert main(["trace", *(word.format(file=trace_file) for word in arguments)]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1


def test_a_file_that_is_no_trace(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    path = tmp_path / "x.json"
    path.write_text("{")
    assert main(["trace", str(path)]) == 2
    assert "is not JSON" in capsys.readouterr().err


def test_without_matplotlib(trace_file, capsys, monkeypatch):
    monkeypatch.setattr("duodecoding.cli.plots.find_spec", lambda name: None)
    assert main(["trace", str(trace_file)]) == 1
    assert "matplotlib is not installed" in capsys.readouterr().err
