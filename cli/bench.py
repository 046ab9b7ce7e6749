"""`droidkv bench`: ratios within one run, with all that is needed to repeat it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from .bench_memory import memory
from .bench_ttft import ttft
from .console import Console
from .framework import Group
from .options import combined, command_line, run_options
from .progress import duration
from .table import num_bytes, table

if TYPE_CHECKING:
    from droidkv.loading import LoadedModel
    from droidkv.models import DecoderModel

bench_options = combined(
    click.option(
        "--pair",
        "pair_name",
        default="smollm2-records",
        show_default=True,
        help="The pair whose models are timed.",
    ),
    run_options,
    click.option("--seed", default=0, show_default=True, help="Seed of the random tokens."),
)


@click.group(cls=Group)
def bench() -> None:
    """Time droidkv against what it replaces, on this machine.

    Run on an idle machine; the load average is part of the result.
    """


@bench.command(
    examples="""
    droidkv bench sweep --json > sweep.json
    droidkv bench sweep --pair tiny --prefix-tokens 64
    """
)
@bench_options
@click.option("--prefix-tokens", default=2048, show_default=True, help="Of each item.")
@click.option("--suffix-tokens", default=8, show_default=True, help="Of each item.")
@click.option("--answer-tokens", default=4, show_default=True, help="Of each item.")
@click.option("--items", default=1, show_default=True, help="Items.")
@click.option("--granularity", default=1, show_default=True, help="Borders of groups.")
@click.option(
    "--paper-plans",
    default=32,
    show_default=True,
    help="Plans that the paper's loop is timed on, then scaled up; 0 leaves it out.",
)
@click.pass_obj
def sweep(
    console: Console,
    pair_name: str,
    dtype: str,
    device: str,
    seed: int,
    prefix_tokens: int,
    suffix_tokens: int,
    answer_tokens: int,
    items: int,
    granularity: int,
    paper_plans: int,
) -> None:
    """Time the exact sweep against evaluating every plan by itself."""
    sender, receiver = _models(pair_name, dtype, device)

    from droidkv.bench.sweep import bench_sweep, work_limit
    from droidkv.plan import all_plans

    plans = all_plans(receiver.model.num_layers, granularity)
    once = sum(plan.num_recomputed for plan in plans) / receiver.model.num_layers
    # The naive loop, the paper's plans, three sweeps; each in prefills of one prefix.
    prefills = once * (1 + paper_plans / len(plans)) + 3 * once / work_limit(plans)
    seconds = _prefill_seconds(sender.model, prefix_tokens) * prefills * items
    console.note(f"about {duration(seconds)} on this machine")
    result: dict[str, Any] = bench_sweep(
        sender.model,
        receiver.model,
        prefix_tokens,
        suffix_tokens,
        answer_tokens,
        items,
        granularity,
        paper_plans,
        seed,
        command_line(),
        console.progress,
    )
    lines = [
        f"{result['num_plans']} plans, {prefix_tokens} prefix tokens, {items} items",
        f"sweep {duration(result['sweep_seconds'])}, naive loop "
        f"{duration(result['naive_seconds'])}: {result['ratio']}x "
        f"(limit by work {result['limit']}x)",
        f"largest difference {result['max_abs_difference']:.2g}, peak memory "
        f"{num_bytes(result['peak_rss_bytes'])}",
    ]
    if "paper_ratio" in result:
        lines.insert(2, f"against decoding an answer per plan: {result['paper_ratio']}x")
    console.result(result, lines)


@bench.command(
    examples="""
    droidkv bench prefill --json > prefill.json
    droidkv bench prefill --pair tiny --prefix-tokens 64 --layers 1 --layers 2
    """
)
@bench_options
@click.option("--prefix-tokens", default=1000, show_default=True, help="Tokens both models share.")
@click.option("--suffix-tokens", default=32, show_default=True, help="Tokens of the receiver.")
@click.option(
    "--layers", type=int, multiple=True, help="A number of recomputed layers. Repeatable."
)
@click.option("--repeats", default=5, show_default=True, help="Timed runs; the median counts.")
@click.pass_obj
def prefill(
    console: Console,
    pair_name: str,
    dtype: str,
    device: str,
    seed: int,
    prefix_tokens: int,
    suffix_tokens: int,
    layers: tuple[int, ...],
    repeats: int,
) -> None:
    """Time the partial against the full prefill.

    By number of recomputed layers; the full prefill is the stock model's own.
    """
    sender, receiver = _models(pair_name, dtype, device)

    from droidkv.bench.prefill import SHARES, bench_prefill

    num_rows = len(layers) or len(SHARES)
    seconds = _prefill_seconds(sender.model, prefix_tokens + suffix_tokens)
    console.note(f"about {duration(seconds * 1.5 * num_rows * (repeats + 1))} on this machine")
    result: dict[str, Any] = bench_prefill(
        sender.model,
        receiver.model,
        layers or None,
        prefix_tokens,
        suffix_tokens,
        repeats,
        seed,
        command_line(),
        console.progress,
    )
    rows = [
        (
            str(row["k"]),
            row["plan"],
            f"{row['full_seconds']:.3f}",
            f"{row['partial_seconds']:.3f}",
            f"{row['ratio']:.2f}x",
            f"{row['limit']:.2f}x",
        )
        for row in result["rows"]
    ]
    header = ("layers", "plan", "full, s", "partial, s", "ratio", "limit")
    lines = [f"{prefix_tokens} + {suffix_tokens} tokens, median of {repeats}"]
    console.result(result, [*lines, *table(header, rows, "><")])


@bench.command(
    examples="""
    droidkv bench icarus --json > icarus.json
    droidkv bench icarus --pair tiny --prefix-tokens 32 --batch 1 --decoders 2
    """
)
@bench_options
@click.option("--prefix-tokens", default=512, show_default=True, help="Tokens read before.")
@click.option("--steps", default=8, show_default=True, help="Decoding steps of one timed run.")
@click.option("--repeats", default=5, show_default=True, help="Timed runs; the median counts.")
@click.option(
    "--batch", "batches", type=int, multiple=True, help="Rows. Repeatable; default: 1, 8, 32."
)
@click.option(
    "--decoders", type=int, multiple=True, help="On one prefix. Repeatable; default: 1, 2, 4, 8."
)
@click.pass_obj
def icarus(
    console: Console,
    pair_name: str,
    dtype: str,
    device: str,
    seed: int,
    prefix_tokens: int,
    steps: int,
    repeats: int,
    batches: tuple[int, ...],
    decoders: tuple[int, ...],
) -> None:
    """Time the fused step of ICaRus.

    It is timed against two separate passes and against plain models. The base is the pair's
    sender; the adapters are random.
    """
    from droidkv.bench.icarus import BATCHES, DECODERS, bench_icarus
    from droidkv.loading import load_model
    from droidkv.pair import read_pair

    base = load_model(read_pair(pair_name).sender, dtype, device)
    result: dict[str, Any] = bench_icarus(
        base.model,
        batches or BATCHES,
        decoders or DECODERS,
        prefix_tokens,
        steps,
        repeats,
        seed,
        command_line(),
        console.progress,
    )
    ways = ("fused", "two_passes", "two_passes_one_copy", "plain")
    rows = [
        (
            f"{row['rows']} x {row['decoders']}",
            *(f"{row['seconds'][way]:.3f}" for way in ways),
            f"{row['two_passes_ratio']:.2f}x",
            f"{row['two_passes_one_copy_ratio']:.2f}x",
            f"{row['overhead_over_plain']:.2f}",
        )
        for row in [*result["by_batch"], *result["by_decoders"]]
    ]
    timed = ("fused, s", "two passes, s", "beside, s", "plain, s")
    header = ("rows x decoders", *timed, "faster than two", "than beside", "of plain's time")
    lines = [f"{prefix_tokens} tokens read, {steps} steps, median of {repeats}"]
    console.result(result, [*lines, *table(header, rows, "><")])


bench.add_command(ttft)
bench.add_command(memory)


def _models(pair_name: str, dtype: str, device: str) -> tuple[LoadedModel, LoadedModel]:
    from droidkv.loading import load_pair
    from droidkv.pair import read_pair

    return load_pair(read_pair(pair_name), dtype, device)


def _prefill_seconds(model: DecoderModel, num_tokens: int) -> float:
    from droidkv.bench.timing import random_tokens
    from droidkv.estimate import prefill_seconds

    return prefill_seconds(model, random_tokens(model, num_tokens, seed=0))
