"""`droidkv serve`: start vLLM as a sender or a receiver of caches, and tidy the store."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from .console import Console
from .framework import Group
from .options import combined
from .passed import PassingCommand, passed_arguments
from .places import find_profile
from .serve_demo import demo
from .serve_icarus import icarus
from .serve_prefillshare import prefillshare
from .serve_purge import purge
from .serve_start import audit_option, dtype_option, print_option, start
from .units import BANDWIDTH, SECONDS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from droidkv.pair import ModelRef
    from droidkv.serve.settings import ServeSettings

store_option = click.option(
    "--store",
    "store_address",
    help="Where caches lie: fs:///FOLDER, redis://HOST:PORT, lm://HOST:PORT; the same for sender "
    "and receiver. Default: fs:// in droidkv's cache folder.",
)
shared_options = combined(
    store_option,
    click.option(
        "--chunk-tokens",
        type=click.IntRange(1),
        default=256,
        show_default=True,
        help="Tokens in one chunk of the store; the same for sender and receiver.",
    ),
    dtype_option,
    print_option,
)


@click.group(cls=Group)
def serve() -> None:
    """Start vLLM servers that reuse one another's caches.

    A sender stores what it prefills. A receiver, in another process or on another machine, loads
    it, recomputes the layers of its plan, and answers. Both are stock `vllm serve` with droidkv's
    connector; the OpenAI API is unchanged. A request may say, beside `model` and `prompt`,

    \b
      "kv_transfer_params": {"droidkv": {"plan": "[12,24)"}}   this plan
      "kv_transfer_params": {"droidkv": {"reuse": false}}      its own prefill
      "kv_transfer_params": {"droidkv": {"order": "all_first"}}

    Whatever goes wrong with the store, a request is answered by the receiver's own prefill, or
    refused if that was never trained (--on-miss); the reason stands in its audit line and in
    vLLM's /metrics.
    """


@serve.command(
    cls=PassingCommand,
    examples="""
    droidkv serve sender smollm2-records -- --port 8001
    droidkv serve sender smollm2-records smollm2-needle --store redis://10.0.0.1:6379
    droidkv serve sender smollm2-records --plan '[12,24)' --print --json
    """,
)
@click.argument("pair_names", metavar="PAIR... [-- VLLM FLAGS]", nargs=-1, required=True)
@click.option(
    "--profile",
    "profile_names",
    multiple=True,
    help="Profiles whose plans are to be supplied. Repeatable; default: those named as the pairs.",
)
@click.option(
    "--plan",
    "plans",
    multiple=True,
    help="Supply these plans instead of those on the profiles' frontiers. Repeatable.",
)
@shared_options
@click.pass_obj
def sender(
    console: Console,
    pair_names: tuple[str, ...],
    profile_names: tuple[str, ...],
    plans: tuple[str, ...],
    store_address: str | None,
    chunk_tokens: int,
    dtype: str,
    only_print: bool,
) -> int:
    """Serve the sender of these pairs; it stores its caches.

    KV of all layers, and E where the plans on the pairs' frontiers start. What follows `--` goes
    to `vllm serve` as it is.
    """
    from droidkv.errors import PairError
    from droidkv.pair import read_pair
    from droidkv.serve.settings import ServeSettings

    pairs = [read_pair(name) for name in pair_names]
    ref = pairs[0].sender
    for pair in pairs[1:]:
        if pair.sender != ref:
            raise PairError(
                f"expected pairs with one sender, got {pairs[0].name} with {ref.name} and "
                f"{pair.name} with {pair.sender.name}; start one server for each sender"
            )
    profiles: tuple[str, ...] = ()
    if not plans:
        names = profile_names or tuple(pair.name for pair in pairs)
        profiles = tuple(str(find_profile(name).absolute()) for name in names)
    elif profile_names:
        raise click.UsageError("--plan and --profile exclude each other")
    settings = ServeSettings(
        role="sender",
        store=_store(store_address),
        chunk_tokens=chunk_tokens,
        profiles=profiles,
        hidden_layers=_starts(plans, ref),
    )
    return _serve(console, settings, ref, (), dtype, only_print)


@serve.command(
    cls=PassingCommand,
    examples="""
    droidkv serve receiver smollm2-records -- --port 8002
    droidkv serve receiver smollm2-records --plan '[12,24)' --audit audit.jsonl
    droidkv serve receiver smollm2-records --print --json
    """,
)
@click.argument("pair_name", metavar="PAIR [-- VLLM FLAGS]")
@click.option("--profile", "profile_name", help="A profile. Default: the one named as the pair.")
@click.option("--plan", help="The plan of every request that asks for none. Default: pick one.")
@click.option(
    "--max-loss",
    type=click.FloatRange(min=0),
    help="Largest loss of a picked plan; in percent for score. Default: 5.",
)
@click.option(
    "--calibration",
    type=click.Path(dir_okay=False, exists=True),
    help="Weigh each request's length by this file of `droidkv calibrate`.",
)
@click.option("--bandwidth", type=BANDWIDTH, help="The link, such as 10Gbit/s.")
@click.option(
    "--order",
    type=click.Choice(["all_first", "reused_first", "streamed"]),
    default="streamed",
    show_default=True,
    help="Load all, then recompute; load reused layers, then recompute; or E first, recompute at "
    "once while the reused layers stream in.",
)
@click.option(
    "--load",
    type=click.Choice(["sync", "async"]),
    default="sync",
    show_default=True,
    help="Load within the engine's step, or let requests wait while the engine goes on.",
)
@click.option("--load-deadline", type=SECONDS, default=30.0, help="Of one load. Default: 30s.")
@click.option("--lookup-deadline", type=SECONDS, default=2.0, help="Of one look-up. Default: 2s.")
@click.option(
    "--tokens-per-step",
    type=click.IntRange(1),
    default=4096,
    show_default=True,
    help="Most prefix tokens recomputed in one engine step.",
)
@click.option(
    "--on-miss",
    type=click.Choice(["own", "error"]),
    help="What becomes of requests that cannot reuse: the receiver's own prefill, or an error. "
    "Default: error for a receiver that was trained to read the sender's KV, else own.",
)
@click.option(
    "--own-tokens",
    type=click.IntRange(1),
    help="With error: longest end of a prompt that the receiver may compute itself. Default: one "
    "chunk more than the longest suffix that the profile measured.",
)
@audit_option
@click.option("--timeline", is_flag=True, help="Audit lines with timelines; see `droidkv stats`.")
@shared_options
@click.pass_obj
def receiver(
    console: Console,
    pair_name: str,
    profile_name: str | None,
    plan: str | None,
    max_loss: float | None,
    calibration: str | None,
    bandwidth: float | None,
    order: str,
    load: str,
    load_deadline: float,
    lookup_deadline: float,
    tokens_per_step: int,
    on_miss: str | None,
    own_tokens: int | None,
    audit: str | None,
    timeline: bool,
    store_address: str | None,
    chunk_tokens: int,
    dtype: str,
    only_print: bool,
) -> int:
    """Serve the receiver of a pair; it reuses the sender's caches.

    An adapter of the pair is merged once and kept in droidkv's cache folder. What follows `--`
    goes to `vllm serve` as it is.
    """
    from droidkv.pair import read_pair
    from droidkv.serve.settings import ServeSettings, with_miss_policy

    pair = read_pair(pair_name)
    if timeline and audit is None:
        raise click.UsageError("--timeline needs --audit, which the timelines are written to")
    settings = ServeSettings.from_table(
        {
            "role": "receiver",
            "store": _store(store_address),
            "chunk_tokens": chunk_tokens,
            "profiles": [str(find_profile(profile_name or pair.name).absolute())],
            "plan": plan,
            "max_loss": max_loss,
            "calibration": None if calibration is None else str(Path(calibration).absolute()),
            "bandwidth_bytes_per_second": bandwidth,
            "order": order,
            "load": load,
            "load_seconds": load_deadline,
            "lookup_seconds": lookup_deadline,
            "tokens_per_step": tokens_per_step,
            "on_miss": on_miss,
            "own_tokens": own_tokens,
            "audit": audit,
            "timeline": timeline,
        }
    )
    settings = with_miss_policy(settings)
    return _serve(console, settings, pair.receiver, (pair.name,), dtype, only_print)


serve.add_command(icarus)
serve.add_command(prefillshare)
serve.add_command(demo)
serve.add_command(purge)


def _store(address: str | None) -> str:
    from droidkv.serve.opening import default_store

    return default_store() if address is None else address


def _starts(plans: Sequence[str], ref: ModelRef) -> tuple[int, ...]:
    """Layers whose E these plans need."""
    if not plans:
        return ()
    from droidkv.model_identity import load_config
    from droidkv.plan import ReusePlan

    num_layers = load_config(ref).num_hidden_layers
    parsed = [ReusePlan.parse(plan, num_layers) for plan in plans]
    return tuple(sorted({p.transition for p in parsed if p.transition is not None}))


def _serve(
    console: Console,
    settings: ServeSettings,
    ref: ModelRef,
    names: tuple[str, ...],
    dtype: str,
    only_print: bool,
) -> int:
    from droidkv.servable import servable_folder
    from droidkv.serve.launch import launch
    from droidkv.serve.preflight import preflight

    passed = passed_arguments()
    folder = servable_folder(ref, dtype)
    names = (*names, ref.name, *ref.aliases)
    started = launch(settings, folder, dtype, names, passed)
    checks = preflight(settings, folder, dtype, passed)
    return start(console, started, checks, names, only_print)
