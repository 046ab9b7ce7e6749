from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_tables import made_table

from droidkv.errors import ProfileError
from droidkv.search import loss_curve, regret
from droidkv.search.regret import hypervolume, layers_within, log_losses

NUM_LAYERS = 8
points = st.lists(
    st.tuples(st.integers(0, NUM_LAYERS), st.floats(0.01, 5)), min_size=1, max_size=12
)
FULL_REUSE, FULL_PREFILL = (0, 6.0), (NUM_LAYERS, 0.0)


@given(points)
def test_the_curve_is_the_least_loss_at_no_more_layers(plans: list[tuple[int, float]]) -> None:
    curve = loss_curve(plans, NUM_LAYERS)
    for layers in range(NUM_LAYERS + 1):
        affordable = [loss for cost, loss in plans if cost <= layers]
        assert curve[layers] == min(affordable, default=math.inf)


@given(points)
def test_the_area_is_what_a_grid_of_small_squares_counts(plans: list[tuple[int, float]]) -> None:
    reference, side = 6.0, 0.05
    heights = np.arange(0, reference, side) + side / 2
    dominated = sum(
        any(cost <= layers and loss <= height for cost, loss in plans)
        for layers in range(NUM_LAYERS)
        for height in heights
    )
    area = hypervolume(loss_curve(plans, NUM_LAYERS), reference)
    assert area == pytest.approx(dominated * side, abs=side * NUM_LAYERS)


@given(points, points)
def test_more_plans_are_never_more_regret(
    some: list[tuple[int, float]], others: list[tuple[int, float]]
) -> None:
    baselines = [FULL_REUSE, FULL_PREFILL]
    exact = loss_curve([*some, *others, *baselines], NUM_LAYERS)
    found = loss_curve([*some, *baselines], NUM_LAYERS)
    less, none = (regret(curve, exact, 0.5, 1e-3) for curve in (found, exact))
    assert (none.hypervolume_ratio, none.log_hypervolume_ratio, none.layers_gap) == (1, 1, 0)
    assert 0 <= less.hypervolume_ratio <= 1 + 1e-9
    assert 0 <= less.log_hypervolume_ratio <= 1 + 1e-9
    assert 0 <= less.layers_gap <= NUM_LAYERS


def test_regret_by_hand() -> None:
    exact = loss_curve([(0, 4.0), (2, 1.0), (4, 0.0)], 4)
    found = loss_curve([(0, 4.0), (3, 1.0), (4, 0.0)], 4)
    result = regret(found, exact, threshold=1.0, floor=1e-2)
    assert result.hypervolume_ratio == pytest.approx(3 / 6)
    assert result.log_hypervolume_ratio == pytest.approx(1 / 2)
    assert result.layers_gap == 1
    assert regret(loss_curve([(0, 4.0)], 4), exact, 1.0, 1e-2).layers_gap == 4 - 2


def test_logarithms_have_a_floor() -> None:
    assert log_losses(np.array([0.0, 1.0]), 0.1).tolist() == [pytest.approx(math.log(0.1)), 0.0]
    with pytest.raises(ProfileError, match="floor above 0"):
        log_losses(np.array([1.0]), 0.0)


def test_curves_that_allow_no_regret_are_refused() -> None:
    exact = loss_curve([FULL_REUSE, FULL_PREFILL], NUM_LAYERS)
    with pytest.raises(ProfileError, match="one model"):
        regret(exact[:-1], exact, 0.5, 1e-3)
    with pytest.raises(ProfileError, match="full reuse"):
        regret(exact, loss_curve([FULL_PREFILL], NUM_LAYERS), 0.5, 1e-3)
    with pytest.raises(ProfileError, match=r"6\.0 at best"):
        regret(exact, loss_curve([FULL_REUSE], NUM_LAYERS), 0.5, 1e-3)


def test_a_table_counts_what_was_complete_when() -> None:
    table = made_table(num_layers=4, num_items=3)
    plan, other = list(table.rows)[:2]
    for item in (0, 1, 1, 0):
        table(plan, item)
    table(other, 2)
    assert table.completed(5) == []
    table(plan, 2)
    assert table.completed(6) == [plan] and table.completed(5) == []
    curve = table.curve(4)
    assert curve[0] == table.mean_loss(plan)
    assert layers_within(curve, curve[0]) == 0 and layers_within(curve, -1) is None
