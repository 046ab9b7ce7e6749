"""Plain text tables."""

from __future__ import annotations

from collections.abc import Sequence


def table(header: Sequence[str], rows: Sequence[Sequence[str]], align: str = "<") -> list[str]:
    """Lines of a table.

    Args:
        header: Titles of the columns.
        rows: Cells, as many as titles in each row.
        align: One of `<` and `>` for each column from the first on; the others are `>`.
    """
    cells = [list(header), *map(list, rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    sides = align.ljust(len(header), ">")
    lines = [
        "  ".join(
            f"{cell:{side}{width}}" for cell, side, width in zip(row, sides, widths, strict=True)
        ).rstrip()
        for row in cells
    ]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return lines


def num_bytes(count: float) -> str:
    """A number of bytes for people, in powers of ten."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5 or unit == "GB":
            return f"{count:.3g} {unit}"
        count /= 1000
    raise AssertionError("unreachable")
