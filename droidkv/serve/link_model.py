"""What the cost model says of a slow link, calibrated by one run without one. Arithmetic only."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from statistics import median

from droidkv.costs import ModelShape, kv_bytes, plan_bytes
from droidkv.plan import ReusePlan
from droidkv.serve.connector_plan import AuditRecord, LoadOrder
from droidkv.ttft import Calibration, predict_ttft_seconds


def calibration_of_runs(
    shape: ModelShape,
    plan: ReusePlan,
    prefix_tokens: int,
    suffix_tokens: int,
    runs: Iterable[tuple[float, AuditRecord]],
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
