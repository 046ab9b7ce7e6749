"""transformers' Trainer over training rows: their order, their loss, what it reports."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.utils.data import SequentialSampler

from droidkv.errors import PairError
from droidkv.recipe import Recipe
from droidkv.training.losses import RowLosses
from droidkv.training.rows import TrainingRow

Progress = Callable[[int, int, float], None]
"""Called after each optimiser step with the step, the number of steps and the step's loss."""


class RowTrainer(transformers.Trainer):
    """Takes batches of `TrainingRow`s, in the order they come.

    Rows have their own length and are run one by one, so nothing is padded.

    Args:
        module: What is optimised.
        losses: The loss of some rows.
        arguments: transformers' settings.
        batches: The rows of every optimiser step.
        held_out: Rows to evaluate on during training.
        progress: Told of every step.
    """

    def __init__(
        self,
        module: nn.Module,
        losses: RowLosses,
        arguments: transformers.TrainingArguments,
        batches: list[list[TrainingRow]],
        held_out: list[list[TrainingRow]],
        progress: Progress | None,
    ) -> None:
        super().__init__(
            model=module,
            args=arguments,
            train_dataset=batches,
            eval_dataset=held_out or None,
            data_collator=_only,
            callbacks=[] if progress is None else [_Report(progress)],
        )
        self.remove_callback(transformers.PrinterCallback)
        self._losses = losses

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
        model.eval()  # no dropout, here as in what is served
        # transformers leaves autocast to accelerate, which puts it around the model's own forward;
        # the layers are called one by one here.
        with self.accelerator.autocast():
            loss = self._losses(inputs["rows"]).mean()
        if not loss.isfinite():
            raise PairError(
                f"expected a finite loss, got {loss.item()} after step {self.state.global_step}; "
                f"remove {self.args.output_dir} and train with a lower learning_rate or more "
                "warmup_steps"
            )
        return (loss, None) if return_outputs else loss

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The loss of held-out rows."""
        with torch.no_grad():
            return self.compute_loss(model, inputs).detach(), None, None


def training_arguments(
    folder: Path,
    recipe: Recipe,
    device: torch.device,
    checkpoint_steps: int,
    eval_steps: int | None,
    is_resumed: bool,
) -> transformers.TrainingArguments:
    """transformers' settings of a recipe.

    Args:
        folder: Where checkpoints go.
        recipe: The recipe.
        device: Where the model is.
        checkpoint_steps: Steps between checkpoints.
        eval_steps: Steps between evaluations; None = none.
        is_resumed: The run goes on from a checkpoint, whose curve has its beginning.

    Raises:
        PairError: The device is a GPU that transformers would not take.
    """
    if device.type == "cuda" and device.index:
        raise PairError(
            f"expected the first GPU that can be seen, got {device}; choose one with "
            f"CUDA_VISIBLE_DEVICES={device.index} and the device cuda"
        )
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=recipe.steps,
        per_device_train_batch_size=1,  # one element of the data set is a whole batch of rows
        per_device_eval_batch_size=1,
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
        eval_strategy="no" if eval_steps is None else "steps",
        eval_steps=eval_steps,
        eval_on_start=eval_steps is not None and not is_resumed,
        prediction_loss_only=True,
        logging_steps=1,
        logging_nan_inf_filter=False,
        disable_tqdm=True,
        report_to=[],
        remove_unused_columns=False,
        dataloader_pin_memory=False,
    )
    if arguments.device.type == "cuda":
        arguments._n_gpu = 1  # a batch is one element, which is not to be split among GPUs
    return arguments


class _Report(transformers.TrainerCallback):
    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        logs = kwargs.get("logs") or {}
        if "loss" in logs:
            self._progress(state.global_step, state.max_steps, float(logs["loss"]))


def _only(batch: list[list[TrainingRow]]) -> dict[str, list[TrainingRow]]:
    (rows,) = batch
    return {"rows": rows}
