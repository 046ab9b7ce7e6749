from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from command_line import SMALL, error_of, run
from pair_files import write_pair

from droidkv.profile import read_profile

DROIDKV = (sys.executable, "-m", "droidkv.cli.main")


def rewritten(source: Path, change: Callable[[str], str]) -> Path:
    """A changed copy of a profile in the current folder; its map is not there."""
    copy = Path("changed.json")
    copy.write_text(change(source.read_text()))
    return copy


def changed_fields(source: Path, **fields: object) -> Path:
    return rewritten(source, lambda text: json.dumps({**json.loads(text), **fields}))


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda text: text[: len(text) // 2], "truncated"),
        (lambda text: "", "truncated"),
        (lambda text: text.replace('"kl":[', '"kl":[NaN,', 1), "finite number"),
        (lambda text: text.replace('"pair"', '"schema_version":1,"pair"', 1), "twice"),
        (lambda text: "[" * 100_000, "nested"),
        (lambda text: "\x00" * 100, "expected JSON"),
        (lambda text: text.replace('"[0,1)"', '"[0,99)"', 1), "[0,99)"),
        (lambda text: text.replace('"schema_version": 1', '"schema_version": 9', 1), "update"),
        (lambda text: text.replace('"num_layers": ', '"unheard_of": 1, "num_layers": '), "unheard"),
    ],
    ids=["half", "empty", "nan", "twice", "deep", "binary", "range", "version", "unknown"],
)
def test_a_damaged_or_hostile_profile(
    smooth: Path, change: Callable[[str], str], complaint: str
) -> None:
    file = rewritten(smooth, change)
    message = error_of("frontier", "show", file)
    assert str(file) in message and complaint in message


def test_a_profile_that_is_not_utf8() -> None:
    Path("latin.json").write_bytes(b'{"pair": "\xff"}')
    assert "byte 10" in error_of("frontier", "pick", "latin.json")


def test_a_profile_that_is_not_there_or_a_folder() -> None:
    assert "check the path" in error_of("frontier", "pick", "nowhere.json")
    Path("folder.json").mkdir()
    assert "regular file" in error_of("frontier", "pick", "folder.json")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("schema_version = 1\n[sender", "expected TOML"),
        ("a" * 100_000, "expected at most"),
        ("x = " + "[" * 3000, "nested"),
        ("schema_version = 1\nunheard_of = 1\n", "'tasks'"),
        ("schema_version = 2\n", "schema_version"),
    ],
)
def test_a_damaged_or_hostile_pair(text: str, complaint: str) -> None:
    Path("bad.toml").write_text(text)
    for command in (["pair", "show"], ["profile"], ["verify"]):
        message = error_of(*command, "./bad.toml")
        assert "bad.toml" in message and complaint in message


def test_two_models_that_share_no_cache_are_refused_before_any_work() -> None:
    write_pair(Path("odd.toml"), "tiny:llama", "tiny:llama?layers=5")
    message = error_of("profile", "./odd.toml", "-o", "odd.json")
    assert "num_hidden_layers" in message and "4" in message and "5" in message
    assert sorted(path.name for path in Path().iterdir()) == ["odd.toml"]


@pytest.mark.parametrize("plan", ["[0,9)", "[3,1)", "nonsense", "[1,2)+teleport"])
def test_a_group_out_of_range(profiled: Path, plan: str) -> None:
    message = error_of("ask", "tiny", "--profile", profiled, "--plan", plan)
    assert "expected" in message
    assert error_of("confirm", profiled, "--plan", plan) == message


def test_a_profile_of_another_pair(profiled: Path) -> None:
    other = changed_fields(profiled, pair="another")
    message = error_of("ask", "tiny", "--profile", other, "--plan", "none")
    assert "'another'" in message and "'tiny'" in message


def test_a_profile_whose_pair_has_no_name_here_says_how_to_give_its_file(profiled: Path) -> None:
    other = changed_fields(profiled, pair="mine")
    for command in (("confirm", other), ("refine", other, "--plan", "[1,3)")):
        message = error_of(*command)
        assert "unknown pair 'mine'" in message and "--pair" in message


