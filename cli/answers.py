"""The same question answered three ways: full prefill, naive full reuse, and a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from droidkv.bench.timing import timed
from droidkv.capture import capture
from droidkv.encode import EncodedItem
from droidkv.loading import LoadedModel
from droidkv.plan import ReusePlan
from droidkv.prefill import Context, full_prefill, generate, partial_prefill
from droidkv.stitch import StitchMap


@dataclass(frozen=True)
class Answer:
    """One answer and what it took.

    Attributes:
        method: How the prefix was prefilled, for people.
        plan: The plan as text.
        text: The decoded answer.
        prefill_seconds: From the request, the sender's cache being in memory, to the first token:
            what is recomputed of the prefix, and the suffix.
    """

    method: str
    plan: str
    text: str
    prefill_seconds: float


def answer_each_way(
    sender: LoadedModel,
    receiver: LoadedModel,
    item: EncodedItem,
    plans: Sequence[tuple[str, ReusePlan]],
    max_new_tokens: int,
    stitch: StitchMap | None = None,
) -> list[Answer]:
    """Answer one item by the receiver's own full prefill, and by each plan.

    Args:
        sender: Prefills the prefix, untimed.
        receiver: Answers.
        item: Tokens of the item.
        plans: Name and plan of each other way.
        max_new_tokens: Most tokens of an answer.
        stitch: The map, for plans that use it.
    """
    model = receiver.model
    prefix, suffix = (torch.tensor([ids]) for ids in (item.prefix_ids, item.suffix_ids))
    needed = {plan.transition for _, plan in plans if plan.transition is not None}
    captured = capture(sender.model, prefix, hidden_layers=needed)
    full = ReusePlan.of(0, model.num_layers)
    answers = []
    for name, plan in [("full prefill", full), *plans]:

        def first_token(plan: ReusePlan = plan) -> Context:
            if plan == full:
                context = full_prefill(model, prefix)
            else:
                context = partial_prefill(model, prefix, captured, plan, stitch)
            generate(model, context.fork(), suffix, 1, receiver.eos_ids)
            return context

        context, elapsed = timed(model.device, first_token)
        (ids,) = generate(model, context, suffix, max_new_tokens, receiver.eos_ids)
        text = receiver.tokenizer.decode(ids, skip_special_tokens=True).strip()
        answers.append(Answer(name, str(plan), text, elapsed.seconds))
    return answers


def warm_up(receiver: LoadedModel, item: EncodedItem) -> None:
    """Run the item once, so that the first timed pass does not pay for what is done once."""
    full_prefill(receiver.model, torch.tensor([item.prefix_ids]))
