"""What is refused at start, on vLLM's own configuration objects, and once by a real engine."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from serve.engine_process import run_engine
from serve.engines import OPTIONS, Models, connector, make_models, vllm

from droidkv.errors import ServeError, UnsupportedModelError
from droidkv.serve.settings import ROLES, ServeSettings
from droidkv.tiny import TinySpec, tiny_model, tiny_tokenizer

pytestmark = pytest.mark.vllm

YARN = {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0}}
SPECULATIVE = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return make_models(tmp_path_factory.mktemp("models"))


def check(
    folder: Path, role: str, options: dict[str, Any], model: Path | None = None, **extra: Any
) -> None:
    """What a connector does first, with the configuration of an engine that is not started."""
    from droidkv.serve.vllm_models import ARCHITECTURES
    from droidkv.serve.vllm_refusals import check_engine

    transfer = connector(folder, role, "memory://refused", **extra)
    arguments = {**OPTIONS, **options, "model": str(model or folder / role)}
    config = vllm.EngineArgs(kv_transfer_config=transfer, **arguments).create_engine_config()
    # vLLM turns it off on a CPU, whatever it is told.
    config.scheduler_config.async_scheduling = arguments["async_scheduling"]
    settings = ServeSettings.from_table(transfer["kv_connector_extra_config"])
    check_engine(config, settings, ARCHITECTURES)


def test_the_engines_of_the_other_tests_are_not_refused(models: Models) -> None:
    check(models.folder, "sender", {})
    check(models.folder, "receiver", {})
    check(models.folder, "sender", {"async_scheduling": True, "enable_lora": True})
    check(models.folder, "receiver", {"async_scheduling": True}, load="async")


@pytest.mark.parametrize(
    ("role", "options", "named"),
    [
        *(
            (role, options, named)
            for role in ROLES
            for options, named in (
                ({"tensor_parallel_size": 2}, "tensor_parallel_size = 1, got 2"),
                ({"pipeline_parallel_size": 2}, "pipeline_parallel_size = 1, got 2"),
                ({"data_parallel_size": 2}, "data_parallel_size = 1, got 2"),
                ({"speculative_config": SPECULATIVE}, "speculative decoding"),
                ({"kv_cache_dtype": "fp8"}, "kv-cache-dtype"),
                ({"hf_overrides": YARN}, "its folder holds.*--hf-overrides"),
                ({"load_format": "dummy"}, "its folder holds.*--load-format"),
                ({"weight_transfer_config": {"backend": "sparse_nccl"}}, "'sparse_nccl'"),
            )
        ),
        ("receiver", {"async_scheduling": True}, "no-async-scheduling"),
        ("receiver", {"enable_lora": True}, "LoRA"),
    ],
)
def test_what_was_never_tested_is_refused_by_name(
    models: Models, role: str, options: dict[str, Any], named: str
) -> None:
    with pytest.raises(ServeError, match=named):
        check(models.folder, role, dict(options))


@pytest.mark.parametrize(("own_tokens", "policy"), [(None, "fail"), (300, "recompute")])
def test_a_failed_load_has_no_other_end_than_a_miss(own_tokens: int | None, policy: str) -> None:
    from droidkv.serve.vllm_refusals import check_failure_policy

    config = vllm.config.KVTransferConfig(kv_load_failure_policy=policy)
    with pytest.raises(ServeError, match=f"got '{policy}'.*on_miss"):
        check_failure_policy(SimpleNamespace(kv_transfer_config=config), own_tokens)


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize(
    ("part", "name", "value"),
    [
        ("parallel_config", "decode_context_parallel_size", 2),
        ("model_config", "hf_config_path", "elsewhere"),
        ("model_config", "quantization", "awq"),
    ],
)
def test_what_takes_several_ranks_or_other_weights_is_refused_by_name(
    models: Models, role: str, part: str, name: str, value: object
) -> None:
    from droidkv.serve.vllm_models import ARCHITECTURES
    from droidkv.serve.vllm_refusals import check_engine

    transfer = connector(models.folder, role, "memory://refused")
    config = vllm.EngineArgs(
        kv_transfer_config=transfer, **OPTIONS, model=str(models.folder / role)
    ).create_engine_config()
    setattr(getattr(config, part), name, value)
    settings = ServeSettings.from_table(transfer["kv_connector_extra_config"])
    with pytest.raises(ServeError, match=rf"{name}.*{value}"):
        check_engine(config, settings, ARCHITECTURES)


def test_full_graphs_are_ruled_out_for_they_would_skip_the_waits_per_layer() -> None:
    from droidkv.serve.vllm_connector import DroidKVConnector

    assert DroidKVConnector.requires_piecewise_for_cudagraph({"role": "receiver"})


def cache_of(*specs: Any) -> Any:
    """A cache with one group of layers per specification."""
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

    groups = [KVCacheGroupSpec([f"{index}"], spec) for index, spec in enumerate(specs)]
    return KVCacheConfig(num_blocks=4, kv_cache_tensors=[], kv_cache_groups=groups)


def test_windows_and_hybrid_layers_are_refused_by_name() -> None:
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, SlidingWindowSpec

    from droidkv.serve.vllm_refusals import check_cache

    shape: dict[str, Any] = {"num_kv_heads": 2, "head_size": 32, "dtype": torch.float32}
    full = FullAttentionSpec(block_size=64, **shape)
    assert check_cache(cache_of(full)) == full
    window = SlidingWindowSpec(block_size=64, sliding_window=128, **shape)
    unified = FullAttentionSpec(block_size=64, sliding_window=128, **shape)
    state = MambaSpec(block_size=64, shapes=((2, 3),), dtypes=(torch.float32,))
    for groups, named in (
        ([window], "SlidingWindowSpec"),
        ([unified], "FullAttentionSpec with a sliding window"),
        ([full, window], "FullAttentionSpec, SlidingWindowSpec"),
        ([full, state], "FullAttentionSpec, MambaSpec"),
        ([], "got none"),
    ):
        with pytest.raises(UnsupportedModelError, match=named):
            check_cache(cache_of(*groups))


def inside_multi(folder: Path, role: str) -> dict[str, Any]:
    inner = connector(folder, role, "memory://refused")
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": [inner]},
    }


@pytest.mark.parametrize("role", ROLES)
def test_another_connector_around_it_is_refused_by_name(models: Models, role: str) -> None:
    from droidkv.serve.vllm_models import _is_droidkv

    arguments = {**OPTIONS, "model": str(models.folder / role)}
    alone = connector(models.folder, role, "memory://refused")
    for transfer in (None, alone):
        config = vllm.EngineArgs(kv_transfer_config=transfer, **arguments).create_engine_config()
        assert _is_droidkv(config) == (transfer is alone)
    transfer = inside_multi(models.folder, role)
    config = vllm.EngineArgs(kv_transfer_config=transfer, **arguments).create_engine_config()
    with pytest.raises(ServeError, match="only connector, got it inside MultiConnector"):
        _is_droidkv(config)


@pytest.mark.slow
def test_a_real_engine_with_another_connector_around_it_does_not_start(models: Models) -> None:
    transfer = inside_multi(models.folder, "receiver")
    spec = {"role": "receiver", "store": "memory://refused", "extra": {}, "batches": []}
    result = run_engine(models.folder, {**spec, "options": {"kv_transfer_config": transfer}}, {})
    assert result.returncode != 0
    assert "DroidKVConnector to be an engine's only connector" in result.stdout + result.stderr


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
    said = result.stdout + result.stderr
    assert result.returncode != 0
    assert "expected tensor_parallel_size = 1, got 2" in said
    assert "Starting to load model" in said and "Loading weights took" not in said


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
