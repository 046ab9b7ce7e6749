"""Budgeted search for the frontier: a fraction of the evaluations of the exact sweep.

Importing this needs neither Optuna nor torch; names that need them are loaded when first used.
"""

from __future__ import annotations

from typing import Any

from droidkv.errors import require_extra
from droidkv.search.base import (
    LOSSES,
    Drift,
    Evaluate,
    ItemDrift,
    Loss,
    SearchSpace,
    layer_passes,
    one_evaluation,
)
from droidkv.search.racing import ConfidentRace, NoRace, RacingRule, SureRace
from droidkv.search.regret import Regret, loss_curve, regret
from droidkv.search.seeding import additive_plans
from droidkv.search.table import DriftTable

_LAZY = {
    "BudgetedSearch": "study",
    "FoundPlan": "study",
    "SearchResult": "study",
    "SearchSettings": "study",
    "SAMPLERS": "samplers",
}

__all__ = [
    "LOSSES",
    "SAMPLERS",
    "BudgetedSearch",
    "ConfidentRace",
    "Drift",
    "DriftTable",
    "Evaluate",
    "FoundPlan",
    "ItemDrift",
    "Loss",
    "NoRace",
    "RacingRule",
    "Regret",
    "SearchResult",
    "SearchSettings",
    "SearchSpace",
    "SureRace",
    "additive_plans",
    "layer_passes",
    "loss_curve",
    "one_evaluation",
    "regret",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    require_extra("optuna", "search")
    return getattr(require_extra(f"{__name__}.{_LAZY[name]}", "search"), name)
