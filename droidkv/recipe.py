"""How a shipped receiver was trained: the [train] table of a pair file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from droidkv.errors import PairError
from droidkv.fields import Fields

Mode = Literal["plain", "prefillshare", "icarus"]
MODES: tuple[Mode, ...] = get_args(Mode)
Method = Literal["lora", "full"]
METHODS: tuple[Method, ...] = get_args(Method)
ALL_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
# Of these, what writes KV. The logical decoder of ICaRus reads the base's KV only.
KV_PROJECTIONS = ("k_proj", "v_proj")


@dataclass(frozen=True)
class Recipe:
    """A seeded training run that turns the sender's base into the receiver.

    Attributes:
        task: Name of the task whose `train` split is learned.
        steps: Optimiser steps.
        learning_rate: Peak learning rate.
        options: The task's options.
        mode: What the receiver reads while it learns: `plain` its own KV; `prefillshare` the frozen
            base's KV of the prefix; `icarus` the frozen base's KV of every token.
        method: `lora` trains an adapter, `full` all parameters.
        rank: Rank of the LoRA matrices.
        alpha: Scale of the LoRA update (`alpha / rank`).
        target_modules: Linear layers that get LoRA matrices; by default all, under `icarus` all
            but those that write KV. These three are of no use with `full`.
        first_layer: Decoder layers below it keep the base's weights, so the receiver's hidden state
            there is the sender's; 0 trains all layers.
        border_tokens: Under `prefillshare`, the sender reads up to so many tokens less than the
            prefix, drawn anew for each context: a server that shares whole blocks moves the border
            too. 0 = the whole prefix.
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
    mode: Mode = "plain"
    method: Method = "lora"
    rank: int = 16
    alpha: float = 32.0
    target_modules: tuple[str, ...] = ALL_PROJECTIONS
    first_layer: int = 0
    border_tokens: int = 0
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
            PairError: A value is missing, of the wrong kind or out of range, a key is unknown, or
                the mode cannot be trained that way (see `check_mode`).
        """
        fields = Fields(table, where, PairError)
        mode: Mode = fields.take("mode", str, cls.mode, choices=MODES)  # type: ignore[arg-type]
        recipe = cls(
            task=fields.take("task", str),
            steps=fields.take("steps", int, minimum=1),
            learning_rate=fields.take("learning_rate", float, minimum=0.0, maximum=1.0),
            options=fields.take("options", dict, {}),
            mode=mode,
            method=fields.take("method", str, cls.method, choices=METHODS),  # type: ignore[arg-type]
            rank=fields.take("rank", int, cls.rank, minimum=1),
            alpha=fields.take("alpha", float, cls.alpha, minimum=0.0),
            target_modules=fields.take_list("target_modules", str, default_targets(mode)),
            first_layer=fields.take("first_layer", int, cls.first_layer, minimum=0),
            border_tokens=fields.take("border_tokens", int, cls.border_tokens, minimum=0),
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
        recipe.check_mode(where)
        return recipe

    def check_mode(self, where: str) -> None:
        """Do nothing if what the recipe trains can be trained in its mode.

        Args:
            where: Name of the place, for messages.

        Raises:
            PairError: `icarus` with modules that write KV, or with all parameters; a border without
                `prefillshare`.
        """
        if self.border_tokens and self.mode != "prefillshare":
            raise PairError(
                f"{where}: expected border_tokens with mode 'prefillshare' only, got it with mode "
                f"{self.mode!r}, which has no border; leave it out"
            )
        if self.mode != "icarus":
            return
        if self.method != "lora":
            raise PairError(
                f"{where}: expected method 'lora' with mode 'icarus', got {self.method!r}: encoder "
                "and decoder run through one copy of the base's weights, so the decoder can differ "
                "by an adapter only"
            )
        if dead := [name for name in self.target_modules if name in KV_PROJECTIONS]:
            raise PairError(
                f"{where}: expected target_modules without {' and '.join(KV_PROJECTIONS)} with "
                f"mode 'icarus', got {', '.join(dead)}: the decoder reads the KV that the frozen "
                "base writes, so weights there would never be used; leave them out"
            )


def default_targets(mode: Mode) -> tuple[str, ...]:
    """The modules that get LoRA matrices where the recipe names none."""
    if mode != "icarus":
        return ALL_PROJECTIONS
    return tuple(name for name in ALL_PROJECTIONS if name not in KV_PROJECTIONS)
