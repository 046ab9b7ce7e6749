"""How every command behaves: its common options, its examples, and what an error looks like."""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import click

from droidkv.errors import DroidKVError, StorageError

from . import exits
from .console import Console


class Command(click.Command):
    """A command with `--json` and `-q`, whose help ends with examples.

    It returns its exit code, or None for 0. The console comes by `click.pass_obj`.
    """

    def __init__(self, *args: Any, examples: str = "", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.examples = examples
        self.params += [
            click.Option(
                ["--json", "as_json"],
                is_flag=True,
                expose_value=False,
                callback=_set_json,
                help="Print one JSON document on stdout, and nothing else.",
            ),
            click.Option(
                ["-q", "--quiet"],
                is_flag=True,
                expose_value=False,
                callback=_set_quiet,
                help="No notes and no progress on stderr.",
            ),
        ]

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the examples as they are, unwrapped."""
        if self.examples:
            with formatter.section("Examples"):
                for line in self.examples.strip().splitlines():
                    formatter.write(f"{'':>{formatter.current_indent}}{line.strip()}\n")
        super().format_epilog(ctx, formatter)


class Group(click.Group):
    """A group of such commands."""

    command_class = Command
    group_class = type

    def list_commands(self, ctx: click.Context) -> list[str]:
        """In the order they were added, which is the order of use."""
        return list(self.commands)


class Root(Group):
    """The whole command: turns everything raised into a message and an exit code."""

    def main(self, args: Sequence[str] | None = None, *rest: Any, **extra: Any) -> Any:
        """Run the command line and exit."""
        arguments = list(sys.argv[1:] if args is None else args)
        # Set before transformers is imported, which happens inside the commands.
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        _end_in_order()
        console = Console()
        extra |= {"standalone_mode": False, "obj": console}
        try:
            try:
                code = super().main(arguments, *rest, **extra) or exits.OK
            except click.UsageError as error:
                console.json = console.json or "--json" in arguments
                code = _report_usage(console, error)
        except (click.Abort, KeyboardInterrupt):
            code = exits.INTERRUPTED
            console.error("Interrupted", f"interrupted; {_how_to_go_on(console)}", code)
        except _Ended as ended:
            code = ended.code
            with suppress(OSError):  # of a terminal that is gone
                console.error("Interrupted", f"{ended}; {_how_to_go_on(console)}", code)
        except click.ClickException as error:
            code = exits.BAD_INPUT
            console.error(type(error).__name__, error.format_message(), code)
        except DroidKVError as error:
            code = exits.BAD_INPUT
            hint = console.resume_hint if isinstance(error, StorageError) else ""
            console.error(type(error).__name__, str(error), code, hint)
        except OSError as error:
            code = _report_os_error(console, error)
        except Exception as error:
            code = exits.BUG
            traceback.print_exc()
            message = f"{type(error).__name__}: {error}; this is a bug in droidkv, please report it"
            console.error(type(error).__name__, message, code)
        sys.exit(code)


class _Ended(SystemExit):
    """The process was told to end, by a signal."""

    code: int

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.number = number

    def __str__(self) -> str:
        return f"ended by {signal.Signals(self.number).name}"


def _how_to_go_on(console: Console) -> str:
    return console.resume_hint or "no unfinished work is kept; run the same command again"


def _end_in_order() -> None:
    """Ended from outside, a command leaves by an exception, so that what it has started ends too.

    What is ignored, as under nohup, or handled already stays so.
    """
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) == signal.SIG_DFL:
                signal.signal(number, _exit_on)


def _exit_on(number: int, _: object) -> None:
    raise _Ended(number)


def _set_json(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    console: Console = ctx.obj
    console.json = console.json or value


def _set_quiet(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    console: Console = ctx.obj
    console.quiet = console.quiet or value
    console.listen()


def _report_usage(console: Console, error: click.UsageError) -> int:
    context = error.ctx
    if isinstance(error, click.exceptions.NoArgsIsHelpError) and context is not None:
        click.echo(context.get_help())
        return exits.BAD_INPUT
    hint = "" if context is None else f"Try: {context.command_path} --help"
    console.error(type(error).__name__, error.format_message(), exits.BAD_INPUT, hint)
    return exits.BAD_INPUT


def _report_os_error(console: Console, error: OSError) -> int:
    message = f"the system answered: {error}; check the path, the free space and the permissions"
    try:
        console.error(type(error).__name__, message, exits.BAD_INPUT)
    except OSError:  # stdout itself is what failed
        click.echo(f"Error: {message}", err=True)
    # Else the interpreter tries once more to write what is left, and complains.
    sys.stdout = open(os.devnull, "w")
    return exits.BAD_INPUT
