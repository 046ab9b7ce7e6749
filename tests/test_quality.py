from __future__ import annotations

from math import comb

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from droidkv.errors import ProfileError
from droidkv.quality import (
    Interval,
    above_floor,
    agreement_rate,
    bootstrap_interval,
    resample_weights,
    score_loss,
    share_bound,
)

scores = st.lists(st.floats(0, 1), min_size=1, max_size=20)


def test_resample_weights_are_draws_with_replacement() -> None:
    weights = resample_weights(5, num_resamples=4000, seed=1)
    assert weights.shape == (4000, 5)
    counts = weights * 5
    assert np.array_equal(counts, counts.round())
    assert np.allclose(weights.sum(axis=1), 1)
    assert np.allclose(weights.mean(axis=0), 0.2, atol=0.01)
    # Binomial(5, 1/5): the variance of a count is 5 * 0.2 * 0.8.
    assert counts.var() == pytest.approx(0.8, rel=0.05)


def test_interval_of_a_mean_is_seeded_and_close_to_the_normal_one() -> None:
    values = np.random.default_rng(0).normal(3.0, 2.0, size=400).tolist()
    interval = bootstrap_interval(values, seed=7)
    assert interval == bootstrap_interval(values, seed=7)
    assert interval != bootstrap_interval(values, seed=8)
    half = 1.96 * np.std(values) / 20
    assert interval.low == pytest.approx(np.mean(values) - half, abs=0.03)
    assert interval.high == pytest.approx(np.mean(values) + half, abs=0.03)


def test_interval_covers_the_true_mean_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(3)
    hits = 0
    for _ in range(300):
        interval = bootstrap_interval(rng.normal(size=30).tolist(), num_resamples=400)
        hits += interval.low <= 0 <= interval.high
    assert 0.88 < hits / 300 < 0.99


@given(scores)
def test_interval_lies_within_the_values(values: list[float]) -> None:
    interval = bootstrap_interval(values, num_resamples=50)
    assert min(values) - 1e-12 <= interval.low <= interval.high <= max(values) + 1e-12


def test_higher_confidence_means_a_wider_interval() -> None:
    values = [0.0, 0.2, 0.5, 0.9, 1.0]
    narrow, wide = (bootstrap_interval(values, confidence=c) for c in (0.5, 0.99))
    assert wide.low < narrow.low < narrow.high < wide.high


def test_loss_in_points_and_percent() -> None:
    loss = score_loss([1.0, 1.0, 0.5, 0.5], [1.0, 0.5, 0.5, 0.4])
    assert loss.absolute_points == pytest.approx(15.0)
    assert loss.relative_percent == pytest.approx(20.0)
    assert (loss.num_items, loss.num_undecoded) == (4, 0)
    assert loss.relative_interval.low <= 20 <= loss.relative_interval.high
    assert loss.absolute_interval.low <= 15 <= loss.absolute_interval.high


def test_resampling_keeps_the_pairs_together() -> None:
    # Items differ much, the plan never does: an unpaired interval would be wide, this one is 0.
    full = [0.0, 0.2, 0.9, 1.0]
    loss = score_loss(full, full)
    assert loss.absolute_interval == loss.relative_interval == Interval(0.0, 0.0)
    halved = score_loss(full, [score / 2 for score in full])
    assert halved.relative_percent == pytest.approx(50)
    assert halved.relative_interval.high == pytest.approx(50)


def test_an_undecoded_answer_counts_as_zero_and_is_flagged() -> None:
    loss = score_loss([1.0, 1.0], [1.0, None])
    assert loss.relative_percent == pytest.approx(50)
    assert loss.num_undecoded == 1


def test_a_better_plan_has_a_negative_loss() -> None:
    assert score_loss([0.5, 0.5], [1.0, 0.5]).relative_percent == pytest.approx(-50)


@given(scores, st.data())
def test_loss_is_bounded_by_the_full_score(full: list[float], data: st.DataObject) -> None:
    full = [*full, 1.0]
    plan = data.draw(st.lists(st.floats(0, 1), min_size=len(full), max_size=len(full)))
    loss = score_loss(full, plan)
    assert loss.relative_percent <= 100 + 1e-9
    assert loss.absolute_points == pytest.approx(100 * (np.mean(full) - np.mean(plan)), abs=1e-9)
    assert loss.relative_interval.low <= loss.relative_interval.high <= 100 + 1e-9


def test_losses_that_do_not_exist_are_refused() -> None:
    with pytest.raises(ProfileError, match="3 for 2 items"):
        score_loss([1.0, 1.0], [1.0, 1.0, 1.0])
    with pytest.raises(ProfileError, match=r"scores 0 on all.*'kl'"):
        score_loss([0.0, 0.0], [0.0, 1.0])
    with pytest.raises(ProfileError, match="at least 1 item"):
        score_loss([], [])
    with pytest.raises(ProfileError, match="at least 1 item"):
        agreement_rate([])


@pytest.mark.parametrize(
    ("agreeing", "n", "low", "high"),
    # Wilson's intervals from Newcombe (1998), table I, and the closed forms at 0 and 1.
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (8, 8, 0.6756, 1)],
)
def test_agreement_rate_has_wilsons_interval(
    agreeing: int, n: int, low: float, high: float
) -> None:
    rate = agreement_rate([True] * agreeing + [False] * (n - agreeing))
    assert rate.share == agreeing / n
    assert rate.num_items == n
    assert rate.interval.low == pytest.approx(low, abs=5e-5)
    assert rate.interval.high == pytest.approx(high, abs=5e-5)


def test_a_loss_below_the_floor_is_zero() -> None:
    assert above_floor(1e-9, floor=1e-6) == 0.0
    assert above_floor(-0.3, floor=0.0) == 0.0
    assert above_floor(0.25, floor=1e-6) == 0.25
    assert above_floor(1e-6, floor=1e-6) == 1e-6


def test_a_group_is_drawn_as_a_whole() -> None:
    weights = resample_weights(["a", "b", "b"], num_resamples=4000, seed=1)
    assert weights.sum(axis=1) == pytest.approx(1)
    assert (weights[:, 1] == weights[:, 2]).all()
    assert set(weights[:, 0].tolist()) == {0, 1 / 3, 1}
    apart = resample_weights(["a", "b", "c"], num_resamples=4000, seed=1)
    assert (apart == resample_weights(3, num_resamples=4000, seed=1)).all()


def test_a_share_at_the_bound_shows_so_few_losses_one_time_in_twenty() -> None:
    for n in (1, 8, 59, 300):
        assert (1 - share_bound(0, n)) ** n == pytest.approx(0.05)
    assert share_bound(0, 300) == pytest.approx(3 / 300, rel=0.01)
    for lost, n in ((1, 40), (5, 60), (30, 200), (199, 200)):
        share = share_bound(lost, n)
        so_few = sum(comb(n, k) * share**k * (1 - share) ** (n - k) for k in range(lost + 1))
        assert so_few == pytest.approx(0.05)
    assert share_bound(3, 3) == 1
    assert share_bound(500, 5000) == pytest.approx(0.1073, abs=1e-4)
