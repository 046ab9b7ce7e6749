"""vLLM's paged cache and decoder layers behind `droidkv.serve.paged_model.PagedModel`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from vllm.config import set_current_vllm_config
from vllm.forward_context import get_forward_context, set_forward_context
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.attention.backend import CommonAttentionMetadata

from droidkv.errors import UnsupportedModelError
from droidkv.plan import LayerGroup
from droidkv.serve.connector_plan import slots_of
from droidkv.serve.weight_watch import WeightWatch

# Blocks of one layer's cache -> keys and values `[num_blocks, num_kv_heads, block, head_dim]`.
Layout = Callable[[Tensor, Tensor, int, int], tuple[Tensor, Tensor]]


class KeysAndValuesStored(Exception):
    """Ends the group's last layer once its keys and values are in the cache."""


class VllmPagedModel:
    """One engine's model and its paged cache.

    Args:
        vllm_config: The engine's.
        kv_cache_spec: Of the one group of layers.
        kv_caches: Name of an attention module -> its cache.
        model: The causal LM.
        hidden_layers: Layers whose E is captured; none on a receiver.

    Raises:
        UnsupportedModelError: The cache's layout is none of the known ones.
    """

    def __init__(
        self,
        vllm_config: Any,
        kv_cache_spec: Any,
        kv_caches: Mapping[str, Tensor],
        model: Any,
        hidden_layers: Sequence[int] = (),
    ) -> None:
        self._config = vllm_config
        modules = vllm_config.compilation_config.static_forward_context
        self._names = sorted(kv_caches, key=extract_layer_index)
        self._attentions = [modules[name] for name in self._names]
        self._caches = [kv_caches[name] for name in self._names]
        self._model = model
        self._layers = model.model.layers
        self._weights = WeightWatch(model)
        self._device = self._caches[0].device
        self._adapted = [each for each in model.modules() if hasattr(each, "lora_b_stacked")]
        self._layer_of = {name: layer for layer, name in enumerate(self._names)}
        self.num_layers = len(self._names)
        self.block_tokens = int(kv_cache_spec.block_size)
        self.kv_shape = (int(kv_cache_spec.num_kv_heads), int(kv_cache_spec.head_size))
        self.hidden_size = int(vllm_config.model_config.get_hidden_size())
        self.dtype = kv_cache_spec.dtype
        if len(self._layers) != self.num_layers:
            raise UnsupportedModelError(
                f"expected one KV cache for each of {len(self._layers)} decoder layers, "
                f"got {self.num_layers}; models that share KV between layers cannot be served"
            )
        self._stop_at: str | None = None
        self._layout = self._find_layout()
        with set_current_vllm_config(vllm_config):
            builder = self._attentions[0].get_attn_backend().get_builder_cls()
            self._metadata = builder(kv_cache_spec, self._names, vllm_config, self._device)
        num_slots = self._num_blocks() * self.block_tokens
        self._hidden = {
            layer: torch.empty(num_slots, self.hidden_size, dtype=self.dtype, device=self._device)
            for layer in hidden_layers
        }
        self._captured = torch.zeros(num_slots, dtype=torch.bool, device=self._device)
        if hidden_layers:
            model.on_hidden = self._keep_hidden

    @property
    def is_recomputing(self) -> bool:
        return self._stop_at is not None

    def layer_of(self, name: str) -> int:
        """Number of the decoder layer that an attention module belongs to."""
        return self._layer_of[name]

    def before_attention(self, name: str) -> None:
        """In a private forward pass, when a layer has put its KV into the cache.

        Raises:
            KeysAndValuesStored: It is the group's last layer, of which no more is needed.
        """
        if name == self._stop_at:
            raise KeysAndValuesStored

    def copy_kv(self, layer: int, slots: Tensor) -> Callable[[], tuple[Tensor, Tensor]]:
        blocks, which = torch.unique_consecutive(slots // self.block_tokens, return_inverse=True)
        inside = (which * self.block_tokens + slots % self.block_tokens).to(self._device)
        num_heads, head_dim = self.kv_shape
        pair = self._layout(
            self._caches[layer], blocks.to(self._device), self.block_tokens, head_dim
        )
        follow = self._following()

        def arrange() -> tuple[Tensor, Tensor]:
            follow()
            keys, values = (
                part.transpose(0, 1).reshape(num_heads, -1, head_dim).index_select(1, inside)
                for part in pair
            )
            return keys, values

        return arrange

    def write_kv(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        attention, cache = self._attentions[layer], self._caches[layer]
        attention.impl.do_kv_cache_update(
            attention,
            self._by_token(keys),
            self._by_token(values),
            cache,
            slots.to(self._device),
        )
        if self._device.type == "cuda":  # else the engine's stream could read before it is written
            torch.cuda.current_stream(self._device).synchronize()

    def _following(self) -> Callable[[], None]:
        """Lets another thread's CUDA stream wait for all that this one's has begun by now."""
        if self._device.type != "cuda":
            return lambda: None
        begun = torch.cuda.current_stream(self._device).record_event()
        return lambda: torch.cuda.current_stream(self._device).wait_event(begun)

    def _by_token(self, part: Tensor) -> Tensor:
        """`[num_tokens, num_kv_heads, head_dim]`; CPU kernels take any strides."""
        part = part.transpose(0, 1).to(self._device)
        return part if part.device.type == "cpu" else part.contiguous()

    def read_hidden(self, layer: int, slots: Tensor) -> Tensor | None:
        slots = slots.to(self._device)
        if not bool(self._captured[slots].all()):
            return None
        return self._hidden[layer][slots]

    def embed(self, token_ids: Sequence[int]) -> Tensor:
        ids = torch.tensor(list(token_ids), dtype=torch.long, device=self._device)
        embedded: Tensor = self._model.embed_input_ids(ids)
        return embedded

    def recompute(
        self,
        group: LayerGroup,
        hidden: Tensor,
        start: int,
        block_ids: Sequence[int],
        on_layer: Callable[[int], None],
    ) -> None:
        num_tokens = hidden.shape[0]
        stop = start + num_tokens
        slots = self._tensor(slots_of(block_ids, self.block_tokens, start, stop), torch.long)
        query_start = torch.tensor([0, num_tokens], dtype=torch.int32)
        common = CommonAttentionMetadata(
            query_start_loc=query_start.to(self._device),
            query_start_loc_cpu=query_start,
            seq_lens=self._tensor([stop], torch.int32),
            seq_lens_cpu_upper_bound=torch.tensor([stop], dtype=torch.int32),
            num_reqs=1,
            num_actual_tokens=num_tokens,
            max_query_len=num_tokens,
            max_seq_len=stop,
            block_table_tensor=self._tensor([list(block_ids)], torch.int32),
            slot_mapping=slots,
            causal=True,
        )
        metadata = self._metadata.build(0, common)
        positions = torch.arange(start, stop, device=self._device)
        hidden = hidden.to(self._device).clone()  # layers add to it in place
        residual = None
        self._stop_at = self._names[group.stop - 1]
        try:
            with set_forward_context(
                dict.fromkeys(self._names, metadata),
                self._config,
                num_tokens=num_tokens,
                slot_mapping=dict.fromkeys(self._names, slots),
            ):
                for layer in group.layers:
                    on_layer(layer)
                    hidden, residual = self._layers[layer](positions, hidden, residual)
        except KeysAndValuesStored:
            pass
        finally:
            self._stop_at = None

    def mixes_adapters(self) -> bool:
        """On a CPU vLLM runs such requests through the last place for adapters.

        It does so where adapters' requests stand beside them in a batch; an empty place does
        nothing.
        """
        return self._device.type == "cpu" and any(
            not module.punica_wrapper.no_lora and _has_adapter_in_last_place(module)
            for module in self._adapted
        )

    def weights_changed(self) -> bool:
        return self._weights.has_changed()

    def _keep_hidden(self, entering: dict[int, Tensor]) -> None:
        """In every forward pass of a sender: E goes where the step's KV go."""
        mapping = get_forward_context().slot_mapping
        slots = mapping.get(self._names[0]) if isinstance(mapping, dict) else None
        if slots is None:  # a warm-up run
            return
        real = slots >= 0
        slots = slots[real]
        for layer, hidden in entering.items():
            self._hidden[layer][slots] = hidden[: len(real)][real].to(self.dtype)
        self._captured[slots] = True

    def _find_layout(self) -> Layout:
        """Write a pattern into a free block through the engine, and see which layout reads it."""
        num_heads, head_dim = self.kv_shape
        block = self._num_blocks() - 1
        slots = self._tensor(slots_of([block], self.block_tokens, 0, self.block_tokens), torch.long)
        count = num_heads * self.block_tokens * head_dim
        # Whole numbers up to 251 are exact in every dtype of a cache; 251 is prime, so that no
        # two axes can be exchanged unseen.
        pattern = (torch.arange(2 * count) % 251).view(2, num_heads, self.block_tokens, head_dim)
        keys, values = pattern.to(self.dtype)
        for layer in range(self.num_layers):
            self.write_kv(layer, slots, keys, values)
        blocks = self._tensor([block], torch.long)
        for layout in _LAYOUTS:
            if all(
                _reads(layout, cache, blocks, self.block_tokens, head_dim, keys, values)
                for cache in self._caches
            ):
                zeros = torch.zeros_like(keys)
                for layer in range(self.num_layers):
                    self.write_kv(layer, slots, zeros, zeros)
                return layout
        backend = self._attentions[0].get_attn_backend().get_name()
        raise UnsupportedModelError(
            f"expected the paged cache of the attention backend {backend} to have a known layout, "
            f"but a pattern written into it came back otherwise (cache of shape "
            f"{tuple(self._caches[0].shape)}); choose another attention backend"
        )

    def _num_blocks(self) -> int:
        blocks: int = self._config.cache_config.num_gpu_blocks
        return blocks

    def _tensor(self, values: Any, dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self._device)


def _has_adapter_in_last_place(module: Any) -> bool:
    stacked = module.lora_b_stacked
    parts = [stacked] if isinstance(stacked, Tensor) else stacked
    return any(bool(part[-1].any()) for part in parts)


def _halves(cache: Tensor, blocks: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """Keys and values one behind the other for each block and head."""
    num_heads = cache.shape[1]
    raw = cache[blocks].reshape(len(blocks), num_heads, 2, -1)
    return raw[:, :, 0], raw[:, :, 1]


def _keys_transposed(
    cache: Tensor, blocks: Tensor, block_tokens: int, head_dim: int
) -> tuple[Tensor, Tensor]:
    """CPU kernels: keys `[head_dim, block]`, values `[block, head_dim]`."""
    keys, values = _halves(cache, blocks, head_dim)
    keys = keys.reshape(*keys.shape[:2], head_dim, block_tokens).transpose(2, 3)
    return keys, values.reshape(*values.shape[:2], block_tokens, head_dim)


def _halves_plain(
    cache: Tensor, blocks: Tensor, block_tokens: int, head_dim: int
) -> tuple[Tensor, Tensor]:
    """Keys `[block, head_dim]`, then values alike."""
    keys, values = _halves(cache, blocks, head_dim)
    shape = (*keys.shape[:2], block_tokens, head_dim)
    return keys.reshape(shape), values.reshape(shape)


def _fused_tokens(
    cache: Tensor, blocks: Tensor, block_tokens: int, head_dim: int
) -> tuple[Tensor, Tensor]:
    """`[num_blocks, num_kv_heads, block, 2 * head_dim]` as its shape says."""
    part = cache[blocks]
    return part[..., :head_dim], part[..., head_dim:]


def _pair_first(
    cache: Tensor, blocks: Tensor, block_tokens: int, head_dim: int
) -> tuple[Tensor, Tensor]:
    """`[2, num_blocks, block, num_kv_heads, head_dim]` (CUDA; never run by our tests)."""
    part = cache[:, blocks].transpose(2, 3)
    return part[0], part[1]


def _pair_second(
    cache: Tensor, blocks: Tensor, block_tokens: int, head_dim: int
) -> tuple[Tensor, Tensor]:
    """`[num_blocks, 2, block, num_kv_heads, head_dim]` (CUDA; never run by our tests)."""
    part = cache[blocks].transpose(2, 3)
    return part[:, 0], part[:, 1]


_LAYOUTS: tuple[Layout, ...] = (
    _keys_transposed,
    _halves_plain,
    _fused_tokens,
    _pair_first,
    _pair_second,
)


def _reads(
    layout: Layout,
    cache: Tensor,
    blocks: Tensor,
    block_tokens: int,
    head_dim: int,
    keys: Tensor,
    values: Tensor,
) -> bool:
    try:
        found = layout(cache, blocks, block_tokens, head_dim)
    except (RuntimeError, IndexError):  # another number of dimensions
        return False
    return all(
        part.shape[1:] == wanted.shape and bool((part[0].to(wanted.device) == wanted).all())
        for part, wanted in zip(found, (keys, values), strict=True)
    )
