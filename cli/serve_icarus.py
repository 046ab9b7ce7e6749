"""`droidkv serve icarus`: one frozen base and several decoders in one vLLM server."""

from __future__ import annotations

import click

from .console import Console
from .passed import PassingCommand, passed_arguments
from .serve_start import dtype_option, print_option, start


@click.command(
    cls=PassingCommand,
    examples="""
    droidkv serve icarus smollm2-records-icarus -- --port 8003
    droidkv serve icarus smollm2-records-icarus --print --json
    """,
)
@click.argument("pair_names", metavar="PAIR... [-- VLLM FLAGS]", nargs=-1, required=True)
@dtype_option
@print_option
@click.pass_obj
def icarus(console: Console, pair_names: tuple[str, ...], dtype: str, only_print: bool) -> int:
    """Serve a base with the decoders of these pairs.

    The base writes the KV of every token, so one prefix cache serves all decoders. A request
    names its decoder by the pair's name; one that names none is answered by the base:

    \b
      "kv_transfer_params": {"droidkv": {"decoder": "smollm2-records-icarus"}}

    An unknown name is refused with HTTP 400. What follows `--` goes to `vllm serve` as it is.
    """
    from droidkv.model_identity import load_config
    from droidkv.pair import read_pair
    from droidkv.servable import servable_folder
    from droidkv.serve.icarus import IcarusSettings
    from droidkv.serve.icarus_launch import check_decoders, launch_decoders, pair_decoders

    base, adapters = pair_decoders([read_pair(name) for name in pair_names])
    settings = IcarusSettings({name: str(folder) for name, folder in adapters.items()})
    passed = passed_arguments()
    folder = servable_folder(base, dtype)
    architecture = load_config(base).architectures[0]
    names = (base.name, *base.aliases)
    started = launch_decoders(settings, folder, architecture, dtype, names, passed)
    checks = check_decoders(adapters, folder, dtype, passed)
    notes = [f"decoders {', '.join(settings.decoders)}"]
    return start(console, started, checks, names, only_print, notes)
