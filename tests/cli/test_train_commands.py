from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from command_line import SMALL, error_of, run, run_json
from pair_files import write_pair

pytest.importorskip("peft")

from droidkv.pair import read_pair
from droidkv.profile_job import Job
from droidkv.training.curve import Curve

BASE = "tiny:llama?seed=0&layers=2"
TRAIN = """task = "records"
options = { num_records = 2 }
steps = 2
learning_rate = 0.01
batch_size = 2
"""


def write_plain(folder: Path, recipe: str = "") -> Path:
    return write_pair(folder / "mine.toml", BASE, BASE, "./adapters/mine", train=TRAIN + recipe)


def test_plain_makes_the_adapter_that_the_pair_names(tmp_path: Path) -> None:
    pair = write_plain(tmp_path)
    value = run_json("train", "plain", pair, "--eval-every", "1", "--eval-items", "2")
    assert value["steps"] == 2
    assert Path(value["output"]) == tmp_path / "adapters" / "mine"
    curve = Curve.read(tmp_path / "adapters" / "mine" / "curve.json")
    assert curve.command.startswith("droidkv ") and len(curve.held_out) == 3
    assert value["held_out_loss"] == curve.held_out[-1][1]
    assert value["curve_plot"] is None or Path(value["curve_plot"]).is_file()
    assert run_json("pair", "check", pair)["passed"]
    assert "remove it" in error_of("train", "plain", pair)


