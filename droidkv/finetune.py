"""Training a receiver by a seeded recipe, on transformers' Trainer and PEFT.

The loss is on answer tokens only; the prefix is learned through what the answers need of it.
"""

from __future__ import annotations

import dataclasses
import shutil
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from torch import Tensor, nn
from torch.utils.data import SequentialSampler
from transformers.trainer_utils import get_last_checkpoint

from droidkv.content import record_base
from droidkv.errors import PairError, StorageError, unknown_name
from droidkv.jsonio import read_json, write_json
from droidkv.loading import LoadedModel, load_model
from droidkv.low_rank import adapter_state, write_adapter
from droidkv.models import attention_mask
from droidkv.pair import Pair
from droidkv.recipe import Recipe
from droidkv.tasks import Task, get_task
from droidkv.training_rows import TrainingRow, training_batches

Progress = Callable[[int, int, float], None]
"""Called after each optimiser step with the step, the number of steps and the step's loss."""

_RUN_RECORD = "run.json"


@dataclass(frozen=True)
class TrainResult:
    """What a training run did.

    Attributes:
        adapter: The adapter folder.
        steps: Optimiser steps of the recipe.
        resumed_from: Step of the checkpoint this run began at; 0 for a fresh run.
        num_tokens: Tokens of all steps, shared prefixes counted once per row.
        num_answer_tokens: Of these, tokens with a loss.
        first_loss: Mean loss of the first tenth of the steps of this run.
        last_loss: Mean loss of the last tenth.
        seconds: Of this run, preparation included.
    """

    adapter: Path
    steps: int
    resumed_from: int
    num_tokens: int
    num_answer_tokens: int
    first_loss: float
    last_loss: float
    seconds: float


def train_pair(
    pair: Pair, output_dir: Path | None = None, *, progress: Progress | None = None
) -> TrainResult:
    """Train a pair's receiver by the [train] table of its file.

    Args:
        pair: A pair with a recipe.
        output_dir: The adapter folder to make; by default the one the pair names.
        progress: Told of every step.

    Raises:
        PairError: The pair has no recipe or names no local adapter folder; else as
            `train_receiver`.
        TaskError, StorageError: As `train_receiver`.
        LoadError: The base model cannot be had.
    """
    if pair.train is None:
        raise PairError(
            f"pair {pair.name!r} has no recipe to train its receiver by; write a [train] table "
            "into its file"
        )
    if output_dir is None:
        if pair.receiver.adapter is None or not Path(pair.receiver.adapter).is_absolute():
            raise PairError(
                f"pair {pair.name!r} must name the adapter folder to make, but its receiver's "
                f"adapter is {pair.receiver.adapter!r}; name a folder there, or give one"
            )
        output_dir = Path(pair.receiver.adapter)
    task = get_task(pair.train.task, **pair.train.options)
    base = load_model(dataclasses.replace(pair.receiver, adapter=None, adapter_revision=None))
    return train_receiver(base, task, pair.train, output_dir, chat=pair.chat, progress=progress)


