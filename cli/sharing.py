"""`droidkv sharing`: quality against the share of layers that read the base's KV."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import click

from .console import Console
from .framework import Command
from .options import (
    choose_task,
    command_line,
    output_file,
    overwrite_option,
    pair_argument,
    run_options,
    task_options,
)
from .places import FOLDER, check_output, files_of, output_stem
from .table import table


@click.command(
    cls=Command,
    examples="""
    droidkv sharing smollm2-records-prefillshare
    droidkv sharing smollm2-records-prefillshare --steps 5 --items 16 -o /tmp/sharing.json
    """,
)
@pair_argument
@task_options
@click.option(
    "--steps",
    type=click.IntRange(1),
    default=10,
    show_default=True,
    help="Steps from 0 to 100 % of the layers.",
)
@click.option("--items", default=32, show_default=True, help="Evaluated items.")
@click.option("--seed", default=0, show_default=True, help="Seed of the items.")
@run_options
@click.option(
    "-o", "--output", type=output_file, help="The data. Default: profiles/PAIR.sharing.json."
)
@overwrite_option
@click.pass_obj
def sharing(
    console: Console,
    pair_name: str,
    task_name: str | None,
    task_pairs: tuple[str, ...],
    steps: int,
    items: int,
    seed: int,
    dtype: str,
    device: str,
    output: Path | None,
    overwrite: bool,
) -> None:
    """Measure quality by the share of reused layers.

    PAIR is the pair of a full-share receiver. It and the ordinary fine-tune of the same recipe
    answer the same items with the lowest layers on the base's KV and the others on their own, from
    none to all. The data are two profiles; with matplotlib there is a plot beside them.
    """
    from droidkv.errors import MissingExtraError
    from droidkv.pair import read_pair
    from droidkv.plots import plot_sharing
    from droidkv.profile_job import ProfileSettings
    from droidkv.sharing import naive_path, sharing_curves
    from droidkv.sharing_sweep import sharing_sweep

    pair = read_pair(pair_name)
    task = choose_task(pair, task_name, task_pairs)
    target = output or FOLDER / f"{output_stem(pair, task)}.sharing.json"
    naive_target = naive_path(target)
    check_output(target, overwrite, *files_of(pair, task), beside=[naive_target])
    for each in (naive_target, target):
        console.keeps_run_of(each)
    settings = ProfileSettings(task=task, num_items=items, seed=seed, dtype=dtype, device=device)
    profiles = sharing_sweep(pair, settings, target, steps, console.progress, command_line())
    curves = sharing_curves(profiles)
    drawn: str | None = str(target.with_suffix(".png"))
    try:
        metric = profiles["trained"].task.metric
        title = f"{pair.name} (n = {profiles['trained'].num_items})"
        plot_sharing(curves, target.with_suffix(".png"), title, metric)
    except MissingExtraError as error:
        console.note(f"no plot: {error}")
        drawn = None
    value = {
        "profile": str(target),
        "num_items": profiles["trained"].num_items,
        "curves": {n: [dataclasses.asdict(p) for p in points] for n, points in curves.items()},
        "plot": drawn,
    }
    rows = [
        (
            f"{naive.share_percent:.0f} %",
            *(
                f"{p.score:.3f} [{p.interval.low:.3f}, {p.interval.high:.3f}]"
                for p in (naive, trained)
            ),
        )
        for naive, trained in zip(curves["naive"], curves["trained"], strict=True)
    ]
    console.result(value, table(("layers shared", "naive", "trained"), rows, ">"))
