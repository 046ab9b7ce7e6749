"""Which plans no other plan beats: dominance, the Pareto front, the cheapest good enough plan."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from droidkv.errors import ProfileError
from droidkv.plan import ReusePlan
from droidkv.quality import Interval


@dataclass(frozen=True)
class Measurement:
    """One plan's place in the plane of cost and loss. Smaller is better in every number.

    Attributes:
        plan: The plan.
        cost: What it costs, in the unit that was asked for.
        loss: What it loses, in the unit that was asked for, noise floor applied.
        tie_break: Decides between plans of equal cost and equal loss.
        interval: Confidence interval of `loss`.
        num_items: Items that the loss is a mean over.
        num_undecoded: Of these, items counted pessimistically because nobody decoded them.
        losses: The loss in every unit the profile knows, for tables.

    Raises:
        ProfileError: A number is not finite, or there is no item.
    """

    plan: ReusePlan
    cost: float
    loss: float
    tie_break: float
    interval: Interval
    num_items: int
    num_undecoded: int = 0
    losses: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("cost", "loss", "tie_break"):
            if not math.isfinite(getattr(self, name)):
                raise ProfileError(
                    f"expected a finite {name} of the plan {self.plan}, "
                    f"got {getattr(self, name)}; measure the plan again"
                )
        if self.num_items < 1:
            raise ProfileError(f"expected the plan {self.plan} to have items, got none")


def dominates(a: Measurement, b: Measurement) -> bool:
    """Whether `a` makes `b` pointless: nowhere worse, and better in cost, in loss, or on a tie."""
    if (a.cost, a.loss) == (b.cost, b.loss):
        return a.tie_break < b.tie_break
    return a.cost <= b.cost and a.loss <= b.loss


def pareto_front(measurements: Iterable[Measurement]) -> list[Measurement]:
    """The measurements that no other dominates, by cost, then by plan.

    Measurements equal in everything stay together. One sort and one pass, so that a front of
    thousands of plans costs nothing.
    """
    front: list[Measurement] = []
    ordered = sorted(measurements, key=lambda m: (m.cost, m.loss, m.tie_break, m.plan))
    for measurement in ordered:
        # What came before costs no more, and the last of the front has the least loss of it.
        if not front or not dominates(front[-1], measurement):
            front.append(measurement)
    return front


def cheapest_within(measurements: Iterable[Measurement], max_loss: float) -> Measurement | None:
    """The cheapest plan that loses at most `max_loss`, or None. Of equally cheap ones the best."""
    good = [m for m in measurements if m.loss <= max_loss]
    return min(good, key=lambda m: (m.cost, m.loss, m.tie_break, m.plan), default=None)


def interval_allows(measurement: Measurement, max_loss: float) -> bool:
    """Whether the whole interval, and not only the mean, lies at or below `max_loss`."""
    return measurement.interval.high <= max_loss
