"""A base model with what a recipe trains, beside the frozen base it came from."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from torch import nn

from droidkv.adapter_folder import write_adapter
from droidkv.content import record_base
from droidkv.errors import PairError, unknown_name
from droidkv.loading import LoadedModel
from droidkv.models import DecoderModel, keeping_requires_grad
from droidkv.recipe import Recipe
from droidkv.training.losses import FrozenBase


@dataclass(frozen=True)
class Trainable:
    """What the trainer steps, and what is kept of it.

    Attributes:
        module: What is optimised and put into checkpoints.
        receiver: The same, layer by layer.
        base: The base as it was before.
        write: Writes the result as a folder.
    """

    module: nn.Module
    receiver: DecoderModel
    base: FrozenBase
    write: Callable[[Path], None]


@contextmanager
def trainable(base: LoadedModel, recipe: Recipe) -> Iterator[Trainable]:
    """The model with what the recipe trains; afterwards it is as it was."""
    model: nn.Module = base.model.model
    transformers.set_seed(recipe.seed)
    method = _full if recipe.method == "full" else _lora
    try:
        with keeping_requires_grad(model), method(base, recipe) as ready:
            yield ready
    finally:
        model.eval()


def check_targets(model: Any, recipe: Recipe) -> None:
    """Do nothing if the model has the layers and modules that the recipe trains.

    Raises:
        PairError: A target module is unknown, or `first_layer` is past the last layer.
    """
    known = {name.rpartition(".")[2] for name, _ in _linear_layers(model)}
    for target in recipe.target_modules if recipe.method == "lora" else ():
        if target not in known:
            raise PairError(unknown_name("target module", target, known))
    num_layers: int = model.config.num_hidden_layers
    if recipe.first_layer >= num_layers:
        raise PairError(
            f"expected first_layer below the model's {num_layers} layers, got {recipe.first_layer}"
        )


@contextmanager
def _lora(base: LoadedModel, recipe: Recipe) -> Iterator[Trainable]:
    """LoRA matrices beside the weights; with them off, the model is the frozen base."""
    model: Any = base.model.model
    linear = [module for _, module in _linear_layers(model)]
    layers = list(range(recipe.first_layer, model.config.num_hidden_layers))
    config = peft.LoraConfig(
        r=recipe.rank,
        lora_alpha=recipe.alpha,  # type: ignore[arg-type]
        target_modules=list(recipe.target_modules),
        layers_to_transform=layers if recipe.first_layer else None,
        task_type="CAUSAL_LM",
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT guesses at the base model's card
        tuned: Any = peft.get_peft_model(model, config)

    @contextmanager
    def frozen() -> Iterator[DecoderModel]:
        with tuned.disable_adapter():
            yield base.model

    def write(folder: Path) -> None:
        state = peft.get_peft_model_state_dict(tuned)
        write_adapter(folder, state, config, base.name)
        if base.fingerprint.weights is not None:
            record_base(folder, base.fingerprint.weights, recipe.mode)

    try:
        with _rounded_once(linear) if recipe.autocast else nullcontext():
            yield Trainable(tuned, base.model, frozen, write)
    finally:
        tuned.unload()


@contextmanager
def _rounded_once(frozen: list[nn.Linear]) -> Iterator[None]:
    """Frozen layers in bfloat16, to which autocast would round them again at every use."""
    exact = [layer.weight.data for layer in frozen]
    try:
        for layer in frozen:
            layer.weight.data = layer.weight.data.to(torch.bfloat16)
        yield
    finally:
        for layer, weight in zip(frozen, exact, strict=True):
            layer.weight.data = weight


@contextmanager
def _full(base: LoadedModel, recipe: Recipe) -> Iterator[Trainable]:
    """The weights themselves; the frozen base is a copy."""
    model: Any = base.model.model
    before = copy.deepcopy(model).requires_grad_(False)
    frozen = DecoderModel(before)
    for name, weight in model.named_parameters():
        weight.requires_grad_(recipe.first_layer == 0 or _layer_of(name) >= recipe.first_layer)

    def write(folder: Path) -> None:
        model.save_pretrained(folder)
        base.tokenizer.save_pretrained(folder)

    try:
        yield Trainable(model, base.model, lambda: nullcontext(frozen), write)
    finally:
        model.load_state_dict(before.state_dict())


def _linear_layers(model: nn.Module) -> list[tuple[str, nn.Linear]]:
    """The linear layers inside decoder layers, by name."""
    return [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and "layers" in name.split(".")
    ]


def _layer_of(name: str) -> int:
    """Index of the decoder layer a weight is in, the first number in its name; -1 for none."""
    return next((int(part) for part in name.split(".") if part.isdigit()), -1)
