"""The papers' data sets by name, from a hub or from a local file of the same shape."""

from __future__ import annotations

import dataclasses
import json
import zipfile
from collections.abc import Callable, Iterator
from typing import ClassVar

from droidkv.errors import TaskError, require_extra, unknown_name
from droidkv.tasks.base import Item, Split, Task
from droidkv.tasks.hub_specs import HUB_SPECS, HubSpec
from droidkv.tasks.metrics import best_score, get_metric
from droidkv.tasks.row_template import Parts, Row
from droidkv.tasks.rows import (
    Table,
    answers_of,
    check_max_prefix_characters,
    generate_items,
    read_table,
)


@dataclasses.dataclass(frozen=True)
class HubTask(Task):
    """One of the papers' data sets.

    Attributes:
        dataset: Name in `droidkv.tasks.hub_specs.HUB_SPECS`.
        data_files: A local file of the same shape, used instead of the hub. All splits are then
            drawn from it.
        revision: Branch, tag or commit on the hub.
        max_prefix_characters: Leave out rows with a longer prefix.
    """

    name: ClassVar[str] = "hub"
    version: ClassVar[int] = 1

    dataset: str = "hotpotqa"
    data_files: str | None = None
    revision: str = "main"
    max_prefix_characters: int | None = None

    def __post_init__(self) -> None:
        if self.dataset not in HUB_SPECS:
            raise TaskError(unknown_name("hub data set", self.dataset, HUB_SPECS))
        check_max_prefix_characters(self.max_prefix_characters)

    # These two are of the data set; the base declares them as class variables.
    @property
    def metric(self) -> str:  # type: ignore[override]
        """Name of the data set's usual metric."""
        return self._spec.metric

    @property
    def max_new_tokens(self) -> int:  # type: ignore[override]
        """Enough to write any answer of the data set."""
        return self._spec.max_new_tokens

    @property
    def _spec(self) -> HubSpec:
        return HUB_SPECS[self.dataset]

    def generate(self, split: Split, seed: int) -> Iterator[Item]:
        """Yield the rows of a split, shuffled by the seed; see `Task.generate`."""
        hub_splits = self._spec.hub_splits
        if self.data_files is not None:
            hub_splits = dict.fromkeys(hub_splits, "local file")
        table, parts_of = self._open(hub_splits[split])
        reserved: set[str] = set()
        # Where evaluation has a hub split of its own, nothing in it may be trained on.
        if hub_splits[split] != hub_splits["eval"]:
            eval_table, eval_parts_of = self._open(hub_splits["eval"])
            reserved = {
                eval_parts_of(index, eval_table[index]).prefix for index in range(len(eval_table))
            }
        yield from generate_items(
            table,
            parts_of,
            split,
            seed,
            {
                other: share
                for other, share in self._spec.shares.items()
                if hub_splits[other] == hub_splits[split]
            },
            source=self.data_files or f"{self._spec.hub_id} ({hub_splits[split]})",
            max_prefix_characters=self.max_prefix_characters,
            reserved=reserved,
        )

    def score(self, item: Item, prediction: str) -> float:
        """The data set's metric against the right answer that fits best."""
        return best_score(get_metric(self.metric), prediction, answers_of(item))

    def _open(self, hub_split: str) -> tuple[Table, Callable[[int, Row], Parts]]:
        spec = self._spec
        if self.data_files is not None:
            table = read_table(self.data_files)
        else:
            table = _load_from_hub(self.dataset, spec, hub_split, self.revision)
        source = self.data_files or f"{spec.hub_id} ({hub_split})"
        missing = [column for column in spec.columns if column not in table.column_names]
        if missing:
            raise TaskError(
                f"{source} must have the columns {list(spec.columns)} of data set "
                f"{self.dataset!r}, but {missing} are missing; it has {list(table.column_names)}."
            )
        from_row = spec.template.compile({*table.column_names, *spec.made_columns}, source)
        prepare = spec.prepare
        if prepare is None:
            return table, from_row
        return table, lambda index, row: from_row(index, {**row, **prepare(row)})


def _load_from_hub(name: str, spec: HubSpec, hub_split: str, revision: str) -> Table:
    datasets = require_extra("datasets", "tasks")
    hub = require_extra("huggingface_hub", "tasks")
    try:
        table: Table
        if spec.archive is None:
            table = datasets.load_dataset(
                spec.hub_id, spec.config, split=hub_split, revision=revision
            )
        else:
            # This repository's own loader is a script, which `datasets` no longer runs.
            path = hub.hf_hub_download(
                spec.hub_id, spec.archive, repo_type="dataset", revision=revision
            )
            table = datasets.Dataset.from_list(_read_archive(path, spec))
    # Network libraries raise errors of many families; whichever it is, the way out is the same.
    except Exception as error:
        raise TaskError(
            f"Data set {name!r} is {spec.hub_id!r} on the hub, but it could not be loaded from "
            f"there ({type(error).__name__}: {error}). Without a hub, give a local JSONL, JSON, "
            f"CSV or Parquet file with the columns {list(spec.columns)}: option data_files=PATH."
        ) from error
    return table


def _read_archive(path: str, spec: HubSpec) -> list[dict[str, object]]:
    """The needed columns of the configuration's JSONL file in a zip archive."""
    with zipfile.ZipFile(path) as archive, archive.open(spec.config_file) as lines:
        rows = [json.loads(line) for line in lines if line.strip()]
    return [{column: row[column] for column in spec.columns} for row in rows]
