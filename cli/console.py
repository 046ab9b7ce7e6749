"""What a command says: one result on stdout; notes, progress and errors on stderr."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import click

from .progress import Progress, duration


class Console:
    """The two streams of one run of the command.

    Attributes:
        json: The result is one JSON document.
        quiet: No notes and no progress.
    """

    def __init__(self) -> None:
        self.json = False
        self.quiet = False
        self._kept: dict[Path, str] = {}
        self._progress: Progress | None = None

    def keeps(self, place: Path, hint: str) -> None:
        """From here on, what is finished lies in a place, once it is there; says how to go on.

        There may be several, one after the other.
        """
        self._kept[place] = hint

    def keeps_run_of(self, target: Path) -> None:
        """From here on, finished steps lie in the run folder of this output."""
        folder = target.with_suffix(".run")
        hint = f"nothing is lost: what was finished is kept in {folder}; the same command goes on"
        self.keeps(folder, f"{hint} from there")

    @property
    def resume_hint(self) -> str:
        """What to say after Ctrl-C or on a full disk; empty where nothing unfinished is kept."""
        return next((hint for place, hint in self._kept.items() if place.exists()), "")

    def result(self, value: Mapping[str, Any], lines: Iterable[str]) -> None:
        """Print the command's result, as JSON or for people. Once per run."""
        self._close_progress()
        if self.json:
            text = json.dumps(value, ensure_ascii=False, indent=1, allow_nan=False)
        else:
            text = "\n".join(lines)
        click.echo(text)

    def note(self, text: str) -> None:
        """Tell something that is no part of the result."""
        if not self.quiet:
            self._close_progress()
            click.echo(text, err=True)

    def estimate(self, work: str, more: str = "") -> Callable[[float], None]:
        """What tells how long some work will take, once its seconds are known."""
        rest = f"; {more}" if more else ""
        return lambda seconds: self.note(
            f"{work} takes about {duration(seconds)} on this machine{rest}"
        )

    def error(self, kind: str, message: str, exit_code: int, hint: str = "") -> None:
        """Report why there is no result.

        Args:
            kind: Name of the error's class.
            message: What was expected, what came, what to do.
            exit_code: What the command will exit with.
            hint: More for people only.
        """
        self._close_progress()
        if self.json:
            error = {"type": kind, "message": message, "exit_code": exit_code}
            click.echo(json.dumps({"error": error}, ensure_ascii=False, indent=1))
        else:
            click.echo(f"Error: {message}" + (f"\n{hint}" if hint else ""), err=True)

    def progress(self, stage: str, done: int, total: int, detail: str = "") -> None:
        """Show how far a long piece of work is, and a detail that changes as it goes."""
        if not self.quiet:
            self._progress = self._progress or Progress(sys.stderr)
            self._progress(stage, done, total, detail)

    def listen(self) -> None:
        """Show what the library logs, such as a download, as notes."""
        logger = logging.getLogger("droidkv")
        logger.setLevel(logging.INFO)
        logger.propagate = False
        logger.handlers = [_NoteHandler(self)]

    def _close_progress(self) -> None:
        if self._progress is not None:
            self._progress.close()


class _NoteHandler(logging.Handler):
    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        self._console.note(self.format(record))
