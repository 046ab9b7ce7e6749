from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_profiles import FAST_LOAD, SHAPE

from droidkv.calibration_fit import (
    Sample,
    _nonnegative_least_squares,
    fit_calibration,
    prediction_error,
)
from droidkv.errors import CalibrationError
from droidkv.plan import ReusePlan, all_plans
from droidkv.ttft import COEFFICIENTS, Calibration, predict_ttft_seconds


def steps() -> Iterator[Sample]:
    """Every step at several lengths, as a calibration run times them."""
    for n in (128, 256, 512, 1024):
        yield Sample(1, prefix_tokens=n, num_full_layers=4)
        yield Sample(1, prefix_tokens=n, num_kv_only_layers=1)
        for m in (8, 64):
            yield Sample(1, prefix_tokens=n, suffix_tokens=m, num_suffix_layers=4)
        for plan in (ReusePlan.of(0, 4), ReusePlan.of(1, 3), ReusePlan.of(0, 0)):
            yield Sample.of_request(SHAPE, plan, n, 16, 1)
    for num_bytes in (10_000, 1_000_000):
        yield Sample(1, num_load_bytes=num_bytes)
    yield Sample(1, num_logits=1)


def timed(calibration: Calibration, noise: float = 0.0, seed: int = 0) -> list[Sample]:
    rng = np.random.default_rng(seed)

    def seconds(sample: Sample) -> float:
        exact = sum(getattr(calibration, name) * k for name, k in sample.amounts.items())
        return float(exact * np.exp(noise * rng.normal()))

    return [dataclasses.replace(sample, seconds=seconds(sample)) for sample in steps()]


def fit(samples: list[Sample]) -> Calibration:
    return fit_calibration(samples, SHAPE, "m", "cpu", "float32")


def test_exact_times_give_the_coefficients_back() -> None:
    fitted = fit(timed(FAST_LOAD))
    for name in COEFFICIENTS:
        assert getattr(fitted, name) == pytest.approx(getattr(FAST_LOAD, name), rel=1e-5)
    assert (fitted.machine, fitted.device, fitted.dtype) == ("m", "cpu", "float32")
    assert fitted.shape_digest == SHAPE.digest


def test_noisy_times_predict_whole_requests_closely() -> None:
    fitted = fit(timed(FAST_LOAD, noise=0.03))
    predicted, true = (
        [predict_ttft_seconds(SHAPE, plan, 700, 20, c) for plan in all_plans(4)]
        for c in (fitted, FAST_LOAD)
    )
    error = prediction_error(predicted, true)
    assert error.num_samples == 11
    assert error.max_percent < 8


def test_a_sample_of_a_request_is_what_the_predictor_adds_up() -> None:
    for plan in all_plans(4):
        sample = Sample.of_request(SHAPE, plan, 300, 20, 1.0)
        added = sum(getattr(FAST_LOAD, name) * k for name, k in sample.amounts.items())
        instant = dataclasses.replace(FAST_LOAD, load_fixed_seconds=0, load_seconds_per_byte=0)
        assert added == pytest.approx(predict_ttft_seconds(SHAPE, plan, 300, 20, instant))


@pytest.mark.parametrize(
    ("kept", "named"),
    [
        (lambda s: not s.num_load_bytes, "none that shows load_seconds_per_byte, load_fixed"),
        (lambda s: not s.num_requests, "none that shows fixed_seconds"),
        (lambda s: s.num_load_bytes != 10_000, "load_seconds_per_byte, load_fixed_seconds"),
        (
            lambda s: s.num_load_bytes or not s.prefix_tokens or s.prefix_tokens == 128,
            "prefix_seconds_per_token, prefix_seconds_per_token_squared",
        ),
    ],
)
def test_samples_that_leave_a_coefficient_open_are_refused_by_name(kept, named) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(CalibrationError, match=named):
        fit([sample for sample in timed(FAST_LOAD) if kept(sample)])


def test_no_samples_and_impossible_times_are_refused() -> None:
    with pytest.raises(CalibrationError, match="prefix_seconds_per_token"):
        fit([])
    with pytest.raises(CalibrationError, match=r"positive time, got 0"):
        fit([Sample(0.0, num_logits=1)])
    with pytest.raises(CalibrationError, match="1 predictions for 0 measurements"):
        prediction_error([1.0], [])


def test_prediction_error_is_relative_to_the_measurement() -> None:
    error = prediction_error([1.1, 2.0, 1.5], [1.0, 2.0, 3.0])
    assert error.median_percent == pytest.approx(10)
    assert error.max_percent == pytest.approx(50)


@settings(deadline=None)
@given(st.integers(1, 6), st.integers(0, 6), st.integers(0, 2**32 - 1))
def test_least_squares_meets_the_optimality_conditions(
    num_columns: int, more_rows: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    matrix = rng.normal(size=(num_columns + more_rows, num_columns))
    target = rng.normal(size=num_columns + more_rows)
    x = _nonnegative_least_squares(matrix, target)
    gradient = matrix.T @ (target - matrix @ x)
    assert (x >= 0).all()
    assert (gradient <= 1e-8).all()
    assert np.abs(gradient * x).max() <= 1e-8
