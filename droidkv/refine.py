"""Training the stitching map by what it is for: the answers behind a plan.

Ridge regression brings the mapped hidden state near the receiver's own one. This goes on from
there: the map of a plan's start is trained so that the receiver, answering through that plan,
predicts what it predicts after its own full prefill (a trained stitching layer, Bansal et al. 2021,
with the receiver as its own teacher). The models stay as they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor

from droidkv.cache import CapturedCache
from droidkv.errors import StitchError
from droidkv.evaluate import TokenItem
from droidkv.models import DecoderModel, keeping_requires_grad
from droidkv.plan import ReusePlan
from droidkv.prefill import read_suffix, recompute_group
from droidkv.stitch import StitchMap

_WARM_UP_STEPS = 20
_LAST_RATE_SHARE = 0.02


@dataclass(frozen=True)
class RefineSettings:
    """How a map is trained.

    Args:
        steps: Steps of AdamW, per plan.
        batch_size: Items per step.
        learning_rate: Highest one; it warms up, then falls along a cosine.
        suffix_weight: Weight of the KL over the suffix, beside 1 for the KL over the answer.
        seed: Of the order of the items.

    Raises:
        StitchError: A number is out of range.
    """

    steps: int = 200
    batch_size: int = 2
    learning_rate: float = 1e-3
    suffix_weight: float = 0.2
    seed: int = 0

    def __post_init__(self) -> None:
        for name, low in (("steps", 1), ("batch_size", 1), ("suffix_weight", 0)):
            if getattr(self, name) < low:
                raise StitchError(f"expected {name} >= {low}, got {getattr(self, name)}")
        if not 0 < self.learning_rate < float("inf"):
            raise StitchError(f"expected learning_rate > 0, got {self.learning_rate}")


@dataclass(frozen=True)
class RefineItem:
    """A calibration item, with both models' views of it.

    Args:
        answer: The item and the receiver's own answer.
        captured: The sender's cache of its prefix, with the E of the plans' starts.
        hidden: What leaves the receiver's last layer over the forced tokens after its own full
            prefill, `[1, num_forced, hidden]`.
    """

    answer: TokenItem
    captured: CapturedCache
    hidden: Tensor


def refine_stitch(
    receiver: DecoderModel,
    stitch: StitchMap,
    plan: ReusePlan,
    items: Sequence[RefineItem],
    settings: RefineSettings,
    on_step: Callable[[int, float], None] | None = None,
) -> StitchMap:
    """Train the map at the start of a plan; other starts stay.

    All items are held in memory, each with the sender's KV of its prefix.

    Args:
        receiver: The model that answers; unchanged afterwards.
        stitch: Where the training starts.
        plan: A stitched plan.
        items: Calibration items, never evaluated ones.
        settings: How long and how.
        on_step: Told the steps done and the KL of the step's answers in nats.

    Raises:
        StitchError: No item, or a plan that stitches nothing.
    """
    check_refinable([plan])
    if not items:
        raise StitchError("expected at least one item to train the map on, got none")
    with keeping_requires_grad(receiver.model):
        receiver.model.requires_grad_(False)
        trained = _train(receiver, plan, stitch, items, settings, on_step)
    return stitch.with_start(trained, plan.group.start)


def check_refinable(plans: Sequence[ReusePlan]) -> None:
    """Refuse plans that no map can be trained for.

    Raises:
        StitchError: There is none, one does not stitch, or two have one start.
    """
    starts = {plan.group.start for plan in plans if plan.operator == "stitch"}
    if not plans or len(starts) < len(plans):
        raise StitchError(
            "expected stitched plans of different starts above 0, such as '[15,24)+stitch', got "
            f"{', '.join(map(str, plans)) or 'none'}"
        )


def _train(
    receiver: DecoderModel,
    plan: ReusePlan,
    first: StitchMap,
    items: Sequence[RefineItem],
    settings: RefineSettings,
    on_step: Callable[[int, float], None] | None,
) -> StitchMap:
    """The map of the plan's start alone."""
    start = plan.group.start
    down, up, bias = parts = [
        part[start].to(receiver.device, torch.float32, copy=True).requires_grad_()
        for part in (first.down, first.up, first.bias)
    ]
    stitch = StitchMap({start: down}, {start: up}, {start: bias})
    optimizer = torch.optim.AdamW(parts, settings.learning_rate, (0.9, 0.99), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: _rate_share(step, settings.steps)
    )
    order = _endless(items, Random(settings.seed))
    for step in range(1, settings.steps + 1):
        optimizer.zero_grad()
        answer_kl = 0.0
        for _ in range(settings.batch_size):
            on_answer, on_suffix = _kl(receiver, plan, stitch, next(order))
            loss = (on_answer + settings.suffix_weight * on_suffix) / settings.batch_size
            loss.backward()  # type: ignore[no-untyped-call]
            answer_kl += on_answer.item() / settings.batch_size
        torch.nn.utils.clip_grad_norm_(parts, 1.0)
        optimizer.step()
        schedule.step()
        if on_step is not None:
            on_step(step, answer_kl)
    down, up, bias = (part.detach().cpu() for part in parts)
    return StitchMap({start: down}, {start: up}, {start: bias})


def _rate_share(step: int, steps: int) -> float:
    warm = min(1.0, (step + 1) / _WARM_UP_STEPS)
    return warm * ((1 + math.cos(math.pi * step / steps)) / 2 + _LAST_RATE_SHARE)


def _endless(items: Sequence[RefineItem], random: Random) -> Iterator[RefineItem]:
    while True:
        yield from random.sample(items, len(items))


def _kl(
    receiver: DecoderModel, plan: ReusePlan, stitch: StitchMap, item: RefineItem
) -> tuple[Tensor, Tensor]:
    """KL(full prefill || plan) in nats: means over the answer's steps, and over those before."""
    entering = stitch.apply(plan.group.start, item.captured.hidden[plan.group.start])
    context = recompute_group(receiver, entering, item.captured, plan)
    hidden = read_suffix(receiver, context, item.answer.forced_ids)
    log_probs = receiver.logits(hidden)[0].float().log_softmax(dim=-1)
    with torch.no_grad():
        full = receiver.logits(item.hidden)[0].float().log_softmax(dim=-1)
    kl = (full.exp() * (full - log_probs)).sum(dim=-1)
    num_answer = len(item.answer.answer_ids)
    before = kl[:-num_answer]
    return kl[-num_answer:].mean(), before.mean() if len(before) else kl.new_zeros(())
