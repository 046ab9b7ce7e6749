"""The only file that knows Hugging Face models from inside.

It runs a causal LM's own decoder layers one at a time. Nothing is patched and no model code is
copied: a layer is called as its model would call it, with masks made from token positions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from droidkv.cache import TokenAxis
from droidkv.content import rewrites_base
from droidkv.costs import ModelShape
from droidkv.errors import UnsupportedModelError
from droidkv.recipe import KV_PROJECTIONS

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
# Given no mask, which stands for plain causality here, `eager` of transformers applies none.
_ATTENTION_KERNEL = "sdpa"
_SHARED_READ = "droidkv_shared_read"
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


@contextmanager
def keeping_requires_grad(model: nn.Module) -> Iterator[None]:
    """Afterwards the weights that the model has now ask for gradients as they do now."""
    before = [(weight, weight.requires_grad) for weight in model.parameters()]
    try:
        yield
    finally:
        for weight, required in before:
            weight.requires_grad_(required)


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
        if kernel != _ATTENTION_KERNEL:
            raise UnsupportedModelError(
                f"expected the attention kernel {_ATTENTION_KERNEL!r}, got {kernel!r}; load the "
                f"model with attn_implementation={_ATTENTION_KERNEL!r}"
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

    def embed_prefix(self, input_ids: Tensor) -> Tensor:
        """As `embed`, for tokens of which only KV and E are wanted."""
        return self.embed(input_ids)

    def widen(self, hidden: Tensor) -> Tensor:
        """A prefix's hidden state, to run in one sequence with what `embed` made."""
        return hidden

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


