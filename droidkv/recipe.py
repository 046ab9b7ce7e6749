"""How a shipped receiver was trained: the [train] table of a pair file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from droidkv.errors import PairError
from droidkv.fields import Fields

Method = Literal["lora", "full"]
METHODS: tuple[Method, ...] = ("lora", "full")
ALL_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Recipe:
    """A seeded training run that turns the sender's base into the receiver.

    Attributes:
        task: Name of the task whose `train` split is learned.
        steps: Optimiser steps.
        learning_rate: Peak learning rate.
        options: The task's options.
        method: `lora` trains an adapter, `full` all parameters.
        rank: Rank of the LoRA matrices; of no use with `full`.
        alpha: Scale of the LoRA update (`alpha / rank`).
        target_modules: Linear layers that get LoRA matrices.
        first_layer: Decoder layers below it keep the base's weights, so the receiver's hidden state
            there is the sender's; 0 trains all layers.
        batch_size: Items per optimiser step.
        warmup_steps: Steps over which the learning rate rises from zero.
        weight_decay: Decoupled weight decay.
        max_grad_norm: Gradients are scaled down to this norm.
        autocast: Compute in bfloat16 where that is safe; weights and optimiser stay in float32.
            Faster on GPUs and on CPUs with AVX-512 BF16 or AMX, slower on others.
        seed: Seed of the data order and of the matrices' initial values.
    """

    task: str
    steps: int
    learning_rate: float
    options: Mapping[str, object] = field(default_factory=dict, hash=False)
    method: Method = "lora"
    rank: int = 16
    alpha: float = 32.0
    target_modules: tuple[str, ...] = ALL_PROJECTIONS
    first_layer: int = 0
    batch_size: int = 8
    warmup_steps: int = 0
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    autocast: bool = False
    seed: int = 0

    @classmethod
    def from_table(cls, table: object, where: str) -> Recipe:
        """Read the [train] table.

        Raises:
            PairError: A value is missing, of the wrong kind or out of range, or a key is unknown.
        """
        fields = Fields(table, where, PairError)
        recipe = cls(
            task=fields.take("task", str),
            steps=fields.take("steps", int, minimum=1),
            learning_rate=fields.take("learning_rate", float, minimum=0.0, maximum=1.0),
            options=fields.take("options", dict, {}),
            method=fields.take("method", str, cls.method, choices=METHODS),  # type: ignore[arg-type]
            rank=fields.take("rank", int, cls.rank, minimum=1),
            alpha=fields.take("alpha", float, cls.alpha, minimum=0.0),
            target_modules=fields.take_list("target_modules", str, cls.target_modules),
            first_layer=fields.take("first_layer", int, cls.first_layer, minimum=0),
            batch_size=fields.take("batch_size", int, cls.batch_size, minimum=1),
            warmup_steps=fields.take("warmup_steps", int, cls.warmup_steps, minimum=0),
            weight_decay=fields.take("weight_decay", float, cls.weight_decay, minimum=0.0),
            max_grad_norm=fields.take("max_grad_norm", float, cls.max_grad_norm, minimum=0.0),
            autocast=fields.take("autocast", bool, cls.autocast),
            seed=fields.take("seed", int, cls.seed, minimum=0),
        )
        fields.done()
        if not recipe.target_modules:
            raise PairError(f"{where}: expected at least one name in target_modules, got none")
        return recipe