def train_receiver(
    base: LoadedModel,
    task: Task,
    recipe: Recipe,
    output_dir: Path,
    *,
    chat: bool = True,
    max_tokens: int = 1024,
    checkpoint_steps: int = 25,
    progress: Progress | None = None,
) -> TrainResult:
    """Train a receiver and write it as a PEFT LoRA adapter in float16.

    Checkpoints lie in `OUTPUT_DIR.training` until the adapter is written; a run that was killed
    goes on from the last one. The base model is as it was when this returns.

    Args:
        base: The model to start from, in float32.
        task: Its `train` split is learned.
        recipe: How; `recipe.task` and `recipe.options` have been used to make `task`.
        output_dir: The adapter folder to make.
        chat: Put items into the chat template.
        max_tokens: Most tokens one item may have.
        checkpoint_steps: Steps between checkpoints.
        progress: Told of every step.

    Raises:
        PairError: A target module is unknown, or the checkpoints are of another run.
        TaskError: An item has no answer or is too long.
        StorageError: `output_dir` is there already, or a file could not be written.
    """
    started = time.perf_counter()
    if output_dir.exists():
        raise StorageError(
            f"expected no folder at {output_dir}, which the adapter will be; "
            "remove it or name another"
        )
    model = base.model.model
    targets = _target_modules(model, recipe)
    items = task.items("train", recipe.steps * recipe.batch_size, recipe.seed)
    batches = training_batches(
        items, recipe.steps, recipe.batch_size, base.tokenizer, chat, max_tokens
    )
    checkpoints = output_dir.with_name(output_dir.name + ".training")
    resume = _open_checkpoints(checkpoints, base, task, recipe)
    losses: list[float] = []

    def note(step: int, loss: float) -> None:
        losses.append(loss)
        if progress is not None:
            progress(step, recipe.steps, loss)

    with _trainable(model, targets, recipe) as (trained, finish):
        arguments = _arguments(checkpoints, recipe, checkpoint_steps, base.model.device)
        trainer = _RowTrainer(
            model=trained,
            args=arguments,
            train_dataset=batches,
            data_collator=_only,
            callbacks=[_Report(note)],
        )
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train(resume_from_checkpoint=resume)
        state, config = finish()
    finished = checkpoints / "adapter"
    write_adapter(finished, state, config, base.name)
    if base.fingerprint.weights is not None:
        record_base(finished, base.fingerprint.weights)
    output_dir.parent.mkdir(parents=True, exist_ok=True)
    finished.replace(output_dir)
    shutil.rmtree(checkpoints, ignore_errors=True)
    rows = [row for batch in batches for row in batch]
    tenth = max(1, len(losses) // 10)
    return TrainResult(
        adapter=output_dir,
        steps=recipe.steps,
        resumed_from=recipe.steps - len(losses),
        num_tokens=sum(row.input_ids.shape[1] for row in rows),
        num_answer_tokens=sum(len(row.targets) for row in rows),
        first_loss=sum(losses[:tenth]) / tenth,
        last_loss=sum(losses[-tenth:]) / tenth,
        seconds=time.perf_counter() - started,
    )


class _RowTrainer(transformers.Trainer):
    """Takes batches of `TrainingRow`s, in the order they come."""

    def _get_train_sampler(self, train_dataset: Any = None) -> SequentialSampler:
        dataset: Any = self.train_dataset if train_dataset is None else train_dataset
        return SequentialSampler(dataset)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        rows: list[TrainingRow] = inputs["rows"]
        losses = [_row_losses(model, row, self.args.device) for row in rows]
        loss = torch.cat(losses).mean()
        return (loss, None) if return_outputs else loss


def _row_losses(model: Any, row: TrainingRow, device: torch.device) -> Tensor:
    """Cross entropy of every answer token of a row, `[num_targets]`."""
    axis = row.axis.to(device)
    logits = model(
        input_ids=row.input_ids.to(device),
        attention_mask=attention_mask(axis, axis, None, torch.float32),
        position_ids=axis.positions,
        use_cache=False,
        logits_to_keep=row.predicting.to(device),
    ).logits
    return nn.functional.cross_entropy(logits[0].float(), row.targets.to(device), reduction="none")


class _Report(transformers.TrainerCallback):
    def __init__(self, note: Callable[[int, float], None]) -> None:
        self._note = note

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        logs = kwargs.get("logs") or {}
        if "loss" in logs:
            self._note(state.global_step, float(logs["loss"]))


def _only(batch: list[list[TrainingRow]]) -> dict[str, list[TrainingRow]]:
    (rows,) = batch
    return {"rows": rows}


def _arguments(
    folder: Path, recipe: Recipe, checkpoint_steps: int, device: torch.device
) -> transformers.TrainingArguments:
    return transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=recipe.steps,
        per_device_train_batch_size=1,  # one element of the data set is a whole batch of rows
        learning_rate=recipe.learning_rate,
        lr_scheduler_type="linear",
        warmup_steps=recipe.warmup_steps,
        weight_decay=recipe.weight_decay,
        max_grad_norm=recipe.max_grad_norm,
        seed=recipe.seed,
        bf16=recipe.autocast,
        use_cpu=device.type == "cpu",
        save_steps=checkpoint_steps,
        save_total_limit=1,
        logging_steps=1,
        disable_tqdm=True,
        report_to=[],
        remove_unused_columns=False,
        dataloader_pin_memory=False,
    )


