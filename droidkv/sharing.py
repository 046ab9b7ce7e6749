"""Quality against the share of layers that read the base's KV (PrefillShare, figure 2).

At a share of k of L layers the lowest k read the base's KV and the others compute their own from
there: the plan `[k, L)`. So 0 % is the receiver's own prefill and 100 % the empty plan. The
ordinary fine-tune is *naive*: nobody told it. The full-share receiver is *trained* for 100 %.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from droidkv.errors import PlanError
from droidkv.plan import ReusePlan
from droidkv.profile import Profile
from droidkv.quality import Interval, percentile_interval, resample_weights


@dataclass(frozen=True)
class SharingPoint:
    """What a receiver is worth at one share.

    Attributes:
        shared_layers: The lowest layers, whose KV is the base's.
        share_percent: Of all layers.
        score: Mean score of its answers.
        interval: 95 % bootstrap interval of the mean over items.
        kl: Mean KL from the reference's full prefill, nats per token.
    """

    shared_layers: int
    share_percent: float
    score: float
    interval: Interval
    kl: float


def naive_path(output: Path) -> Path:
    """Where the naive receiver's profile lies: `NAME.naive.json` beside `NAME.json`."""
    return output.with_suffix(".naive.json")


def sharing_plans(num_layers: int, num_steps: int) -> list[ReusePlan]:
    """Plans from no shared layer to all of them, in about equal steps.

    Raises:
        PlanError: `num_steps` is below 1.
    """
    if num_steps < 1:
        raise PlanError(f"expected at least 1 step of the share, got {num_steps}")
    counts = sorted({round(num_layers * step / num_steps) for step in range(num_steps + 1)})
    return [ReusePlan.of(count, num_layers) for count in counts]


def sharing_curves(profiles: Mapping[str, Profile]) -> dict[str, list[SharingPoint]]:
    """Name of a receiver -> its points by rising share."""
    return {name: _curve(profile) for name, profile in profiles.items()}


def _curve(profile: Profile) -> list[SharingPoint]:
    weights = resample_weights([item.group for item in profile.items])
    points = []
    for record in profile.measurements:
        shared = profile.num_layers - record.plan.num_recomputed
        scores = np.array([score or 0.0 for score in record.score])
        points.append(
            SharingPoint(
                shared_layers=shared,
                share_percent=100 * shared / profile.num_layers,
                score=float(scores.mean()),
                interval=percentile_interval(weights @ scores),
                kl=float(np.mean(record.kl)),
            )
        )
    return sorted(points, key=lambda point: point.shared_layers)
