"""The oracles of a reuse plan, on every supported architecture (float32 unless a test says so).

Tolerance: log-probabilities within 1e-4 of each other; greedy tokens equal.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import ARCHITECTURES, NUM_LAYERS, VOCAB_SIZE, tiny_model
from torch import Tensor
from transformers import DynamicCache

from droidkv.capture import capture
from droidkv.errors import PlanError, StitchError
from droidkv.models import DecoderModel
from droidkv.plan import ReusePlan, all_plans
from droidkv.prefill import (
    Context,
    forward_suffix,
    full_prefill,
    generate,
    partial_prefill,
)

TOLERANCE = 1e-4
ALL_STARTS = range(NUM_LAYERS)
EMPTY, FULL = ReusePlan.of(0, 0), ReusePlan.of(0, NUM_LAYERS)
MIDDLE = ReusePlan.of(2, 4)

every_architecture = pytest.mark.parametrize("architecture", ARCHITECTURES)


def tokens(*shape: int) -> Tensor:
    return torch.randint(3, VOCAB_SIZE, shape)


def log_probs(model: DecoderModel, context: Context, suffix: Tensor) -> Tensor:
    return model.logits(forward_suffix(model, context.fork(), suffix)).log_softmax(dim=-1)


def stock_log_probs(model: DecoderModel, ids: Tensor, num_last: int) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model.model(ids).logits
    return logits[:, -num_last:].log_softmax(dim=-1)


def fine_tune_pair(architecture: str) -> tuple[DecoderModel, DecoderModel]:
    return tiny_model(architecture), tiny_model(architecture, noise=0.04)


@every_architecture
def test_the_full_plan_is_the_stock_models_own_prefill(architecture: str) -> None:
    sender, receiver = fine_tune_pair(architecture)
    prefix, suffix = tokens(1, 19), tokens(1, 5)
    expected = stock_log_probs(receiver, torch.cat([prefix, suffix], dim=1), 5)

    context = partial_prefill(receiver, prefix, capture(sender, prefix), FULL)

    assert (log_probs(receiver, context, suffix) - expected).abs().max() < TOLERANCE
    naive = partial_prefill(receiver, prefix, capture(sender, prefix), EMPTY)
    assert (log_probs(receiver, naive, suffix) - expected).abs().max() > 100 * TOLERANCE


@every_architecture
def test_a_model_reusing_itself_is_exact_at_every_plan(architecture: str) -> None:
    model = tiny_model(architecture)
    prefix, suffix = tokens(1, 19), tokens(1, 5)
    captured = capture(model, prefix, hidden_layers=ALL_STARTS)
    expected = stock_log_probs(model, torch.cat([prefix, suffix], dim=1), 5)
    for plan in all_plans(NUM_LAYERS):
        context = partial_prefill(model, prefix, captured, plan)
        error = (log_probs(model, context, suffix) - expected).abs().max()
        assert error < TOLERANCE, f"plan {plan} is off by {error}"


@every_architecture
def test_the_empty_plan_is_naive_reuse_by_hand(architecture: str) -> None:
    sender, receiver = fine_tune_pair(architecture)
    prefix, suffix = tokens(1, 19), tokens(1, 5)
    by_hand = DynamicCache()  # no config: keeps all positions, also under a sliding window
    with torch.no_grad():
        sender.model(prefix, past_key_values=by_hand, use_cache=True)
        expected = receiver.model(suffix, past_key_values=by_hand).logits.log_softmax(dim=-1)

    context = partial_prefill(receiver, prefix, capture(sender, prefix), EMPTY)

    assert (log_probs(receiver, context, suffix) - expected).abs().max() < TOLERANCE


@every_architecture
def test_a_group_mixes_receiver_kv_from_the_senders_hidden_state(architecture: str) -> None:
    """Against stock models: E by their hidden states, the group's KV by a truncated receiver."""
    sender, receiver = fine_tune_pair(architecture)
    prefix = tokens(1, 19)
    with torch.no_grad():
        hidden = sender.model(prefix, output_hidden_states=True).hidden_states[2]
        held: Any = DynamicCache()
        _run_with_swapped_input(receiver, prefix, hidden, layer=2, cache=held)
    captured = capture(sender, prefix, hidden_layers=[2])

    context = partial_prefill(receiver, prefix, captured, MIDDLE)

    assert torch.allclose(captured.hidden[2], hidden, atol=1e-5)
    for layer in range(NUM_LAYERS):
        keys, values = context.cache.layer(layer)
        if layer in MIDDLE.group:
            assert torch.allclose(keys, held.layers[layer].keys, atol=TOLERANCE)
            assert torch.allclose(values, held.layers[layer].values, atol=TOLERANCE)
            assert not torch.allclose(keys, captured.keys[layer], atol=100 * TOLERANCE)
        else:
            assert torch.equal(keys, captured.keys[layer])
            assert torch.equal(values, captured.values[layer])


