"""`droidkv calibrate`: measure this machine, so that seconds can be predicted."""

from __future__ import annotations

from pathlib import Path

import click

from .console import Console
from .framework import Command
from .options import command_line, output_file, overwrite_option, run_options
from .places import check_output
from .progress import duration
from .table import table
from .units import SECONDS


@click.command(
    cls=Command,
    examples="""
    droidkv calibrate
    droidkv calibrate --pair my-pair.toml --device cuda --dtype bfloat16 --output gpu.json
    """,
)
@click.option(
    "--pair",
    "pair_name",
    default="smollm2-records",
    show_default=True,
    help="Its sender is timed; the result holds for every model of the same shape.",
)
@run_options
@click.option(
    "--max-prefix-tokens",
    type=click.IntRange(64),
    help="Longest prefix timed. Default: what --seconds allows.",
)
@click.option(
    "--rounds",
    type=click.IntRange(1),
    default=5,
    show_default=True,
    help="Timed rounds; medians count.",
)
@click.option(
    "--seconds", type=SECONDS, default=75.0, show_default=True, help="What it may take, about."
)
@click.option(
    "-o", "--output", type=output_file, help="Default: where the other commands look for it."
)
@overwrite_option
@click.pass_obj
def calibrate(
    console: Console,
    pair_name: str,
    dtype: str,
    device: str,
    max_prefix_tokens: int | None,
    rounds: int,
    seconds: float,
    output: Path | None,
    overwrite: bool,
) -> None:
    """Time this machine, so that seconds can be predicted.

    Run on an idle machine. The steps of a prefill are timed and fitted; the error is that on
    requests that were not used for the fit.
    """
    from droidkv.pair import read_pair

    pair = read_pair(pair_name)
    if output is not None:
        check_output(output, overwrite, pair.path)

    from droidkv.calibrate import measure_calibration
    from droidkv.calibration_file import calibration_path, write_calibration
    from droidkv.loading import load_model

    model = load_model(pair.sender, dtype, device)
    target = output or calibration_path(model.model.shape.digest, str(model.model.device), dtype)
    check_output(target, overwrite, pair.path)
    if max_prefix_tokens is None:
        console.note(f"about {duration(seconds)}, on an idle machine")
    measured = measure_calibration(
        model.model,
        max_prefix_tokens,
        rounds,
        seconds,
        command=command_line(),
        on_progress=console.progress,
    )
    path = write_calibration(measured, target)
    rows = [
        (
            each.plan,
            str(each.prefix_tokens),
            f"{each.measured_seconds:.3f}",
            f"{each.predicted_seconds:.3f}",
        )
        for each in measured.held_out
    ]
    lines = [
        f"{path}: prediction error {measured.median_error_percent:.1f} % (median), "
        f"{measured.max_error_percent:.1f} % (largest), prefixes up to "
        f"{measured.max_prefix_tokens} tokens",
        *table(("plan", "prefix tokens", "measured, s", "predicted, s"), rows),
    ]
    console.result({"file": str(path), **measured.to_json()}, lines)
