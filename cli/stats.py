"""`droidkv stats`: what a receiver's audit file says."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

import click

from .console import Console
from .framework import Command
from .options import trace_file
from .places import check_output
from .table import num_bytes, table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from droidkv.serve.audit import Group


@click.command(
    cls=Command,
    examples="""
    droidkv stats audit.jsonl
    droidkv stats audit.jsonl --json
    droidkv stats audit.jsonl --request cmpl-7 --trace trace.json
    """,
)
@click.argument("audit", metavar="AUDIT.jsonl", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--request", "request_id", help="Only requests whose id begins so.")
@click.option(
    "--trace",
    type=trace_file,
    help="Write the timelines (`droidkv serve receiver --timeline`) for chrome://tracing.",
)
@click.pass_obj
def stats(console: Console, audit: Path, request_id: str | None, trace: Path | None) -> None:
    """Count requests by outcome and by plan, with bytes and waits.

    An outcome is `reused`, or why the request was answered by its own prefill. Waits are those of
    the engine for data; percentiles are over requests that loaded something.
    """
    from droidkv.jsonio import write_json
    from droidkv.serve.audit import by_outcome, by_plan, chrome_trace, read_audit

    if trace is not None:
        check_output(trace, True, audit)
    records = read_audit(audit)
    if request_id is not None:
        records = [record for record in records if record.request_id.startswith(request_id)]
    outcomes, plans = by_outcome(records), by_plan(records)
    value: dict[str, object] = {
        "audit": str(audit),
        "num_requests": len(records),
        "outcomes": [dataclasses.asdict(group) for group in outcomes],
        "plans": [dataclasses.asdict(group) for group in plans],
    }
    lines = [f"{len(records)} requests", "", *_lines("outcome", outcomes)]
    if plans:
        lines += ["", *_lines("plan", plans)]
    if trace is not None:
        write_json(trace, chrome_trace(records), indent=None)
        value["trace"] = str(trace)
        lines += ["", f"wrote {trace}: open it in chrome://tracing or ui.perfetto.dev"]
    console.result(value, lines)


def _lines(title: str, groups: Sequence[Group]) -> list[str]:
    header = (title, "requests", "tokens", "recomputed", "loaded", "wait p50", "p90", "p99")
    rows = [
        (
            group.name,
            str(group.num_requests),
            str(group.advertised_tokens),
            str(group.recomputed_tokens),
            num_bytes(group.loaded_bytes),
            *(f"{seconds:.3f} s" for seconds in group.wait_seconds.values()),
            *([""] * (3 - len(group.wait_seconds))),
        )
        for group in groups
    ]
    return table(header, rows)
