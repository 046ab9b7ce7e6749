from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import made_profiles
import pytest
from serve.servers import free_port

from droidkv.check import Check
from droidkv.loading import load_model
from droidkv.pair import ModelRef
from droidkv.profile import read_profile, write_profile
from droidkv.servable import servable_folder
from droidkv.serve.preflight import check_blocks, check_flags, check_store, preflight
from droidkv.serve.settings import ServeSettings

SENDER = ModelRef("tiny:llama?layers=4")
RECEIVER = ModelRef("tiny:llama?layers=4&noise=0.1")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DROIDKV_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def profile(tmp_path: Path) -> str:
    made = made_profiles.profile(stitch=None)
    sender = replace(made.sender, fingerprint=load_model(SENDER).fingerprint)
    receiver = replace(made.receiver, fingerprint=load_model(RECEIVER).fingerprint)
    path = tmp_path / "tiny.json"
    write_profile(path, replace(made, sender=sender, receiver=receiver))
    return str(path)


def checks(settings: ServeSettings, ref: ModelRef, dtype: str = "float32") -> dict[str, Check]:
    folder = servable_folder(ref, dtype)
    return {check.name: check for check in preflight(settings, folder, dtype)}


def test_a_pair_that_was_profiled_is_fit(profile: str, tmp_path: Path) -> None:
    store = f"fs://{tmp_path / 'store'}"
    sender = checks(ServeSettings("sender", store, profiles=(profile,)), SENDER)
    receiver = checks(ServeSettings("receiver", store, profiles=(profile,), max_loss=1e6), RECEIVER)
    for found in (sender, receiver):
        assert found["model"].status == found["architecture"].status == "ok"
        assert found["store"].status == "ok"
        assert "profile" not in found
    assert sender["E layers"].status == "ok"
    # What one stores the other looks for.
    namespace = sender["E layers"].found.partition("namespace ")[2]
    assert receiver["sender"].found == f"reads namespace {namespace}"
    assert receiver["plan"].found.startswith("[")


def test_a_loss_that_has_no_default_limit_has_to_be_limited(profile: str) -> None:
    # The receiver scores nothing, so losses are in nats: 5 of them would let all pass.
    made = read_profile(profile)
    write_profile(
        Path(profile),
        replace(made, items=tuple(replace(item, full_score=0.0) for item in made.items)),
    )
    found = checks(ServeSettings("receiver", "memory://x", profiles=(profile,)), RECEIVER)
    assert found["receiver"].status == "fail"
    assert "measured in kl" in found["receiver"].found and "--max-loss" in found["receiver"].found
    limited = ServeSettings("receiver", "memory://x", profiles=(profile,), max_loss=1e6)
    assert "nats" in checks(limited, RECEIVER)["plan"].found


@pytest.mark.parametrize(("plan", "status"), [("[0,2)", "ok"), ("[1,3)", "warn")])
def test_a_plan_whose_e_the_profile_lets_nobody_store_is_said(
    profile: str, plan: str, status: str
) -> None:
    # The sender of this profile stores no E: its frontier's plans start at layer 0.
    settings = ServeSettings("receiver", "memory://x", profiles=(profile,), plan=plan)
    found = checks(settings, RECEIVER)["plan"]
    assert found.status == status
    assert (f"--plan '{plan}'" in found.advice) == (status == "warn")


def test_another_model_than_the_profiled_one_is_named_by_its_field(profile: str) -> None:
    settings = ServeSettings("receiver", "memory://x", profiles=(profile,))
    wrong = checks(settings, ModelRef("tiny:llama?layers=4&noise=0.2"))["profile"]
    assert wrong.status == "fail" and "weights" in wrong.found
    other_dtype = checks(settings, RECEIVER, "bfloat16")["profile"]
    assert other_dtype.status == "fail" and "dtype" in other_dtype.found


def test_an_architecture_that_is_not_served_is_named() -> None:
    settings = ServeSettings("sender", "memory://x", hidden_layers=(9,))
    found = checks(settings, ModelRef("tiny:gemma2?layers=4"))
    assert found["architecture"].status == "fail"
    assert found["architecture"].found == "Gemma2ForCausalLM"
    assert found["E layers"].status == "fail" and "9" in found["E layers"].found


@pytest.mark.parametrize(
    ("passed", "named"),
    [
        (("--tensor-parallel-size", "2"), "tensor_parallel_size"),
        (("-pp=2",), "pipeline_parallel_size"),
        (("--speculative-config", "{}"), "speculative-config"),
        (("--kv-cache-dtype", "fp8"), "kv-cache-dtype"),
        (("--weight-transfer-config", '{"backend": "ipc"}'), "weight-transfer-config"),
        (("--enable-lora",), "enable-lora"),
        (("--enable-dbo",), "enable-dbo"),
        (("--hf-overrides", "{}"), "hf-overrides"),
        (("--hf-config-path=elsewhere",), "hf-config-path"),
        (("--load-format", "dummy"), "load-format"),
    ],
)
def test_flags_that_the_connector_refuses_are_found_before(
    passed: tuple[str, ...], named: str
) -> None:
    (check,) = check_flags(passed, "LoRA in a receiver's engine")
    assert (check.name, check.status) == (named, "fail")
    assert list(check_flags(("--port", "8001", "-tp", "1"), "LoRA in a receiver's engine")) == []


def test_a_sender_may_have_adapters_of_its_own() -> None:
    assert list(check_flags(("--enable-lora",))) == []


def test_chunks_should_be_whole_blocks() -> None:
    assert check_blocks(256, ()).status == "ok"
    assert check_blocks(64, ()).status == "ok"  # blocks of whole chunks
    assert check_blocks(96, ()).status == "warn"
    assert check_blocks(96, ("--block-size", "32")).status == "ok"
    assert check_blocks(96, ("--block-size", "x")).status == "fail"


def test_a_store_that_is_not_there_is_said(tmp_path: Path) -> None:
    assert check_store(f"redis://127.0.0.1:{free_port()}").status == "warn"
    assert check_store("local://").status == "warn"
    assert check_store(f"fs://{tmp_path}/new").status == "ok"
    (tmp_path / "file").touch()
    assert check_store(f"fs://{tmp_path}/file").status == "warn"
    assert check_store(f"unix://{tmp_path}/file").status == "warn"


@pytest.mark.parametrize(
    ("address", "named"),
    [
        ("fs://some/folder", "fs:///absolute/folder"),
        ("redis://127.0.0.1:99999", "redis://host:port"),
        ("http://127.0.0.1:1", "unknown kind of store 'http'"),
        ("/a/folder", "unknown kind of store ''"),
        ("fs:///x?cpu_gib=much", "cpu_gib"),
    ],
)
def test_an_address_that_no_store_has_is_no_reason_to_start(address: str, named: str) -> None:
    found = check_store(address)
    assert found.status == "fail" and named in found.found


def test_a_full_disk_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=5 * 2**20)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    found = check_store(f"fs://{tmp_path}")
    assert found.status == "warn" and "5 MiB" in found.found
