from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from made_profiles import profile

from droidkv import doctor
from droidkv.canary import canary, check_models
from droidkv.check import Check
from droidkv.doctor import run_checks
from droidkv.loading import load_pair
from droidkv.pair import ModelRef, Pair, TaskRef, read_pair
from droidkv.prefill import full_prefill
from droidkv.profile import write_profile


def test_every_check_says_what_it_found_and_what_to_do() -> None:
    calls: list[tuple[int, int]] = []
    checks = run_checks(on_progress=lambda _, done, total: calls.append((done, total)))
    names = [check.name for check in checks]
    assert len(set(names)) == len(names)
    assert {"python", "torch", "transformers", "memory", "disk", "cuda", "reuse"} <= set(names)
    assert all(check.found for check in checks)
    assert all(check.advice for check in checks if check.status != "ok")
    assert calls[-1][0] == calls[-1][1] == len(calls)


def test_versions_are_held_against_what_is_declared() -> None:
    checks = doctor.check_packages(
        [
            "click>=1",
            "numpy<1",
            'torch>=99; extra == "hf"',
            'no-such-package>=1; extra == "plots"',
            'droidkv[hf]; extra == "all"',
        ]
    )
    assert [(check.name, check.status) for check in checks] == [
        ("click", "ok"),
        ("numpy", "fail"),
        ("torch", "fail"),
        ("no-such-package", "warn"),
    ]
    assert "numpy<1" in checks[1].advice
    assert "droidkv[hf]" in checks[2].advice
    assert checks[3].found == "not installed" and "droidkv[plots]" in checks[3].advice
    assert {"torch", "click", "optuna"} <= {check.name for check in doctor.check_packages()}


def test_a_torchvision_of_another_torch_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "torchvision"
    package.mkdir()
    message = "operator torchvision::nms does not exist"
    (package / "__init__.py").write_text(f"raise RuntimeError({message!r})\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    check = doctor.check_broken_companions()
    assert check.status == "fail" and message in check.found
    assert check.advice.endswith("pip uninstall torchvision")
    (package / "__init__.py").write_text("")
    assert doctor.check_broken_companions().status == "ok"


def test_a_cache_folder_that_cannot_be_written_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DROIDKV_CACHE", str(tmp_path / "file" / "below"))
    check = doctor.check_cache_folder()
    assert check.status == "fail" and "DROIDKV_CACHE" in check.advice
    monkeypatch.setenv("DROIDKV_CACHE", str(tmp_path / "new"))
    assert doctor.check_cache_folder() == Check("cache folder", "ok", str(tmp_path / "new"))
    assert doctor.check_packaged_model().status == "warn"


def test_too_little_memory_and_disk_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "MIN_FREE_MEMORY_BYTES", psutil.virtual_memory().total + 1)
    monkeypatch.setattr(doctor, "MIN_FREE_DISK_BYTES", 2**80)
    assert doctor.check_memory().status == doctor.check_disk().status == "warn"


def test_more_threads_than_cores_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0}, raising=False)
    monkeypatch.setattr("torch.get_num_threads", lambda: 8)
    assert doctor.check_processor().advice.endswith("OMP_NUM_THREADS=1")


def test_an_unreadable_profile_is_told(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    write_profile(good, profile())
    bad.write_text(good.read_text()[:-40])
    checks = {check.name: check for check in run_checks(profiles=[good, bad])}
    assert checks["profile good.json"].status == "ok"
    assert checks["profile bad.json"].status == "fail"


def test_a_profile_of_other_weights_is_told(tmp_path: Path) -> None:
    pair = read_pair("tiny")
    path = tmp_path / "tiny.json"
    write_profile(path, profile(pair=pair.name))
    checks = {check.name: check for check in check_models(pair, [path], "float32", "cpu")}
    assert checks["identity in tiny.json"].status == "fail"
    assert "weights" in checks["identity in tiny.json"].found
    assert checks["sender"].found.startswith("tiny:llama?seed=0; identity ")
    assert checks["reuse"].status == "ok"


def test_a_pair_that_cannot_be_loaded_is_told() -> None:
    pair = Pair(
        "p", "", ModelRef("./no-such-folder"), ModelRef("tiny:llama"), (TaskRef("records"),)
    )
    (check,) = check_models(pair, [], "float32", "cpu")
    assert check.status == "fail" and "no-such-folder" in check.found


def test_the_canary_dies_where_nothing_is_reused(monkeypatch: pytest.MonkeyPatch) -> None:
    sender, receiver = load_pair(read_pair("tiny"))
    assert canary(sender, receiver).status == "ok"
    assert canary(sender, sender).status == "ok"

    def own_prefill(model: Any, ids: Any, captured: Any, plan: Any) -> Any:
        return full_prefill(model, ids)

    monkeypatch.setattr("droidkv.canary.partial_prefill", own_prefill)
    check = canary(sender, receiver)
    assert check.status == "fail" and "took 0 of 4 layers" in check.found


def test_it_runs_where_no_model_can() -> None:
    """Without torch the doctor must still say what is missing."""
    program = (
        "import sys\n"
        "for name in ('torch', 'transformers', 'psutil'): sys.modules[name] = None\n"
        "from droidkv.doctor import run_checks\n"
        "for check in run_checks(): print(check.status, check.name, check.found)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "fail reuse no model can be run" in done.stdout
