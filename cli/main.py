"""Wires the commands together; `droidkv` runs `main`."""

from __future__ import annotations

import click

import droidkv

from . import exits
from .ask import ask
from .bench import bench
from .calibrate import calibrate
from .confirm import confirm
from .doctor import doctor
from .framework import Root
from .frontier import frontier
from .pair import pair
from .probe import probe
from .profile import profile
from .refine import refine
from .search import search
from .serve import serve
from .sharing import sharing
from .stats import stats
from .stitch import stitch
from .train import train
from .verify import verify


@click.group(cls=Root, epilog=exits.EPILOG)
@click.version_option(droidkv.__version__, prog_name="droidkv")
def main() -> None:
    """Let one fine-tune of a model reuse another's KV cache.

    From a pair of models to a frontier of loss against prefill work: `droidkv profile PAIR`, then
    `droidkv frontier show PAIR`, `droidkv frontier pick PAIR`, `droidkv ask PAIR`.
    """


for command in (
    pair,
    profile,
    frontier,
    ask,
    confirm,
    search,
    stitch,
    refine,
    train,
    sharing,
    probe,
    verify,
    calibrate,
    doctor,
    bench,
    serve,
    stats,
):
    main.add_command(command)

if __name__ == "__main__":
    main()