def _run_with_swapped_input(
    model: DecoderModel, prefix: Tensor, hidden: Tensor, layer: int, cache: DynamicCache
) -> None:
    """The stock forward pass, with the hidden state entering one layer replaced."""
    handle = model.model.model.layers[layer].register_forward_pre_hook(
        lambda module, args: (hidden, *args[1:])
    )
    try:
        model.model(prefix, past_key_values=cache, use_cache=True)
    finally:
        handle.remove()


@every_architecture
def test_padding_and_batching_change_nothing(architecture: str) -> None:
    sender, receiver = fine_tune_pair(architecture)
    lengths, suffix_lengths = [11, 19, 14], [5, 3, 4]
    prefixes = [tokens(1, n) for n in lengths]
    suffixes = [tokens(1, n) for n in suffix_lengths]
    for side in ("left", "right"):
        ids, mask = _pad(prefixes, side)
        suffix_ids, suffix_mask = _pad(suffixes, side)
        captured = capture(sender, ids, mask, hidden_layers=ALL_STARTS)
        for plan in (EMPTY, MIDDLE, ReusePlan.of(0, 3), ReusePlan.of(4, 6), FULL):
            batched = partial_prefill(receiver, ids, captured, plan)
            rows = generate(receiver, batched, suffix_ids, 6, {2}, suffix_mask)
            for row, (prefix, suffix) in enumerate(zip(prefixes, suffixes, strict=True)):
                alone = partial_prefill(
                    receiver, prefix, capture(sender, prefix, hidden_layers=ALL_STARTS), plan
                )
                assert rows[row] == generate(receiver, alone, suffix, 6, {2})[0], (side, plan, row)


