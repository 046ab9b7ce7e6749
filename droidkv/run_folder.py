"""Long work in steps that are kept: killed runs resume, and several processes share one run."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from droidkv.differences import differences, flatten, lines
from droidkv.errors import ProfileError
from droidkv.jsonio import canonical_json, parse_json, read_json, write_json

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
        ProfileError: The folder holds a run with other settings; names each differing one.
        StorageError: The folder cannot be written.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self.path = path
        mine = parse_json(canonical_json(settings), "settings", ProfileError)
        file = path / "settings.json"
        path.mkdir(parents=True, exist_ok=True)
        with FileLock(path / "settings.lock"):
            if not file.exists():
                write_json(file, mine)
        theirs = read_json(file, ProfileError)
        if found := differences(flatten(mine), flatten(theirs)):
            raise ProfileError(
                f"expected an unfinished run with the same settings in {path}, but it differs in:"
                + lines(each.between("this run", "the unfinished one") for each in found)
                + f"\nDelete the folder {path} to drop the unfinished run, or choose another output"
            )

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
        """
        files = self._files(stage, num_steps)
        on_progress(stage, num_steps - len(self.missing(stage, num_steps)), num_steps)
        while missing := self.missing(stage, num_steps):
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
                if file.exists():
                    return False
                write_json(file, work(step), indent=None)
                return True
        except Timeout:
            return False

    def remove(self) -> None:
        """Delete the folder once its results are kept elsewhere."""
        shutil.rmtree(self.path, ignore_errors=True)
