"""`droidkv bench memory`: KV blocks that vLLM holds for several models on one prefix."""

from __future__ import annotations

from pathlib import Path

import click

from .console import Console
from .framework import Command
from .options import command_line, output_folder
from .table import table


@click.command(
    cls=Command,
    examples="""
    droidkv bench memory --json > memory.json
    droidkv bench memory --pair tiny --models 3 --prefix-tokens 256
    """,
)
@click.option(
    "--pair",
    "pair_name",
    default="smollm2-records",
    show_default=True,
    help="The pair whose sender is the base; the models are random adapters of it.",
)
@click.option("--dtype", default="float32", show_default=True, help="Of the base and its cache.")
@click.option("--seed", default=0, show_default=True, help="Seed of tokens and adapters.")
@click.option(
    "--models",
    type=click.IntRange(1),
    default=8,
    show_default=True,
    help="Counted for 1 to so many.",
)
@click.option(
    "--prefix-tokens",
    type=click.IntRange(1),
    default=2048,
    show_default=True,
    help="Tokens that all models share, in whole blocks.",
)
@click.option(
    "--question-tokens",
    type=click.IntRange(1),
    default=200,
    show_default=True,
    help="Prompt tokens of each model's own.",
)
@click.option(
    "--new-tokens",
    type=click.IntRange(1),
    default=20,
    show_default=True,
    help="Generated tokens of each model's own.",
)
@click.option(
    "--block-tokens",
    type=click.IntRange(1),
    default=32,
    show_default=True,
    help="Tokens of one block; on a CPU a multiple of 32.",
)
@click.option(
    "--output",
    "-o",
    type=output_folder,
    default=Path("build/bench-memory"),
    show_default=True,
    help="Folder for adapters and logs.",
)
@click.pass_obj
def memory(
    console: Console,
    pair_name: str,
    dtype: str,
    seed: int,
    models: int,
    prefix_tokens: int,
    question_tokens: int,
    new_tokens: int,
    block_tokens: int,
    output: Path,
) -> None:
    """Count the KV blocks that vLLM holds for models on one prefix.

    Read from live engines' block pools, for one model up to `--models`: each with a cache of its
    own; PrefillShare in one engine; ICaRus in one engine. Beside them the tokens that the formula
    of each promises.
    """
    from droidkv.pair import read_pair
    from droidkv.serve.memory_bench import MemorySettings, bench_memory
    from droidkv.serve.preflight import require_engine

    if prefix_tokens % block_tokens:
        raise click.UsageError("--prefix-tokens must be a multiple of --block-tokens")
    require_engine(needs_store=False)
    output.mkdir(parents=True, exist_ok=True)
    settings = MemorySettings(
        folder=output,
        dtype=dtype,
        num_models=models,
        prefix_tokens=prefix_tokens,
        question_tokens=question_tokens,
        new_tokens=new_tokens,
        block_tokens=block_tokens,
        seed=seed,
    )
    result = bench_memory(read_pair(pair_name).sender, settings, command_line(), console.progress)
    rows = [
        (
            row["mode"],
            str(row["models"]),
            str(row["held_blocks"]),
            str(row["held_tokens"]),
            str(row["formula_tokens"]),
            f"{row['relative_error_percent']:+.2f} %",
        )
        for row in result["rows"]
    ]
    header = ("", "models", "blocks", "tokens held", "by formula", "error")
    lines = [
        f"{prefix_tokens} tokens shared, {settings.unique_tokens} of each model's own, blocks of "
        f"{block_tokens}"
    ]
    console.result(result, [*lines, *table(header, rows, "<>>>>>")])
