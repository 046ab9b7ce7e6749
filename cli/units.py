"""Numbers with a unit on the command line."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import click

_SECONDS: Mapping[str, float] = {"": 1.0, "s": 1.0, "ms": 1e-3}
_PER_SECOND: Mapping[str, float] = {
    f"{prefix}{unit}": factor * size
    for prefix, factor in {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9}.items()
    for unit, size in {"B": 1.0, "bit": 1 / 8}.items()
} | {"": 1.0}
_NUMBER = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?(?:e[+-]?[0-9]+)?)\s*([A-Za-z]*?)(?:/s)?\s*")


class Quantity(click.ParamType):  # type: ignore[type-arg]
    """A positive number with an optional unit.

    Args:
        name: What it is, for the help.
        units: Unit -> how many of the basic one it is; `""` is the basic one.
        example: A value, for messages.
    """

    def __init__(self, name: str, units: Mapping[str, float], example: str) -> None:
        self.name = name
        self._units = units
        self._example = example

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Read the text; values that are numbers already pass."""
        if isinstance(value, float):
            return value
        match = _NUMBER.fullmatch(str(value))
        if match is None or match[2] not in self._units:
            known = ", ".join(unit for unit in self._units if unit)
            self.fail(
                f"expected a number and one of {known}, such as {self._example!r}, got {value!r}",
                param,
                ctx,
            )
        number = float(match[1]) * self._units[match[2]]
        if not 0 < number < math.inf:
            self.fail(f"expected a number above 0, got {value!r}", param, ctx)
        return number


SECONDS = Quantity("seconds", _SECONDS, "0.5s")
BANDWIDTH = Quantity("bandwidth", _PER_SECOND, "10Gbit/s")
