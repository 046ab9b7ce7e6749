"""Plans worth a look before the search has seen any, from the single-layer probe."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from droidkv.errors import PlanError
from droidkv.plan import Operator, ReusePlan


def additive_plans(
    reuse_one_losses: Sequence[float],
    num_plans: int,
    operators: Sequence[Operator] = ("copy",),
) -> list[ReusePlan]:
    """The groups that would be best if layers' losses added up.

    If reusing layer l alone costs r[l], and losses added up, a group would cost the sum of r
    outside of it: the best group of each length is the one with the largest sum inside.

    Args:
        reuse_one_losses: Mean loss of reusing one layer only, per layer (`Probe.reuse_one`).
        num_plans: How many lengths to propose, spread evenly over 1 .. num_layers - 1.
        operators: Each group is proposed with every one of these.

    Raises:
        PlanError: Fewer than 2 layers, or `num_plans` is negative.
    """
    num_layers = len(reuse_one_losses)
    if num_layers < 2 or num_plans < 0:
        raise PlanError(
            f"expected at least 2 layers and num_plans >= 0, got {num_layers} and {num_plans}"
        )
    sums = np.concatenate([[0.0], np.cumsum(reuse_one_losses)])
    lengths = np.unique(np.linspace(1, num_layers - 1, num_plans).round().astype(int))
    plans = []
    for length in lengths.tolist():
        start = int((sums[length:] - sums[:-length]).argmax())
        plans += [ReusePlan.of(start, start + length, operator) for operator in operators]
    return list(dict.fromkeys(plans))
