"""The sweep against the naive loop it must equal, plan by plan."""

from __future__ import annotations

import random

import pytest
import torch
from tiny import ARCHITECTURES, NUM_LAYERS, VOCAB_SIZE, tiny_model

import droidkv.sweep
from droidkv.cache import CapturedCache
from droidkv.capture import capture
from droidkv.errors import PlanError, StitchError
from droidkv.evaluate import (
    TokenItem,
    decode_plans,
    evaluate_plan,
    full_prefill_answer,
)
from droidkv.models import DecoderModel
from droidkv.plan import ReusePlan, all_plans
from droidkv.prefill import generate, partial_prefill
from droidkv.stitch import StitchMap, fit_stitch
from droidkv.sweep import sweep

TOLERANCE = 1e-4
EOS = {2}


def tokens(n: int) -> list[int]:
    return torch.randint(3, VOCAB_SIZE, (n,)).tolist()


def fixture(
    architecture: str, noise: float = 0.03
) -> tuple[DecoderModel, DecoderModel, CapturedCache, TokenItem, StitchMap]:
    sender, receiver = tiny_model(architecture), tiny_model(architecture, noise=noise)
    item = full_prefill_answer(receiver, tokens(21), tokens(4), max_new_tokens=5, eos_ids=EOS)
    captured = capture(sender, item.prefix_ids[None], hidden_layers=range(NUM_LAYERS))
    stitch = fit_stitch(sender, receiver, [tokens(30) for _ in range(4)], rank=8)
    return sender, receiver, captured, item, stitch


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_sweep_equals_the_naive_loop(architecture: str) -> None:
    _, receiver, captured, item, stitch = fixture(architecture)
    plans = all_plans(NUM_LAYERS, operators=("copy", "stitch"))

    swept = sweep(receiver, captured, item, plans, stitch)

    assert list(swept) == plans
    for plan in plans:
        alone = evaluate_plan(receiver, captured, item, plan, stitch)
        assert swept[plan].kl == pytest.approx(alone.kl, abs=TOLERANCE), plan
        assert swept[plan].nll == pytest.approx(alone.nll, abs=TOLERANCE), plan
        assert swept[plan].top1 == alone.top1, plan
        assert swept[plan].agrees == alone.agrees, plan
    kls = [result.kl for result in swept.values()]
    assert max(kls) > 100 * TOLERANCE, "the plans must differ for this test to mean anything"


@pytest.mark.parametrize("stacked_tokens", [1, 16, 1000])
def test_how_suffixes_are_stacked_changes_nothing(
    stacked_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, receiver, captured, item, _ = fixture("qwen2")
    plans = all_plans(NUM_LAYERS)
    expected = sweep(receiver, captured, item, plans)
    monkeypatch.setattr(droidkv.sweep, "STACKED_TOKENS", stacked_tokens)
    for plan, result in sweep(receiver, captured, item, plans).items():
        assert result.kl == pytest.approx(expected[plan].kl, abs=TOLERANCE)


def test_any_subset_in_any_order_gives_the_same() -> None:
    _, receiver, captured, item, stitch = fixture("llama")
    plans = all_plans(NUM_LAYERS, operators=("copy", "stitch"))
    expected = sweep(receiver, captured, item, plans, stitch)
    shuffler = random.Random(0)
    for size in (1, 2, 7, 20):
        subset = shuffler.sample(plans, size)
        swept = sweep(receiver, captured, item, subset, stitch)
        assert list(swept) == subset
        for plan in subset:
            assert swept[plan].kl == pytest.approx(expected[plan].kl, abs=TOLERANCE)


def test_a_waiting_plan_holds_its_suffix_and_nothing_of_the_prefix() -> None:
    """Peak memory is bounded only if what waits for the layers above is one suffix per plan."""
    _, receiver, captured, item, stitch = fixture("llama")
    run = droidkv.sweep._Sweep(receiver, captured, item)
    trunk = run.trunk()
    num_waiting = 0
    for start in range(NUM_LAYERS):
        entry = [ReusePlan.of(start, stop) for stop in range(start + 1, NUM_LAYERS + 1)]
        for _, state in run.recompute(entry, trunk[start], stitch):
            assert state.shape == (1, item.forced_ids.shape[1], receiver.shape.hidden_size)
            assert state.untyped_storage().nbytes() == state.nbytes
            num_waiting += 1
    assert num_waiting == NUM_LAYERS * (NUM_LAYERS + 1) // 2


def test_a_sender_that_is_the_receiver_loses_nothing_at_any_plan() -> None:
    _, receiver, captured, item, _ = fixture("llama", noise=0.0)
    for plan, result in sweep(receiver, captured, item, all_plans(NUM_LAYERS)).items():
        assert result.agrees and result.top1 == 1.0, plan
        assert result.kl < TOLERANCE, plan


@pytest.mark.parametrize("architecture", ["llama", "mixtral"])
def test_agreement_predicts_decoding(architecture: str) -> None:
    """`agrees` must say, without decoding, whether a plan decodes the full prefill's answer."""
    outcomes = set()
    for noise in (0.005, 0.01, 0.03):
        _, receiver, captured, item, _ = fixture(architecture, noise)
        results = sweep(receiver, captured, item, all_plans(NUM_LAYERS))
        answers = decode_plans(
            receiver, captured, item.prefix_ids, item.suffix_ids, list(results), 5, EOS
        )
        for (plan, result), decoded in zip(results.items(), answers, strict=True):
            assert (decoded == item.answer_ids.tolist()) == result.agrees, (noise, plan)
            outcomes.add(result.agrees)
    assert outcomes == {True, False}, "both outcomes must occur for this test to mean anything"


def test_full_prefill_answer_is_what_the_receiver_decodes() -> None:
    _, receiver, captured, item, _ = fixture("llama")
    full = ReusePlan.of(0, NUM_LAYERS)
    context = partial_prefill(receiver, item.prefix_ids[None], captured, full)
    assert generate(receiver, context, item.suffix_ids[None], 5, EOS) == [item.answer_ids.tolist()]
    assert item.log_probs.argmax(dim=-1).tolist() == item.answer_ids.tolist()


def test_what_does_not_fit_is_refused() -> None:
    _, receiver, captured, item, stitch = fixture("llama")
    with pytest.raises(PlanError, match=r"within \[0,6\)"):
        sweep(receiver, captured, item, [ReusePlan.of(0, 7)])
    with pytest.raises(StitchError, match="none was given"):
        sweep(receiver, captured, item, [ReusePlan.of(1, 2, "stitch")])
    with pytest.raises(StitchError, match="start 3"):
        partial = StitchMap({2: stitch.down[2]}, {2: stitch.up[2]}, {2: stitch.bias[2]})
        sweep(receiver, captured, item, [ReusePlan.of(3, 4, "stitch")], partial)
    with pytest.raises(PlanError, match="at least one token"):
        full_prefill_answer(receiver, [], tokens(3), 4, EOS)
