"""`droidkv refine`: train a profile's stitching map for chosen plans, and confirm them."""

from __future__ import annotations

from pathlib import Path

import click

from .console import Console
from .framework import Command
from .frontier_table import summary
from .options import (
    command_line,
    overwrite_option,
    profile_argument,
    profiled_pair_option,
    refined_file,
)
from .places import check_output, files_of_profile, pair_of, read_named_profile


@click.command(
    cls=Command,
    examples="""
    droidkv refine smollm2-records --plan '[15,24)' -o my.refined.confirm.json
    droidkv refine mine.json --plan '[15,24)' --plan '[17,24)' --steps 400 --items 120
    """,
)
@profile_argument
@click.option(
    "--plan",
    "plan_texts",
    multiple=True,
    required=True,
    help="A group to train the map for. Repeatable, with different starts.",
)
@click.option("--items", default=60, show_default=True, help="Fresh items to measure on.")
@click.option(
    "--calibration-items",
    default=192,
    show_default=True,
    help="Items the map is trained on; never evaluated ones. All are held in memory.",
)
@click.option("--steps", default=200, show_default=True, help="Steps of training, per plan.")
@profiled_pair_option
@click.option(
    "-o",
    "--output",
    type=refined_file,
    help="The new profile. Default: NAME.refined.confirm.json beside the profile.",
)
@overwrite_option
@click.pass_obj
def refine(
    console: Console,
    profile_name: str,
    plan_texts: tuple[str, ...],
    items: int,
    calibration_items: int,
    steps: int,
    pair_name: str | None,
    output: Path | None,
    overwrite: bool,
) -> None:
    """Train a profile's stitching map for chosen plans.

    The profile's map brings the sender's hidden state near the receiver's. Here it is trained so
    that the receiver answers through the plan as after its own full prefill, which needs fewer
    layers. The plans are then measured on fresh items. The new map lies beside the new profile; the
    old ones stay as they are. Whoever picks from the profile looks there too.
    """
    from droidkv.confirmation import refined_path
    from droidkv.plan import ReusePlan
    from droidkv.profile import map_path

    path, profile = read_named_profile(profile_name)
    groups = [ReusePlan.parse(text, profile.num_layers).group for text in plan_texts]
    plans = [ReusePlan.of(group.start, group.stop, "stitch") for group in groups]
    pair = pair_of(profile, pair_name)
    target = output or refined_path(path)
    inputs = files_of_profile(path, profile, pair)
    check_output(target, overwrite, *inputs, beside=[map_path(target)])

    console.keeps_run_of(target)

    from droidkv.profiler import refine_plans

    console.note(f"training the map of {path} for {', '.join(map(str, plans))}")
    made = refine_plans(
        pair,
        path,
        plans,
        items,
        target,
        calibration_items,
        steps,
        console.progress,
        command_line(),
        console.estimate("the measuring", "training the map and decoding come on top"),
    )
    console.result(*summary(target, made))
