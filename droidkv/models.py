"""The only file that knows Hugging Face models from inside.

It runs a causal LM's own decoder layers one at a time. Nothing is patched and no model code is
copied: a layer is called as its model would call it, with masks made from token positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from droidkv.cache import TokenAxis
from droidkv.costs import ModelShape
from droidkv.errors import UnsupportedModelError

# Architectures whose decoder layers share one calling convention. The value says where a layer's
# sliding window is written: nowhere, one for all layers, or by `config.layer_types`.
SUPPORTED: Mapping[str, str] = {
    "llama": "none",
    "mistral": "all",
    "mixtral": "all",
    "qwen2": "layer_types",
    "qwen3": "layer_types",
    "qwen3_moe": "all",
    "gemma2": "layer_types",
    "gemma3_text": "layer_types",
}
_ROPE_BY_LAYER_TYPE = {"gemma3_text"}
_ATTENTION_KERNELS = {"sdpa", "eager"}
_LAYER_TYPES = {"full_attention", "sliding_attention"}


class LayerCache(Protocol):
    """What a decoder layer asks of its cache."""

    def update(
        self, keys: Tensor, values: Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        """Take the new keys and values, return all that the layer attends to."""


@dataclass(frozen=True)
class Step:
    """RoPE tables and attention masks of one forward step, shared by all its layers."""

    positions: Tensor
    rope: Mapping[str, tuple[Tensor, Tensor]]
    masks: Mapping[int | None, Tensor | None]


class _Stored(Exception):
    """Ends a decoder layer once its keys and values are in the cache."""


class _StoreAndStop:
    def __init__(self, cache: LayerCache) -> None:
        self.cache = cache

    def update(
        self, keys: Tensor, values: Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        self.cache.update(keys, values, layer_idx)
        raise _Stored


class DecoderModel:
    """A Hugging Face causal LM, run layer by layer.

    Args:
        model: A causal LM in eval mode, of a supported architecture. PEFT adapters may be applied
            inside its layers (pass `peft_model.get_base_model()`).

    Raises:
        UnsupportedModelError: The architecture, its attention kernel or its mode cannot be served.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.config = model.config
        check_supported(self.config)
        if model.training:
            raise UnsupportedModelError(
                "expected a model in eval mode (dropout off), got one in training mode; "
                "call model.eval() first"
            )
        kernel = self.config._attn_implementation
        if kernel not in _ATTENTION_KERNELS:
            raise UnsupportedModelError(
                f"expected attn_implementation of {sorted(_ATTENTION_KERNELS)}, got {kernel!r}; "
                "load the model with attn_implementation='sdpa'"
            )
        self._base = self.model.model
        self._layers = self._base.layers
        self._windows = [_window(self.config, layer) for layer in range(len(self._layers))]
        self._layer_types = _layer_types(self.config)
        self.shape = ModelShape.from_config(self.config.to_dict(), self.dtype.itemsize)

    @property
    def num_layers(self) -> int:
        return len(self._layers)

    @property
    def device(self) -> torch.device:
        return torch.device(self.model.device)

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype  # type: ignore[no-any-return]

    def embed(self, input_ids: Tensor) -> Tensor:
        """Hidden state entering layer 0: `[batch, seq_len]` ids to `[batch, seq_len, hidden]`."""
        return self._base.embed_tokens(input_ids)  # type: ignore[no-any-return]

    def step(self, queries: TokenAxis, keys: TokenAxis) -> Step:
        """Prepare a forward step of `queries` over `keys` (earlier tokens first, queries last)."""
        positions = queries.positions.clamp(min=0)
        probe = torch.empty(0, dtype=self.dtype, device=self.device)
        rotary = self._base.rotary_emb
        if self.config.model_type in _ROPE_BY_LAYER_TYPE:
            rope = {kind: rotary(probe, positions, kind) for kind in set(self._layer_types)}
        else:
            rope = dict.fromkeys(set(self._layer_types), rotary(probe, positions))
        masks = {w: attention_mask(queries, keys, w, self.dtype) for w in set(self._windows)}
        return Step(positions, rope, masks)

    def run_layer(self, layer: int, hidden: Tensor, step: Step, cache: LayerCache) -> Tensor:
        """Run one decoder layer over `[batch, seq_len, hidden]`; its KV go through `cache`."""
        return self._layers[layer](  # type: ignore[no-any-return]
            hidden,
            attention_mask=step.masks[self._windows[layer]],
            position_ids=step.positions,
            position_embeddings=step.rope[self._layer_types[layer]],
            past_key_values=cache,
            use_cache=True,
        )

    def store_kv(self, layer: int, hidden: Tensor, step: Step, cache: LayerCache) -> None:
        """Only put the layer's keys and values into `cache`; its attention and MLP do not run."""
        with suppress(_Stored):
            self.run_layer(layer, hidden, step, _StoreAndStop(cache))

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden state leaving the last layer, `[..., hidden]`, to logits `[..., vocab]`."""
        logits: Tensor = self.model.lm_head(self._base.norm(hidden))
        cap = getattr(self.config, "final_logit_softcapping", None)
        return logits if cap is None else torch.tanh(logits / cap) * cap


def attention_mask(
    queries: TokenAxis, keys: TokenAxis, window: int | None, dtype: torch.dtype
) -> Tensor | None:
    """Additive mask `[batch, 1, num_queries, num_keys]`, or None where plain causality will do.

    A query sees a key that is a token, not later than itself, nearer than `window`, and of
    segment 0 or its own segment.
    """
    fits_window = window is None or keys.num_tokens <= window
    if fits_window and queries.num_tokens == keys.num_tokens and keys.is_contiguous:
        return None
    query, key = queries.positions[:, :, None], keys.positions[:, None, :]
    visible = (key >= 0) & (key <= query)
    if window is not None:
        visible &= query - key < window
    if queries.segments is not None and keys.segments is not None:
        segment = keys.segments[:, None, :]
        visible &= (segment == 0) | (segment == queries.segments[:, :, None])
    mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return mask.masked_fill(~visible, torch.finfo(dtype).min)[:, None]


def check_supported(config: Any) -> None:
    """Refuse, before any work, what this engine cannot run exactly.

    Raises:
        UnsupportedModelError: Names the architecture or the property that cannot be served.
    """
    kind = config.model_type
    refuse = _refusal(config)
    if refuse is not None:
        raise UnsupportedModelError(f"cannot reuse KV across models of type {kind!r}: {refuse}")
    if kind not in SUPPORTED:
        raise UnsupportedModelError(
            f"expected a model of type {', '.join(SUPPORTED)}; got {kind!r}, which was never "
            "tested; add it to droidkv/models.py with its conformance test"
        )


def _refusal(config: Any) -> str | None:
    if getattr(config, "is_encoder_decoder", False):
        return "it is an encoder-decoder, and only decoder-only models have one KV cache"
    if odd := set(getattr(config, "layer_types", None) or ()) - _LAYER_TYPES:
        return f"hybrid or recurrent layers of type {sorted(odd)} keep no KV to reuse"
    if getattr(config, "num_kv_shared_layers", 0):
        return "several layers share one KV (num_kv_shared_layers), so layers cannot be chosen"
    if getattr(config, "kv_lora_rank", None):
        return "latent attention (kv_lora_rank) keeps compressed KV"
    if getattr(config, "use_bidirectional_attention", False):
        return "bidirectional attention: a token's KV depends on later tokens"
    for name in ("num_key_value_heads", "head_dim", "hidden_size", "intermediate_size"):
        if isinstance(getattr(config, name, None), list | tuple):
            return f"{name} differs per layer: {getattr(config, name)}"
    return None


def _window(config: Any, layer: int) -> int | None:
    rule = SUPPORTED[config.model_type]
    if rule == "none" or (
        rule == "layer_types" and config.layer_types[layer] != "sliding_attention"
    ):
        return None
    return config.sliding_window  # type: ignore[no-any-return]


def _layer_types(config: Any) -> list[str]:
    if SUPPORTED[config.model_type] == "layer_types":
        return list(config.layer_types)
    return ["full_attention"] * int(config.num_hidden_layers)
