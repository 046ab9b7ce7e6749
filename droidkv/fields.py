"""Strict reading of a table from JSON or TOML: each value typed, each unknown key refused."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from droidkv.errors import DroidKVError, unknown_name

T = TypeVar("T")

_KIND_NAMES = {
    str: "a text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    dict: "a table",
    list: "a list",
}


@dataclass(frozen=True)
class Required:
    """The default of a value that must be there."""


REQUIRED = Required()


class Fields:
    """One table of a file, emptied value by value; `done` then refuses what is left.

    Args:
        table: What the file holds at this place; must be a mapping with text keys.
        where: Name of the place for messages, for example `pairs/x.toml, [train]`.
        error: Class of the exception for everything that is wrong.

    Raises:
        DroidKVError: Of class `error`: `table` is not a table.
    """

    def __init__(self, table: object, where: str, error: type[DroidKVError]) -> None:
        if not isinstance(table, Mapping):
            raise error(f"{where}: expected a table, got {_describe(table)}")
        self._left: dict[str, Any] = dict(table)
        self._taken: list[str] = []
        self._where = where
        self._error = error

    def take(
        self,
        name: str,
        kind: type[T],
        default: T | Required = REQUIRED,
        *,
        minimum: float | None = None,
        maximum: float | None = None,
        choices: Sequence[T] | None = None,
    ) -> T:
        """The value of `name`, which must be of `kind` (a whole number passes for a float).

        Raises:
            DroidKVError: Missing without a default, of another kind, or out of range.
        """
        self._taken.append(name)
        if name not in self._left:
            if isinstance(default, Required):
                raise self._error(self._missing(name, kind))
            return default
        value = self._kind(name, self._left.pop(name), kind)
        if isinstance(value, float) and not math.isfinite(value):
            raise self._error(f"{self._where}: expected {name} to be a finite number, got {value}")
        if minimum is not None and value < minimum:  # type: ignore[operator]
            raise self._error(f"{self._where}: expected {name} >= {minimum}, got {value}")
        if maximum is not None and value > maximum:  # type: ignore[operator]
            raise self._error(f"{self._where}: expected {name} <= {maximum}, got {value}")
        if choices is not None and value not in choices:
            message = unknown_name(name, str(value), [str(choice) for choice in choices])
            raise self._error(f"{self._where}: {message}")
        return value

    def optional(
        self,
        name: str,
        kind: type[T],
        *,
        minimum: float | None = None,
        choices: Sequence[T] | None = None,
    ) -> T | None:
        """As `take`; None where the key is missing or JSON's null."""
        if self._left.get(name) is None:
            self._left.pop(name, None)
            self._taken.append(name)
            return None
        return self.take(name, kind, minimum=minimum, choices=choices)

    def take_list(
        self, name: str, kind: type[T], default: Sequence[T] | Required = REQUIRED
    ) -> tuple[T, ...]:
        """The value of `name`, a list whose elements are all of `kind`.

        Raises:
            DroidKVError: Missing without a default, not a list, or an element of another kind.
        """
        self._taken.append(name)
        if name not in self._left:
            if isinstance(default, Required):
                raise self._error(self._missing(name, list))
            return tuple(default)
        values = self._kind(name, self._left.pop(name), list)
        return tuple(
            self._kind(f"{name}[{index}]", value, kind) for index, value in enumerate(values)
        )

    def take_version(self, expected: int, way_out: str) -> None:
        """Take the field `schema_version`, which must be `expected`.

        Args:
            expected: The version that this droidkv reads.
            way_out: What to do with a file of an older version.

        Raises:
            DroidKVError: It is missing, or another one.
        """
        version = self.take("schema_version", int)
        if version != expected:
            raise self._error(
                f"{self._where}: expected schema_version {expected}, got {version}; "
                f"{'update droidkv' if version > expected else way_out}"
            )

    def done(self) -> None:
        """Refuse every key that was not taken.

        Raises:
            DroidKVError: A key is left; the message names the nearest known one.
        """
        for name in self._left:
            raise self._error(f"{self._where}: {unknown_name('key', name, self._taken)}")

    def _missing(self, name: str, kind: type) -> str:
        near = difflib.get_close_matches(name, self._left, n=1)
        hint = f"; is {near[0]!r} a misspelling of it?" if near else ""
        return f"{self._where}: expected {name!r} ({_KIND_NAMES[kind]}), but it is missing{hint}"

    def _kind(self, name: str, value: object, kind: type[T]) -> T:
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value) if abs(value) < 2**1023 else value
        # bool is a subclass of int, but `steps = true` is a mistake.
        if not isinstance(value, kind) or (kind is not bool and isinstance(value, bool)):
            raise self._error(
                f"{self._where}: expected {name} to be {_KIND_NAMES[kind]}, got {_describe(value)}"
            )
        return value


def _describe(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
