"""What is there already is not lost: finished measurements, and what a command reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_line import SMALL, error_of, run
from pair_files import write_pair

from droidkv.errors import StorageError
from droidkv.profile import read_profile

ENDINGS = {"confirm": ".confirm", "refine": ".refined.confirm"}


@pytest.mark.parametrize(
    "command",
    [
        ("profile", "tiny"),
        ("confirm", "PROFILE"),
        ("refine", "PROFILE", "--plan", "[1,3)"),
        ("probe", "tiny"),
        ("search", "tiny"),
        ("sharing", "tiny"),
        ("stitch", "tiny"),
        ("calibrate", "--pair", "tiny"),
    ],
    ids=lambda command: command[0],
)
def test_a_measurement_that_is_there_is_kept_unless_told_otherwise(
    smooth: Path, command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("droidkv.loading.load_model", lambda *_: pytest.fail("loaded before"))
    there = Path(f"there{ENDINGS.get(command[0], '')}.json")
    there.write_text("kept")
    arguments = [smooth if each == "PROFILE" else each for each in command]
    message = error_of(*arguments, "-o", there)
    assert str(there) in message and "--overwrite" in message
    assert there.read_text() == "kept"


@pytest.mark.parametrize(
    ("command", "output", "complaint"),
    [
        (("confirm", "PROFILE"), "fresh.json", "ends in .confirm.json, got 'fresh.json'"),
        (("refine", "PROFILE", "--plan", "[1,3)"), "a.confirm.json", "in .refined.confirm.json,"),
        (("profile", "tiny"), "a.confirm.json", "does not end in .confirm.json"),
        (("search", "tiny"), "a.refined.confirm.json", "does not end in .confirm.json"),
    ],
)
def test_confirmations_and_nothing_else_are_named_as_such(
    smooth: Path, command: tuple[str, ...], output: str, complaint: str
) -> None:
    arguments = [smooth if each == "PROFILE" else each for each in command]
    assert complaint in error_of(*arguments, "-o", output)


def test_a_default_output_that_is_there_is_kept_too(tmp_path: Path) -> None:
    (tmp_path / "profiles").mkdir()
    for name in ("tiny.json", "tiny.probe.json", "tiny.search.json", "tiny.sharing.json"):
        (tmp_path / "profiles" / name).write_text("kept")
    for command in ("profile", "probe", "search", "sharing"):
        assert "--overwrite" in error_of(command, "tiny")


@pytest.mark.parametrize(
    ("command", "beside"),
    [
        (("profile", "tiny"), "out.stitch.safetensors"),
        (("search", "tiny"), "out.stitch.safetensors"),
        (("refine", "PROFILE", "--plan", "[1,3)"), "out.refined.confirm.stitch.safetensors"),
        (("confirm", "PROFILE", "--plan", "[1,3)+stitch"), "out.confirm.stitch.safetensors"),
        (("sharing", "tiny"), "out.naive.json"),
    ],
    ids=lambda each: each[0] if isinstance(each, tuple) else "",
)
def test_what_is_written_beside_a_measurement_is_kept_too(
    smooth: Path, command: tuple[str, ...], beside: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("droidkv.loading.load_model", lambda *_: pytest.fail("loaded before"))
    Path(beside).write_text("of another measurement")
    output = f"{beside.removesuffix('.naive.json').removesuffix('.stitch.safetensors')}.json"
    arguments = [smooth if each == "PROFILE" else each for each in command]
    message = error_of(*arguments, "-o", output)
    assert f"no file at {beside}," in message and "--overwrite" in message


def test_a_map_that_is_not_written_is_in_nobodys_way(profiled: Path) -> None:
    for name in ("a", "b.confirm"):
        Path(f"{name}.stitch.safetensors").write_text("of another measurement")
    few = (*SMALL, "--granularity", 4)
    run("profile", "tiny", *few, "--operator", "copy", "-o", "a.json")
    run("confirm", profiled, "--items", 1, "--plan", "[1,3)", "-o", "b.confirm.json")
    for path in profiled.parent.iterdir():
        Path(path.name).write_bytes(path.read_bytes())
    Path("tiny.confirm.stitch.safetensors").write_text("of another measurement")
    run("confirm", "tiny.json", "--items", 1, "--plan", "[1,3)+stitch")


def test_a_run_that_ended_right_behind_its_map_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise StorageError("the disk is full")

    command = ("profile", "tiny", *SMALL, "--granularity", 2, "-o", "a.json")
    with monkeypatch.context() as patch:
        patch.setattr("droidkv.profiler.write_profile", full)
        assert error_of(*command) == "the disk is full"
    assert Path("a.stitch.safetensors").exists()
    run(*command)


def test_the_map_of_a_profile_is_an_input(profiled: Path) -> None:
    map_file = "p.refined.confirm.stitch.safetensors"
    Path(map_file).write_bytes(profiled.with_suffix(".stitch.safetensors").read_bytes())
    renamed = profiled.read_text().replace("tiny.stitch.safetensors", map_file)
    Path("p.json").write_text(renamed)
    message = error_of("refine", "p.json", "--plan", "[1,3)", "--overwrite")
    assert "no input" in message and map_file in message


def test_overwriting_replaces_the_measurement() -> None:
    Path("a.json").write_text("old")
    run(
        "profile",
        "tiny",
        *SMALL,
        "--granularity",
        4,
        "--operator",
        "copy",
        "-o",
        "a.json",
        "--overwrite",
    )
    assert read_profile("a.json").num_items == 2


def test_no_output_replaces_an_input(smooth: Path) -> None:
    profile, pair = Path("p.json"), write_pair(Path("mine.toml"), "tiny:llama", "tiny:llama")
    profile.write_bytes(smooth.read_bytes())
    rows = [{"prefix": f"text {index}", "suffix": "?", "answer": "Ann"} for index in range(20)]
    Path("rows.json").write_text(json.dumps(rows))
    Path("linked.json").symlink_to("rows.json")
    for ending in ENDINGS.values():
        Path(f"p{ending}.json").symlink_to("p.json")
    table = ("--task", "local", "--task-option", "path=rows.json")
    before = {path: path.read_bytes() for path in Path().iterdir()}
    for command, output in (
        (("confirm", profile), "./p.confirm.json"),
        (("refine", profile, "--plan", "[1,3)"), Path("p.refined.confirm.json").absolute()),
        (("profile", "tiny", *table), "rows.json"),
        (("profile", "tiny", *table), "linked.json"),
        (("search", "tiny", "--probe", profile), profile),
        (("calibrate", "--pair", f"./{pair}"), pair),
    ):
        assert "no input" in error_of(*command, "-o", output, "--overwrite")
    assert {path: path.read_bytes() for path in Path().iterdir()} == before


def test_a_default_output_that_cannot_be_written_is_refused_before_the_work(
    smooth: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.access", lambda *_: False)
    for command in (("confirm", smooth), ("stitch", "tiny"), ("profile", "tiny")):
        assert "expected a folder to write" in error_of(*command)


def test_a_task_without_more_items_is_told_of_before_the_work() -> None:
    rows = [{"prefix": f"text {index}", "suffix": "?", "answer": "Ann"} for index in range(20)]
    Path("rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    table = ("--task", "local", "--task-option", "path=rows.jsonl", "--operator", "copy")
    base = ("profile", "tiny", *table, "--granularity", 4)
    told = run(*base, "--items", 1, "-o", "one.json").stderr
    assert "`droidkv confirm`" not in told
    told = run(*base, "--items", 19, "-o", "all.json").stderr
    assert "`droidkv confirm`" in told and told.index("--items") < told.index("profiling")
