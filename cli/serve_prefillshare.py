"""`droidkv serve prefillshare`: one base and adapters that read its KV in one vLLM server."""

from __future__ import annotations

import click

from .console import Console
from .passed import PassingCommand, passed_arguments
from .serve_start import audit_option, dtype_option, print_option, start


@click.command(
    cls=PassingCommand,
    examples="""
    droidkv serve prefillshare smollm2-records-prefillshare -- --port 8004
    droidkv serve prefillshare smollm2-records-prefillshare --print --json
    """,
)
@click.argument("pair_names", metavar="PAIR... [-- VLLM FLAGS]", nargs=-1, required=True)
@click.option(
    "--own-tokens",
    type=click.IntRange(1),
    help="Longest end of a prompt that an adapter may compute itself, where a request does not "
    "name its prefix. Default: one block.",
)
@audit_option
@dtype_option
@print_option
@click.pass_obj
def prefillshare(
    console: Console,
    pair_names: tuple[str, ...],
    own_tokens: int | None,
    audit: str | None,
    dtype: str,
    only_print: bool,
) -> int:
    """Serve a base with adapters that read its KV.

    Ask the base first, with the prefix and `max_tokens` 1, then an adapter by the pair's name as
    `model`, with the whole prompt and the length of the prefix:

    \b
      "kv_transfer_params": {"droidkv": {"prefix_tokens": 153}}

    All find the base's blocks, so one prefix is held once, and a switch prefills only what is
    new. A request behind too little of the base's KV is refused (HTTP 424), with the reason.
    What follows `--` goes to `vllm serve` as it is.
    """
    from droidkv.pair import read_pair
    from droidkv.servable import servable_folder
    from droidkv.serve.base_prefix import BasePrefixSettings
    from droidkv.serve.base_prefix_launch import check_adapters, launch_adapters, pair_adapters

    base, adapters = pair_adapters([read_pair(name) for name in pair_names])
    settings = BasePrefixSettings(own_tokens, audit)
    passed = passed_arguments()
    folder = servable_folder(base, dtype)
    names = (base.name, *base.aliases)
    started = launch_adapters(settings, adapters, folder, dtype, names, passed)
    checks = check_adapters(settings, adapters, folder, dtype, passed)
    return start(console, started, checks, names, only_print, [f"adapters {', '.join(adapters)}"])
