from __future__ import annotations

import dataclasses
import itertools
import json
from typing import Any

import pytest
from made_profiles import FAST_LOAD, SHAPE

from droidkv.costs import e_bytes, kv_bytes, plan_bytes
from droidkv.errors import CalibrationError
from droidkv.plan import ReusePlan, all_plans
from droidkv.ttft import Calibration, break_even_prefix_tokens, predict_ttft_seconds

FULL, EMPTY = ReusePlan.of(0, 4), ReusePlan.of(0, 0)


def ttft(plan: ReusePlan, n: int = 1000, m: int = 10, **options: Any) -> float:
    calibration = options.pop("calibration", FAST_LOAD)
    return predict_ttft_seconds(SHAPE, plan, n, m, calibration, **options)


def suffix_seconds(n: int = 1000, m: int = 10) -> float:
    return 4 * (1e-4 + 2e-5 * m + 1e-8 * (n * m + m * (m + 1) / 2))


def test_full_prefill_loads_nothing_and_skips_the_last_layers_attention_and_mlp() -> None:
    prefix = 3 * (1e-4 + 1e-5 * 1000 + 1e-9 * 1000**2) + (1e-4 + 1e-6 * 1000)
    assert ttft(FULL) == pytest.approx(prefix + suffix_seconds() + 8e-4)
    assert ttft(FULL, order="serial") == ttft(FULL) == ttft(FULL, bandwidth_bytes_per_second=1.0)


def test_serial_adds_the_whole_load_to_the_compute() -> None:
    plan = ReusePlan.of(1, 3)
    group = (1e-4 + 1e-5 * 1000 + 1e-9 * 1000**2) + (1e-4 + 1e-6 * 1000)
    load = 1e-3 + plan_bytes(SHAPE, plan, 1000) / 1e9
    seconds = ttft(plan, order="serial", bandwidth_bytes_per_second=1e9)
    assert seconds == pytest.approx(load + group + suffix_seconds() + 8e-4)


@pytest.mark.parametrize("bandwidth", [1e5, 1e7, 1e9, None])
@pytest.mark.parametrize("plan", all_plans(4), ids=str)
def test_overlap_lies_between_the_longer_part_and_the_serial_sum(
    plan: ReusePlan, bandwidth: float | None
) -> None:
    overlap = ttft(plan, bandwidth_bytes_per_second=bandwidth)
    serial = ttft(plan, order="serial", bandwidth_bytes_per_second=bandwidth)
    per_byte = 1e-12 if bandwidth is None else 1 / bandwidth
    load = plan_bytes(SHAPE, plan, 1000) * per_byte
    compute = serial - load - (1e-3 if load else 0)
    assert max(load, compute) <= overlap + 1e-12
    assert overlap <= serial + 1e-12
    # Nothing but the first E and the layer that cannot start before the last byte is exposed.
    first_e = 1e-3 + e_bytes(SHAPE, 1000) * per_byte
    exposed = max(kv_bytes(SHAPE, 1000, 1) * per_byte, suffix_seconds())
    assert overlap <= max(load, compute) + first_e + exposed + 8e-4


def test_overlap_waits_per_layer_and_not_for_the_whole_load() -> None:
    # Link so slow that the load rules: only the layer after the last byte is left to compute.
    bandwidth = 1e5
    load = 1e-3 + plan_bytes(SHAPE, EMPTY, 1000) / bandwidth
    expected = load + suffix_seconds() / 4 + 8e-4
    assert ttft(EMPTY, bandwidth_bytes_per_second=bandwidth) == pytest.approx(expected)


def test_bandwidth_never_makes_the_load_faster_than_calibrated() -> None:
    slow = dataclasses.replace(FAST_LOAD, load_seconds_per_byte=1e-6)
    unlimited = ttft(EMPTY, calibration=slow, bandwidth_bytes_per_second=1e15)
    assert unlimited == ttft(EMPTY, calibration=slow)