class TwoStreamModel(DecoderModel):
    """An identical-cache model (ICaRus): a frozen encoder writes KV, adapters decode from it.

    Both streams are one model: without an adapter it is the logical encoder, with one a logical
    decoder. For inference only. A hidden state holds the encoder's and then the decoder's,
    `[batch, seq_len, 2 * hidden_size]`, and one call of a layer carries both: their rows are
    stacked, so weights are read once, and their queries are put together along the heads, so KV
    are read once. KV of the decoder's rows are dropped. A hidden state of the single width is the
    encoder's alone, which is all a prefix needs.

    Args:
        model: A causal LM in eval mode with LoRA adapters in its layers
            (`peft_model.get_base_model()`). It is this object's from here on.
        adapters: Adapter of each row of a batch; one name = of all rows. May be set anew.

    Raises:
        UnsupportedModelError: As `DecoderModel`; or there is no adapter, one of k or v, or
            attention that a common call cannot compute, or an adapter that is no plain LoRA of
            decoder layers.
    """

    def __init__(self, model: Any, adapters: Sequence[str] = ("default",)) -> None:
        super().__init__(model)
        if getattr(self.config, "attn_logit_softcapping", None):
            raise UnsupportedModelError(
                f"expected attention without soft-capped logits, got a model of type "
                f"{self.config.model_type!r}; its two streams cannot share one attention call"
            )
        self.adapters = tuple(adapters)
        layers = _decoder_adapters(model)
        self._width = int(self.config.hidden_size)
        # Of the rows in a layer, which go through which adapter; the encoder's through none.
        self._routes: list[tuple[str, slice]] = []
        self._updates: dict[nn.Module, dict[str, tuple[Tensor, Tensor]]] = {}
        for name, layer in layers.items():
            # PEFT's own layer would only stand between: the encoder's rows have no adapter.
            linear = layer.get_base_layer()
            model.set_submodule(name, linear)
            self._updates[linear] = self._low_rank(layer)
            linear.register_forward_hook(self._add_updates)
        read_kv_in_place(model)

    def embed(self, input_ids: Tensor) -> Tensor:
        """Both streams' hidden state entering layer 0, `[batch, seq_len, 2 * hidden_size]`."""
        return self.widen(super().embed(input_ids))

    def embed_prefix(self, input_ids: Tensor) -> Tensor:
        return super().embed(input_ids)

    def widen(self, hidden: Tensor) -> Tensor:
        return torch.cat([hidden, hidden], dim=-1)

    def run_layer(self, layer: int, hidden: Tensor, step: Step, cache: LayerCache) -> Tensor:
        """Run one layer for both streams, or for the encoder's if `hidden` is of single width."""
        num_rows, num_streams = len(hidden), hidden.shape[-1] // self._width
        stacked = torch.cat(torch.split(hidden, self._width, dim=-1))
        self._routes = []
        if num_streams == 2:
            self._routes = self._routes_of(num_rows)
            step = _repeated(step)
            cache = _FirstRows(cache, num_rows)
        left = super().run_layer(layer, stacked, step, cache)
        return torch.cat(torch.split(left, num_rows), dim=-1)

    def store_kv(self, layer: int, hidden: Tensor, step: Step, cache: LayerCache) -> None:
        super().store_kv(layer, hidden[..., : self._width], step, cache)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits of the decoder stream."""
        return super().logits(hidden[..., self._width :])

    def _routes_of(self, num_rows: int) -> list[tuple[str, slice]]:
        """The decoder's rows stand behind the encoder's."""
        if len(self.adapters) == 1:
            return [(self.adapters[0], slice(num_rows, 2 * num_rows))]
        if len(self.adapters) != num_rows:
            raise UnsupportedModelError(
                f"expected one adapter, or one for each of {num_rows} rows, got "
                f"{len(self.adapters)}"
            )
        return [(n, slice(row, row + 1)) for row, n in enumerate(self.adapters, start=num_rows)]

    def _low_rank(self, layer: Any) -> dict[str, tuple[Tensor, Tensor]]:
        """Name -> the matrices of a layer's adapter, `[in, rank]` and, scaled, `[rank, out]`."""
        names = layer.lora_A.keys()
        downs = {n: layer.lora_A[n].weight.detach().to(self.dtype).T for n in names}
        ups = {n: layer.lora_B[n].weight.detach() * layer.scaling[n] for n in names}
        return {n: (downs[n], ups[n].to(self.dtype).T) for n in names}

    def _add_updates(self, layer: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        """Add the adapters' part to the decoder's rows of what a linear layer gave."""
        for name, rows in self._routes:
            down, up = self._updates[layer][name]
            entering = args[0][rows].flatten(0, -2)
            output[rows].view(-1, output.shape[-1]).addmm_(entering @ down, up)


def read_kv_in_place(model: Any) -> None:
    """From here on a Hugging Face model's attention reads KV where they lie.

    transformers' own copies them for each query head wherever there is a mask.
    """
    AttentionInterface.register(_SHARED_READ, _shared_read)
    model.set_attn_implementation(_SHARED_READ)


def _decoder_adapters(model: Any) -> dict[str, Any]:
    """PEFT's layers of the adapters of a logical decoder, by name; refuses what is none."""
    layers = {n: m for n, m in model.named_modules() if hasattr(m, "lora_A")}
    if not layers or any(map(_is_variant, layers.values())):
        raise UnsupportedModelError(
            "expected a model with a plain LoRA adapter, got one with "
            f"{'a variant of it' if layers else 'none'}"
        )
    if dead := sorted(n for n in layers if n.endswith(KV_PROJECTIONS)):
        raise UnsupportedModelError(
            f"expected no adapter on {' or '.join(KV_PROJECTIONS)}, which the decoder never "
            f"uses, got one on {dead[0]}; train it with `droidkv train icarus`"
        )
    # PEFT wraps whole modules that are trained beside the matrices, and trains biases in place.
    wrapped = {n for n, m in model.named_modules() if hasattr(m, "original_module")}
    outside = {n for n in layers if not n.startswith("model.layers.")}
    if others := sorted(wrapped | outside):
        raise UnsupportedModelError(
            "expected an adapter on linear layers within decoder layers only, got one that "
            f"changes {others[0]}, which the encoder would read too; train it with "
            "`droidkv train icarus`"
        )
    configs = list(getattr(model, "peft_config", {}).values())
    for config in configs:
        if rewrites_base(config.init_lora_weights):
            raise UnsupportedModelError(
                "expected an adapter that leaves the base as it is, got one with init_lora_weights "
                f"= {config.init_lora_weights!r}; train it with `droidkv train icarus`"
            )
    biases = {config.bias for config in configs}
    if biases - {"none"}:
        raise UnsupportedModelError(
            f"expected an adapter that leaves the base as it is, got one with bias = "
            f"{sorted(biases - {'none'})[0]!r}; train it with `droidkv train icarus`"
        )
    return layers


def _is_variant(layer: Any) -> bool:
    """Whether a PEFT layer adds more than the product of two matrices."""
    return bool(layer.lora_variant) or any(up.bias is not None for up in layer.lora_B.values())


class _FirstRows:
    """Puts only the first rows' keys and values into a cache: those of the encoder."""

    def __init__(self, cache: LayerCache, num_rows: int) -> None:
        self.cache = cache
        self.num_rows = num_rows

    def update(
        self, keys: Tensor, values: Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        return self.cache.update(keys[: self.num_rows], values[: self.num_rows], layer_idx)


def _repeated(step: Step) -> Step:
    """A step whose RoPE tables serve both streams' rows; its masks go with the KV's rows."""
    if len(step.positions) == 1:
        return step  # one row serves any number
    rope = {
        kind: (torch.cat([cos, cos]), torch.cat([sin, sin]))
        for kind, (cos, sin) in step.rope.items()
    }
    return Step(torch.cat([step.positions, step.positions]), rope, step.masks)


def _shared_read(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Attention of several streams over one KV, which is read once.

    Args:
        module: The attention module.
        query: `[num_streams * batch, num_heads, num_queries, head_dim]`.
        key: `[batch, num_kv_heads, num_keys, head_dim]`.
        value: The same shape.
        attention_mask: `[batch, 1, num_queries, num_keys]`, or None for plain causality.
        scaling: Of the logits.

    Returns:
        `[num_streams * batch, num_queries, num_heads, head_dim]`, and no weights.
    """
    batch, num_kv_heads = key.shape[:2]
    # Query heads of one KV head must stand together: [batch, kv, stream * group].
    heads = query.view(-1, batch, num_kv_heads, query.shape[1] // num_kv_heads, *query.shape[2:])
    joined = heads.permute(1, 2, 0, 3, 4, 5)
    is_single = query.shape[2] == 1
    out = nn.functional.scaled_dot_product_attention(
        # Of a single token, all heads of one KV head go as its queries, which read it once.
        joined.flatten(2, 4) if is_single else joined.flatten(1, 3),
        key,
        value,
        attn_mask=attention_mask,
        is_causal=attention_mask is None and not is_single,
        scale=scaling,
        enable_gqa=not is_single,
    )
    apart = out.view(joined.shape).permute(2, 0, 4, 1, 3, 5)
    return apart.flatten(0, 1).flatten(2, 3), None


def attention_mask(
    queries: TokenAxis, keys: TokenAxis, window: int | None, dtype: torch.dtype
) -> Tensor | None:
    """Additive mask `[batch, 1, num_queries, num_keys]`, or None where plain causality will do.

    A query sees a key that is a token, not later than itself, nearer than `window`, and of
    segment 0 or its own segment.
    """
    fits_window = window is None or keys.num_tokens <= window
    is_last = queries.num_tokens == 1 and bool((queries.positions == keys.num_tokens - 1).all())
    if fits_window and (is_last or queries.num_tokens == keys.num_tokens) and keys.is_contiguous:
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
