"""The receiver's side: recompute one group over the prefix, then answer on the mixed cache."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from droidkv.cache import CapturedCache, KVCache, ReadOnlyCache, TokenAxis
from droidkv.capture import chunks, prefix_axis
from droidkv.errors import PlanError, StitchError
from droidkv.models import DecoderModel
from droidkv.plan import ReusePlan
from droidkv.stitch import StitchMap


@dataclass
class Context:
    """Tokens a receiver has already read: their KV, and where they stand. Grows when answering."""

    cache: KVCache
    axis: TokenAxis

    def fork(self) -> Context:
        """The same context, to answer on more than once; no tensor is copied."""
        return Context(self.cache.fork(), self.axis)

    @classmethod
    def batch(cls, contexts: Sequence[Context]) -> Context:
        """Contexts of equal length as rows of one batch."""
        layers = range(len(contexts[0].cache.keys))
        rows = [[context.cache.layer(layer) for context in contexts] for layer in layers]
        return cls(
            KVCache(
                [torch.cat([keys for keys, _ in row]) for row in rows],
                [torch.cat([values for _, values in row]) for row in rows],
            ),
            TokenAxis(torch.cat([context.axis.positions for context in contexts])),
        )


@torch.no_grad()
def partial_prefill(
    receiver: DecoderModel,
    input_ids: Tensor,
    captured: CapturedCache,
    plan: ReusePlan,
    stitch: StitchMap | None = None,
    chunk_tokens: int | None = None,
) -> Context:
    """Build the mixed cache of a plan: receiver KV in its group, sender KV elsewhere.

    Args:
        receiver: The model that will answer.
        input_ids: The prefix, `[batch, seq_len]`; read only where the group starts at layer 0.
        captured: The sender's cache of the same prefix. Its tensors are shared, not copied.
        plan: The group to recompute, and the operator on E at its start.
        stitch: The map of a `stitch` plan.
        chunk_tokens: Recompute in chunks of this many tokens; None = at once.

    Raises:
        PlanError: The plan does not fit the receiver, the captured cache does not match the
            prefix, or it lacks the E that the plan enters by.
        StitchError: The plan stitches and no map was given, or the map lacks its start.
    """
    plan.check(receiver.num_layers)
    if tuple(input_ids.shape) != tuple(captured.axis.positions.shape):
        raise PlanError(
            f"expected a captured cache of the same prefix, got input_ids {tuple(input_ids.shape)} "
            f"and a cache of {tuple(captured.axis.positions.shape)} tokens"
        )
    if captured.num_layers != receiver.num_layers:
        raise PlanError(
            f"expected a captured cache of {receiver.num_layers} layers, got {captured.num_layers}"
        )
    entering = enter_group(receiver, input_ids, captured, plan, stitch) if plan.group else None
    return recompute_group(receiver, entering, captured, plan, chunk_tokens)


def recompute_group(
    receiver: DecoderModel,
    entering: Tensor | None,
    captured: CapturedCache,
    plan: ReusePlan,
    chunk_tokens: int | None = None,
) -> Context:
    """The mixed cache of a plan from what enters its group; gradients flow back to `entering`.

    Args:
        receiver: The model that recomputes.
        entering: `[batch, seq_len, hidden]`; None for the empty plan.
        captured: The sender's cache.
        plan: The group.
        chunk_tokens: As in `partial_prefill`.
    """
    device = receiver.device
    axis = captured.axis.to(device)
    group = plan.group
    cache = KVCache(
        [None if i in group else keys.to(device) for i, keys in enumerate(captured.keys)],
        [None if i in group else values.to(device) for i, values in enumerate(captured.values)],
    )
    if entering is None:
        return Context(cache, axis)
    for start, stop in chunks(axis.num_tokens, chunk_tokens):
        hidden = entering[:, start:stop]
        step = receiver.step(axis.narrow(start, stop), axis.narrow(0, stop))
        for layer in group.layers[:-1]:
            hidden = receiver.run_layer(layer, hidden, step, cache)
        receiver.store_kv(group.stop - 1, hidden, step, cache)
    return Context(cache, axis)


def enter_group(
    receiver: DecoderModel,
    input_ids: Tensor,
    captured: CapturedCache,
    plan: ReusePlan,
    stitch: StitchMap | None,
) -> Tensor:
    """The hidden state that enters a plan's group, `[batch, seq_len, hidden]`."""
    if plan.transition is None:
        return receiver.embed_prefix(input_ids.to(receiver.device))
    if plan.transition not in captured.hidden:
        raise PlanError(
            f"plan {plan} needs the sender's E of layer {plan.transition}, but the captured cache "
            f"has E of layers {sorted(captured.hidden)}; capture it with hidden_layers"
        )
    hidden = captured.hidden[plan.transition].to(receiver.device)
    if plan.operator == "copy":
        return hidden
    if stitch is None:
        raise StitchError(f"plan {plan} needs the pair's stitching map, and none was given")
    return stitch.apply(plan.transition, hidden)


