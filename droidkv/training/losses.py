"""What a training row costs: the loss on its answers, by what KV the receiver reads.

The three modes differ in nothing else. Everything runs through the layer-by-layer engine that also
answers, so what is trained is what is served.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from droidkv.cache import KVCache, TokenAxis
from droidkv.capture import capture
from droidkv.models import DecoderModel
from droidkv.plan import ReusePlan
from droidkv.prefill import Context, forward, partial_prefill, read_only
from droidkv.recipe import Mode
from droidkv.training.rows import TrainingRow

FrozenBase = Callable[[], AbstractContextManager[DecoderModel]]
"""Gives the base as it was before training, for as long as the context is open."""

RowLosses = Callable[[Sequence[TrainingRow]], Tensor]
"""Cross entropy of every answer token of some rows, `[num_targets]`."""


def row_losses(mode: Mode, receiver: DecoderModel, base: FrozenBase) -> RowLosses:
    """The loss of a mode.

    Args:
        mode: What the receiver reads.
        receiver: The model that is trained.
        base: The frozen base. No gradient is kept of what it computes.
    """
    if mode == "plain":
        return lambda rows: torch.cat([_plain(receiver, row) for row in rows])
    read = _prefillshare if mode == "prefillshare" else _icarus
    write = _prefix_context if mode == "prefillshare" else _whole_context

    def losses(rows: Sequence[TrainingRow]) -> Tensor:
        # The base goes first for all rows: base and receiver may be one model with its adapter
        # off and on, and a backward pass must not see it switched.
        with torch.no_grad(), base() as frozen:
            contexts = [write(frozen, row) for row in rows]
        return torch.cat(
            [read(receiver, row, context) for row, context in zip(rows, contexts, strict=True)]
        )

    return losses


def _plain(receiver: DecoderModel, row: TrainingRow) -> Tensor:
    """The receiver reads everything itself."""
    context = _nothing_read(receiver)
    ids, axis = row.input_ids.to(receiver.device), row.axis.to(receiver.device)
    hidden = forward(receiver, context, receiver.embed(ids), axis)
    return _cross_entropy(receiver, hidden[0, row.predicting], row)


def _prefix_context(base: DecoderModel, row: TrainingRow) -> Context:
    """The base's KV of what it reads, taken over whole: the empty plan."""
    prefix_ids = row.input_ids[:, : row.num_read]
    return partial_prefill(base, prefix_ids, capture(base, prefix_ids), ReusePlan.of(0, 0))


def _prefillshare(receiver: DecoderModel, row: TrainingRow, context: Context) -> Tensor:
    """The receiver reads the rest, questions and answers, behind the base's KV."""
    first = row.num_read
    ids = row.input_ids[:, first:].to(receiver.device)
    axis = row.axis.narrow(first, row.axis.num_tokens).to(receiver.device)
    hidden = forward(receiver, context, receiver.embed(ids), axis)
    return _cross_entropy(receiver, hidden[0, row.predicting - first], row)


def _whole_context(base: DecoderModel, row: TrainingRow) -> Context:
    """The base's KV of every token of the row: the logical encoder of ICaRus."""
    context = _nothing_read(base)
    hidden = base.embed(row.input_ids.to(base.device))
    forward(base, context, hidden, row.axis.to(base.device))
    return context


def _icarus(receiver: DecoderModel, row: TrainingRow, context: Context) -> Tensor:
    """The logical decoder of ICaRus: from token to next token over the encoder's KV.

    No token reads what it writes, so it runs only where an answer is learned.
    """
    predicting = row.predicting.to(receiver.device)
    hidden = receiver.embed(row.input_ids.to(receiver.device)[:, predicting])
    hidden = read_only(receiver, context, hidden, context.axis.take(predicting))
    return _cross_entropy(receiver, hidden[0], row)


def _nothing_read(model: DecoderModel) -> Context:
    positions = torch.empty(1, 0, dtype=torch.long, device=model.device)
    return Context(KVCache.empty(model.num_layers), TokenAxis(positions))


def _cross_entropy(receiver: DecoderModel, predicting: Tensor, row: TrainingRow) -> Tensor:
    """Loss of a row's answers from the states that leave the last layer where they are predicted.

    Args:
        receiver: The model that is trained.
        predicting: `[num_targets, hidden_size]`.
        row: What to predict.
    """
    logits = receiver.logits(predicting).float()
    targets = row.targets.to(receiver.device)
    return nn.functional.cross_entropy(logits, targets, reduction="none")
