"""Two descriptions side by side: which fields differ, and both values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Unknown:
    """Stands for the value of a field that one side does not have or does not know."""

    def __str__(self) -> str:
        return "unknown"


UNKNOWN = Unknown()


@dataclass(frozen=True)
class Difference:
    """One field in which two descriptions differ.

    Attributes:
        field: Dotted name of the field.
        mine: The value on the side that asked; `UNKNOWN` where there is none.
        theirs: The value on the other side; `UNKNOWN` where there is none.
    """

    field: str
    mine: Any
    theirs: Any

    def __str__(self) -> str:
        return f"{self.field}: {self.mine} here, {self.theirs} there"

    def between(self, mine: str, theirs: str) -> str:
        """The difference in words, with a name for each side."""
        return f"{self.field}: {mine} has {self.mine}, {theirs} has {self.theirs}"


def flatten(table: Mapping[str, Any]) -> dict[str, Any]:
    """Nested tables as one table with dotted names; lists and empty tables stay values.

    Raises:
        ValueError: Two values would get one name, as in `{"a.b": 1, "a": {"b": 2}}`.
    """
    flat: dict[str, Any] = {}
    for key, value in table.items():
        inner = flatten(value) if isinstance(value, Mapping) and value else {"": value}
        for name, each in inner.items():
            dotted = f"{key}.{name}" if name else str(key)
            if dotted in flat:
                raise ValueError(f"expected one value for each name, got two for {dotted!r}")
            flat[dotted] = each
    return flat


def differences(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[Difference]:
    """Fields of two flat tables that differ, in order of name.

    Numbers compare by value (10000 is 10000.0) but are never equal to true or false, and a field
    that one side lacks or does not know differs from everything, from another unknown too.
    """
    found = []
    for name in sorted(mine.keys() | theirs.keys()):
        left, right = mine.get(name, UNKNOWN), theirs.get(name, UNKNOWN)
        unknown = left is UNKNOWN or right is UNKNOWN
        if unknown or not _same(left, right):
            found.append(Difference(name, left, right))
    return found


def _same(left: Any, right: Any) -> bool:
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        return len(left) == len(right) and all(map(_same, left, right))
    return isinstance(left, bool) == isinstance(right, bool) and bool(left == right)


def lines(each: Iterable[str]) -> str:
    """A list for a message, one line per entry."""
    return "".join(f"\n  - {line}" for line in each)
