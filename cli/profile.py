"""`droidkv profile`: from a pair to a stored profile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from .console import Console
from .framework import Command
from .frontier_table import summary
from .options import (
    choose_task,
    command_line,
    operator_option,
    overwrite_option,
    pair_argument,
    profile_file,
    run_options,
    task_options,
)
from .places import FOLDER, check_output, files_of, output_stem
from .stitch import fit_options


@click.command(
    cls=Command,
    examples="""
    droidkv profile smollm2-records -o mine.json
    droidkv profile smollm2-records --items 4 --granularity 3 -o quick.json
    droidkv profile smollm2-tools --operator copy --decode all -o tools.json
    droidkv profile my-pair.toml & droidkv profile my-pair.toml   # share one run
    """,
)
@pair_argument
@task_options
@click.option("--items", default=16, show_default=True, help="Evaluated items.")
@click.option("--seed", default=0, show_default=True, help="Seed of the items.")
@click.option(
    "--granularity", default=1, show_default=True, help="Borders of groups are multiples of this."
)
@operator_option("A family of plans.")
@click.option(
    "--decode",
    type=click.Choice(["none", "frontier", "all"]),
    default="frontier",
    show_default=True,
    help="Which plans whose answer differs are decoded for their score; the others count as 0.",
)
@fit_options
@run_options
@click.option(
    "-o", "--output", type=profile_file, help="The profile's file. Default: profiles/PAIR.json."
)
@overwrite_option
@click.pass_obj
def profile(
    console: Console,
    pair_name: str,
    task_name: str | None,
    task_pairs: tuple[str, ...],
    items: int,
    seed: int,
    granularity: int,
    operators: Any,
    decode: Any,
    calibration_items: int,
    rank: int,
    ridge: float,
    dtype: str,
    device: str,
    output: Path | None,
    overwrite: bool,
) -> None:
    """Measure every plan of a pair on a task, and store the profile.

    Beside the profile NAME.json comes the stitching map, NAME.stitch.safetensors. A run that was
    stopped goes on where it was when the same command is given again; several processes with the
    same command share the work.
    """
    from droidkv.pair import read_pair
    from droidkv.profile import map_path

    pair = read_pair(pair_name)
    task = choose_task(pair, task_name, task_pairs)
    target = output or FOLDER / f"{output_stem(pair, task)}.json"
    stitches = "stitch" in operators and pair.reference is None  # full share needs no map
    beside = [map_path(target)] if stitches else []
    check_output(target, overwrite, *files_of(pair, task), beside=beside)

    console.keeps_run_of(target)

    from droidkv.profile_job import ProfileSettings
    from droidkv.profiler import profile_pair
    from droidkv.tasks import get_task

    settings = ProfileSettings(
        task=task,
        num_items=items,
        seed=seed,
        granularity=granularity,
        operators=operators,
        decode=decode,
        calibration_items=calibration_items,
        rank=rank,
        ridge=ridge,
        dtype=dtype,
        device=device,
    )
    found = get_task(task.name, **task.options).items("eval", items + 1, seed)
    if len(found) <= items and pair.reference is None:  # of a full-share receiver no plan is picked
        console.note(
            f"the task has {len(found)} items, none beside those profiled here, so `droidkv "
            "confirm` would have none that are fresh; fewer --items leave some"
        )
    console.note(f"profiling {pair.name} on {task}, {items} items, into {target}")
    made = profile_pair(
        pair,
        settings,
        target,
        console.progress,
        command_line(),
        console.estimate("the sweep", "the stitching map and decoding come on top"),
    )
    console.result(*summary(target, made))
