"""Measuring, with models whose every piece of work takes a known time on a clock of our own."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from worlds import World

from duodecoding import machine, measure
from duodecoding.backends import scripted
from duodecoding.cli.main import main
from duodecoding.cli.profile import in_words, priced
from duodecoding.costs import CostCurve, from_record, to_record
from duodecoding.errors import UsageError
from duodecoding.pace import Pace
from duodecoding.types import EngineConfig, SamplingParams
from duodecoding.virtual import load_profile

WORLD = World(context=1200, draft_context=1200, size=32)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class TimedTarget(scripted.ScriptedTarget):
    """A pass over n tokens takes 10 ms and 1 ms for each, unread tokens of the prompt 0.1 ms."""

    clock: Clock
    made = 0

    def verify(self, work):
        self.made += 1
        conversation, nodes = work[0]
        unread = len(conversation.tokens) - len(self.cells) - 1
        self.clock.now += 0.010 + 0.001 * len(nodes) + 0.0001 * max(0, unread)
        return super().verify(work)


class TimedDraft(scripted.ScriptedDraft):
    """A step takes 2 ms and 0.5 ms for each leaf; the first one after a pass of the target 3 ms more; each leaf `per_token` for a
    token of the prompt beyond 64."""

    clock: Clock
    target: TimedTarget
    unread = prompt = 0
    per_token = 0.0
    seen = 0  # passes of the target

    def open(self, prompt, unread=0):
        super().open(prompt, unread)
        self.unread = self.prompt = len(prompt) - unread

    def read(self):
        self.clock.now += 0.00005 * self.unread
        self.unread = 0
        return False

    def expand(self, leaves):
        self.clock.now += 0.002 + 0.0005 * len(leaves) + (0.003 if self.target.made > self.seen else 0)
        self.clock.now += self.per_token * len(leaves) * (self.prompt - 64)
        self.seen = self.target.made
        return super().expand(leaves)


def timed() -> tuple[TimedTarget, TimedDraft, Clock]:
    clock = Clock()
    vocabulary = scripted.ScriptedVocabulary(WORLD.size)
    script = scripted.random_script(WORLD.size, 3)
    target, draft = (
        TimedTarget(vocabulary, script, context=WORLD.context),
        TimedDraft(vocabulary, script, context=WORLD.context, sequences=200),
    )
    target.clock = draft.clock = clock
    draft.target = target
    return target, draft, clock


def test_the_curves_are_what_the_models_take():
    target, draft, clock = timed()
    shares = []
    profile = measure.measure(
        target, draft, name="mine", contexts=(64, 256, 5000), clock=clock, progress=lambda what, share: shares.append(share)
    )
    assert set(profile.verify) == {64, 256}  # the third is longer than the target allows
    for curve in profile.verify.values():
        assert set(curve.points) == set(measure.NODES)
        for n, seconds in curve.points.items():
            # A commit of several tokens leaves some for the next pass to read.
            assert seconds == pytest.approx(0.010 + 0.001 * (n - 1), rel=0.05)
    assert {w: pytest.approx(y) for w, y in profile.draft.points.items()} == {w: 0.002 + 0.0005 * w for w in measure.WIDTHS}
    assert profile.in_turn is not None
    for w, seconds in profile.in_turn.points.items():
        assert seconds == pytest.approx(0.002 + 0.0005 * w + 0.003 / measure.IN_TURN)
    assert profile.target_prompt == pytest.approx(0.0001, rel=0.5)
    assert profile.draft_prompt == pytest.approx(0.00005, rel=0.1)
    assert profile.prompts is not None
    assert set(profile.prompts.points) == {48, 96, 192, 256}
    for tokens, seconds in profile.prompts.points.items():  # nothing of them was in the cache
        assert seconds == pytest.approx(0.010 + 0.0001 * (tokens - 1), abs=0.0003)
    assert profile.latency > 0
    assert profile.measured
    assert shares == sorted(shares)
    assert all(0 <= share < 1 for share in shares)


def test_a_prompt_that_takes_long_is_the_last():
    target, _, clock = timed()
    slow = {"per token": 0.004}
    verify = target.verify

    def read(work):
        clock.now += slow["per token"] * len(work[0][0].tokens)
        return verify(work)

    target.verify = read
    assert [tokens for tokens, _ in measure.prompt_samples(target, 1000, clock)] == [48, 96]
    slow["per token"] = 0.0
    assert [tokens for tokens, _ in measure.prompt_samples(target, 1000, clock)] == list(measure.PROMPTS)


def test_draft_steps_with_more_context():
    target, draft, clock = timed()
    draft.per_token = 1e-6
    profile = measure.measure(target, draft, contexts=(64, 512), nodes=(1, 2), repeats=2, clock=clock)
    assert profile.longer is not None
    assert profile.longer.beyond == 64
    for leaves, seconds in profile.longer.per_token.points.items():
        assert seconds == pytest.approx(1e-6 * leaves)
    assert profile.draft_cost(4, 64) == pytest.approx(0.004)
    assert profile.draft_cost(4, 1064) == pytest.approx(0.004 + 0.004)
    assert profile.draft_at(1064)[4] == pytest.approx(0.008)
    quick = replace(profile, draft=CostCurve({1: 1e-6}))
    assert 0 < quick.draft_cost(4, 1) < 1e-6  # with less context than it was measured with: a cost is never nothing
    assert to_record(from_record(to_record(profile), where="here")) == to_record(profile)
    few = measure.measure(target, draft, contexts=(64,), nodes=(1, 2), repeats=2, clock=clock)
    assert few.longer is None
    assert few.draft_cost(4, 1064) == few.draft(4)


def test_costs_are_those_of_the_sampling_that_is_asked_for(monkeypatch):
    target, draft, clock = timed()
    opened = []
    monkeypatch.setattr(measure.ModelDrafter, "open", _noting(opened, measure.ModelDrafter.open))
    monkeypatch.setattr(TimedTarget, "open", _noting(opened, TimedTarget.open))
    warm = SamplingParams(temperature=0.8)
    measure.measure(target, draft, nodes=(1, 2), contexts=(64,), widths=(1,), repeats=1, params=warm, clock=clock)
    assert len(opened) > 4  # passes, steps, and both in turn
    assert opened.count(warm) == len(opened) - 1  # the last one times the prompt alone
    opened.clear()
    measure.measure(target, draft, nodes=(1, 2), contexts=(64,), widths=(1,), repeats=1, clock=clock)
    assert opened
    assert all(params == SamplingParams() for params in opened)


def _noting(seen, inner):
    def opening(self, prompt, params, *rest):
        seen.append(params)
        return inner(self, prompt, params, *rest)

    return opening


def test_a_pair_without_a_draft_model():
    target, _, clock = timed()
    profile = measure.measure(target, None, contexts=(64,), clock=clock, repeats=2)
    assert profile.verify[64](8) == pytest.approx(0.017, rel=0.05)


def test_a_context_too_short_to_measure():
    target, draft, clock = timed()
    target.context = 200
    with pytest.raises(UsageError, match="too short to measure"):
        measure.measure(target, draft, clock=clock)
    assert set(measure.measure(target, draft, nodes=(1, 2), repeats=2, clock=clock).verify) == {128}
    assert set(measure.measure(target, draft, nodes=(1, 2), repeats=2, contexts=(500,), clock=clock).verify) == {173}


def test_the_quick_look():
    target, _, clock = timed()
    (context, curve), *others = measure.quick_verify(target, clock=clock).items()
    assert (context, others) == (measure.QUICK_CONTEXT, [])
    assert {n: pytest.approx(y, rel=0.05) for n, y in curve.points.items()} == {
        n: 0.010 + 0.001 * (n - 1) for n in measure.QUICK_NODES
    }
    assert clock.now < 0.26, "26 bare passes"


def test_a_quick_look_ends_where_guesses_can_no_longer_pay():
    target, _, clock = timed()
    really = target.verify

    def dear(work):
        clock.now += 0.012 * len(work[0][1])
        return really(work)

    target.verify = dear
    (curve,) = measure.quick_verify(target, clock=clock).values()
    assert max(curve.points) == 4, "a pass over four takes more than four bare ones"


def test_passes_that_are_padded_are_measured_at_their_sizes():
    target, _, clock = timed()
    target.pass_sizes = (1, 8, 16, 32, 64, 128)
    quick = measure.quick_verify(target, clock=clock)[measure.QUICK_CONTEXT]
    whole = measure.measure(target, None, contexts=(64,), clock=clock, repeats=2).verify[64]
    assert (set(quick.points), set(whole.points)) == ({1, 2, 8, 9, 16, 17, 32, 33, 64}, {1, 2, 8, 9, 16, 17, 32, 33, 64, 65, 128})
    for curve in (quick, whole):
        assert (curve(2), curve(17), curve(33)) == (curve(8), curve(32), curve(64))
        assert curve(32) < curve(33)


def test_the_quick_look_ends_early_on_a_slow_machine():
    target, _, clock = timed()

    class Slow(Clock):
        def __call__(self) -> float:
            return clock.now * 30

    curve = measure.quick_verify(target, clock=Slow())[measure.QUICK_CONTEXT]
    assert set(curve.points) == {1, 2}  # two, or there would be no slope


def test_a_message_takes_some_time():
    assert 0 < measure.latency(20) < 1


# Keeping profiles


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DUO_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def models(tmp_path):
    target, draft = tmp_path / "target.gguf", tmp_path / "draft.gguf"
    target.write_bytes(b"GGUF" + bytes(100))
    draft.write_bytes(b"GGUF" + bytes(50))
    return target, draft


def test_the_key_depends_on_machine_models_and_settings(models, monkeypatch):
    target, draft = models
    config = EngineConfig(threads=2)

    def key(config=config, *files, **more):
        return measure.key(measure.facts(config, *(files or models), **more))

    first = key()
    assert key() == first
    assert len(first) == 16
    assert key(replace(config, draft_width=7)) == first  # does not change what a pass costs
    others = {
        key(replace(config, threads=3)),
        key(replace(config, threads_draft=1)),
        key(replace(config, gpu_layers=-1)),
        key(config, target, None),
        key(config, draft, target),
        key(config, device="a GPU"),
        key(config, engine="llamacpp"),
        key(config, engine="native"),
    }
    target.write_bytes(b"GGUF" + bytes(99) + b"x")
    others.add(key())
    monkeypatch.setattr(machine, "cpu", lambda *fields: "another")
    others.add(key())
    assert len(others | {first}) == 11


def test_the_key_does_not_depend_on_the_order_of_facts():
    assert measure.key({"a": 1, "b": {"c": 2, "d": 3}}) == measure.key({"b": {"d": 3, "c": 2}, "a": 1})


def test_a_folder_is_a_model_too(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    facts = measure.facts(EngineConfig(), tmp_path, None)
    assert facts["target"]["bytes"] == 2
    assert facts["draft"] is None


def test_profiles_are_kept(cache):
    profile = load_profile("h200-7b")
    assert measure.load("0123") is None
    path = measure.save(profile, "0123")
    assert path == cache / "profiles" / "0123.json"
    assert to_record(measure.load("0123")) == to_record(profile)
    assert list(path.parent.iterdir()) == [path]  # nothing half-written is left
    path.write_text('{"name": "x"')
    assert measure.load("0123") is None
    path.write_text("{}")
    assert measure.load("0123") is None


@pytest.mark.parametrize(
    ("platform", "variables", "place"),
    [
        ("linux", {}, "home/.cache/duodecoding"),
        ("linux", {"XDG_CACHE_HOME": "xdg"}, "xdg/duodecoding"),
        ("darwin", {}, "home/Library/Caches/duodecoding"),
        ("win32", {"LOCALAPPDATA": "local"}, "local/duodecoding"),
        ("win32", {}, "home/AppData/Local/duodecoding"),
        ("linux", {"DUO_CACHE": "mine"}, "mine"),
    ],
)
def test_where_they_are_kept(platform, variables, place, monkeypatch):
    for name in ("XDG_CACHE_HOME", "LOCALAPPDATA", "DUO_CACHE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(machine.sys, "platform", platform)
    monkeypatch.setattr(machine.Path, "home", lambda: machine.Path("home"))
    assert machine.cache_folder().as_posix() == place


# duo profile


@pytest.fixture
def pair(monkeypatch, models, cache):
    """The command loads the timed models, and the clock is theirs."""
    target, draft, clock = timed()
    monkeypatch.setattr("duodecoding.backends.load_target", lambda path, config: target)
    monkeypatch.setattr("duodecoding.backends.load_draft", lambda path, config: draft)
    monkeypatch.setitem(measure.measure.__kwdefaults__, "clock", clock)
    return [str(path) for path in models]


def test_the_command_prints_a_table_and_keeps_the_profile(pair, cache, capsys):
    assert main(["profile", "-m", pair[0], "-d", pair[1]]) == 0
    out, err = capsys.readouterr()
    assert "target and draft, measured here" in out
    assert "10.00 ms" in out
    assert "2.50 ms" in out
    kept = list((cache / "profiles").glob("*.json"))
    assert len(kept) == 1
    assert str(kept[0]) in err


def test_its_json_is_a_profile(pair, tmp_path, capsys):
    assert main(["profile", "-m", pair[0], "-d", pair[1], "--name", "mine", "--json"]) == 0
    out = capsys.readouterr().out
    assert json.loads(out)["name"] == "mine"
    path = tmp_path / "mine.json"
    path.write_text(out)
    assert load_profile(str(path)).draft(4) == pytest.approx(0.004)


def test_its_picture(pair, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    assert main(["profile", "-m", pair[0], "-d", "none", "--plot", str(tmp_path / "curves.png")]) == 0
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert main(["profile", "-m", pair[0], "--plot", str(tmp_path / "curves.svg")]) == 2


def test_times_in_words():
    assert [in_words(t) for t in (6e-6, 0.00123, 0.5)] == ["6 us", "1.23 ms", "500 ms"]
    assert priced({1: 0.001, 4: 0.002}, [1, 2, 4], 2) == ["2.00 ms", "2.00"]
    assert priced({1: 0.001, 4: 0.002}, [1, 2, 4], 1) == ["", ""]
    assert priced({1: 0.001}, [1], 3) == ["", ""]


# Memory


def test_bandwidth_counts_what_is_read_and_what_is_written():
    ticks = iter([0.0, 0.5, 1.0, 1.25, *(10.0 * n for n in range(1, 11))])  # the fastest of the copies takes 0.25 s
    assert measure.cpu_bandwidth(2, size=1000, clock=lambda: next(ticks)) == 2 * 1000 / 0.25


def test_the_floor_of_a_target(monkeypatch):
    target, _, _ = timed()
    assert measure.floor(target, on_gpu=False, threads=1) is None  # nobody knows what its weights are
    target.weights_bytes = 3_000_000
    monkeypatch.setattr(measure, "cpu_bandwidth", lambda threads: 1e9 * threads)
    assert measure.floor(target, on_gpu=False, threads=3).seconds == pytest.approx(0.001)
    monkeypatch.setattr(measure, "gpu_bandwidth", lambda device: ("Big One", 1e12))
    assert measure.floor(target, on_gpu=True).where == "Big One"
    monkeypatch.setattr(measure, "gpu_bandwidth", lambda device: None)
    assert measure.floor(target, on_gpu=True) is None


def test_without_torch_a_gpu_cannot_be_measured(monkeypatch):
    monkeypatch.setattr(measure, "find_spec", lambda name: None)
    assert measure.gpu_bandwidth() is None


def test_a_full_pass_is_a_size_that_is_measured():
    # 63 guesses and the root: one row more would begin another tile of a GPU.
    assert EngineConfig().max_nodes + 1 in measure.NODES


def test_steps_are_learnt_as_if_their_context_were_the_measured_one():
    """Else a long answer would make the next, short one's steps look dear."""
    target, draft, clock = timed()
    draft.per_token = 1e-6
    costs = measure.measure(target, draft, contexts=(64, 512), nodes=(1, 2), repeats=2, clock=clock)
    pace = Pace(costs)
    before = pace.costs.draft(4)
    for _ in range(20):
        pace.draft_step(4, before + 4e-6 * 1000, 1064)  # as long as it should take there
    assert pace.costs.draft(4) == pytest.approx(before, rel=1e-3)
    for _ in range(60):
        pace.draft_step(4, 2 * before + 4e-6 * 1000, 1064)
    assert pace.costs.draft(4) == pytest.approx(2 * before, rel=0.02)
    assert pace.costs.draft_cost(4, 1064) == pytest.approx(2 * before + 0.004, rel=0.02)