def test_a_profile_of_changed_weights_names_the_field_and_both_values(profiled: Path) -> None:
    profile = read_profile(profiled)
    there = profile.receiver.fingerprint.weights
    assert there is not None
    changed = "sha256:" + "0" * 64
    file = rewritten(profiled, lambda text: text.replace(there, changed))
    for command in (
        ["ask", "tiny", "--profile", file, "--plan", "none"],
        ["verify", "tiny", "--profile", file],
        ["confirm", file, "--plan", "none", "--items", 1],
    ):
        message = error_of(*command)
        assert "weights" in message and there in message and changed in message
        assert "Nothing is reused" in message


def test_a_profile_of_the_other_order_says_so(profiled: Path) -> None:
    table = json.loads(profiled.read_text())
    swapped = changed_fields(profiled, sender=table["receiver"], receiver=table["sender"])
    message = error_of("ask", "tiny", "--profile", swapped, "--plan", "none")
    assert "the other way round" in message


def test_a_stitching_map_that_is_missing_damaged_or_of_another_fit(profiled: Path) -> None:
    copy = Path("tiny.json")
    copy.write_bytes(profiled.read_bytes())
    ask = ("ask", "tiny", "--profile", copy, "--plan", "[1,2)+stitch")
    map_file = Path("tiny.stitch.safetensors")
    assert map_file.name in error_of(*ask)
    good = profiled.with_name(map_file.name).read_bytes()
    map_file.write_bytes(good[:-100])
    assert map_file.name in error_of(*ask)
    map_file.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    message = error_of(*ask)
    assert "sha256" in message and "profile anew" in message


def test_an_item_with_an_empty_prefix_is_named() -> None:
    rows = [{"prefix": "x", "suffix": "Who?", "answer": "Ann"}] * 20
    rows[7] = {**rows[7], "prefix": " "}
    Path("rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    message = error_of("profile", "tiny", "--task", "local", "--task-option", "path=rows.jsonl")
    assert "The prefix of row 8 of rows.jsonl is blank" in message


def test_a_table_with_fewer_items_than_asked_for_says_how_many_it_has() -> None:
    rows = [{"prefix": f"text {index}", "suffix": "Who?", "answer": "Ann"} for index in range(20)]
    Path("rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    table = ("--task", "local", "--task-option", "path=rows.jsonl", "--operator", "copy")
    told = run("profile", "tiny", *table, "--items", 99, "--granularity", 4, "-o", "a.json").stderr
    measured = read_profile("a.json").num_items
    assert (
        0 < measured < 20 and f"the task has {measured} fresh items to evaluate on, not 99" in told
    )


def test_a_damaged_calibration(smooth: Path) -> None:
    Path("calibration.json").write_text('{"schema_version": 1}')
    message = error_of("frontier", "pick", smooth, "--calibration", "calibration.json")
    assert "calibration.json" in message and "shape" in message


def test_an_output_that_cannot_be_written(smooth: Path) -> None:
    Path("file").write_text("")
    message = error_of("frontier", "plot", smooth, "--output", "file/plots")
    assert "choose another path" in message


def test_a_full_stdout() -> None:
    with open("/dev/full", "w") as full:
        result = subprocess.run([*DROIDKV, "pair", "list"], stdout=full, stderr=subprocess.PIPE)
    assert result.returncode == 2
    assert b"No space left" in result.stderr and b"Traceback" not in result.stderr


def test_a_reader_that_stops_reading() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    result = subprocess.run([*DROIDKV, "pair", "list"], stdout=write_end, stderr=subprocess.PIPE)
    os.close(write_end)
    assert result.returncode == 1 and result.stderr == b""


def test_a_disk_that_refuses_keeps_the_old_file(smooth: Path) -> None:
    old = Path("smooth.frontier.png")
    old.write_bytes(b"old")

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))

    result = subprocess.run(
        [*DROIDKV, "frontier", "plot", smooth, "--output", "."],
        capture_output=True,
        text=True,
        preexec_fn=limit,
    )
    assert result.returncode == 2, result.stderr
    assert "File too large" in result.stderr and "unchanged" in result.stderr
    assert old.read_bytes() == b"old"
    assert [path.name for path in Path().iterdir()] == [old.name]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("profile", "tiny", "--device", "gpu"), "'gpu'"),
        (("profile", "tiny", "-o", "out"), "ends in .json, got 'out'"),
        (("profile", "tiny", "--task-option", "num_records=two"), "a whole number, got 'two'"),
        (("profile", "tiny", "--task-option", "name=x"), "Known: num_records, questions"),
        (("verify", "tiny", "--device", "cuda:99"), "'cuda:99'"),
        (("profile", "tiny", "--dtype", "float99"), "Did you mean 'float32'?"),
        (("profile", "tiny", "--ridge", -1), "ridge > 0, got -1"),
        (("profile", "tiny", "--ridge", "nan"), "ridge > 0, got nan"),
        (("probe", "tiny", "--share", -1), "'--share'"),
        (("search", "tiny", "--sampler", "randon"), "Did you mean 'random'?"),
        (("search", "tiny", "--loss", "k1"), "Known: disagreement, kl, top1_error"),
        (("ask", "tiny"), "`droidkv profile PAIR` makes one"),
        (("calibrate", "--pair", "tiny", "--seconds=-1"), "'--seconds'"),
        (("calibrate", "--pair", "tiny", "--seconds", "nan"), "'--seconds'"),
        (("calibrate", "--pair", "tiny", "--rounds", 0), "'--rounds'"),
        (("pair", "check", "tiny", "--dtype", "nosuch"), "unknown dtype 'nosuch'"),
        (
            ("pair", "check", "tiny", "--configs-only", "--dtype", "nosuch"),
            "unknown dtype 'nosuch'",
        ),
        (("pair", "check", "tiny", "--device", "nosuch"), "'nosuch'"),
        (("pair", "check", "tiny", "--profile", "nosuch"), "unknown profile 'nosuch'"),
    ],
)
def test_a_setting_that_makes_no_sense_is_refused_before_anything_is_written(
    arguments: tuple[object, ...], complaint: str
) -> None:
    assert complaint in error_of(*arguments)
    assert not list(Path().iterdir())


