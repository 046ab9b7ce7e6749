from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from made_profiles import item, profile, record

from droidkv.objectives import OBJECTIVES, item_losses, measure
from droidkv.optimism import LEAST_ITEMS, loss_of_such_picks
from droidkv.plan import ReusePlan, all_plans
from droidkv.policy import pick
from droidkv.profile import Profile


def lucky_profile(num_items: int, share_wrong: float = 0.2) -> Profile:
    """Every plan but the full one answers a fifth of the items wrongly, each its own fifth."""
    random = np.random.default_rng(0)
    records = []
    for plan in all_plans(12):
        exact = plan.num_recomputed == 12
        wrong = random.random(num_items) < (0.0 if exact else share_wrong)
        records.append(record(plan, [0.0 if each else 1.0 for each in wrong], 0.0 if exact else 1))
    return profile(records, 12)


def test_picks_by_luck_are_told_to_lose_what_all_plans_lose() -> None:
    made = lucky_profile(12)
    assert pick(made).loss == 0
    told = loss_of_such_picks(made, "score", 5.0)
    assert told is not None and 10 < told < 30


def test_a_plan_that_is_truly_good_is_told_to_be() -> None:
    records = [record(ReusePlan.of(0, 0), [0.0] * 8), record(ReusePlan.of(1, 3), [1.0] * 8)]
    assert loss_of_such_picks(profile(records), "score", 5.0) == 0
    assert loss_of_such_picks(profile(records), "score", 5.0, ["stitch"]) is None


def test_few_items_tell_nothing() -> None:
    assert loss_of_such_picks(lucky_profile(LEAST_ITEMS - 1), "score", 5.0) is None


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_losses_by_item_add_up_to_the_measured_loss(objective: str) -> None:
    scores = [1.0, 0.0, 1.0, None]
    full = [1.0, 1.0, 1.0, 0.5]
    made = profile([record(ReusePlan.of(1, 3), scores), record(ReusePlan.of(0, 4), full, 0.0)])
    items = tuple(item(index, full_score=score) for index, score in enumerate(full))
    made = dataclasses.replace(made, items=items)
    lost, whole = item_losses(made, objective)  # type: ignore[arg-type]
    assert lost.shape == (2, 4) and whole.shape == (4,)
    means = [point.loss for point in measure(made, objective)]  # type: ignore[arg-type]
    assert (lost.sum(axis=1) / whole.sum()).tolist() == pytest.approx(means)
