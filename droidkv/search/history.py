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


class HistoryReader:
    """Gathers the trials of a study by plan. Finished ones are read once: they do not change."""

    def __init__(self, space: SearchSpace, num_items: int) -> None:
        self._space = space
        self._num_items = num_items
        self._finished: dict[ReusePlan, PlanHistory] = {}
        self._read: set[int] = set()

    def read(self, trials: Sequence[FrozenTrial]) -> dict[ReusePlan, PlanHistory]:
        """Every plan that was taken up or is queued, by its first trial."""
        unfinished = []
        for trial in trials:
            if trial.number in self._read:
                continue
            if trial.state.is_finished():
                self._add(self._finished, trial)
                self._read.add(trial.number)
            else:
                unfinished.append(trial)
        history = dict(self._finished)
        for trial in unfinished:
            self._add(history, trial)
        return history

    def _add(self, history: dict[ReusePlan, PlanHistory], trial: FrozenTrial) -> None:
        plan = plan_of(trial, self._space)
        if plan is None:
            return
        seen = history.get(plan, PlanHistory())
        results = dict(seen.results)
        for name, value in trial.user_attrs.items():
            if name.startswith(_ITEM):
                results[int(name.removeprefix(_ITEM))] = ItemDrift(*value)
        is_running = trial.state == TrialState.RUNNING
        history[plan] = PlanHistory(
            results=results,
            is_complete=len(results) == self._num_items,
            # Baselines do not race, as they did in studies of earlier versions.
            lost_to=None
            if plan in self._space.baselines
            else trial.user_attrs.get(_LOST_TO, seen.lost_to),
            running=[*seen.running, trial.number] if is_running else seen.running,
            is_waiting=seen.is_waiting or trial.state == TrialState.WAITING,
        )
