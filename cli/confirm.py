"""`droidkv confirm`: measure a profile's best plans on items that did not choose them."""

from __future__ import annotations

from pathlib import Path

import click

from .console import Console
from .framework import Command
from .frontier_table import summary
from .options import (
    choose_objective,
    command_line,
    profile_argument,
    profile_file,
    profiled_pair_option,
)
from .places import pair_of, read_named_profile


@click.command(
    cls=Command,
    examples="""
    droidkv confirm smollm2-records --items 64
    droidkv confirm smollm2-records --plan '[12,24)' --plan '[15,24)+stitch'
    """,
)
@profile_argument
@click.option(
    "--plan",
    "plan_texts",
    multiple=True,
    help="A plan to confirm. Repeatable; default: the frontier, of both families and of copying.",
)
@click.option("--items", default=32, show_default=True, help="Fresh items.")
@profiled_pair_option
@click.option(
    "-o",
    "--output",
    type=profile_file,
    help="The new profile. Default: NAME.confirm.json beside the profile.",
)
@click.pass_obj
def confirm(
    console: Console,
    profile_name: str,
    plan_texts: tuple[str, ...],
    items: int,
    pair_name: str | None,
    output: Path | None,
) -> None:
    """Measure a profile's best plans again, on items it has not seen.

    The best of many plans looks better on the items that chose it than on others; these losses
    and intervals are free of that.
    """
    from droidkv.confirmation import confirmation_path
    from droidkv.frontier import pareto_front
    from droidkv.objectives import measure
    from droidkv.plan import Operator, ReusePlan

    path, profile = read_named_profile(profile_name)
    plans = [ReusePlan.parse(text, profile.num_layers) for text in plan_texts]
    if not plans:
        objective = choose_objective(profile, None)
        families: list[tuple[Operator, ...]] = [("copy", "stitch"), ("copy",)]
        for operators in families:
            plans += [
                p.plan for p in pareto_front(measure(profile, objective, "layers", None, operators))
            ]
    pair = pair_of(profile, pair_name)
    target = output or confirmation_path(path)

    console.keeps_run_of(target)

    from droidkv.profiler import confirm_plans

    console.note(f"confirming {len(set(plans))} plans of {path} on {items} fresh items")
    made = confirm_plans(
        pair,
        path,
        plans,
        items,
        target,
        console.progress,
        command_line(),
        console.estimate("the sweep", "decoding comes on top"),
    )
    console.result(*summary(target, made))
