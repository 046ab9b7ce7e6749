"""What a calibration times: the steps of a prefill, and whole requests, at several lengths."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from droidkv.bench.timing import random_tokens
from droidkv.cache import CapturedCache, KVCache, TokenAxis
from droidkv.calibration_fit import Sample
from droidkv.costs import plan_bytes
from droidkv.models import DecoderModel, Step
from droidkv.plan import ReusePlan
from droidkv.prefill import Context, forward_suffix, partial_prefill

LAYERS_TIMED = 6
SUFFIX_TOKENS = (1, 8, 64)
HELD_OUT_SUFFIX_TOKENS = 24


@dataclass(frozen=True)
class TimedStep:
    """Something to time.

    Attributes:
        sample: What it is made of; its `seconds` are filled in later.
        run: Does it.
        held_out: For requests that are not fitted: the plan, n and m.
    """

    sample: Sample
    run: Callable[[], object]
    held_out: tuple[ReusePlan, int, int] | None = None


class Steps:
    """All that is timed, on random tokens and states; times do not depend on the values.

    Args:
        model: Runs them.
        longest: Longest prefix.
        folder: Takes the captured caches that loads are timed on.
        seed: Of tokens and states.
    """

    def __init__(self, model: DecoderModel, longest: int, folder: Path, seed: int) -> None:
        self.model = model
        self.folder = folder
        self.seed = seed
        self.lengths = [max(16, longest // 16), longest // 4, longest // 2, longest]
        self.held_out_lengths = [3 * longest // 8, 3 * longest // 4]
        num_layers = model.num_layers
        self.layers = range(min(LAYERS_TIMED, num_layers))
        half, third = num_layers // 2, num_layers // 3
        self.fitted_plans = [
            ReusePlan.of(0, 0),
            ReusePlan.of(half, num_layers),
            ReusePlan.of(0, num_layers),
        ]
        self.held_out_plans = [
            ReusePlan.of(0, 0),
            ReusePlan.of(third, max(2 * third, third + 1)),
            ReusePlan.of(max(0, third - 1), num_layers - 1),
            ReusePlan.of(0, num_layers),
        ]

    @torch.no_grad()
    def all(self) -> list[TimedStep]:
        """Every step of a round."""
        steps = [*self._prefix_steps(), self._logits_step()]
        for length in self.lengths[1:]:
            steps += self._suffix_steps(length)
        for length in self.lengths[1:3]:
            captured = self._captured(length)
            steps += self._load_steps(captured, length)
            steps += [self._request(captured, plan, length) for plan in self.fitted_plans]
        for length in self.held_out_lengths:
            steps += self._held_out(length)
        return steps

    def _prefix_steps(self) -> Iterable[TimedStep]:
        model, count = self.model, len(self.layers)
        for length in self.lengths:
            hidden, step = random_prefix(model, length, self.seed)
            yield TimedStep(
                Sample(1, prefix_tokens=length, num_full_layers=count),
                partial(run_layers, model, self.layers, hidden, step),
            )
            yield TimedStep(
                Sample(1, prefix_tokens=length, num_kv_only_layers=count),
                partial(_store_layers, model, self.layers, hidden, step),
            )

    def _suffix_steps(self, length: int) -> Iterable[TimedStep]:
        captured = self._captured(length)
        context = Context(KVCache([*captured.keys], [*captured.values]), captured.axis)
        for num_tokens in SUFFIX_TOKENS:
            suffix = self._tokens(num_tokens)
            yield TimedStep(
                Sample(
                    1,
                    prefix_tokens=length,
                    suffix_tokens=num_tokens,
                    num_suffix_layers=self.model.num_layers,
                ),
                partial(_read_suffix, self.model, context, suffix),
            )

    def _logits_step(self) -> TimedStep:
        hidden = self._normal(1, 1, self.model.shape.hidden_size)
        return TimedStep(Sample(1, num_logits=1), partial(_logits, self.model, hidden))

    def _load_steps(self, captured: CapturedCache, length: int) -> Iterable[TimedStep]:
        path = self._save(captured, length)
        for plan in (self.fitted_plans[0], self.fitted_plans[1]):
            yield TimedStep(
                Sample(1, num_load_bytes=plan_bytes(self.model.shape, plan, length)),
                partial(load_for_plan, path, plan, self.model.num_layers, self.model.device),
            )

    def _request(self, captured: CapturedCache, plan: ReusePlan, length: int) -> TimedStep:
        prefix, suffix = self._tokens(length), self._tokens(SUFFIX_TOKENS[1])
        return TimedStep(
            Sample.of_request(self.model.shape, plan, length, suffix.shape[1], 1),
            partial(_answer, self.model, prefix, suffix, captured, plan),
        )

    def _held_out(self, length: int) -> Iterable[TimedStep]:
        path = self._save(self._captured(length), length)
        prefix, suffix = self._tokens(length), self._tokens(HELD_OUT_SUFFIX_TOKENS)
        for plan in self.held_out_plans:
            yield TimedStep(
                Sample(1),
                partial(_load_and_answer, self.model, prefix, suffix, path, plan),
                held_out=(plan, length, HELD_OUT_SUFFIX_TOKENS),
            )

    def _captured(self, length: int) -> CapturedCache:
        shape = self.model.shape
        size = (1, shape.num_kv_heads, length, shape.head_dim)
        starts = {plan.transition for plan in (*self.fitted_plans, *self.held_out_plans)} - {None}
        return CapturedCache(
            keys=[self._normal(*size) for _ in range(shape.num_layers)],
            values=[self._normal(*size) for _ in range(shape.num_layers)],
            hidden={i: self._normal(1, length, shape.hidden_size) for i in starts if i},
            axis=_axis(length, self.model.device),
        )

    def _save(self, captured: CapturedCache, length: int) -> Path:
        path = self.folder / f"{length}.safetensors"
        captured.save(path)
        return path

    def _tokens(self, num_tokens: int) -> Tensor:
        ids = random_tokens(self.model, num_tokens, self.seed)
        return torch.tensor([ids], device=self.model.device)

    def _normal(self, *size: int) -> Tensor:
        return _normal(self.model, size, self.seed)


@torch.no_grad()
def load_for_plan(
    path: Path, plan: ReusePlan, num_layers: int, device: torch.device
) -> CapturedCache:
    """Bring what a plan reads from a captured cache's file to the device, and no more.

    Layers of the group hold empty tensors.

    Args:
        path: What `CapturedCache.save` wrote.
        plan: The plan.
        num_layers: Layers of the cache.
        device: Where it is wanted.
    """
    nothing = torch.empty(0, device=device)
    with safe_open(path, framework="pt") as file:

        def fetch(name: str) -> Tensor:
            # On a CPU the tensor is a view of the mapped file; a copy reads it.
            return file.get_tensor(name).to(device, copy=True)  # type: ignore[no-any-return]

        reused = [layer not in plan.group for layer in range(num_layers)]
        start = plan.transition
        return CapturedCache(
            keys=[fetch(f"keys.{i}") if reused[i] else nothing for i in range(num_layers)],
            values=[fetch(f"values.{i}") if reused[i] else nothing for i in range(num_layers)],
            hidden={} if start is None else {start: fetch(f"hidden.{start}")},
            axis=TokenAxis(fetch("positions")),
        )


def _axis(length: int, device: torch.device) -> TokenAxis:
    return TokenAxis(torch.arange(length, device=device)[None])


def _normal(model: DecoderModel, size: Sequence[int], seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, generator=generator).to(model.device, model.dtype)


def random_prefix(model: DecoderModel, length: int, seed: int) -> tuple[Tensor, Step]:
    """A random hidden state `[1, length, hidden_size]`, and the forward step to run it by."""
    axis = _axis(length, model.device)
    return _normal(model, (1, length, model.shape.hidden_size), seed), model.step(axis, axis)


@torch.no_grad()
def run_layers(model: DecoderModel, layers: range, hidden: Tensor, step: Step) -> None:
    """Run consecutive layers over a prefix, as recomputing them does."""
    cache = KVCache.empty(model.num_layers)
    for layer in layers:
        hidden = model.run_layer(layer, hidden, step, cache)


@torch.no_grad()
def _store_layers(model: DecoderModel, layers: range, hidden: Tensor, step: Step) -> None:
    cache = KVCache.empty(model.num_layers)
    for layer in layers:
        model.store_kv(layer, hidden, step, cache)


def _read_suffix(model: DecoderModel, context: Context, suffix: Tensor) -> None:
    forward_suffix(model, context.fork(), suffix)


@torch.no_grad()
def _logits(model: DecoderModel, hidden: Tensor) -> None:
    model.logits(hidden)


@torch.no_grad()
def _answer(
    model: DecoderModel, prefix: Tensor, suffix: Tensor, captured: CapturedCache, plan: ReusePlan
) -> None:
    context = partial_prefill(model, prefix, captured, plan)
    model.logits(forward_suffix(model, context, suffix)[:, -1])


def _load_and_answer(
    model: DecoderModel, prefix: Tensor, suffix: Tensor, path: Path, plan: ReusePlan
) -> None:
    captured = load_for_plan(path, plan, model.num_layers, model.device)
    _answer(model, prefix, suffix, captured, plan)
