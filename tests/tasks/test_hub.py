"""Hub data sets: rows of the right shape become items; without a hub the error has a way out."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest

from droidkv.errors import TaskError
from droidkv.tasks import SPLITS, Task, get_task
from droidkv.tasks.hub_specs import HUB_SPECS
from droidkv.tasks.metrics import METRICS

datasets: Any = pytest.importorskip("datasets")
pytestmark = pytest.mark.usefixtures("dataset_cache")

NUM_ROWS = 24
FILES = {
    "gsm8k": "gsm8k.jsonl",
    "hotpotqa_distractor": "hotpotqa_distractor.jsonl",
    "repobench-p": "longbench_code.jsonl",
    "lcc": "longbench_code.jsonl",
}


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def make_local(name: str, data: Path) -> Task:
    return get_task("hub", dataset=name, data_files=str(data / FILES.get(name, "longbench.jsonl")))


@pytest.mark.parametrize("name", HUB_SPECS)
def test_rows_of_the_shape_become_items(name: str, data: Path) -> None:
    task = make_local(name, data)
    items = [item for split in SPLITS for item in task.items(split, 100)]
    assert len(items) == NUM_ROWS
    assert len({item.prefix for item in items}) == NUM_ROWS
    for item in items:
        assert "{" not in item.suffix.replace("{}", "")
        assert item.suffix.strip()
        # All invented answers are whole texts with a word, a line or a number in them.
        assert task.score(item, item.answer) == 1.0
        assert task.score(item, "?") < 0.5
    assert task.metric in METRICS
    assert task.max_new_tokens >= 32


def test_named_by_the_issue() -> None:
    assert {"hotpotqa", "2wikimqa", "multifieldqa_en", "repobench-p", "gsm8k"} <= set(HUB_SPECS)


def test_long_bench_item(data: Path) -> None:
    row = rows_of(data / "longbench.jsonl")[0]
    task = make_local("hotpotqa", data)
    items = {item.prefix: item for split in SPLITS for item in task.items(split, 100)}
    item = items["The following are given passages.\n" + row["context"]]
    assert item.suffix.endswith("Question: " + row["input"])
    assert row["input"] not in item.prefix
    assert item.metadata["answers"] == row["answers"]
    assert task.score(item, row["answers"][1]) == 1.0


def test_code_item_has_other_files_as_prefix_and_this_file_as_suffix(data: Path) -> None:
    row = rows_of(data / "longbench_code.jsonl")[0]
    task = make_local("repobench-p", data)
    items = {item.prefix: item for split in SPLITS for item in task.items(split, 100)}
    item = items[row["context"]]
    assert item.suffix.startswith(row["input"])
    assert task.score(item, f"```python\n{row['answers'][0]}\n```") == 1.0


def test_hotpotqa_passages_are_joined(data: Path) -> None:
    prefixes = {
        item.prefix
        for split in SPLITS
        for item in make_local("hotpotqa_distractor", data).items(split, 100)
    }
    assert (
        "The following are given passages.\n"
        "Passage 1:\nLinmere\nLinmere is invented. It is small.\n\n"
        "Passage 2:\nFC Linmere\nFC Linmere was founded by Keeper 1."
    ) in prefixes


def test_hotpotqa_passages_of_another_shape_are_refused(write_rows: Any) -> None:
    path = write_rows([{"context": "one text", "question": "q", "answer": "a"}])
    task = get_task("hub", dataset="hotpotqa_distractor", data_files=path)
    with pytest.raises(TaskError, match="table of 'title'"):
        task.items("train", 1)


def test_missing_column_is_named(data: Path) -> None:
    path = str(data / "gsm8k.jsonl")
    task = get_task("hub", dataset="hotpotqa", data_files=path)
    with pytest.raises(TaskError, match=r"\['context', 'input', 'answers'\] are missing"):
        task.items("eval", 1)


def test_unknown_data_set_names_the_known() -> None:
    with pytest.raises(TaskError, match="Did you mean 'hotpotqa'"):
        get_task("hub", dataset="hotpot")


@pytest.mark.parametrize("name", ["gsm8k", "hotpotqa"])
def test_without_a_hub_the_error_says_the_way_out(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise ConnectionError("no route to the hub")

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", refuse)
    with pytest.raises(TaskError, match=r"no route to the hub.*data_files=PATH") as caught:
        get_task("hub", dataset=name).items("eval", 1)
    assert str(list(HUB_SPECS[name].columns)) in str(caught.value)


def test_hub_splits_stay_apart(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of the hub's own test split are evaluated; none that is also there is trained on."""
    rows = rows_of(data / "gsm8k.jsonl")
    files = {"train": rows[:19], "test": rows[14:]}  # rows 14 to 18 leaked
    for hub_split, chosen in files.items():
        (tmp_path / f"{hub_split}.jsonl").write_text("\n".join(map(json.dumps, chosen)))
    calls = []
    load_dataset = datasets.load_dataset

    def load(path: str, config: str, *, split: str, revision: str) -> Any:
        calls.append((path, config, revision))
        return load_dataset("json", data_files=str(tmp_path / f"{split}.jsonl"), split="train")

    monkeypatch.setattr(datasets, "load_dataset", load)
    task = get_task("hub", dataset="gsm8k", revision="abc123")
    prefixes = {split: {i.prefix for i in task.items(split, 100)} for split in SPLITS}
    assert prefixes["eval"] == {row["question"] for row in rows[14:]}
    assert not prefixes["train"] & prefixes["calibration"]
    assert prefixes["train"] | prefixes["calibration"] == {row["question"] for row in rows[:14]}
    assert set(calls) == {("openai/gsm8k", "main", "abc123")}


def test_long_bench_is_read_from_its_archive(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = tmp_path / "data.zip"
    with zipfile.ZipFile(archive, "w") as file:
        file.write(data / "longbench.jsonl", "data/2wikimqa.jsonl")
        file.write(data / "gsm8k.jsonl", "data/hotpotqa.jsonl")
    calls = []

    def download(hub_id: str, filename: str, *, repo_type: str, revision: str) -> str:
        calls.append((hub_id, filename, repo_type, revision))
        return str(archive)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    from_hub = get_task("hub", dataset="2wikimqa").items("eval", 100)
    assert from_hub == make_local("2wikimqa", data).items("eval", 100)
    assert calls == [("THUDM/LongBench", "data.zip", "dataset", "main")]
