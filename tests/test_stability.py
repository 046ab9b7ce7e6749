from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from droidkv.errors import ProfileError
from droidkv.stability import overlap, ranks, spearman, stability

curves = st.lists(st.integers(0, 6), min_size=2, max_size=8)


@given(curves)
def test_ranks_count_what_is_smaller_and_half_of_what_is_equal(curve: list[int]) -> None:
    values = np.array(curve)
    for value, rank in zip(values, ranks(values), strict=True):
        assert rank == (values < value).sum() + ((values == value).sum() - 1) / 2


@given(curves)
def test_a_curve_agrees_with_any_rising_function_of_itself(curve: list[int]) -> None:
    expected = 1.0 if len(set(curve)) > 1 else 0.0
    assert spearman(curve, [3.0**value for value in curve]) == pytest.approx(expected)
    assert spearman(curve, [-value for value in curve]) == pytest.approx(-expected)


def test_spearman_by_hand() -> None:
    assert spearman([1, 2, 3, 4], [1, 2, 4, 3]) == pytest.approx(1 - 6 * 2 / (4 * 15))
    with pytest.raises(ProfileError, match="same 2 or more layers, got 3 and 2"):
        spearman([1, 2, 3], [1, 2])
    with pytest.raises(ProfileError, match="got 1 and 1"):
        spearman([1], [2])


def test_items_that_agree_are_stable_and_noise_is_not() -> None:
    rng = np.random.default_rng(0)
    curve = np.arange(12.0)
    steady = stability(np.outer(curve, 1 + rng.random(8)))
    assert steady.pairwise_spearman == pytest.approx(1)
    assert steady.split_half_spearman == pytest.approx(1)
    noise = rng.standard_normal((12, 8))
    loose = stability(noise)
    assert abs(loose.pairwise_spearman) < 0.3
    assert loose.deviation == pytest.approx(noise.std(axis=1, ddof=1))
    assert (loose.num_items, len(loose.deviation)) == (8, 12)


def test_averaging_over_items_stabilises() -> None:
    rng = np.random.default_rng(1)
    result = stability(np.arange(12.0)[:, None] + 4 * rng.standard_normal((12, 16)))
    assert result.split_half_spearman > result.pairwise_spearman + 0.1
    again = stability(np.arange(12.0)[:, None] + 4 * np.ones((12, 16)))
    assert again.deviation == (0,) * 12


def test_one_item_has_no_stability() -> None:
    with pytest.raises(ProfileError, match="2 items"):
        stability(np.ones((4, 1)))


def test_overlap() -> None:
    assert overlap([1, 2, 3], [2, 3, 4]) == 0.5
    assert overlap([], []) == 1.0
    assert overlap([1], []) == 0.0
