"""An exact sweep as a thing to search: every search can be replayed on it without a model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from droidkv.errors import PlanError
from droidkv.plan import ReusePlan
from droidkv.quality import Array
from droidkv.records import PlanRecord
from droidkv.search.base import Drift, ItemDrift, Loss, item_loss
from droidkv.search.regret import loss_curve


@dataclass(frozen=True)
class DriftTable:
    """Results of every plan on every item; call it as an `Evaluate`.

    Attributes:
        rows: Plan -> one result per item.
        calls: Every plan and item asked for, in order.

    Raises:
        PlanError: There is no plan, or the plans have different numbers of items.
    """

    rows: Mapping[ReusePlan, tuple[Drift, ...]]
    calls: list[tuple[ReusePlan, int]] = field(default_factory=list, compare=False)

    def __post_init__(self) -> None:
        if len({len(row) for row in self.rows.values()}) != 1:
            raise PlanError("expected at least one plan, and as many items for each")

    @classmethod
    def of_records(cls, records: Iterable[PlanRecord]) -> DriftTable:
        """The table of a profile's measurements."""
        columns = {
            record.plan: zip(record.kl, record.nll, record.top1, record.agrees, strict=True)
            for record in records
        }
        return cls({plan: tuple(ItemDrift(*row) for row in rows) for plan, rows in columns.items()})

    @property
    def num_items(self) -> int:
        return len(next(iter(self.rows.values())))

    @property
    def num_pairs(self) -> int:
        """Evaluations of the exact search: plans times items."""
        return len(self.rows) * self.num_items

    def __call__(self, plan: ReusePlan, item: int) -> Drift:
        self.calls.append((plan, item))
        return self.rows[plan][item]

    def mean_loss(self, plan: ReusePlan, loss: Loss = "kl") -> float:
        """Mean loss of a plan over all items."""
        return float(np.mean([item_loss(drift, loss) for drift in self.rows[plan]]))

    def curve(
        self, num_layers: int, loss: Loss = "kl", plans: Iterable[ReusePlan] | None = None
    ) -> Array:
        """`loss_curve` of some plans, or of all."""
        chosen = self.rows if plans is None else plans
        points = ((plan.num_recomputed, self.mean_loss(plan, loss)) for plan in chosen)
        return loss_curve(points, num_layers)

    def completed(self, num_calls: int) -> list[ReusePlan]:
        """Plans that had every item after the first `num_calls` calls."""
        items = Counter(plan for plan, _ in set(self.calls[:num_calls]))
        return [plan for plan in self.rows if items[plan] == self.num_items]
