"""What droidkv asks of an engine's model and its paged cache; tests have one of plain tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from droidkv.plan import LayerGroup


class PagedModel(Protocol):
    """What a worker half asks of an engine's model and its paged cache.

    Slots are numbers of token places in the paged cache: block times block size plus offset.
    """

    num_layers: int
    block_tokens: int
    kv_shape: tuple[int, int]  # num_kv_heads, head_dim
    hidden_size: int
    dtype: torch.dtype

    def copy_kv(self, layer: int, slots: Tensor) -> Callable[[], tuple[Tensor, Tensor]]:
        """Copy keys and values of some slots now.

        Returns:
            Arranges them, at any time and in any thread: each `[num_kv_heads, num_tokens,
            head_dim]`.
        """

    def write_kv(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Put keys and values `[num_kv_heads, num_tokens, head_dim]` into some slots."""

    def read_hidden(self, layer: int, slots: Tensor) -> Tensor | None:
        """E of some slots, `[num_tokens, hidden_size]`, copied; None if one was never captured."""

    def embed(self, token_ids: Sequence[int]) -> Tensor:
        """Hidden state that enters layer 0, `[num_tokens, hidden_size]`."""

    def recompute(
        self,
        group: LayerGroup,
        hidden: Tensor,
        start: int,
        block_ids: Sequence[int],
        on_layer: Callable[[int], None],
    ) -> None:
        """Run `[num_tokens, hidden_size]` at positions from `start` on through a layer group.

        KV of the group's layers go into the request's blocks; those of tokens before `start` are
        there already. Of the last layer only KV are computed. `on_layer` is called with the number
        of each layer before it runs.
        """

    def mixes_adapters(self) -> bool:
        """Whether the last step may have run requests without a LoRA through one."""

    def weights_changed(self) -> bool:
        """Whether the weights are others than those that the engine started with."""