@torch.no_grad()
def full_prefill(
    receiver: DecoderModel,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    chunk_tokens: int | None = None,
) -> Context:
    """The receiver's own prefill of a prefix, which every plan is measured against."""
    axis = prefix_axis(input_ids, attention_mask).to(receiver.device)
    context = Context(KVCache.empty(receiver.num_layers), axis.narrow(0, 0))
    for start, stop in chunks(axis.num_tokens, chunk_tokens):
        hidden = receiver.embed_prefix(input_ids[:, start:stop].to(receiver.device))
        forward(receiver, context, hidden, axis.narrow(start, stop))
    return context


def forward(receiver: DecoderModel, context: Context, hidden: Tensor, axis: TokenAxis) -> Tensor:
    """Run embedded tokens through all layers behind `context`, and append them to it."""
    context.axis = context.axis.cat(axis)
    step = receiver.step(axis, context.axis)
    for layer in range(receiver.num_layers):
        hidden = receiver.run_layer(layer, hidden, step, context.cache)
    return hidden


def read_only(receiver: DecoderModel, context: Context, hidden: Tensor, axis: TokenAxis) -> Tensor:
    """Run embedded tokens through all layers over KV that another model wrote for them.

    The logical decoder of ICaRus by itself. `TwoStreamModel` does the same in one pass with the
    writer.

    Args:
        receiver: The model that reads.
        context: KV of all earlier tokens and of these very tokens; stays as it is.
        hidden: `[batch, seq_len, hidden]`, of any tokens of the context.
        axis: Where they stand.
    """
    step = receiver.step(axis, context.axis)
    cache = ReadOnlyCache(context.cache)
    for layer in range(receiver.num_layers):
        hidden = receiver.run_layer(layer, hidden, step, cache)
    return hidden


def read_suffix(
    receiver: DecoderModel,
    context: Context,
    suffix_ids: Tensor,
    attention_mask: Tensor | None = None,
) -> Tensor:
    """Read a suffix behind the context; gradients flow back to what is in it.

    Args:
        receiver: The model that answers.
        context: Grows by the suffix.
        suffix_ids: `[batch, seq_len]`.
        attention_mask: `[batch, seq_len]` of 0/1; padding may stand anywhere.

    Returns:
        Hidden states leaving the last layer, `[batch, seq_len, hidden]`; see
        `DecoderModel.logits`.
    """
    suffix_ids = suffix_ids.to(receiver.device)
    if attention_mask is None:
        attention_mask = torch.ones_like(suffix_ids)
    first = context.axis.next_position
    axis = TokenAxis.of_mask(attention_mask.to(receiver.device), first)
    return forward(receiver, context, receiver.embed(suffix_ids), axis)


@torch.no_grad()
def forward_suffix(
    receiver: DecoderModel,
    context: Context,
    suffix_ids: Tensor,
    attention_mask: Tensor | None = None,
) -> Tensor:
    """As `read_suffix`, without gradients: for answering."""
    return read_suffix(receiver, context, suffix_ids, attention_mask)


@torch.no_grad()
def generate(
    receiver: DecoderModel,
    context: Context,
    suffix_ids: Tensor,
    max_new_tokens: int,
    eos_ids: Collection[int],
    attention_mask: Tensor | None = None,
) -> list[list[int]]:
    """Read a suffix and decode greedily behind the context.

    Returns:
        New token ids of each row, ending with the end-of-sequence token if one was produced.
    """
    hidden = forward_suffix(receiver, context, suffix_ids, attention_mask)
    read = context.axis.positions[:, -suffix_ids.shape[1] :]
    last = read.argmax(dim=1)
    hidden = hidden[torch.arange(len(last), device=last.device), last][:, None]
    rows: list[list[int]] = [[] for _ in range(len(last))]
    running = set(range(len(rows)))
    for _ in range(max_new_tokens):
        token_ids = receiver.logits(hidden)[:, -1].argmax(dim=-1)
        for row in list(running):
            rows[row].append(int(token_ids[row]))
            if rows[row][-1] in eos_ids:
                running.discard(row)
        if not running:
            break
        hidden = forward_suffix(receiver, context, token_ids[:, None])
    return rows
