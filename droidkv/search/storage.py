"""Where a study is kept, and what it is a study of."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import optuna
from optuna.samplers import BaseSampler
from optuna.storages import BaseStorage, RDBStorage

from droidkv.differences import differences, flatten, lines
from droidkv.errors import ProfileError, StorageError
from droidkv.jsonio import canonical_json, parse_json

STUDY_NAME = "droidkv"
HEARTBEAT_SECONDS = 30
# A trial whose worker showed no sign of life for so long may be taken up by others.
GRACE_SECONDS = 120
_DEFINITION = "definition"


def open_study(storage: Path | BaseStorage | None, sampler: BaseSampler) -> optuna.Study:
    """Open a study of layers recomputed against loss, or begin one.

    Args:
        storage: SQLite file (made if missing) or an Optuna storage; None = in memory.
        sampler: This process's; others may use another.

    Raises:
        StorageError: The file cannot be opened, or is not a study.
    """
    # One line per trial is too much beside a progress bar.
    optuna.logging.get_logger("optuna").setLevel(logging.ERROR)
    return optuna.create_study(
        study_name=STUDY_NAME,
        storage=_open_file(storage) if isinstance(storage, Path) else storage,
        sampler=sampler,
        directions=["minimize", "minimize"],
        load_if_exists=True,
    )


def fail_stale(study: optuna.Study) -> None:
    """Let others take up the trials of workers that died; Optuna does so before each trial."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        optuna.storages.fail_stale_trials(study)


def require_definition(study: optuna.Study, definition: Mapping[str, Any]) -> None:
    """Write down what a new study is over; refuse an old one that is over something else.

    Raises:
        ProfileError: The stored definition differs; names each differing field.
    """
    mine = parse_json(canonical_json(definition), "definition", ProfileError)
    theirs = study.user_attrs.get(_DEFINITION)
    if theirs is None:
        study.set_user_attr(_DEFINITION, mine)
    elif found := differences(flatten(mine), flatten(theirs)):
        raise ProfileError(
            "expected a stored search over the same plans and items, but it differs in:"
            + lines(each.between("this search", "the stored one") for each in found)
            + "\nName another file for this search, or delete that one to drop it."
        )


def _open_file(path: Path) -> RDBStorage:
    """A SQLite file, which workers on one machine may share."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            return RDBStorage(
                f"sqlite:///{path}",
                engine_kwargs={"connect_args": {"timeout": 60}},
                heartbeat_interval=HEARTBEAT_SECONDS,
                grace_period=GRACE_SECONDS,
            )
    except Exception as error:  # SQLAlchemy's, SQLite's, Alembic's or the system's
        raise StorageError(
            f"expected an Optuna study in {path}, or a place to make one, got: {error}; "
            "name another file"
        ) from error
