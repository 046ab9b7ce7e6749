"""A paged cache over plain tensors, with a Hugging Face model behind it. No vLLM."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from droidkv.cache import KVCache, TokenAxis
from droidkv.models import DecoderModel
from droidkv.plan import LayerGroup
from droidkv.serve.connector_plan import slots_of


class FakePagedModel:
    """Blocks of `block_tokens`; what was never written is NaN, so that reading it shows."""

    def __init__(self, model: DecoderModel, num_blocks: int, block_tokens: int) -> None:
        self.model = model
        shape = model.shape
        self.num_layers = model.num_layers
        self.block_tokens = block_tokens
        self.kv_shape = (shape.num_kv_heads, shape.head_dim)
        self.hidden_size = shape.hidden_size
        self.dtype = model.dtype
        slots = num_blocks * block_tokens
        per_layer = (model.num_layers, shape.num_kv_heads, slots, shape.head_dim)
        self.keys = torch.full(per_layer, torch.nan)
        self.values = torch.full(per_layer, torch.nan)
        self.hidden: dict[int, Tensor] = {}
        self.recomputed: list[tuple[int, int]] = []
        self.is_updated = False
        self.is_mixed = False

    def copy_kv(self, layer: int, slots: Tensor) -> Callable[[], tuple[Tensor, Tensor]]:
        keys, values = self.keys[layer][:, slots], self.values[layer][:, slots]
        return lambda: (keys, values)

    def write_kv(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        self.keys[layer][:, slots] = keys
        self.values[layer][:, slots] = values

    def read_hidden(self, layer: int, slots: Tensor) -> Tensor | None:
        found = self.hidden[layer][slots]
        return None if bool(found.isnan().any()) else found

    def embed(self, token_ids: Sequence[int]) -> Tensor:
        return self.model.embed(torch.tensor([list(token_ids)]))[0]

    def mixes_adapters(self) -> bool:
        return self.is_mixed

    def weights_changed(self) -> bool:
        return self.is_updated

    def recompute(
        self,
        group: LayerGroup,
        hidden: Tensor,
        start: int,
        block_ids: Sequence[int],
        on_layer: Callable[[int], None],
    ) -> None:
        stop = start + hidden.shape[0]
        self.recomputed.append((start, stop))
        before = torch.tensor(slots_of(block_ids, self.block_tokens, 0, start), dtype=torch.long)
        now = torch.tensor(slots_of(block_ids, self.block_tokens, start, stop))
        cache = KVCache.empty(self.num_layers)
        for layer in group.layers:
            if start:
                keys, values = self.copy_kv(layer, before)()
                cache.update(keys[None], values[None], layer)
        axis = TokenAxis(torch.arange(stop)[None])
        step = self.model.step(axis.narrow(start, stop), axis)
        entering = hidden[None]
        with torch.no_grad():
            for layer in group.layers[:-1]:
                on_layer(layer)
                entering = self.model.run_layer(layer, entering, step, cache)
            on_layer(group.stop - 1)
            self.model.store_kv(group.stop - 1, entering, step, cache)
        for layer in group.layers:
            keys, values = cache.layer(layer)
            self.write_kv(layer, now, keys[0, :, start:], values[0, :, start:])
