"""`droidkv bench ttft`: vLLM with and without reuse, to the first token."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from .console import Console
from .framework import Command
from .options import command_line, output_folder, picture_file
from .places import check_output
from .table import table


@click.command(
    cls=Command,
    examples="""
    droidkv bench ttft --json > ttft.json
    droidkv bench ttft --prefix-tokens 512 --link-tokens 0 --repeats 3
    droidkv bench ttft --pair smollm2-records-prefillshare --link-tokens 0
    droidkv bench ttft --from ttft.json --plot link.png
    """,
)
@click.option("--pair", "pair_name", default="smollm2-records", show_default=True)
@click.option("--dtype", default="float32", show_default=True, help="Of both models.")
@click.option("--seed", default=0, show_default=True, help="Seed of the random tokens.")
@click.option(
    "--prefix-tokens",
    "lengths",
    type=click.IntRange(1),
    multiple=True,
    default=(512, 1024, 2048, 4096),
    show_default=True,
    help="A prefix length, in whole chunks. Repeatable.",
)
@click.option("--suffix-tokens", default=32, show_default=True, help="Behind each prefix.")
@click.option(
    "--layers", type=int, multiple=True, help="A number of recomputed layers. Repeatable."
)
@click.option("--repeats", default=5, show_default=True, help="Timed runs; the median counts.")
@click.option(
    "--link-tokens",
    type=click.IntRange(0),
    default=1024,
    show_default=True,
    help="Prefix of the sweep over slow links; 0 leaves it out.",
)
@click.option("--chunk-tokens", default=256, show_default=True, type=click.IntRange(1))
@click.option("--store", "store_address", help="Default: a folder, through LMCache's fs://.")
@click.option(
    "--output",
    "-o",
    type=output_folder,
    default=Path("build/bench-ttft"),
    show_default=True,
    help="Folder for logs, audit file and store; audit.jsonl and store/ in it are removed first.",
)
@click.option(
    "--from",
    "source",
    type=click.Path(dir_okay=False, exists=True, path_type=Path),
    help="Show an earlier result instead of measuring.",
)
@click.option("--plot", type=picture_file, help="Draw the sweep over links; needs matplotlib.")
@click.pass_obj
def ttft(
    console: Console,
    pair_name: str,
    dtype: str,
    seed: int,
    lengths: tuple[int, ...],
    suffix_tokens: int,
    layers: tuple[int, ...],
    repeats: int,
    link_tokens: int,
    chunk_tokens: int,
    store_address: str | None,
    output: Path,
    source: Path | None,
    plot: Path | None,
) -> None:
    """Time vLLM to the first token.

    By full prefill, by plans, over slow links, and what reuse costs others.
    Four engines take turns: receiver and sender, each with the connector and without. Needs vLLM
    and LMCache (`make install-serve`).
    """
    if plot is not None:
        check_output(plot, True, source)
    if source is None:
        from droidkv.pair import read_pair
        from droidkv.serve.preflight import require_engine
        from droidkv.serve.ttft_bench import TtftSettings, bench_ttft

        require_engine()
        settings = TtftSettings(
            folder=output,
            dtype=dtype,
            lengths=lengths,
            suffix_tokens=suffix_tokens,
            layers=layers,
            repeats=repeats,
            link_tokens=link_tokens,
            chunk_tokens=chunk_tokens,
            store=store_address,
            seed=seed,
        )
        console.note("starting four vLLM engines; two minutes or so")
        result = bench_ttft(read_pair(pair_name), settings, command_line(), console.progress)
    else:
        from droidkv.errors import ServeError
        from droidkv.jsonio import read_json

        result = read_json(source, ServeError)
        if not isinstance(result, dict) or "lengths" not in result:
            raise ServeError(f"{source}: expected what `droidkv bench ttft --json` printed")
        if any("compute_seconds" not in row for row in result.get("link", {}).get("rows", ())):
            raise ServeError(
                f"{source}: expected compute_seconds in each row over a link, which an older "
                "version did not measure; run `droidkv bench ttft --json` again"
            )
    if plot is not None:
        if "link" not in result:
            raise click.UsageError("--plot draws the sweep over links, which was left out")
        from droidkv.plots import plot_link

        link = result["link"]
        title = f"{result['pair']}, {link['plan']}, {link['prefix_tokens']} prefix tokens"
        plot_link(link["rows"], plot, title)
    console.result(result, _lines(result))


def _lines(result: Mapping[str, Any]) -> Iterator[str]:
    """A benchmark's result for people."""
    rows = []
    for length in result["lengths"]:
        rows.append(_row(length, "full prefill", "", length["full_seconds"], 1.0))
        local = length["local"]
        rows.append(_row(length, "vLLM's own cache", "", local["seconds"], local["ratio"]))
        for plan in length["plans"]:
            layers = str(plan["layers"])
            rows.append(_row(length, plan["plan"], layers, plan["seconds"], plan["ratio"]))
    header = ("prefix", "plan", "layers", "first token", "less")
    yield from table(header, rows, "><")
    for overhead in result["overheads"]:
        costs = [f"storing costs the sender {_percent(overhead['sender'])}"]
        if "no_match" in overhead:
            costs.append(f"a request that matches nothing takes {_percent(overhead['no_match'])}")
        yield (
            f"{overhead['prefix_tokens']} tokens, {overhead['num_pairs']} pairs: {', '.join(costs)}"
        )
    if "link" not in result:
        return
    link = result["link"]
    yield ""
    yield (
        f"{link['plan']} over slow links, {link['prefix_tokens']} prefix tokens, "
        f"{link['compute_seconds']:.3f} s without one"
    )
    links = [
        (
            row["order"],
            f"{row['load_seconds']:.3f} s",
            f"{row['compute_seconds']:.3f} s",
            f"{row['seconds']:.3f} s",
            f"{row['predicted_seconds']:.3f} s",
            f"{row['over_bound']:.2f}",
        )
        for row in link["rows"]
    ]
    yield from table(
        ("order", "load", "compute", "first token", "predicted", "over max(load, compute)"), links
    )
    yield (
        f"prediction: {link['prediction_median_percent']:.1f} % median error, "
        f"{link['prediction_max_percent']:.1f} % largest"
    )


def _row(
    length: Mapping[str, Any], plan: str, layers: str, seconds: float, ratio: float
) -> tuple[str, ...]:
    return (str(length["prefix_tokens"]), plan, layers, f"{seconds:.3f} s", f"{ratio:.2f}x")


def _percent(overhead: Mapping[str, float]) -> str:
    return (
        f"{overhead['overhead_percent']:+.1f} % [{overhead['overhead_percent_low']:+.1f}, "
        f"{overhead['overhead_percent_high']:+.1f}]"
    )
