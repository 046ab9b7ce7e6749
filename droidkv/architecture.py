"""What a model's configuration says about its KV cache, as plain tables. No model library here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Bookkeeping, training and generation settings: they change no hidden state. All else counts.
_IRRELEVANT = frozenset(
    """
    architectures attention_dropout auto_map bos_token_id chunk_size_feed_forward dtype embd_pdrop
    eos_token_id hidden_dropout id2label initializer_range is_encoder_decoder label2id
    max_position_embeddings output_attentions output_hidden_states output_router_logits
    pad_token_id pretraining_tp problem_type quantization_config return_dict router_aux_loss_coef
    router_jitter_noise torch_dtype transformers_version unk_token_id use_cache
    """.split()
)
_ROPE = frozenset({"rope_parameters", "rope_theta", "rope_scaling", "partial_rotary_factor"})

# What two models must share so that one can attend to the other's KV.
_SHARED = (
    "model_type",
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "vocab_size",
)
_SHARED_IF_PRESENT = (
    "sliding_window",
    "layer_types",
    "max_window_layers",
    "attn_logit_softcapping",
    "query_pre_attn_scalar",
    "num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "attention_bias",
    "rope_local_base_freq",
)


def config_table(config: Any) -> dict[str, Any]:
    """The language model's part of a configuration, as a plain table.

    Args:
        config: A Hugging Face configuration, or the parsed config.json.
    """
    if not isinstance(config, Mapping):
        config = config.get_text_config().to_dict()
    nested = config.get("text_config")
    return dict(nested if isinstance(nested, Mapping) else config)


def architecture_settings(config: Any) -> dict[str, Any]:
    """Every setting that shapes the computation, but for the rotary embedding's.

    Settings that are off (null, false, zero, empty) are left out, so that a library version that
    knows a new, unused setting changes nothing. Settings nobody has heard of are kept: unknown
    means no reuse.
    """
    table = config_table(config)
    if table.get("use_sliding_window") is False:
        table.pop("sliding_window", None)
        table.pop("max_window_layers", None)
    heads, hidden = table.get("num_attention_heads"), table.get("hidden_size")
    if heads and not table.get("num_key_value_heads"):
        table["num_key_value_heads"] = heads
    if heads and hidden and not table.get("head_dim"):
        table["head_dim"] = hidden // heads
    if "num_local_experts" in table:
        table["num_experts"] = table.pop("num_local_experts")
    return {
        name: value
        for name, value in table.items()
        if name not in _IRRELEVANT and name not in _ROPE and name[0] != "_" and value
    }


def rope_settings(config: Any) -> dict[str, Any]:
    """Settings of the rotary embedding in one form, whatever the age of the configuration.

    `{"rope_type": ..., "rope_theta": ..., and those of the scaling}`, or one such table for each
    layer type. The context length is among them only where the frequencies depend on it.
    """
    table = config_table(config)
    scaling = table.get("rope_scaling")
    rope = dict(table.get("rope_parameters") or (scaling if isinstance(scaling, Mapping) else {}))
    if rope and all(isinstance(value, Mapping) for value in rope.values()):
        return {kind: _one_rope(table, value) for kind, value in rope.items()}
    return _one_rope(table, rope)


def shared_settings(config: Any) -> dict[str, Any]:
    """What a sender and a receiver must have in common; a setting that is missing stays out."""
    table = architecture_settings(config)
    shared = {name: table[name] for name in _SHARED if name in table}
    shared |= {name: table.get(name) for name in _SHARED_IF_PRESENT}
    for name, value in shared.items():
        if isinstance(value, tuple):
            shared[name] = list(value)
    return shared


def missing_settings(config: Any) -> list[str]:
    """Names of settings without which two models cannot be compared, and that are not there."""
    table = architecture_settings(config)
    return [name for name in _SHARED if name not in table]


def _one_rope(table: Mapping[str, Any], rope: Mapping[str, Any]) -> dict[str, Any]:
    one = {name: value for name, value in rope.items() if value is not None and name != "type"}
    one.setdefault("rope_type", rope.get("type", "default"))
    for name in ("rope_theta", "partial_rotary_factor"):
        if table.get(name) is not None:
            one.setdefault(name, table[name])
    kind = one["rope_type"]
    anchored = "original_max_position_embeddings" in one and kind not in ("dynamic", "longrope")
    if kind not in ("default", "linear") and not anchored:
        one["max_position_embeddings"] = table.get("max_position_embeddings")
    return one
