"""What a search works on: the space of plans, the thing that evaluates one, what it minimises."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, Protocol, TypeAlias, get_args

from droidkv.errors import PlanError, unknown_name
from droidkv.plan import Operator, ReusePlan, all_plans

Loss = Literal["kl", "disagreement", "top1_error"]
LOSSES: tuple[Loss, ...] = get_args(Loss)


class Drift(Protocol):
    """What one plan does to one item. `droidkv.evaluate.TeacherForced` is one; no torch here."""

    @property
    def kl(self) -> float: ...
    @property
    def nll(self) -> float: ...
    @property
    def top1(self) -> float: ...
    @property
    def agrees(self) -> bool: ...


@dataclass(frozen=True)
class ItemDrift:
    """A `Drift` read back from a study or a table; fields as in `TeacherForced`."""

    kl: float
    nll: float
    top1: float
    agrees: bool


Evaluate: TypeAlias = Callable[[ReusePlan, int], Drift]
"""Evaluates a plan on the item of an index. The same plan and index must give the same."""

PlanCost: TypeAlias = Callable[[ReusePlan], float]
"""What evaluating a plan on one item uses up of the budget."""


def one_evaluation(plan: ReusePlan) -> float:
    """The default unit of a budget: one plan on one item."""
    return 1.0


def layer_passes(num_layers: int, prefix_tokens: float, forced_tokens: float) -> PlanCost:
    """A budget in passes of one layer over one prefix.

    Args:
        num_layers: Layers of the model; all of them read the forced tokens.
        prefix_tokens: Mean length of the items' prefixes, which a plan's group reads.
        forced_tokens: Mean length of suffix and answer.
    """
    return lambda plan: plan.num_recomputed + num_layers * forced_tokens / prefix_tokens


def item_loss(drift: Drift, loss: Loss) -> float:
    """One item's loss, never negative: what lets a plan be stopped for sure before its last item.

    Raises:
        PlanError: There is no such loss.
    """
    match loss:
        case "kl":
            return max(drift.kl, 0.0)  # in this order NaN stays NaN
        case "disagreement":
            return 0.0 if drift.agrees else 1.0
        case "top1_error":
            return 1.0 - drift.top1
    raise PlanError(unknown_name("loss", loss, LOSSES))


@dataclass(frozen=True)
class SearchSpace:
    """All plans of a model, as integer parameters `start` and `length`.

    Where there is a choice of operators, `operator` is a third one, of categories. A length that
    reaches past the last layer ends there, so that every combination is a plan.

    Args:
        num_layers: Layers of the model.
        operators: Families of plans to search.
        granularity: Starts and lengths are multiples of it.

    Raises:
        PlanError: A number is below 1, or there is no operator.
    """

    num_layers: int
    operators: tuple[Operator, ...] = ("copy",)
    granularity: int = 1

    def __post_init__(self) -> None:
        if not self.operators:
            raise PlanError("expected at least one operator to search, got none")
        if self.num_layers < 1 or not 1 <= self.granularity <= self.num_layers:
            raise PlanError(
                f"expected num_layers >= 1 and 1 <= granularity <= num_layers, "
                f"got {self.num_layers} and {self.granularity}"
            )

    @cached_property
    def plans(self) -> tuple[ReusePlan, ...]:
        """Every plan once: the empty one, then by operator, start and stop."""
        return tuple(all_plans(self.num_layers, self.granularity, self.operators))

    @property
    def empty(self) -> ReusePlan:
        return ReusePlan.of(0, 0)

    @property
    def full(self) -> ReusePlan:
        return ReusePlan.of(0, self.num_layers)

    @property
    def baselines(self) -> tuple[ReusePlan, ReusePlan]:
        """Full reuse and full prefill, which all other plans are held against."""
        return self.empty, self.full

    @property
    def ranges(self) -> dict[str, tuple[int, int]]:
        """First and last value of each integer parameter; the step is `granularity`."""
        last = (self.num_layers - 1) // self.granularity * self.granularity
        return {"start": (0, last), "length": (0, last + self.granularity)}

    def plan_of(self, params: Mapping[str, Any]) -> ReusePlan:
        """The plan of a trial's parameters."""
        start = params["start"]
        stop = min(start + params["length"], self.num_layers)
        return ReusePlan.of(start, stop, params.get("operator", self.operators[0]))

    def params_of(self, plan: ReusePlan) -> dict[str, Any]:
        """Parameters that give the plan.

        Raises:
            PlanError: The plan is not in the space.
        """
        if plan not in self._indices:
            raise PlanError(
                f"expected a plan of {self.num_layers} layers in steps of {self.granularity} by "
                f"{', '.join(self.operators)}, got {plan}"
            )
        steps = -(-plan.num_recomputed // self.granularity)
        params: dict[str, Any] = {"start": plan.group.start, "length": steps * self.granularity}
        if len(self.operators) > 1:
            params["operator"] = plan.operator
        return params

    def index(self, plan: ReusePlan) -> int:
        """Where the plan stands in `plans`."""
        return self._indices[plan]

    @cached_property
    def _indices(self) -> dict[ReusePlan, int]:
        return {plan: index for index, plan in enumerate(self.plans)}
