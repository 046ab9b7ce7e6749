"""The connector's metrics in a registry such as vLLM's."""

from __future__ import annotations

import json
from typing import Any

import pytest

from droidkv.serve.connector_plan import AuditRecord, Fallback, LoadReport

pytest.importorskip("vllm", reason="vLLM is not installed")
pytestmark = pytest.mark.vllm

REUSED = AuditRecord("a", "[2,4)", advertised_tokens=256, num_loads=1, report=LoadReport(1000, 256))
SHORT = AuditRecord("b", reason=Fallback.TOO_SHORT)


def test_stats_travel_add_up_and_are_exposed() -> None:
    from functools import partial
    from types import SimpleNamespace

    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

    from droidkv.serve.vllm_connector import DroidKVConnector

    registry = CollectorRegistry()
    kinds: dict[Any, Any] = {
        kind: partial(kind, registry=registry) for kind in (Counter, Gauge, Histogram)
    }
    exposed = DroidKVConnector.build_prom_metrics(
        SimpleNamespace(kv_transfer_config=None),
        kinds,
        ["model_name", "engine"],
        {0: ["m", "0"], 1: ["m", "1"]},
    )
    first = DroidKVConnector.build_kv_connector_stats(
        {"requests": [REUSED.to_json()], "saves": {"stored": 2}, "rests": {"load": 1}}
    )
    second = DroidKVConnector.build_kv_connector_stats(
        {
            "requests": [SHORT.to_json()],
            "saves": {"stored": 1, "failed": 1},
            "rests": {"load": 1, "lookup": 0},
        }
    )
    both = first.aggregate(second)
    assert both.reduce()["reused"] == 1 and both.reduce()["chunks_stored"] == 3
    assert DroidKVConnector.build_kv_connector_stats().is_empty() and not both.is_empty()
    exposed.observe(json.loads(json.dumps(both.to_dict())), engine_idx=1)
    text = generate_latest(registry).decode()
    for line in (
        'droidkv_requests_total{engine="1",model_name="m",outcome="reused"} 1.0',
        'droidkv_requests_total{engine="1",model_name="m",outcome="too_short"} 1.0',
        'droidkv_plans_total{engine="1",model_name="m",plan="[2,4)"} 1.0',
        'droidkv_loaded_bytes_total{engine="1",model_name="m"} 1000.0',
        'droidkv_saved_chunks_total{engine="1",model_name="m",outcome="stored"} 3.0',
        'droidkv_store_rests_total{engine="1",model_name="m",what="load"} 2.0',
        'droidkv_wait_seconds_count{engine="1",model_name="m"} 1.0',
    ):
        assert line in text
