"""Measure on this machine what predicting a prefill's time takes, and how good the prediction is.

Steps (layers over a prefix, keys and values only, a suffix pass, a load, logits) and whole
requests are timed at several lengths and fitted together. Requests of other plans and lengths are
timed in the same rounds and not fitted: the calibration is worth what it says of them.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from droidkv.bench.timing import Elapsed, dtype_name, surroundings, timed
from droidkv.calibration_file import HeldOut, MeasuredCalibration
from droidkv.calibration_fit import PredictionError, Sample, fit_calibration, prediction_error
from droidkv.calibration_steps import (
    LAYERS_TIMED,
    SUFFIX_TOKENS,
    Steps,
    TimedStep,
    random_prefix,
    run_layers,
)
from droidkv.errors import CalibrationError
from droidkv.models import DecoderModel
from droidkv.plan import ReusePlan
from droidkv.provenance import machine_description
from droidkv.run_folder import Progress, no_progress
from droidkv.ttft import Calibration, predict_ttft_seconds

MIN_PREFIX_TOKENS, MAX_PREFIX_TOKENS = 64, 8192
# All steps of one round together take about as long as so many full prefills of the longest prefix.
PREFILLS_PER_ROUND = 4.5


def measure_calibration(
    model: DecoderModel,
    max_prefix_tokens: int | None = None,
    num_rounds: int = 5,
    budget_seconds: float = 75.0,
    seed: int = 0,
    command: str = "",
    on_progress: Progress = no_progress,
) -> MeasuredCalibration:
    """Time every step of a prefill, fit the coefficients, and measure the prediction's error.

    One untimed round warms up; then `num_rounds` rounds over all steps, in which a step is timed
    once, so that a passing load on the machine falls on all steps alike. Medians count.

    Args:
        model: Any model of the shape and dtype that will be predicted for, on its device.
        max_prefix_tokens: Longest prefix timed, at least 64; None = the power of two, up to
            8,192 and the model's own limit, for which all rounds fit the budget.
        num_rounds: Timed rounds.
        budget_seconds: What the whole may take, about; counts where `max_prefix_tokens` is None.
        seed: Of the tokens and states.
        command: What reproduces it; kept in the result.
        on_progress: Told of each step.

    Raises:
        CalibrationError: A length or number is out of range.
        StorageError: The temporary folder cannot take the cache that the load is timed on.
    """
    if num_rounds < 1 or (max_prefix_tokens is not None and max_prefix_tokens < MIN_PREFIX_TOKENS):
        raise CalibrationError(
            f"expected at least 1 round and a longest prefix of at least {MIN_PREFIX_TOKENS} "
            f"tokens, got {num_rounds} and {max_prefix_tokens}"
        )
    started = time.perf_counter()
    longest = max_prefix_tokens or _affordable(model, budget_seconds / (num_rounds + 1), seed)
    with tempfile.TemporaryDirectory(prefix="droidkv-calibrate-") as folder:
        steps = Steps(model, longest, Path(folder), seed).all()
        runs: list[list[Elapsed]] = [[] for _ in steps]
        for number in range(num_rounds + 1):
            for index, step in enumerate(steps):
                runs[index].append(timed(model.device, step.run)[1])
                stage = "calibrate" if number else "warm-up"
                done = index + 1 + len(steps) * max(0, number - 1)
                on_progress(stage, done, len(steps) * (num_rounds if number else 1))
    for step_runs in runs:
        del step_runs[0]
    return _fitted(model, steps, runs, longest, seed, command, started)


def _affordable(model: DecoderModel, round_seconds: float, seed: int) -> int:
    """The longest prefix for which a round takes no longer than it should, from a short trial."""
    hidden, step = random_prefix(model, 2 * MIN_PREFIX_TOKENS, seed)
    layers = range(min(LAYERS_TIMED, model.num_layers))
    trials = [timed(model.device, run_layers, model, layers, hidden, step)[1] for _ in range(3)]
    per_token = min(trial.seconds for trial in trials) / len(layers) / hidden.shape[1]
    limit = getattr(model.config, "max_position_embeddings", MAX_PREFIX_TOKENS)
    longest = MIN_PREFIX_TOKENS * 4
    while 2 * longest + SUFFIX_TOKENS[-1] <= min(limit, MAX_PREFIX_TOKENS):
        prefill_seconds = per_token * model.num_layers * 2 * longest
        if PREFILLS_PER_ROUND * prefill_seconds > round_seconds:
            break
        longest *= 2
    return longest


def _fitted(
    model: DecoderModel,
    steps: Sequence[TimedStep],
    runs: Sequence[Sequence[Elapsed]],
    longest: int,
    seed: int,
    command: str,
    started: float,
) -> MeasuredCalibration:
    medians = [statistics.median(run.seconds for run in each) for each in runs]
    samples = [
        replace(step.sample, seconds=seconds)
        for step, seconds in zip(steps, medians, strict=True)
        if step.held_out is None
    ]
    calibration = fit_calibration(
        samples, model.shape, machine_description(), str(model.device), dtype_name(model)
    )
    held_out = tuple(
        HeldOut(str(plan), n, m, seconds, _predict(model, plan, n, m, calibration))
        for step, seconds in zip(steps, medians, strict=True)
        if step.held_out is not None
        for plan, n, m in [step.held_out]
    )
    error = prediction_error(
        [each.predicted_seconds for each in held_out], [each.measured_seconds for each in held_out]
    )
    return MeasuredCalibration(
        calibration=calibration,
        shape=model.shape,
        held_out=held_out,
        median_error_percent=error.median_percent,
        max_error_percent=error.max_percent,
        fit_error_percent=_fit_error(calibration, samples).median_percent,
        max_prefix_tokens=longest,
        num_rounds=len(runs[0]),
        provenance=surroundings(model, seed, command, time.perf_counter() - started),
    )


def _predict(
    model: DecoderModel, plan: ReusePlan, n: int, m: int, calibration: Calibration
) -> float:
    return predict_ttft_seconds(model.shape, plan, n, m, calibration, order="serial")


def _fit_error(calibration: Calibration, samples: Sequence[Sample]) -> PredictionError:
    predicted = [
        sum(getattr(calibration, name) * count for name, count in sample.amounts.items())
        for sample in samples
    ]
    return prediction_error(predicted, [sample.seconds for sample in samples])
