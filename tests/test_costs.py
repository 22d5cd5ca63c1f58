"""Cost curves and profiles."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duodecoding.costs import CostCurve, Floor, Profile, fit, from_record, stepped, to_record
from duodecoding.errors import UsageError
from duodecoding.virtual import load_profile, profile_names

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
import plot_h200

POINTS = st.dictionaries(st.integers(1, 128), st.floats(1e-5, 10.0), min_size=1, max_size=8)


@given(POINTS)
def test_a_curve_goes_through_its_points(points):
    curve = CostCurve(points)
    assert curve.points == dict(sorted(points.items()))
    for x, y in points.items():
        assert curve(x) == pytest.approx(y)


@given(POINTS, st.floats(0, 500))
def test_between_points_it_stays_between_them_and_is_positive(points, x):
    curve, inside = CostCurve(points), [n for n in points if n <= x]
    value = curve(x)
    assert value > 0
    after = [n for n in points if n >= x]
    if inside and after:
        ends = points[max(inside)], points[min(after)]
        assert min(ends) * (1 - 1e-9) <= value <= max(ends) * (1 + 1e-9)


def test_beyond_the_last_point_the_slope_goes_on():
    curve = CostCurve({1: 0.001, 2: 0.002, 4: 0.006})
    assert curve(3) == pytest.approx(0.004)
    assert curve(6) == pytest.approx(0.010)
    assert curve(0) == 0.001
    assert CostCurve({4: 0.5})(100) == 0.5


@pytest.mark.parametrize("points", [{}, {1: 0.0}, {1: -1.0}, {-1: 1.0}, {1: float("nan")}])
def test_what_is_no_curve(points):
    with pytest.raises(UsageError):
        CostCurve(points)


def test_measurements_move_the_nearest_point():
    curve = CostCurve({1: 0.01, 8: 0.02})
    for _ in range(200):
        curve.observe(7, 0.04)
    assert curve(7) == pytest.approx(0.04, rel=0.15)
    assert curve(1) == 0.01


def test_one_outlier_hardly_counts():
    curve = CostCurve({1: 0.01})
    curve.observe(1, 60.0)
    assert curve(1) < 0.012
    curve.observe(1, 1e-9)
    assert curve(1) > 0.009


def test_scaling_keeps_the_shape():
    curve = CostCurve({1: 0.01, 8: 0.03})
    curve.scale(2.0)
    assert curve.points == {1: 0.02, 8: 0.06}


@given(st.lists(st.tuples(st.integers(1, 16), st.floats(1e-6, 1.0)), min_size=1, max_size=40))
def test_a_fitted_curve_never_falls(samples):
    times = list(fit(samples).points.values())
    assert times == sorted(times)


def test_a_fit_takes_medians():
    assert fit([(1, 0.001), (1, 0.002), (1, 9.0), (2, 0.004)]).points == {1: 0.002, 2: 0.004}


def test_a_disturbed_measurement_does_not_raise_the_others():
    assert fit([(1, 0.001), (2, 0.009), (4, 0.003), (8, 0.005)]).points == {1: 0.001, 2: 0.003, 4: 0.003, 8: 0.005}


def profile() -> Profile:
    verify = {100: CostCurve({1: 0.010, 8: 0.012}), 300: CostCurve({1: 0.020, 8: 0.030})}
    return Profile("p", "a test", True, verify, CostCurve({1: 0.001, 4: 0.002}), 1e-5, 2e-5, 5e-5, {"threads": 3})


def test_costs_between_contexts():
    costs = profile()
    assert costs.verify_cost(1, 100) == pytest.approx(0.010)
    assert costs.verify_cost(1, 200) == pytest.approx(0.015)
    assert costs.verify_cost(8, 300) == pytest.approx(0.030)
    assert costs.verify_cost(1, 10) == pytest.approx(0.010)  # shorter than any that was measured
    assert costs.verify_cost(1, 400) == pytest.approx(0.025)
    assert costs.verify_at(120) is costs.verify[100]
    assert costs.verify_at(290) is costs.verify[300]


def test_a_record_gives_the_profile_back():
    record = json.loads(json.dumps(to_record(profile())))
    again = from_record(record, where="x")
    assert to_record(again) == to_record(profile())
    assert again.verify[300].points == {1: 0.020, 8: 0.030}
    assert again.prompts is None
    curve = replace(profile(), prompts=CostCurve({48: 0.007, 96: 0.009}))
    assert from_record(to_record(curve), where="x").prompts.points == {48: 0.007, 96: 0.009}


def test_a_prompt_costs_its_tokens_or_what_was_measured():
    assert profile().prompt_cost(100) == pytest.approx(100 * 1e-5)
    measured = replace(profile(), prompts=CostCurve({48: 0.017, 96: 0.019}))  # with a pass, which takes 10 ms
    assert measured.prompt_cost(10) == pytest.approx(0.007)
    assert measured.prompt_cost(72) == pytest.approx(0.008)
    assert measured.prompt_cost(96) == pytest.approx(0.009)
    assert replace(profile(), prompts=CostCurve({48: 0.007})).prompt_cost(96) > 0  # shorter than a pass


@pytest.mark.parametrize("break_it", [{"verify": 3}, {"verify": {"x": {}}}, {"draft_step": {"1": -1}}, {"latency": "soon"}])
def test_a_broken_record_is_named(break_it):
    with pytest.raises(UsageError):
        from_record(to_record(profile()) | break_it, where="my.json")


def test_a_missing_field_is_named():
    record = to_record(profile())
    del record["draft_step"]
    with pytest.raises(UsageError, match=r"my\.json is not a profile: KeyError: 'draft_step'"):
        from_record(record, where="my.json")


def test_shipped_profiles():
    assert {"h200-7b", "h200-13b", "h200-32b"} <= set(profile_names())
    for name in profile_names():
        shipped = load_profile(name)
        assert shipped.name == name
        curve = shipped.verify_at(512)
        assert 1 <= curve(64) / curve(1) < 4
        assert shipped.measured == ("estimate" not in shipped.settings)


def test_profiles_from_files(tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(to_record(profile())))
    assert load_profile(str(path)).name == "p"
    path.write_text("{")
    with pytest.raises(UsageError, match="is not a profile"):
        load_profile(str(path))
    with pytest.raises(UsageError, match="no profile 'no-such'"):
        load_profile("no-such")


def test_the_floor_is_weights_over_bandwidth():
    floor = Floor(weights=13_355_000_000, bandwidth=4.302e12, where="NVIDIA H200")
    assert floor.seconds == pytest.approx(3.104e-3, rel=1e-3)
    assert floor.share(4.459e-3) == pytest.approx(0.696, abs=1e-3)
    assert floor.share(floor.seconds) == 1.0


def test_measured_rounds_become_a_profile():
    times = {"64@512": 5.5, "64 bush@512": 5.3, "8@512": 4.5, "1@512": 4.4, "1@4096": 4.9}
    cells = {name: {"ms": ms, "sampling_ms": 0.1, "round_ms": ms + 0.3} for name, ms in times.items()}
    results = {"gpu": {"gpu": "Big One"}, "verify": cells, "first_token_4096_ms": 99.2}
    record = {"file": "h200_verify_7b_own.json", "settings": {"kernels": "own"}, "results": results}
    shipped = to_record(load_profile("h200-7b"))
    made = from_record(plot_h200.profile("7b", record, shipped), where="made")
    assert made.verify[512].points == {1: 0.0045, 2: 0.0046, 8: 0.0046, 9: 0.0054, 64: 0.0054}  # passes are padded to sizes
    assert made.verify_cost(1, 4096) == 0.005
    assert made.target_prompt == pytest.approx(0.0992 / 4096, rel=1e-3)
    assert made.draft.points == load_profile("h200-7b").draft.points  # measured elsewhere, and kept
    assert "Big One" in made.about
    assert "draft step: the embedded draft" in made.about


def test_work_that_is_padded_costs_what_the_next_size_does():
    curve = stepped(CostCurve({1: 1.0, 2: 1.5, 8: 2.0, 16: 4.0}), (1, 8, 16, 32))
    assert [curve(n) for n in (1, 2, 5, 8, 9, 16)] == [1.0, 2.0, 2.0, 2.0, 4.0, 4.0]
    assert max(curve.points) == 16  # nobody measured more
    assert stepped(curve, ()) is curve
    assert stepped(curve, (64,)) is curve
