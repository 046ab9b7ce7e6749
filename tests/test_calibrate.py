from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from tiny import NUM_LAYERS, tiny_model

from droidkv.calibrate import measure_calibration
from droidkv.calibration_file import (
    MeasuredCalibration,
    calibration_path,
    find_calibration,
    read_calibration,
    write_calibration,
)
from droidkv.calibration_fit import fit_calibration
from droidkv.calibration_steps import Steps, load_for_plan
from droidkv.capture import capture
from droidkv.errors import CalibrationError
from droidkv.jsonio import read_json, write_json
from droidkv.plan import ReusePlan, all_plans
from droidkv.prefill import partial_prefill
from droidkv.ttft import COEFFICIENTS, Calibration, predict_ttft_seconds


@pytest.fixture(scope="module")
def measured() -> MeasuredCalibration:
    return measure_calibration(tiny_model(), max_prefix_tokens=64, num_rounds=3)


def test_the_error_is_that_of_requests_the_fit_never_saw(measured: MeasuredCalibration) -> None:
    steps = Steps(tiny_model(), 64, Path("/nowhere"), 0)
    for held_out in measured.held_out:
        assert held_out.prefix_tokens not in steps.lengths
        assert held_out.measured_seconds > 0
        plan = ReusePlan.parse(held_out.plan, NUM_LAYERS)
        n, m = held_out.prefix_tokens, held_out.suffix_tokens
        again = predict_ttft_seconds(
            measured.shape, plan, n, m, measured.calibration, order="serial"
        )
        assert held_out.predicted_seconds == pytest.approx(again)
    errors = sorted(
        100 * abs(each.predicted_seconds - each.measured_seconds) / each.measured_seconds
        for each in measured.held_out
    )
    assert measured.max_error_percent == pytest.approx(errors[-1])
    middle = (errors[(len(errors) - 1) // 2] + errors[len(errors) // 2]) / 2
    assert measured.median_error_percent == pytest.approx(middle)
    assert len({each.plan for each in measured.held_out}) >= 3


def test_the_timed_steps_tell_every_coefficient_apart(tmp_path: Path) -> None:
    """Times made up from known coefficients must give them back, whatever their sizes."""
    model = tiny_model()
    known = Calibration(
        "m", "cpu", "float32", model.shape.digest, 1e-4, 2e-8, 2e-5, 3e-4, 4e-8, 3e-4, 2e-9, 1e-3,
        4e-3, 2e-3,
    )  # fmt: skip
    steps = Steps(model, 1024, tmp_path, 0).all()
    samples = [
        dataclasses.replace(step.sample, seconds=sum(getattr(known, k) * v for k, v in amounts))
        for step in steps
        if step.held_out is None
        for amounts in [step.sample.amounts.items()]
    ]
    fitted = fit_calibration(samples, model.shape, "m", "cpu", "float32")
    for name in COEFFICIENTS:
        assert getattr(fitted, name) == pytest.approx(getattr(known, name), rel=1e-4), name


def test_a_load_brings_what_the_plan_reads_and_no_more(tmp_path: Path) -> None:
    sender, receiver = tiny_model(), tiny_model(noise=0.04)
    prefix = torch.randint(3, 97, (1, 19))
    captured = capture(sender, prefix, hidden_layers=range(NUM_LAYERS))
    captured.save(tmp_path / "cache.safetensors")
    for plan in all_plans(NUM_LAYERS):
        loaded = load_for_plan(
            tmp_path / "cache.safetensors", plan, NUM_LAYERS, torch.device("cpu")
        )
        assert set(loaded.hidden) == {plan.transition} - {None}
        assert [keys.numel() == 0 for keys in loaded.keys] == [
            layer in plan.group for layer in range(NUM_LAYERS)
        ]
        mixed = partial_prefill(receiver, prefix, loaded, plan)
        expected = partial_prefill(receiver, prefix, captured, plan)
        for layer in range(NUM_LAYERS):
            assert torch.equal(mixed.cache.layer(layer)[1], expected.cache.layer(layer)[1])


def test_progress_ends_when_the_work_does() -> None:
    calls: list[tuple[str, int, int]] = []
    measure_calibration(
        tiny_model(),
        max_prefix_tokens=64,
        num_rounds=2,
        on_progress=lambda stage, done, total: calls.append((stage, done, total)),
    )
    for stage in ("warm-up", "calibrate"):
        of_stage = [(done, total) for name, done, total in calls if name == stage]
        total = of_stage[0][1]
        assert of_stage == [(done + 1, total) for done in range(total)]


def test_it_is_kept_in_the_cache_folder_and_found_by_shape(
    measured: MeasuredCalibration, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DROIDKV_CACHE", str(tmp_path))
    assert find_calibration(measured.shape) is None
    path = write_calibration(measured)
    assert path == calibration_path(measured.shape.digest, "cpu", "float32")
    assert find_calibration(measured.shape) == measured
    assert find_calibration(dataclasses.replace(measured.shape, num_layers=7)) is None
    assert find_calibration(measured.shape, dtype="bfloat16") is None


def test_a_damaged_file_is_refused_by_name(measured: MeasuredCalibration, tmp_path: Path) -> None:
    path = write_calibration(measured, tmp_path / "c.json")
    assert read_calibration(path) == measured
    table = read_json(path, CalibrationError)
    for change, message in (
        ({"schema_version": 2}, "schema_version"),
        ({"max_error_percent": -1.0}, "max_error_percent"),
        ({"surplus": 1}, "surplus"),
        ({"shape": {**table["shape"], "num_layers": 7}}, "model shape"),
        ({"held_out": [{"plan": "[0,0)"}]}, "prefix_tokens"),
    ):
        write_json(path, {**table, **change})
        with pytest.raises(CalibrationError, match=message):
            read_calibration(path)
    with pytest.raises(CalibrationError, match="there is none"):
        read_calibration(tmp_path / "none.json")


def test_numbers_out_of_range_are_refused() -> None:
    with pytest.raises(CalibrationError, match="at least 1 round"):
        measure_calibration(tiny_model(), num_rounds=0)
    with pytest.raises(CalibrationError, match="at least 64"):
        measure_calibration(tiny_model(), max_prefix_tokens=63)
