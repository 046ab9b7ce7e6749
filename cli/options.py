"""Options that several commands share, and what they become."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from droidkv.errors import CalibrationError, StorageError, unknown_name

from .console import Console
from .places import require_writable
from .units import BANDWIDTH

if TYPE_CHECKING:
    from droidkv.calibration_file import MeasuredCalibration
    from droidkv.objectives import Objective, Workload
    from droidkv.pair import Pair, TaskRef
    from droidkv.profile import Profile

Decorated = TypeVar("Decorated", bound=Callable[..., Any])


class OutputPath(click.Path):
    """A file to be written at the end of a command: what cannot be written is refused at once.

    Args:
        suffix: What its name must end in, such as `.json`; empty = anything.
        but_not: What it must not end in; empty = anything is right.
    """

    def __init__(self, suffix: str = "", but_not: str = "") -> None:
        super().__init__(dir_okay=False, path_type=Path)
        self._suffix = suffix
        self._but_not = but_not

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """Refuse a path that cannot be written, or that nobody would take for what it is."""
        path = Path(os.fsdecode(super().convert(value, param, ctx)))
        try:
            require_writable(path)
        except StorageError as error:
            self.fail(str(error), param, ctx)
        if not path.name[1:].endswith(self._suffix):  # something comes before it
            wanted = f"expected a file that ends in {self._suffix}, got {str(path)!r}"
            self.fail(wanted, param, ctx)
        if self._but_not and path.name.endswith(self._but_not):
            self.fail(
                f"expected a file that does not end in {self._but_not}, by which what `droidkv "
                f"confirm` and `refine` write is known, got {str(path)!r}",
                param,
                ctx,
            )
        return path


# So many times longer than what losses were measured on, a prefix may lose otherwise.
MUCH_LONGER = 4

_NUM_TOKENS = click.IntRange(1, 2**31 - 1)
pair_argument = click.argument("pair_name", metavar="PAIR")
profile_argument = click.argument("profile_name", metavar="PROFILE")
output_file = OutputPath()
# Commands know profiles by their names, and by `droidkv.confirmation` those of fresh items.
profile_file = OutputPath(".json", but_not=".confirm.json")
confirmation_file = OutputPath(".confirm.json")
refined_file = OutputPath(".refined.confirm.json")
trace_file = OutputPath(".json")
picture_file = OutputPath(".png")
output_folder = click.Path(file_okay=False, path_type=Path)


def combined(*decorators: Callable[[Any], Any]) -> Callable[[Decorated], Decorated]:
    """Several decorators as one, the first one's option shown first."""

    def decorate(function: Decorated) -> Decorated:
        for decorator in reversed(decorators):
            function = decorator(function)
        return function

    return decorate


task_options = combined(
    click.option("--task", "task_name", metavar="NAME", help="A task; default: the pair's first."),
    click.option(
        "--task-option",
        "task_pairs",
        multiple=True,
        metavar="KEY=VALUE",
        help="An option of the task, the value as JSON or plain text. Repeatable.",
    ),
)

run_options = combined(
    click.option("--dtype", default="float32", show_default=True, help="Of weights and caches."),
    click.option("--device", default="cpu", show_default=True, help="A torch device."),
)

workload_options = combined(
    click.option("--prefix-tokens", type=_NUM_TOKENS, help="Default: as the items are."),
    click.option("--suffix-tokens", type=_NUM_TOKENS, help="Default: as the items are."),
    click.option(
        "--bandwidth",
        type=BANDWIDTH,
        help="Link the cache comes over: bytes per second, or 10Gbit/s, 2GB/s. "
        "Default: the calibrated load from memory.",
    ),
    click.option(
        "--calibration",
        "calibration_file",
        type=click.Path(dir_okay=False, path_type=Path),
        help="A calibration file; default: this machine's, if `droidkv calibrate` made one.",
    ),
)


def operator_option(help_text: str) -> Callable[[Decorated], Decorated]:
    """Families of plans, both unless told otherwise."""
    return click.option(
        "--operator",
        "operators",
        type=click.Choice(["copy", "stitch"]),
        multiple=True,
        default=("copy", "stitch"),
        help=f"{help_text} Repeatable; default: both.",
    )


