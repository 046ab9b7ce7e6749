"""`droidkv serve demo`: two servers on this machine, one document, answered each way over HTTP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from .console import Console
from .framework import Command
from .options import choose_task, output_folder, pair_argument, task_options
from .places import find_profile
from .table import num_bytes, table


@click.command(
    cls=Command,
    examples="""
    droidkv serve demo smollm2-records
    droidkv serve demo smollm2-records-prefillshare
    droidkv serve demo smollm2-records --store redis://127.0.0.1:6379 --questions 8 --json
    """,
)
@pair_argument
@click.option("--profile", "profile_name", help="A profile. Default: the one named as the pair.")
@task_options
@click.option("--questions", default=8, show_default=True, type=click.IntRange(1))
@click.option("--repeats", default=1, show_default=True, type=click.IntRange(1))
@click.option(
    "--max-loss",
    type=click.FloatRange(min=0),
    help="Largest loss of the picked plan; in percent for score. Default: 5.",
)
@click.option("--store", "store_address", help="Default: a folder, through LMCache's fs://.")
@click.option(
    "--chunk-tokens",
    type=click.IntRange(1),
    help="Default: 64, or 16 for a receiver that was trained to read the base's KV.",
)
@click.option("--dtype", default="float32", show_default=True, help="Of both models.")
@click.option(
    "--output",
    "-o",
    type=output_folder,
    default=Path("build/serve-demo"),
    show_default=True,
    help="Folder for logs, audit file and store; audit.jsonl and store/ in it are removed first.",
)
@click.pass_obj
def demo(
    console: Console,
    pair_name: str,
    profile_name: str | None,
    task_name: str | None,
    task_pairs: tuple[str, ...],
    questions: int,
    repeats: int,
    max_loss: float | None,
    store_address: str | None,
    chunk_tokens: int | None,
    dtype: str,
    output: Path,
) -> None:
    """Ask a receiver about a document that a sender has read.

    Starts a vLLM server for each, with LMCache between them, and asks over the OpenAI API: by the
    receiver's own full prefill, by naive reuse, and by the plan that the server picks; or, where
    the receiver was trained to read the base's KV, by the base alone, by the receiver's own full
    prefill, and behind the base's KV. Needs vLLM and LMCache in this environment (`make
    install-serve`).
    """
    from droidkv.pair import read_pair
    from droidkv.serve.demo import DemoSettings, run_demo, shared_document
    from droidkv.serve.preflight import require_engine
    from droidkv.tasks import get_task

    require_engine()
    pair = read_pair(pair_name)
    chosen = choose_task(pair, task_name, task_pairs)
    options: dict[str, Any] = {"questions_per_context": questions}
    if pair.reference is None:  # the others read no longer texts than they were trained on
        options["num_records"] = 20
    options |= dict(chosen.options)
    task = get_task(chosen.name, **(options if chosen.name == "records" else chosen.options))
    items = shared_document(task.generate("eval", seed=1), questions)
    settings = DemoSettings(
        profile=find_profile(profile_name or pair.name),
        folder=output,
        store=store_address,
        chunk_tokens=chunk_tokens,
        dtype=dtype,
        max_loss=max_loss,
        repeats=repeats,
    )
    console.note("starting two vLLM servers; a minute or two")
    result = run_demo(pair, task, items, settings, console.progress)
    console.result(result, _lines(result))


def _lines(result: dict[str, Any]) -> list[str]:
    tokens = f"{result['prefix_tokens']} + {result['suffix_tokens']} tokens"
    lines = [f"one document of the sender, {tokens}, store {result['store']}", ""]
    rows = [
        (
            way["way"],
            way["plan"] or "",
            f"{way['reused_share']:.0%}",
            str(way["recomputed_layers"]) if way["plan"] else "all",
            num_bytes(way["loaded_bytes"]),
            f"{way['median_ttft_seconds']:.3f} s",
            f"{way['ratio']:.2f}x",
            f"{way['mean_score']:.2f}",
        )
        for way in result["ways"]
    ]
    header = ("", "plan", "of the prefix", "layers", "loaded", "median TTFT", "less", "mean score")
    lines += table(header, rows, "<<")
    lines += ["", *table(("", "answer", "score"), _answer_rows(result), "<<")]
    audit = result["audit"]
    return [*lines, "", f"droidkv stats {audit} --trace trace.json   shows where the time went"]


def _answer_rows(result: dict[str, Any]) -> list[tuple[str, str, str]]:
    return [
        (
            row["way"],
            "".join(c if c.isprintable() else "\N{MIDDLE DOT}" for c in row["text"])[:60],
            f"{row['score']:.0f}",
        )
        for row in result["answers"]
    ]
