"""vLLM's own models, run as two streams: a frozen encoder that writes KV, decoders that read it.

Registered through the entry point `vllm.general_plugins` under names of their own. No layer is
written anew. In every step the rows of the tokens that are decoded follow those of all tokens:

    hidden state   [num_tokens + num_decoded, hidden_size]

so each linear layer, norm and MLP of vLLM's runs once for both streams and reads its weights once.
Hooks add the decoders' matrices to their rows. Around attention, the queries of both streams are
put together along the heads, and vLLM's attention, with twice the heads, reads KV once; K and V of
the decoders' rows are dropped.

Tokens that are not decoded have no row in the decoder stream. Attention alone has a place for them
in both streams, since its heads are as many for every token; there the encoder's queries stand
twice. So for them attention works double, and projections and MLP as in the base alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import set_current_vllm_config
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM

from droidkv.errors import ServeError
from droidkv.serve.decoders import Updates, read_updates
from droidkv.serve.icarus import DecodedRows
from droidkv.serve.vllm_decoders import read_decoders


@dataclass
class Streams:
    """Whose the rows of a step's hidden states are.

    Attributes:
        num_tokens: The encoder's rows, the first ones.
        decoded: `[num_decoded]`, of each decoder's row the encoder's row of the same token.
        routes: Index of a decoder, and its rows.
    """

    num_tokens: int
    decoded: Tensor
    routes: list[tuple[int, slice]]


class TwoStreams:
    """Mixin: a causal LM of vLLM that decodes through adapters from the KV of the base."""

    def __init__(self, *, vllm_config: Any, prefix: str = "", **others: Any) -> None:
        decoders = read_decoders(vllm_config)
        super().__init__(vllm_config=vllm_config, prefix=prefix, **others)  # type: ignore[call-arg]
        device, dtype = torch.get_default_device(), vllm_config.model_config.dtype
        updates = [read_updates(decoder, dtype, device) for decoder in decoders]
        self._streams = Streams(0, torch.empty(0, dtype=torch.long), [])
        for index, layer in enumerate(self.model.layers):  # type: ignore[attr-defined]
            self._adapt(index, layer, updates)
            layer.self_attn.attn = SharedRead(
                _doubled(layer.self_attn.attn, vllm_config), self._streams
            )
        self._layer_name = self.model.layers[0].self_attn.attn.name  # type: ignore[attr-defined]

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        """Hidden states leaving the model: a decoder's where one decodes, else the encoder's.

        Args:
            input_ids: `[num_tokens]`.
            positions: `[num_tokens]`.
            intermediate_tensors: None: there is one rank.
            inputs_embeds: None: prompts are tokens.
        """
        self._route(input_ids)
        decoded = self._streams.decoded
        both: Tensor = super().forward(  # type: ignore[misc]
            torch.cat([input_ids, input_ids[decoded]]),
            torch.cat([positions, positions[decoded]]),
            intermediate_tensors,
            inputs_embeds,
        )
        hidden = both[: len(input_ids)]
        hidden[decoded] = both[len(input_ids) :]
        return hidden

    def _route(self, input_ids: Tensor) -> None:
        """Find the rows of the step's decoded tokens by the slots their KV go to."""
        streams = self._streams
        streams.num_tokens, device = len(input_ids), input_ids.device
        mapping = get_forward_context().slot_mapping
        rows = get_kv_transfer_group().rows if has_kv_transfer_group() else None
        if rows is None:  # a warm-up run, which is to need as much memory as any step
            streams.decoded = torch.arange(streams.num_tokens, device=device)
            streams.routes = [(0, slice(streams.num_tokens, 2 * streams.num_tokens))]
            return
        assert isinstance(rows, DecodedRows) and isinstance(mapping, dict)
        streams.decoded = _rows_of(mapping[self._layer_name], rows.slots)
        streams.routes, start = [], streams.num_tokens
        for decoder, count in rows.decoders:
            streams.routes.append((decoder, slice(start, start + count)))
            start += count

    def _adapt(self, index: int, layer: Any, updates: Sequence[Updates]) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        inner = mlp.gate_up_proj.output_sizes[0]
        places = {
            attention.qkv_proj: {"q_proj": slice(0, attention.q_size)},
            attention.o_proj: {"o_proj": slice(None)},
            mlp.gate_up_proj: {"gate_proj": slice(0, inner), "up_proj": slice(inner, 2 * inner)},
            mlp.down_proj: {"down_proj": slice(None)},
        }
        for module, columns in places.items():
            parts = [
                (decoder, part, *each[index, projection])
                for decoder, each in enumerate(updates)
                for projection, part in columns.items()
                if (index, projection) in each
            ]
            module.register_forward_hook(LowRank(self._streams, parts))


