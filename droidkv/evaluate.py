"""One item under one plan: how far the receiver drifts from its own full prefill.

Nothing need be decoded to know whether a plan reproduces the full prefill's greedy answer: that
answer is forced through the plan once, and the plan reproduces it iff every argmax agrees.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from droidkv.cache import CapturedCache
from droidkv.errors import PlanError
from droidkv.models import DecoderModel
from droidkv.plan import ReusePlan
from droidkv.prefill import Context, forward_suffix, full_prefill, generate, partial_prefill
from droidkv.stitch import StitchMap

# Plans decoded side by side: each holds a cache of its own.
PLANS_PER_BATCH = 8


@dataclass(frozen=True)
class TokenItem:
    """An item as token ids, with the receiver's own full-prefill answer.

    Args:
        prefix_ids: Tokens both models share.
        suffix_ids: Tokens only the receiver reads.
        answer_ids: The receiver's greedy answer after its own full prefill.
        log_probs: The receiver's log-probabilities of each answer token's step,
            `[num_answer_tokens, vocab]`, after its own full prefill.
    """

    prefix_ids: Tensor
    suffix_ids: Tensor
    answer_ids: Tensor
    log_probs: Tensor

    @property
    def forced_ids(self) -> Tensor:
        """What a plan reads to predict every answer token: `[1, num_suffix + num_answer - 1]`."""
        return torch.cat([self.suffix_ids, self.answer_ids[:-1]])[None]


@dataclass(frozen=True)
class TeacherForced:
    """A plan against the full prefill on one item, with the full prefill's answer forced.

    Args:
        kl: Mean over answer tokens of KL(full prefill || plan), in nats.
        nll: Mean negative log-likelihood of the answer tokens under the plan, in nats.
        top1: Share of answer tokens that are the plan's argmax.
        agrees: Every argmax agrees: the plan decodes the very same answer.
    """

    kl: float
    nll: float
    top1: float
    agrees: bool


def full_prefill_answer(
    receiver: DecoderModel,
    prefix_ids: Sequence[int],
    suffix_ids: Sequence[int],
    max_new_tokens: int,
    eos_ids: Collection[int],
) -> TokenItem:
    """Let the receiver answer on its own, and keep the distributions behind the answer.

    Raises:
        PlanError: The prefix or the suffix is empty.
    """
    item, _ = full_prefill_states(receiver, prefix_ids, suffix_ids, max_new_tokens, eos_ids)
    return item


@torch.no_grad()
def full_prefill_states(
    receiver: DecoderModel,
    prefix_ids: Sequence[int],
    suffix_ids: Sequence[int],
    max_new_tokens: int,
    eos_ids: Collection[int],
) -> tuple[TokenItem, Tensor]:
    """The same, with what leaves the last layer over the forced tokens.

    Returns:
        The item, and hidden states `[1, num_forced, hidden]`.

    Raises:
        PlanError: The prefix or the suffix is empty.
    """
    if not prefix_ids or not suffix_ids:
        raise PlanError(
            f"expected a prefix and a suffix of at least one token, got {len(prefix_ids)} and "
            f"{len(suffix_ids)}"
        )
    prefix, suffix = torch.tensor(prefix_ids), torch.tensor(suffix_ids)
    context = full_prefill(receiver, prefix[None])
    (answer_ids,) = generate(receiver, context.fork(), suffix[None], max_new_tokens, eos_ids)
    answer = torch.tensor(answer_ids)
    forced = torch.cat([suffix, answer[:-1]])[None]
    hidden = forward_suffix(receiver, context, forced)
    logits = receiver.logits(hidden[:, -len(answer) :])[0]
    item = TokenItem(prefix, suffix, answer, logits.float().log_softmax(dim=-1))
    return item, hidden


def compare(hidden: Tensor, receiver: DecoderModel, item: TokenItem) -> list[TeacherForced]:
    """Compare plans' last hidden states over the forced tokens with the full prefill.

    Args:
        hidden: `[num_plans, num_forced, hidden]`.
        receiver: Turns them into logits.
        item: The full prefill's answer.
    """
    answer = item.answer_ids.to(receiver.device)
    full = item.log_probs.to(receiver.device)
    # The logits of a few plans at a time: about 64 MB for a vocabulary of 49,152.
    plans_per_call = max(1, 2**24 // full.numel())
    results: list[TeacherForced] = []
    for part in torch.split(hidden[:, -len(answer) :], plans_per_call):
        log_probs = receiver.logits(part).float().log_softmax(dim=-1)
        kl = (full.exp() * (full - log_probs)).sum(dim=-1).mean(dim=-1)
        nll = -log_probs.gather(-1, answer.expand(len(part), -1)[..., None])[..., 0].mean(dim=-1)
        hits = log_probs.argmax(dim=-1) == answer
        results += [
            # In this order NaN stays NaN.
            TeacherForced(kl=max(k, 0.0), nll=n, top1=t, agrees=a)
            for k, n, t, a in zip(
                kl.tolist(),
                nll.tolist(),
                hits.float().mean(dim=-1).tolist(),
                hits.all(dim=-1).tolist(),
                strict=True,
            )
        ]
    return results


@torch.no_grad()
def evaluate_plan(
    receiver: DecoderModel,
    captured: CapturedCache,
    item: TokenItem,
    plan: ReusePlan,
    stitch: StitchMap | None = None,
) -> TeacherForced:
    """Evaluate one plan by itself: partial prefill, then one pass over the forced tokens."""
    context = partial_prefill(receiver, item.prefix_ids[None], captured, plan, stitch)
    return compare(forward_suffix(receiver, context, item.forced_ids), receiver, item)[0]


def decode_plans(
    receiver: DecoderModel,
    captured: CapturedCache,
    prefix_ids: Tensor,
    suffix_ids: Tensor,
    plans: Sequence[ReusePlan],
    max_new_tokens: int,
    eos_ids: Collection[int],
    stitch: StitchMap | None = None,
) -> list[list[int]]:
    """Decode each plan's own greedy answer, several plans side by side as one batch.

    Args:
        receiver: The model that answers.
        captured: The sender's cache of the prefix, with the E that the plans need.
        prefix_ids: `[num_prefix]`.
        suffix_ids: `[num_suffix]`.
        plans: Whose answers.
        max_new_tokens: Longest answer.
        eos_ids: Tokens that end one.
        stitch: The pair's map, if a plan stitches.
    """
    answers: list[list[int]] = []
    for first in range(0, len(plans), PLANS_PER_BATCH):
        contexts = [
            partial_prefill(receiver, prefix_ids[None], captured, plan, stitch)
            for plan in plans[first : first + PLANS_PER_BATCH]
        ]
        suffixes = suffix_ids.expand(len(contexts), -1)
        context = Context.batch(contexts)
        answers += generate(receiver, context, suffixes, max_new_tokens, eos_ids)
    return answers