def _target_modules(model: Any, recipe: Recipe) -> list[str]:
    """Full names of the linear layers the recipe trains."""
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    known = {name.rpartition(".")[2] for name in linear}
    for target in recipe.target_modules:
        if target not in known:
            raise PairError(unknown_name("target module", target, known))
    num_layers: int = model.config.num_hidden_layers
    if recipe.first_layer >= num_layers:
        raise PairError(
            f"expected first_layer below the model's {num_layers} layers, got {recipe.first_layer}"
        )
    return [
        name
        for name in linear
        if name.rpartition(".")[2] in recipe.target_modules
        and _layer_of(name) >= recipe.first_layer
    ]


def _layer_of(module_name: str) -> int:
    """Index of the decoder layer a module is in: the first number in its name."""
    return next((int(part) for part in module_name.split(".") if part.isdigit()), 0)


def _open_checkpoints(folder: Path, base: LoadedModel, task: Task, recipe: Recipe) -> str | None:
    """The checkpoint to go on from, after checking that it is of this very run."""
    run = {
        "base_weights": base.fingerprint.weights,
        "recipe": dataclasses.asdict(recipe) | {"target_modules": list(recipe.target_modules)},
        "task": {"name": task.name, "version": task.version, "options": task.options},
    }
    record = folder / _RUN_RECORD
    if not record.exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_json(record, run)
        return None
    there = read_json(record, PairError)
    for field, value in run.items():
        if not isinstance(there, dict) or there.get(field) != value:
            raise PairError(
                f"{folder}: expected checkpoints of this run, but they are of another: {field} is "
                f"{there.get(field) if isinstance(there, dict) else there}, here it is {value}; "
                "remove the folder or train to another place"
            )
    newest: Callable[[str], str | None] = get_last_checkpoint
    return newest(str(folder))


Finish = Callable[[], tuple[dict[str, Tensor], peft.LoraConfig]]


@contextmanager
def _trainable(
    model: nn.Module, targets: list[str], recipe: Recipe
) -> Iterator[tuple[nn.Module, Finish]]:
    """The model with what the recipe trains; afterwards it is as it was."""
    required = {name: weight.requires_grad for name, weight in model.named_parameters()}
    transformers.set_seed(recipe.seed)
    method = _trainable_full if recipe.method == "full" else _trainable_lora
    try:
        with method(model, targets, recipe) as trainable:
            yield trainable
    finally:
        for name, weight in model.named_parameters():
            weight.requires_grad_(required[name])
        model.eval()


@contextmanager
def _trainable_lora(
    model: Any, targets: list[str], recipe: Recipe
) -> Iterator[tuple[nn.Module, Finish]]:
    config = _lora_config(model, recipe, alpha=recipe.alpha)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT guesses at the base model's card
        tuned: Any = peft.get_peft_model(model, config)
    try:
        yield tuned, lambda: (peft.get_peft_model_state_dict(tuned), config)
    finally:
        tuned.unload()


@contextmanager
def _trainable_full(
    model: Any, targets: list[str], recipe: Recipe
) -> Iterator[tuple[nn.Module, Finish]]:
    """Trains the target weights themselves; their change is then cut to the recipe's rank."""
    modules = {name: model.get_submodule(name) for name in targets}
    before = {name: module.weight.detach().clone() for name, module in modules.items()}
    for name, weight in model.named_parameters():
        weight.requires_grad_(name.removesuffix(".weight") in modules)

    def finish() -> tuple[dict[str, Tensor], peft.LoraConfig]:
        deltas = {name: modules[name].weight.detach() - old for name, old in before.items()}
        return adapter_state(deltas, recipe.rank), _lora_config(model, recipe, alpha=recipe.rank)

    try:
        yield model, finish
    finally:
        with torch.no_grad():
            for name, old in before.items():
                modules[name].weight.copy_(old)


def _lora_config(model: Any, recipe: Recipe, alpha: float) -> peft.LoraConfig:
    layers = list(range(recipe.first_layer, model.config.num_hidden_layers))
    return peft.LoraConfig(
        r=recipe.rank,
        lora_alpha=alpha,  # type: ignore[arg-type]
        target_modules=list(recipe.target_modules),
        layers_to_transform=layers if recipe.first_layer else None,
        task_type="CAUSAL_LM",
    )
