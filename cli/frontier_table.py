"""The frontier as rows of JSON and as lines of a table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .table import num_bytes, table

if TYPE_CHECKING:
    from droidkv.frontier import Measurement
    from droidkv.objectives import PlanChange, Workload
    from droidkv.profile import Profile

_SHORT = {"score": "loss %", "kl": "KL, nats", "nll": "NLL, nats", "disagreement": "changed"}


def summary(path: Path, made: Profile) -> tuple[dict[str, Any], list[str]]:
    """What was just measured and where it is, as JSON and as lines."""
    from droidkv.objectives import Workload, default_objective, measure

    objective = default_objective(made)
    workload = Workload.of_items(made)
    rows = frontier_rows(made, measure(made, objective), workload)
    value = {
        "profile": str(path),
        "stitch": None if made.stitch is None else str(path.with_name(made.stitch.file)),
        "pair": made.pair,
        "task": made.task.name,
        "num_items": made.num_items,
        "num_plans": len(made.measurements),
        "seconds": made.provenance.seconds,
        "objective": objective,
        "frontier": rows,
    }
    return value, [*header_lines(path, made, workload), "", *point_lines(rows, objective)]


def frontier_rows(
    profile: Profile, points: Sequence[Measurement], workload: Workload, show_all: bool = False
) -> list[dict[str, Any]]:
    """The frontier and both baselines, or all points, by cost."""
    from droidkv.frontier import pareto_front
    from droidkv.plan import ReusePlan

    on_front = {point.plan for point in pareto_front(points)}
    kept = on_front | {ReusePlan.of(0, 0), ReusePlan.of(0, profile.num_layers)}
    return [
        point_json(profile, point, workload, point.plan in on_front)
        for point in sorted(points, key=lambda p: (p.cost, p.loss, p.tie_break, p.plan))
        if show_all or point.plan in kept
    ]


def point_json(
    profile: Profile, point: Measurement, workload: Workload, on_front: bool
) -> dict[str, Any]:
    """One plan with its loss and every cost that can be told."""
    from droidkv.objectives import plan_cost
    from droidkv.plan import ReusePlan

    full = ReusePlan.of(0, profile.num_layers)
    flops, full_flops = (plan_cost(profile, p, "flops", workload) for p in (point.plan, full))
    seconds = None
    if workload.calibration is not None:
        seconds = plan_cost(profile, point.plan, "ttft", workload)
    return {
        "plan": str(point.plan),
        "on_front": on_front,
        "num_recomputed": point.plan.num_recomputed,
        "cost": point.cost,
        "loss": point.loss,
        "interval": [point.interval.low, point.interval.high],
        "num_items": point.num_items,
        "num_undecoded": point.num_undecoded,
        "losses": dict(point.losses),
        "fewer_flops_ratio": full_flops / flops,
        "bytes": round(plan_cost(profile, point.plan, "bytes", workload)),
        "predicted_ttft_seconds": seconds,
    }


def header_lines(path: Path, profile: Profile, workload: Workload) -> Iterator[str]:
    """What was measured, on how many items, how exactly."""
    full = sum(item.full_score for item in profile.items) / profile.num_items
    yield f"{path}: {profile.sender.name} -> {profile.receiver.name}"
    yield (
        f"{profile.task.name}, n = {profile.num_items} items, {profile.task.metric} of the full "
        f"prefill {full:.3g}; costs at {workload.prefix_tokens} + {workload.suffix_tokens} tokens"
    )
    if profile.reference is not None:
        yield f"the full prefill is that of {profile.reference.name}, which losses are against"
    if floor := profile.noise_floor:
        yield (
            f"noise floor (an exact plan): score {floor.relative_percent:.2g} %, "
            f"KL {floor.kl:.2g}, changed answers {floor.disagreement:.2g}"
        )


def point_lines(rows: Sequence[Mapping[str, Any]], objective: str) -> list[str]:
    """The table. `*` marks the frontier; losses of answers nobody decoded are upper bounds."""
    with_seconds = any(row["predicted_ttft_seconds"] is not None for row in rows)
    header = ["", "plan", "layers", "less compute", "bytes"]
    header += ["TTFT, s"] if with_seconds else []
    header += [_SHORT[objective], "95 % interval", "KL", "same answer", "not decoded"]
    return table(header, [_cells(row, with_seconds) for row in rows], "<<")


def _cells(row: Mapping[str, Any], with_seconds: bool) -> list[str]:
    low, high = row["interval"]
    cells = [
        "*" if row["on_front"] else "",
        row["plan"],
        str(row["num_recomputed"]),
        f"{row['fewer_flops_ratio']:.2f}x",
        num_bytes(row["bytes"]),
    ]
    cells += [f"{row['predicted_ttft_seconds']:.3g}"] if with_seconds else []
    return [
        *cells,
        f"{row['loss']:.3g}",
        f"[{low:.3g}, {high:.3g}]",
        f"{row['losses']['kl']:.2g}",
        f"{100 * (1 - row['losses']['disagreement']):.0f} %",
        str(row["num_undecoded"] or ""),
    ]


def diff_lines(changes: Sequence[PlanChange], before: Profile, after: Profile) -> list[str]:
    """Plans that came and went, with their losses in both profiles."""
    if not changes:
        return ["the same plans stand on both frontiers"]

    def loss(point: Measurement | None) -> str:
        return "not measured" if point is None else f"{point.loss:.3g}"

    header = ("", "plan", f"loss of {before.num_items} items", f"loss of {after.num_items} items")
    rows = [
        ("+" if each.is_on_front else "-", str(each.plan), loss(each.before), loss(each.after))
        for each in changes
    ]
    return table(header, rows, "<<")
