from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from worlds import parameters

from duodecoding import LLM, SamplingParams, sampling
from duodecoding.backends import scripted
from duodecoding.drafters.lookup import LookupDrafter
from duodecoding.drafters.model import ModelDrafter
from duodecoding.drafting import Drafters
from duodecoding.sampling import HEAD, Luck, Sampler, gumbel, largest, uniform
from duodecoding.types import MAX_SEED, EngineConfig, Mode

DRAWS = 20_000
# Noise as integers of 53 bits: (seed, position) -> tokens 0, 1, 49151 and the two pseudo-tokens of the tail.
PINNED = {
    (0, 1): [4317239941654215, 6753131800803419, 878155486054007, 3421351212896441, 4201341865596353],
    (1, 0): [2537880150861723, 5876733520225071, 6382153735191743, 8738527745777923, 7996790912237427],
    (12345, 4095): [5285449029592585, 6860466333557545, 1777962581466683, 3745714933829211, 7380565703220397],
    (MAX_SEED - 1, 0): [8019071513811069, 2369721409450909, 2353058872025783, 5267373395270205, 2455647560698763],
    (MAX_SEED, 0): [7571472263517817, 69332931462553, 25266445397073, 5372767479466297, 1590440305286743],
    (MAX_SEED, 100_000): [6950352541584491, 5122524821256119, 283155624962629, 1028299963904345, 1480916990750471],
}

LOGITS = st.floats(-30, 30, width=32) | st.sampled_from([0.0, 1.0, -1.0])  # some of them equal


def rows(low: int = 1, high: int = 60, elements: st.SearchStrategy[float] = LOGITS) -> st.SearchStrategy[np.ndarray]:
    return npst.arrays(np.float32, st.integers(low, high), elements=elements)


def sampler(size: int, prompt: tuple[int, ...] = (), **params: object) -> Sampler:
    return Sampler(SamplingParams(**params), prompt, size)  # type: ignore[arg-type]


def softmax(row: np.ndarray) -> np.ndarray:
    weights = np.exp(row.astype(np.float64) - row.max())
    return weights / weights.sum()


# Noise


def test_noise_is_a_fixed_function() -> None:
    """Answers to old seeds depend on these numbers: they may never change."""
    tokens = np.array([0, 1, 49_151, sampling.TAIL_NOISE, sampling.TAIL_DRAW])
    bits = {place: (uniform(*place, tokens) * 2.0**53).astype(np.uint64).tolist() for place in PINNED}
    assert bits == PINNED


def test_noise_does_not_depend_on_which_tokens_are_asked_together() -> None:
    every = gumbel(5, 3, np.arange(1000))
    assert (gumbel(5, 3, np.array([999, 0, 17])) == every[[999, 0, 17]]).all()


def test_noise_differs_between_seeds_positions_and_tokens() -> None:
    seeds = [0, 1, 2, 2**32, 2**32 + 1, MAX_SEED - 1, MAX_SEED]
    seen = {float(u) for seed in seeds for position in range(20) for u in uniform(seed, position, np.arange(20))}
    assert len(seen) == len(seeds) * 20 * 20


@given(st.integers(0, MAX_SEED), st.integers(0, 1 << 40), st.integers(-2, 1 << 20))
def test_noise_is_finite_for_every_seed(seed: int, position: int, token: int) -> None:
    (u,) = uniform(seed, position, np.array([token]))
    assert 0 < u < 1
    assert np.isfinite(gumbel(seed, position, np.array([token]))).all()


def test_the_extreme_hashes_are_inside_the_open_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    for bits in (0, 2**64 - 1):
        monkeypatch.setattr(sampling, "_mix", lambda x, bits=bits: np.full_like(x, np.uint64(bits)))
        (u,) = uniform(0, 0, np.array([0]))
        assert 0 < u < 1


def test_noise_is_uniform_and_independent() -> None:
    u = np.array([uniform(11, position, np.arange(400)) for position in range(400)])  # (positions, tokens)
    counts = np.histogram(u, bins=50, range=(0, 1))[0]
    assert ((counts - u.size / 50) ** 2 / (u.size / 50)).sum() < chi_square_limit(49)
    for a, b in ((u[:, :-1], u[:, 1:]), (u[:-1], u[1:]), (uniform(12, 0, np.arange(160_000)), u.ravel())):
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 0.012


# The largest of many


@given(rows(), st.integers(1, 80))
def test_largest_is_a_stable_sort(row: np.ndarray, k: int) -> None:
    assert largest(row, k).tolist() == np.argsort(-row, kind="stable")[:k].tolist()


