"""What engines are refused, by name: what cannot work in them, or was never tested."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from vllm.v1.kv_cache_interface import FullAttentionSpec

from droidkv.errors import ServeError, UnsupportedModelError, unknown_name
from droidkv.serve.settings import ServeSettings


def check_engine(vllm_config: Any, settings: ServeSettings, architectures: Iterable[str]) -> None:
    """Refuse what cannot work in a sender's or a receiver's engine, or was never tested.

    Args:
        vllm_config: The engine's configuration.
        settings: The connector's.
        architectures: Those that are served.

    Raises:
        UnsupportedModelError: The architecture is not served.
        ServeError: Names the setting, what it is and what it has to be.
    """
    check_common(vllm_config, architectures)
    if settings.role == "sender":
        return
    refuse_set("lora_config", vllm_config.lora_config, "LoRA in a receiver's engine")
    if settings.load == "sync" and vllm_config.scheduler_config.async_scheduling:
        raise ServeError(
            "expected --no-async-scheduling with load = 'sync', got asynchronous scheduling, which "
            "has scheduled a request's next step before its load is known to have failed; use "
            "that flag, or load = 'async'"
        )
    if settings.load == "sync" and vllm_config.use_v2_model_runner:
        raise ServeError(
            "expected the V1 model runner with load = 'sync', got V2, on which recovery from a "
            "failed load was never tested; set VLLM_USE_V2_MODEL_RUNNER=0, or load = 'async'"
        )


def check_common(vllm_config: Any, architectures: Iterable[str]) -> None:
    """Refuse what no engine of droidkv's can work with.

    Args:
        vllm_config: The engine's configuration.
        architectures: Those that are served in it.

    Raises:
        UnsupportedModelError: The architecture is not served.
        ServeError: Names the setting, what it is and what it has to be.
    """
    architecture = vllm_config.model_config.architectures[0]
    if architecture not in architectures:
        raise UnsupportedModelError(unknown_name("architecture", architecture, architectures))
    parallel = vllm_config.parallel_config
    for name in (
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "data_parallel_size",
        "decode_context_parallel_size",
    ):
        if (size := getattr(parallel, name, 1)) > 1:
            raise ServeError(
                f"expected {name} = 1, got {size}: ranks would have to agree on every load and "
                "recompute, which is not supported; serve the model on one rank"
            )
    refuse_set("speculative_config", vllm_config.speculative_config, "speculative decoding")
    refuse_set("quantization", vllm_config.model_config.quantization, "quantised weights")
    if (transfer := vllm_config.weight_transfer_config) is not None:
        raise ServeError(
            f"expected weight_transfer_config to be unset, got backend {transfer.backend!r}: some "
            "backends write single weights past everything that is counted, and caches are one "
            "model's; serve fixed weights, and start anew with others"
        )
    if getattr(parallel, "use_ubatching", False):
        raise ServeError(
            "expected a step to be one batch, got microbatches, whose hidden states cannot be told "
            "apart; leave --enable-dbo and --ubatch-size out"
        )
    _check_is_as_its_files_say(vllm_config, architecture)
    cache_dtype = vllm_config.cache_config.cache_dtype
    if "fp8" in str(cache_dtype) or str(cache_dtype).startswith(("int", "nvfp")):
        raise ServeError(
            f"expected a KV cache in the model's dtype, got kv_cache_dtype {cache_dtype!r}, whose "
            "scales are not stored; start with --kv-cache-dtype auto"
        )


def _check_is_as_its_files_say(vllm_config: Any, architecture: str) -> None:
    """Refuse a model that is not what its folder holds, since its identity is its folder's."""
    config = vllm_config.model_config
    # One of our own architectures is named so.
    if config.hf_overrides and config.hf_overrides != {"architectures": [architecture]}:
        what, flag = f"hf_overrides {config.hf_overrides}", "--hf-overrides"
    elif config.hf_config_path is not None:
        what, flag = f"hf_config_path {config.hf_config_path!r}", "--hf-config-path"
    elif vllm_config.load_config.load_format == "dummy":
        what, flag = "load_format 'dummy'", "--load-format"
    else:
        return
    raise ServeError(
        f"expected the model that its folder holds, by which its caches are named, got {what}; "
        f"leave {flag} out, and serve a folder whose config.json and weights say so instead"
    )


def check_failure_policy(vllm_config: Any, own_tokens: int | None) -> None:
    """Refuse a policy by which a failed load would have another end than a miss.

    Raises:
        ServeError: Names the policy and what it has to be.
    """
    policy = vllm_config.kv_transfer_config.kv_load_failure_policy
    wanted = "recompute" if own_tokens is None else "fail"
    if policy != wanted:
        end = "the receiver's own prefill" if policy == "recompute" else "an error"
        raise ServeError(
            f"expected kv_load_failure_policy {wanted!r} in --kv-transfer-config, got {policy!r}, "
            f"with which a request whose load fails would be answered by {end}; see on_miss"
        )


def check_cache(kv_cache_config: Any) -> Any:
    """The specification of the one group of layers with full attention.

    Raises:
        UnsupportedModelError: There are several groups, or attention sees a window only.
    """
    groups = kv_cache_config.kv_cache_groups
    spec = groups[0].kv_cache_spec if len(groups) == 1 else None
    if spec is None or type(spec) is not FullAttentionSpec or spec.sliding_window is not None:
        kinds = sorted({type(group.kv_cache_spec).__name__ for group in groups}) or ["none"]
        raise UnsupportedModelError(
            f"expected full attention over one page table, got {', '.join(kinds)}"
            f"{' with a sliding window' if getattr(spec, 'sliding_window', None) else ''}; "
            "models with sliding windows or hybrid layers cannot be served"
        )
    return spec


def refuse_set(name: str, value: object, what: str) -> None:
    """Refuse a setting that was never tested, if it is set."""
    if value is not None:
        raise ServeError(f"expected {name} to be unset, got {value}: {what} was never tested here")
