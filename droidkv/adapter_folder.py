"""Adapter folders: a trained LoRA in half precision."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import peft
from safetensors.torch import save_file
from torch import Tensor

from droidkv.content import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from droidkv.errors import PairError
from droidkv.jsonio import write_json


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
        PairError: A weight is no number, or too large for float16.
        StorageError: A file could not be written.
    """
    half = {name: tensor.detach().cpu().half().contiguous() for name, tensor in state.items()}
    if bad := [name for name, tensor in half.items() if not tensor.isfinite().all()]:
        raise PairError(
            f"expected weights within float16's range, got others in {bad[0]}; train with a lower "
            "learning_rate"
        )
    folder.mkdir(parents=True, exist_ok=True)
    save_file(half, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    settings: Any = config  # its methods are untyped
    table = {name: _plain(value) for name, value in settings.to_dict().items()}
    table |= {"base_model_name_or_path": base_name, "inference_mode": True}
    write_json(folder / ADAPTER_CONFIG, table)


def _plain(value: Any) -> Any:
    if isinstance(value, set | frozenset):
        return sorted(value)
    return getattr(value, "value", value)
