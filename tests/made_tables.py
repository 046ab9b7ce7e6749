"""Made-up exact sweeps for tests of the search."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np

from droidkv.plan import Operator, ReusePlan, all_plans
from droidkv.search import (
    BudgetedSearch,
    Drift,
    DriftTable,
    ItemDrift,
    NoRace,
    SearchSettings,
    SearchSpace,
)


def made_table(
    num_layers: int = 10,
    num_items: int = 6,
    seed: int = 0,
    operators: tuple[Operator, ...] = ("copy",),
) -> DriftTable:
    """A few layers matter, entering late costs, stitching helps, items differ in difficulty."""
    rng = np.random.default_rng(seed)
    weights = 0.2 + rng.gamma(0.5, 1.0, num_layers)
    weights /= weights.sum()
    difficulty = rng.gamma(2.0, 1.0, num_items)
    rows = {}
    for plan in all_plans(num_layers, operators=operators):
        recomputed = np.zeros(num_layers, dtype=bool)
        recomputed[plan.group.start : plan.group.stop] = True
        entry = 0.2 * plan.group.start / num_layers * 0.8**plan.num_recomputed
        entry *= (plan.num_recomputed > 0) * (0.3 if plan.operator == "stitch" else 1.0)
        damage = 3 * (weights[~recomputed].sum() + entry) ** 2
        kls = damage * difficulty * np.exp(0.2 * rng.standard_normal(num_items)) + 1e-9
        rows[plan] = tuple(
            ItemDrift(kl, kl + 0.1, 1.0 if kl < 0.2 else 0.5, kl < 0.2) for kl in kls.tolist()
        )
    return DriftTable(rows)


def search_worker(file: Path, worker: int, budget: int, seconds_per_call: float) -> None:
    """A process of a search over a table of 8 layers; here, since a spawned one imports it."""
    table = made_table(8)

    def evaluate(plan: ReusePlan, item: int) -> Drift:
        time.sleep(seconds_per_call)
        return table(plan, item)

    settings = SearchSettings(racing=NoRace(), worker=worker)
    BudgetedSearch(SearchSpace(8), evaluate, 6, settings, file).run(budget)