@given(rows(elements=LOGITS | st.just(-math.inf)), st.integers(1, 80))
def test_largest_with_impossible_tokens(row: np.ndarray, k: int) -> None:
    assert largest(row, k).tolist() == np.argsort(-row, kind="stable")[:k].tolist()


@given(st.integers(0, 10_000), st.sampled_from([1, 4, 64, HEAD, 3000]), st.sampled_from([0.1, 1, 3, 30, 3000]), st.booleans())
def test_largest_of_a_real_size(seed: int, k: int, spread: float, rounded: bool) -> None:
    row = (np.random.default_rng(seed).standard_normal(20_000) * spread).astype(np.float32)
    if rounded:  # many equal ones on every border
        row = np.round(row)
    assert largest(row, k).tolist() == np.argsort(-row, kind="stable")[:k].tolist()


def test_largest_where_all_are_equal() -> None:
    assert largest(np.zeros(5000, np.float32), 7).tolist() == list(range(7))


# Which tokens may be drawn: against a plain reading of top-k, top-p and min-p


def naive_candidates(row: np.ndarray, params: SamplingParams) -> tuple[set[int], set[int]]:
    """Tokens that must be candidates and those that may be: what float32 rounding of a border can turn either way is between."""
    scaled = row.astype(np.float64) / params.temperature
    order = np.argsort(-scaled, kind="stable")
    if params.top_k:
        order = order[: params.top_k]
    p = np.exp(scaled[order] - scaled[order[0]])
    p /= p.sum()
    before = np.concatenate([[0.0], np.cumsum(p)[:-1]])

    def kept(slack: float) -> set[int]:
        inside = (before < params.top_p + slack) if params.top_p < 1 else np.full(p.size, True)
        inside &= p >= params.min_p * p[0] * (1 - slack)
        inside[0] = True
        return {int(token) for token in order[inside]}

    return kept(-1e-4), kept(1e-4)


def candidates(row: np.ndarray, params: SamplingParams) -> tuple[set[int], float]:
    ids, scores, tail = Sampler(params, (), row.size)._contest(row, 0, HEAD)
    assert len(ids) == len(scores) == len(set(ids.tolist()))
    return set(ids.tolist()), tail


CUTS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.5, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 3, 40, 2000]),
    top_p=st.floats(0.02, 1.0),
    min_p=st.just(0.0) | st.floats(0.001, 0.9),
)


@given(rows(2), CUTS)
def test_candidates_of_a_small_vocabulary(row: np.ndarray, params: SamplingParams) -> None:
    check_candidates(row, params)


@given(st.integers(0, 1000), st.sampled_from([0.05, 0.5, 2.0, 6.0]), CUTS)
def test_candidates_beyond_the_head(seed: int, spread: float, params: SamplingParams) -> None:
    check_candidates((np.random.default_rng(seed).standard_normal(3000) * spread).astype(np.float32), params)


def check_candidates(row: np.ndarray, params: SamplingParams) -> None:
    must, may = naive_candidates(row, params)
    found, tail = candidates(row, params)
    if params.top_p == 1 and params.min_p == 0 and not params.top_k:
        assert (found == must) == (tail == -math.inf)
    else:
        assert tail == -math.inf
        assert must <= found <= may


def test_a_nucleus_larger_than_the_head() -> None:
    row = np.linspace(0.001, 0, 2000, dtype=np.float32)  # nearly flat
    found, _ = candidates(row, SamplingParams(temperature=1.0, top_p=0.75))
    assert len(found) > HEAD
    assert found == set(range(len(found)))
    assert abs(len(found) - 1500) <= 2


def test_top_k_of_one_is_greedy() -> None:
    row = np.random.default_rng(0).standard_normal(500).astype(np.float32)
    drawn = {sampler(500, temperature=3.0, top_k=1, seed=seed).choose(row, 4).token for seed in range(50)}
    assert drawn == {int(row.argmax())}


# Penalties and bias: against a loop


def naive_penalties(row: np.ndarray, params: SamplingParams, prompt: list[int], answer: list[int]) -> np.ndarray:
    out = [float(x) for x in row]
    for token in set(prompt) | set(answer):
        out[token] = out[token] / params.repetition_penalty if out[token] > 0 else out[token] * params.repetition_penalty
    for token, times in Counter(answer).items():
        out[token] -= params.presence_penalty + params.frequency_penalty * times
    for token, bias in params.logit_bias.items():
        if token < len(out):
            out[token] += bias
    return np.array(out, np.float32)


