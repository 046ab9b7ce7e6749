"""Logical decoders of one frozen base: LoRA adapters that an engine runs beside it. No engine here.

A decoder is a plain LoRA on q, o and the MLP, as `droidkv train icarus` writes it. Ranks and scales
may differ from decoder to decoder; whatever else PEFT can do is refused by name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from droidkv.content import (
    ADAPTER_IRRELEVANT,
    ADAPTER_WEIGHTS,
    check_base,
    read_adapter_config,
    rewrites_base,
)
from droidkv.errors import LoadError, UnsupportedModelError
from droidkv.fields import Fields
from droidkv.recipe import KV_PROJECTIONS
from droidkv.safetensors_file import read_entries

if TYPE_CHECKING:
    import torch
    from torch import Tensor

# Projection -> its matrices of an adapter, `[in, rank]` and, scaled, `[rank, out]`.
Updates = Mapping[tuple[int, str], "tuple[Tensor, Tensor]"]

_PROJECTIONS = ("q_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_TENSOR = re.compile(
    r"base_model\.model\.model\.layers\.(\d+)\.(?:self_attn|mlp)\.(\w+)\.lora_([AB])\.weight"
)
# Which layers an adapter is on shows in its tensors.
_ABOUT_TENSORS = {"target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"}


@dataclass(frozen=True)
class Decoder:
    """One adapter, checked against the base it is to run beside.

    Attributes:
        name: What requests call it.
        folder: The adapter.
        rank: Of its matrices.
        scale: Of the product of its matrices.
    """

    name: str
    folder: Path
    rank: int
    scale: float


def read_decoder(name: str, folder: Path, config: Any, weights: str) -> Decoder:
    """An adapter's settings, after a look at all that can be wrong with it. Reads no matrices.

    Args:
        name: What requests call it.
        folder: The adapter.
        config: Hugging Face configuration of the base.
        weights: Identity of the base's weights.

    Raises:
        LoadError: A file is missing or damaged, or a matrix does not fit the base.
        IdentityError: It was trained on other weights, or not to decode beside them.
        UnsupportedModelError: It changes k or v, or is more than plain LoRA.
    """
    table = read_adapter_config(folder)
    _check_plain(folder, table)
    check_base(folder, weights, as_icarus=True)
    fields = Fields(
        {n: table[n] for n in ("r", "lora_alpha") if n in table}, str(folder), LoadError
    )
    rank, alpha = fields.take("r", int, minimum=1), fields.take("lora_alpha", float)
    _check_tensors(folder, rank, _sizes(config), config.num_hidden_layers)
    return Decoder(
        name, folder, rank, alpha / (math.sqrt(rank) if table.get("use_rslora") else rank)
    )


def read_updates(decoder: Decoder, dtype: torch.dtype, device: torch.device) -> Updates:
    """A decoder's matrices, by layer and projection.

    Raises:
        LoadError: The file is damaged.
    """
    from safetensors.torch import load_file

    tensors = load_file(decoder.folder / ADAPTER_WEIGHTS, device=str(device))
    found: dict[tuple[int, str], dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        layer, projection, matrix = _parts(decoder.folder, name)
        found.setdefault((layer, projection), {})[matrix] = tensor
    return {
        place: (each["A"].to(dtype).T, (each["B"].float() * decoder.scale).to(dtype).T)
        for place, each in found.items()
    }


def _check_plain(folder: Path, table: Mapping[str, Any]) -> None:
    kind = table.get("peft_type")
    if kind != "LORA":
        raise UnsupportedModelError(
            f"{folder}: expected an adapter of type LORA, got {kind!r}; others cannot decode "
            "beside the base"
        )
    if rewrites_base(table.get("init_lora_weights")):
        raise UnsupportedModelError(
            f"{folder}: expected an adapter that leaves the base as it is, got one with "
            f"init_lora_weights = {table['init_lora_weights']!r}; train one with `droidkv train "
            "icarus`"
        )
    known = {"peft_type", "r", "lora_alpha", "use_rslora", *_ABOUT_TENSORS, *ADAPTER_IRRELEVANT}
    off = {"bias": "none", "megatron_core": "megatron.core"}
    more = sorted(
        n for n, value in table.items() if value and n not in known and value != off.get(n)
    )
    if more:
        raise UnsupportedModelError(
            f"{folder}: expected a plain LoRA, got one with {more[0]} = {table[more[0]]!r}; train "
            "one with `droidkv train icarus`"
        )


def _check_tensors(
    folder: Path, rank: int, sizes: Mapping[str, tuple[int, int]], num_layers: int
) -> None:
    names = set()
    for entry in read_entries(folder / ADAPTER_WEIGHTS):
        layer, projection, matrix = _parts(folder, entry.name)
        names.add((layer, projection, matrix))
        size_in, size_out = sizes[projection]
        shape = (rank, size_in) if matrix == "A" else (size_out, rank)
        if tuple(entry.shape) != shape or layer >= num_layers:
            raise LoadError(
                f"{folder}: expected matrices of rank {rank} for a base of {num_layers} layers, "
                f"{entry.name} as {list(shape)}, got {list(entry.shape)}; it is another base's "
                "adapter, or its settings are another adapter's"
            )
    for layer, projection, _ in names:
        if not {(layer, projection, "A"), (layer, projection, "B")} <= names:
            raise LoadError(
                f"{folder}: expected two matrices for {projection} of layer {layer}, got one; "
                "save the adapter anew"
            )
    if not names:
        raise LoadError(f"{folder}: expected matrices in {ADAPTER_WEIGHTS}, got none")


def _parts(folder: Path, name: str) -> tuple[int, str, str]:
    """Layer, projection, and A or B, of a tensor by its name."""
    match = _TENSOR.fullmatch(name)
    projection = match[2] if match else None
    if projection in KV_PROJECTIONS:
        raise UnsupportedModelError(
            f"{folder}: expected no adapter on {' or '.join(KV_PROJECTIONS)}, got {name}: all "
            "decoders read the KV that the frozen base writes, so its matrices would never be "
            "used; train it with `droidkv train icarus`"
        )
    if match is None or projection not in _PROJECTIONS:
        raise UnsupportedModelError(
            f"{folder}: expected LoRA matrices of {', '.join(_PROJECTIONS)} in decoder layers, "
            f"got {name}; train it with `droidkv train icarus`"
        )
    return int(match[1]), match[2], match[3]


def _sizes(config: Any) -> dict[str, tuple[int, int]]:
    """Projection -> how many numbers enter and leave it."""
    hidden, inner = config.hidden_size, config.intermediate_size
    head_dim = getattr(config, "head_dim", None) or hidden // config.num_attention_heads
    queries = config.num_attention_heads * head_dim
    sizes = [
        (hidden, queries),
        (queries, hidden),
        (hidden, inner),
        (hidden, inner),
        (inner, hidden),
    ]
    return dict(zip(_PROJECTIONS, sizes, strict=True))
