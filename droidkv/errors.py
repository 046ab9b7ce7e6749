"""Every error droidkv raises on purpose. Each says what was expected, what came, and what to do."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable
from types import ModuleType


class DroidKVError(Exception):
    """Base of all errors raised on purpose by droidkv."""


class PlanError(DroidKVError, ValueError):
    """A layer group or reuse plan is malformed or out of range."""


class PairError(DroidKVError, ValueError):
    """A pair file is wrong, or its two models cannot share a KV cache."""


class ProfileError(DroidKVError, ValueError):
    """A profile is malformed, of another schema, or belongs to another pair."""


class RunGoneError(ProfileError):
    """The folder of an unfinished run is no longer there: it was finished elsewhere, or deleted."""


class IdentityError(DroidKVError, ValueError):
    """Two producers that must be the same differ; the message names each differing field."""


class LoadError(DroidKVError, ValueError):
    """A model, its adapter or its tokenizer cannot be had, or its files are damaged."""


class TaskError(DroidKVError, ValueError):
    """A task, its data or its options are wrong."""


class UnsupportedModelError(DroidKVError, ValueError):
    """The model's architecture cannot be served; the message names what it lacks."""


class StitchError(DroidKVError, ValueError):
    """A stitching map is malformed, missing, or of another pair."""


class CalibrationError(DroidKVError, ValueError):
    """A calibration is malformed, missing, or of another machine."""


class ServeError(DroidKVError, ValueError):
    """A serving process is set up in a way that cannot work, or was never tested."""


class RefusedError(ServeError):
    """A receiver without an own prefill refused a request.

    Attributes:
        status: HTTP's; 400 = it will never be answered as it is.
        reason: In a word, from the list that audit lines use.
    """

    def __init__(self, message: str, status: int, reason: str) -> None:
        super().__init__(message)
        self.status, self.reason = status, reason


class StorageError(DroidKVError, OSError):
    """Reading or writing a file failed; nothing that was there before is lost."""


class MissingExtraError(DroidKVError, ImportError):
    """An optional package is not installed; the message names the extra to install."""


def require_extra(module: str, extra: str) -> ModuleType:
    """Import an optional package, or say which extra brings it.

    Args:
        module: Dotted name of the module to import.
        extra: The extra of droidkv's distribution that installs it.

    Raises:
        MissingExtraError: The module cannot be imported.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtraError(
            f"expected the package {module!r}, but importing it failed ({error}); "
            f"install it with: pip install 'droidkv[{extra}]'"
        ) from error


def unknown_name(kind: str, name: str, known: Iterable[str]) -> str:
    """Message for a name that is not in a closed list: the nearest one, and all that are."""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return f"unknown {kind} {name!r}.{hint} Known: {', '.join(names) or 'none'}"