IDS = st.lists(st.integers(0, 11), max_size=12)


@given(rows(12, 12), parameters(), IDS.filter(bool), IDS, IDS)
def test_penalties(row: np.ndarray, params: SamplingParams, prompt: list[int], answer: list[int], path: list[int]) -> None:
    given_row = row.copy()
    under_test = Sampler(params, prompt, row.size)
    under_test.commit(answer[:3])
    under_test.commit(answer[3:])
    penalised = under_test._penalised(row, path)
    np.testing.assert_allclose(penalised, naive_penalties(row, params, prompt, answer + path), rtol=1e-5, atol=1e-5)
    assert (row == given_row).all()


@given(rows(12, 12), parameters(), IDS.filter(bool), IDS, IDS)
def test_a_path_counts_like_committed_tokens(
    row: np.ndarray, params: SamplingParams, prompt: list[int], answer: list[int], path: list[int]
) -> None:
    ahead, behind = Sampler(params, prompt, row.size), Sampler(params, prompt, row.size)
    ahead.commit(answer)
    behind.commit(answer + path)
    position = len(prompt) + len(answer) + len(path)
    assert ahead.choose(row, position, path) == behind.choose(row, position)


def test_bias_can_forbid_and_force() -> None:
    row = np.array([3.0, 2.0, 1.0], np.float32)
    assert sampler(3, logit_bias={0: -1e4}).choose(row, 0).token == 1
    assert sampler(3, logit_bias={2: 1e4}, temperature=1.0).choose(row, 0).token == 2
    assert sampler(3, logit_bias={77: 5.0}).choose(row, 0).token == 0


# Choosing


@given(rows(2), st.integers(0, 100), st.integers(0, 99))
def test_greedy_takes_the_first_maximum(row: np.ndarray, position: int, seed: int) -> None:
    assert sampler(row.size, seed=seed).choose(row, position).token == int(np.argmax(row))


@given(rows(2), st.floats(0.05, 20), st.integers(0, 100), SEED := st.integers(0, MAX_SEED))
def test_sampling_is_the_largest_perturbed_logit(row: np.ndarray, temperature: float, position: int, seed: int) -> None:
    """For a vocabulary within the head, by the definition."""
    scores = row / np.float32(temperature) + gumbel(seed, position, np.arange(row.size))
    assert sampler(row.size, temperature=temperature, seed=seed).choose(row, position).token == int(scores.argmax())


@given(rows(2), st.integers(0, 20))
def test_logprob_is_that_of_the_unmodified_distribution(row: np.ndarray, position: int) -> None:
    under_test = sampler(row.size, temperature=0.7, top_k=3, logit_bias={1: 4.0}, repetition_penalty=1.5, seed=3, prompt=(0,))
    choice = under_test.choose(row, position)
    assert choice.logprob == pytest.approx(math.log(softmax(row)[choice.token]), abs=1e-4)


@given(st.integers(0, 500), st.integers(0, 500), st.sampled_from([0.0, 0.6, 1.0]), st.integers(1, 5))
def test_impossible_tokens_are_never_chosen(seed: int, position: int, temperature: float, possible: int) -> None:
    row = np.full(400, -np.inf, np.float32)
    alive = np.random.default_rng(seed).choice(400, possible, replace=False)
    row[alive] = np.random.default_rng(seed).standard_normal(possible)
    for cut in ({}, {"top_p": 0.9}, {"min_p": 0.01}, {"top_k": 300}):
        choice = sampler(400, temperature=temperature, seed=seed, **cut).choose(row, position)
        assert choice.token in alive
        assert math.isfinite(choice.logprob)


@pytest.mark.parametrize("temperature", [1e-300, 1e-45, 1e-38, 1e-20, 1e-6])
def test_a_tiny_temperature_is_greedy(temperature: float) -> None:
    row = np.array([-3.0, 9.0, 2.0, 9.5, -np.inf], np.float32)
    for position in range(20):
        assert sampler(5, temperature=temperature).choose(row, position).token == 3
        guesses = sampler(5, temperature=temperature).guesses(row, position, 2)
        assert guesses[0].token == 3
        assert 0 <= guesses[0].p <= 1.001


# Guesses


