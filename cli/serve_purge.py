"""`droidkv serve purge`: remove all that one sender stored."""

from __future__ import annotations

import click

from .console import Console
from .framework import Command
from .options import pair_argument


@click.command(
    cls=Command,
    examples="""
    droidkv serve purge smollm2-records
    droidkv serve purge smollm2-records --store redis://10.0.0.1:6379 --json
    """,
)
@pair_argument
@click.option("--store", "store_address", help="As of `droidkv serve sender`.")
@click.option("--dtype", default="float32", show_default=True, help="The sender's.")
@click.pass_obj
def purge(console: Console, pair_name: str, store_address: str | None, dtype: str) -> None:
    """Remove what a pair's sender stored, as its weights are now.

    Caches of other weights are never read as this sender's, so nothing goes wrong without; it
    gives their room back. Purge before the weights change: afterwards the old namespace has no
    name any more. Works on fs:// and redis://. An lm:// server cannot list what it holds: restart
    it. Servers that run keep their copies in memory until they end.
    """
    from droidkv.model_identity import identify
    from droidkv.pair import ModelRef, read_pair
    from droidkv.servable import servable_folder
    from droidkv.serve.keys import namespace_digest
    from droidkv.serve.opening import default_store
    from droidkv.serve.purge import purge as remove

    pair = read_pair(pair_name)
    folder = servable_folder(pair.sender, dtype)
    namespace = namespace_digest(identify(ModelRef(str(folder.absolute())), dtype))
    address = default_store() if store_address is None else store_address
    removed = remove(address, namespace)
    value = {"store": address, "namespace": namespace, "removed": removed}
    console.result(value, [f"removed {removed} objects of {namespace[:16]} from {address}"])
