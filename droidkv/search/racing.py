"""When to stop evaluating a plan before its last item.

Optuna's pruners refuse studies of several objectives, so this is our own rule, on top: a plan is
stopped once a plan that recomputes no more layers and was measured on every item has beaten it.
Such a plan can never stand on the frontier, however many items follow.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np

from droidkv.errors import PlanError
from droidkv.quality import Array


class RacingRule(ABC):
    """Says when a plan has lost against a rival, and in which order items are worth evaluating."""

    @abstractmethod
    def has_lost(self, losses: Array, rival_losses: Array, num_items: int) -> bool:
        """Whether a plan need not be evaluated further.

        Args:
            losses: Of the plan, on the items evaluated so far; none is negative.
            rival_losses: Of the best plan that costs no more and is complete: on the same items
                first, then on the others, `[num_items]`.
            num_items: Items that a complete plan has.
        """

    @abstractmethod
    def order(self, full_reuse_losses: Array, seed: int) -> list[int]:
        """The order in which every plan's items are evaluated.

        Args:
            full_reuse_losses: Of the empty plan, which is evaluated first, `[num_items]`.
            seed: Of the study.
        """


class NoRace(RacingRule):
    """Every plan is evaluated on every item: the baseline."""

    def has_lost(self, losses: Array, rival_losses: Array, num_items: int) -> bool:
        return False

    def order(self, full_reuse_losses: Array, seed: int) -> list[int]:
        return list(range(len(full_reuse_losses)))


class SureRace(RacingRule):
    """Stop when the plan's mean can no longer get below the rival's: never wrong.

    Losses are not negative, so the sum so far bounds the sum in the end; a plan that can at best
    equal its rival has lost. Items that full reuse hurts most come first, because they bring the
    bound up soonest.
    """

    def has_lost(self, losses: Array, rival_losses: Array, num_items: int) -> bool:
        return len(losses) < num_items and bool(losses.sum() >= rival_losses.sum())

    def order(self, full_reuse_losses: Array, seed: int) -> list[int]:
        return np.argsort(-full_reuse_losses, kind="stable").tolist()  # type: ignore[no-any-return]


@dataclass(frozen=True)
class ConfidentRace(RacingRule):
    """Stop when the plan is surely, or very probably, worse than the rival.

    Both are measured on the same items, so the differences are compared: their mean, less
    `num_errors` standard errors, is a lower bound of the mean difference over all items. The
    standard error is that of drawing without replacement, and shrinks to 0 at the last item. Items
    come in a random order, as such a bound needs.

    Args:
        num_errors: Standard errors; more = fewer plans stopped by mistake.
        min_items: Items that are evaluated at least; 2 give a first standard error.

    Raises:
        PlanError: `num_errors` is negative, or `min_items` below 2.
    """

    num_errors: float = 2.0
    min_items: int = 3

    def __post_init__(self) -> None:
        if self.num_errors < 0 or self.min_items < 2:
            raise PlanError(
                f"expected num_errors >= 0 and min_items >= 2, got {self.num_errors} and "
                f"{self.min_items}"
            )

    def has_lost(self, losses: Array, rival_losses: Array, num_items: int) -> bool:
        if SureRace().has_lost(losses, rival_losses, num_items):
            return True
        k = len(losses)
        if not self.min_items <= k < num_items:
            return False
        differences = losses - rival_losses[:k]
        error = float(differences.std(ddof=1)) * math.sqrt((1 - k / num_items) / k)
        return float(differences.mean()) - self.num_errors * error > 0

    def order(self, full_reuse_losses: Array, seed: int) -> list[int]:
        rng = np.random.default_rng(seed)
        return rng.permutation(len(full_reuse_losses)).tolist()  # type: ignore[no-any-return]