@given(rows(2), parameters(), st.integers(0, 50), st.integers(1, 6))
def test_a_draft_with_the_target_s_logits_guesses_right(row: np.ndarray, params: SamplingParams, position: int, k: int) -> None:
    under_test = Sampler(params, (0, 1), row.size)
    guesses = under_test.guesses(row, position, k)
    assert guesses[0].token == under_test.choose(row, position).token
    assert 1 <= len(guesses) <= k
    assert len({guess.token for guess in guesses}) == len(guesses)
    probabilities = [guess.p for guess in guesses]
    assert probabilities == sorted(probabilities, reverse=True)
    assert all(0 <= p <= 1.001 for p in probabilities)
    assert sum(probabilities) <= 1.001


@pytest.mark.parametrize("top_p", [5e-324, 1e-45, 1e-30])
def test_a_tiny_top_p_leaves_the_best_token(top_p: float) -> None:
    """One that is 0 in float32, too."""
    row = np.array([1.0, 3.0, 2.0], dtype=np.float32)
    under_test = sampler(3, temperature=2.5, top_p=top_p, seed=3)
    assert [guess.token for guess in under_test.guesses(row, 7, 2)] == [1] == [under_test.choose(row, 7).token]


def test_guesses_leave_probability_to_the_rest() -> None:
    row = np.zeros(1000, np.float32)
    assert sum(guess.p for guess in sampler(1000).guesses(row, 0, 4)) == pytest.approx(0.004, rel=1e-3)


# Luck


@given(st.integers(0, 2**63 - 1), st.integers(0, 10**6), st.integers(0, 10**6))
def test_luck_knows_the_noise(seed: int, position: int, token: int) -> None:
    assert Luck(seed).uniform(position, token) == uniform(seed, position, np.array([token]))[0]


@pytest.mark.parametrize("p", [0.05, 0.3, 0.7, 0.95])
def test_the_chance_of_a_token_is_how_often_it_is_drawn_with_such_noise(p: float) -> None:
    """Two tokens share the rest. Draws are sorted by the chance that was foretold."""
    row = np.log(np.array([p, (1 - p) / 3, (1 - p) * 2 / 3], np.float32))
    under_test, luck = sampler(3, temperature=1.0, seed=11), Luck(11)
    chances = np.array([luck.chance(p, position, 0) for position in range(6000)])
    drawn = np.array([under_test.choose(row, position).token == 0 for position in range(6000)])
    assert chances.mean() == pytest.approx(p, abs=0.02)
    for part in np.array_split(np.argsort(chances), 5):
        assert drawn[part].mean() == pytest.approx(chances[part].mean(), abs=0.04)
    assert np.ptp(chances) > 0.2  # else it foretells nothing


def test_guesses_without_their_luck_are_the_probabilities() -> None:
    probabilities = np.array([0.5, 0.3, 0.15, 0.05], np.float32)
    for position in range(20):
        guesses = sampler(4, temperature=1.0, seed=3).guesses(np.log(probabilities), position, 4)
        plain = Luck(3).without({guess.token: guess.p for guess in guesses}, position)
        assert [plain[token] for token in range(4)] == pytest.approx(probabilities.tolist(), abs=1e-3)


# Distributions: 20,000 draws against the probabilities, chi-square. Seeds are fixed, so the tests are too.


def chi_square_limit(degrees: int) -> float:
    """Exceeded by chance once in ten thousand (Wilson and Hilferty)."""
    return degrees * (1 - 2 / (9 * degrees) + 3.72 * math.sqrt(2 / (9 * degrees))) ** 3


def check_distribution(drawn: list[int], p: np.ndarray) -> None:
    """Tokens too rare for the test (fewer than 8 expected) are one cell."""
    counts = np.bincount(drawn, minlength=p.size)
    assert counts[p == 0].sum() == 0
    expected = p * len(drawn)
    rare = expected < 8
    cells = list(zip(counts[~rare], expected[~rare], strict=True))
    if expected[rare].sum() >= 8:
        cells.append((counts[rare].sum(), expected[rare].sum()))
    statistic = sum((n - e) ** 2 / e for n, e in cells)
    assert statistic < chi_square_limit(len(cells) - 1)


def cut(row: np.ndarray, params: SamplingParams) -> np.ndarray:
    """The distribution that the parameters make of a row."""
    p = softmax(row / params.temperature)
    must, _ = naive_candidates(row, params)
    p[[token for token in range(p.size) if token not in must]] = 0
    return p / p.sum()


