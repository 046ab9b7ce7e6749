from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest
import torch
from command_line import SMALL, error_of, run, run_json

from droidkv.cli.search_run import SearchRun
from droidkv.pair import TaskRef, read_pair
from droidkv.profile import read_profile
from droidkv.profile_job import ProfileSettings, load_map
from droidkv.refine import refine_stitch
from droidkv.search import SearchSettings

TRAINING = ("--calibration-items", "2", "--steps", "1")
MANY = ("--task-option", "num_records=2", "--items", "24", "--operator", "copy")


def test_profile_writes_what_it_says(tmp_path: Path) -> None:
    file = tmp_path / "new" / "tiny.json"
    value = run_json("profile", "tiny", *SMALL, "-o", file)
    assert value["profile"] == str(file) and value["num_items"] == 2
    profile = read_profile(file)
    assert value["num_plans"] == len(profile.measurements) == 17
    assert profile.provenance.command.startswith("droidkv ")
    assert Path(value["stitch"]).is_file()
    shown = [row["plan"] for row in value["frontier"]]
    assert shown[0] == "[0,0)" and "[0,4)" in shown


def test_the_default_place_is_named_after_the_pair_and_the_other_task(tmp_path: Path) -> None:
    run("profile", "tiny", *SMALL, "--granularity", 4, "--operator", "copy")
    # With other options than the pair's it is not the pair's profile.
    assert (tmp_path / "profiles" / "tiny.records.json").is_file()


def test_notes_estimate_and_progress_go_to_stderr_and_quiet_silences_them() -> None:
    shown = run("profile", "tiny", *SMALL, "-o", "a.json", "--granularity", 4)
    assert "the sweep takes about" in shown.stderr and "sweep 2/2" in shown.stderr
    assert "less compute" in shown.stdout
    quiet = run("profile", "tiny", *SMALL, "-o", "b.json", "--granularity", 4, "-q")
    assert quiet.stderr == "" and "less compute" in quiet.stdout


def test_settings_that_make_no_sense_are_refused() -> None:
    assert "num_items" in error_of("profile", "tiny", "--items", 0)
    assert "Did you mean" in error_of("profile", "tiny", "--task", "record")
    assert "Did you mean" in error_of("profile", "tiny", "--task-option", "num_record=2")
    assert "KEY=VALUE" in error_of("profile", "tiny", "--task-option", "num_records")


def test_an_unfinished_run_with_other_settings_lies_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "a.run").mkdir()
    (tmp_path / "a.run" / "settings.json").write_text('{"pair": "another"}')
    message = error_of("profile", "tiny", *SMALL, "-o", "a.json")
    assert "pair" in message and "Delete the folder" in message


