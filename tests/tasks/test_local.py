"""Local data files: formats, templates, disjoint splits, and errors that say the way out."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from droidkv.errors import TaskError
from droidkv.tasks import SPLITS, get_task

pytestmark = pytest.mark.usefixtures("dataset_cache")
Write = Callable[..., str]


def make_rows(num_rows: int = 60) -> list[dict[str, Any]]:
    return [
        {"prefix": f"Box {i} holds {i + 1} coins.", "suffix": "How many?", "answer": str(i + 1)}
        for i in range(num_rows)
    ]


def write_as(rows: list[dict[str, Any]], path: Path) -> str:
    if path.suffix == ".json":
        path.write_text(json.dumps(rows))
    elif path.suffix == ".csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    elif path.suffix == ".parquet":
        pytest.importorskip("datasets").Dataset.from_list(rows).to_parquet(str(path))
    else:
        path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".parquet"])
def test_every_format_gives_the_same_items(suffix: str, tmp_path: Path) -> None:
    rows = make_rows()
    for row in rows:
        row["answer"] = f"{row['answer']} coins"  # no number: CSV has no types
    path = write_as(rows, tmp_path / f"rows{suffix}")
    task = get_task("local", path=path)
    items = [item for split in SPLITS for item in task.items(split, 100)]
    found = {(item.prefix, item.suffix, item.answer) for item in items}
    assert found == {(row["prefix"], row["suffix"], row["answer"]) for row in rows}
    assert len({item.id for item in items}) == len(rows)


def test_splits_share_no_prefix_even_with_several_questions(write_rows: Write) -> None:
    rows = make_rows() + [{**row, "suffix": "How many coins?"} for row in make_rows()]
    task = get_task("local", path=write_rows(rows))
    split_of_prefix: dict[str, str] = {}
    num_items = 0
    for split in SPLITS:
        for item in task.items(split, 1000, seed=1):
            num_items += 1
            assert split_of_prefix.setdefault(item.prefix, split) == split
    assert num_items == len(rows)
    assert set(split_of_prefix.values()) == set(SPLITS)


def test_order_is_of_the_seed_and_not_of_the_file(write_rows: Write) -> None:
    task = get_task("local", path=write_rows(make_rows()))
    items = task.items("train", 100, seed=3)
    assert task.items("train", 5, seed=3) == items[:5]
    other = task.items("train", 100, seed=4)
    assert other != items
    assert {item.id for item in other} == {item.id for item in items}


def test_rows_are_counted_once(write_rows: Write) -> None:
    task = get_task("local", path=write_rows(make_rows() * 2))
    ids = [item.id for split in SPLITS for item in task.items(split, 1000)]
    assert len(ids) == len(set(ids)) == len(make_rows())


def test_changed_content_changes_the_id(write_rows: Write) -> None:
    rows = make_rows()
    before = {item.id for item in get_task("local", path=write_rows(rows)).items("train", 100)}
    for row in rows:
        row["answer"] += "!"
    path = write_rows(rows, "changed.jsonl")
    after = {item.id for item in get_task("local", path=path).items("train", 100)}
    assert not before & after


def test_templates_and_lists(write_rows: Write) -> None:
    rows = [
        {"docs": [f"First {i}.", "Second."], "who asks": "Bo", "q": "{Why}?", "golds": ["x", "y z"]}
        for i in range(40)
    ]
    task = get_task(
        "local",
        path=write_rows(rows),
        prefix="Notes:\n{docs}",
        suffix="{who asks} asks {{briefly}}: {q}",
        answer="golds",
    )
    item = task.items("train", 1)[0]
    assert item.prefix.startswith("Notes:\nFirst ")
    assert item.prefix.endswith(".\n\nSecond.")
    assert item.suffix == "Bo asks {briefly}: {Why}?"
    assert item.answer == "x"
    assert task.score(item, "y z") == 1.0
    assert task.score(item, "w") == 0.0


def test_constant_suffix_and_metric(write_rows: Write) -> None:
    task = get_task(
        "local", path=write_rows(make_rows()), suffix="Count them.", metric="number_match"
    )
    item = task.items("train", 1)[0]
    assert item.suffix == "Count them."
    assert task.metric == "number_match"
    assert task.score(item, f"There are {item.answer}.") == 1.0


def test_long_prefixes_are_left_out(write_rows: Write) -> None:
    rows = make_rows(120)
    longest = max(len(row["prefix"]) for row in rows)
    path = write_rows(rows)
    task = get_task("local", path=path, max_prefix_characters=longest - 1)
    prefixes = [item.prefix for split in SPLITS for item in task.items(split, 100)]
    assert prefixes
    assert all(len(prefix) < longest for prefix in prefixes)
    with pytest.raises(TaskError, match="at most 3 characters"):
        get_task("local", path=path, max_prefix_characters=3).items("train", 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"path": ""}, "needs the option path"),
        ({"path": "absent.jsonl"}, "but there is none"),
        ({"path": "rows.xlsx"}, "must end in one of .jsonl"),
        ({"metric": "f1"}, "unknown metric 'f1'"),
        ({"max_new_tokens": 0}, "at least 1, got 0"),
        ({"max_prefix_characters": 0}, "at least 1 or absent, got 0"),
        ({"prefix": "prefx"}, "Did you mean 'prefix'"),
        ({"prefix": "See {prefx}"}, "Did you mean 'prefix'"),
        ({"prefix": "See {prefix.__class__}"}, "unknown column"),
        ({"prefix": "See {prefix!r}"}, "plain column names"),
        ({"prefix": "See {prefix:>9}"}, "plain column names"),
        ({"prefix": "See {prefix"}, "malformed"),
    ],
)
def test_wrong_options(options: dict[str, Any], message: str, write_rows: Write) -> None:
    with pytest.raises(TaskError, match=message):
        get_task("local", **{"path": write_rows(make_rows()), **options}).items("train", 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prefix": "  "}, "The prefix of row 1 of .* is blank"),
        ({"suffix": None}, "Column 'suffix' of row 1 of .* got NoneType"),
        ({"answer": []}, "answer of row 1 of .* is an empty list"),
    ],
)
def test_wrong_rows_are_named(change: dict[str, Any], message: str, write_rows: Write) -> None:
    path = write_rows([{**make_rows(1)[0], **change}])
    with pytest.raises(TaskError, match=message):
        get_task("local", path=path).items("train", 1)


def test_few_prefixes_leave_a_split_empty(write_rows: Write) -> None:
    task = get_task("local", path=write_rows(make_rows(1)))
    with pytest.raises(TaskError, match=r"None of the 1 rows .* more rows with other prefixes"):
        for split in SPLITS:
            task.items(split, 1)


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.csv"])
def test_an_empty_file_is_an_error_of_the_task(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text("")
    with pytest.raises(TaskError, match=rf"Expected a \w+ file at '.*{name}': \w"):
        get_task("local", path=str(path)).items("train", 1)


def test_truncated_file_is_an_error_of_the_task(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prefix": "a", "suffix"')
    with pytest.raises(TaskError, match="Expected a json file"):
        get_task("local", path=str(path)).items("train", 1)
