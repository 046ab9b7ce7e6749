"""Who proposes the next plan: Optuna's samplers, and three that know the space of plans.

Optuna's see two integers with a rugged border. Ours are Optuna samplers too, so that any of them
can join any study; they see the finite list of plans, never propose one twice, and know its cost.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.samplers import BaseSampler
from optuna.trial import FrozenTrial

from droidkv.errors import require_extra
from droidkv.plan import ReusePlan, all_plans
from droidkv.search.base import Loss, SearchSpace, item_loss
from droidkv.search.history import HistoryReader, PlanHistory
from droidkv.search.regret import log_losses, loss_curve
from droidkv.search.surrogate import (
    Surrogate,
    empty_features,
    expected_gain,
    fit_surrogate,
    plan_features,
)

# Losses below this share of full reuse's are equal to the surrogate: it need not model rounding.
LEAST_SHARE = 1e-3
# Losses have ridges that a smooth process does not expect: every third plan is taken from the grid.
EXPLORE_EVERY = 3
_FEWEST_OBSERVED = 6
_REFIT_GROWTH = 1.25


def distributions(space: SearchSpace) -> dict[str, BaseDistribution]:
    """The parameters of a study over the space."""
    parameters: dict[str, BaseDistribution] = {
        name: IntDistribution(low, high, step=space.granularity)
        for name, (low, high) in space.ranges.items()
    }
    if len(space.operators) > 1:
        parameters["operator"] = CategoricalDistribution(space.operators)
    return parameters


class PlanSampler(BaseSampler):
    """A sampler that chooses from the list of plans.

    Args:
        space: The plans.
        num_items: Items of a complete plan.
        loss: What is minimised besides layers.
        seed: Of the sampler's choices; workers of one study should differ in it.
    """

    def __init__(self, space: SearchSpace, num_items: int, loss: Loss, seed: int) -> None:
        self.space = space
        self.num_items = num_items
        self.loss: Loss = loss
        self.seed = seed
        self._reader = HistoryReader(space, num_items)

    @abstractmethod
    def propose(
        self, history: Mapping[ReusePlan, PlanHistory], rng: np.random.Generator
    ) -> ReusePlan:
        """The plan to take up next; one without history, as long as there is one."""

    def infer_relative_search_space(
        self, study: optuna.Study, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        return distributions(self.space)

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        trials = study.get_trials(deepcopy=False)
        history = self._reader.read(trials)
        rng = np.random.default_rng([self.seed, trial.number])
        return self.space.params_of(self.propose(history, rng))

    def sample_independent(
        self,
        study: optuna.Study,
        trial: FrozenTrial,
        param_name: str,
        param_distribution: BaseDistribution,
    ) -> Any:
        # Optuna asks for a parameter alone where a queued trial fixes only the others.
        return self.sample_relative(study, trial, {})[param_name]

    def unseen(self, history: Mapping[ReusePlan, PlanHistory]) -> list[ReusePlan]:
        """Plans without history; all plans once there are none left."""
        return [plan for plan in self.space.plans if plan not in history] or [*self.space.plans]


class UniformSampler(PlanSampler):
    """Any plan not yet taken up, each as likely: the baseline."""

    def propose(
        self, history: Mapping[ReusePlan, PlanHistory], rng: np.random.Generator
    ) -> ReusePlan:
        unseen = self.unseen(history)
        return unseen[rng.integers(len(unseen))]


class CoarseToFineSampler(PlanSampler):
    """A grid of layer groups, then one twice as fine, and so on; random within each: the baseline
    of those who profile every second or fourth layer."""

    def propose(
        self, history: Mapping[ReusePlan, PlanHistory], rng: np.random.Generator
    ) -> ReusePlan:
        unseen = set(self.unseen(history))
        step = self.space.granularity
        while step * 2 < self.space.num_layers:
            step *= 2
        while step >= self.space.granularity:
            grid = all_plans(self.space.num_layers, step, self.space.operators)
            left = [plan for plan in grid if plan in unseen]
            if left:
                return left[rng.integers(len(left))]
            step //= 2
        return min(unseen)


class FrontierSampler(PlanSampler):
    """The plan expected to push the frontier most, by a Gaussian process over all plans; every
    third plan is the grid's.

    Plans that lost a race are observed too: their loss is taken as full reuse's, times how they
    compare with it on the items they were evaluated on.
    """

    def __init__(self, space: SearchSpace, num_items: int, loss: Loss, seed: int) -> None:
        super().__init__(space, num_items, loss, seed)
        self._first = CoarseToFineSampler(space, num_items, loss, seed)
        self._features = plan_features(space.plans, space.num_layers)
        self._empty_features = empty_features(space.operators)
        self._layers = np.array([plan.num_recomputed for plan in space.plans], dtype=float)
        self._fitted: tuple[int, Surrogate] | None = None

    def propose(
        self, history: Mapping[ReusePlan, PlanHistory], rng: np.random.Generator
    ) -> ReusePlan:
        full_reuse = history.get(self.space.empty)
        if full_reuse is None or not full_reuse.is_complete:
            return self._first.propose(history, rng)
        reference = self._mean_loss(full_reuse)
        # The full prefill loses nothing by definition, and would dwarf all other differences.
        known = (self.space.empty, self.space.full)
        observed = {p: h for p, h in history.items() if h.results and p not in known}
        unseen = [plan for plan in self.space.plans if plan not in history]
        explores = len(history) % EXPLORE_EVERY == 0
        if len(observed) < _FEWEST_OBSERVED or explores or not unseen or reference <= 0:
            return self._first.propose(history, rng)
        floor = LEAST_SHARE * reference
        estimates = [self._estimate(each, full_reuse, reference) for each in observed.values()]
        share = np.array([len(each.results) / self.num_items for each in observed.values()])
        # Wherever it starts, an empty group is full reuse: short groups lose about as much.
        num_empty = len(self._empty_features)
        values = log_losses(np.array([reference] * num_empty + estimates), floor)
        share = np.concatenate([np.ones(num_empty), share])
        features = np.concatenate([self._empty_features, self._features[self._rows(observed)]])
        rows = self._rows(unseen)
        prediction = self._surrogate(features, values, share).predict(
            features, values, share, self._features[rows]
        )
        complete = {p: self._mean_loss(h) for p, h in history.items() if h.is_complete}
        points = ((plan.num_recomputed, loss) for plan, loss in complete.items())
        curve = log_losses(loss_curve(points, self.space.num_layers), floor)
        return unseen[int(expected_gain(prediction, self._layers[rows], curve).argmax())]

    def _surrogate(self, features: Any, values: Any, share: Any) -> Surrogate:
        # Fitted to the first plans of a study alone, so that one resumed fits as one that was not.
        size = _FEWEST_OBSERVED
        while size * _REFIT_GROWTH <= len(values):
            size = int(size * _REFIT_GROWTH)
        if self._fitted is None or self._fitted[0] != size:
            self._fitted = size, fit_surrogate(features[:size], values[:size], share[:size])
        return self._fitted[1]

    def _estimate(self, plan: PlanHistory, full_reuse: PlanHistory, reference: float) -> float:
        items = [*plan.results]
        same = float(full_reuse.losses(items, self.loss).mean())
        mine = float(plan.losses(items, self.loss).mean())
        return reference * mine / same if same > 0 else mine

    def _mean_loss(self, plan: PlanHistory) -> float:
        losses = [item_loss(drift, self.loss) for drift in plan.results.values()]
        return sum(losses) / len(losses)

    def _rows(self, plans: Any) -> list[int]:
        return [self.space.index(plan) for plan in plans]


def _gp(space: SearchSpace, num_items: int, loss: Loss, seed: int) -> BaseSampler:
    require_extra("scipy", "search")
    return optuna.samplers.GPSampler(seed=seed)


Factory = Callable[[SearchSpace, int, Loss, int], BaseSampler]
SAMPLERS: Mapping[str, Factory] = {
    "frontier": FrontierSampler,
    "grid": CoarseToFineSampler,
    "random": UniformSampler,
    "tpe": lambda space, items, loss, seed: optuna.samplers.TPESampler(seed=seed),
    "tpe-multivariate": lambda space, items, loss, seed: optuna.samplers.TPESampler(
        seed=seed, multivariate=True, constant_liar=True
    ),
    "nsga2": lambda space, items, loss, seed: optuna.samplers.NSGAIISampler(
        population_size=16, seed=seed
    ),
    "gp": _gp,
}


def make_sampler(
    name: str, space: SearchSpace, num_items: int, loss: Loss, seed: int
) -> BaseSampler:
    """A sampler by its name in `SAMPLERS`.

    Raises:
        MissingExtraError: It needs a package that is not installed.
    """
    return SAMPLERS[name](space, num_items, loss, seed)
