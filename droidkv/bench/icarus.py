"""Decoding with an identical cache: the fused step against two passes and against plain models."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import peft
import torch
from torch import Tensor

from droidkv.bench.timing import Elapsed, median, random_tokens, rounded, surroundings, timed
from droidkv.cache import TokenAxis
from droidkv.errors import PlanError
from droidkv.models import DecoderModel, LayerCache, TwoStreamModel, read_kv_in_place
from droidkv.models import Step as LayerStep
from droidkv.prefill import Context, forward, full_prefill, read_only
from droidkv.recipe import default_targets
from droidkv.run_folder import Progress, no_progress

Step = Callable[[Tensor], Tensor]
BATCHES = (1, 8, 32)
DECODERS = (1, 2, 4, 8)
RANK = 8


def bench_icarus(
    base: DecoderModel,
    batches: Sequence[int] = BATCHES,
    decoders: Sequence[int] = DECODERS,
    prefix_tokens: int = 512,
    num_steps: int = 8,
    num_repeats: int = 5,
    seed: int = 0,
    command: str = "",
    on_progress: Progress = no_progress,
) -> dict[str, object]:
    """Time a decoding step four ways, on random tokens and random adapters.

    `fused` is `TwoStreamModel`; `two_passes` runs the base for KV and then a merged decoder with
    weights of its own; `two_passes_one_copy` does it with the adapter beside the base's weights;
    `plain` is one merged model that decodes on its own KV.

    By batch, all rows have one decoder. By decoders, N of them answer on one prefix: fused in one
    step of N rows; in two passes one base step of N rows and then each decoder; plain as N models
    one after the other, each on KV of its own.

    Args:
        base: The frozen base. Left as it is.
        batches: Numbers of rows.
        decoders: Numbers of decoders on one prefix.
        prefix_tokens: Tokens read before.
        num_steps: Steps of one timed run.
        num_repeats: Timed runs; the median counts. One more warms up.
        seed: Of tokens and adapters.
        command: What reproduces the result; kept in it.
        on_progress: Told of each timed setting.

    Raises:
        PlanError: A number is below 1.
    """
    if min(*batches, *decoders, prefix_tokens, num_steps, num_repeats) < 1:
        raise PlanError("expected numbers of at least 1 of batches, decoders, tokens and repeats")
    started = time.perf_counter()
    models = Models(base, max(decoders), seed)
    settings = [(count, 1) for count in batches] + [(count, count) for count in decoders]
    rows = []
    for done, (num_rows, num_decoders) in enumerate(settings, start=1):
        prefix = torch.tensor([random_tokens(base, prefix_tokens, seed)], device=base.device)
        token = torch.tensor([random_tokens(base, 1, seed + 1)], device=base.device)
        ways = models.ways(prefix, num_rows, num_decoders)
        rows.append(_row(num_rows, num_decoders, _measure(ways, token, num_steps, num_repeats)))
        on_progress("icarus", done, len(settings))
    result: dict[str, object] = {
        "prefix_tokens": prefix_tokens,
        "num_steps": num_steps,
        "num_repeats": num_repeats,
        "rank": RANK,
        "by_batch": rows[: len(batches)],
        "by_decoders": rows[len(batches) :],
    }
    return result | surroundings(base, seed, command, time.perf_counter() - started)


class Models:
    """The base with adapters beside it, and one decoder with its adapter merged in."""

    def __init__(self, base: DecoderModel, num_adapters: int, seed: int) -> None:
        self.names = [f"decoder{index}" for index in range(num_adapters)]
        merged = _adapted(copy.deepcopy(base.model), self.names[:1], seed).merge_and_unload()
        beside = _adapted(_sharing(base.model), self.names[:1], seed).get_base_model()
        fused = _adapted(_sharing(base.model), self.names, seed).get_base_model()
        self.base = _like_fused(_sharing(base.model))
        self.merged, self.beside = _like_fused(merged), _Decoder(beside.eval(), self.names[:1])
        self.fused = TwoStreamModel(fused.eval())

    def ways(self, prefix: Tensor, num_rows: int, num_decoders: int) -> dict[str, Step]:
        """Each way of decoding one token on a prefix of its own."""
        self.fused.adapters = tuple(self.names[:num_decoders])
        context = full_prefill(self.base, prefix)
        wide = Context.batch([context] * num_rows)
        one_each = num_decoders > 1
        return {
            "fused": _plain_step(self.fused, wide.fork(), num_rows),
            "two_passes": self._two_passes(self.merged, wide.fork(), num_rows, one_each),
            "two_passes_one_copy": self._two_passes(self.beside, wide.fork(), num_rows, one_each),
            "plain": _in_turn(
                [_plain_step(self.merged, context.fork(), 1) for _ in range(num_rows)]
            )
            if one_each
            else _plain_step(self.merged, wide.fork(), num_rows),
        }

    def _two_passes(
        self, decoder: DecoderModel, context: Context, num_rows: int, one_each: bool
    ) -> Step:
        """The base writes KV of all rows; then all rows decode, together or one by one."""

        def step(token: Tensor) -> Tensor:
            ids = token.expand(num_rows, 1)
            axis = TokenAxis(context.axis.next_position)
            _write_only(self.base, context, self.base.embed(ids), axis)
            parts = _rows(context) if one_each else [context]
            hidden = decoder.embed(ids)
            states = [
                read_only(decoder, part, part_hidden, TokenAxis(part.axis.positions[:, -1:]))
                for part, part_hidden in zip(parts, hidden.chunk(len(parts)), strict=True)
            ]
            return torch.cat([decoder.logits(state) for state in states])

        return step


class _Decoder(TwoStreamModel):
    """The logical decoder by itself: its adapter is applied as a fused step does it."""

    def embed(self, input_ids: Tensor) -> Tensor:
        return self.embed_prefix(input_ids)

    def run_layer(self, layer: int, hidden: Tensor, step: LayerStep, cache: LayerCache) -> Tensor:
        self._routes = [(self.adapters[0], slice(None))]
        return DecoderModel.run_layer(self, layer, hidden, step, cache)

    def logits(self, hidden: Tensor) -> Tensor:
        return DecoderModel.logits(self, hidden)


def _write_only(model: DecoderModel, context: Context, hidden: Tensor, axis: TokenAxis) -> None:
    """Append the tokens' KV to the context; the last layer's attention and MLP do not run."""
    context.axis = context.axis.cat(axis)
    step = model.step(axis, context.axis)
    for layer in range(model.num_layers - 1):
        hidden = model.run_layer(layer, hidden, step, context.cache)
    model.store_kv(model.num_layers - 1, hidden, step, context.cache)


def _rows(context: Context) -> list[Context]:
    """Each row of a context, without copying."""
    caches = [context.cache.layer(layer) for layer in range(len(context.cache.keys))]
    return [
        Context(
            type(context.cache)(
                [keys[row : row + 1] for keys, _ in caches],
                [values[row : row + 1] for _, values in caches],
            ),
            TokenAxis(context.axis.positions[row : row + 1]),
        )
        for row in range(len(context.axis.positions))
    ]


def _plain_step(model: DecoderModel, context: Context, num_rows: int) -> Step:
    def step(token: Tensor) -> Tensor:
        axis = TokenAxis(context.axis.next_position)
        hidden = forward(model, context, model.embed(token.expand(num_rows, 1)), axis)
        return model.logits(hidden)

    return step


def _in_turn(steps: Iterable[Step]) -> Step:
    listed = list(steps)
    return lambda token: torch.cat([step(token) for step in listed])


def _like_fused(model: Any) -> DecoderModel:
    """With the attention that a fused step has, so that only the ways differ."""
    decoder = DecoderModel(model.eval())
    read_kv_in_place(model)
    return decoder


def _sharing(model: Any) -> Any:
    """A copy of a model's modules around the very same weights."""
    return copy.deepcopy(model, {id(weight): weight for weight in model.parameters()})


