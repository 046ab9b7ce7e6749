"""What `droidkv.policy.pick` decided, with its reasons in words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from droidkv.frontier import Measurement, interval_allows
from droidkv.objectives import Objective, Workload
from droidkv.plan import ReusePlan
from droidkv.quality import Interval, share_bound

Bound = Literal["max_loss", "slo_ttft", "break_even", "nothing"]
_UNITS: dict[Objective, str] = {
    "score": " %",
    "kl": " nats of KL",
    "nll": " nats of NLL",
    "disagreement": " of the items",
}


@dataclass(frozen=True)
class Choice:
    """The plan to run, and why.

    Attributes:
        chosen: The plan's point. Its cost is in predicted seconds if there is a calibration, else
            in recomputed layers.
        full: The point of the receiver's own full prefill, which loses nothing by definition unless
            the profile has another model as reference.
        objective: What the loss is measured in.
        max_loss: The limit on the loss.
        slo_ttft_seconds: The limit on the time to the first token, if any.
        workload: The request.
        bound_by: The limit without which another plan would have been chosen; `break_even` = the
            full prefill is faster than every good enough plan.
        claim_holds: Whether the items allow the claim that the loss is within the limit.
        lost_items: Where the interval tells too little, as of few items that are lost wholly: how
            many are, of how many that the full prefill gets right; those over one prefix are one.
            An exact bound is then asked of the claim, too.
        good_reuse: The cheapest reusing plan within `max_loss`, even if slower than the full
            prefill; None = no plan is good enough.
        fast_reuse: If nothing meets both limits: the plan of least loss within the SLO.
        break_even_prefix_tokens: Shortest prefix from which on `chosen`, or else `good_reuse`, is
            predicted faster than the full prefill; None = never, or not known.
    """

    chosen: Measurement
    full: Measurement
    objective: Objective
    max_loss: float
    slo_ttft_seconds: float | None
    workload: Workload
    bound_by: Bound
    claim_holds: bool
    lost_items: tuple[int, int] | None
    good_reuse: Measurement | None
    fast_reuse: Measurement | None
    break_even_prefix_tokens: int | None

    @property
    def plan(self) -> ReusePlan:
        return self.chosen.plan

    @property
    def loss(self) -> float:
        return self.chosen.loss

    @property
    def interval(self) -> Interval:
        return self.chosen.interval

    @property
    def reuses(self) -> bool:
        """Whether anything is reused at all."""
        return self.plan != self.full.plan

    @property
    def predicted_ttft_seconds(self) -> float | None:
        """Predicted time to the first token, or None without a calibration."""
        return None if self.workload.calibration is None else self.chosen.cost

    @property
    def full_ttft_seconds(self) -> float | None:
        """The same for the full prefill."""
        return None if self.workload.calibration is None else self.full.cost

    @property
    def pays(self) -> bool | None:
        """Whether reuse is predicted faster than the full prefill; None without a calibration."""
        return None if self.workload.calibration is None else self.reuses

    @property
    def meets_max_loss(self) -> bool:
        """False only where another model is the reference, and even the full prefill loses more."""
        return self.loss <= self.max_loss

    @property
    def meets_slo(self) -> bool | None:
        """Whether the predicted time is within the SLO; None without one."""
        if self.slo_ttft_seconds is None:
            return None
        return self.chosen.cost <= self.slo_ttft_seconds

    @property
    def message(self) -> tuple[str, ...]:
        """The choice in words, line by line."""
        lines = [self._what(), *self.doubts, *self._how_fast(), self._why()]
        return tuple(line for line in lines if line)

    def to_json(self) -> dict[str, Any]:
        """The choice as JSON values."""
        return {
            "plan": str(self.plan),
            "num_recomputed": self.plan.num_recomputed,
            "objective": self.objective,
            "loss": self.loss,
            "interval": [self.interval.low, self.interval.high],
            "num_items": self.chosen.num_items,
            "num_undecoded": self.chosen.num_undecoded,
            "claim_holds": self.claim_holds,
            "bound_by": self.bound_by,
            "meets_max_loss": self.meets_max_loss,
            "meets_slo": self.meets_slo,
            "pays": self.pays,
            "predicted_ttft_seconds": self.predicted_ttft_seconds,
            "full_ttft_seconds": self.full_ttft_seconds,
            "break_even_prefix_tokens": self.break_even_prefix_tokens,
            "prefix_tokens": self.workload.prefix_tokens,
            "suffix_tokens": self.workload.suffix_tokens,
            "message": list(self.message),
        }

    def amount(self, loss: float) -> str:
        """A loss with its unit."""
        return f"{loss:.3g}{_UNITS[self.objective]}"

    def _what(self) -> str:
        num_layers, recomputed = self.full.plan.num_recomputed, self.plan.num_recomputed
        if not self.reuses:
            return f"{self.plan}: reuse nothing, the receiver prefills all {num_layers} layers"
        fewer = f" ({num_layers / recomputed:.2f}x fewer)" if recomputed else ""
        return (
            f"{self.plan}: recompute {recomputed} of {num_layers} layers{fewer}, "
            f"loss {self.amount(self.loss)} {self.interval} over {self.chosen.num_items} items"
        )

    @property
    def doubts(self) -> list[str]:
        """Why the items do not allow the claim that the loss is within the limit, line by line."""
        lines = []
        n = self.chosen.num_items
        if self.chosen.num_undecoded:
            lines.append(
                f"{self.chosen.num_undecoded} of {n} answers differ and were not decoded; "
                f"they count as 0"
            )
        if self.claim_holds:
            return lines
        hidden = 0.0 if self.lost_items is None else 100 * share_bound(*self.lost_items)
        if not interval_allows(self.chosen, self.max_loss):
            reason = f"the interval reaches {self.amount(self.interval.high)}"
        elif self.lost_items is not None and hidden > self.max_loss:
            num_lost, num_right = self.lost_items
            seen = f"{num_lost} of {num_right} items lost" if num_lost else "no loss seen"
            reason = f"{seen}, but {hidden:.2g} % could hide behind {num_right} items"
        else:
            return [*lines, "not certain: one prefix says nothing of others; measure more"]
        lines.append(
            f"not certain: {reason}, more than {self.amount(self.max_loss)}; measure more items"
        )
        return lines

    def _how_fast(self) -> list[str]:
        if self.workload.calibration is None:
            return []
        lines = [
            f"predicted {self.chosen.cost:.3g} s to the first token at "
            f"{self.workload.prefix_tokens} + {self.workload.suffix_tokens} tokens"
        ]
        if self.reuses:
            lines[0] += f"; full prefill {self.full.cost:.3g} s"
        if self.good_reuse is not None:
            plan = self.plan if self.reuses else self.good_reuse.plan
            pays = (
                "never pays on this machine and link"
                if self.break_even_prefix_tokens is None
                else f"pays from {self.break_even_prefix_tokens} prefix tokens on"
            )
            lines.append(f"{plan} {pays}")
        return lines

    def _why(self) -> str:
        if not self.meets_max_loss:
            return (
                f"bound by the loss: no plan, and not its own full prefill, loses "
                f"{self.amount(self.max_loss)} or less; this one loses least"
            )
        if self.slo_ttft_seconds is not None and not self.meets_slo:
            slo, loss = f"{self.slo_ttft_seconds:.3g} s", self.amount(self.max_loss)
            if self.fast_reuse is None:
                return f"no plan takes {slo} or less; this is the fastest that loses at most {loss}"
            return (
                f"no plan meets both {slo} and {loss}; this is the fastest that loses at most "
                f"{loss}, and within {slo} {self.fast_reuse.plan} loses least: "
                f"{self.amount(self.fast_reuse.loss)}"
            )
        match self.bound_by:
            case "slo_ttft":
                return "bound by the SLO: slower plans lose less"
            case "break_even":
                return "bound by break-even: the full prefill is faster than any good enough reuse"
            case "max_loss" if self.good_reuse is None:
                return f"bound by the loss: no reuse loses {self.amount(self.max_loss)} or less"
            case "max_loss":
                return f"bound by the loss: cheaper plans lose over {self.amount(self.max_loss)}"
            case "nothing":
                return "bound by nothing: no other plan is better within these limits"
