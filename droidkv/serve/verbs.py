"""The three verbs over a store, on the Hugging Face engine: store, fetch, partial prefill."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from droidkv.cache import CapturedCache, TokenAxis
from droidkv.errors import IdentityError, PlanError
from droidkv.identity import Fingerprint
from droidkv.models import DecoderModel
from droidkv.plan import ReusePlan
from droidkv.prefill import Context, forward_suffix, full_prefill
from droidkv.prefill import partial_prefill as partial_prefill_captured
from droidkv.serve.keys import chunk_keys, namespace_digest, reused_layers
from droidkv.serve.objects import MissReason, StoreMiss
from droidkv.serve.store import Store, coverage, deadline_in
from droidkv.stitch import StitchMap


@dataclass(frozen=True)
class Stored:
    """What `store` did.

    Attributes:
        num_tokens: Tokens of the prefix in whole chunks: those that a receiver may find.
        num_objects: Objects that they make.
        num_failed: Objects that the store did not take; their chunks and all behind are of no use.
        is_flushed: Whether all that was taken was readable by others in time.
    """

    num_tokens: int
    num_objects: int
    num_failed: int
    is_flushed: bool

    @property
    def is_complete(self) -> bool:
        """Whether a receiver can find all of it now."""
        return self.is_flushed and self.num_failed == 0


@dataclass(frozen=True)
class Prefilled:
    """A prefix that a receiver has read.

    Attributes:
        context: To answer on; holds every token of the prefix.
        plan: The plan that was carried out: the one asked for, or the receiver's full prefill.
        num_reused: Tokens whose KV the sender supplied outside the plan's group.
        fallback: Why the receiver prefilled all by itself although reuse was asked for, or None.
        message: What went wrong, for people; empty when nothing did.
    """

    context: Context
    plan: ReusePlan
    num_reused: int
    fallback: MissReason | None = None
    message: str = ""


def store(
    into: Store, token_ids: Sequence[int], captured: CapturedCache, flush_seconds: float = 30.0
) -> Stored:
    """Store a sender's cache of a prefix: KV of all its layers and the E that was captured.

    Args:
        into: Where.
        token_ids: The prefix. Tokens behind the last whole chunk are not stored.
        captured: Its cache, a batch of one, with the sender's complete fingerprint.
        flush_seconds: How long to wait until others can read it.

    Raises:
        IdentityError: The fingerprint has unknown fields, or is of another dtype.
        PlanError: The cache is not one of these tokens.
    """
    sender = Fingerprint.from_json(dict(captured.fingerprint), "the captured cache's fingerprint")
    namespace = namespace_digest(sender)
    axis = captured.axis
    if tuple(axis.positions.shape) != (1, len(token_ids)) or not axis.is_contiguous:
        raise PlanError(
            f"expected the cache of one prefix of {len(token_ids)} tokens without padding, got "
            f"positions of shape {tuple(axis.positions.shape)}"
        )
    _check_dtype(sender, [*captured.keys, *captured.values, *captured.hidden.values()])
    keys = chunk_keys(namespace, token_ids, into.chunk_tokens)
    before = into.stats()
    for key in keys:
        here = slice(key.index * into.chunk_tokens, (key.index + 1) * into.chunk_tokens)
        for layer in range(captured.num_layers):
            into.put_kv(
                key, layer, captured.keys[layer][0, :, here], captured.values[layer][0, :, here]
            )
        for layer, hidden in captured.hidden.items():
            into.put_hidden(key, layer, hidden[0, here])
    is_flushed = into.flush(deadline_in(flush_seconds))
    return Stored(
        num_tokens=len(keys) * into.chunk_tokens,
        num_objects=len(keys) * (captured.num_layers + len(captured.hidden)),
        num_failed=into.stats().put_failures - before.put_failures,
        is_flushed=is_flushed,
    )


def fetch(
    source: Store,
    sender: Fingerprint,
    token_ids: Sequence[int],
    plan: ReusePlan,
    num_layers: int,
    deadline: float,
) -> CapturedCache:
    """Fetch what a plan reuses of a prefix: KV outside its group, and E at its start.

    Args:
        source: Where it was stored.
        sender: Who stored it.
        token_ids: The prefix.
        plan: The plan; one that recomputes all layers reuses nothing.
        num_layers: Decoder layers of sender and receiver.
        deadline: Moment to give up at.

    Returns:
        The cache of as many tokens from 0 on as are there: whole chunks, at least one. Layers of
        the group hold no tokens.

    Raises:
        StoreMiss: Nothing is there, or what is there cannot be had.
        PlanError: The plan reaches past the last layer, or reuses nothing.
    """
    layers = reused_layers(num_layers, plan.check(num_layers).group.layers)
    if not layers:
        raise PlanError(f"expected a plan that reuses some layer, got {plan} of {num_layers}")
    keys = chunk_keys(namespace_digest(sender), token_ids, source.chunk_tokens)
    num_tokens = coverage(source, keys, plan, num_layers, deadline)
    if num_tokens == 0:
        raise StoreMiss(
            MissReason.ABSENT,
            f"no whole chunk of {source.chunk_tokens} tokens is covered for plan {plan}",
        )
    keys = keys[: num_tokens // source.chunk_tokens]
    hidden = {}
    if plan.transition is not None:  # first, since recomputing can start with it
        parts = source.get_hidden_chunks(keys, plan.transition, deadline)
        hidden[plan.transition] = _joined(sender, parts, dim=0)
    found: dict[int, tuple[Tensor, Tensor]] = {}
    for layer in layers:
        pairs = source.get_kv_chunks(keys, layer, deadline)
        found[layer] = (
            _joined(sender, [each for each, _ in pairs], dim=1),
            _joined(sender, [each for _, each in pairs], dim=1),
        )
    if len({pair[0].shape for pair in found.values()}) != 1:
        raise StoreMiss(MissReason.CORRUPT, "layers differ in shape")
    nothing = found[layers[0]][0][:, :, :0]
    pairs = [found.get(layer, (nothing, nothing)) for layer in range(num_layers)]
    return CapturedCache(
        keys=[each for each, _ in pairs],
        values=[each for _, each in pairs],
        hidden=hidden,
        axis=TokenAxis(torch.arange(num_tokens)[None]),
        fingerprint=sender.to_json(),
    )


def partial_prefill(
    source: Store,
    receiver: DecoderModel,
    sender: Fingerprint,
    token_ids: Sequence[int],
    plan: ReusePlan,
    stitch: StitchMap | None = None,
    seconds: float = 10.0,
    chunk_tokens: int | None = None,
) -> Prefilled:
    """Read a prefix on a receiver, reusing what the store has of it.

    Tokens that the store does not cover are read by the receiver behind those that it does. On
    any miss the receiver reads the whole prefix by itself, as if there were no store.

    Args:
        source: Where the sender stored its cache.
        receiver: The model that will answer.
        sender: Who stored it.
        token_ids: The prefix.
        plan: The plan.
        stitch: The map of a `stitch` plan.
        seconds: Longest time to wait for the store.
        chunk_tokens: Compute in chunks of this many tokens; None = at once.

    Raises:
        PlanError: The plan reaches past the last layer, or the prefix is empty.
        StitchError: The plan stitches and no map was given, or the map lacks its start.
        IdentityError: The sender's identity has unknown fields.
    """
    prefix = torch.tensor([list(token_ids)], dtype=torch.long)
    whole = ReusePlan.of(0, receiver.num_layers)
    if plan.check(receiver.num_layers) == whole:
        return Prefilled(full_prefill(receiver, prefix, None, chunk_tokens), whole, 0)
    try:
        deadline = deadline_in(seconds)
        captured = fetch(source, sender, token_ids, plan, receiver.num_layers, deadline)
        _check_shapes(captured, receiver)
    except StoreMiss as miss:
        context = full_prefill(receiver, prefix, None, chunk_tokens)
        return Prefilled(context, whole, 0, miss.reason, str(miss))
    num_reused = captured.axis.num_tokens
    context = partial_prefill_captured(
        receiver, prefix[:, :num_reused], captured, plan, stitch, chunk_tokens
    )
    step = chunk_tokens or len(token_ids)
    for start in range(num_reused, len(token_ids), step):
        forward_suffix(receiver, context, prefix[:, start : start + step])
    return Prefilled(context, plan, num_reused)


def _joined(sender: Fingerprint, parts: Sequence[Tensor], dim: int) -> Tensor:
    """Chunks in a row, as a batch of one.

    Raises:
        StoreMiss: They are of different shapes, or not of the sender's dtype.
    """
    if len({(part.shape, part.dtype) for part in parts}) != 1:
        raise StoreMiss(MissReason.CORRUPT, "chunks differ in shape or dtype")
    try:
        _check_dtype(sender, parts[:1])
    except IdentityError as cause:
        raise StoreMiss(MissReason.CORRUPT, str(cause)) from cause
    return torch.cat(list(parts), dim=dim)[None]


def _check_dtype(sender: Fingerprint, tensors: Sequence[Tensor]) -> None:
    for tensor in tensors:
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype != sender.cache_dtype:
            raise IdentityError(
                f"expected caches of dtype {sender.cache_dtype}, as the sender's fingerprint says, "
                f"got {dtype}; nothing is cast on the way"
            )


def _check_shapes(captured: CapturedCache, receiver: DecoderModel) -> None:
    shape = receiver.shape
    num_tokens = captured.axis.num_tokens
    wanted = (1, shape.num_kv_heads, num_tokens, shape.head_dim)
    kv = {tuple(keys.shape) for keys in captured.keys if keys.shape[2]}
    hidden = {tuple(each.shape) for each in captured.hidden.values()}
    if kv != {wanted} or hidden - {(1, num_tokens, shape.hidden_size)}:
        raise StoreMiss(
            MissReason.CORRUPT,
            f"expected KV of shape {wanted} and E of hidden_size {shape.hidden_size}, "
            f"got {kv} and {hidden}",
        )
