"""Adapter folders, from a trained LoRA or from the low-rank part of a full weight change."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import peft
import torch
from safetensors.torch import save_file
from torch import Tensor

from droidkv.content import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from droidkv.jsonio import write_json


def lora_of_delta(delta: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """The best LoRA of a weight change: `B @ A` is its truncated singular value decomposition.

    Args:
        delta: `[out_features, in_features]`, new weight minus old.
        rank: Rank to keep.

    Returns:
        A `[rank, in_features]` and B `[out_features, rank]`, to be applied with scale 1.
    """
    left, values, right = torch.linalg.svd(delta.float(), full_matrices=False)
    root = values[:rank].sqrt()
    # Both halves get the root, so neither leaves the range of half precision.
    return root[:, None] * right[:rank], left[:, :rank] * root


def adapter_state(deltas: Mapping[str, Tensor], rank: int) -> dict[str, Tensor]:
    """A PEFT LoRA state of weight changes by module name."""
    state = {}
    for name, delta in deltas.items():
        (
            state[f"base_model.model.{name}.lora_A.weight"],
            state[f"base_model.model.{name}.lora_B.weight"],
        ) = lora_of_delta(delta, rank)
    return state


def write_adapter(
    folder: Path, state: Mapping[str, Tensor], config: peft.LoraConfig, base_name: str
) -> None:
    """Write a PEFT adapter folder: float16 weights, settings without any local path.

    Args:
        folder: Where; made if it is not there.
        state: As `peft.get_peft_model_state_dict` gives it.
        config: The LoRA's settings.
        base_name: How people call the base model.

    Raises:
        StorageError: A file could not be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    half = {name: tensor.detach().cpu().half().contiguous() for name, tensor in state.items()}
    save_file(half, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    settings: Any = config  # its methods are untyped
    table = {name: _plain(value) for name, value in settings.to_dict().items()}
    table |= {"base_model_name_or_path": base_name, "inference_mode": True}
    write_json(folder / ADAPTER_CONFIG, table)


def _plain(value: Any) -> Any:
    if isinstance(value, set | frozenset):
        return sorted(value)
    return getattr(value, "value", value)