def _adapted(model: Any, names: Sequence[str], seed: int) -> Any:
    """A model with random adapters put into it; the first is the same for the same seed."""
    targets = list(default_targets("icarus"))
    config = peft.LoraConfig(r=RANK, target_modules=targets, init_lora_weights=False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        tuned: Any = peft.get_peft_model(model, config, adapter_name=names[0])
        for name in names[1:]:
            tuned.add_adapter(name, config)
    return tuned


@torch.no_grad()
def _measure(
    ways: dict[str, Step], token: Tensor, num_steps: int, num_repeats: int
) -> dict[str, list[Elapsed]]:
    """Runs of each way, in turn, so that what else the machine does hits all alike."""
    runs: dict[str, list[Elapsed]] = {name: [] for name in ways}
    for repeat in range(num_repeats + 1):
        for name, step in ways.items():
            _, elapsed = timed(token.device, _steps, step, token, num_steps)
            if repeat:
                runs[name].append(elapsed)
    return runs


def _steps(step: Step, token: Tensor, num_steps: int) -> None:
    for _ in range(num_steps):
        step(token)


def _row(num_rows: int, num_decoders: int, runs: dict[str, list[Elapsed]]) -> dict[str, object]:
    seconds = {name: median(each).seconds for name, each in runs.items()}
    fused = seconds["fused"]
    return {
        "rows": num_rows,
        "decoders": num_decoders,
        "seconds": {name: rounded(value) for name, value in seconds.items()},
        "two_passes_ratio": rounded(seconds["two_passes"] / fused),
        "two_passes_one_copy_ratio": rounded(seconds["two_passes_one_copy"] / fused),
        "overhead_over_plain": rounded(fused / seconds["plain"]),
        "fused_seconds_min": rounded(min(run.seconds for run in runs["fused"])),
        "fused_seconds_max": rounded(max(run.seconds for run in runs["fused"])),
    }
