"""The sender's side: prefill a prefix once, keep its KV and the E cache receivers may need."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from droidkv.cache import CapturedCache, KVCache, TokenAxis
from droidkv.errors import PlanError
from droidkv.models import DecoderModel


@torch.no_grad()
def capture(
    sender: DecoderModel,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    hidden_layers: Iterable[int] = (),
    chunk_tokens: int | None = None,
    fingerprint: Mapping[str, object] | None = None,
) -> CapturedCache:
    """Prefill a prefix on the sender (DroidSpeak, section 5.1).

    Args:
        sender: The model that prefills.
        input_ids: `[batch, seq_len]`.
        attention_mask: `[batch, seq_len]` of 0/1; padding may stand anywhere.
        hidden_layers: Layers whose entering hidden state (E) is kept.
        chunk_tokens: Prefill in chunks of this many tokens; None = at once.
        fingerprint: The sender's identity, kept with the cache.

    Raises:
        PlanError: The prefix is empty, or a layer of `hidden_layers` does not exist.
    """
    wanted = set(hidden_layers)
    if bad := sorted(layer for layer in wanted if not 0 <= layer < sender.num_layers):
        raise PlanError(f"expected E layers within [0,{sender.num_layers}), got {bad}")
    axis = prefix_axis(input_ids, attention_mask).to(sender.device)
    input_ids = input_ids.to(sender.device)
    cache = KVCache.empty(sender.num_layers)
    kept: dict[int, list[Tensor]] = {layer: [] for layer in wanted}
    for start, stop in chunks(axis.num_tokens, chunk_tokens):
        hidden = sender.embed_prefix(input_ids[:, start:stop])
        step = sender.step(axis.narrow(start, stop), axis.narrow(0, stop))
        for layer in range(sender.num_layers):
            if layer in wanted:
                kept[layer].append(hidden)
            if layer < sender.num_layers - 1:
                hidden = sender.run_layer(layer, hidden, step, cache)
            else:
                sender.store_kv(layer, hidden, step, cache)
    keys, values = zip(*(cache.layer(layer) for layer in range(sender.num_layers)), strict=True)
    return CapturedCache(
        keys=list(keys),
        values=list(values),
        hidden={layer: torch.cat(parts, dim=1) for layer, parts in kept.items()},
        axis=axis,
        fingerprint=fingerprint or {},
    )


def prefix_axis(input_ids: Tensor, attention_mask: Tensor | None) -> TokenAxis:
    """Where the tokens of a prefix stand.

    Raises:
        PlanError: A row of the batch has no token.
    """
    if attention_mask is None:
        attention_mask = torch.ones_like(input_ids)
    if input_ids.shape[1] == 0 or bool((attention_mask.sum(dim=1) == 0).any()):
        raise PlanError(
            f"expected a prefix of at least one token in every row, got input_ids of shape "
            f"{tuple(input_ids.shape)}; an empty prefix has nothing to reuse"
        )
    return TokenAxis.of_mask(attention_mask)


def chunks(num_tokens: int, chunk_tokens: int | None) -> list[tuple[int, int]]:
    """Half-open ranges of at most `chunk_tokens` that cover `num_tokens` in order.

    Raises:
        PlanError: `chunk_tokens` is below 1.
    """
    size = num_tokens if chunk_tokens is None else chunk_tokens
    if size < 1:
        raise PlanError(f"expected chunk_tokens >= 1, got {chunk_tokens}")
    return [(start, min(start + size, num_tokens)) for start in range(0, num_tokens, size)]
