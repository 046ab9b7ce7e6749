"""Which plan to run: the cheapest good enough one, the best one fast enough, or none at all.

Pure: the same profile, limits and calibration give the same choice. A plan is chosen as the best
of many on the profile's own items, so its loss elsewhere tends to be a little larger.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Sequence

from droidkv.choice import Bound, Choice
from droidkv.confirmation import Evidence
from droidkv.errors import CalibrationError, ProfileError
from droidkv.frontier import Measurement, cheapest_within, interval_allows
from droidkv.objectives import Cost, Objective, Workload, measure, plan_cost
from droidkv.plan import OPERATORS, Operator, ReusePlan
from droidkv.profile import Profile
from droidkv.quality import Interval, share_bound
from droidkv.ttft import Calibration, Order, break_even_prefix_tokens

__all__ = ["DEFAULT_MAX_LOSS", "Choice", "pick", "pick_among"]

DEFAULT_MAX_LOSS = 5.0


def pick(
    profile: Profile,
    max_loss: float | None = None,
    slo_ttft_seconds: float | None = None,
    bandwidth_bytes_per_second: float | None = None,
    prefix_tokens: int | None = None,
    suffix_tokens: int | None = None,
    calibration: Calibration | None = None,
    operators: Collection[Operator] = OPERATORS,
    objective: Objective = "score",
    order: Order = "overlap",
) -> Choice:
    """Choose the plan to run for a request.

    Without an SLO it is the cheapest plan whose loss is within `max_loss`; with one it is the plan
    of least loss among those within both limits, or, where none is, the fastest within `max_loss`.
    Cheap means predicted seconds where there is a calibration, recomputed layers where there is
    none. The receiver's own full prefill loses nothing by definition and is always a candidate, so
    that a plan predicted slower than it is never chosen. Of a full-share receiver, which has
    another model as reference, the full prefill is a plan like any other; if no plan is within
    `max_loss`, the one of least loss is chosen.

    Args:
        profile: The profile of the pair.
        max_loss: Largest loss, in the objective's unit; for `score` percent of the full score, and
            5 of it if None. Other objectives have no such default.
        slo_ttft_seconds: Longest time to the first token.
        bandwidth_bytes_per_second: The link the cache comes over; None = the calibrated load.
        prefix_tokens: Tokens both models share; None = as the profile's items on average.
        suffix_tokens: Tokens only the receiver sees; None = as the profile's items on average.
        calibration: The machine; needed for an SLO or a bandwidth.
        operators: Families of plans that may be chosen.
        objective: What loss is.
        order: How load and compute are arranged.

    Raises:
        ProfileError: A limit is impossible, or see `measure`.
        CalibrationError: An SLO or a bandwidth without a calibration, or one of another shape.
    """
    max_loss = _loss_limit(objective, max_loss)
    _check_limits(slo_ttft_seconds, bandwidth_bytes_per_second, calibration)
    mean = Workload.of_items(profile)
    workload = Workload(
        mean.prefix_tokens if prefix_tokens is None else prefix_tokens,
        mean.suffix_tokens if suffix_tokens is None else suffix_tokens,
        calibration,
        bandwidth_bytes_per_second,
        order,
    )
    if workload.prefix_tokens < 1 or workload.suffix_tokens < 1:
        raise ProfileError(
            f"expected a prefix and a suffix of at least 1 token, got {workload.prefix_tokens} "
            f"and {workload.suffix_tokens}"
        )
    cost: Cost = "layers" if calibration is None else "ttft"
    measured = measure(profile, objective, cost, workload, operators)
    full = _full_prefill(profile, cost, workload, measured)
    reuse = [point for point in measured if point.plan != full.plan]
    good_reuse = cheapest_within(reuse, max_loss)
    candidates = [full, *reuse]
    cheapest = cheapest_within(candidates, max_loss) or _least_loss(candidates) or full
    chosen, fast_reuse = cheapest, None
    bound_by = _bound_by(cheapest, full, reuse, good_reuse)
    if slo_ttft_seconds is not None:
        in_time = [point for point in candidates if point.cost <= slo_ttft_seconds]
        fast_reuse = _least_loss(in_time)
        if fast_reuse is not None and fast_reuse.loss <= max_loss:
            chosen = fast_reuse
            bound_by = "nothing" if chosen == _least_loss(candidates) else "slo_ttft"
            fast_reuse = None
        else:
            bound_by = "slo_ttft"
    if chosen.loss > max_loss:
        bound_by = "max_loss"
    is_exact = chosen == full and profile.reference is None
    lost = _lost_items(profile, chosen) if objective == "score" and not is_exact else None
    bound = 0.0 if lost is None else 100 * share_bound(*lost)
    # Resampling a single prefix gives it alone, and an interval of no width.
    has_several = len({item.group for item in profile.items}) > 1
    is_sure = has_several and interval_allows(chosen, max_loss) and bound <= max_loss
    choice = Choice(
        chosen=chosen,
        full=full,
        objective=objective,
        max_loss=max_loss,
        slo_ttft_seconds=slo_ttft_seconds,
        workload=workload,
        bound_by=bound_by,
        claim_holds=is_exact or is_sure,
        lost_items=lost,
        good_reuse=good_reuse,
        fast_reuse=fast_reuse,
        break_even_prefix_tokens=None,
    )
    weighed = chosen if choice.reuses else good_reuse
    if calibration is None or weighed is None:
        return choice
    break_even = break_even_prefix_tokens(
        profile.shape,
        weighed.plan,
        workload.suffix_tokens,
        calibration,
        bandwidth_bytes_per_second,
        order,
        profile.stitch.rank if profile.stitch else 0,
    )
    return dataclasses.replace(choice, break_even_prefix_tokens=break_even)


def pick_among(
    evidence: Sequence[Evidence], choose: Callable[[Profile], Choice]
) -> tuple[Evidence, Choice]:
    """The best of what each file of measurements picks, and which file that is.

    Args:
        evidence: One or more files of one pair; each file's stitched plans have its own map.
        choose: `pick` with the limits and the workload, the same for all.
    """
    choices = [(each, choose(each.profile)) for each in evidence]
    return min(choices, key=lambda found: _rank(found[1]))


def _rank(choice: Choice) -> tuple[int, float, float]:
    """Smaller is better: as `pick` prefers one plan to another."""
    if not choice.meets_max_loss:
        return (2, choice.loss, choice.chosen.cost)
    if choice.meets_slo:
        return (0, choice.loss, choice.chosen.cost)
    return (1, choice.chosen.cost, choice.loss)


def _loss_limit(objective: Objective, max_loss: float | None) -> float:
    if max_loss is None and objective != "score":
        raise ProfileError(
            f"expected a largest loss, got none: it is measured in {objective} here, which has no "
            "default limit; give --max-loss"
        )
    limit = DEFAULT_MAX_LOSS if max_loss is None else max_loss
    if not 0 <= limit < float("inf"):
        raise ProfileError(f"expected a largest loss >= 0, got {limit}")
    return limit


def _check_limits(
    slo: float | None, bandwidth: float | None, calibration: Calibration | None
) -> None:
    if slo is not None and not slo > 0:
        raise ProfileError(f"expected an SLO > 0 seconds, got {slo}")
    if calibration is None and (slo is not None or bandwidth is not None):
        raise CalibrationError(
            "expected a calibration, since an SLO or a bandwidth needs predicted seconds; "
            "run `droidkv calibrate` first"
        )


def _full_prefill(
    profile: Profile, cost: Cost, workload: Workload, measured: Iterable[Measurement]
) -> Measurement:
    """The receiver's own prefill: without loss, unless another model is the reference."""
    plan = ReusePlan.of(0, profile.num_layers)
    if profile.reference is not None:
        profile.record(plan)  # says what to do where it was not measured
        return next(point for point in measured if point.plan == plan)
    return Measurement(
        plan=plan,
        cost=plan_cost(profile, plan, cost, workload),
        loss=0.0,
        tie_break=0.0,
        interval=Interval(0.0, 0.0),
        num_items=profile.num_items,
    )


