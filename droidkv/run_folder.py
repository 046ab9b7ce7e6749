"""Long work in steps that are kept: killed runs resume, and several processes share one run."""

from __future__ import annotations

import secrets
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from filelock import FileLock, Timeout

from droidkv.differences import differences, flatten, lines
from droidkv.errors import DroidKVError, ProfileError, RunGoneError
from droidkv.jsonio import canonical_json, parse_json, read_json, write_json

Result = TypeVar("Result")
Progress = Callable[[str, int, int], None]
"""Called with a stage's name, the steps done and the steps in all."""

WAIT_SECONDS = 0.5


def no_progress(stage: str, done: int, total: int) -> None:
    """Tell nobody."""


class RunFolder:
    """One file per finished step, and a lock per step that dies with the process holding it.

    Args:
        path: The folder; made if missing.
        settings: What all results in the folder depend on. A folder of other settings is refused.

    Raises:
        ProfileError: The folder holds a run with other settings, of which each is named, or steps
            of whose settings nothing is known.
        StorageError: The folder cannot be written.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self.path = path
        self._settings = parse_json(canonical_json(settings), "settings", ProfileError)
        self._file = path / "settings.json"
        path.mkdir(parents=True, exist_ok=True)
        with FileLock(path / "settings.lock"):
            if not self._file.exists():
                self._begin()
            theirs = read_json(self._file, ProfileError)
            self._begun_ns = self._file.stat().st_mtime_ns
        if found := differences(flatten(self._settings), flatten(theirs)):
            raise ProfileError(
                f"expected an unfinished run with the same settings in {path}, but it differs in:"
                + lines(each.between("this run", "the unfinished one") for each in found)
                + f"\nDelete the folder {path} to drop the unfinished run, or choose another output"
            )

    def _begin(self) -> None:
        if steps := sorted(each.name for each in self.path.glob("*.json")):
            raise ProfileError(
                f"expected {self._file} beside the finished steps of a run, got {steps[0]} and no "
                f"settings that say what it is of; delete the folder {self.path}"
            )
        write_json(self._file, self._settings)

    def finish(
        self, output: Path, work: Callable[[], Result], read: Callable[[Path], Result]
    ) -> Result:
        """Do the whole run and delete the folder, unless another process does so first.

        Args:
            output: What the run is to leave.
            work: Completes the stages and writes `output`.
            read: Reads what the other process wrote there.

        Raises:
            RunGoneError: The folder was deleted, and no output is there that is newer than the run.
        """
        try:
            result = work()
        except (DroidKVError, OSError):
            if not self._was_finished(output):
                raise
            return read(output)
        self.remove()
        return result

    def complete(
        self,
        stage: str,
        num_steps: int,
        work: Callable[[int], Any],
        on_progress: Progress = no_progress,
    ) -> list[Any]:
        """Do a stage's missing steps, and return the results of all.

        Steps that another process is doing are waited for; if it dies, they are done here.

        Args:
            stage: Name of the stage.
            num_steps: How many steps it has.
            work: Makes the JSON-ready result of one step.
            on_progress: Told after each step.

        Raises:
            RunGoneError: The folder is gone, as it is once another process has finished the run.
        """
        files = self._files(stage, num_steps)
        on_progress(stage, num_steps - len(self.missing(stage, num_steps)), num_steps)
        while missing := self.missing(stage, num_steps):
            self._require_there()
            if not any(self._try(files[step], step, work) for step in missing):
                time.sleep(WAIT_SECONDS)
            on_progress(stage, num_steps - len(self.missing(stage, num_steps)), num_steps)
        return [read_json(file, ProfileError) for file in files]

    def missing(self, stage: str, num_steps: int) -> list[int]:
        """Steps of a stage that are not finished yet."""
        files = self._files(stage, num_steps)
        return [step for step, file in enumerate(files) if not file.exists()]

    def _files(self, stage: str, num_steps: int) -> list[Path]:
        return [self.path / f"{stage}-{step:05d}.json" for step in range(num_steps)]

    def _try(self, file: Path, step: int, work: Callable[[int], Any]) -> bool:
        """Do one step unless another process has or had it; say whether it was done here."""
        try:
            with FileLock(file.with_suffix(".lock"), timeout=0):
                # Locking has made the folder anew if it is gone, but not its settings.
                self._require_there()
                if file.exists():
                    return False
                result = work(step)
                self._require_there()
                write_json(file, result, indent=None)
                return True
        except Timeout:
            return False

    def remove(self) -> None:
        """Delete the folder once its results are kept elsewhere.

        It goes in one step, so that no other process finds a part of it, or loses a run of its own.
        """
        doomed = self.path.with_name(f".{secrets.token_hex(8)}.{self.path.name}")
        with suppress(OSError):
            if self._is_there():
                self.path.rename(doomed)
                shutil.rmtree(doomed, ignore_errors=True)

    def _is_there(self) -> bool:
        """Whether the folder still is this run's: another may have begun one of the same name."""
        with suppress(ProfileError):
            return bool(read_json(self._file, ProfileError) == self._settings)
        return False

    def _require_there(self) -> None:
        if not self._is_there():
            raise RunGoneError(
                f"expected the unfinished run in {self.path}, but it is gone: another process has "
                "finished it, or it was deleted; give the same command again"
            )

    def _was_finished(self, output: Path) -> bool:
        """Whether the folder is gone and has left an output, not one that was there before."""
        return (
            not self._is_there() and output.exists() and output.stat().st_mtime_ns >= self._begun_ns
        )
