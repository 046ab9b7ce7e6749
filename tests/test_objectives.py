from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from made_profiles import FAST_LOAD, item, profile, profiles, record, smooth_profile

from droidkv.costs import plan_bytes, prefill_flops
from droidkv.errors import CalibrationError, ProfileError
from droidkv.frontier import dominates, pareto_front
from droidkv.objectives import (
    COSTS,
    OBJECTIVES,
    Workload,
    default_objective,
    diff_fronts,
    measure,
    measure_noise_floor,
    plan_cost,
)
from droidkv.plan import ReusePlan, all_plans
from droidkv.profile import NoiseFloor, PlanRecord, Profile
from droidkv.ttft import predict_ttft_seconds

NONE, HALF, FULL = ReusePlan.of(0, 0), ReusePlan.of(1, 3), ReusePlan.of(0, 4)
STITCHED = ReusePlan.of(1, 3, "stitch")


def small_profile(**changes: Any) -> Profile:
    records = [
        record(NONE, [0.0, 0.0, None, 1.0], kl=2.0),
        record(HALF, [1.0, 0.5, 1.0, 1.0], kl=0.5),
        record(STITCHED, [1.0, 1.0, 1.0, 1.0], kl=0.1),
        record(FULL, [1.0, 1.0, 1.0, 1.0], kl=0.0),
    ]
    return profile(records, **changes)


def losses(p: Profile, objective: str) -> list[float]:
    return [m.loss for m in measure(p, objective)]  # type: ignore[arg-type]


def test_losses_of_each_objective() -> None:
    p = small_profile()
    assert losses(p, "score") == pytest.approx([75, 12.5, 0, 0])
    assert losses(p, "kl") == pytest.approx([2.0, 0.5, 0.1, 0])
    assert losses(p, "nll") == pytest.approx([2.0, 0.5, 0.1, 0])
    assert losses(p, "disagreement") == pytest.approx([0.75, 0.25, 0, 0])


def test_every_point_has_its_n_its_interval_and_all_losses() -> None:
    for objective in OBJECTIVES:
        for m in measure(small_profile(), objective):
            assert m.num_items == 4
            assert m.interval.low <= m.losses[objective] + 1e-12
            assert m.losses[objective] <= m.interval.high + 1e-12
            assert set(m.losses) == set(OBJECTIVES)


def test_items_over_one_prefix_are_resampled_together() -> None:
    scores = [0.0] * 4 + [1.0] * 36
    apart = profile([record(HALF, scores)])
    items = tuple(
        dataclasses.replace(each, prefix_digest=f"prefix {index // 4}")
        for index, each in enumerate(apart.items)
    )
    shared = dataclasses.replace(apart, items=items)
    assert measure(apart)[0].interval.high == pytest.approx(20)
    assert measure(shared)[0].interval.high == pytest.approx(30)


def test_undecoded_items_are_flagged_where_they_count() -> None:
    assert [m.num_undecoded for m in measure(small_profile(), "score")] == [1, 0, 0, 0]
    assert [m.num_undecoded for m in measure(small_profile(), "kl")] == [0, 0, 0, 0]


def test_ties_of_the_score_are_decided_by_kl() -> None:
    same = [1.0, 0.0]
    p = profile([record(ReusePlan.of(i, i + 1), same, kl=3 - i) for i in range(3)])
    assert [m.plan for m in pareto_front(measure(p, "score"))] == [ReusePlan.of(2, 3)]


def test_losses_below_the_noise_floor_are_zero() -> None:
    floor = NoiseFloor(kl=0.2, nll=0.6, disagreement=0.3, relative_percent=13)
    p = small_profile(noise_floor=floor)
    assert losses(p, "score") == pytest.approx([75, 0, 0, 0])
    assert losses(p, "kl") == pytest.approx([2.0, 0.5, 0, 0])
    assert losses(p, "nll") == pytest.approx([2.0, 0, 0, 0])
    assert losses(p, "disagreement") == pytest.approx([0.75, 0, 0, 0])


def test_noise_floor_is_the_exact_plans_worst_item() -> None:
    items = [item(0), item(1)]
    exact = PlanRecord(FULL, (1e-9, -2e-9), (0.25, 0.26), (1.0, 0.5), (True, False), (1.0, 0.5))
    floor = measure_noise_floor(items, exact)
    assert dataclasses.astuple(floor) == pytest.approx((1e-9, 0.01, 0.5, 25.0))
    undecoded = dataclasses.replace(exact, score=(1.0, None))
    assert measure_noise_floor(items, undecoded).relative_percent == 0.0
    clean = record(FULL, [1.0, 1.0], kl=0.0)
    assert measure_noise_floor(items, clean) == NoiseFloor(0, 0, 0, 0)


