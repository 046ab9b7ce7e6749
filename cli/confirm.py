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
    confirmation_file,
    overwrite_option,
    profile_argument,
    profiled_pair_option,
)
from .places import check_output, files_of_profile, pair_of, read_named_profile


@click.command(
    cls=Command,
    examples="""
    droidkv confirm mine.json --items 64
    droidkv confirm mine.json --max-loss 5 --items 60
    droidkv confirm smollm2-records --plan '[12,24)' --plan '[15,24)+stitch' -o my.confirm.json
    """,
)
@profile_argument
@click.option(
    "--plan",
    "plan_texts",
    multiple=True,
    help="A plan to confirm. Repeatable; default: the frontier by loss and that by KL, of both "
    "families and of copying.",
)
@click.option(
    "--max-loss",
    type=float,
    help="Without --plan: leave out plans that surely lose more than this, which no pick needs.",
)
@click.option("--items", default=32, show_default=True, help="Fresh items.")
@profiled_pair_option
@click.option(
    "-o",
    "--output",
    type=confirmation_file,
    help="The new profile. Default: NAME.confirm.json beside the profile.",
)
@overwrite_option
@click.pass_obj
def confirm(
    console: Console,
    profile_name: str,
    plan_texts: tuple[str, ...],
    max_loss: float | None,
    items: int,
    pair_name: str | None,
    output: Path | None,
    overwrite: bool,
) -> None:
    """Measure a profile's best plans again, on items it has not seen.

    The best of many plans looks better on the items that chose it than on others; these losses
    and intervals are free of that. The frontier by KL has the plans that are a little dearer and
    safer than those that were lucky.
    """
    if plan_texts and max_loss is not None:
        raise click.UsageError("--max-loss chooses plans, so it cannot go with --plan")
    from droidkv.candidates import plans_to_confirm
    from droidkv.confirmation import confirmation_path, shared_map
    from droidkv.plan import ReusePlan
    from droidkv.profile import map_path

    path, profile = read_named_profile(profile_name)
    plans = [ReusePlan.parse(text, profile.num_layers) for text in plan_texts]
    if not plans:
        plans = plans_to_confirm(profile, choose_objective(profile, None), max_loss)
    pair = pair_of(profile, pair_name)
    target = output or confirmation_path(path)
    stitches = any(plan.operator == "stitch" for plan in plans)
    makes_map = stitches and shared_map(target, path, profile) is None
    beside = [map_path(target)] if makes_map else []
    check_output(target, overwrite, *files_of_profile(path, profile, pair), beside=beside)

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
