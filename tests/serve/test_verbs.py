"""The verbs over a store against the engine without one, on tiny models in float32."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from serve.faulty_store import ANSWERS, ERRORS, FAULTS, SLOW, FaultyStore
from serve.senders import a_sender
from tiny import NUM_LAYERS, VOCAB_SIZE, tiny_model
from torch import Tensor

from droidkv import capture, prefill
from droidkv.cache import CapturedCache
from droidkv.errors import IdentityError, PlanError, StitchError
from droidkv.models import DecoderModel
from droidkv.plan import ReusePlan
from droidkv.prefill import Context
from droidkv.serve import verbs
from droidkv.serve.keys import chunk_keys, namespace_digest
from droidkv.serve.objects import MissReason, ObjectKind, ObjectName, StoreMiss
from droidkv.serve.store import MemoryStore, Store, deadline_in
from droidkv.stitch import fit_stitch

CHUNK_TOKENS = 8
SENDER = a_sender()
EMPTY, FULL, MIDDLE = ReusePlan.of(0, 0), ReusePlan.of(0, NUM_LAYERS), ReusePlan.of(2, 4)
PLANS = [EMPTY, FULL, ReusePlan.of(0, 2), ReusePlan.of(4, NUM_LAYERS), MIDDLE, ReusePlan.of(3, 4)]
LENGTHS = [23, 24, 25]
TOLERANCE = 1e-4
SUFFIX = torch.randint(3, VOCAB_SIZE, (1, 5), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def sender() -> DecoderModel:
    return tiny_model()


@pytest.fixture(scope="module")
def receiver() -> DecoderModel:
    return tiny_model(noise=0.04)


def token_ids(num_tokens: int) -> list[int]:
    generator = torch.Generator().manual_seed(2)
    ids: list[int] = torch.randint(3, VOCAB_SIZE, (num_tokens,), generator=generator).tolist()
    return ids


def captured_of(model: DecoderModel, ids: list[int]) -> CapturedCache:
    return capture.capture(
        model,
        torch.tensor([ids]),
        hidden_layers=range(1, NUM_LAYERS),
        fingerprint=SENDER.to_json(),
    )


def filled(model: DecoderModel, ids: list[int]) -> MemoryStore:
    store = MemoryStore(CHUNK_TOKENS)
    assert verbs.store(store, ids, captured_of(model, ids)).is_complete
    return store


def log_probs(model: DecoderModel, context: Context) -> Tensor:
    hidden = prefill.forward_suffix(model, context.fork(), SUFFIX)
    return model.logits(hidden).log_softmax(dim=-1)


def answer(model: DecoderModel, context: Context) -> list[int]:
    return prefill.generate(model, context.fork(), SUFFIX, 8, eos_ids=())[0]


def own_prefill(model: DecoderModel, ids: list[int]) -> Context:
    return prefill.full_prefill(model, torch.tensor([ids]))


@pytest.mark.parametrize("num_tokens", LENGTHS)
@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_through_a_store_is_the_engine_without_one(
    sender: DecoderModel, receiver: DecoderModel, plan: ReusePlan, num_tokens: int
) -> None:
    ids = token_ids(num_tokens)
    num_stored = num_tokens // CHUNK_TOKENS * CHUNK_TOKENS
    direct = prefill.partial_prefill(
        receiver,
        torch.tensor([ids[:num_stored]]),
        captured_of(sender, ids[:num_stored]),
        plan,
    )
    if num_stored < num_tokens:
        prefill.forward_suffix(receiver, direct, torch.tensor([ids[num_stored:]]))

    found = verbs.partial_prefill(filled(sender, ids), receiver, SENDER, ids, plan)

    assert found.fallback is None and found.plan == plan
    assert found.num_reused == (0 if plan == FULL else num_stored)
    assert found.context.axis.num_tokens == num_tokens
    error = (log_probs(receiver, found.context) - log_probs(receiver, direct)).abs().max()
    assert error < TOLERANCE
    assert answer(receiver, found.context) == answer(receiver, direct)


def test_the_plans_can_be_told_apart(sender: DecoderModel, receiver: DecoderModel) -> None:
    ids = token_ids(25)
    store = filled(sender, ids)
    own = log_probs(receiver, own_prefill(receiver, ids))
    for plan in PLANS:
        found = verbs.partial_prefill(store, receiver, SENDER, ids, plan)
        error = (log_probs(receiver, found.context) - own).abs().max()
        assert (error < TOLERANCE) == (plan == FULL), plan


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_a_model_reusing_itself_is_exact(sender: DecoderModel, plan: ReusePlan) -> None:
    ids = token_ids(25)
    found = verbs.partial_prefill(filled(sender, ids), sender, SENDER, ids, plan, chunk_tokens=7)
    own = own_prefill(sender, ids)
    assert (log_probs(sender, found.context) - log_probs(sender, own)).abs().max() < TOLERANCE


def test_a_stitched_plan_goes_through_a_store(sender: DecoderModel, receiver: DecoderModel) -> None:
    ids = token_ids(24)
    prefixes = torch.randint(3, VOCAB_SIZE, (4, 30)).tolist()
    stitch = fit_stitch(sender, receiver, prefixes, rank=4)
    plan = ReusePlan.of(2, 4, "stitch")
    direct = prefill.partial_prefill(
        receiver, torch.tensor([ids]), captured_of(sender, ids), plan, stitch
    )
    store = filled(sender, ids)
    found = verbs.partial_prefill(store, receiver, SENDER, ids, plan, stitch)
    error = (log_probs(receiver, found.context) - log_probs(receiver, direct)).abs().max()
    assert error < TOLERANCE
    with pytest.raises(StitchError, match="stitching map"):
        verbs.partial_prefill(store, receiver, SENDER, ids, plan)


def count_reads(store: Store, receiver: DecoderModel, ids: list[int]) -> int:
    faulty = FaultyStore(store)
    assert verbs.partial_prefill(faulty, receiver, SENDER, ids, MIDDLE).fallback is None
    return len(faulty.calls)


def test_any_fault_at_any_call_is_the_receivers_own_prefill(
    sender: DecoderModel, receiver: DecoderModel
) -> None:
    ids = token_ids(25)
    store = filled(sender, ids)
    num_calls = count_reads(store, receiver, ids)
    assert num_calls == 1 + 1 + (NUM_LAYERS - len(MIDDLE.group))  # count, E, each reused layer
    own = own_prefill(receiver, ids)
    expected, expected_answer = log_probs(receiver, own), answer(receiver, own)
    for fault in FAULTS:
        for at in range(num_calls):
            if at == 0 and fault in ANSWERS:
                continue  # a wrong count: below
            faulty = FaultyStore(filled(sender, ids), fault, at)
            seconds = 0.2 if fault == SLOW else 10.0
            found = verbs.partial_prefill(faulty, receiver, SENDER, ids, MIDDLE, seconds=seconds)
            reason = {**ANSWERS, **ERRORS}[fault][1] if fault != SLOW else MissReason.TIMEOUT
            assert found.fallback == reason, (fault, at)
            assert found.num_reused == 0 and found.message
            assert found.plan == FULL
            assert torch.equal(log_probs(receiver, found.context), expected), (fault, at)
            assert answer(receiver, found.context) == expected_answer
            assert faulty.stats().misses == {reason: 1}


@pytest.mark.parametrize("kind", [ObjectKind.KV, ObjectKind.HIDDEN])
def test_eviction_between_look_up_and_load_is_the_receivers_own_prefill(
    sender: DecoderModel, receiver: DecoderModel, kind: ObjectKind
) -> None:
    ids = token_ids(25)
    store = filled(sender, ids)
    key = chunk_keys(namespace_digest(SENDER), ids, CHUNK_TOKENS)[2]
    store._forget(ObjectName(key, kind, 5 if kind is ObjectKind.KV else 2))
    faulty = FaultyStore(store, "gone", 0)  # the look-up still sees it
    found = verbs.partial_prefill(faulty, receiver, SENDER, ids, MIDDLE)
    assert found.fallback is MissReason.ABSENT
    assert torch.equal(
        log_probs(receiver, found.context), log_probs(receiver, own_prefill(receiver, ids))
    )


@pytest.mark.parametrize("kind", [ObjectKind.KV, ObjectKind.HIDDEN])
def test_eviction_before_the_look_up_shortens_the_reuse(
    sender: DecoderModel, receiver: DecoderModel, kind: ObjectKind
) -> None:
    ids = token_ids(25)
    store = filled(sender, ids)
    key = chunk_keys(namespace_digest(SENDER), ids, CHUNK_TOKENS)[1]
    store._forget(ObjectName(key, kind, 5 if kind is ObjectKind.KV else 2))
    found = verbs.partial_prefill(store, receiver, SENDER, ids, MIDDLE)
    assert found.fallback is None and found.num_reused == CHUNK_TOKENS
    direct = prefill.partial_prefill(
        receiver,
        torch.tensor([ids[:CHUNK_TOKENS]]),
        captured_of(sender, ids[:CHUNK_TOKENS]),
        MIDDLE,
    )
    prefill.forward_suffix(receiver, direct, torch.tensor([ids[CHUNK_TOKENS:]]))
    error = (log_probs(receiver, found.context) - log_probs(receiver, direct)).abs().max()
    assert error < TOLERANCE


def test_a_prefix_below_one_chunk_or_of_others_tokens_is_not_reused(
    sender: DecoderModel, receiver: DecoderModel
) -> None:
    ids = token_ids(25)
    store = filled(sender, ids)
    for other in (ids[:7], [ids[0] + 1, *ids[1:]]):
        found = verbs.partial_prefill(store, receiver, SENDER, other, MIDDLE)
        assert found.fallback is MissReason.ABSENT and found.num_reused == 0
        own = own_prefill(receiver, other)
        assert torch.equal(log_probs(receiver, found.context), log_probs(receiver, own))


def test_another_identity_reuses_nothing(sender: DecoderModel, receiver: DecoderModel) -> None:
    ids = token_ids(24)
    store = filled(sender, ids)
    other = replace(SENDER, weights="sha256:" + "9" * 64)
    found = verbs.partial_prefill(store, receiver, other, ids, EMPTY)
    assert found.fallback is MissReason.ABSENT
    with pytest.raises(IdentityError, match="adapter"):
        verbs.partial_prefill(store, receiver, replace(SENDER, adapter=None), ids, EMPTY)


@pytest.mark.parametrize("fault", [*ERRORS])
def test_a_sender_goes_on_when_storing_fails(sender: DecoderModel, fault: str) -> None:
    ids = token_ids(24)
    captured = captured_of(sender, ids)
    whole = FaultyStore(MemoryStore(CHUNK_TOKENS))
    num_objects = verbs.store(whole, ids, captured).num_objects
    assert whole.calls == ["write"] * num_objects
    for at in range(0, num_objects, 5):
        faulty = FaultyStore(MemoryStore(CHUNK_TOKENS), fault, at)
        stored = verbs.store(faulty, ids, captured)
        assert (stored.num_failed, stored.is_complete) == (1, False)


def test_what_is_stored_needs_a_complete_identity_of_its_dtype(sender: DecoderModel) -> None:
    ids = token_ids(24)
    captured = captured_of(sender, ids)
    store = MemoryStore(CHUNK_TOKENS)
    for table, field in (
        ({}, "weights"),
        (replace(SENDER, tokenizer=None).to_json(), "tokenizer"),
        (replace(SENDER, cache_dtype="bfloat16").to_json(), "bfloat16"),
    ):
        with pytest.raises(IdentityError, match=field):
            verbs.store(store, ids, replace(captured, fingerprint=table))
    assert store.stats().puts == 0


def test_what_is_stored_is_one_prefix_of_these_tokens(sender: DecoderModel) -> None:
    ids = token_ids(24)
    store = MemoryStore(CHUNK_TOKENS)
    with pytest.raises(PlanError, match="25 tokens"):
        verbs.store(store, [*ids, 4], captured_of(sender, ids))
    two = capture.capture(sender, torch.tensor([ids, ids]), fingerprint=SENDER.to_json())
    with pytest.raises(PlanError, match="one prefix"):
        verbs.store(store, ids, two)


def test_fetch_brings_what_the_plan_reuses_and_no_more(sender: DecoderModel) -> None:
    ids = token_ids(25)
    captured = captured_of(sender, ids)
    store = filled(sender, ids)
    found = verbs.fetch(store, SENDER, ids, MIDDLE, NUM_LAYERS, deadline_in(10))
    assert list(found.hidden) == [2]
    assert torch.equal(found.hidden[2], captured.hidden[2][:, :24])
    for layer in range(NUM_LAYERS):
        num_tokens = 0 if layer in MIDDLE.group else 24
        assert torch.equal(found.keys[layer], captured.keys[layer][:, :, :num_tokens])
        assert torch.equal(found.values[layer], captured.values[layer][:, :, :num_tokens])
    assert found.fingerprint == SENDER.to_json()
    assert store.stats().gets == 3 * (1 + NUM_LAYERS - len(MIDDLE.group))
    with pytest.raises(PlanError, match="reuses some layer"):
        verbs.fetch(store, SENDER, ids, FULL, NUM_LAYERS, deadline_in(10))
    with pytest.raises(StoreMiss, match="no whole chunk"):
        verbs.fetch(store, SENDER, ids[:7], MIDDLE, NUM_LAYERS, deadline_in(10))


def test_a_cache_of_another_shape_is_not_read(sender: DecoderModel, receiver: DecoderModel) -> None:
    ids = token_ids(24)
    store = filled(sender, ids)
    key = chunk_keys(namespace_digest(SENDER), ids, CHUNK_TOKENS)[0]
    for num_heads, head_dim in ((1, 32), (2, 16)):
        wrong = torch.zeros(num_heads, CHUNK_TOKENS, head_dim)
        for each in chunk_keys(namespace_digest(SENDER), ids, CHUNK_TOKENS):
            for layer in range(NUM_LAYERS):
                store.put_kv(each, layer, wrong, wrong)
        found = verbs.partial_prefill(store, receiver, SENDER, ids, EMPTY)
        assert found.fallback is MissReason.CORRUPT
    store.put_kv(key, 0, torch.zeros(2, 8, 32).half(), torch.zeros(2, 8, 32).half())
    found = verbs.partial_prefill(store, receiver, SENDER, ids, EMPTY)
    assert found.fallback is MissReason.CORRUPT
