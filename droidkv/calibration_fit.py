"""From timed steps to a calibration: non-negative least squares on relative errors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from droidkv.costs import ModelShape, suffix_pairs
from droidkv.errors import CalibrationError
from droidkv.plan import ReusePlan
from droidkv.quality import Array
from droidkv.ttft import COEFFICIENTS, Calibration


@dataclass(frozen=True)
class Sample:
    """One timed step, or several timed together; zero = the step was not in it.

    Attributes:
        seconds: What it took.
        prefix_tokens: n: the tokens that prefix layers ran over, or that the suffix read.
        suffix_tokens: m: the tokens of the suffix pass.
        num_full_layers: Prefix layers run whole.
        num_kv_only_layers: Prefix layers of which only keys and values were computed.
        num_suffix_layers: Layers the suffix ran through.
        num_load_bytes: Bytes brought to the device.
        num_logits: Calls of final norm and output embedding, for one token each.
        num_requests: Whole requests; each brings the fixed overhead.
    """

    seconds: float
    prefix_tokens: int = 0
    suffix_tokens: int = 0
    num_full_layers: int = 0
    num_kv_only_layers: int = 0
    num_suffix_layers: int = 0
    num_load_bytes: int = 0
    num_logits: int = 0
    num_requests: int = 0

    @classmethod
    def of_request(
        cls,
        shape: ModelShape,
        plan: ReusePlan,
        prefix_tokens: int,
        suffix_tokens: int,
        seconds: float,
    ) -> Sample:
        """A whole request timed with its cache already on the device."""
        return cls(
            seconds=seconds,
            prefix_tokens=prefix_tokens,
            suffix_tokens=suffix_tokens,
            num_full_layers=max(0, plan.num_recomputed - 1),
            num_kv_only_layers=min(1, plan.num_recomputed),
            num_suffix_layers=shape.num_layers,
            num_logits=1,
            num_requests=1,
        )

    @property
    def amounts(self) -> dict[str, int]:
        """How often each coefficient of a `Calibration` counts in this sample."""
        n, m = self.prefix_tokens, self.suffix_tokens
        return {
            "prefix_seconds_per_token": self.num_full_layers * n,
            "prefix_seconds_per_token_squared": self.num_full_layers * n * n,
            "kv_only_seconds_per_token": self.num_kv_only_layers * n,
            "suffix_seconds_per_token": self.num_suffix_layers * m,
            "suffix_seconds_per_token_pair": self.num_suffix_layers * suffix_pairs(n, m),
            "seconds_per_layer_call": (
                self.num_full_layers + self.num_kv_only_layers + self.num_suffix_layers
            ),
            "load_seconds_per_byte": self.num_load_bytes,
            "load_fixed_seconds": min(1, self.num_load_bytes),
            "logits_seconds": self.num_logits,
            "fixed_seconds": self.num_requests,
        }


def fit_calibration(
    samples: Sequence[Sample], shape: ModelShape, machine: str, device: str, dtype: str
) -> Calibration:
    """Fit all coefficients at once, none below zero, to the least relative error.

    Args:
        samples: Timed steps of every kind, each at two lengths or more.
        shape: Sizes of the model measured.
        machine: Name of the machine.
        device: Torch device.
        dtype: Weight and cache dtype.

    Raises:
        CalibrationError: A time is not positive, or the samples leave a coefficient open; the
            message names it.
    """
    for sample in samples:
        if not 0 < sample.seconds < float("inf"):
            raise CalibrationError(
                f"expected every timed step to take a positive time, got {sample.seconds} seconds"
            )
    rows = np.zeros((len(samples), len(COEFFICIENTS)))
    for row, sample in zip(rows, samples, strict=True):
        # Divided by its time, each row's residual is the sample's relative error.
        row[:] = [sample.amounts[name] / sample.seconds for name in COEFFICIENTS]
    scale = np.linalg.norm(rows, axis=0)
    missing = [name for name, size in zip(COEFFICIENTS, scale, strict=True) if size == 0]
    if missing:
        raise CalibrationError(
            f"expected samples of every step, got none that shows {', '.join(missing)}; time it too"
        )
    scaled = rows / scale
    _require_identifiable(scaled)
    solution = _nonnegative_least_squares(scaled, np.ones(len(samples))) / scale
    values = dict(zip(COEFFICIENTS, solution.tolist(), strict=True))
    return Calibration(
        machine=machine, device=device, dtype=dtype, shape_digest=shape.digest, **values
    )


@dataclass(frozen=True)
class PredictionError:
    """How far predictions lie from measurements, relative to the measurement, in percent."""

    median_percent: float
    max_percent: float
    num_samples: int


def prediction_error(predicted: Sequence[float], measured: Sequence[float]) -> PredictionError:
    """Summarise the errors of a predictor on measurements that it was not fitted to.

    Raises:
        CalibrationError: The lists are empty or of different lengths.
    """
    if not measured or len(predicted) != len(measured):
        raise CalibrationError(
            f"expected one prediction per measurement and at least one, got {len(predicted)} "
            f"predictions for {len(measured)} measurements"
        )
    true = np.array(measured)
    errors = 100 * np.abs(np.array(predicted) - true) / true
    return PredictionError(float(np.median(errors)), float(errors.max()), len(measured))


def _require_identifiable(scaled: Array) -> None:
    rank = np.linalg.matrix_rank(scaled)
    if rank == scaled.shape[1]:
        return
    # A column that can be left out without loss is one the others can stand in for.
    entangled = [
        name
        for index, name in enumerate(COEFFICIENTS)
        if np.linalg.matrix_rank(np.delete(scaled, index, axis=1)) == rank
    ]
    raise CalibrationError(
        f"expected samples that tell all coefficients apart, but these can stand in for one "
        f"another: {', '.join(entangled)}; time their steps at more lengths, and one by one"
    )


def _nonnegative_least_squares(matrix: Array, target: Array) -> Array:
    """Lawson and Hanson's active-set method (Solving Least Squares Problems, 1974, ch. 23)."""
    num_columns = matrix.shape[1]
    solution = np.zeros(num_columns)
    free = np.zeros(num_columns, dtype=bool)
    for _ in range(10 * num_columns):
        gradient = np.where(free, -np.inf, matrix.T @ (target - matrix @ solution))
        if gradient.max() <= 1e-12:
            break
        free[gradient.argmax()] = True
        while True:
            trial = np.zeros(num_columns)
            trial[free] = np.linalg.lstsq(matrix[:, free], target, rcond=None)[0]
            falling = free & (trial <= 0)
            if not falling.any():
                break
            # Go towards the trial until the first coefficient reaches zero, and hold it there.
            steps = solution[falling] / np.maximum(solution[falling] - trial[falling], 1e-300)
            solution = solution + steps.min() * (trial - solution)
            free &= solution > 1e-15
            solution[~free] = 0
        solution = trial
    return solution