def on_a_small_disk(
    script: str, *command: object, size: str = "16k"
) -> subprocess.CompletedProcess[str]:
    """Run a shell script with a small file system at `disk`; `$@` in it is the command."""
    Path("disk").mkdir()
    own_mounts = ["unshare", "--map-root-user", "--mount", "sh", "-c"]
    if subprocess.run([*own_mounts, "mount -t tmpfs none disk"], capture_output=True).returncode:
        pytest.skip("this system lets no user mount a file system of its own")
    script = f"mount -t tmpfs -o size={size} none disk && {script}"
    arguments = [*own_mounts, script, "-", *DROIDKV, *map(str, command)]
    return subprocess.run(arguments, capture_output=True, text=True)


def test_a_full_disk_keeps_what_was_there(smooth: Path) -> None:
    result = on_a_small_disk(
        'echo old > disk/old && "$@"; code=$?; ls disk; exit $code',
        *("frontier", "plot", smooth, "--output", "disk"),
    )
    assert result.returncode == 2, result.stderr
    assert "the disk is full" in result.stderr and "Traceback" not in result.stderr
    assert result.stdout.split() == ["old"]


@pytest.mark.parametrize(
    "command",
    [
        ("profile", "tiny", *SMALL, "--items", 9, "--operator", "copy"),
        ("confirm", "PROFILE", "--items", 9, "--plan", "[1,3)"),
        ("probe", "tiny", *SMALL[:2], "--items", 9),
    ],
    ids=lambda command: command[0],
)
def test_a_full_disk_amid_long_work_loses_nothing_finished(
    profiled: Path, command: tuple[object, ...]
) -> None:
    step = "probe" if command[0] == "probe" else "sweep"
    name = "a.confirm" if command[0] == "confirm" else "a"
    result = on_a_small_disk(
        f'"$@" || echo $? && stat -c "%n %Y" disk/{name}.run/{step}-*.json > full'
        " && mount -o remount,size=10m disk"
        f' && "$@" && ls disk/{name}.json',
        *(profiled if each == "PROFILE" else each for each in command),
        *("-o", f"disk/{name}.json", "-q"),
    )
    assert result.returncode == 0, result.stderr
    assert "the disk is full" in result.stderr and "Traceback" not in result.stderr
    assert "nothing is lost" in result.stderr and f"disk/{name}.run" in result.stderr
    assert result.stdout.startswith("2\n") and result.stdout.endswith(f"\ndisk/{name}.json\n")
    assert 0 < len(Path("full").read_text().splitlines()) < 9


