"""A plan over links: what was measured, beside the cost model's word. Arithmetic only."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from droidkv.bench.timing import rounded
from droidkv.calibration_fit import prediction_error
from droidkv.costs import ModelShape, kv_bytes, plan_bytes, transition_bytes
from droidkv.plan import ReusePlan
from droidkv.serve.connector_plan import LOAD_ORDERS, AuditRecord, LoadOrder
from droidkv.ttft import Calibration, predict_ttft_seconds

# Time to the first token in seconds, and the audit record with its timeline.
Run = tuple[float, AuditRecord]


@dataclass
class LinkRuns:
    """What was measured at one bandwidth.

    Attributes:
        bytes_per_second: The bandwidth; None = no limit, so there are no other runs than `free`.
        free: Streamed runs without a limit, which took turns with the others.
        runs: The runs of each order.
    """

    bytes_per_second: float | None
    free: list[Run] = field(default_factory=list)
    runs: dict[LoadOrder, list[Run]] = field(
        default_factory=lambda: {order: [] for order in LOAD_ORDERS}
    )

    @property
    def compute_seconds(self) -> float:
        return _median_seconds(self.free)


def link_table(
    shape: ModelShape,
    plan: ReusePlan,
    prefix_tokens: int,
    suffix_tokens: int,
    dtype: str,
    links: Sequence[LinkRuns],
) -> dict[str, Any]:
    """Measured and predicted times of each bandwidth and order.

    Args:
        shape: Sizes of the model.
        plan: The plan, which recomputes two layers or more.
        prefix_tokens: n.
        suffix_tokens: m.
        dtype: Of weights and cache.
        links: The measured ones. The model is calibrated by all their runs without a limit.
    """
    free = [run for link in links for run in link.free]
    calibration = calibration_of_runs(shape, plan, prefix_tokens, suffix_tokens, free, "", dtype)
    num_bytes = plan_bytes(shape, plan, prefix_tokens)
    first_bytes = transition_bytes(shape, plan, prefix_tokens)
    rows: list[dict[str, Any]] = []
    ratios = []
    for link in links:
        bandwidth = link.bytes_per_second
        if bandwidth is None:
            continue
        compute, load = link.compute_seconds, num_bytes / bandwidth
        first_e = first_bytes / bandwidth
        bound = max(load, compute)
        seconds = {order: _median_seconds(runs) for order, runs in link.runs.items()}
        for order, runs in link.runs.items():
            predicted = predicted_seconds(
                shape, plan, prefix_tokens, suffix_tokens, calibration, bandwidth, order
            )
            row = {
                "load_seconds": load,
                "compute_seconds": compute,
                "load_over_compute": load / compute,
                "first_e_seconds": first_e,
                "seconds": seconds[order],
                "wait_seconds": median(record.report.wait_seconds for _, record in runs),
                "predicted_seconds": predicted,
                "over_bound": seconds[order] / bound,
                "over_bound_and_first_e": seconds[order] / (bound + first_e),
            }
            rows.append(
                {"order": order, "bytes_per_second": round(bandwidth)}
                | {name: rounded(value) for name, value in row.items()}
                | {"seconds_all": [rounded(each) for each, _ in runs]}
            )
        ratios.append(
            {
                "load_over_compute": rounded(load / compute),
                "ratio": rounded(seconds["all_first"] / seconds["streamed"]),
            }
        )
    error = prediction_error(
        [row["predicted_seconds"] for row in rows], [row["seconds"] for row in rows]
    )
    return {
        "prefix_tokens": prefix_tokens,
        "plan": str(plan),
        "num_bytes": num_bytes,
        "compute_seconds": rounded(_median_seconds(free)),
        "rows": rows,
        "all_first_over_streamed": ratios,
        "prediction_median_percent": round(error.median_percent, 2),
        "prediction_max_percent": round(error.max_percent, 2),
    }


def _median_seconds(runs: Sequence[Run]) -> float:
    return median(seconds for seconds, _ in runs)


def calibration_of_runs(
    shape: ModelShape,
    plan: ReusePlan,
    prefix_tokens: int,
    suffix_tokens: int,
    runs: Iterable[Run],
    machine: str,
    dtype: str,
) -> Calibration:
    """Coefficients by which a plan's runs without a throttled link add up; for this length only.

    Args:
        shape: Sizes of the model.
        plan: The plan, which recomputes two layers or more.
        prefix_tokens: n.
        suffix_tokens: m.
        runs: Time to the first token, and the audit record with its timeline, of each.
        machine: Name of the machine.
        dtype: Of weights and cache.
    """
    listed = list(runs)
    recompute, last, suffix, load = ([] for _ in range(4))  # type: ignore[var-annotated]
    for _, record in listed:
        # A layer is recomputed in pieces where its E comes in pieces.
        by_layer: defaultdict[tuple[str, int | None], float] = defaultdict(float)
        for span in record.report.spans:
            by_layer[span.kind, span.layer] += span.stop - span.start
        for (kind, index), seconds in by_layer.items():
            if kind == "recompute":
                (last if index == plan.group.stop - 1 else recompute).append(seconds)
            elif kind == "suffix":
                suffix.append(seconds)
        load.append(record.report.load_seconds)
    n, m = prefix_tokens, suffix_tokens
    whole, kv_only, layer = median(recompute), median(last), median(suffix)
    known = (plan.num_recomputed - 1) * whole + kv_only + shape.num_layers * layer
    total = median(seconds for seconds, _ in listed)
    return Calibration(
        machine=machine,
        device="cpu",
        dtype=dtype,
        shape_digest=shape.digest,
        prefix_seconds_per_token=whole / n,
        prefix_seconds_per_token_squared=0.0,
        kv_only_seconds_per_token=kv_only / n,
        suffix_seconds_per_token=layer / m,
        suffix_seconds_per_token_pair=0.0,
        seconds_per_layer_call=0.0,
        load_seconds_per_byte=median(load) / plan_bytes(shape, plan, n),
        load_fixed_seconds=0.0,
        logits_seconds=0.0,
        fixed_seconds=max(total - known, 0.0),
    )


def predicted_seconds(
    shape: ModelShape,
    plan: ReusePlan,
    prefix_tokens: int,
    suffix_tokens: int,
    calibration: Calibration,
    bandwidth: float,
    order: LoadOrder,
) -> float:
    """Time to the first token over a link; order (a) also loads what it will recompute."""
    seconds = predict_ttft_seconds(
        shape,
        plan,
        prefix_tokens,
        suffix_tokens,
        calibration,
        bandwidth,
        "overlap" if order == "streamed" else "serial",
    )
    if order == "all_first":
        slower = max(1 / bandwidth, calibration.load_seconds_per_byte)
        seconds += slower * kv_bytes(shape, prefix_tokens, plan.num_recomputed)
    return seconds
