"""Which plans of a profile are worth measuring again on fresh items.

The frontier of a few items is made of plans that had luck with them, and it ends at the first one
that lost nothing. Measured again, all of it may be too lossy, so plans that are safer by KL, which
ranks plans that score alike, belong beside it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from droidkv.errors import ProfileError
from droidkv.frontier import Measurement, pareto_front
from droidkv.objectives import Objective, measure
from droidkv.plan import Operator, ReusePlan
from droidkv.profile import Profile

FAMILIES: tuple[tuple[Operator, ...], ...] = (("copy", "stitch"), ("copy",))
# A plan whose KL is below this share of naive reuse's is as good as exact.
NEAR_EXACT = 0.02


def plans_to_confirm(
    profile: Profile, objective: Objective, max_loss: float | None = None
) -> list[ReusePlan]:
    """The frontiers by the objective and by KL, of all plans and of those that copy.

    The frontier by KL ends at the first plan that is nearly exact.

    Args:
        profile: The profile.
        objective: What a loss is.
        max_loss: Leave out plans whose whole interval lies above this loss; None = keep all.

    Raises:
        ProfileError: That loss is below 0 or not finite.
    """
    if max_loss is not None and not 0 <= max_loss < float("inf"):
        raise ProfileError(f"expected a largest loss >= 0, got {max_loss}")
    points = measure(profile, objective)
    by_kl = points if objective == "kl" else measure(profile, "kl")
    kept = set()
    for operators in FAMILIES:
        kept |= {point.plan for point in _front(points, operators)}
        kept |= {point.plan for point in _until_near_exact(_front(by_kl, operators))}
    if max_loss is not None:
        kept -= {point.plan for point in points if point.interval.low > max_loss}
    return sorted(kept)


def _front(points: Sequence[Measurement], operators: Collection[Operator]) -> list[Measurement]:
    return pareto_front(point for point in points if point.plan.is_of(operators))


def _until_near_exact(front: Sequence[Measurement]) -> Iterator[Measurement]:
    """A frontier by KL, cheapest first, up to the first plan that is nearly exact."""
    for point in front:
        yield point
        if point.loss <= NEAR_EXACT * front[0].loss:
            return
