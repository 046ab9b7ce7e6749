"""Checkpoints of one training run, and the proof that they are of this very run."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import get_last_checkpoint

from droidkv.errors import PairError, StorageError
from droidkv.jsonio import read_json, write_json
from droidkv.loading import LoadedModel
from droidkv.recipe import Recipe
from droidkv.tasks import Task

_RUN_RECORD = "run.json"


def require_new(output: Path) -> None:
    """Do nothing if there is no folder yet where a run is to make one.

    Raises:
        StorageError: There is.
    """
    if output.exists():
        raise StorageError(
            f"expected no folder at {output}, which the trained receiver will be; "
            "remove it, or name another: droidkv pair train PAIR --output FOLDER"
        )


class Checkpoints:
    """The folder `OUTPUT.training`, there until the output is written whole.

    Args:
        output: The folder that the run makes.

    Raises:
        StorageError: `output` is there already.
    """

    def __init__(self, output: Path) -> None:
        require_new(output)
        self.output = output
        self.folder = output.with_name(output.name + ".training")

    def open(
        self, base: LoadedModel, task: Task, recipe: Recipe, settings: Mapping[str, Any]
    ) -> str | None:
        """The checkpoint to go on from, or None for a fresh run.

        Args:
            base: The model to start from.
            task: What is learned.
            recipe: How.
            settings: What else the result depends on.

        Raises:
            PairError: The checkpoints there are of another run; names what differs.
        """
        run = {
            "base_weights": base.fingerprint.weights,
            "base_adapter": base.fingerprint.adapter,
            "recipe": dataclasses.asdict(recipe) | {"target_modules": list(recipe.target_modules)},
            "task": {"name": task.name, "version": task.version, "options": task.options},
            **settings,
        }
        record = self.folder / _RUN_RECORD
        if not record.exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            write_json(record, run)
            return None
        there = read_json(record, PairError)
        for field, value in run.items():
            if not isinstance(there, dict) or there.get(field) != value:
                raise PairError(
                    f"{self.folder}: expected checkpoints of this run, but they are of another: "
                    f"{field} is {there.get(field) if isinstance(there, dict) else there}, here "
                    f"it is {value}; remove the folder or train to another place"
                )
        return self._newest()

    def _newest(self) -> str | None:
        """The newest whole checkpoint; those after it are what a full disk or a kill cut short."""
        newest: Callable[[str], str | None] = get_last_checkpoint
        while (found := newest(str(self.folder))) is not None:
            try:
                read_json(Path(found) / TRAINER_STATE_NAME, PairError)  # written last
            except PairError:
                shutil.rmtree(found)
            else:
                break
        return found

    def finish(self, write: Callable[[Path], None]) -> None:
        """Write the output, which appears whole or not at all, and remove the checkpoints."""
        finished = self.folder / "finished"
        shutil.rmtree(finished, ignore_errors=True)
        write(finished)
        self.output.parent.mkdir(parents=True, exist_ok=True)
        finished.replace(self.output)
        shutil.rmtree(self.folder, ignore_errors=True)
