"""The budgeted search: an Optuna study of layers recomputed against loss, item by item.

Any number of processes may run one study by opening the same storage. A search that was killed, or
whose budget was raised, goes on where it stood.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import optuna
from optuna.storages import BaseStorage
from optuna.trial import TrialState

from droidkv.errors import PlanError, unknown_name
from droidkv.plan import ReusePlan
from droidkv.records import PlanRecord, require_numbers
from droidkv.search.base import LOSSES, Drift, Evaluate, Loss, PlanCost, SearchSpace, one_evaluation
from droidkv.search.history import (
    HistoryReader,
    PlanHistory,
    plan_of,
    write_defeat,
    write_result,
)
from droidkv.search.racing import RacingRule, SureRace
from droidkv.search.samplers import SAMPLERS, make_sampler
from droidkv.search.storage import fail_stale, open_study, require_definition

# Between the seeds of two workers, so that those of neighbouring searches do not meet.
_SEED_STEP = 7919
# A sampler that proposes known plans this often in a row is given an unknown one instead.
_MAX_REPEATS = 5
_WAIT_SECONDS = 1

History = Mapping[ReusePlan, PlanHistory]
OnProgress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class SearchSettings:
    """How to search.

    Attributes:
        sampler: Name of one of `droidkv.search.SAMPLERS`.
        loss: What is minimised besides layers.
        racing: When a plan is stopped before its last item.
        seed: Of sampler and item order.
        worker: Tells the processes of one study apart; each needs another one.

    Raises:
        PlanError: There is no such sampler or loss.
    """

    sampler: str = "frontier"
    loss: Loss = "kl"
    racing: RacingRule = field(default_factory=SureRace)
    seed: int = 0
    worker: int = 0

    def __post_init__(self) -> None:
        if self.sampler not in SAMPLERS:
            raise PlanError(unknown_name("sampler", self.sampler, SAMPLERS))
        if self.loss not in LOSSES:
            raise PlanError(unknown_name("loss", self.loss, LOSSES))


@dataclass(frozen=True)
class FoundPlan:
    """A plan that was evaluated on every item.

    Attributes:
        plan: The plan.
        drifts: One result per item, in item order.
    """

    plan: ReusePlan
    drifts: tuple[Drift, ...]

    def record(self, full_scores: Sequence[float]) -> PlanRecord:
        """As a profile stores it; an answer that agrees scores what the full prefill's scores."""
        return PlanRecord(
            plan=self.plan,
            kl=tuple(drift.kl for drift in self.drifts),
            nll=tuple(drift.nll for drift in self.drifts),
            top1=tuple(drift.top1 for drift in self.drifts),
            agrees=tuple(drift.agrees for drift in self.drifts),
            score=tuple(
                score if drift.agrees else None
                for drift, score in zip(self.drifts, full_scores, strict=True)
            ),
        )


@dataclass(frozen=True)
class SearchResult:
    """What a search found and what it used.

    Attributes:
        found: Plans evaluated on every item, in the order of the space; after `run`, full reuse and
            full prefill among them.
        lost: Plans stopped in the race -> how many items they were evaluated on.
        num_evaluations: Pairs of plan and item evaluated.
        used: The same in the unit of the budget.
        num_trials: Trials of the study, repeated proposals included.
    """

    found: tuple[FoundPlan, ...]
    lost: Mapping[ReusePlan, int]
    num_evaluations: int
    used: float
    num_trials: int


