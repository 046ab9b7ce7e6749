"""How much a plan that was picked as the best of many loses on items that did not pick it."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from droidkv.objectives import Objective, item_losses
from droidkv.plan import OPERATORS, Operator
from droidkv.profile import Profile
from droidkv.quality import LEAST_SCORE

LEAST_ITEMS = 4
NUM_SPLITS = 100


def loss_of_such_picks(
    profile: Profile,
    objective: Objective,
    max_loss: float,
    operators: Collection[Operator] = OPERATORS,
    num_splits: int = NUM_SPLITS,
) -> float | None:
    """What a plan loses on one half of the items that was picked on the other half.

    Half of the items, drawn at random, pick the cheapest plan within the limit, as `policy.pick`
    does where cost is layers; its loss is taken on the other half. Items over one prefix stay
    together. Mean over many drawings. Half as many items pick worse than all would, so this is
    rather too large than too small.

    Args:
        profile: The profile.
        objective: What a loss is.
        max_loss: The limit, in the objective's unit.
        operators: Families of plans that may be picked.
        num_splits: Drawings.

    Returns:
        The loss in the objective's unit; None = there are too few items to say.
    """
    items_of: dict[str, list[int]] = {}
    for index, item in enumerate(profile.items):
        items_of.setdefault(item.group, []).append(index)
    groups, n = [np.array(each) for each in items_of.values()], len(items_of)
    if n < LEAST_ITEMS:
        return None
    lost, whole = item_losses(profile, objective)
    ties, _ = item_losses(profile, "disagreement" if objective == "kl" else "kl")
    plans = [each.plan for each in profile.measurements]
    allowed = np.array([plan.is_of(operators) for plan in plans], dtype=bool)
    cost = np.array([plan.num_recomputed for plan in plans])
    random = np.random.default_rng(0)
    seen_loss = seen_whole = 0.0
    for _ in range(num_splits):
        order = [groups[drawn] for drawn in random.permutation(n)]
        mine = np.concatenate(order[: n - n // 2])
        others = np.concatenate(order[n - n // 2 :])
        if whole[mine].sum() < LEAST_SCORE:
            continue
        losses = lost[:, mine].sum(axis=1) / whole[mine].sum()
        good = np.flatnonzero(allowed & (losses <= max_loss))
        if len(good) == 0:
            continue
        ranks = np.lexsort((ties[good][:, mine].sum(axis=1), losses[good], cost[good]))
        picked = good[ranks[0]]
        seen_loss += lost[picked, others].sum()
        seen_whole += whole[others].sum()
    return float(seen_loss / seen_whole) if seen_whole >= LEAST_SCORE else None
