"""From the rows of a table to items: what the tasks over data files and hub data sets share."""

from __future__ import annotations

import dataclasses
import hashlib
import random
import string
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from droidkv.errors import TaskError, require_extra, unknown_name
from droidkv.tasks.base import Item, Split, split_of, stable_seed

Row = Mapping[str, Any]

_FORMATS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}


class Table(Protocol):
    """What is used of a `datasets.Dataset`."""

    column_names: list[str]

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Row: ...


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


def read_table(path: str) -> Table:
    """Open a local JSONL, JSON, CSV or Parquet file; the format is told by the suffix.

    Raises:
        TaskError: If there is no such file, its suffix is another, or it cannot be parsed.
        MissingExtraError: If `datasets` is not installed.
    """
    file = Path(path).expanduser()
    if file.suffix.lower() not in _FORMATS:
        raise TaskError(
            f"A data file must end in one of {', '.join(_FORMATS)}, got {path!r}; convert it."
        )
    if not file.is_file():
        raise TaskError(
            f"There must be a data file at {str(file.absolute())!r}, but there is none."
        )
    return load_table(_FORMATS[file.suffix.lower()], str(file))


def load_table(file_format: str, data_files: str) -> Table:
    """Open one data file by the name of its format in `datasets`.

    Args:
        file_format: "json", "csv" or "parquet".
        data_files: A path, or a member of an archive as `zip://<member>::<path>`.

    Raises:
        TaskError: If the file cannot be parsed.
        MissingExtraError: If `datasets` is not installed.
    """
    datasets = require_extra("datasets", "tasks")
    # Local files load in a moment; the bars would only break up the caller's own output.
    had_bars = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        table: Table = datasets.load_dataset(file_format, data_files=data_files, split="train")
    except (datasets.exceptions.DatasetsError, OSError, ValueError) as error:
        reason = error.__cause__ or error
        raise TaskError(f"Expected a {file_format} file at {data_files!r}: {reason}") from error
    finally:
        if had_bars:
            datasets.enable_progress_bars()
    return table


def generate_items(
    table: Table,
    parts_of: Callable[[int, Row], Parts],
    split: Split,
    seed: int,
    shares: Mapping[Split, int],
    *,
    source: str,
    max_prefix_characters: int | None = None,
    reserved: Collection[str] = frozenset(),
) -> Iterator[Item]:
    """Yield the items of one split, each distinct row once, in an order set by the seed.

    Args:
        table: The rows.
        parts_of: Makes the parts of a row from its index and itself.
        split: Rows belong to a split by a hash of their prefix.
        seed: Which order.
        shares: Weight of each split that draws from this table.
        source: Where the rows are from, for error messages.
        max_prefix_characters: Leave out items with a longer prefix.
        reserved: Prefixes that another table gives to another split.

    Raises:
        TaskError: If no row is left for the split.
    """
    order = list(range(len(table)))
    random.Random(stable_seed("rows", split, seed)).shuffle(order)
    seen: set[str] = set()
    for index in order:
        parts = parts_of(index, table[index])
        if max_prefix_characters is not None and len(parts.prefix) > max_prefix_characters:
            continue
        if split_of(parts.prefix, shares) != split or parts.prefix in reserved:
            continue
        # The id is of the content: a file that has changed gives other ids, not other items.
        item_id = _content_id(parts)
        if item_id not in seen:
            seen.add(item_id)
            yield Item(
                id=item_id,
                prefix=parts.prefix,
                suffix=parts.suffix,
                answer=parts.answers[0],
                metadata={"answers": list(parts.answers)},
            )
    if not seen:
        limit = f" and has at most {max_prefix_characters} characters in its prefix"
        raise TaskError(
            f"None of the {len(order)} rows of {source} belongs to split {split!r}"
            f"{limit if max_prefix_characters else ''}. A row's split is set by a hash of its "
            "prefix, so that the splits are disjoint; give more rows with other prefixes."
        )


def answers_of(item: Item) -> list[str]:
    """All right answers of an item made by `generate_items`."""
    answers = item.metadata.get("answers")
    return [str(answer) for answer in answers] if isinstance(answers, list) else [item.answer]


def check_max_prefix_characters(value: int | None) -> None:
    """Raise TaskError unless the option is none or at least 1."""
    if value is not None and value < 1:
        raise TaskError(f"max_prefix_characters must be at least 1 or absent, got {value}.")


def _content_id(parts: Parts) -> str:
    digest = hashlib.sha256()
    for text in (parts.prefix, parts.suffix, *parts.answers):
        encoded = text.encode()
        digest.update(len(encoded).to_bytes(8, "big") + encoded)
    return digest.hexdigest()[:20]


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