overwrite_option = click.option(
    "--overwrite", is_flag=True, help="Replace the files, if they are there already."
)

profiled_pair_option = click.option(
    "--pair", "pair_name", help="The pair. Default: the one the profile names."
)

unconfirmed_option = click.option(
    "--unconfirmed",
    is_flag=True,
    help="Use the profile's own measurements, even where NAME.confirm.json or "
    "NAME.refined.confirm.json lies beside it.",
)

objective_option = click.option(
    "--objective",
    help="What a loss is: score, kl, nll or disagreement. Default: score where the full prefill "
    "scores at all, else kl.",
)


def command_line() -> str:
    """The command as it was typed, for the record."""
    return shlex.join(["droidkv", *sys.argv[1:]])


def choose_task(pair: Pair, name: str | None, options: Sequence[str]) -> TaskRef:
    """The task asked for: one of the pair's with its options, or any other; options on top.

    Raises:
        click.BadParameter: An option is not `KEY=VALUE`.
    """
    from droidkv.pair import TaskRef

    if name is None:
        chosen = pair.tasks[0]
    else:
        listed = [task for task in pair.tasks if name in (task.name, str(task))]
        chosen = listed[0] if listed else TaskRef(name)
    given: dict[str, object] = {}
    for text in options:
        key, equals, value = text.partition("=")
        if not key or not equals:
            raise click.BadParameter(
                f"expected KEY=VALUE, got {text!r}", param_hint="'--task-option'"
            )
        try:
            given[key] = json.loads(value)
        except ValueError:
            given[key] = value
    return TaskRef(chosen.name, {**chosen.options, **given}) if given else chosen


def choose_objective(profile: Profile, name: str | None) -> Objective:
    """The objective asked for, or the profile's default one.

    Raises:
        click.BadParameter: There is no such objective.
    """
    from droidkv.objectives import OBJECTIVES, default_objective

    for objective in OBJECTIVES:
        if objective == name:
            return objective
    if name is None:
        return default_objective(profile)
    raise click.BadParameter(
        unknown_name("objective", name, OBJECTIVES), param_hint="'--objective'"
    )


def workload_of(
    console: Console,
    profile: Profile,
    prefix_tokens: int | None,
    suffix_tokens: int | None,
    bandwidth: float | None,
    calibration_file: Path | None,
) -> tuple[Workload, list[str]]:
    """The request whose cost is asked for, and where what is said of it was not measured.

    Args:
        console: Is told the latter too.
        profile: What is not given is as its items are.
        prefix_tokens: Tokens both models share.
        suffix_tokens: Tokens only the receiver sees.
        bandwidth: Of the link, in bytes per second.
        calibration_file: A calibration; None = this machine's for the profile's models, if any.

    Raises:
        CalibrationError: The file is missing or damaged, or there is a bandwidth without one.
    """
    from droidkv.objectives import Workload

    measured = _calibration_for(profile, calibration_file)
    if measured is None and bandwidth is not None:
        raise CalibrationError(
            "expected a calibration, since a bandwidth needs predicted seconds; run `droidkv "
            "calibrate` first"
        )
    calibration = None if measured is None else measured.calibration
    mean = Workload.of_items(profile, calibration, bandwidth)
    workload = dataclasses.replace(
        mean,
        prefix_tokens=prefix_tokens or mean.prefix_tokens,
        suffix_tokens=suffix_tokens or mean.suffix_tokens,
    )
    asked, longest = workload.prefix_tokens, max(item.prefix_tokens for item in profile.items)
    notes = []
    if measured is not None and asked > measured.max_prefix_tokens:
        notes.append(
            f"seconds are extrapolated: prefixes of up to {measured.max_prefix_tokens} tokens were "
            f"timed, not of {asked}"
        )
    if asked > MUCH_LONGER * longest:
        notes.append(
            f"losses were measured on prefixes of up to {longest} tokens and may be others on "
            f"{asked}"
        )
    for note in notes:
        console.note(note)
    return workload, notes


def _calibration_for(profile: Profile, file: Path | None) -> MeasuredCalibration | None:
    from droidkv.calibration_file import find_calibration, read_calibration

    if file is not None:
        return read_calibration(file)
    made = profile.provenance
    return find_calibration(profile.shape, made.device, made.dtype)
