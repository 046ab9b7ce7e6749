"""From the rows of a table to items: what the tasks over data files and hub data sets share."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Protocol

from droidkv.errors import TaskError, require_extra
from droidkv.tasks.base import Item, Split, split_of, stable_seed
from droidkv.tasks.row_template import Parts, Row

_FORMATS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}


class Table(Protocol):
    """What is used of a `datasets.Dataset`."""

    column_names: list[str]

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Row: ...


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
    datasets = require_extra("datasets", "tasks")
    file_format = _FORMATS[file.suffix.lower()]
    # Local files load in a moment; the bars would only break up the caller's own output.
    had_bars = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        table: Table = datasets.load_dataset(file_format, data_files=str(file), split="train")
    # A file without a row ends the library's own iterator, with an exception that says nothing.
    except (datasets.exceptions.DatasetsError, OSError, ValueError, StopIteration) as error:
        reason = str(error.__cause__ or error) or "it has no rows"
        raise TaskError(f"Expected a {file_format} file at {path!r}: {reason}") from error
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