DISTRIBUTIONS = {
    "as it is": SamplingParams(temperature=1.0),
    "cool": SamplingParams(temperature=0.6, seed=1),
    "hot": SamplingParams(temperature=2.5, seed=MAX_SEED),
    "top-k": SamplingParams(temperature=1.0, top_k=5, seed=2),
    "top-p": SamplingParams(temperature=1.2, top_p=0.7, seed=3),
    "min-p": SamplingParams(temperature=1.0, min_p=0.1, seed=4),
    "all of them": SamplingParams(temperature=0.9, top_k=400, top_p=0.95, min_p=0.02, seed=5),
}


@pytest.mark.parametrize(("name", "head"), [(name, 4) for name in DISTRIBUTIONS] + [("as it is", HEAD), ("all of them", HEAD)])
def test_draws_follow_the_distribution(name: str, head: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """40 tokens. With a head of 4, most of the mass competes as one."""
    monkeypatch.setattr(sampling, "HEAD", head)
    row = np.random.default_rng(1).standard_normal(40).astype(np.float32)
    params = DISTRIBUTIONS[name]
    under_test = Sampler(params, (), row.size)
    check_distribution([under_test.choose(row, position).token for position in range(DRAWS)], cut(row, params))


@pytest.mark.parametrize("name", ["as it is", "top-p"])
def test_draws_from_a_large_vocabulary(name: str) -> None:
    """2,000 tokens, of which the head is 256: who is in the tail comes out as often as it should."""
    row = (np.random.default_rng(2).standard_normal(2000)).astype(np.float32)
    params = DISTRIBUTIONS[name]
    under_test = Sampler(params, (), row.size)
    drawn = [under_test.choose(row, position).token for position in range(DRAWS)]
    p = cut(row, params)
    check_distribution(drawn, p)
    outside = np.argsort(-row)[HEAD:]
    share = np.isin(drawn, outside).mean()
    assert share == pytest.approx(p[outside].sum(), abs=0.015)


def test_draws_over_seeds_at_one_position() -> None:
    row = np.random.default_rng(3).standard_normal(30).astype(np.float32)
    drawn = [sampler(30, temperature=1.0, seed=seed * 1_000_003).choose(row, 7).token for seed in range(DRAWS)]
    check_distribution(drawn, softmax(row))


TABLE = np.random.default_rng(4).dirichlet(np.full(16, 0.7), size=3)  # (rows, vocab)


@pytest.mark.parametrize(("temperature", "drafted"), [(1.0, False), (0.7, False), (0.7, True)])
def test_a_target_s_answers_follow_its_probabilities(drafted: bool, temperature: float) -> None:
    """Through the whole engine: the next token is distributed as the table's row for the last one says."""
    vocabulary = scripted.ScriptedVocabulary(16)
    target = scripted.ScriptedTarget(vocabulary, scripted.table_script(TABLE), context=300)
    draft = scripted.ScriptedDraft(vocabulary, scripted.table_script(np.roll(TABLE, 1, axis=0) * 0.5 + TABLE * 0.5), context=300)
    drafters = Drafters(ModelDrafter(draft), LookupDrafter()) if drafted else Drafters()
    llm = LLM.of(target, drafters, EngineConfig(mode=Mode.SERIAL if drafted else Mode.OFF, draft_length=2, max_nodes=8))
    after: dict[int, list[int]] = {0: [], 1: [], 2: []}
    accepted = 0
    for seed in range(DRAWS // 200):
        result = llm.generate([0], SamplingParams(max_tokens=200, temperature=temperature, seed=seed, ignore_eos=True))
        accepted += result.stats.accepted
        for last, token in zip([0, *result.token_ids], result.token_ids, strict=False):
            after[last % 3].append(token)
    assert sum(map(len, after.values())) == DRAWS
    assert (accepted > DRAWS // 4) == drafted
    for last, drawn in after.items():
        p = TABLE[last] ** (1 / temperature)
        check_distribution(drawn, p / p.sum())


def test_the_chi_square_test_would_notice() -> None:
    drawn = [int(token) for token in np.random.default_rng(0).choice(16, DRAWS, p=TABLE[0])]
    check_distribution(drawn, TABLE[0])
    with pytest.raises(AssertionError):
        check_distribution(drawn, TABLE[0] * 0.97 + 0.03 / 16)


@given(rows(2), st.integers(0, 30))
def test_rows_are_left_alone(row: np.ndarray, position: int) -> None:
    assume(row.size > 2)
    before = row.copy()
    under_test = sampler(row.size, temperature=0.9, repetition_penalty=1.2, logit_bias={0: 1.0}, prompt=(1,))
    under_test.choose(row, position)
    under_test.guesses(row, position, 3)
    assert (row == before).all()
