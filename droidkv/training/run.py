"""Training a receiver by a seeded recipe, on transformers' Trainer and PEFT."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from droidkv.errors import TaskError
from droidkv.jsonio import writing_into
from droidkv.loading import LoadedModel
from droidkv.recipe import Recipe
from droidkv.sources import quiet
from droidkv.tasks import Item, Task
from droidkv.training.checkpoints import Checkpoints
from droidkv.training.curve import CURVE_FILE, Curve
from droidkv.training.losses import row_losses
from droidkv.training.rows import TrainingRow, rows_digest, training_batches
from droidkv.training.trainable import check_targets, trainable
from droidkv.training.trainer import Progress, RowTrainer, training_arguments


@dataclass(frozen=True)
class TrainSettings:
    """What of a run is no part of the recipe.

    Args:
        chat: Put items into the chat template.
        max_tokens: Most tokens one item may have.
        checkpoint_steps: Steps between checkpoints.
        eval_steps: Steps between evaluations on held-out items; None = none.
        eval_items: Held-out items, of the split `calibration`.
        command: What was run, for the record.

    Raises:
        TaskError: A number is below 1.
    """

    chat: bool = True
    max_tokens: int = 1024
    checkpoint_steps: int = 25
    eval_steps: int | None = None
    eval_items: int = 16
    command: str = ""

    def __post_init__(self) -> None:
        for name in ("max_tokens", "checkpoint_steps", "eval_steps", "eval_items"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise TaskError(f"expected {name} >= 1, got {value}")


@dataclass(frozen=True)
class TrainResult:
    """What a training run did.

    Attributes:
        output: The folder that was made: an adapter, or a model where all parameters were trained.
        steps: Optimiser steps of the recipe.
        resumed_from: Step of the checkpoint this run began at; 0 for a fresh run.
        num_tokens: Tokens of all steps, shared prefixes counted once per row.
        num_answer_tokens: Of these, tokens with a loss.
        first_loss: Mean loss of the first tenth of the steps.
        last_loss: Mean loss of the last tenth.
        held_out_loss: Loss on the held-out items at the end; None if they were not evaluated.
        seconds: Of this run, preparation included.
    """

    output: Path
    steps: int
    resumed_from: int
    num_tokens: int
    num_answer_tokens: int
    first_loss: float
    last_loss: float
    held_out_loss: float | None
    seconds: float


def train_receiver(
    base: LoadedModel,
    task: Task,
    recipe: Recipe,
    output: Path,
    settings: TrainSettings | None = None,
    progress: Progress | None = None,
) -> TrainResult:
    """Train a receiver and write it: a PEFT LoRA in float16, or a model folder, and its curve.

    Checkpoints lie in `OUTPUT.training` until the output is written; a run that was killed goes on
    from the last one and ends as it would have. The base model is as it was when this returns.

    Args:
        base: The model to start from, in float32; its weights also write the shared KV.
        task: Its `train` split is learned.
        recipe: How; `recipe.task` and `recipe.options` have been used to make `task`.
        output: The folder to make.
        settings: What is no part of the recipe.
        progress: Told of every step.

    Raises:
        PairError: The recipe cannot be trained on this model, or the checkpoints are of another
            run.
        TaskError: An item has no answer or is too long.
        StorageError: `output` is there already, or a file could not be written.
    """
    started = time.perf_counter()
    settings = settings or TrainSettings()
    recipe.check_mode("the recipe")
    check_targets(base.model.model, recipe)
    checkpoints = Checkpoints(output)
    batches, held_out, num_held_out = _data(base, task, recipe, settings)
    resume = checkpoints.open(
        base,
        task,
        recipe,
        {"data": rows_digest([*batches, *held_out]), "eval_steps": settings.eval_steps},
    )
    with quiet(), trainable(base, recipe) as ready, writing_into(checkpoints.folder):
        trainer = RowTrainer(
            ready.module,
            row_losses(recipe.mode, ready.receiver, ready.base),
            training_arguments(
                checkpoints.folder,
                recipe,
                base.model.device,
                settings.checkpoint_steps,
                settings.eval_steps,
                is_resumed=resume is not None,
            ),
            batches,
            held_out,
            progress,
        )
        trainer.train(resume_from_checkpoint=resume)
        curve = Curve.of_log(
            recipe.mode,
            trainer.state.log_history,
            held_out_items=num_held_out,
            seconds=time.perf_counter() - started,
            command=settings.command,
        )

        def write(folder: Path) -> None:
            ready.write(folder)
            curve.write(folder / CURVE_FILE)

        checkpoints.finish(write)
    rows = [row for batch in batches for row in batch]
    tenth = max(1, recipe.steps // 10)
    return TrainResult(
        output=output,
        steps=recipe.steps,
        resumed_from=int(resume.rpartition("-")[2]) if resume else 0,
        num_tokens=sum(row.input_ids.shape[1] for row in rows),
        num_answer_tokens=sum(len(row.targets) for row in rows),
        first_loss=curve.mean_loss(slice(tenth)),
        last_loss=curve.mean_loss(slice(-tenth, None)),
        held_out_loss=curve.held_out[-1][1] if curve.held_out else None,
        seconds=time.perf_counter() - started,
    )


def _data(
    base: LoadedModel, task: Task, recipe: Recipe, settings: TrainSettings
) -> tuple[list[list[TrainingRow]], list[list[TrainingRow]], int]:
    """Rows of every step, rows of the held-out items, and how many items these are."""
    positions = getattr(base.model.config, "max_position_embeddings", settings.max_tokens)

    def rows(items: list[Item], num_batches: int, batch_size: int) -> list[list[TrainingRow]]:
        return training_batches(
            items,
            num_batches,
            batch_size,
            base.tokenizer,
            settings.chat,
            min(settings.max_tokens, positions),
            recipe.border_tokens,
            recipe.seed,
        )

    learned = task.items("train", recipe.steps * recipe.batch_size, recipe.seed)
    batches = rows(learned, recipe.steps, recipe.batch_size)
    if settings.eval_steps is None:
        return batches, [], 0
    unseen = task.items("calibration", settings.eval_items, recipe.seed)
    (together,) = rows(unseen, 1, len(unseen))
    return batches, [[row] for row in together], len(unseen)
