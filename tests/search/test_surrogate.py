from __future__ import annotations

import math

import numpy as np
import pytest
from made_tables import made_table

from droidkv.errors import PlanError
from droidkv.plan import ReusePlan, all_plans
from droidkv.search import additive_plans
from droidkv.search.surrogate import (
    Kernel,
    Prediction,
    Surrogate,
    expected_gain,
    fit_surrogate,
    normal_cdf,
    plan_features,
)

NUM_LAYERS = 12


def test_normal_cdf() -> None:
    z = np.linspace(-6, 6, 201)
    exact = [0.5 * (1 + math.erf(each / math.sqrt(2))) for each in z]
    assert np.abs(normal_cdf(z) - exact).max() < 1e-6


def test_the_expected_gain_is_the_mean_gain_of_draws() -> None:
    curve = np.array([2.0, 1.5, 1.5, 0.5, -1.0])
    prediction = Prediction(np.array([1.0, 0.0, 3.0]), np.array([0.5, 2.0, 0.1]))
    layers = np.array([1.0, 2.0, 0.0])
    rng = np.random.default_rng(0)
    draws = prediction.mean + prediction.deviation * rng.standard_normal((200_000, 3))
    gains = expected_gain(prediction, layers, curve)
    for plan in range(3):
        lowered = np.maximum(0, curve[int(layers[plan]) : -1] - draws[:, plan : plan + 1])
        assert gains[plan] == pytest.approx(lowered.sum(axis=1).mean(), abs=0.02)
    assert gains[2] < 1e-6 < gains[0]


def test_it_predicts_unseen_plans_better_than_their_mean() -> None:
    table = made_table(NUM_LAYERS, operators=("copy", "stitch"))
    plans = [plan for plan in table.rows if 0 < plan.num_recomputed < NUM_LAYERS]
    rng = np.random.default_rng(0)
    seen = rng.permutation(len(plans))[:40]
    unseen = np.setdiff1d(np.arange(len(plans)), seen)
    features = plan_features(plans, NUM_LAYERS)
    values = np.log([table.mean_loss(plan) for plan in plans])
    whole = np.ones(len(seen))
    surrogate = fit_surrogate(features[seen], values[seen], whole)
    prediction = surrogate.predict(features[seen], values[seen], whole, features[unseen])
    errors = prediction.mean - values[unseen]
    assert np.abs(errors).mean() < 0.3 * np.abs(values[unseen] - values[seen].mean()).mean()
    within = np.abs(errors) < 2 * prediction.deviation
    assert 0.6 < within.mean(), "the deviation must say how far off the mean is"


def test_fewer_items_count_for_less() -> None:
    features = plan_features([ReusePlan.of(0, 4), ReusePlan.of(0, 8)], NUM_LAYERS)
    surrogate = Surrogate(Kernel(0.3, 0.3), noise=0.1)
    few, all_ = (
        surrogate.predict(features, np.array([1.0, 0.0]), np.array([share, 1.0]), features[:1])
        for share in (0.1, 1.0)
    )
    assert few.deviation[0] > all_.deviation[0]


def test_additive_plans_are_the_best_windows() -> None:
    plans = additive_plans([0, 0, 5, 1, 5, 0, 0, 2], num_plans=7, operators=("copy", "stitch"))
    assert ReusePlan.of(2, 5) in plans and ReusePlan.of(2, 5, "stitch") in plans
    assert ReusePlan.of(2, 4) in plans or ReusePlan.of(3, 5) in plans
    assert set(plans) <= set(all_plans(8, operators=("copy", "stitch")))
    assert {plan.num_recomputed for plan in plans} == set(range(1, 8))
    assert additive_plans([1.0, 2.0], num_plans=0) == []
    with pytest.raises(PlanError, match="at least 2 layers"):
        additive_plans([1.0], num_plans=1)