def test_a_full_disk_amid_refining_keeps_the_plans_that_were_trained(profiled: Path) -> None:
    name = "a.refined.confirm"
    result = on_a_small_disk(
        f'"$@" > first || echo $?; ls disk/{name}.run > kept; mount -o remount,size=10m disk'
        ' && "$@" > second && ls disk',
        *("refine", profiled, "--plan", "[1,3)", "--plan", "[2,4)", "--items", 2),
        *("--calibration-items", 2, "--steps", 2, "-o", f"disk/{name}.json", "-q"),
        size="160k",  # one trained map needs 100 KiB
    )
    assert result.returncode == 0, result.stderr
    assert "the disk is full" in result.stderr and "Traceback" not in result.stderr
    assert "nothing is lost" in result.stderr
    assert result.stdout.split() == ["2", f"{name}.json", f"{name}.stitch.safetensors"]
    kept = Path("kept").read_text().split()
    assert {name for name in kept if name.endswith((".json", ".safetensors"))} == {
        "settings.json",
        "refine-00000.json",
        "refine-00000.safetensors",
    }


@pytest.mark.parametrize(("size", "resumed_from"), [("400k", 0), ("1200k", 1)])
def test_a_full_disk_amid_training_goes_on_from_the_last_whole_checkpoint(
    size: str, resumed_from: int
) -> None:
    pytest.importorskip("peft")
    train = """task = "records"
options = { num_records = 2 }
steps = 2
learning_rate = 0.01
batch_size = 1"""
    base = "tiny:llama?seed=0&layers=2"
    pair = write_pair(Path("mine.toml"), base, base, "./adapters/mine", train=train)
    result = on_a_small_disk(
        '"$@" > first || echo $?; ls disk/a.training | grep checkpoint > kept;'
        ' mount -o remount,size=10m disk && "$@" > second && ls disk',
        *("pair", "train", pair, "-o", "disk/a", "--checkpoint-every", 1, "--json"),
        size=size,  # a checkpoint needs 740 KB
    )
    assert result.returncode == 0, result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout.split() == ["2", "a"]
    assert "the disk is full" in json.loads(Path("first").read_text())["error"]["message"]
    assert len(Path("kept").read_text().split()) == resumed_from + 1  # the last one is cut short
    assert json.loads(Path("second").read_text())["resumed_from"] == resumed_from


@pytest.mark.parametrize("loss", ["nan", "inf", "-1"])
def test_a_largest_loss_that_is_none(smooth: Path, loss: str) -> None:
    for command in (("confirm", smooth), ("frontier", "pick", smooth)):
        assert "a largest loss >= 0" in error_of(*command, f"--max-loss={loss}")


@pytest.mark.parametrize("part", ["model", "adapter"])
def test_a_pair_of_a_folder_that_is_not_there_is_bad_input(part: str) -> None:
    base = "tiny:llama?layers=2"
    model, adapter = (base, "./gone") if part == "adapter" else ("./gone", None)
    write_pair(Path("mine.toml"), base, model, adapter)
    assert "gone" in error_of("pair", "check", "./mine.toml")


@pytest.mark.parametrize("command", ["calibrate --pair tiny", "stitch tiny", "profile tiny"])
def test_an_output_in_no_folder_is_refused_before_the_work(command: str) -> None:
    Path("file").write_text("")
    message = error_of(*command.split(), "-o", "file/deeper/made.json")
    assert "'made.json'" in message and str(Path("file").absolute()) in message
