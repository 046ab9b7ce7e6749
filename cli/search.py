"""`droidkv search`: find the frontier of a deep model with a fraction of the exact sweep's work."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

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
from .progress import duration
from .stitch import fit_options

if TYPE_CHECKING:
    from droidkv.plan import ReusePlan

SUGGESTED_PLANS = 8


@click.command(
    cls=Command,
    examples="""
    droidkv search smollm2-records --budget 600
    droidkv search my-70b-pair.toml --share 0.1 --device cuda --dtype bfloat16
    droidkv search my-70b-pair.toml --probe profiles/my-70b-pair.probe.json
    droidkv search my-70b-pair.toml --worker 1   # a second process on the same study
    """,
)
@pair_argument
@task_options
@click.option("--budget", type=click.IntRange(1), help="Evaluations of a plan on an item, in all.")
@click.option(
    "--share",
    default=0.1,
    show_default=True,
    type=click.FloatRange(0, 1, min_open=True),
    help="The budget as a share of the exact search, where --budget is not given.",
)
@click.option("--items", default=16, show_default=True, help="Evaluated items.")
@click.option("--seed", default=0, show_default=True, help="Seed of the items and the search.")
@click.option("--granularity", default=1, show_default=True, help="Borders of groups.")
@operator_option("A family of plans.")
@click.option("--sampler", default="frontier", show_default=True, help="How plans are proposed.")
@click.option("--loss", default="kl", show_default=True, help="What is minimised besides layers.")
@click.option(
    "--probe",
    "probe_file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="A probe of the pair; the groups it suggests are tried first.",
)
@click.option("--worker", default=0, show_default=True, help="A number for each process.")
@fit_options
@run_options
@click.option(
    "-o",
    "--output",
    type=profile_file,
    help="The profile's file. Default: profiles/PAIR.search.json.",
)
@overwrite_option
@click.pass_obj
def search(
    console: Console,
    pair_name: str,
    task_name: str | None,
    task_pairs: tuple[str, ...],
    budget: int | None,
    share: float,
    items: int,
    seed: int,
    granularity: int,
    operators: Any,
    sampler: str,
    loss: Any,
    probe_file: Path | None,
    worker: int,
    calibration_items: int,
    rank: int,
    ridge: float,
    dtype: str,
    device: str,
    output: Path | None,
    overwrite: bool,
) -> None:
    """Search for the frontier on a budget, with Optuna.

    What was found is stored as a profile. Plans race over the items: one that falls behind is
    dropped. The study lies beside the output, in NAME.study.db; a search that was stopped, or is
    given a larger budget and --overwrite, goes on.
    """
    from droidkv.pair import read_pair
    from droidkv.profile import map_path

    pair = read_pair(pair_name)
    task = choose_task(pair, task_name, task_pairs)
    target = output or FOLDER / f"{output_stem(pair, task)}.search.json"
    beside = [map_path(target)] if "stitch" in operators else []
    check_output(target, overwrite, *files_of(pair, task), probe_file, beside=beside)
    first_plans = [] if probe_file is None else _suggested(probe_file, operators)

    study = target.with_suffix(".study.db")
    console.keeps(study, f"nothing is lost: the study is kept in {study}; the same command goes on")

    from droidkv.profile_job import ProfileSettings
    from droidkv.search import SearchSettings

    from .search_run import SearchRun

    search_settings = SearchSettings(sampler=sampler, loss=loss, seed=seed, worker=worker)

    settings = ProfileSettings(
        task=task,
        num_items=items,
        seed=seed,
        granularity=granularity,
        operators=operators,
        calibration_items=calibration_items,
        rank=rank,
        ridge=ridge,
        dtype=dtype,
        device=device,
    )
    run = SearchRun(pair, settings, target, console.progress)
    wanted = budget or max(1, round(share * run.num_evaluations))
    console.note(
        f"{wanted} of {run.num_evaluations} evaluations, about "
        f"{duration(wanted * run.seconds_per_evaluation())} on this machine"
    )
    found = run.search(wanted, search_settings, first_plans)
    value, lines = summary(target, run.write(found, command_line()))
    value |= {
        "num_evaluations": found.num_evaluations,
        "num_evaluations_exact": run.num_evaluations,
        "num_plans_lost": len(found.lost),
    }
    lines.append(
        f"{found.num_evaluations} of {run.num_evaluations} evaluations; "
        f"{len(found.found)} plans measured on every item, {len(found.lost)} dropped before"
    )
    console.result(value, lines)


def _suggested(probe_file: Path, operators: Any) -> list[ReusePlan]:
    """Groups that would be best if the losses of single layers added up."""
    from droidkv.probe_record import read_probe
    from droidkv.search import additive_plans

    return additive_plans(read_probe(probe_file).mean("reuse_one"), SUGGESTED_PLANS, operators)