def test_operators_can_be_kept_apart_and_plans_without_e_belong_to_both() -> None:
    p = small_profile()
    assert [m.plan for m in measure(p, operators=["copy"])] == [NONE, HALF, FULL]
    assert [m.plan for m in measure(p, operators=["stitch"])] == [NONE, STITCHED, FULL]


def test_costs() -> None:
    p, w = small_profile(), Workload(1000, 20, FAST_LOAD, 1e9)
    for plan in (NONE, HALF, STITCHED, FULL):
        assert plan_cost(p, plan, "layers", w) == plan.num_recomputed
        assert plan_cost(p, plan, "bytes", w) == plan_bytes(p.shape, plan, 1000)
        assert plan_cost(p, plan, "flops", w) == prefill_flops(p.shape, plan, 1000, 20, 32)
        assert plan_cost(p, plan, "ttft", w) == predict_ttft_seconds(
            p.shape, plan, 1000, 20, FAST_LOAD, 1e9, stitch_rank=32
        )
    serial = dataclasses.replace(w, order="serial")
    assert plan_cost(p, HALF, "ttft", serial) > plan_cost(p, HALF, "ttft", w)


def test_the_default_workload_is_the_mean_item() -> None:
    p = small_profile()
    w = Workload.of_items(p, FAST_LOAD)
    assert (w.prefix_tokens, w.suffix_tokens) == (round(101.5), 10)
    assert measure(p, cost="ttft", workload=w)[0].cost > 0


def test_what_cannot_be_measured_is_refused() -> None:
    p = small_profile()
    with pytest.raises(CalibrationError, match="droidkv calibrate"):
        measure(p, cost="ttft")
    with pytest.raises(ProfileError, match=r"unknown objective 'scor'.*'score'"):
        measure(p, "scor")  # type: ignore[arg-type]
    with pytest.raises(ProfileError, match=r"unknown cost 'layer'.*'layers'"):
        measure(p, cost="layer")  # type: ignore[arg-type]


def test_a_receiver_that_scores_nothing_has_other_objectives() -> None:
    p = small_profile(items=tuple(item(index, full_score=0.0) for index in range(4)))
    assert default_objective(p) == "kl"
    assert default_objective(small_profile()) == "score"
    assert losses(p, "kl") == pytest.approx([2.0, 0.5, 0.1, 0])
    with pytest.raises(ProfileError, match="scores 0 on all"):
        measure(p, "score")


@given(profiles())
def test_any_profile_can_be_measured_in_every_way(p: Profile) -> None:
    w = Workload.of_items(p, dataclasses.replace(FAST_LOAD, shape_digest=p.shape.digest))
    for objective in OBJECTIVES:
        if objective == "score" and default_objective(p) != "score":
            continue
        for cost in COSTS:
            points = measure(p, objective, cost, w)
            assert [m.plan for m in points] == [r.plan for r in p.measurements]
            front = pareto_front(points)
            assert bool(front) == bool(points)
            assert not any(dominates(a, b) for a in points for b in front)


def test_intervals_are_those_of_the_items_and_shared_by_all_plans() -> None:
    p = smooth_profile(num_layers=6, num_items=40)
    for m in measure(p, "kl"):
        spread = np.std(p.record(m.plan).kl) / np.sqrt(40)
        assert m.interval.high - m.interval.low == pytest.approx(2 * 1.96 * spread, rel=0.15)


def test_diff_names_plans_that_entered_or_left_the_front() -> None:
    before = small_profile()
    changed = [
        record(HALF, [1.0] * 4, kl=0.05) if r.plan == HALF else r for r in before.measurements
    ]
    after = profile([*changed, record(ReusePlan.of(3, 4), [1.0, 1.0, 0.0, 0.0])])
    changes = {c.plan: c for c in diff_fronts(before, after)}
    assert set(changes) == {HALF, STITCHED, ReusePlan.of(3, 4)}
    assert (changes[HALF].was_on_front, changes[HALF].is_on_front) == (False, True)
    assert (changes[STITCHED].was_on_front, changes[STITCHED].is_on_front) == (True, False)
    new = changes[ReusePlan.of(3, 4)]
    assert new.before is None
    assert new.after is not None
    assert new.after.loss == pytest.approx(50)
    assert diff_fronts(before, before) == []
    with pytest.raises(ProfileError, match="4 and 5"):
        diff_fronts(before, profile([record(plan, [1.0]) for plan in all_plans(5)], num_layers=5))
