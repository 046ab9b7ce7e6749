"""From a profile's records to points in the plane of cost and loss; frontiers are derived here.

Every objective and every cost is turned to "smaller is better" in this file and nowhere else.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from droidkv.costs import plan_bytes, prefill_flops
from droidkv.errors import CalibrationError, ProfileError, unknown_name
from droidkv.frontier import Measurement, pareto_front
from droidkv.plan import OPERATORS, Operator, ReusePlan
from droidkv.profile import ItemRecord, NoiseFloor, PlanRecord, Profile
from droidkv.quality import (
    LEAST_SCORE,
    Array,
    Interval,
    above_floor,
    agreement_rate,
    percentile_interval,
    resample_weights,
    score_loss,
)
from droidkv.ttft import Calibration, Order, predict_ttft_seconds

Objective = Literal["score", "kl", "nll", "disagreement"]
OBJECTIVES: tuple[Objective, ...] = get_args(Objective)
OBJECTIVE_LABELS: dict[Objective, str] = {
    "score": "score lost, % of the full prefill's",
    "kl": "KL(full prefill || plan), nats per token",
    "nll": "NLL above the full prefill's, nats per token",
    "disagreement": "share of items whose answer changes",
}
Cost = Literal["layers", "flops", "bytes", "ttft"]
COSTS: tuple[Cost, ...] = get_args(Cost)
COST_LABELS: dict[Cost, str] = {
    "layers": "layers recomputed",
    "flops": "operations to the first token",
    "bytes": "bytes loaded",
    "ttft": "predicted seconds to the first token",
}


@dataclass(frozen=True)
class Workload:
    """A request whose cost is asked for.

    Attributes:
        prefix_tokens: n, tokens both models share.
        suffix_tokens: m, tokens only the receiver sees.
        calibration: The machine; needed for the cost `ttft` only.
        bandwidth_bytes_per_second: The link; None = the calibrated load alone.
        order: How load and compute are arranged.
    """

    prefix_tokens: int
    suffix_tokens: int
    calibration: Calibration | None = None
    bandwidth_bytes_per_second: float | None = None
    order: Order = "overlap"

    @classmethod
    def of_items(
        cls,
        profile: Profile,
        calibration: Calibration | None = None,
        bandwidth_bytes_per_second: float | None = None,
    ) -> Workload:
        """A request as long as the profile's items are on average."""
        prefix = sum(item.prefix_tokens for item in profile.items)
        suffix = sum(item.suffix_tokens for item in profile.items)
        n = profile.num_items
        return cls(round(prefix / n), round(suffix / n), calibration, bandwidth_bytes_per_second)


def default_objective(profile: Profile) -> Objective:
    """`score` where the receiver's full prefill scores at all, else `kl`."""
    full = sum(item.full_score for item in profile.items) / profile.num_items
    return "score" if full >= LEAST_SCORE else "kl"


def plan_cost(profile: Profile, plan: ReusePlan, cost: Cost, workload: Workload) -> float:
    """What a plan costs on a request.

    Raises:
        CalibrationError: The cost is `ttft` and the workload has no calibration, or one of another
            model shape.
        ProfileError: There is no such cost.
    """
    n, m = workload.prefix_tokens, workload.suffix_tokens
    rank = profile.stitch.rank if profile.stitch else 0
    match cost:
        case "layers":
            return plan.num_recomputed
        case "flops":
            return prefill_flops(profile.shape, plan, n, m, rank)
        case "bytes":
            return plan_bytes(profile.shape, plan, n)
        case "ttft":
            if workload.calibration is None:
                raise CalibrationError(
                    "expected a calibration to predict seconds, got none; run `droidkv calibrate`, "
                    "or use the cost 'layers', 'flops' or 'bytes'"
                )
            return predict_ttft_seconds(
                profile.shape,
                plan,
                n,
                m,
                workload.calibration,
                workload.bandwidth_bytes_per_second,
                workload.order,
                rank,
            )
    raise ProfileError(unknown_name("cost", cost, COSTS))


def measure(
    profile: Profile,
    objective: Objective = "score",
    cost: Cost = "layers",
    workload: Workload | None = None,
    operators: Collection[Operator] = OPERATORS,
) -> list[Measurement]:
    """Every measured plan as a point of cost and loss, in the profile's order.

    Args:
        profile: The profile.
        objective: What a loss is: the relative loss of the score in percent (ties decided by KL),
            the KL or NLL in nats per token, or the share of items whose answer changes.
        cost: What a cost is.
        workload: The request whose cost it is; None = one as long as the items are on average.
        operators: Families of plans to keep. Plans that read no E belong to all of them.

    Raises:
        ProfileError: There is no such objective or cost, or the objective is `score` and the full
            prefill scores 0 on every item.
        CalibrationError: See `plan_cost`.
    """
    if objective not in OBJECTIVES:
        raise ProfileError(unknown_name("objective", objective, OBJECTIVES))
    workload = workload or Workload.of_items(profile)
    weights = resample_weights([item.group for item in profile.items])
    points = []
    for record in profile.measurements:
        if not record.plan.is_of(operators):
            continue
        interval = _interval(profile.items, record, objective, weights)
        losses = _losses(profile.items, record)
        points.append(
            Measurement(
                plan=record.plan,
                cost=plan_cost(profile, record.plan, cost, workload),
                loss=above_floor(losses[objective], _floor(profile.noise_floor, objective)),
                tie_break=losses["disagreement" if objective == "kl" else "kl"],
                interval=interval,
                num_items=profile.num_items,
                num_undecoded=record.score.count(None) if objective == "score" else 0,
                losses=losses,
            )
        )
    return points