def test_interrupting_a_profile_loses_nothing_finished(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "droidkv.cli.main", "profile", "tiny", *MANY, "-o", "a.json"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    first = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        # A shell's background job ignores SIGINT, and its children would too.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    run_folder = tmp_path / "a.run"
    deadline = time.monotonic() + 300
    while len(list(run_folder.glob("sweep-*.json"))) < 1 and time.monotonic() < deadline:
        time.sleep(0.02)
    first.send_signal(signal.SIGINT)
    stdout, stderr = first.communicate(timeout=60)
    assert first.returncode == 130, stderr
    assert stdout == "" and "Traceback" not in stderr
    assert "nothing is lost" in stderr and "a.run" in stderr
    assert not (tmp_path / "a.json").exists()
    kept = {file.name: file.stat().st_mtime_ns for file in run_folder.glob("sweep-*.json")}
    assert 1 <= len(kept) < 24

    # Going on in this process; what was kept must not be made again.
    watched: dict[str, int] = {}

    def watch(stage: str, done: int, total: int) -> None:
        if stage == "sweep" and done == total:
            for file in run_folder.glob("sweep-*.json"):
                watched[file.name] = file.stat().st_mtime_ns

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("droidkv.cli.console.Console.progress", lambda _, *told: watch(*told))
        run("profile", "tiny", *MANY, "-o", "a.json")
    assert len(watched) == 24
    assert {name: watched[name] for name in kept} == kept
    assert not run_folder.exists()
    assert read_profile("a.json").num_items == 24


@pytest.mark.parametrize(
    ("command", "step"),
    [
        (("confirm", "PROFILE", "--plan", "[1,3)"), "droidkv.profile_job.Job.sweep_item"),
        (("confirm", "PROFILE", "--plan", "[1,3)"), "droidkv.profile_job.Job.decode_item"),
        (("probe", "tiny", *SMALL[:2]), "droidkv.probe._probe_row"),
        (("profile", "tiny", *SMALL), "droidkv.profile_job.Job.decode_item"),
        (("refine", "PROFILE", "--plan", "[1,3)", *TRAINING), "droidkv.profile_job.Job.sweep_item"),
    ],
    ids=["confirm-sweep", "confirm-decode", "probe", "profile-decode", "refine-sweep"],
)
def test_an_interrupted_command_goes_on_where_it_was(
    profiled: Path, command: tuple[str, ...], step: str, tmp_path: Path
) -> None:
    arguments = [str(profiled) if each == "PROFILE" else each for each in command]
    name = {"confirm": "out.confirm", "refine": "out.refined.confirm"}.get(command[0], "out")
    arguments += ["--items", "3", "-o", f"{name}.json"]
    original = resolve_name(step)
    done: list[int] = []

    def interrupted(*given: Any) -> Any:
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(given[1])
        return original(*given)

    def recorded(*given: Any) -> Any:
        done.append(given[1])
        return original(*given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step, interrupted)
        told = run(*arguments, code=130)
        assert told.stdout == "" and "Traceback" not in told.stderr
        assert "nothing is lost" in told.stderr and f"{name}.run" in told.stderr
        assert not Path(f"{name}.json").exists()
        patch.setattr(step, recorded)
        run(*arguments)
    assert done == [0, 1, 2]
    assert Path(f"{name}.json").is_file() and not Path(f"{name}.run").exists()


@pytest.mark.parametrize("command", ["profile", "search"])
def test_interrupted_before_the_first_step_there_is_nothing_to_go_on_from(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("droidkv.loading.load_model", interrupted)
    told = run(command, "tiny", *SMALL, "-o", "out.json", code=130).stderr
    assert "no unfinished work is kept" in told and "out." not in told.partition("interrupted")[2]


def test_interrupting_a_refinement_keeps_the_plans_that_were_trained(
    profiled: Path, tmp_path: Path
) -> None:
    made_file = Path("out.refined.confirm.json")
    arguments = [*("refine", profiled, "--items", 1, *TRAINING, "-o", made_file)]
    arguments += [each for start in (1, 2, 3) for each in ("--plan", f"[{start},4)")]
    trained: list[str] = []

    def interrupted(_: Any, stitch: Any, plan: Any, *rest: Any) -> Any:
        if len(trained) == 2:
            raise KeyboardInterrupt
        return recorded(_, stitch, plan, *rest)

    def recorded(_: Any, stitch: Any, plan: Any, *rest: Any) -> Any:
        trained.append(str(plan))
        return refine_stitch(_, stitch, plan, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("droidkv.profiler.refine_stitch", interrupted)
        assert "nothing is lost" in run(*arguments, code=130).stderr
        patch.setattr("droidkv.profiler.refine_stitch", recorded)
        run(*arguments)
    assert trained == ["[1,4)+stitch", "[2,4)+stitch", "[3,4)+stitch"]
    fitted = load_map(profiled, read_profile(profiled))
    made = load_map(made_file, read_profile(made_file))
    for start in (1, 2, 3):
        assert not torch.equal(fitted.up[start], made.up[start])


def test_stitch_fits_a_map_that_helps_on_unseen_items(tmp_path: Path) -> None:
    result = run(
        *("stitch", "tiny", "--task-option", "num_records=2", "--json"),
        *("--calibration-items", 4, "--rank", 8, "-o", tmp_path / "map.safetensors"),
    )
    assert "on this machine" in result.stderr
    value = json.loads(result.stdout)
    assert Path(value["map"]).is_file() and value["rank"] == 8
    assert list(value["remaining_error_ratio"]) == ["1", "2", "3"]
    assert all(0 < ratio < 1 for ratio in value["remaining_error_ratio"].values())


def test_confirm_measures_on_fresh_items(profiled: Path, tmp_path: Path) -> None:
    value = run_json(
        *("confirm", profiled, "--items", 2, "--plan", "[2,4)+stitch"),
        *("-o", tmp_path / "c.confirm.json"),
    )
    fresh, old = read_profile(value["profile"]), read_profile(profiled)
    assert {str(m.plan) for m in fresh.measurements} == {"[0,0)", "[0,4)", "[2,4)+stitch"}
    assert not {item.id for item in fresh.items} & {item.id for item in old.items}


def test_search_stores_a_profile_within_its_budget(tmp_path: Path) -> None:
    arguments = ("search", "tiny", *SMALL, "-o", tmp_path / "s.json")
    value = run_json(*arguments, "--budget", 12)
    assert 12 <= value["num_evaluations"] <= 14
    assert value["num_evaluations_exact"] == 34
    profile = read_profile(tmp_path / "s.json")
    assert {"[0,0)", "[0,4)"} <= {str(m.plan) for m in profile.measurements}
    more = run_json(*arguments, "--budget", 20, "--overwrite")
    assert 20 <= more["num_evaluations"] <= 22, "a larger budget goes on, it does not start anew"


def test_a_search_in_steps_of_two_layers(tmp_path: Path) -> None:
    value = run_json("search", "tiny", *SMALL, "--granularity", 2, "-o", tmp_path / "s.json")
    assert value["num_evaluations"] > 0


def test_each_worker_of_a_search_ends_well(tmp_path: Path) -> None:
    """The first to end takes the run folder away."""
    settings = ProfileSettings(
        TaskRef("records", {"num_records": 2}), num_items=2, calibration_items=2, rank=4
    )
    output = tmp_path / "s.json"
    workers = [SearchRun(read_pair("tiny"), settings, output, lambda *_: None) for _ in range(2)]
    written = [worker.write(worker.search(6, SearchSettings()), "") for worker in workers]
    assert written[0].measurements == written[1].measurements
    assert written[1].stitch is not None
    assert load_map(output, read_profile(output)).sha256 == written[1].stitch.sha256
    assert not output.with_suffix(".run").exists()


def test_search_finds_the_numbers_of_the_sweep(profiled: Path, tmp_path: Path) -> None:
    run("search", "tiny", *SMALL, "--budget", 999, "-o", tmp_path / "s.json")
    swept, found = read_profile(profiled), read_profile(tmp_path / "s.json")
    assert found.items == swept.items
    for record in found.measurements:
        assert record.kl == pytest.approx(swept.record(record.plan).kl, abs=1e-4)


def test_ask_answers_three_ways(profiled: Path) -> None:
    arguments = ("ask", "tiny", "--profile", profiled, "--plan", "[1,3)+stitch", "--items", 2)
    value = run_json(*arguments)
    seen = {item.id for item in read_profile(profiled).items}
    assert len(value["items"]) == 2
    for item in value["items"]:
        assert item["id"] not in seen
        answers = item["answers"]
        assert [answer["plan"] for answer in answers] == ["[0,4)", "[0,0)", "[1,3)+stitch"]
        assert all(answer["prefill_seconds"] > 0 for answer in answers)
    assert [way["num_items"] for way in value["ways"]] == [2, 2, 2]
    scores = [item["answers"][0]["score"] for item in value["items"]]
    assert value["ways"][0]["mean_score"] == sum(scores) / 2
    assert "median prefill" in run(*arguments).stdout


def test_ask_with_the_whole_group_answers_as_the_full_prefill(profiled: Path) -> None:
    value = run_json("ask", "tiny", "--profile", profiled, "--plan", "all", "--items", 1)
    full, naive, plan = (answer["text"] for answer in value["items"][0]["answers"])
    assert plan == full != naive


def test_ask_over_a_text_of_ones_own(profiled: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("Ann has a cat.\n")
    base = ("ask", "tiny", "--profile", profiled, "--plan", "none")
    value = run_json(*base, "--document", tmp_path / "text.txt", "--question", "Who has a cat?")
    assert value["items"][0]["question"] == "Who has a cat?"
    assert value["items"][0]["answers"][0]["score"] is None
    assert "go together" in error_of(*base, "--question", "Who?")
    (tmp_path / "text.txt").write_text(" \n")
    empty = error_of(*base, "--document", tmp_path / "text.txt", "--question", "Who?")
    assert "must have a prefix" in empty


def test_ask_picks_a_plan_by_itself(profiled: Path) -> None:
    value = run_json("ask", "tiny", "--profile", profiled, "--max-loss", 1e9, "--items", 1)
    assert value["plan"] == "[0,0)"
    assert "--max-loss" in error_of("ask", "tiny", "--profile", profiled)


def test_ask_goes_by_the_confirmation_and_asks_what_neither_measured(tmp_path: Path) -> None:
    run("profile", "tiny", *SMALL, "--granularity", 4, "--operator", "copy", "-o", "p.json")
    run("confirm", "p.json", "--items", 2, "--plan", "none")
    value = run_json("ask", "tiny", "--profile", "p.json", "--max-loss", 1e9, "--items", 1)
    assert value["picked_from"] == "p.confirm.json"
    seen = {item.id for name in ("p.json", "p.confirm.json") for item in read_profile(name).items}
    assert len(seen) == 4 and value["items"][0]["id"] not in seen
    arguments = ("ask", "tiny", "--profile", "p.json", "--max-loss", 1e9, "--items", 1)
    assert run_json(*arguments, "--unconfirmed")["picked_from"] == "p.json"
    assert "p.confirm.json" in run(*arguments).stdout


def test_ask_takes_a_stitched_plan_through_the_map_that_was_trained_for_it(tmp_path: Path) -> None:
    run("profile", "tiny", *SMALL, "--granularity", 2, "-o", "p.json")
    run(
        *(
            "refine",
            "p.json",
            "--plan",
            "[2,3)",
            "--items",
            2,
            "--calibration-items",
            2,
            "--steps",
            1,
        )
    )
    texts = {}
    for plan, name in (("[2,3)", "p.refined.confirm.stitch"), ("[2,4)", "p.stitch")):
        value = run_json(*("ask", "tiny", "--profile", "p.json", "--plan", f"{plan}+stitch"))
        assert value["map"] == f"{name}.safetensors"
        texts[plan] = [item["id"] for item in value["items"]]
    fresh = {item.id for item in read_profile("p.refined.confirm.json").items}
    assert not fresh & {*texts["[2,3)"], *texts["[2,4)"]}
    # The trained map's file is what is read, not only what is named.
    Path("p.refined.confirm.stitch.safetensors").unlink()
    error_of("ask", "tiny", "--profile", "p.json", "--plan", "[2,3)+stitch")
    run("ask", "tiny", "--profile", "p.json", "--plan", "[2,4)+stitch", "--items", 1)
    run("ask", "tiny", "--profile", "p.json", "--plan", "[2,3)+stitch", "--unconfirmed")
