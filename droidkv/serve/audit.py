"""Audit files read back: counts by outcome and by plan, and timelines as Chrome traces."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from droidkv.errors import DroidKVError, ServeError, StorageError
from droidkv.fields import Fields
from droidkv.jsonio import parse_json
from droidkv.serve.connector_plan import AuditRecord, Fallback, LoadReport, Span, SpanKind
from droidkv.serve.metrics import outcome

_LOG = logging.getLogger(__name__)

PERCENTILES = (50, 90, 99)
# Rows of a trace: what the engine's thread does, and what the two that load do.
_ENGINE, _LOADERS = 1, (2, 3)
_THREAD_NAMES = {_ENGINE: "engine", **dict.fromkeys(_LOADERS, "load")}


@dataclass(frozen=True)
class Group:
    """Requests that have an outcome or a plan in common.

    Attributes:
        name: The outcome, or the plan.
        num_requests: How many.
        advertised_tokens: Prefix tokens that the connector supplied to them.
        recomputed_tokens: Of these, those that ran through a plan's group.
        loaded_bytes: Bytes of KV and E read for them.
        wait_seconds: Percentile -> for how long the engine stood still for one of them.
        load_seconds: Percentile -> how long a load took.
    """

    name: str
    num_requests: int
    advertised_tokens: int
    recomputed_tokens: int
    loaded_bytes: int
    wait_seconds: dict[str, float] = field(default_factory=dict)
    load_seconds: dict[str, float] = field(default_factory=dict)


def read_audit(path: Path) -> list[AuditRecord]:
    """The records of an audit file, in order; blank lines are none.

    A last line that was cut short is left out, and logged: a server that was killed wrote it.

    Raises:
        ServeError: A line is no audit record; says which.
        StorageError: The file cannot be read.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as cause:
        raise StorageError(f"expected an audit file at {path}, but: {cause}") from cause
    *lines, last = text.split("\n")
    if last.strip():
        try:
            parse_json(last, str(path), ServeError)
            lines.append(last)  # whole, but for its line break
        except ServeError:
            _LOG.info("%s: the last line was cut short and is left out", path)
    records = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            table = parse_json(line, str(path), ServeError, first_line=number)
            records.append(record_from_json(table, f"{path}, line {number}"))
    return records


def by_outcome(records: Iterable[AuditRecord]) -> list[Group]:
    """One group for those that reused, and one per reason for those that did not; largest first."""
    return _grouped((outcome(each.reason, each.refused), each) for each in records)


def by_plan(records: Iterable[AuditRecord]) -> list[Group]:
    """One group per plan, of the requests that reused; largest first."""
    return _grouped((str(each.plan), each) for each in records if each.reason is None)


def chrome_trace(records: Iterable[AuditRecord]) -> dict[str, Any]:
    """Timelines in the format that chrome://tracing and Perfetto read; one process per request.

    Raises:
        ServeError: No record has a timeline.
    """
    kept = [record for record in records if record.report.spans]
    if not kept:
        raise ServeError(
            "expected requests with timelines, got none; start the receiver with --timeline, and "
            "ask for something that is reused"
        )
    first = min(span.start for record in kept for span in record.report.spans)
    events: list[dict[str, Any]] = []
    for process, record in enumerate(kept, start=1):
        name = f"{record.request_id} {record.plan}"
        events.append(_named("process_name", process, 0, name))
        for thread, name in _THREAD_NAMES.items():
            events.append(_named("thread_name", process, thread, name))
        free_at = dict.fromkeys(_LOADERS, 0.0)
        for span in sorted(record.report.spans, key=lambda span: span.start):
            thread = _ENGINE
            if span.kind == "load":
                thread = next((t for t in _LOADERS if free_at[t] <= span.start), _LOADERS[-1])
                free_at[thread] = span.stop
            events.append(
                {
                    "name": span.kind if span.layer is None else f"{span.kind} {span.layer}",
                    "cat": span.kind,
                    "ph": "X",
                    "ts": round((span.start - first) * 1e6, 1),
                    "dur": round(max(span.stop - span.start, 0.0) * 1e6, 1),
                    "pid": process,
                    "tid": thread,
                    "args": {} if span.layer is None else {"layer": span.layer},
                }
            )
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """The smallest value that so many percent of all do not exceed: `{"p50": ..., ...}`."""
    ordered = sorted(values)
    if not ordered:
        return {}
    ranks = {p: max(math.ceil(p / 100 * len(ordered)), 1) for p in PERCENTILES}
    return {f"p{p}": round(ordered[rank - 1], 6) for p, rank in ranks.items()}


def _grouped(named: Iterable[tuple[str, AuditRecord]]) -> list[Group]:
    groups: dict[str, list[AuditRecord]] = {}
    for name, record in named:
        groups.setdefault(name, []).append(record)
    made = [_group(name, records) for name, records in groups.items()]
    return sorted(made, key=lambda group: (-group.num_requests, group.name))


def _group(name: str, records: Sequence[AuditRecord]) -> Group:
    loaded = [record.report for record in records if record.num_loads]
    return Group(
        name=name,
        num_requests=len(records),
        advertised_tokens=sum(record.advertised_tokens for record in records),
        recomputed_tokens=sum(report.recomputed_tokens for report in loaded),
        loaded_bytes=sum(report.loaded_bytes for report in loaded),
        wait_seconds=percentiles([report.wait_seconds for report in loaded]),
        load_seconds=percentiles([report.load_seconds for report in loaded]),
    )


def _named(kind: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}


def record_from_json(value: object, where: str) -> AuditRecord:
    """Read what `AuditRecord.to_json` wrote.

    Raises:
        ServeError: It is no audit record; says why.
    """
    fields = Fields(value, where, ServeError)
    reason = fields.optional("reason", str)
    try:
        report = LoadReport(
            loaded_bytes=fields.take("loaded_bytes", int, minimum=0),
            recomputed_tokens=fields.take("recomputed_tokens", int, minimum=0),
            load_seconds=fields.take("load_seconds", float),
            recompute_seconds=fields.take("recompute_seconds", float),
            wait_seconds=fields.take("wait_seconds", float),
            spans=[_span(value, where) for value in fields.take_list("spans", list)],
        )
        record = AuditRecord(
            request_id=fields.take("request_id", str),
            plan=fields.optional("plan", str),
            prompt_tokens=fields.take("prompt_tokens", int, minimum=0),
            covered_tokens=fields.take("covered_tokens", int, minimum=0),
            advertised_tokens=fields.take("advertised_tokens", int, minimum=0),
            local_tokens=fields.take("local_tokens", int, minimum=0),
            recomputed_layers=fields.take("recomputed_layers", int, minimum=0),
            num_loads=fields.take("num_loads", int, minimum=0),
            lookup_seconds=fields.take("lookup_seconds", float),
            asynchronous=fields.take("asynchronous", bool),
            ended=fields.take("ended", float),
            report=report,
            reason=None if reason is None else Fallback(reason),
            refused=fields.take("refused", bool, False),
        )
    except DroidKVError:
        raise
    except ValueError as cause:
        raise ServeError(f"{where}: expected an audit record, but: {cause}") from cause
    fields.done()
    return record


def _span(value: list[Any], where: str) -> Span:
    match value:
        case [str(kind), int() | None as layer, float() | int() as start, float() | int() as stop]:
            if kind in get_args(SpanKind):
                return Span(kind, layer, start, stop)  # type: ignore[arg-type]
    raise ServeError(f"{where}: expected a span [kind, layer, start, stop], got {value!r}")