def _least_loss(points: Iterable[Measurement]) -> Measurement | None:
    return min(points, key=lambda p: (p.loss, p.cost, p.tie_break, p.plan), default=None)


def _bound_by(
    cheapest: Measurement,
    full: Measurement,
    reuse: list[Measurement],
    good_reuse: Measurement | None,
) -> Bound:
    faster = any(point.cost < cheapest.cost for point in reuse)
    if cheapest == full and reuse and (good_reuse is not None or not faster):
        return "break_even"
    return "max_loss" if faster else "nothing"


def _lost_items(profile: Profile, chosen: Measurement) -> tuple[int, int] | None:
    """How many items a plan loses, and of how many, where resampling tells too little of them.

    So it does of few that are lost wholly, and where all items lose the same or none loses: that
    shows no loss, however few they are. An item that the full prefill gets wrong has none to lose,
    and those over one prefix, which are no evidence of their own, count as one.
    """
    scores = profile.record(chosen.plan).score
    losses = [i.full_score - (score or 0.0) for i, score in zip(profile.items, scores, strict=True)]
    num_right = len({item.group for item in profile.items if item.full_score > 0})
    if {*losses} <= {-1.0, 0.0, 1.0}:
        losing = [i.group for i, loss in zip(profile.items, losses, strict=True) if loss == 1.0]
        return len({*losing}), num_right
    none_seen = chosen.interval.low == chosen.interval.high or chosen.interval.high <= 0
    return (0, num_right) if none_seen else None