def test_a_stitched_plan_costs_slightly_more_than_a_copied_one() -> None:
    copy, stitch = ReusePlan.of(1, 3), ReusePlan.of(1, 3, "stitch")
    assert ttft(copy, stitch_rank=8) == ttft(copy)
    assert ttft(copy) < ttft(stitch, stitch_rank=8) < 1.1 * ttft(copy)


def pays(plan: ReusePlan, n: int, calibration: Calibration, bandwidth: float) -> bool:
    options: dict[str, Any] = {
        "calibration": calibration,
        "bandwidth_bytes_per_second": bandwidth,
    }
    return ttft(plan, n, **options) < ttft(FULL, n, **options)


@pytest.mark.parametrize(
    ("latency", "bandwidth"), list(itertools.product([0.0, 1e-2, 0.1], [2e7, 5e7, 1e8, 1e12]))
)
@pytest.mark.parametrize("plan", [EMPTY, ReusePlan.of(1, 2), ReusePlan.of(0, 3)], ids=str)
def test_break_even_equals_trying_every_length(
    plan: ReusePlan, latency: float, bandwidth: float
) -> None:
    calibration = dataclasses.replace(FAST_LOAD, load_fixed_seconds=latency)
    limit = 1500
    found = break_even_prefix_tokens(
        SHAPE, plan, 10, calibration, bandwidth, max_prefix_tokens=limit
    )
    losing = [n for n in range(1, limit + 1) if not pays(plan, n, calibration, bandwidth)]
    last_loss = max(losing, default=0)
    assert found == (None if last_loss == limit else last_loss + 1)


def test_break_even_is_past_the_dip_where_the_link_outweighs_the_saved_layer_calls() -> None:
    # Saved layer calls pay at once, then the slow link costs more, then attention outgrows it.
    calibration = dataclasses.replace(
        FAST_LOAD, load_fixed_seconds=0, seconds_per_layer_call=1e-2, load_seconds_per_byte=1e-7
    )
    paying = [pays(EMPTY, n, calibration, 1e12) for n in (10, 10_000, 300_000)]
    assert paying == [True, False, True]
    found = break_even_prefix_tokens(SHAPE, EMPTY, 10, calibration)
    assert found is not None
    assert 10_000 < found < 300_000
    assert not pays(EMPTY, found - 1, calibration, 1e12)
    assert pays(EMPTY, found, calibration, 1e12)


def test_full_prefill_never_pays_against_itself() -> None:
    assert break_even_prefix_tokens(SHAPE, FULL, 10, FAST_LOAD) is None


def test_calibration_survives_json() -> None:
    assert Calibration.from_json(json.loads(json.dumps(FAST_LOAD.to_json()))) == FAST_LOAD


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema_version": 99}, r"schema_version 1, got 99; update droidkv"),
        ({"fixed_seconds": -1}, r"fixed_seconds to be a finite number .* got -1"),
        ({"fixed_seconds": float("inf")}, r"fixed_seconds to be a finite number.* got inf"),
        ({"machine": 3}, r"calibration: expected machine to be a text, got 3"),
        ({"colour": "red"}, r"calibration: unknown key 'colour'"),
    ],
)
def test_a_wrong_calibration_names_the_field(change: dict[str, object], message: str) -> None:
    with pytest.raises(CalibrationError, match=message):
        Calibration.from_json(FAST_LOAD.to_json() | change)


def test_prediction_refuses_another_shape_a_dead_link_and_an_unknown_order() -> None:
    other = dataclasses.replace(SHAPE, hidden_size=128)
    with pytest.raises(CalibrationError, match=SHAPE.digest):
        predict_ttft_seconds(other, FULL, 10, 1, FAST_LOAD)
    with pytest.raises(CalibrationError, match="bandwidth"):
        ttft(EMPTY, bandwidth_bytes_per_second=0.0)
    with pytest.raises(CalibrationError, match="order"):
        ttft(EMPTY, order="fastest")
    with pytest.raises(CalibrationError, match="finite"):
        dataclasses.replace(FAST_LOAD, fixed_seconds=float("nan"))
