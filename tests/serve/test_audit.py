from __future__ import annotations

import json
import logging
from itertools import pairwise
from pathlib import Path

import pytest

from droidkv.errors import ServeError, StorageError
from droidkv.serve.audit import by_outcome, by_plan, chrome_trace, percentiles, read_audit
from droidkv.serve.connector_plan import AuditRecord, Fallback, LoadReport, Span
from droidkv.serve.metrics import METRICS, of_request, of_rests, of_saves

SPANS = [
    Span("load", 2, 100.0, 100.25),
    Span("load", 3, 100.1, 100.3),
    Span("load", 4, 100.25, 100.4),
    Span("enter", 2, 100.25, 100.26),
    Span("recompute", 2, 100.26, 100.5),
    Span("wait", None, 100.5, 100.75),
    Span("suffix", 0, 100.75, 100.8),
]
REUSED = AuditRecord(
    "cmpl-1",
    "[2,4)",
    prompt_tokens=300,
    covered_tokens=256,
    advertised_tokens=256,
    recomputed_layers=2,
    num_loads=1,
    lookup_seconds=0.01,
    ended=101.0,
    report=LoadReport(1000, 256, 0.25, 0.25, 0.25, spans=SPANS),
)
NAIVE = AuditRecord(
    "cmpl-2", "[0,0)", advertised_tokens=256, num_loads=1, report=LoadReport(2000, wait_seconds=0.5)
)
FAILED = AuditRecord(
    "cmpl-3",
    "[2,4)",
    num_loads=1,
    report=LoadReport(10, wait_seconds=2.0),
    reason=Fallback.LOAD_TIMEOUT,
)
SHORT = AuditRecord("cmpl-4", reason=Fallback.TOO_SHORT)
REFUSED = AuditRecord("cmpl-5", reason=Fallback.TOO_SHORT, refused=True)
RECORDS = [REUSED, NAIVE, FAILED, SHORT, REFUSED]


def write(path: Path, *lines: str) -> Path:
    path.write_text("".join(lines), encoding="utf-8")
    return path


def line(record: AuditRecord) -> str:
    return json.dumps(record.to_json(), allow_nan=False) + "\n"


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = write(tmp_path / "audit.jsonl", *map(line, RECORDS))
    assert read_audit(path) == RECORDS


def test_a_line_that_a_killed_server_began_is_left_out(tmp_path: Path) -> None:
    path = write(tmp_path / "audit.jsonl", line(REUSED), line(NAIVE)[:40])
    assert read_audit(path) == [REUSED]


def test_a_last_line_that_lacks_only_its_line_break_counts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    path = write(tmp_path / "audit.jsonl", line(REUSED), "\n", line(NAIVE)[:-1])
    assert read_audit(path) == [REUSED, NAIVE]
    assert not caplog.records
    write(path, line(NAIVE)[:40])
    assert read_audit(path) == []
    assert "cut short" in caplog.text


@pytest.mark.parametrize(
    "broken",
    [
        "{}\n",
        "text\n",
        line(SHORT).replace("too_short", "no_such_reason"),
        line(SHORT).replace('"spans": []', '"spans": [["x", 0, 1, 2]]'),
        line(SHORT).replace('"num_loads"', '"num_load"'),
    ],
)
def test_a_broken_line_is_named(broken: str, tmp_path: Path) -> None:
    path = write(tmp_path / "audit.jsonl", line(REUSED), broken)
    with pytest.raises(ServeError, match=r"audit\.jsonl, line 2(?!.*line )"):
        read_audit(path)


def test_lines_of_servers_that_refused_nothing_are_read(tmp_path: Path) -> None:
    older = line(SHORT).replace(', "refused": false', "")
    assert older != line(SHORT)
    assert read_audit(write(tmp_path / "audit.jsonl", older)) == [SHORT]


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"none\.jsonl"):
        read_audit(tmp_path / "none.jsonl")


def test_groups_by_outcome_and_plan() -> None:
    outcomes = {group.name: group for group in by_outcome(RECORDS)}
    assert {name: group.num_requests for name, group in outcomes.items()} == {
        "reused": 2,
        "load_timeout": 1,
        "too_short": 1,
        "refused: too_short": 1,
    }
    assert outcomes["reused"].loaded_bytes == 3000
    assert outcomes["reused"].recomputed_tokens == 256
    assert outcomes["reused"].wait_seconds == {"p50": 0.25, "p90": 0.5, "p99": 0.5}
    assert outcomes["too_short"].wait_seconds == {}
    plans = by_plan(RECORDS)
    assert [(group.name, group.num_requests) for group in plans] == [("[0,0)", 1), ("[2,4)", 1)]


def test_percentiles_are_values_that_occurred() -> None:
    assert percentiles([float(n) for n in range(1, 101)]) == {"p50": 50, "p90": 90, "p99": 99}
    assert percentiles([3.0]) == {"p50": 3, "p90": 3, "p99": 3}


def test_a_trace_is_what_chrome_reads() -> None:
    trace = json.loads(json.dumps(chrome_trace(RECORDS), allow_nan=False))
    events = trace["traceEvents"]
    named = [event for event in events if event["ph"] == "M"]
    assert {event["args"]["name"] for event in named} == {"cmpl-1 [2,4)", "load", "engine"}
    spans = [event for event in events if event["ph"] == "X"]
    assert len(spans) == len(SPANS)
    assert all(event["ts"] >= 0 and event["dur"] >= 0 for event in spans)
    assert [(event["name"], event["ts"], event["dur"]) for event in spans[:2]] == [
        ("load 2", 0, 250_000),
        ("load 3", 100_000, 200_000),
    ]
    # Two loads at once stand in two rows; in no row pieces overlap.
    assert len({event["tid"] for event in spans if event["cat"] == "load"}) == 2
    for row in {event["tid"] for event in spans}:
        for before, after in pairwise(event for event in spans if event["tid"] == row):
            assert before["ts"] + before["dur"] <= after["ts"] + 0.2


def test_a_trace_needs_a_timeline() -> None:
    with pytest.raises(ServeError, match="--timeline"):
        chrome_trace([NAIVE, SHORT])


def test_metrics_count_what_happened() -> None:
    seen = [each for record in RECORDS for each in of_request(record.to_json())]
    assert {each.metric for each in seen} <= set(METRICS)
    for each in seen:
        assert (each.label is None) == (METRICS[each.metric].label is None)
        assert each.amount >= 0
    requests = [each.label for each in seen if each.metric == "droidkv_requests"]
    assert requests == ["reused", "reused", "load_timeout", "too_short", "refused: too_short"]
    assert [each.label for each in seen if each.metric == "droidkv_plans"] == ["[2,4)", "[0,0)"]
    waits = [each.amount for each in seen if each.metric == "droidkv_wait_seconds"]
    assert waits == [0.25, 0.5, 2.0]
    saved = list(of_saves({"stored": 3, "failed": 0}))
    assert [(each.label, each.amount) for each in saved] == [("stored", 3)]
    rests = list(of_rests({"load": 2, "lookup": 0}))
    assert [(each.metric, each.label, each.amount) for each in rests] == [
        ("droidkv_store_rests", "load", 2)
    ]
