"""Commands that hand what follows a `--` to another program, untouched."""

from __future__ import annotations

import click

from .framework import Command

_KEY = "droidkv.passed"


class PassingCommand(Command):
    """A command whose arguments end at the first `--`; the rest is for another program."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Keep what follows the first `--`, and read the rest as usual."""
        cut = args.index("--") if "--" in args else len(args)
        ctx.meta[_KEY] = tuple(args[cut + 1 :])
        return super().parse_args(ctx, args[:cut])


def passed_arguments() -> tuple[str, ...]:
    """What followed the `--` of the command that runs."""
    passed: tuple[str, ...] = click.get_current_context().meta[_KEY]
    return passed