class LowRank:
    """Adds the decoders' part to their rows of what a linear layer gave.

    Args:
        streams: Whose the rows are.
        parts: Decoder, columns of the layer's output, and matrices `[in, rank]`, `[rank, out]`.
    """

    def __init__(
        self, streams: Streams, parts: Sequence[tuple[int, slice, Tensor, Tensor]]
    ) -> None:
        self._streams = streams
        self._parts: dict[int, list[tuple[slice, Tensor, Tensor]]] = {}
        for decoder, columns, down, up in parts:
            self._parts.setdefault(decoder, []).append((columns, down, up))

    def __call__(self, module: nn.Module, args: tuple[Tensor], output: tuple[Tensor, Any]) -> None:
        for decoder, rows in self._streams.routes:
            for columns, down, up in self._parts.get(decoder, ()):
                output[0][rows, columns].addmm_(args[0][rows] @ down, up)


class SharedRead(nn.Module):
    """Attention of both streams over the encoder's KV, in one call of vLLM's attention.

    Args:
        attention: vLLM's attention, with the query heads of both streams.
        streams: Whose the rows are.
    """

    def __init__(self, attention: Attention, streams: Streams) -> None:
        super().__init__()
        self.attention = attention
        self._streams = streams
        # Query heads of one KV head must stand together: [kv, stream, group].
        group = attention.num_heads // 2 // attention.num_kv_heads
        self._heads = (attention.num_kv_heads, group, attention.head_size)

    @property
    def name(self) -> str:
        """What vLLM calls the attention."""
        name: str = self.attention.layer_name
        return name

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Rows of both streams to rows of both streams.

        Args:
            query: `[num_tokens + num_decoded, num_heads * head_dim]`.
            key: `[num_tokens + num_decoded, num_kv_heads * head_dim]`.
            value: The same shape.
        """
        count, decoded = self._streams.num_tokens, self._streams.decoded
        heads = query.view(-1, *self._heads)
        joined = heads[:count, :, None].repeat(1, 1, 2, 1, 1)
        joined[decoded, :, 1] = heads[count:]
        read = self.attention(joined.flatten(1), key[:count], value[:count]).view(joined.shape)
        return torch.cat([read[:, :, 0].flatten(1), read[decoded, :, 1].flatten(1)])


class IcarusLlama(TwoStreams, LlamaForCausalLM):  # type: ignore[misc]
    """Llama."""


class IcarusQwen2(TwoStreams, Qwen2ForCausalLM):  # type: ignore[misc]
    """Qwen2."""


class IcarusQwen3(TwoStreams, Qwen3ForCausalLM):  # type: ignore[misc]
    """Qwen3."""


def _rows_of(mapping: Tensor, slots: Sequence[int]) -> Tensor:
    """Rows of a step's tokens, by the slots of their KV."""
    wanted = torch.tensor(slots, dtype=mapping.dtype, device=mapping.device)
    ordered, order = mapping.sort()
    places = torch.searchsorted(ordered, wanted).clamp(max=max(len(mapping) - 1, 0))
    if not torch.equal(ordered[places], wanted):
        raise ServeError(
            "expected each decoded token among those of the step, but some are not; this is a bug "
            "of droidkv with this version of vLLM"
        )
    return order[places]


def _doubled(attention: Attention, vllm_config: Any) -> Attention:
    """vLLM's attention anew, in the place of `attention`, with twice the query heads."""
    modules: dict[str, Any] = vllm_config.compilation_config.static_forward_context
    del modules[attention.layer_name]
    with set_current_vllm_config(vllm_config):
        return Attention(
            2 * attention.num_heads,
            attention.head_size,
            attention.impl.scale,
            num_kv_heads=attention.num_kv_heads,
            cache_config=vllm_config.cache_config,
            quant_config=attention.quant_config,
            per_layer_sliding_window=attention.sliding_window,
            attn_type=attention.attn_type,
            prefix=attention.layer_name,
        )
