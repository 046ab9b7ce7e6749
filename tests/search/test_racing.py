from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from droidkv.errors import PlanError
from droidkv.search import ConfidentRace, NoRace, SureRace

losses = st.floats(0, 10, allow_subnormal=False)
columns = st.integers(2, 8).flatmap(
    lambda n: st.tuples(*(st.lists(losses, min_size=n, max_size=n) for _ in range(2)))
)


@given(columns)
def test_a_sure_defeat_is_a_defeat(pair: tuple[list[float], list[float]]) -> None:
    """Whatever the sure rule stops early would have lost or tied on all items."""
    mine, rival = map(np.array, pair)
    n = len(mine)
    for k in range(n):
        if SureRace().has_lost(mine[:k], rival, n):
            assert mine.sum() >= rival.sum()


@given(columns)
def test_no_rule_stops_a_plan_that_is_complete(pair: tuple[list[float], list[float]]) -> None:
    mine, rival = map(np.array, pair)
    for rule in (NoRace(), SureRace(), ConfidentRace(num_errors=0.0)):
        assert not rule.has_lost(mine, rival, len(mine))


@given(columns)
@settings(max_examples=50)
def test_a_plan_nowhere_worse_is_never_stopped_before_a_tie(
    pair: tuple[list[float], list[float]],
) -> None:
    mine, rival = np.minimum(*map(np.array, pair)) * 0.9, np.array(pair[1]) + 1e-3
    for k in range(len(mine)):
        assert not ConfidentRace(num_errors=0.0, min_items=2).has_lost(mine[:k], rival, len(mine))


def test_the_confident_rule_stops_before_the_sure_one() -> None:
    rival = np.full(10, 1.0)
    mine = np.array([1.5, 1.6, 1.4])
    assert not SureRace().has_lost(mine, rival, 10)
    assert ConfidentRace(num_errors=2.0, min_items=3).has_lost(mine, rival, 10)
    assert not ConfidentRace(num_errors=2.0, min_items=4).has_lost(mine, rival, 10)
    assert not ConfidentRace(num_errors=20.0, min_items=3).has_lost(mine, rival, 10)


def test_differences_are_paired() -> None:
    """Items differ in difficulty by far more than the plans do; pairing sees through it."""
    difficulty = np.array([0.1, 3.0, 1.0, 5.0, 0.5, 2.0])
    rule = ConfidentRace(num_errors=2.0, min_items=4)
    assert rule.has_lost(1.2 * difficulty[:4] + 0.5, difficulty, 6)
    assert not rule.has_lost(difficulty[:4], 1.2 * difficulty + 0.5, 6)


@pytest.mark.parametrize(("better", "largest_share"), [(1.0, 0.4), (0.8, 0.15), (0.5, 0.03)])
def test_few_better_plans_are_stopped_by_mistake(better: float, largest_share: float) -> None:
    """A plan is looked at after every item, so mistakes add up; they are those of near ties."""
    rng = np.random.default_rng(0)
    rule = ConfidentRace(num_errors=2.0, min_items=3)
    stopped = 0
    for _ in range(400):
        mine, rival = rng.gamma(1.0, 1.0, 16) * np.exp(0.5 * rng.standard_normal((2, 16)))
        mine *= better * (1 - 1e-9) * rival.mean() / mine.mean()
        stopped += any(rule.has_lost(mine[:k], rival, 16) for k in range(16))
    assert stopped / 400 < largest_share


def test_orders() -> None:
    full_reuse = np.array([0.3, 2.0, 0.1, 1.0])
    assert NoRace().order(full_reuse, seed=0) == [0, 1, 2, 3]
    assert SureRace().order(full_reuse, seed=0) == [1, 3, 0, 2]
    shuffled = ConfidentRace().order(np.arange(50.0), seed=0)
    assert sorted(shuffled) == list(range(50)) != shuffled
    assert shuffled == ConfidentRace().order(np.ones(50), seed=0)
    assert shuffled != ConfidentRace().order(np.ones(50), seed=1)


def test_settings_out_of_range_are_refused() -> None:
    with pytest.raises(PlanError, match="min_items >= 2"):
        ConfidentRace(min_items=1)
    with pytest.raises(PlanError, match="num_errors >= 0"):
        ConfidentRace(num_errors=-1)
