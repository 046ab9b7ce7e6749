from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import made_profiles
import pytest

from droidkv.costs import kv_bytes, plan_bytes
from droidkv.errors import PlanError, ServeError, StorageError
from droidkv.pair import read_pair
from droidkv.plan import ReusePlan
from droidkv.serve.connector_plan import AuditRecord, LoadReport, Span
from droidkv.serve.link_model import calibration_of_runs, predicted_seconds
from droidkv.serve.ttft_bench import TtftSettings, _Bench, bench_ttft

SHAPE = made_profiles.shape(6)
PLAN = ReusePlan.of(2, 4)
N, M = 100, 10


def run() -> tuple[float, AuditRecord]:
    """A run of 2 + 1 seconds in the group, 6 x 0.5 in the suffix pass and 0.25 besides."""
    spans = [Span("recompute", 2, 0.0, 2.0), Span("recompute", 3, 2.0, 3.0)]
    spans += [Span("suffix", layer, 3 + layer / 2, 3.5 + layer / 2) for layer in range(6)]
    return 6.25, AuditRecord("r", report=LoadReport(load_seconds=1e-9, spans=spans))


def predicted(load_seconds: float, order: str) -> float:
    calibration = calibration_of_runs(SHAPE, PLAN, N, M, [run()], "m", "float32")
    bandwidth = plan_bytes(SHAPE, PLAN, N) / load_seconds
    return predicted_seconds(SHAPE, PLAN, N, M, calibration, bandwidth, order)  # type: ignore[arg-type]


def test_a_fast_link_gives_back_what_was_measured() -> None:
    for order in ("all_first", "reused_first", "streamed"):
        assert predicted(1e-6, order) == pytest.approx(6.25, rel=1e-5)


def test_loading_first_adds_up_and_streaming_hides() -> None:
    assert predicted(2.0, "reused_first") == pytest.approx(6.25 + 2.0)
    group = kv_bytes(SHAPE, N, 2) / plan_bytes(SHAPE, PLAN, N)
    assert predicted(2.0, "all_first") == pytest.approx(6.25 + 2.0 * (1 + group))
    # All but E hides behind the recomputation; over a very slow link only the last layer is left.
    assert predicted(2.0, "streamed") < 6.25 + 1.0
    assert predicted(100.0, "streamed") == pytest.approx(100.0 + 0.5 + 0.25)


class FakeEngine:
    """A machine that becomes half as fast after some unlimited runs, 6.25 s before."""

    def __init__(self, num_fast: int = 1 << 30) -> None:
        self.num_free = 0
        self.num_fast = num_fast

    def generate(
        self,
        prompt: Sequence[int],
        salt: str,
        ask: Mapping[str, Any] | None = None,
        bandwidth: float | None = None,
    ) -> dict[str, Any]:
        compute, record = run()
        if bandwidth is None:
            self.num_free += 1
        if self.num_free > self.num_fast:
            compute *= 2
        load = 0.0 if bandwidth is None else plan_bytes(SHAPE, PLAN, N) / bandwidth
        streamed = ask is not None and ask["order"] == "streamed"
        seconds = max(compute, load) if streamed else compute + load
        record = replace(record, advertised_tokens=N)
        return {"seconds": seconds, "record": record.to_json()}

    def flush(self) -> None:
        pass


def link(engine: FakeEngine, told: list[tuple[str, int, int]]) -> dict[str, Any]:
    settings = TtftSettings(Path(), suffix_tokens=M, repeats=3, link_factors=(0.5, 1.0, 2.0))
    engines: Any = {"receiver": engine, "sender": engine}
    bench = _Bench(settings, SHAPE, engines, lambda *step: told.append(step))
    return bench.link(N, [ReusePlan.of(0, 0), PLAN])


def test_a_link_is_held_against_the_larger_of_load_and_compute() -> None:
    told: list[tuple[str, int, int]] = []
    result = link(FakeEngine(), told)
    assert result["plan"] == "[2,4)"
    streamed = [row for row in result["rows"] if row["order"] == "streamed"]
    assert [row["load_over_compute"] for row in streamed] == [0.5, 1.0, 2.0]
    assert [row["over_bound"] for row in streamed] == [1.0, 1.0, 1.0]
    ratios = [each["ratio"] for each in result["all_first_over_streamed"]]
    assert ratios == [1.5, 2.0, 1.5]
    assert told[-1] == ("ttft, link x2", 3, 3)


def test_a_machine_that_slows_down_is_compared_with_itself() -> None:
    # Four runs come first, of which one warms up, and three are of each bandwidth.
    rows = link(FakeEngine(num_fast=7), [])["rows"]
    streamed = [row for row in rows if row["order"] == "streamed"]
    assert [row["compute_seconds"] for row in streamed] == [6.25, 12.5, 12.5]
    assert [row["load_over_compute"] for row in streamed] == [0.5, 0.5, 2.0]
    assert [row["over_bound"] for row in streamed] == [1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("changes", "named"),
    [({"layers": (0, 2), "link_tokens": 0}, "got 0, 2; leave"), ({}, "--link-tokens 0 for tiny")],
)
def test_nothing_is_recomputed_by_a_receiver_that_reads_the_senders_kv(
    changes: dict[str, object], named: str, tmp_path: Path
) -> None:
    pair = read_pair("tiny")
    settings = TtftSettings(**{"folder": tmp_path / "bench", **changes})  # type: ignore[arg-type]
    with pytest.raises(PlanError, match=named):
        bench_ttft(replace(pair, reference=pair.receiver), settings)
    assert not (tmp_path / "bench").exists()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"lengths": (100,)}, "whole chunks"),
        ({"link_tokens": 100}, "whole chunks"),
        ({"layers": (4,)}, "0 to 3"),
        ({"layers": (0, 1)}, "2 layers"),
        ({"repeats": 0}, "repeat"),
        ({"suffix_tokens": 0}, "suffix"),
        ({"store": "rediss3://here"}, "kind of store"),
        ({"store": "fs://"}, "folder"),
    ],
)
def test_what_cannot_be_timed_is_said_before(
    changes: dict[str, object], named: str, tmp_path: Path
) -> None:
    settings = TtftSettings(**{"folder": tmp_path / "bench", "layers": (0, 2), **changes})  # type: ignore[arg-type]
    with pytest.raises((PlanError, ServeError, StorageError), match=named):
        bench_ttft(read_pair("tiny"), settings)
    assert not (tmp_path / "bench").exists()
