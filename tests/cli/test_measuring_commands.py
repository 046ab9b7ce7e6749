from __future__ import annotations

from pathlib import Path

import pytest
from command_line import error_of, run, run_json
from pair_files import write_pair

from droidkv.check import Check
from droidkv.oracles import VerifyResult

RECORDS = ("--task-option", "num_records=2")


def test_probe_finds_every_layer_and_draws_it(tmp_path: Path) -> None:
    first = run_json("probe", "tiny", *RECORDS, "--items", 2, "-o", tmp_path / "a.probe.json")
    assert len(first["reuse_one_kl"]) == len(first["recompute_one_kl"]) == 4
    assert first["full_reuse_kl"] > max(first["reuse_one_kl"])
    assert Path(first["plot"]).read_bytes().startswith(b"\x89PNG")
    shown = run(
        *("probe", "tiny", *RECORDS, "--items", 2, "--seed", 1, "-o", tmp_path / "b.probe.json"),
        *("--compare", first["probe"]),
    ).stdout
    assert "critical layers" in shown and f"with {first['probe']}: rank correlation" in shown


def test_probes_of_other_layers_are_not_compared_with(tmp_path: Path) -> None:
    pair = write_pair(Path("two.toml"), "tiny:llama?layers=2", "tiny:llama?layers=2&noise=0.1")
    one = run_json("probe", pair, *RECORDS, "--items", 1, "-o", tmp_path / "two.probe.json")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("droidkv.probe.probe_pair", lambda *_: pytest.fail("probed before"))
        message = error_of("probe", "tiny", "--compare", one["probe"], "-o", tmp_path / "a.json")
    assert "4 layers" in message and "two.probe.json of 2" in message


def test_long_work_says_before_how_long_it_takes_and_then_how_far_it_is(
    profiled: Path, tmp_path: Path
) -> None:
    confirmed, probed = (("-o", tmp_path / name) for name in ("c.confirm.json", "p.json"))
    confirm = ("confirm", profiled, "--items", 1, "--plan", "none", *confirmed)
    for arguments, estimate, last in (
        (confirm, "the sweep", "sweep 1/1"),
        (("probe", "tiny", *RECORDS, "--items", 1, *probed), "probing", "probe 1/1"),
        (("verify", "tiny", *RECORDS, "--items", 1), "verifying", "verify 9/9"),
    ):
        told = run(*arguments).stderr
        assert f"{estimate} takes about" in told
        assert told.index(estimate) < told.index(last)


def test_search_takes_suggestions_from_a_probe(tmp_path: Path) -> None:
    probe = run_json("probe", "tiny", *RECORDS, "--items", 1, "-o", tmp_path / "a.probe.json")
    value = run_json(
        *("search", "tiny", *RECORDS, "--items", 1, "--operator", "copy", "--budget", 5),
        *("--probe", probe["probe"], "-o", tmp_path / "s.json"),
    )
    assert value["num_evaluations"] == 5


def test_verify_passes_on_a_sound_pair(profiled: Path) -> None:
    value = run_json("verify", "tiny", *RECORDS, "--items", 1, "--profile", profiled)
    assert value["passed"] and len(value["oracles"]) >= 8
    for oracle in value["oracles"]:
        assert oracle["passed"], oracle


def test_verify_exits_with_1_if_an_oracle_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = VerifyResult("naive reuse differs", 0.0, 1.0, False, "the models are the same")
    monkeypatch.setattr("droidkv.verify.verify_pair", lambda *_: [failed])
    value = run_json("verify", "tiny", *RECORDS, "--items", 1, code=1)
    assert not value["passed"]
    shown = run("verify", "tiny", *RECORDS, "--items", 1, code=1).stdout
    assert "FAIL" in shown and "the models are the same" in shown


def test_calibrate_keeps_its_result_where_pick_looks_for_it(
    profiled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DROIDKV_CACHE", str(tmp_path / "own-cache"))
    pick = ("frontier", "pick", profiled, "--objective", "kl", "--max-loss", 100)
    assert run_json(*pick)["predicted_ttft_seconds"] is None
    calibrate = ("calibrate", "--pair", "tiny", "--rounds", 1, "--max-prefix-tokens", 128)
    value = run_json(*calibrate)
    assert Path(value["file"]).is_relative_to(tmp_path / "own-cache")
    assert value["median_error_percent"] >= 0 and value["held_out"]
    assert run_json(*pick)["predicted_ttft_seconds"] > 0
    assert "--overwrite" in error_of(*calibrate)
    assert run_json(*calibrate, "--overwrite")["file"] == value["file"]


def test_bench_sweep_has_the_keys_that_scripts_read() -> None:
    value = run_json(
        *("bench", "sweep", "--pair", "tiny", "--prefix-tokens", 32, "--paper-plans", 2)
    )
    wanted = {"naive_seconds", "sweep_seconds", "ratio", "max_abs_difference", "prefix_tokens"}
    assert wanted | {"peak_rss_bytes", "command", "machine"} <= set(value)
    assert value["num_groups"] == 10 and value["max_abs_difference"] < 1e-3


def test_bench_prefill_has_the_keys_that_scripts_read() -> None:
    arguments = ("bench", "prefill", "--pair", "tiny", "--prefix-tokens", 32, "--repeats", 1)
    (row,) = run_json(*arguments, "--layers", 2)["rows"]
    assert {"k", "full_seconds", "partial_seconds", "ratio", "limit"} <= set(row)
    assert row["k"] == 2 and row["limit"] == 2
    assert "[1,3)" in run(*arguments, "--layers", 2).stdout
    assert "1 to 4" in error_of(*arguments, "--layers", 5)


def test_doctor_proves_reuse_on_this_machine() -> None:
    value = run_json("doctor")
    assert value["passed"]
    found = {check["name"]: check for check in value["checks"]}
    assert found["reuse"]["status"] == found["torch"]["status"] == "ok"
    assert "recomputed [1,2)" in found["reuse"]["found"]


def test_doctor_exits_with_1_and_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = Check("torch", "fail", "not installed", "pip install 'droidkv[hf]'")
    monkeypatch.setattr("droidkv.doctor.run_checks", lambda *_: [failed])
    assert run_json("doctor", code=1)["passed"] is False
    assert "torch: pip install 'droidkv[hf]'" in run("doctor", code=1).stdout


def test_doctor_reads_the_profiles_of_this_folder() -> None:
    Path("profiles").mkdir()
    Path("profiles/damaged.json").write_text("{")
    value = run_json("doctor", code=1)
    (check,) = [each for each in value["checks"] if each["name"] == "profile damaged.json"]
    assert check["status"] == "fail"
