"""A Gaussian process over all plans, and how much each is expected to push the frontier.

The search space is small and known in full, and so is every plan's cost: only the loss needs a
model. Plans with neighbouring borders lose alike, over several orders of magnitude, so the process
models the logarithm of the loss over start and stop. Numpy only.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from droidkv.plan import Operator, ReusePlan
from droidkv.quality import Array

# Tried for every fit; the marginal likelihood chooses. Lengths are shares of the model's depth.
_LENGTHS = (0.08, 0.16, 0.32, 0.64)
_NOISES = (1e-3, 1e-2, 1e-1)  # variance of the noise relative to the process's
_OPERATOR_CORRELATION = 0.7


def plan_features(plans: Sequence[ReusePlan], num_layers: int) -> Array:
    """Start, stop and operator of each plan, `[num_plans, 3]`; borders as shares of the depth."""
    rows = [(p.group.start, p.group.stop, p.operator == "stitch") for p in plans]
    features = np.array(rows, dtype=float).reshape(-1, 3)
    features[:, :2] /= num_layers
    return features


def empty_features(operators: Sequence[Operator], num_borders: int = 11) -> Array:
    """Features of empty groups at evenly spaced borders, `[num_borders * num_operators, 3]`."""
    borders = np.linspace(0, 1, num_borders)
    rows = [(border, border, operator == "stitch") for operator in operators for border in borders]
    return np.array(rows, dtype=float)


@dataclass(frozen=True)
class Prediction:
    """Mean and standard deviation of the log loss of each plan, `[num_plans]`."""

    mean: Array
    deviation: Array


@dataclass(frozen=True)
class Kernel:
    """Matern 5/2 with one length per border; plans of two operators correlate less."""

    start_length: float
    stop_length: float

    def __call__(self, a: Array, b: Array) -> Array:
        lengths = np.array([self.start_length, self.stop_length])
        steps = (a[:, None, :2] - b[None, :, :2]) / lengths
        distance = np.sqrt(5 * (steps**2).sum(axis=-1))
        same = a[:, None, 2] == b[None, :, 2]
        shape = (1 + distance + distance**2 / 3) * np.exp(-distance)
        return np.asarray(shape * np.where(same, 1.0, _OPERATOR_CORRELATION))


@dataclass(frozen=True)
class Surrogate:
    """A fitted process.

    Attributes:
        kernel: Correlation of two plans.
        noise: Noise variance of a plan that has every item, relative to the process's variance.
    """

    kernel: Kernel
    noise: float

    def predict(
        self, features: Array, values: Array, item_share: Array, wanted: Array
    ) -> Prediction:
        """Predict log losses from those observed.

        Args:
            features: Of the observed plans, `[num_observed, 3]`.
            values: Their log losses, `[num_observed]`.
            item_share: Share of the items behind each value, in (0, 1]; fewer = more noise.
            wanted: Features of the plans to predict, `[num_plans, 3]`.
        """
        centre, scale = _standard(values)
        factor = np.linalg.cholesky(self._covariance(features, item_share))
        cross = np.linalg.solve(factor, self.kernel(features, wanted))
        mean = cross.T @ np.linalg.solve(factor, (values - centre) / scale)
        variance = np.maximum(1e-12, 1 - (cross**2).sum(axis=0))
        return Prediction(centre + scale * mean, scale * np.sqrt(variance))

    def log_likelihood(self, features: Array, values: Array, item_share: Array) -> float:
        """Marginal log likelihood of observed values, up to a constant."""
        centre, scale = _standard(values)
        factor = np.linalg.cholesky(self._covariance(features, item_share))
        white = np.linalg.solve(factor, (values - centre) / scale)
        return -0.5 * float(white @ white) - float(np.log(np.diag(factor)).sum())

    def _covariance(self, features: Array, item_share: Array) -> Array:
        return self.kernel(features, features) + np.diag(self.noise / item_share + 1e-8)


def fit_surrogate(features: Array, values: Array, item_share: Array) -> Surrogate:
    """The kernel and noise that make the observed values most likely; arguments as in `predict`."""
    candidates = [
        Surrogate(Kernel(start, stop), noise)
        for start, stop, noise in itertools.product(_LENGTHS, _LENGTHS, _NOISES)
    ]
    return max(candidates, key=lambda each: each.log_likelihood(features, values, item_share))


def expected_gain(prediction: Prediction, layers: Array, curve: Array) -> Array:
    """Expected gain in area under the frontier of each plan, on the scale of the prediction.

    A plan of c layers lowers the curve from c layers on, wherever it lies below it; each layer
    count contributes its expected improvement. This is the expected hypervolume improvement, which
    has a closed form here since the cost is known (Emmerich et al. 2006 for the general case).

    Args:
        prediction: Of the plans.
        layers: Layers each recomputes, `[num_plans]`.
        curve: Log losses of the frontier so far, `[num_layers + 1]`, finite.
    """
    z = (curve[None, :-1] - prediction.mean[:, None]) / prediction.deviation[:, None]
    density = np.exp(-0.5 * z**2) / np.sqrt(2 * np.pi)
    improvement = prediction.deviation[:, None] * (z * normal_cdf(z) + density)
    counts = np.arange(len(curve) - 1)[None, :] >= layers[:, None]
    return np.asarray((improvement * counts).sum(axis=1))


def normal_cdf(z: Array) -> Array:
    """Standard normal distribution function, error below 1e-6 (Abramowitz & Stegun 7.1.26)."""
    x = np.abs(z) / np.sqrt(2)
    t = 1 / (1 + 0.3275911 * x)
    coefficients = (0.254829592, -0.284496736, 1.421413741, -1.453152027, 1.061405429)
    series = np.zeros_like(t)
    for coefficient in reversed(coefficients):
        series = t * (coefficient + series)
    upper = 0.5 * series * np.exp(-(x**2))
    return np.asarray(np.where(z >= 0, 1 - upper, upper))


def _standard(values: Array) -> tuple[float, float]:
    return float(values.mean()), max(float(values.std()), 1e-6)
