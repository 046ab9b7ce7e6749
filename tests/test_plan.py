from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from droidkv.errors import PlanError
from droidkv.plan import OPERATORS, LayerGroup, ReusePlan, all_plans

NUM_LAYERS = 40
groups = st.tuples(st.integers(0, NUM_LAYERS), st.integers(0, NUM_LAYERS)).map(sorted)
plans = st.builds(lambda g, o: ReusePlan.of(g[0], g[1], o), groups, st.sampled_from(OPERATORS))


@given(plans)
def test_text_round_trip(plan: ReusePlan) -> None:
    assert ReusePlan.parse(str(plan), NUM_LAYERS) == plan


@given(plans, plans)
def test_plans_that_do_the_same_are_equal_and_the_others_are_not(
    a: ReusePlan, b: ReusePlan
) -> None:
    same_layers = set(a.group.layers) == set(b.group.layers)
    same_map = (a.transition is None or a.operator) == (b.transition is None or b.operator)
    assert (a == b) == (same_layers and same_map)
    assert (str(a) == str(b)) == (a == b) == (len({a, b}) == 1)


@given(plans)
def test_the_transition_is_where_the_sender_s_hidden_state_is_read(plan: ReusePlan) -> None:
    if plan.num_recomputed == 0 or plan.group.start == 0:
        assert plan.transition is None
        assert plan.operator == "copy"
    else:
        assert plan.transition == plan.group.start
        assert plan.transition in plan.group


@given(st.integers(1, 12), st.integers(1, 5))
def test_all_plans_are_every_group_of_the_grid_once(num_layers: int, granularity: int) -> None:
    found = all_plans(num_layers, granularity, OPERATORS)
    borders = {*range(0, num_layers, granularity), num_layers}
    expected = {
        ReusePlan.of(start, stop, operator)
        for start in borders
        for stop in borders
        for operator in OPERATORS
        if start <= stop
    }
    assert len(found) == len(set(found))
    assert set(found) == expected
    assert found[0] == ReusePlan.of(0, 0)
    assert ReusePlan.of(0, num_layers) in found


def test_number_of_plans() -> None:
    assert len(all_plans(30)) == 30 * 31 // 2 + 1
    assert len(all_plans(30, operators=OPERATORS)) == 30 * 31 // 2 + 1 + 29 * 30 // 2


@pytest.mark.parametrize(
    ("text", "plan"),
    [
        ("12:24", ReusePlan.of(12, 24)),
        (" [12, 24) + stitch ", ReusePlan.of(12, 24, "stitch")),
        ("NONE", ReusePlan.of(0, 0)),
        ("all", ReusePlan.of(0, 30)),
        ("[7,7)+stitch", ReusePlan.of(0, 0)),
    ],
)
def test_parse(text: str, plan: ReusePlan) -> None:
    assert ReusePlan.parse(text, 30) == plan


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("12-24", "expected a plan like"),
        ("", "expected a plan like"),
        ("[12,24", "expected a plan like"),
        ("12,24)", "expected a plan like"),
        ("[1,2)+glue", "expected an operator of .* got 'glue'"),
        ("[24,12)", "0 <= start <= stop"),
        ("[12,31)", r"within \[0,30\), got \[12,31\); the model has 30"),
        ("[1," + "9" * 5000 + ")", "expected a plan like"),
        ("[-1,2)", "expected a plan like"),
    ],
)
def test_parse_refuses(text: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        ReusePlan.parse(text, 30)


def test_constructors_refuse() -> None:
    with pytest.raises(PlanError, match="start=-1"):
        LayerGroup(-1, 2)
    with pytest.raises(PlanError, match="operator"):
        ReusePlan(LayerGroup(1, 2), "glue")  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="granularity"):
        all_plans(4, 0)
    with pytest.raises(PlanError, match="num_layers"):
        all_plans(0)


def test_order_is_by_start_then_stop_then_operator() -> None:
    ordered = [ReusePlan.of(1, 2), ReusePlan.of(1, 2, "stitch"), ReusePlan.of(1, 3)]
    assert sorted(reversed(ordered)) == ordered
