from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from command_line import error_of, run, run_json
from made_profiles import FAST_LOAD, fingerprint, profile, record, shape, smooth_profile, stitch

from droidkv.calibration_file import MeasuredCalibration, write_calibration
from droidkv.plan import ReusePlan
from droidkv.profile import ModelRecord, write_profile


@pytest.fixture
def calibration(tmp_path: Path) -> Path:
    """A machine on which loading is nearly free, for the shape of the made-up profile."""
    made = dataclasses.replace(FAST_LOAD, shape_digest=shape(12).digest)
    measured = MeasuredCalibration(made, shape(12), (), 1.0, 1.0, 1.0, 512, 5, {})
    return write_calibration(measured, tmp_path / "calibration.json")


def test_show_is_the_frontier_with_both_baselines(smooth: Path) -> None:
    value = run_json("frontier", "show", smooth)
    plans = value["plans"]
    assert value["num_items"] == 16 and value["objective"] == "score"
    assert plans[0]["plan"] == "[0,0)" and plans[0]["fewer_flops_ratio"] > 1
    assert plans[-1]["plan"] == "[0,12)" and plans[-1]["loss"] == 0
    assert plans[-1]["fewer_flops_ratio"] == pytest.approx(1)
    front = [plan for plan in plans if plan["on_front"]]
    assert [p["loss"] for p in front] == sorted((p["loss"] for p in front), reverse=True)
    for plan in plans:
        assert plan["interval"][0] <= plan["loss"] <= plan["interval"][1]
    shown = run("frontier", "show", smooth).stdout
    assert "n = 16 items" in shown and "+stitch" in shown
    assert len(run_json("frontier", "show", smooth, "--all")["plans"]) == 1 + 78 + 66


def test_show_of_one_family(smooth: Path) -> None:
    plans = run_json("frontier", "show", smooth, "--operator", "copy")["plans"]
    assert not any("stitch" in plan["plan"] for plan in plans)


def test_show_in_seconds_needs_a_calibration(smooth: Path, calibration: Path) -> None:
    assert "droidkv calibrate" in error_of("frontier", "show", smooth, "--cost", "ttft")
    arguments = ("frontier", "show", smooth, "--cost", "ttft", "--calibration", calibration)
    plans = run_json(*arguments)["plans"]
    assert plans[0]["predicted_ttft_seconds"] == plans[0]["cost"] < plans[-1]["cost"]
    assert "TTFT, s" in run(*arguments).stdout