def item_losses(profile: Profile, objective: Objective) -> tuple[Array, Array]:
    """What every plan loses on every item, and what there is to lose.

    Over any of the items a plan's loss, in the objective's unit and without the noise floor, is
    the sum of the one by the sum of the other.

    Returns:
        `[num_plans, num_items]` in the profile's order, and `[num_items]`.
    """
    rows = [_item_losses(profile.items, record, objective) for record in profile.measurements]
    whole = [item.full_score / 100 if objective == "score" else 1.0 for item in profile.items]
    return np.array(rows).reshape(-1, profile.num_items), np.array(whole)


def measure_noise_floor(items: Sequence[ItemRecord], exact: PlanRecord) -> NoiseFloor:
    """The floor that a plan which is exact by construction sets: its worst item.

    Args:
        items: The profile's items.
        exact: Record of `[0, L)` through the partial-prefill path, or of any plan where sender and
            receiver are one model. What it scores where its answer was not decoded is not known:
            such items say nothing about the floor of the score.
    """
    pairs = zip(items, exact.score, strict=True)
    known = [(item.full_score, score) for item, score in pairs if score is not None]
    full = sum(full for full, _ in known)
    lost = full - sum(score for _, score in known)
    return NoiseFloor(
        kl=max(0.0, *exact.kl),
        nll=max(0.0, *_nll_above_full(items, exact)),
        disagreement=_losses(items, exact)["disagreement"],
        relative_percent=max(0.0, 100 * lost / full) if full >= LEAST_SCORE else 0.0,
    )


@dataclass(frozen=True)
class PlanChange:
    """A plan that stands on one profile's frontier and not on the other's, or moved along it.

    Attributes:
        plan: The plan.
        before: Its point in the first profile; None = not measured there.
        after: Its point in the second profile; None = not measured there.
        was_on_front: Whether it stood on the first frontier.
        is_on_front: Whether it stands on the second.
    """

    plan: ReusePlan
    before: Measurement | None
    after: Measurement | None
    was_on_front: bool
    is_on_front: bool


def diff_fronts(
    before: Profile,
    after: Profile,
    objective: Objective = "score",
    cost: Cost = "layers",
    workload: Workload | None = None,
) -> list[PlanChange]:
    """Plans that entered or left the frontier between two profiles, by plan.

    Args:
        before: The first profile.
        after: The second profile, of models with as many layers.
        objective: See `measure`.
        cost: See `measure`.
        workload: See `measure`; None = that of the first profile's items, for both.

    Raises:
        ProfileError: The layer counts differ, or as in `measure`.
    """
    if before.num_layers != after.num_layers:
        raise ProfileError(
            f"expected two profiles of models with as many layers, got {before.num_layers} and "
            f"{after.num_layers}; their plans are not comparable"
        )
    workload = workload or Workload.of_items(before)
    old, new = (
        {m.plan: m for m in measure(profile, objective, cost, workload)}
        for profile in (before, after)
    )
    was, now = ({m.plan for m in pareto_front(points.values())} for points in (old, new))
    return [
        PlanChange(plan, old.get(plan), new.get(plan), plan in was, plan in now)
        for plan in sorted(was ^ now)
    ]


def _losses(items: Sequence[ItemRecord], record: PlanRecord) -> dict[str, float]:
    full = np.array([item.full_score for item in items])
    plan = np.array([score or 0.0 for score in record.score])
    losses = {
        "kl": float(np.mean(record.kl)),
        "nll": float(np.mean(_nll_above_full(items, record))),
        "disagreement": 1 - sum(record.agrees) / len(items),
    }
    if full.mean() >= LEAST_SCORE:
        losses["score"] = 100 * float((full - plan).sum() / full.sum())
    return losses


def _nll_above_full(items: Sequence[ItemRecord], record: PlanRecord) -> list[float]:
    return [nll - item.full_nll for nll, item in zip(record.nll, items, strict=True)]


def _item_losses(items: Sequence[ItemRecord], record: PlanRecord, objective: Objective) -> Array:
    match objective:
        case "score":
            pairs = zip(items, record.score, strict=True)
            return np.array([item.full_score - (score or 0.0) for item, score in pairs])
        case "kl":
            return np.array(record.kl)
        case "nll":
            return np.array(_nll_above_full(items, record))
        case "disagreement":
            return np.array([float(not agrees) for agrees in record.agrees])


def _floor(floor: NoiseFloor | None, objective: Objective) -> float:
    if floor is None:
        return 0.0
    field = "relative_percent" if objective == "score" else objective
    return float(getattr(floor, field))


def _interval(
    items: Sequence[ItemRecord], record: PlanRecord, objective: Objective, weights: Array
) -> Interval:
    match objective:
        case "score":
            full = [item.full_score for item in items]
            return score_loss(full, record.score, weights).relative_interval
        case "kl":
            return percentile_interval(weights @ np.array(record.kl))
        case "nll":
            return percentile_interval(weights @ np.array(_nll_above_full(items, record)))
        case "disagreement":
            agreement = agreement_rate(record.agrees).interval
            return Interval(1 - agreement.high, 1 - agreement.low)
