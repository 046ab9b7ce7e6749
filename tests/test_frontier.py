from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from droidkv.errors import ProfileError
from droidkv.frontier import (
    Measurement,
    cheapest_within,
    dominates,
    interval_allows,
    pareto_front,
)
from droidkv.plan import ReusePlan
from droidkv.quality import Interval


def measurement(
    cost: float, loss: float, tie_break: float = 0.0, plan: ReusePlan | None = None
) -> Measurement:
    plan = plan or ReusePlan.of(0, 0)
    return Measurement(plan, cost, loss, tie_break, Interval(loss - 1, loss + 1), 8)


# Few distinct values, so that ties of every kind occur.
small = st.integers(0, 4).map(float)
plans = st.builds(ReusePlan.of, st.just(1), st.integers(2, 9))
measurements = st.lists(st.builds(measurement, small, small, small, plans), max_size=30)


def front_by_brute_force(points: list[Measurement]) -> list[Measurement]:
    return [b for b in points if not any(dominates(a, b) for a in points)]


def key(m: Measurement) -> tuple[float, float, float, ReusePlan]:
    return (m.cost, m.loss, m.tie_break, m.plan)


@given(measurements)
def test_front_equals_brute_force(points: list[Measurement]) -> None:
    front = pareto_front(points)
    assert sorted(map(key, front)) == sorted(map(key, front_by_brute_force(points)))
    assert [m.cost for m in front] == sorted(m.cost for m in front)


@given(measurements, st.randoms())
def test_front_does_not_depend_on_the_order(points: list[Measurement], rng: random.Random) -> None:
    shuffled = rng.sample(points, len(points))
    assert pareto_front(shuffled) == pareto_front(points)
    assert pareto_front(pareto_front(points)) == pareto_front(points)


@given(measurements)
def test_what_is_off_the_front_is_dominated_by_something_on_it(points: list[Measurement]) -> None:
    front = pareto_front(points)
    for point in points:
        assert point in front or any(dominates(a, point) for a in front)


@given(st.lists(st.builds(measurement, small, small, small), min_size=3, max_size=3))
def test_dominance_is_a_strict_partial_order(points: list[Measurement]) -> None:
    for a, b, c in itertools.permutations(points):
        assert not dominates(a, a)
        assert not (dominates(a, b) and dominates(b, a))
        assert not (dominates(a, b) and dominates(b, c)) or dominates(a, c)


def test_dominance_case_by_case() -> None:
    base = measurement(5, 2, 1)
    assert dominates(measurement(4, 2, 9), base)
    assert dominates(measurement(5, 1, 9), base)
    assert dominates(measurement(5, 2, 0), base)
    assert not dominates(measurement(4, 3), base)
    assert not dominates(measurement(6, 1), base)
    # The tie-break decides between equals only; it is no third objective.
    assert not dominates(measurement(6, 2, 0), base)


@given(measurements, small)
def test_cheapest_within_is_the_cheapest_and_on_the_front(
    points: list[Measurement], max_loss: float
) -> None:
    best = cheapest_within(points, max_loss)
    good = [p for p in points if p.loss <= max_loss]
    assert (best is None) == (not good)
    if best is not None:
        assert best in pareto_front(points)
        assert best.cost == min(p.cost for p in good)


def test_interval_allows_only_if_its_upper_end_does() -> None:
    assert interval_allows(measurement(1, 4), max_loss=5)
    assert not interval_allows(measurement(1, 4.5), max_loss=5)


def test_numbers_that_cannot_be_ordered_are_refused() -> None:
    with pytest.raises(ProfileError, match=r"finite loss of the plan \[0,0\), got nan"):
        measurement(1, float("nan"))
    with pytest.raises(ProfileError, match="finite cost"):
        measurement(float("inf"), 1)
    with pytest.raises(ProfileError, match="got none"):
        Measurement(ReusePlan.of(0, 0), 1, 1, 0, Interval(0, 1), num_items=0)
