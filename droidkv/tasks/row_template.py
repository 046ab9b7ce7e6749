"""What is prefix, suffix and answer in a row of a table, told by column names and templates."""

from __future__ import annotations

import dataclasses
import string
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from droidkv.errors import TaskError, unknown_name

Row = Mapping[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Parts:
    """What one row says.

    Attributes:
        prefix: Text both models share.
        suffix: Text only the receiver sees.
        answers: Right answers, the preferred one first. Never empty.
    """

    prefix: str
    suffix: str
    answers: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class RowTemplate:
    """How a row becomes prefix, suffix and answer.

    Each field is the name of a column, or else a text with the names of columns in braces (double a
    brace that is meant as text). A list of texts is joined by blank lines; as an answer it means
    several right answers.
    """

    prefix: str
    suffix: str
    answer: str

    def compile(self, column_names: Collection[str], source: str) -> Callable[[int, Row], Parts]:
        """A function from a row and its index to its parts.

        Args:
            column_names: Columns that the rows have.
            source: Where the rows are from, for error messages.

        Raises:
            TaskError: If a template names no such column or is malformed. The function raises it
                for a row whose prefix or suffix is blank or whose value is no text.
        """
        prefix_pieces = _pieces(self.prefix, column_names, source)
        suffix_pieces = _pieces(self.suffix, column_names, source)
        answer_pieces = _pieces(self.answer, column_names, source)

        def parts(index: int, row: Row) -> Parts:
            where = f"row {index + 1} of {source}"
            prefix = _fill(prefix_pieces, row, where)
            suffix = _fill(suffix_pieces, row, where)
            for name, text in (("prefix", prefix), ("suffix", suffix)):
                if not text.strip():
                    raise TaskError(f"The {name} of {where} is blank; give it a text or remove it.")
            alternatives = row.get(self.answer)
            if isinstance(alternatives, list):
                answers = tuple(_text(value, self.answer, where) for value in alternatives)
            else:
                answers = (_fill(answer_pieces, row, where),)
            if not answers:
                raise TaskError(f"The answer of {where} is an empty list; remove the row.")
            return Parts(prefix, suffix, answers)

        return parts


def _pieces(
    text: str, column_names: Collection[str], source: str
) -> Sequence[tuple[str, str | None]]:
    """A template as (literal text, column after it or none); no attribute of a value is reached."""
    if text in column_names:
        return [("", text)]
    if "{" not in text and "}" not in text and not any(map(str.isspace, text)):
        raise TaskError(unknown_name(f"column of {source}", text, column_names))
    try:
        parsed = list(string.Formatter().parse(text))
    except ValueError as error:
        raise TaskError(
            f"The template {text!r} is malformed ({error}); double a brace that is meant as text."
        ) from error
    for _, column, spec, conversion in parsed:
        if spec or conversion:
            raise TaskError(
                f"A template takes plain column names in braces, but {text!r} has a format after "
                "one; remove it, or double a brace that is meant as text."
            )
        if column is not None and column not in column_names:
            raise TaskError(unknown_name(f"column of {source}", column, column_names))
    return [(literal, column) for literal, column, _, _ in parsed]


def _fill(pieces: Sequence[tuple[str, str | None]], row: Row, where: str) -> str:
    return "".join(
        literal if column is None else literal + _text(row[column], column, where)
        for literal, column in pieces
    )


def _text(value: object, column: str, where: str) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, int | float):
        return str(value)
    if isinstance(value, list):
        return "\n\n".join(_text(part, column, where) for part in value)
    raise TaskError(
        f"Column {column!r} of {where} must be text, a number or a list of them, "
        f"got {type(value).__name__}; fill it in or remove the row."
    )
