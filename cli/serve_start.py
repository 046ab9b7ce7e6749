"""What every `droidkv serve` that starts a server has in common."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from . import exits
from .console import Console
from .options import output_file
from .table import table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from droidkv.check import Check
    from droidkv.serve.launch import Launch


def _in_a_folder(context: click.Context, option: click.Parameter, path: Path | None) -> str | None:
    """The whole path of a file that a server will write, whose folder must be there."""
    if path is None:
        return None
    whole = path.absolute()
    if not whole.parent.is_dir():
        raise click.BadParameter(f"expected a folder {whole.parent} to write in, there is none")
    return str(whole)


audit_option = click.option(
    "--audit",
    type=output_file,
    callback=_in_a_folder,
    help="File that gets one JSON line per request.",
)
dtype_option = click.option(
    "--dtype", default="float32", show_default=True, help="Of weights and cache; as profiled."
)
print_option = click.option(
    "--print", "only_print", is_flag=True, help="Show command, environment and JSON instead."
)


def start(
    console: Console,
    started: Launch,
    checks: Sequence[Check],
    names: Sequence[str],
    only_print: bool,
    notes: Sequence[str] = (),
) -> int:
    """Become the server, or show how it would be started where that is asked for or cannot work.

    Args:
        console: What is said, and where.
        started: The server.
        checks: What was looked at before.
        names: What clients may call the model.
        only_print: Show the server instead.
        notes: More lines for people.
    """
    fit = all(check.status != "fail" for check in checks)
    rows = [(check.status, check.name, check.found) for check in checks]
    lines = table(("", "what", "found"), rows, "<<<")
    lines += [f"{check.name}: {check.advice}" for check in checks if check.advice]
    lines += ["", f"served as {', '.join(names)}", *notes]
    if only_print or not fit:
        value: dict[str, Any] = {
            "fit": fit,
            "names": list(names),
            "checks": [dataclasses.asdict(check) for check in checks],
            **started.to_json(),
        }
        console.result(value, [*lines, "", started.shell_line()])
        return exits.OK if fit else exits.CHECK_FAILED
    for line in lines:
        console.note(line)
    started.replace_process()
    raise AssertionError("unreachable")
