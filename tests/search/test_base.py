from __future__ import annotations

import math
import subprocess
import sys

import pytest

from droidkv.errors import PlanError
from droidkv.plan import ReusePlan, all_plans
from droidkv.search import LOSSES, ItemDrift, SearchSpace, layer_passes, one_evaluation
from droidkv.search.base import item_loss


@pytest.mark.parametrize("granularity", [1, 2, 3, 4])
@pytest.mark.parametrize("operators", [("copy",), ("copy", "stitch")])
def test_every_plan_has_parameters_within_the_ranges(
    granularity: int, operators: tuple[str, ...]
) -> None:
    space = SearchSpace(10, operators, granularity)  # type: ignore[arg-type]
    assert list(space.plans) == all_plans(10, granularity, operators)  # type: ignore[arg-type]
    for index, plan in enumerate(space.plans):
        params = space.params_of(plan)
        for name, (low, high) in space.ranges.items():
            assert low <= params[name] <= high and (params[name] - low) % granularity == 0
        assert space.plan_of(params) == plan
        assert space.index(plan) == index


@pytest.mark.parametrize("granularity", [1, 3])
def test_every_combination_of_parameters_is_a_plan_of_the_space(granularity: int) -> None:
    space = SearchSpace(8, granularity=granularity)
    (low_start, high_start), (low_length, high_length) = space.ranges.values()
    reached = {
        space.plan_of({"start": start, "length": length})
        for start in range(low_start, high_start + 1, granularity)
        for length in range(low_length, high_length + 1, granularity)
    }
    assert reached == set(space.plans)


def test_what_is_not_in_the_space_is_refused() -> None:
    with pytest.raises(PlanError, match="steps of 2"):
        SearchSpace(10, granularity=2).params_of(ReusePlan.of(1, 4))
    with pytest.raises(PlanError, match="by copy"):
        SearchSpace(10).params_of(ReusePlan.of(1, 4, "stitch"))
    with pytest.raises(PlanError, match="granularity"):
        SearchSpace(10, granularity=11)
    with pytest.raises(PlanError, match="operator"):
        SearchSpace(10, operators=())


def test_losses_are_never_negative_and_smaller_is_better() -> None:
    good = ItemDrift(kl=-1e-9, nll=0.1, top1=1.0, agrees=True)
    bad = ItemDrift(kl=0.5, nll=0.1, top1=0.25, agrees=False)
    assert [item_loss(good, loss) for loss in LOSSES] == [0.0, 0.0, 0.0]
    assert [item_loss(bad, loss) for loss in LOSSES] == [0.5, 1.0, 0.75]
    assert math.isnan(item_loss(ItemDrift(math.nan, 0.1, 0.25, False), "kl"))
    with pytest.raises(PlanError, match="Did you mean 'kl'"):
        item_loss(good, "kll")  # type: ignore[arg-type]


def test_costs_of_evaluating() -> None:
    assert one_evaluation(ReusePlan.of(0, 4)) == 1
    cost = layer_passes(num_layers=10, prefix_tokens=1000, forced_tokens=50)
    assert cost(ReusePlan.of(2, 6)) == pytest.approx(4 + 0.5)


def test_import_needs_neither_optuna_nor_torch() -> None:
    code = (
        "import sys, droidkv.search as s; "
        "assert not {'optuna', 'torch'} & sys.modules.keys(); "
        "s.SearchSpace(4); s.BudgetedSearch; assert 'optuna' in sys.modules; "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
