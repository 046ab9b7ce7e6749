"""`droidkv doctor`: is this machine fit for droidkv, and what to do if not."""

from __future__ import annotations

import dataclasses

import click

from . import exits
from .console import Console
from .framework import Command
from .options import run_options
from .places import known_profiles
from .table import table


@click.command(
    cls=Command,
    examples="""
    droidkv doctor
    droidkv doctor --pair smollm2-records --device cuda --json
    """,
)
@click.option(
    "--pair",
    "pair_name",
    help="Load its models, hold its profiles against them, and reuse a cache. "
    "Default: two tiny models.",
)
@run_options
@click.pass_obj
def doctor(console: Console, pair_name: str | None, dtype: str, device: str) -> int:
    """Check this machine, from Python to one reused cache.

    Exits with 1 if something is missing without which nothing works.
    """
    from droidkv.doctor import run_checks
    from droidkv.pair import read_pair

    pair = None if pair_name is None else read_pair(pair_name)
    checks = run_checks(pair, known_profiles().values(), dtype, device, console.progress)
    passed = all(check.status != "fail" for check in checks)
    rows = [(check.status, check.name, check.found) for check in checks]
    lines = table(("", "what", "found"), rows, "<<<")
    for check in checks:
        if check.advice:
            lines.append(f"{check.name}: {check.advice}")
    value = {"passed": passed, "checks": [dataclasses.asdict(check) for check in checks]}
    console.result(value, lines)
    return exits.OK if passed else exits.CHECK_FAILED
