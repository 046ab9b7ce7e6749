"""KV blocks that engines really hold for N models on one prefix, against what sharing promises."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peft
import torch
from transformers import AutoModelForCausalLM

from droidkv.adapter_folder import write_adapter
from droidkv.bench.timing import run_table
from droidkv.content import record_base, weights_sha256
from droidkv.errors import ServeError
from droidkv.model_identity import load_config
from droidkv.pair import ModelRef
from droidkv.provenance import provenance
from droidkv.run_folder import Progress, no_progress
from droidkv.servable import servable_folder
from droidkv.serve.processes import IN_PROCESS, end_of

MODES = ("baseline", "prefillshare", "icarus")
_FIRST_TOKEN_ID = 3
_RANK = 2


@dataclass(frozen=True)
class MemorySettings:
    """What to count.

    Attributes:
        folder: For adapters and logs.
        dtype: Of the base and its cache.
        num_models: The largest number of models.
        prefix_tokens: Tokens that all models share.
        question_tokens: Prompt tokens of each model's own.
        new_tokens: Generated tokens of each model's own.
        block_tokens: Tokens of one block.
        modes: Some of `MODES`.
        seed: Of the random tokens and adapters.
    """

    folder: Path
    dtype: str = "float32"
    num_models: int = 8
    prefix_tokens: int = 2048
    question_tokens: int = 200
    new_tokens: int = 20
    block_tokens: int = 32
    modes: tuple[str, ...] = MODES
    seed: int = 0

    @property
    def unique_tokens(self) -> int:
        return self.question_tokens + self.new_tokens


def bench_memory(
    base: ModelRef, settings: MemorySettings, command: str, progress: Progress = no_progress
) -> dict[str, Any]:
    """Count blocks for one to `num_models` models, in each mode.

    In `baseline` each model prefills for itself: vLLM's own LoRA, whose blocks no other adapter
    finds. In `prefillshare` the base has read the prefix, in one engine with its adapters. In
    `icarus` the base writes all KV. The adapters are random; how many blocks are held does not
    depend on what they say.

    Raises:
        ServeError: An engine ended; with the end of its log.
    """
    began = time.monotonic()
    folder = servable_folder(base, settings.dtype)
    config = load_config(ModelRef(str(folder.absolute())))
    adapters = _adapters(folder, config, settings)
    generator = torch.Generator().manual_seed(settings.seed)

    def tokens(number: int) -> list[int]:
        high = config.vocab_size
        return torch.randint(_FIRST_TOKEN_ID, high, (number,), generator=generator).tolist()

    setup = {
        "folder": str(folder),
        "architecture": config.architectures[0],
        "dtype": settings.dtype,
        "adapters": adapters,
        "block_tokens": settings.block_tokens,
        "prefix": tokens(settings.prefix_tokens),
        "questions": [tokens(settings.question_tokens) for _ in range(settings.num_models)],
        "new_tokens": settings.new_tokens,
    }
    rows = []
    for index, mode in enumerate(settings.modes):
        progress("modes", index, len(settings.modes))
        held = _count(mode, setup, settings.folder)
        rows += [memory_row(mode, number, blocks, settings) for number, blocks in held]
    progress("modes", len(settings.modes), len(settings.modes))
    made = provenance(
        command, settings.seed, "cpu", settings.dtype, round(time.monotonic() - began, 1)
    )
    return {
        **run_table(made),
        "model": base.name,
        "block_tokens": settings.block_tokens,
        "prefix_tokens": settings.prefix_tokens,
        "unique_tokens": settings.unique_tokens,
        "rows": rows,
    }


def memory_row(
    mode: str, number: int, held_blocks: int, settings: MemorySettings
) -> dict[str, Any]:
    """Blocks that were counted, beside the tokens that the mode's formula promises.

    Args:
        mode: One of `MODES`.
        number: Models.
        held_blocks: What the engine held.
        settings: What was counted.
    """
    shared, unique = settings.prefix_tokens, settings.unique_tokens
    is_shared = mode != "baseline"
    wanted = shared + number * unique if is_shared else number * (shared + unique)
    held = held_blocks * settings.block_tokens
    return {
        "mode": mode,
        "models": number,
        "held_blocks": held_blocks,
        "held_tokens": held,
        "formula": "L_shared + N*L_unique" if is_shared else "N*(L_shared + L_unique)",
        "formula_tokens": wanted,
        "relative_error_percent": round(100 * (held / wanted - 1), 3),
    }


def _adapters(folder: Path, config: Any, settings: MemorySettings) -> dict[str, str]:
    """Random adapters of q and o, which both modes take; one per model."""
    weights = weights_sha256(folder)
    made = {}
    for index in range(settings.num_models):
        path = (settings.folder / f"adapter-{index}").absolute()
        _write_random(path, config, settings.seed + index)
        record_base(path, weights, "icarus")
        made[path.name] = str(path)
    return made


def _write_random(folder: Path, config: Any, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    lora = peft.LoraConfig(r=_RANK, target_modules=["q_proj", "o_proj"], task_type="CAUSAL_LM")
    auto: Any = AutoModelForCausalLM  # its methods are untyped
    with torch.device("meta"):  # only names and shapes
        model = peft.get_peft_model(auto.from_config(config), lora)
    state = {
        name: 0.02 * torch.randn(tensor.shape, generator=generator)
        for name, tensor in peft.get_peft_model_state_dict(model).items()
    }
    write_adapter(folder, state, lora, "base")


def _count(mode: str, setup: Mapping[str, Any], folder: Path) -> list[tuple[int, int]]:
    """Number of models -> blocks, from an engine in a process of its own."""
    log = folder / f"{mode}.log"
    with log.open("wb") as file:
        ended = subprocess.run(
            [sys.executable, "-m", "droidkv.serve.vllm_held"],
            input=json.dumps({**setup, "mode": mode}).encode(),
            stdout=subprocess.PIPE,
            stderr=file,
            env={**os.environ, **IN_PROCESS},
        )
    counts: Sequence[int] = [int(line) for line in ended.stdout.split()]
    if ended.returncode or len(counts) != len(setup["adapters"]):
        raise ServeError(
            f"expected the engine of {mode!r} to count for {len(setup['adapters'])} models, but it "
            f"ended after {len(counts)}; {end_of(log)}"
        )
    return list(enumerate(counts, start=1))