class BudgetedSearch:
    """One process's hold on a search.

    Args:
        space: The plans.
        evaluate: Evaluates a plan on an item.
        num_items: Items that a complete plan is evaluated on.
        settings: How to search.
        storage: SQLite file (made if missing) or an Optuna storage; None = in memory.
        first_plans: Taken up before anything is sampled, after full reuse and full prefill.
        identity: What the results depend on, such as fingerprints and item ids, as JSON values; a
            stored study of another identity is refused.
        plan_cost: What one evaluation of a plan uses of the budget.

    Raises:
        PlanError: There is no such sampler, no item, or one of `first_plans` is not in the space.
        ProfileError: The storage holds a search over something else; names what differs.
        StorageError: The file cannot be opened.
    """

    def __init__(
        self,
        space: SearchSpace,
        evaluate: Evaluate,
        num_items: int,
        settings: SearchSettings | None = None,
        storage: Path | BaseStorage | None = None,
        first_plans: Sequence[ReusePlan] = (),
        identity: Mapping[str, Any] | None = None,
        plan_cost: PlanCost = one_evaluation,
    ) -> None:
        if num_items < 1:
            raise PlanError(f"expected at least 1 item to evaluate plans on, got {num_items}")
        self.space = space
        self.evaluate = evaluate
        self.num_items = num_items
        self.settings = settings or SearchSettings()
        self.plan_cost = plan_cost
        sampler = make_sampler(
            self.settings.sampler,
            space,
            num_items,
            self.settings.loss,
            seed=self.settings.seed + _SEED_STEP * self.settings.worker,
        )
        self.study = open_study(storage, sampler)
        require_definition(
            self.study,
            {
                "num_layers": space.num_layers,
                "operators": space.operators,
                "granularity": space.granularity,
                "num_items": num_items,
                "loss": self.settings.loss,
                "identity": identity or {},
            },
        )
        self._reader = HistoryReader(space, num_items)
        self._order: list[int] | None = None
        self._repeats = 0
        self._enqueue_missing([*space.baselines, *first_plans])

    def run(self, budget: float, on_progress: OnProgress | None = None) -> SearchResult:
        """Search until the study has used up `budget` in all, or every plan is settled.

        A plan that was begun is finished, so each process may go over by one plan. Full reuse and
        full prefill are evaluated whatever the budget; one that another worker is at is waited for.

        Args:
            budget: In the unit of `plan_cost`; by default, pairs of plan and item.
            on_progress: Called with ("search", used, budget) after each trial.

        Raises:
            ProfileError: A result is no number.
        """
        while True:
            history = self._history()
            used = self._used(history)
            if on_progress is not None:
                on_progress("search", min(round(used), round(budget)), round(budget))
            missing = {p: history[p] for p in self.space.baselines if not history[p].is_complete}
            if used < budget and not self._is_exhausted(history):
                self._retry_failed(history)
                self._unstick(history)
                self.study.optimize(self._try_plan, n_trials=1)
            elif missing:
                self._retry_failed(missing)
                self._complete(missing)
            else:
                return self.result()

    def result(self) -> SearchResult:
        """What the study holds by now, whoever put it there."""
        history = self._history()
        items = range(self.num_items)
        return SearchResult(
            found=tuple(
                FoundPlan(plan, tuple(history[plan].results[item] for item in items))
                for plan in self.space.plans
                if plan in history and history[plan].is_complete
            ),
            lost={
                plan: len(seen.results)
                for plan, seen in history.items()
                if seen.lost_to is not None and not seen.is_complete
            },
            num_evaluations=sum(len(seen.results) for seen in history.values()),
            used=self._used(history),
            num_trials=len(self.study.get_trials(deepcopy=False)),
        )

    def _complete(self, missing: History) -> None:
        """Bring a queued baseline nearer to its results, and evaluate nothing else."""
        if all(seen.running for seen in missing.values()):
            time.sleep(_WAIT_SECONDS)
            fail_stale(self.study)
        else:
            self.study.optimize(lambda trial: self._try_plan(trial, missing), n_trials=1)

    def _try_plan(
        self, trial: optuna.Trial, only: Collection[ReusePlan] | None = None
    ) -> tuple[float, float]:
        """Evaluate the plan that is next, unless it is none of `only`; it can be tried again."""
        plan = self._suggest(trial)
        if only is not None and plan not in only:
            raise optuna.TrialPruned
        trials = self.study.get_trials(deepcopy=False)
        history = self._reader.read(trials)
        seen = history[plan]
        # Older trials that other workers' samplers are still choosing for, maybe this very plan.
        choosing = [
            each.number
            for each in trials[: trial.number]
            if each.state == TrialState.RUNNING and plan_of(each, self.space) is None
        ]
        another = any(number < trial.number for number in seen.running)
        self._repeats = self._repeats + 1 if seen.is_settled or another else 0
        if seen.is_complete:
            return self._values(plan, seen)
        if seen.lost_to is not None or another:
            raise optuna.TrialPruned
        rival = self._rival(plan, history)
        for item in self._item_order(history):
            if item in seen.results:
                continue
            if rival is not None and self._has_lost(seen, history[rival]):
                write_defeat(trial, rival)
                raise optuna.TrialPruned
            if choosing and self._is_taken(plan, choosing):
                raise optuna.TrialPruned
            drift = self.evaluate(plan, item)
            require_numbers(f"the plan {plan}", str(item), drift.kl, drift.nll)
            seen.results[item] = write_result(trial, item, drift)
        return self._values(plan, seen)

    def _is_taken(self, plan: ReusePlan, numbers: Sequence[int]) -> bool:
        trials = self.study.get_trials(deepcopy=False)
        return any(plan_of(trials[number], self.space) == plan for number in numbers)

    def _suggest(self, trial: optuna.Trial) -> ReusePlan:
        params: dict[str, Any] = {
            name: trial.suggest_int(name, low, high, step=self.space.granularity)
            for name, (low, high) in self.space.ranges.items()
        }
        if len(self.space.operators) > 1:
            params["operator"] = trial.suggest_categorical("operator", self.space.operators)
        return self.space.plan_of(params)

    def _has_lost(self, seen: PlanHistory, rival: PlanHistory) -> bool:
        order = self._order or list(range(self.num_items))
        evaluated_first = sorted(order, key=lambda item: item not in seen.results)
        losses = seen.losses(order, self.settings.loss)
        rival_losses = rival.losses(evaluated_first, self.settings.loss)
        return self.settings.racing.has_lost(losses, rival_losses, self.num_items)

    def _rival(self, plan: ReusePlan, history: History) -> ReusePlan | None:
        """The complete plan of least loss among those that recompute no more layers.

        Full reuse and full prefill do not race: all others are held against them.
        """
        if plan in self.space.baselines:
            return None
        rivals = [
            other
            for other, seen in history.items()
            if seen.is_complete and other != plan and other.num_recomputed <= plan.num_recomputed
        ]
        return min(rivals, key=lambda r: self._values(r, history[r])[1], default=None)

    def _item_order(self, history: History) -> list[int]:
        """The rule's order, once full reuse is known; until then items come as they are."""
        full_reuse = history[self.space.empty]
        if self._order is None and full_reuse.is_complete:
            losses = full_reuse.losses(range(self.num_items), self.settings.loss)
            self._order = self.settings.racing.order(losses, self.settings.seed)
        return self._order or list(range(self.num_items))

    def _values(self, plan: ReusePlan, seen: PlanHistory) -> tuple[float, float]:
        losses = seen.losses(range(self.num_items), self.settings.loss)
        return float(plan.num_recomputed), float(losses.mean())

    def _history(self) -> dict[ReusePlan, PlanHistory]:
        return self._reader.read(self.study.get_trials(deepcopy=False))

    def _used(self, history: History) -> float:
        return sum(self.plan_cost(plan) * len(seen.results) for plan, seen in history.items())

    def _is_exhausted(self, history: History) -> bool:
        settled = sum(seen.is_settled for seen in history.values())
        return settled == len(self.space.plans)

    def _retry_failed(self, history: History) -> None:
        """Queue plans whose worker was stopped or failed; nothing is evaluated twice."""
        for plan, seen in history.items():
            if not (seen.is_settled or seen.running or seen.is_waiting):
                self.study.enqueue_trial(self.space.params_of(plan))

    def _unstick(self, history: History) -> None:
        """Queue an unknown plan after too many known ones, for samplers that see only integers."""
        if self._repeats < _MAX_REPEATS:
            return
        unseen = [plan for plan in self.space.plans if plan not in history]
        if unseen:
            rng = np.random.default_rng([self.settings.seed, self.settings.worker, len(history)])
            self._repeats = 0
            self.study.enqueue_trial(self.space.params_of(unseen[rng.integers(len(unseen))]))
        elif any(seen.running for seen in history.values()):
            time.sleep(_WAIT_SECONDS)  # the last plans are in other workers' hands

    def _enqueue_missing(self, plans: Sequence[ReusePlan]) -> None:
        history = self._history()
        for plan in dict.fromkeys(plans):
            if plan not in history:
                self.study.enqueue_trial(self.space.params_of(plan))
