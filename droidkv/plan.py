"""Which layers a receiver recomputes, and what it does to the E cache on entry. No torch here."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Literal, get_args

from droidkv.errors import PlanError

Operator = Literal["copy", "stitch"]
OPERATORS: tuple[Operator, ...] = get_args(Operator)

# Six digits: Python refuses to read an integer of thousands, and no model has a million layers.
_PLAN_TEXT = re.compile(
    r"(\[)?\s*(\d{1,6})\s*[,:]\s*(\d{1,6})\s*(?(1)\))\s*(?:\+\s*(\w+))?"  # both or no bracket
)


@dataclass(frozen=True, order=True)
class LayerGroup:
    """Contiguous decoder layers `[start, stop)`, half-open.

    Raises:
        PlanError: Not `0 <= start <= stop`.
    """

    start: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.stop:
            raise PlanError(
                f"expected a half-open layer group with 0 <= start <= stop, "
                f"got start={self.start}, stop={self.stop}"
            )

    def __len__(self) -> int:
        return self.stop - self.start

    def __contains__(self, layer: int) -> bool:
        return self.start <= layer < self.stop

    def __str__(self) -> str:
        return f"[{self.start},{self.stop})"

    @property
    def layers(self) -> range:
        return range(self.start, self.stop)


@dataclass(frozen=True, order=True)
class ReusePlan:
    """The group whose prefix KV the receiver recomputes, and the operator on E at its start.

    Plans are canonical, so that equal plans compare equal: every empty group is `[0,0)`, and a
    plan that reads no E (empty, or starting at layer 0) always has the operator `copy`.

    Args:
        group: Layers to recompute. Empty = full reuse, `[0, L)` = full prefill.
        operator: `copy` takes the sender's E as it is (DroidSpeak), `stitch` maps it first.

    Raises:
        PlanError: The operator is not a known one.
    """

    group: LayerGroup
    operator: Operator = "copy"

    def __post_init__(self) -> None:
        if self.operator not in OPERATORS:
            raise PlanError(f"expected an operator of {OPERATORS}, got {self.operator!r}")
        if len(self.group) == 0:
            object.__setattr__(self, "group", LayerGroup(0, 0))
        if self.group.start == 0:
            object.__setattr__(self, "operator", "copy")

    def __str__(self) -> str:
        return str(self.group) if self.operator == "copy" else f"{self.group}+{self.operator}"

    @property
    def num_recomputed(self) -> int:
        """Number of layers whose prefix KV the receiver computes itself."""
        return len(self.group)

    @property
    def transition(self) -> int | None:
        """The layer at which the receiver needs the sender's E, or None where it needs none."""
        return self.group.start or None

    def is_of(self, operators: Collection[Operator]) -> bool:
        """Whether it is of one of these families; a plan that reads no E belongs to all."""
        return self.operator in operators or self.transition is None

    def check(self, num_layers: int) -> ReusePlan:
        """Return the plan itself if it fits a model of `num_layers` layers.

        Raises:
            PlanError: The group reaches past the last layer.
        """
        if self.group.stop > num_layers:
            raise PlanError(
                f"expected a layer group within [0,{num_layers}), got {self.group}; "
                f"the model has {num_layers} decoder layers"
            )
        return self

    @classmethod
    def of(cls, start: int, stop: int, operator: Operator = "copy") -> ReusePlan:
        return cls(LayerGroup(start, stop), operator)

    @classmethod
    def parse(cls, text: str, num_layers: int) -> ReusePlan:
        """Read `[12,24)`, `12:24`, `[12,24)+stitch`, `none` (full reuse) or `all` (full prefill).

        Raises:
            PlanError: The text is none of these, or the group is out of range.
        """
        word = text.strip().lower()
        if word == "none":
            return cls.of(0, 0)
        if word == "all":
            return cls.of(0, num_layers)
        match = _PLAN_TEXT.fullmatch(word)
        if match is None:
            raise PlanError(
                f"expected a plan like '[12,24)', '12:24', '[12,24)+stitch', 'none' or 'all', "
                f"got {text!r}"
            )
        _, start, stop, operator = match.groups()
        if operator is not None and operator not in OPERATORS:
            raise PlanError(f"expected an operator of {OPERATORS}, got {operator!r} in {text!r}")
        return cls(LayerGroup(int(start), int(stop)), operator or "copy").check(num_layers)


def all_plans(
    num_layers: int, granularity: int = 1, operators: Iterable[Operator] = ("copy",)
) -> list[ReusePlan]:
    """Every plan whose borders are multiples of `granularity` (and the last layer).

    With `granularity` 1 and one operator these are `L(L+1)/2 + 1` plans: the empty one first, then
    by operator, start and stop. Plans that an operator leaves unchanged appear once.

    Raises:
        PlanError: `num_layers` or `granularity` is below 1.
    """
    if num_layers < 1 or granularity < 1:
        raise PlanError(
            f"expected num_layers >= 1 and granularity >= 1, got {num_layers} and {granularity}"
        )
    borders = [*range(0, num_layers, granularity), num_layers]
    plans = [ReusePlan.of(0, 0)]
    for operator in operators:
        for start in borders[:-1]:
            plans += [ReusePlan.of(start, stop, operator) for stop in borders if stop > start]
    return list(dict.fromkeys(plans))
