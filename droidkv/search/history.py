"""What a study knows: every plan's results so far, whoever measured them and however it ended.

Each item's result is an attribute of the trial, written as soon as it is there. A worker that is
killed loses the one evaluation it was at, and whoever takes the plan up goes on from the next item.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field
from typing import Any

import numpy as np
import optuna
from optuna.trial import FrozenTrial, TrialState

from droidkv.plan import ReusePlan
from droidkv.quality import Array
from droidkv.search.base import Drift, ItemDrift, Loss, SearchSpace, item_loss

_ITEM = "item:"
_LOST_TO = "lost_to"


@dataclass
class PlanHistory:
    """One plan in a study.

    Attributes:
        results: Item index -> result.
        is_complete: Every item was evaluated.
        lost_to: The plan that beat it in the race, as text; None = none did.
        running: Numbers of the trials that are at it.
        is_waiting: A trial is queued for it.
    """

    results: dict[int, ItemDrift] = field(default_factory=dict)
    is_complete: bool = False
    lost_to: str | None = None
    running: list[int] = field(default_factory=list)
    is_waiting: bool = False

    @property
    def is_settled(self) -> bool:
        """Nothing more will be evaluated."""
        return self.is_complete or self.lost_to is not None

    def losses(self, order: Sequence[int], loss: Loss) -> Array:
        """Losses of the items evaluated so far, `[num_evaluated]`, in the order given."""
        return np.array([item_loss(self.results[i], loss) for i in order if i in self.results])


def write_result(trial: optuna.Trial, item: int, drift: Drift) -> ItemDrift:
    """Keep one item's result with the trial, and return it as it will be read back."""
    kept = ItemDrift(float(drift.kl), float(drift.nll), float(drift.top1), bool(drift.agrees))
    trial.set_user_attr(f"{_ITEM}{item}", list(astuple(kept)))
    return kept


def write_defeat(trial: optuna.Trial, rival: ReusePlan) -> None:
    """Note who stopped the trial's plan in the race."""
    trial.set_user_attr(_LOST_TO, str(rival))


def plan_of(trial: FrozenTrial, space: SearchSpace) -> ReusePlan | None:
    """The plan that a trial is at, or was queued for; None as long as its sampler is choosing."""
    params: Mapping[str, Any] = trial.params
    if not space.ranges.keys() <= params.keys():
        params = trial.system_attrs.get("fixed_params", {})
    return space.plan_of(params) if space.ranges.keys() <= params.keys() else None


def read_history(
    trials: Sequence[FrozenTrial], space: SearchSpace, num_items: int
) -> dict[ReusePlan, PlanHistory]:
    """Gather the trials of a study by plan, in the order in which plans were first taken up."""
    plans: dict[ReusePlan, PlanHistory] = {}
    for trial in trials:
        plan = plan_of(trial, space)
        if plan is None:
            continue
        seen = plans.setdefault(plan, PlanHistory())
        for name, value in trial.user_attrs.items():
            if name.startswith(_ITEM):
                seen.results[int(name.removeprefix(_ITEM))] = ItemDrift(*value)
        seen.lost_to = trial.user_attrs.get(_LOST_TO, seen.lost_to)
        seen.is_complete = len(seen.results) == num_items
        seen.is_waiting |= trial.state == TrialState.WAITING
        if trial.state == TrialState.RUNNING:
            seen.running.append(trial.number)
    return plans
