"""How much quality a plan loses against the receiver's own full prefill, and how sure that is.

Losses are paired: both scores of an item come from the same question, so items are resampled as
pairs. Scores lie in [0, 1] and bigger is better; losses are the other way round. No loss here goes
without its number of items. The intervals are those of one plan chosen beforehand: the best of many
plans looks better on the items that chose it than it will on others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from droidkv.errors import ProfileError

Array: TypeAlias = NDArray[np.float64]

CONFIDENCE = 0.95
NUM_RESAMPLES = 2000
# A mean score below this is no score: dividing by it would say nothing.
LEAST_SCORE = 1e-9


@dataclass(frozen=True)
class Interval:
    """A confidence interval, both ends included."""

    low: float
    high: float

    def __str__(self) -> str:
        return f"[{self.low:.3g}, {self.high:.3g}]"


@dataclass(frozen=True)
class Loss:
    """Score lost by a plan against the receiver's own full prefill, on the same items.

    Attributes:
        absolute_points: Mean full score minus mean plan score, times 100; negative = a gain.
        absolute_interval: Its bootstrap interval.
        relative_percent: The same loss as a share of the mean full score, in percent.
        relative_interval: Its bootstrap interval.
        num_items: Items it is a mean over.
        num_undecoded: Of these, items that diverged and were not decoded, counted as score 0.
    """

    absolute_points: float
    absolute_interval: Interval
    relative_percent: float
    relative_interval: Interval
    num_items: int
    num_undecoded: int


def resample_weights(
    items: int | Sequence[str], num_resamples: int = NUM_RESAMPLES, seed: int = 0
) -> Array:
    """How much each item weighs in each bootstrap resample.

    Args:
        items: Items to draw from, with replacement, as many as there are. As names: of each item
            its group's, which is drawn as a whole, since its items are no evidence of their own.
        num_resamples: Resamples to draw.
        seed: Seed of the drawing; plans compared on the same items share one.

    Returns:
        Weights `[num_resamples, num_items]`; each row sums to 1.

    Raises:
        ProfileError: There is no item.
    """
    names = range(items) if isinstance(items, int) else items
    if not names:
        raise ProfileError("expected at least 1 item to average over, got 0")
    places = {name: place for place, name in enumerate(dict.fromkeys(names))}
    n = len(places)
    drawn = np.random.default_rng(seed).integers(n, size=(num_resamples, n))
    flat = drawn + n * np.arange(num_resamples)[:, None]
    drawn_times = np.bincount(flat.ravel(), minlength=num_resamples * n).reshape(num_resamples, n)
    counts = drawn_times[:, [places[name] for name in names]]
    return counts / counts.sum(axis=1, keepdims=True)  # type: ignore[no-any-return]


def percentile_interval(resampled: Array, confidence: float = CONFIDENCE) -> Interval:
    """Middle `confidence` share of resampled statistics `[num_resamples]`."""
    tail = (1 - confidence) / 2
    low, high = np.quantile(resampled, [tail, 1 - tail])
    return Interval(float(low), float(high))


def bootstrap_interval(
    values: Sequence[float],
    confidence: float = CONFIDENCE,
    num_resamples: int = NUM_RESAMPLES,
    seed: int = 0,
) -> Interval:
    """Percentile bootstrap interval of a mean.

    Args:
        values: One value per item; for a paired comparison, the differences.
        confidence: Share of resamples inside the interval.
        num_resamples: Resamples to draw.
        seed: Seed of the drawing.

    Raises:
        ProfileError: `values` is empty.
    """
    weights = resample_weights(len(values), num_resamples, seed)
    return percentile_interval(weights @ np.asarray(values, dtype=float), confidence)


def score_loss(
    full_scores: Sequence[float],
    plan_scores: Sequence[float | None],
    weights: Array | None = None,
    confidence: float = CONFIDENCE,
) -> Loss:
    """Loss of a plan's scores against the full prefill's scores on the same items.

    Args:
        full_scores: Score of the receiver's own full prefill, one per item.
        plan_scores: Score of the plan, one per item in the same order; None = the answer diverged
            and was not decoded, which counts as 0.
        weights: `resample_weights` of the items; drawn here if None.
        confidence: Share of resamples inside the intervals.

    Raises:
        ProfileError: The lists are empty or of different lengths, or the full prefill scores 0 on
            every item, so that there is no relative loss.
    """
    if len(full_scores) != len(plan_scores):
        raise ProfileError(
            f"expected one plan score per item, got {len(plan_scores)} for {len(full_scores)} items"
        )
    if weights is None:
        weights = resample_weights(len(full_scores))
    full = np.asarray(full_scores, dtype=float)
    plan = np.asarray([0.0 if score is None else score for score in plan_scores])
    if full.mean() < LEAST_SCORE:
        raise ProfileError(
            f"expected the receiver's full prefill to score above 0 on some of {len(full)} items, "
            f"but it scores 0 on all, so there is no relative loss; use the objective 'kl', or a "
            f"task that this receiver can do"
        )
    lost = full - plan
    lost_means, full_means = weights @ lost, weights @ full
    # A resample without one right answer has nothing to lose.
    ratios = np.divide(
        lost_means, full_means, out=np.zeros_like(lost_means), where=full_means >= LEAST_SCORE
    )
    return Loss(
        absolute_points=100 * float(lost.mean()),
        absolute_interval=percentile_interval(100 * lost_means, confidence),
        relative_percent=100 * float(lost.sum() / full.sum()),
        relative_interval=percentile_interval(100 * ratios, confidence),
        num_items=len(full),
        num_undecoded=sum(score is None for score in plan_scores),
    )


@dataclass(frozen=True)
class Rate:
    """A share of items, with its interval and its number of items."""

    share: float
    interval: Interval
    num_items: int


def agreement_rate(agrees: Sequence[bool], z: float = 1.959964) -> Rate:
    """Share of items whose greedy answer is the full prefill's, with its Wilson interval.

    Wilson's interval, unlike the bootstrap's, keeps a width when all items agree or none does.

    Args:
        agrees: One truth value per item.
        z: Standard-normal quantile of the interval; 1.96 = 95 %.

    Raises:
        ProfileError: `agrees` is empty.
    """
    n = len(agrees)
    if n == 0:
        raise ProfileError("expected at least 1 item to average over, got 0")
    share = sum(agrees) / n
    centre = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    return Rate(share, Interval(max(0.0, centre - half), min(1.0, centre + half)), n)


def above_floor(loss: float, floor: float) -> float:
    """The loss, or 0 where it is below the noise floor: what an exact plan loses is no loss."""
    return 0.0 if loss < floor else loss


def share_bound(num_lost: int, num_items: int, confidence: float = CONFIDENCE) -> float:
    """Largest share of items a plan may spoil although only `num_lost` of `num_items` were spoiled.

    The one-sided bound of Clopper and Pearson; with none spoiled the rule of three, about 3 / n. A
    bootstrap of few losses is narrower, and of none has no width at all.
    """
    if num_lost == num_items:
        return 1.0

    def log_chance(k: int, share: float) -> float:
        ways = math.lgamma(num_items + 1) - math.lgamma(k + 1) - math.lgamma(num_items - k + 1)
        return ways + k * math.log(share) + (num_items - k) * math.log1p(-share)

    low, high = num_lost / num_items, 1.0
    for _ in range(40):
        share = (low + high) / 2
        so_few = sum(math.exp(log_chance(k, share)) for k in range(num_lost + 1))
        low, high = (share, high) if so_few > 1 - confidence else (low, share)
    return high
