"""What a server's metrics are, and what one request or one save adds to them. No engine here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

_REUSED = "reused"
_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)


@dataclass(frozen=True)
class Metric:
    """One metric in Prometheus's sense.

    Attributes:
        kind: Its type.
        help: What it counts, in which unit.
        label: Name of its label, if it has one.
        buckets: Of a histogram.
    """

    kind: Literal["counter", "histogram"]
    help: str
    label: str | None = None
    buckets: tuple[float, ...] = ()


METRICS: Mapping[str, Metric] = {
    "droidkv_requests": Metric(
        "counter",
        "Requests that ended, by outcome: 'reused', or why not; 'refused: ' and the reason for "
        "those that ended in an error.",
        "outcome",
    ),
    "droidkv_plans": Metric("counter", "Requests that reused, by plan.", "plan"),
    "droidkv_advertised_tokens": Metric("counter", "Prefix tokens supplied by the connector."),
    "droidkv_recomputed_tokens": Metric("counter", "Prefix tokens run through a plan's group."),
    "droidkv_loaded_bytes": Metric("counter", "Bytes of KV and E read from the store."),
    "droidkv_lookup_seconds": Metric(
        "histogram", "Until the store had said what it has.", buckets=_SECONDS
    ),
    "droidkv_load_seconds": Metric(
        "histogram", "From a load's first read to its last write.", buckets=_SECONDS
    ),
    "droidkv_recompute_seconds": Metric(
        "histogram", "In the layers of a plan's group.", buckets=_SECONDS
    ),
    "droidkv_wait_seconds": Metric(
        "histogram", "For which the engine stood still for want of data.", buckets=_SECONDS
    ),
    "droidkv_saved_chunks": Metric(
        "counter",
        "Sender: chunks, by outcome: stored, present (the store had them), failed, resting, "
        "without_hidden, weights_changed, mixed_adapters.",
        "outcome",
    ),
    "droidkv_store_rests": Metric(
        "counter",
        "How often the store was no longer asked for a while, by what had failed in a row: "
        "lookup, load, save.",
        "what",
    ),
}


@dataclass(frozen=True)
class Observation:
    """One amount that a metric goes up by, or sees.

    Attributes:
        metric: A name in `METRICS`.
        amount: Never negative.
        label: Value of the metric's label, if it has one.
    """

    metric: str
    amount: float
    label: str | None = None


def outcome(reason: str | None, refused: bool) -> str:
    """How a request ended, in a word: reused, or why not."""
    return f"refused: {reason}" if refused else str(reason or _REUSED)


def of_request(record: Mapping[str, Any]) -> Iterator[Observation]:
    """What a receiver's request adds.

    Args:
        record: `AuditRecord.to_json()`.
    """
    reason = record["reason"]
    yield Observation("droidkv_requests", 1, outcome(reason, record["refused"]))
    if reason is None:
        yield Observation("droidkv_plans", 1, record["plan"])
    for name in ("advertised_tokens", "recomputed_tokens", "loaded_bytes"):
        if record[name]:
            yield Observation(f"droidkv_{name}", record[name])
    if record["lookup_seconds"]:
        yield Observation("droidkv_lookup_seconds", record["lookup_seconds"])
    if record["num_loads"]:
        for name in ("load_seconds", "recompute_seconds", "wait_seconds"):
            yield Observation(f"droidkv_{name}", record[name])


def of_saves(counts: Mapping[str, int]) -> Iterator[Observation]:
    """What a sender's chunks add.

    Args:
        counts: Outcome -> chunks since the last time.
    """
    for outcome, count in counts.items():
        if count:
            yield Observation("droidkv_saved_chunks", count, outcome)


def of_rests(counts: Mapping[str, int]) -> Iterator[Observation]:
    """What a store's rests add.

    Args:
        counts: What had failed -> rests that began since the last time.
    """
    for what, count in counts.items():
        if count:
            yield Observation("droidkv_store_rests", count, what)