@pytest.mark.parametrize(
    "arguments",
    [("prefillshare",), ("prefillshare", "--method", "full"), ("icarus",)],
)
def test_full_share_writes_a_pair_that_profiles(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    pair = write_plain(tmp_path)
    run_json("train", "plain", pair)
    mode, *options = arguments
    value = run_json("train", mode, pair, *options)
    made = read_pair(value["pair_file"])
    assert made.train is not None and made.train.mode == mode
    assert made.path == tmp_path / f"mine-{mode}{'-full' * bool(options)}.toml"
    assert run_json("pair", "check", made.path)["passed"]
    profile = tmp_path / "profile.json"
    run_json("profile", made.path, *SMALL, "--operator", "copy", "-o", profile)
    assert {row["plan"] for row in run_json("frontier", "show", profile)["plans"]} >= {"[0,0)"}
    assert "which losses are against" in run("frontier", "show", profile).stdout
    assert run_json("frontier", "pick", profile, "--objective", "kl", "--max-loss", "99")
    shown = run_json(
        "sharing", made.path, *SMALL[:-2], "--steps", "2", "-o", tmp_path / "sharing.json"
    )
    assert [point["shared_layers"] for point in shown["curves"]["trained"]] == [0, 1, 2]


def test_an_interrupted_sharing_goes_on_in_either_half(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = write_plain(tmp_path)
    run_json("train", "plain", pair)
    made = run_json("train", "prefillshare", pair)["pair_file"]
    target = tmp_path / "x.sharing.json"
    arguments = ("sharing", made, *SMALL[:-2], "--steps", 2, "-o", target)
    sweep_item = Job.sweep_item
    done: list[tuple[str, int]] = []
    ends = [1, 3]

    def interrupted(job: Job, index: int, *rest: Any) -> Any:
        if ends and len(done) == ends[0]:
            raise KeyboardInterrupt
        done.append(("naive" if job.reference is None else "trained", index))
        return sweep_item(job, index, *rest)

    monkeypatch.setattr("droidkv.profile_job.Job.sweep_item", interrupted)
    for folder in ("x.sharing.naive.run", "x.sharing.run"):
        told = run(*arguments, code=130).stderr
        assert "nothing is lost" in told and f"{tmp_path / folder};" in told
        ends.pop(0)
    run(*arguments)
    assert done == [(half, index) for half in ("naive", "trained") for index in (0, 1)]


def test_a_pair_that_was_made_is_trained_again_by_its_own_file(tmp_path: Path) -> None:
    pair = write_plain(tmp_path)
    target = tmp_path / "elsewhere" / "other.toml"
    made = run_json("train", "icarus", pair, "--pair-file", target)["pair_file"]
    assert Path(made) == target
    adapter = Path(read_pair(made).receiver.adapter or "")
    assert adapter == target.parent / "adapters" / "other"
    before = (adapter / "adapter_model.safetensors").read_bytes()
    assert "remove it" in error_of("train", "icarus", made)
    adapter.rename(tmp_path / "away")
    assert "droidkv train" in error_of("profile", made, *SMALL, "-o", tmp_path / "p.json")
    run_json("train", "icarus", made)
    assert (adapter / "adapter_model.safetensors").read_bytes() == before


def test_a_pair_file_with_another_recipe_is_not_trained_past(tmp_path: Path) -> None:
    pair = write_plain(tmp_path)
    made = Path(run_json("train", "prefillshare", pair)["pair_file"])
    Path(read_pair(made).receiver.adapter or "").rename(tmp_path / "away")
    run_json("train", "prefillshare", pair)  # the same recipe comes of it
    Path(read_pair(made).receiver.adapter or "").rename(tmp_path / "away-too")
    made.write_text(made.read_text().replace("steps = 2", "steps = 3"))
    assert "droidkv pair train" in error_of("train", "prefillshare", pair)
    assert run_json("pair", "train", made)["steps"] == 3


@pytest.mark.parametrize("mode", ["plain", "prefillshare", "icarus"])
def test_pair_train_goes_by_the_recipe_whatever_its_mode(tmp_path: Path, mode: str) -> None:
    pair = write_plain(tmp_path)
    if mode == "plain":
        made = str(pair)
        run_json("train", mode, pair, "-o", tmp_path / "first")
        first = tmp_path / "first"
    else:
        made = run_json("train", mode, pair)["pair_file"]
        first = Path(read_pair(made).receiver.adapter or "").rename(tmp_path / "first")
    value = run_json("pair", "train", made, "--eval-every", "1", "--eval-items", "2")
    assert value["pair_file"] == str(made)
    output = Path(value["output"])
    assert output == Path(read_pair(made).receiver.adapter or "")
    curve = Curve.read(output / "curve.json")
    assert curve.mode == mode and len(curve.held_out) == 3
    assert curve.command.startswith("droidkv ")
    weights = "adapter_model.safetensors"
    assert (output / weights).read_bytes() == (first / weights).read_bytes()
    assert "remove it" in error_of("pair", "train", made)
    run_json("pair", "train", made, "-o", tmp_path / "again")
    assert (tmp_path / "again" / weights).read_bytes() == (first / weights).read_bytes()


def test_bad_input_is_refused(tmp_path: Path) -> None:
    assert "[train]" in error_of("pair", "train", "tiny")
    assert "[train]" in error_of("train", "plain", "tiny")
    assert "[train]" in error_of("train", "icarus", "tiny")
    pair = write_plain(tmp_path, 'mode = "prefillshare"')
    assert "droidkv train prefillshare" in error_of("train", "plain", pair)
    assert "droidkv train prefillshare" in error_of("train", "icarus", pair)
    assert "--pair-file" in error_of("train", "prefillshare", pair, "--method", "full")
    pair = write_plain(tmp_path, 'target_modules = ["k_proj"]')
    assert "k_proj: the decoder reads" in error_of("train", "icarus", pair)
    assert [each.name for each in tmp_path.iterdir()] == ["mine.toml"]


def test_a_folder_that_is_there_is_refused_before_a_model_is_loaded(tmp_path: Path) -> None:
    pair = write_pair(tmp_path / "mine.toml", "./gone", "./gone", "./there", train=TRAIN)
    (tmp_path / "there").mkdir()
    assert "--output" in error_of("train", "plain", pair)


def test_a_folder_that_cannot_be_made_is_refused_before_a_model_is_loaded(tmp_path: Path) -> None:
    pair = write_pair(tmp_path / "mine.toml", "./gone", "./gone", "./there", train=TRAIN)
    (tmp_path / "file").touch()
    message = error_of("train", "plain", pair, "-o", tmp_path / "file" / "made")
    assert "'made'" in message and "gone" not in message


def test_quiet_training_of_all_parameters_says_nothing(tmp_path: Path) -> None:
    pair = write_plain(tmp_path)
    assert run("train", "prefillshare", pair, "--method", "full", "-q").stderr == ""
