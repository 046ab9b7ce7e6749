"""A tiny base with decoders for tests, and engines of vLLM that serve them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import peft
import torch

from droidkv.adapter_folder import write_adapter
from droidkv.content import record_base, weights_sha256
from droidkv.loading import LoadedModel, load_model
from droidkv.pair import ModelRef
from droidkv.recipe import Mode, default_targets
from droidkv.serve.icarus import IcarusSettings
from droidkv.serve.icarus_launch import ask
from droidkv.tiny import TinySpec, tiny_model, tiny_tokenizer

LAYERS = 3
CLASSES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


def make_base(folder: Path, architecture: str = "llama") -> Path:
    """A random base, in `folder/base`."""
    spec = TinySpec(architecture, layers=LAYERS)
    model = tiny_model(spec, torch.float32, "cpu")
    model.config.sliding_window = None  # engines with a window are refused
    model.save_pretrained(folder / "base")
    tiny_tokenizer().save_pretrained(folder / "base")
    return folder / "base"


def make_decoder(
    base: Path,
    name: str,
    rank: int = 2,
    targets: Sequence[str] = default_targets("icarus"),
    mode: Mode = "icarus",
    seed: int = 1,
    **settings: Any,
) -> Path:
    """A random adapter on a base, in the folder beside it."""
    folder = base.with_name(name)
    config = peft.LoraConfig(
        r=rank,
        lora_alpha=3,
        target_modules=list(targets),
        init_lora_weights=False,
        task_type="CAUSAL_LM",
        **settings,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Any = load_model(ModelRef(str(base))).model.model
        tuned: Any = peft.get_peft_model(model, config)
    write_adapter(folder, peft.get_peft_model_state_dict(tuned), config, "tiny")
    record_base(folder, weights_sha256(base), mode)
    return folder


def make_decoders(folder: Path, architecture: str = "llama") -> IcarusSettings:
    """A base in `folder/base`, and two decoders of different ranks beside it."""
    base = make_base(folder, architecture)
    adapters = {
        "one": make_decoder(base, "one"),
        # Fewer modules, so that a decoder without one is there too.
        "two": make_decoder(base, "two", 4, ("q_proj", "up_proj", "down_proj"), seed=2),
    }
    return IcarusSettings({name: str(adapter) for name, adapter in adapters.items()})


def twins(settings: IcarusSettings) -> dict[str | None, LoadedModel]:
    """The Hugging Face engine's models by decoder; None = the base."""
    adapters = settings.decoders
    base = os.path.join(os.path.dirname(next(iter(adapters.values()))), "base")
    loaded: dict[str | None, LoadedModel] = {None: load_model(ModelRef(base))}
    for name, folder in adapters.items():
        loaded[name] = load_model(ModelRef(base, adapter=folder, apply="icarus"))
    return loaded


def asked(decoder: str | None) -> dict[str, Any] | None:
    """`SamplingParams.extra_args` of a request."""
    return None if decoder is None else {"kv_transfer_params": ask(decoder)}
