"""`droidkv stitch`: fit a pair's stitching map, and see what it is worth on unseen items."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from .console import Console
from .framework import Command
from .options import (
    choose_task,
    combined,
    output_file,
    overwrite_option,
    pair_argument,
    run_options,
    task_options,
)
from .places import check_output, files_of, output_stem
from .table import table

if TYPE_CHECKING:
    from droidkv.loading import LoadedModel
    from droidkv.stitch import StitchMap

CHECKED_ITEMS = 4

fit_options = combined(
    click.option(
        "--calibration-items",
        default=24,
        show_default=True,
        help="Items the stitching map is fitted on; never evaluated ones.",
    ),
    click.option("--rank", default=32, show_default=True, help="Rank of the map."),
    click.option("--ridge", default=1e-3, show_default=True, help="Penalty of the fit."),
)


@click.command(
    cls=Command,
    examples="""
    droidkv stitch smollm2-records
    droidkv stitch smollm2-records --rank 8 --output /tmp/rank8.safetensors --json
    """,
)
@pair_argument
@task_options
@fit_options
@click.option("--seed", default=0, show_default=True, help="Seed of the items.")
@run_options
@click.option(
    "-o",
    "--output",
    type=output_file,
    help="The map's file. Default: PAIR.stitch.safetensors here.",
)
@overwrite_option
@click.pass_obj
def stitch(
    console: Console,
    pair_name: str,
    task_name: str | None,
    task_pairs: tuple[str, ...],
    calibration_items: int,
    rank: int,
    ridge: float,
    seed: int,
    dtype: str,
    device: str,
    output: Path | None,
    overwrite: bool,
) -> None:
    """Fit a pair's stitching map, and see how well it fits.

    It maps the sender's hidden state to the receiver's, for every start of a group. `droidkv
    profile` does this by itself; this command is for looking at the fit. The error is
    that of the hidden state on items the map has not seen, as a share of the error without it.
    """
    from droidkv.pair import read_pair

    pair = read_pair(pair_name)
    task_ref = choose_task(pair, task_name, task_pairs)
    target = output or Path(f"{output_stem(pair, task_ref)}.stitch.safetensors")
    check_output(target, overwrite, *files_of(pair, task_ref))

    from droidkv.encode import encode_shared
    from droidkv.estimate import prefill_seconds
    from droidkv.loading import load_pair
    from droidkv.stitch import fit_stitch
    from droidkv.tasks import get_task

    task = get_task(task_ref.name, **task_ref.options)
    sender, receiver = load_pair(pair, dtype, device)
    items = task.items("calibration", calibration_items, seed)
    unseen = task.items("eval", CHECKED_ITEMS, seed)
    prefixes, unseen_prefixes = (
        [
            list(encode_shared(item, sender.tokenizer, receiver.tokenizer, pair.chat).prefix_ids)
            for item in group
        ]
        for group in (items, unseen)
    )
    prefills = 2 * (len(prefixes) + len(unseen_prefixes))
    console.estimate("prefilling", "the fit itself comes on top")(
        prefills * prefill_seconds(receiver.model, prefixes[0])
    )
    done = iter(range(1, len(prefixes) + 1))
    fitted = fit_stitch(
        sender.model,
        receiver.model,
        prefixes,
        rank,
        ridge,
        on_prefix=lambda _: console.progress("stitch", next(done), len(prefixes)),
    )
    errors = _remaining_errors(sender, receiver, fitted, unseen_prefixes)
    fitted.save(target)
    value = {
        "map": str(target),
        "sha256": fitted.sha256,
        "pair": pair.name,
        "rank": fitted.rank,
        "num_calibration_tokens": sum(map(len, prefixes)),
        "num_unseen_tokens": sum(map(len, unseen_prefixes)),
        "remaining_error_ratio": {str(start): error for start, error in errors.items()},
    }
    rows = [(str(start), f"{error:.3f}") for start, error in errors.items()]
    lines = [
        f"{target}: rank {fitted.rank}, {value['num_calibration_tokens']} calibration tokens",
        *table(("start", "error left"), rows),
    ]
    console.result(value, lines)


def _remaining_errors(
    sender: LoadedModel, receiver: LoadedModel, fitted: StitchMap, prefixes: list[list[int]]
) -> dict[int, float]:
    """Start -> distance of the stitched hidden state to the receiver's, over that of the raw one.

    A ratio of 0/0 (the two models enter the layer alike) counts as 1: nothing was gained.
    """
    import torch

    from droidkv.capture import capture

    squares = {start: [0.0, 0.0] for start in fitted.starts}
    for prefix in prefixes:
        ids = torch.tensor([prefix])
        source, target = (
            capture(each.model, ids, hidden_layers=fitted.starts).hidden
            for each in (sender, receiver)
        )
        for start, sums in squares.items():
            stitched = fitted.apply(start, source[start])
            for index, hidden in enumerate((stitched, source[start])):
                sums[index] += float((hidden - target[start]).float().square().sum())
    return {start: (a / b) ** 0.5 if b else 1.0 for start, (a, b) in squares.items()}
