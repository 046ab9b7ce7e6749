"""What is refused at start, on vLLM's own configuration objects, and once by a real engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from serve.engine_process import run_engine
from serve.engines import OPTIONS, Models, connector, make_models, vllm

from droidkv.errors import ServeError, UnsupportedModelError
from droidkv.serve.settings import ServeSettings
from droidkv.tiny import TinySpec, tiny_model, tiny_tokenizer

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return make_models(tmp_path_factory.mktemp("models"))


def check(
    folder: Path, role: str, options: dict[str, Any], model: Path | None = None, **extra: Any
) -> None:
    """What a connector does first, with the configuration of an engine that is not started."""
    from droidkv.serve.vllm_setup import check_engine

    transfer = connector(folder, role, "memory://refused", **extra)
    transfer |= options.pop("kv_transfer_config", {})
    arguments = {**OPTIONS, **options, "model": str(model or folder / role)}
    config = vllm.EngineArgs(kv_transfer_config=transfer, **arguments).create_engine_config()
    # vLLM turns it off on a CPU, whatever it is told.
    config.scheduler_config.async_scheduling = arguments["async_scheduling"]
    check_engine(config, ServeSettings.from_table(transfer["kv_connector_extra_config"]))


def test_the_engines_of_the_other_tests_are_not_refused(models: Models) -> None:
    check(models.folder, "sender", {})
    check(models.folder, "receiver", {})
    check(models.folder, "sender", {"async_scheduling": True, "enable_lora": True})
    check(models.folder, "receiver", {"async_scheduling": True}, load="async")


@pytest.mark.parametrize(
    ("role", "options", "named"),
    [
        ("sender", {"tensor_parallel_size": 2}, "tensor_parallel_size = 1"),
        ("receiver", {"tensor_parallel_size": 2}, "tensor_parallel_size = 1"),
        ("receiver", {"pipeline_parallel_size": 2}, "pipeline_parallel_size = 1"),
        ("receiver", {"async_scheduling": True}, "no-async-scheduling"),
        ("receiver", {"enable_lora": True}, "LoRA"),
        ("receiver", {"kv_transfer_config": {"kv_load_failure_policy": "fail"}}, "recompute"),
        ("sender", {"kv_cache_dtype": "fp8"}, "kv-cache-dtype"),
    ],
)
def test_what_was_never_tested_is_refused_by_name(
    models: Models, role: str, options: dict[str, Any], named: str
) -> None:
    with pytest.raises(ServeError, match=named):
        check(models.folder, role, dict(options))


def test_other_architectures_are_refused_by_name(models: Models, tmp_path: Path) -> None:
    tiny_model(TinySpec("gemma2"), torch.float32, "cpu").save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match=r"Gemma2ForCausalLM.*LlamaForCausalLM"):
        check(models.folder, "sender", {}, tmp_path)


@pytest.mark.slow
def test_a_real_engine_with_two_ranks_does_not_start(models: Models) -> None:
    spec = {
        "role": "sender",
        "store": "memory://refused",
        "options": {"tensor_parallel_size": 2},
        "extra": {},
        "batches": [],
    }
    result = run_engine(models.folder, spec, {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"})
    assert result.returncode != 0
    assert "expected tensor_parallel_size = 1, got 2" in result.stdout + result.stderr


@pytest.mark.slow
def test_a_compiled_sender_of_mixtral_does_not_start(tmp_path: Path) -> None:
    make_models(tmp_path, "mixtral")
    spec = {"role": "sender", "store": "memory://refused", "extra": {}, "batches": []}
    result = run_engine(
        tmp_path, {**spec, "options": {"enforce_eager": False}}, {"TORCHDYNAMO_DISABLE": "0"}
    )
    assert result.returncode != 0
    assert "start the sender with --enforce-eager" in result.stdout + result.stderr


@pytest.mark.slow
def test_a_real_engine_with_a_window_does_not_start(tmp_path: Path) -> None:
    for role in ("sender", "receiver"):
        spec = TinySpec("mistral", layers=5, noise=0.1 if role == "receiver" else 0.0)
        tiny_model(spec, torch.float32, "cpu").save_pretrained(tmp_path / role)
        tiny_tokenizer().save_pretrained(tmp_path / role)
    wanted = {"role": "sender", "store": "memory://refused", "options": {}, "extra": {}}
    result = run_engine(tmp_path, {**wanted, "batches": []}, {})
    assert result.returncode != 0
    assert "models with sliding windows" in result.stdout + result.stderr
