"""`droidkv verify`: the oracles of a reuse plan, on the user's own pair, with figures."""

from __future__ import annotations

import dataclasses

import click

from . import exits
from .console import Console
from .framework import Command
from .options import choose_task, pair_argument, run_options, task_options
from .places import read_named_profile
from .table import table


@click.command(
    cls=Command,
    examples="""
    droidkv verify smollm2-records
    droidkv verify my-pair.toml --profile my-pair.json --device cuda --dtype bfloat16 --json
    """,
)
@pair_argument
@task_options
@click.option("--items", default=2, show_default=True, type=click.IntRange(1), help="Items.")
@click.option(
    "--plan", "plan_texts", multiple=True, help="A plan to try. Repeatable; default: a spread."
)
@click.option(
    "--profile",
    "profile_name",
    help="Its stitching map is tried too, and it must be of these very models.",
)
@run_options
@click.pass_obj
def verify(
    console: Console,
    pair_name: str,
    task_name: str | None,
    task_pairs: tuple[str, ...],
    items: int,
    plan_texts: tuple[str, ...],
    profile_name: str | None,
    dtype: str,
    device: str,
) -> int:
    """Prove on a pair that plans compute what they should.

    Each oracle is checked on items of the pair's task, and told with the largest deviation and
    what is allowed. Exits with 1 if one fails.
    """
    from droidkv.pair import read_pair

    pair = read_pair(pair_name)
    task_ref = choose_task(pair, task_name, task_pairs)
    named = None if profile_name is None else read_named_profile(profile_name)

    from droidkv.encode import encode_shared
    from droidkv.loading import load_pair
    from droidkv.plan import ReusePlan
    from droidkv.profile import require_identity
    from droidkv.profile_job import load_map
    from droidkv.tasks import get_task
    from droidkv.verify import verify_pair

    task = get_task(task_ref.name, **task_ref.options)
    sender, receiver = load_pair(pair, dtype, device)
    stitch = None
    if named is not None:
        require_identity(named[1], sender.fingerprint, receiver.fingerprint)
        stitch = load_map(*named) if named[1].stitch else None
    num_layers = receiver.model.num_layers
    plans = [ReusePlan.parse(text, num_layers) for text in plan_texts]
    encoded = [
        encode_shared(item, sender.tokenizer, receiver.tokenizer, pair.chat)
        for item in task.items("eval", items)
    ]
    results = verify_pair(
        sender,
        receiver,
        encoded,
        plans or None,
        stitch,
        console.progress,
        console.estimate("verifying"),
    )
    passed = all(result.passed for result in results)
    value = {
        "pair": pair.name,
        "num_items": len(encoded),
        "passed": passed,
        "oracles": [dataclasses.asdict(result) for result in results],
    }
    rows = [
        (
            "ok" if result.passed else "FAIL",
            result.oracle,
            f"{result.error:.2g}",
            f"{result.tolerance:.2g}",
        )
        for result in results
    ]
    lines = table(("", "what must hold", "deviation", "allowed"), rows, "<<")
    lines += [f"{each.oracle}: {each.detail}" for each in results if not each.passed]
    console.result(value, lines)
    return exits.OK if passed else exits.CHECK_FAILED
