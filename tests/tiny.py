"""Random tiny models of every supported architecture: seconds to make, no network."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
)

from droidkv.models import DecoderModel

NUM_LAYERS = 6
VOCAB_SIZE = 97

_SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_MOE = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2}
# Windows are shorter than the test prefixes, so that a wrong mask shows.
_ALTERNATING = {
    "sliding_window": 7,
    "layer_types": ["sliding_attention", "full_attention"] * (NUM_LAYERS // 2),
}
ARCHITECTURES: dict[str, dict[str, object]] = {
    "llama": {},
    "mistral": {"sliding_window": 7},
    "qwen2": {"use_sliding_window": True, **_ALTERNATING},
    "qwen3": {},
    "gemma2": {"query_pre_attn_scalar": 32, **_ALTERNATING},
    "gemma3_text": {"query_pre_attn_scalar": 32, **_ALTERNATING},
    "mixtral": dict(_MOE),
    "qwen3_moe": {"moe_intermediate_size": 48, "norm_topk_prob": True, **_MOE},
}


def tiny_model(
    architecture: str = "llama",
    seed: int = 0,
    noise: float = 0.0,
    dtype: torch.dtype = torch.float32,
) -> DecoderModel:
    """A random model; `noise` > 0 gives a fine-tune of the one with the same seed.

    Weights are drawn wider than usual, so that layers matter and answers are not all alike.
    """
    config = AutoConfig.for_model(architecture, **_SIZES, **ARCHITECTURES[architecture])
    torch.manual_seed(seed)
    model: Any = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.15, generator=generator)
        if noise:
            for parameter in model.parameters():
                parameter += noise * torch.randn(parameter.shape, generator=generator)
    return DecoderModel(model.to(dtype).eval())
