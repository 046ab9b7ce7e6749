"""Training the receiver of a pair file, and the pair that a full-share receiver makes."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from droidkv.errors import PairError
from droidkv.loading import LoadedModel, load_model
from droidkv.pair import ModelRef, Pair
from droidkv.recipe import ALL_PROJECTIONS, Method, Mode, Recipe, default_targets
from droidkv.tasks import get_task
from droidkv.training.run import TrainResult, TrainSettings, train_receiver
from droidkv.training.trainer import Progress

_DESCRIPTIONS = {
    "prefillshare": "trained to answer from the base's KV of the prefix",
    "icarus": "an adapter that decodes from the base's KV of every token",
}

# LoRA wants a learning rate about ten times that of all parameters ("LoRA Without Regret",
# Thinking Machines Lab 2025, section on optimal learning rates).
_LORA_OVER_FULL = 10


def recipe_of(pair: Pair) -> Recipe:
    """A pair's recipe.

    Raises:
        PairError: It has none.
    """
    if pair.train is None:
        raise PairError(
            f"pair {pair.name!r} has no recipe to train its receiver by; write a [train] table "
            "into its file"
        )
    return pair.train


def full_share_pair(
    plain: Pair, mode: Mode, method: Method = "lora", path: Path | None = None
) -> Pair:
    """The pair whose receiver learns by `plain`'s recipe to read the sender's KV.

    Same task, data, budget and seed; the sender is the frozen base, and the ordinary fine-tune is
    the reference. Only the learning rate is another where a LoRA was trained and now all parameters
    are, or the other way round. Nothing is written.

    Args:
        plain: A pair with a recipe of mode `plain`, read from a file.
        mode: `prefillshare` or `icarus`.
        method: `lora`, or `full` for all parameters.
        path: The file the pair will lie in; by default beside `plain`'s, named after the mode. What
            is trained lies beside it, in `adapters/` or `models/`.

    Raises:
        PairError: The pair has no recipe, or it cannot be trained in this mode.
    """
    recipe = recipe_of(plain)
    if mode not in _DESCRIPTIONS or recipe.mode != "plain" or plain.path is None:
        raise PairError(
            f"expected the file of a pair with a recipe of mode 'plain' to derive one from, got "
            f"mode {recipe.mode!r} to {mode!r}; name the pair of the ordinary fine-tune"
        )
    targets = recipe.target_modules
    recipe = dataclasses.replace(
        recipe,
        mode=mode,
        method=method,
        learning_rate=_rate(recipe, method),
        target_modules=default_targets(mode) if targets == ALL_PROJECTIONS else targets,
    )
    recipe.check_mode(f"{plain.path}, [train]")
    if path is None:
        path = plain.path.with_stem(f"{plain.name}-{mode}" + ("-full" if method == "full" else ""))
    path = path.absolute()
    name, folder = path.stem, path.parent
    receiver = (
        ModelRef(model=str(folder / "models" / name))
        if method == "full"
        else dataclasses.replace(
            _without_adapter(plain.receiver),
            adapter=str(folder / "adapters" / name),
            apply="icarus" if mode == "icarus" else "merge",
        )
    )
    return dataclasses.replace(
        plain,
        name=name,
        description=f"The skill of {plain.name}: {_DESCRIPTIONS[mode]}.",
        receiver=receiver,
        reference=plain.receiver,
        train=recipe,
        path=path,
    )


def _rate(recipe: Recipe, method: Method) -> float:
    if method == recipe.method:
        return recipe.learning_rate
    factor = 1 / _LORA_OVER_FULL if method == "full" else _LORA_OVER_FULL
    return min(1.0, recipe.learning_rate * factor)


def output_of(pair: Pair) -> Path:
    """The folder that training a pair's receiver makes.

    Raises:
        PairError: The pair has no recipe, or names no local folder for what it makes.
    """
    kind = "model" if recipe_of(pair).method == "full" else "adapter"
    named = pair.receiver.model if kind == "model" else pair.receiver.adapter
    if named is None or not Path(named).is_absolute():
        raise PairError(
            f"pair {pair.name!r} must name the {kind} folder to make, but its receiver's {kind} "
            f"is {named!r}; name a folder there, or give one"
        )
    return Path(named)


def load_base(pair: Pair, device: str = "cpu") -> LoadedModel:
    """The model that a pair's recipe starts from, in float32.

    It is the receiver without its adapter; where the KV of the sender is learned to be read, or
    all parameters are trained, it is the sender, and both must be one model.

    Raises:
        PairError: The pair has no recipe.
        IdentityError: The sender is another model than the receiver's base; names what differs.
        LoadError: The model cannot be had.
    """
    recipe = recipe_of(pair)
    under = _without_adapter(pair.receiver)
    if recipe.method == "full":
        return load_model(pair.sender, device=device)
    base = load_model(under, device=device)
    if recipe.mode != "plain" and pair.sender != under:
        sender = load_model(pair.sender, device=device)
        sender.fingerprint.require_same(
            base.fingerprint,
            mine=f"the sender {sender.name!r}, whose KV is to be read",
            theirs=f"the base {base.name!r}, which is to be trained",
            way_out="a full-share receiver is trained on the very model that writes the KV: name "
            "one model as sender and as the receiver's base",
        )
    return base


def train_pair(
    pair: Pair,
    output: Path | None = None,
    settings: TrainSettings | None = None,
    progress: Progress | None = None,
    base: LoadedModel | None = None,
) -> TrainResult:
    """Train a pair's receiver by the [train] table of its file.

    Args:
        pair: A pair with a recipe.
        output: The folder to make; by default the one the pair names.
        settings: What is no part of the recipe; `chat` is the pair's.
        progress: Told of every step.
        base: What `load_base` gave, if it was called before.

    Raises:
        PairError, IdentityError, LoadError: See `output_of`, `load_base`.
        TaskError, StorageError: As `train_receiver`.
    """
    recipe = recipe_of(pair)
    output = output or output_of(pair)
    task = get_task(recipe.task, **recipe.options)
    return train_receiver(
        base or load_base(pair),
        task,
        recipe,
        output,
        dataclasses.replace(settings or TrainSettings(), chat=pair.chat),
        progress,
    )


def _without_adapter(ref: ModelRef) -> ModelRef:
    return dataclasses.replace(ref, adapter=None, adapter_revision=None, apply="merge")
