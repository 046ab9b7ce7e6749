"""The connector's part of vLLM's /metrics and of its log lines."""

from __future__ import annotations

from collections import Counter as Counts
from collections.abc import Mapping
from typing import Any

from prometheus_client import Counter, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from droidkv.serve.metrics import METRICS, of_request, of_rests, of_saves


class DroidKVStats(KVConnectorStats):  # type: ignore[misc]
    """What happened since the last step: ended requests, saved chunks by outcome, store's rests.

    `data` is `{"requests": [record, ...], "saves": {outcome: count}, "rests": {what: count}}`, in
    plain values, since it travels between processes.
    """

    data: dict[str, Any]

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        super().__init__(data=data or {})
        if not data:
            self.reset()

    def reset(self) -> None:
        self.data = {"requests": [], "saves": {}, "rests": {}}

    def is_empty(self) -> bool:
        counts = (*self.data["saves"].values(), *self.data["rests"].values())
        return not self.data["requests"] and not any(counts)

    def aggregate(self, other: KVConnectorStats) -> DroidKVStats:
        added: dict[str, Any] = {"requests": self.data["requests"] + other.data["requests"]}
        for part in ("saves", "rests"):
            added[part] = dict(Counts(self.data[part]) + Counts(other.data[part]))
        return DroidKVStats(added)

    def reduce(self) -> dict[str, int | float]:
        requests = self.data["requests"]
        reused = sum(record["reason"] is None for record in requests)
        return {
            "requests": len(requests),
            "reused": reused,
            "advertised_tokens": sum(record["advertised_tokens"] for record in requests),
            "loaded_bytes": sum(record["loaded_bytes"] for record in requests),
            **{f"chunks_{outcome}": count for outcome, count in self.data["saves"].items()},
            **{f"rests_{what}": count for what, count in self.data["rests"].items()},
        }


class DroidKVPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """Registers `METRICS` with vLLM's registry, and adds what each step observed."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Mapping[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._metrics: dict[str, Any] = {}
        for name, metric in METRICS.items():
            labels = [*labelnames, *([metric.label] if metric.label else [])]
            if metric.kind == "counter":
                kind = metric_types[Counter]
                self._metrics[name] = kind(name=name, documentation=metric.help, labelnames=labels)
            else:
                kind = metric_types[Histogram]
                self._metrics[name] = kind(
                    name=name,
                    documentation=metric.help,
                    labelnames=labels,
                    buckets=list(metric.buckets),
                )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        seen = [each for record in transfer_stats_data["requests"] for each in of_request(record)]
        seen += of_saves(transfer_stats_data["saves"])
        seen += of_rests(transfer_stats_data["rests"])
        for each in seen:
            label = [] if each.label is None else [each.label]
            child = self._metrics[each.metric].labels(
                *self.per_engine_labelvalues[engine_idx], *label
            )
            if METRICS[each.metric].kind == "counter":
                child.inc(each.amount)
            else:
                child.observe(each.amount)