def _pad(rows: list[Tensor], side: str) -> tuple[Tensor, Tensor]:
    longest = max(row.shape[1] for row in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        n = row.shape[1]
        where = slice(longest - n, longest) if side == "left" else slice(0, n)
        ids[i, where], mask[i, where] = row[0], 1
    return ids, mask


@every_architecture
@pytest.mark.parametrize("chunk_tokens", [1, 5, 18, 19, 64])
def test_chunked_prefill_changes_nothing(architecture: str, chunk_tokens: int) -> None:
    sender, receiver = fine_tune_pair(architecture)
    prefix, suffix = tokens(1, 19), tokens(1, 5)
    whole = capture(sender, prefix, hidden_layers=ALL_STARTS)
    pieces = capture(sender, prefix, hidden_layers=ALL_STARTS, chunk_tokens=chunk_tokens)
    for plan in (EMPTY, MIDDLE, ReusePlan.of(0, 2), FULL):
        expected = log_probs(receiver, partial_prefill(receiver, prefix, whole, plan), suffix)
        context = partial_prefill(receiver, prefix, pieces, plan, chunk_tokens=chunk_tokens)
        assert (log_probs(receiver, context, suffix) - expected).abs().max() < TOLERANCE
    chunked = full_prefill(receiver, prefix, chunk_tokens=chunk_tokens)
    expected = stock_log_probs(receiver, torch.cat([prefix, suffix], dim=1), 5)
    assert (log_probs(receiver, chunked, suffix) - expected).abs().max() < TOLERANCE


@every_architecture
def test_decoding_goes_on_as_the_stock_model_does(architecture: str) -> None:
    model = tiny_model(architecture)
    prefix, suffix = tokens(1, 19), tokens(1, 5)
    (answer,) = generate(model, full_prefill(model, prefix), suffix, 8, set())
    ids = torch.cat([prefix, suffix], dim=1)
    for token in answer:
        assert token == int(stock_log_probs(model, ids, 1).argmax())
        ids = torch.cat([ids, torch.tensor([[token]])], dim=1)


def test_answering_twice_on_one_context_gives_the_same_answer() -> None:
    model = tiny_model()
    context, suffix = full_prefill(model, tokens(1, 19)), tokens(1, 5)
    first = generate(model, context.fork(), suffix, 8, set())
    assert generate(model, context.fork(), suffix, 8, set()) == first
    assert context.axis.num_tokens == 19


def test_the_model_is_bit_for_bit_what_it_was() -> None:
    sender, receiver = fine_tune_pair("llama")
    before = {name: tensor.clone() for name, tensor in receiver.model.state_dict().items()}
    prefix = tokens(1, 9)
    captured = capture(sender, prefix, hidden_layers=[2])
    kept = [tensor.clone() for tensor in (*captured.keys, *captured.values)]
    generate(receiver, partial_prefill(receiver, prefix, captured, MIDDLE), tokens(1, 3), 4, {2})
    after = receiver.model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert not any(module._forward_pre_hooks for module in receiver.model.modules())
    assert all(
        torch.equal(a, b) for a, b in zip(kept, (*captured.keys, *captured.values), strict=True)
    )


@every_architecture
def test_bfloat16_agrees_with_its_own_full_prefill(architecture: str) -> None:
    """bfloat16 keeps 8 bits: the path through the cache may differ by a rounding, not more."""
    model = tiny_model(architecture, dtype=torch.bfloat16)
    prefix, suffix = tokens(1, 19), tokens(1, 5)
    captured = capture(model, prefix, hidden_layers=ALL_STARTS)
    assert captured.hidden[2].dtype == captured.keys[0].dtype == torch.bfloat16
    expected = log_probs(model, full_prefill(model, prefix), suffix).float()
    for plan in (EMPTY, MIDDLE, FULL):
        context = partial_prefill(model, prefix, captured, plan)
        assert (log_probs(model, context, suffix).float() - expected).abs().max() < 0.15


@pytest.mark.gpu
@every_architecture
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cuda_agrees_with_cpu(architecture: str, dtype: torch.dtype) -> None:
    sender, receiver = fine_tune_pair(architecture)
    prefix, suffix = tokens(2, 19), tokens(2, 5)
    captured = capture(sender, prefix, hidden_layers=ALL_STARTS)
    cuda_sender = DecoderModel(sender.model.to("cuda", dtype))
    on_cuda = capture(cuda_sender, prefix, hidden_layers=ALL_STARTS)
    cpu = [
        log_probs(receiver, partial_prefill(receiver, prefix, captured, plan), suffix)
        for plan in (EMPTY, MIDDLE, FULL)
    ]
    cuda_receiver = DecoderModel(receiver.model.to("cuda", dtype))
    bound = 1e-3 if dtype == torch.float32 else 0.3
    for plan, expected in zip((EMPTY, MIDDLE, FULL), cpu, strict=True):
        context = partial_prefill(cuda_receiver, prefix, on_cuda, plan)
        got = log_probs(cuda_receiver, context, suffix).float().cpu()
        assert (got - expected).abs().max() < bound


def test_what_does_not_fit_is_refused() -> None:
    sender, receiver = fine_tune_pair("llama")
    prefix = tokens(1, 9)
    captured = capture(sender, prefix, hidden_layers=[2])
    with pytest.raises(PlanError, match=r"within \[0,6\)"):
        partial_prefill(receiver, prefix, captured, ReusePlan.of(2, 7))
    with pytest.raises(PlanError, match="E of layer 3"):
        partial_prefill(receiver, prefix, captured, ReusePlan.of(3, 4))
    with pytest.raises(PlanError, match="same prefix"):
        partial_prefill(receiver, tokens(1, 8), captured, MIDDLE)
    with pytest.raises(StitchError, match="none was given"):
        partial_prefill(receiver, prefix, captured, ReusePlan.of(2, 4, "stitch"))
    with pytest.raises(PlanError, match="empty prefix"):
        capture(sender, prefix[:, :0])
    with pytest.raises(PlanError, match="empty prefix"):
        capture(sender, prefix, attention_mask=torch.zeros_like(prefix))
    with pytest.raises(PlanError, match=r"E layers within \[0,6\)"):
        capture(sender, prefix, hidden_layers=[6])
    with pytest.raises(PlanError, match="chunk_tokens"):
        capture(sender, prefix, chunk_tokens=0)
