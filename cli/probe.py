"""`droidkv probe`: which layers cannot be reused, one layer at a time."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from droidkv.errors import MissingExtraError, ProfileError

from .console import Console
from .framework import Command
from .options import (
    choose_task,
    command_line,
    overwrite_option,
    pair_argument,
    profile_file,
    run_options,
    task_options,
)
from .places import FOLDER, check_output, files_of, output_stem
from .table import table

if TYPE_CHECKING:
    from droidkv.pair import Pair
    from droidkv.probe_record import Probe, ProbeAgreement


@click.command(
    cls=Command,
    examples="""
    droidkv probe smollm2-records -o mine.probe.json
    droidkv probe smollm2-needle --compare profiles/smollm2-records.probe.json -o my.probe.json
    """,
)
@pair_argument
@task_options
@click.option("--items", default=16, show_default=True, help="Probed items.")
@click.option("--seed", default=0, show_default=True, help="Seed of the items.")
@click.option(
    "--share",
    default=0.05,
    show_default=True,
    type=click.FloatRange(0, 1, min_open=True),
    help="A layer is critical if reusing it alone costs this share of reusing all.",
)
@click.option(
    "--compare",
    "compared",
    multiple=True,
    type=click.Path(dir_okay=False, path_type=Path),
    help="Another probe to compare with: of another task, or another pair. Repeatable.",
)
@run_options
@click.option(
    "-o", "--output", type=profile_file, help="The probe's file. Default: profiles/PAIR.probe.json."
)
@overwrite_option
@click.pass_obj
def probe(
    console: Console,
    pair_name: str,
    task_name: str | None,
    task_pairs: tuple[str, ...],
    items: int,
    seed: int,
    share: float,
    compared: tuple[Path, ...],
    dtype: str,
    device: str,
    output: Path | None,
    overwrite: bool,
) -> None:
    """Find the critical layers: reuse one alone, recompute one alone.

    Writes the probe and a plot beside it, NAME.png. A run that was stopped goes on where it was;
    several processes with the same command share the work.
    """
    from droidkv.pair import read_pair
    from droidkv.probe_record import compare_probes, read_probe

    pair = read_pair(pair_name)
    task = choose_task(pair, task_name, task_pairs)
    others = {path: read_probe(path) for path in compared}
    if others:
        _require_same_layers(pair, others)
    target = output or FOLDER / f"{output_stem(pair, task)}.probe.json"
    check_output(target, overwrite, *files_of(pair, task), *compared)

    console.keeps_run_of(target)

    from droidkv.probe import ProbeSettings, probe_pair

    console.note(f"probing {pair.name} on {task}, {items} items, into {target}")
    settings = ProbeSettings(task, items, seed, dtype, device)
    made = probe_pair(
        pair, settings, target, console.progress, command_line(), console.estimate("probing")
    )
    agreements = {path: compare_probes(made, other, share=share) for path, other in others.items()}
    plot = _plotted(console, made, target.with_suffix(".png"))
    stability = made.stability() if items > 1 and made.num_layers > 1 else None
    value: dict[str, Any] = {
        "probe": str(target),
        "plot": None if plot is None else str(plot),
        "pair": made.pair,
        "num_items": len(made.items),
        "full_reuse_kl": made.full_reuse_loss(),
        "critical_layers": made.critical_layers(share),
        "reuse_one_kl": made.mean("reuse_one"),
        "recompute_one_kl": made.mean("recompute_one"),
        "stability": None if stability is None else dataclasses.asdict(stability),
        "compared": {str(path): dataclasses.asdict(each) for path, each in agreements.items()},
    }
    console.result(value, _lines(target, made, value, agreements))


def _require_same_layers(pair: Pair, others: Mapping[Path, Probe]) -> None:
    from droidkv.model_identity import load_config

    num_layers = int(load_config(pair.receiver).get_text_config().num_hidden_layers)
    for path, other in others.items():
        if other.num_layers != num_layers:
            raise ProfileError(
                f"expected a probe of {num_layers} layers to compare with, as {pair.name} has, "
                f"got {path} of {other.num_layers}"
            )


def _plotted(console: Console, made: Probe, path: Path) -> Path | None:
    from droidkv.plots import plot_critical_layers

    title = f"{made.pair} on {made.task.name} (n = {len(made.items)})"
    try:
        plot_critical_layers(made.mean("reuse_one"), made.mean("recompute_one"), path, title)
    except MissingExtraError as error:
        console.note(f"no plot: {error}")
        return None
    return path


def _lines(
    path: Path, made: Probe, value: dict[str, Any], agreements: dict[Path, ProbeAgreement]
) -> Iterator[str]:
    critical = value["critical_layers"]
    named = ", ".join(map(str, critical)) or "none"
    yield f"{path}: {made.pair} on {made.task.name}, n = {len(made.items)} items"
    yield f"reusing every layer: KL {value['full_reuse_kl']:.3g}; critical layers: {named}"
    if stability := value["stability"]:
        yield (
            f"rank correlation of the layers' losses: between items "
            f"{stability['pairwise_spearman']:.2f}, between halves of the items "
            f"{stability['split_half_spearman']:.2f}"
        )
    for other, agreement in agreements.items():
        yield (
            f"with {other}: rank correlation {agreement.spearman:.2f}, "
            f"{len(agreement.shared_layers)} critical layers shared "
            f"(overlap {agreement.critical_overlap:.2f})"
        )
    rows = [
        ("*" if layer in critical else "", str(layer), f"{reused:.3g}", f"{recomputed:.3g}")
        for layer, (reused, recomputed) in enumerate(
            zip(value["reuse_one_kl"], value["recompute_one_kl"], strict=True)
        )
    ]
    yield from table(("", "layer", "KL, reused alone", "KL, recomputed alone"), rows)
