"""Any local data file as a task: JSONL, JSON, CSV or Parquet."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import ClassVar

from droidkv.errors import TaskError
from droidkv.tasks.base import Item, Split, Task
from droidkv.tasks.metrics import best_score, get_metric
from droidkv.tasks.row_template import RowTemplate
from droidkv.tasks.rows import (
    answers_of,
    check_max_prefix_characters,
    generate_items,
    read_table,
)

_SHARES: dict[Split, int] = {"train": 6, "calibration": 2, "eval": 2}


@dataclasses.dataclass(frozen=True)
class LocalTask(Task):
    """The rows of a local file; a row's split is set by a hash of its prefix.

    `prefix`, `suffix` and `answer` are each the name of a column or a text with columns in braces,
    for example `suffix="Question: {question}"`. An answer column may hold a list of right answers.

    Attributes:
        path: The file; its suffix (.jsonl, .json, .csv, .parquet) tells the format.
        prefix: What both models share.
        suffix: What only the receiver sees.
        answer: What a right answer is.
        metric: Name of a metric in `droidkv.tasks.metrics`.
        max_new_tokens: Enough to write any answer.
        max_prefix_characters: Leave out rows with a longer prefix.
    """

    name: ClassVar[str] = "local"
    version: ClassVar[int] = 1

    path: str = ""
    prefix: str = "prefix"
    suffix: str = "suffix"
    answer: str = "answer"
    # Fixed for every other task, hence a class variable of the base.
    metric: str = "token_f1"  # type: ignore[misc]
    max_new_tokens: int = 64  # type: ignore[misc]
    max_prefix_characters: int | None = None

    def __post_init__(self) -> None:
        if not self.path:
            raise TaskError(
                "Task 'local' needs the option path: a JSONL, JSON, CSV or Parquet file."
            )
        get_metric(self.metric)
        if self.max_new_tokens < 1:
            raise TaskError(f"max_new_tokens must be at least 1, got {self.max_new_tokens}.")
        check_max_prefix_characters(self.max_prefix_characters)

    def generate(self, split: Split, seed: int) -> Iterator[Item]:
        """Yield the rows of a split, shuffled by the seed; see `Task.generate`."""
        table = read_table(self.path)
        template = RowTemplate(self.prefix, self.suffix, self.answer)
        return generate_items(
            table,
            template.compile(table.column_names, self.path),
            split,
            seed,
            _SHARES,
            source=self.path,
            max_prefix_characters=self.max_prefix_characters,
        )

    def score(self, item: Item, prediction: str) -> float:
        """The metric against the right answer that fits best."""
        return best_score(get_metric(self.metric), prediction, answers_of(item))