def test_this_machines_calibration_is_found_by_itself(
    smooth: Path, calibration: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DROIDKV_CACHE", str(tmp_path / "own-cache"))
    assert run_json("frontier", "pick", smooth)["predicted_ttft_seconds"] is None
    smoothed = smooth_profile(num_layers=12)
    kept = dataclasses.replace(smoothed.provenance, device="cpu", dtype="float32")
    write_profile("kept.json", dataclasses.replace(smoothed, provenance=kept))
    made = dataclasses.replace(FAST_LOAD, shape_digest=shape(12).digest)
    write_calibration(MeasuredCalibration(made, shape(12), (), 1.0, 1.0, 1.0, 512, 5, {}))
    assert run_json("frontier", "pick", "kept.json")["predicted_ttft_seconds"] > 0


def test_pick_by_loss(smooth: Path) -> None:
    assert run_json("frontier", "pick", smooth)["loss"] <= 5
    value = run_json("frontier", "pick", smooth, "--max-loss", 20)
    assert 5 < value["loss"] <= 20 and value["num_items"] == 16
    assert value["bound_by"] == "max_loss"
    looser = run_json("frontier", "pick", smooth, "--max-loss", 50)
    assert looser["num_recomputed"] < value["num_recomputed"]
    copying = run_json("frontier", "pick", smooth, "--max-loss", 20, "--operator", "copy")
    assert copying["num_recomputed"] > value["num_recomputed"]
    assert value["plan"] in run("frontier", "pick", smooth, "--max-loss", 20).stdout


def test_pick_exits_with_1_if_no_plan_meets_the_slo(smooth: Path, calibration: Path) -> None:
    arguments = ("frontier", "pick", smooth, "--calibration", calibration, "--slo-ttft")
    assert run_json(*arguments, "100s")["meets_slo"]
    assert run_json(*arguments, "1ms", code=1)["meets_slo"] is False


def test_pick_exits_with_1_if_even_the_full_prefill_loses_more(tmp_path: Path) -> None:
    reference = ModelRecord("fine-tune", fingerprint(12))
    plans = (ReusePlan.of(0, 0), ReusePlan.of(0, 4))
    shared = profile([record(plan, [0.0, 1.0]) for plan in plans], reference=reference)
    write_profile("shared.json", shared)
    value = run_json("frontier", "pick", "shared.json", code=1)
    assert value["plan"] == "[0,0)" and value["meets_max_loss"] is False
    assert run_json("frontier", "pick", "shared.json", "--max-loss", 50)["meets_max_loss"]


def test_a_probe_is_no_profile() -> None:
    assert "`droidkv probe --compare`" in error_of("frontier", "show", "profiles/x.probe.json")


@pytest.mark.parametrize("command", ["show", "pick", "plot"])
def test_what_was_not_measured_is_said(smooth: Path, calibration: Path, command: str) -> None:
    base = ("frontier", command, smooth, *(("-o", ".") if command == "plot" else ()))
    calibrated = (*base, "--calibration", calibration, "--prefix-tokens")
    assert run_json(*calibrated, 400)["notes"] == []
    timed, lost = run_json(*calibrated, 513)["notes"]
    assert "up to 512 tokens were timed" in timed and "losses were measured" in lost
    assert timed in run(*calibrated, 513).stderr
    assert run_json(*base, "--prefix-tokens", 513)["notes"] == [lost]
    assert "--prefix-tokens" in error_of(*base, "--prefix-tokens", 2**31)


@pytest.mark.parametrize("command", ["show", "pick", "plot"])
def test_a_bandwidth_needs_a_calibration(smooth: Path, command: str) -> None:
    message = error_of("frontier", command, smooth, "--bandwidth", "10Gbit/s")
    assert "droidkv calibrate" in message


def test_pick_says_when_reuse_does_not_pay(smooth: Path, calibration: Path) -> None:
    value = run_json(
        *("frontier", "pick", smooth, "--calibration", calibration),
        *("--bandwidth", "1kB/s", "--prefix-tokens", 50),
    )
    assert value["bound_by"] == "break_even" and value["pays"] is False
    assert value["plan"] == "[0,12)"


def test_pick_without_a_calibration_needs_none_for_a_loss_only(smooth: Path) -> None:
    assert "droidkv calibrate" in error_of("frontier", "pick", smooth, "--slo-ttft", "1s")


def test_pick_by_another_objective_needs_its_own_limit(smooth: Path) -> None:
    assert "--max-loss" in error_of("frontier", "pick", smooth, "--objective", "kl")
    value = run_json("frontier", "pick", smooth, "--objective", "kl", "--max-loss", 0.2)
    assert value["objective"] == "kl" and value["loss"] <= 0.2


def test_unknown_objectives_and_costs_list_the_known_ones(smooth: Path) -> None:
    assert "Did you mean 'score'?" in error_of("frontier", "show", smooth, "--objective", "scores")
    assert "layers" in error_of("frontier", "show", smooth, "--cost", "money")


def test_pick_goes_by_the_confirmation_unless_told_otherwise(tmp_path: Path) -> None:
    records = [
        record(ReusePlan.of(0, 0), [0.0] * 4),
        record(ReusePlan.of(2, 3), [1.0] * 4),
        record(ReusePlan.of(1, 3), [1.0] * 4),
        record(ReusePlan.of(0, 4), [1.0] * 4, kl=0.0),
    ]
    chosen = profile(records)
    fresh = [dataclasses.replace(each, id=f"fresh/{each.id}") for each in chosen.items]
    lossy = dataclasses.replace(records[1], score=(0.0,) * 4, agrees=(False,) * 4)
    confirmed = dataclasses.replace(
        chosen, items=tuple(fresh), measurements=(records[0], lossy, *records[2:])
    )
    write_profile(tmp_path / "p.json", chosen)
    before = run_json("frontier", "pick", "p.json")
    assert before["plan"] == "[2,3)" and not before["is_confirmed"]
    assert "droidkv confirm p.json" in run("frontier", "pick", "p.json").stdout
    write_profile(tmp_path / "p.confirm.json", confirmed)
    value = run_json("frontier", "pick", "p.json")
    assert value["plan"] == "[1,3)" and value["is_confirmed"]
    assert value["picked_from"] == "p.confirm.json"
    assert "fresh items, in p.confirm.json" in run("frontier", "pick", "p.json").stdout
    unconfirmed = run_json("frontier", "pick", "p.json", "--unconfirmed")
    assert {**unconfirmed, "message": 0} == {**before, "message": 0}


def test_pick_and_show_look_for_a_trained_map_by_themselves(tmp_path: Path) -> None:
    baselines = [record(ReusePlan.of(0, 0), [0.0] * 4), record(ReusePlan.of(0, 4), [1.0] * 4)]
    chosen = profile([*baselines, record(ReusePlan.of(1, 2), [1.0] * 4)])
    fresh = tuple(dataclasses.replace(each, id=f"fresh/{each.id}") for each in chosen.items)
    copied = profile([*baselines, record(ReusePlan.of(1, 3), [1.0] * 4)], items=fresh)
    trained_map = dataclasses.replace(
        stitch(), file="trained.safetensors", refined=("[2,3)+stitch",)
    )
    trained = profile(
        [*baselines, record(ReusePlan.of(2, 3, "stitch"), [1.0] * 4)],
        items=fresh,
        stitch=trained_map,
    )
    write_profile("p.json", chosen)
    write_profile("p.confirm.json", copied)
    write_profile("p.refined.confirm.json", trained)
    value = run_json("frontier", "pick", "p.json", "--max-loss", 5)
    assert (value["plan"], value["picked_from"]) == ("[2,3)+stitch", "p.refined.confirm.json")
    assert value["map"] == "trained.safetensors"
    told = run("frontier", "pick", "p.json").stdout
    assert "in p.refined.confirm.json" in told and "map is trained.safetensors" in told
    copying = run_json("frontier", "pick", "p.json", "--operator", "copy")
    assert (copying["plan"], copying["picked_from"]) == ("[1,3)", "p.confirm.json")
    assert copying["map"] is None
    assert run_json("frontier", "pick", "p.json", "--unconfirmed")["plan"] == "[1,2)"
    shown = run_json("frontier", "show", "p.json")
    assert "[1,2)" in [row["plan"] for row in shown["plans"]]
    assert [(each["profile"], each["plans"][1]["plan"]) for each in shown["confirmed"]] == [
        ("p.confirm.json", "[1,3)"),
        ("p.refined.confirm.json", "[2,3)+stitch"),
    ]
    assert "p.refined.confirm.json: n = 4 fresh items" in run("frontier", "show", "p.json").stdout
    assert run_json("frontier", "show", "p.json", "--unconfirmed")["confirmed"] == []


def test_plot_writes_png_files(smooth: Path, tmp_path: Path) -> None:
    files = run_json("frontier", "plot", smooth, "--output", tmp_path / "plots")["files"]
    assert [Path(file).name for file in files] == [
        "smooth.frontier.png",
        "smooth.copy.png",
        "smooth.stitch.png",
    ]
    for file in files:
        assert Path(file).read_bytes().startswith(b"\x89PNG")


def test_diff(smooth: Path, tmp_path: Path) -> None:
    assert run_json("frontier", "diff", smooth, smooth)["changes"] == []
    other = tmp_path / "other.json"
    write_profile(other, smooth_profile(12, num_items=8, seed=1))
    changes = run_json("frontier", "diff", smooth, other)["changes"]
    assert changes
    for change in changes:
        assert change["was_on_front"] != change["is_on_front"]
    assert "loss of 8 items" in run("frontier", "diff", smooth, other).stdout
    write_profile(other, dataclasses.replace(smooth_profile(12), pair="another"))
    assert "'another' after" in run("frontier", "diff", smooth, other).stderr
    assert "no calibration" in error_of("frontier", "diff", smooth, other, "--cost", "ttft")


def test_profiles_are_found_by_name(smooth: Path, tmp_path: Path) -> None:
    (tmp_path / "profiles").mkdir()
    (tmp_path / "profiles" / "mine.json").write_bytes(smooth.read_bytes())
    assert run_json("frontier", "pick", "mine")["pair"] == "tiny"
    assert "Did you mean 'mine'?" in error_of("frontier", "pick", "mina")
