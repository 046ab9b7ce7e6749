"""Requests of kinds that reuse nothing, on real engines: the own prefill, and nothing stored."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from serve.engines import (
    CHUNK,
    PROMPTS,
    TOLERANCE,
    Engine,
    Models,
    assert_all_same,
    assert_same,
    make_models,
    own_answer,
    reference,
    sampling_params,
    store_captured,
    vllm,
)

from droidkv.loading import LoadedModel
from droidkv.serve.connector_plan import Fallback
from droidkv.serve.keys import namespace_digest
from droidkv.serve.opening import open_store
from droidkv.serve.store import chunk_keys, deadline_in

pytestmark = pytest.mark.vllm

STORE = "memory://test-vllm-requests"
PROMPT = PROMPTS[0]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    made = make_models(tmp_path_factory.mktemp("models"))
    store_captured(made, open_store(STORE, CHUNK), PROMPTS)
    return made


PLAIN: dict[str, Any] = {
    "lora_request": None,
    "mm_features": [],
    "prompt_embeds": None,
    "resumable": False,
    "pooling_params": None,
    "sampling_params": SimpleNamespace(prompt_logprobs=None),
    "skip_reading_prefix_cache": False,
}


@pytest.mark.parametrize(
    ("change", "received", "sent"),
    [
        ({}, None, None),
        ({"lora_request": object()}, Fallback.LORA, Fallback.LORA),
        ({"mm_features": [object()]}, Fallback.MULTIMODAL, Fallback.MULTIMODAL),
        ({"prompt_embeds": object()}, Fallback.PROMPT_EMBEDS, Fallback.PROMPT_EMBEDS),
        ({"resumable": True}, Fallback.STREAMED_INPUT, Fallback.STREAMED_INPUT),
        # What a sender computes for these is the model's cache of these tokens.
        ({"pooling_params": object(), "sampling_params": None}, Fallback.POOLING, None),
        (
            {"sampling_params": SimpleNamespace(prompt_logprobs=0)},
            Fallback.PROMPT_LOGPROBS,
            None,
        ),
        ({"skip_reading_prefix_cache": True}, Fallback.OPTED_OUT, None),
    ],
)
def test_each_kind_of_request_has_its_reason(
    change: dict[str, Any], received: Fallback | None, sent: Fallback | None
) -> None:
    from droidkv.serve.vllm_connector import _receiver_obstacle, _sender_obstacle

    request = SimpleNamespace(**PLAIN | change)
    assert (_receiver_obstacle(request), _sender_obstacle(request)) == (received, sent)


def embedded(model: LoadedModel) -> dict[str, Any]:
    """The prompt as what its tokens are embedded to."""
    embeds = model.model.embed(torch.tensor([PROMPT]))[0]
    return {"prompt_embeds": embeds.detach()}


def is_stored(models: Models, address: str) -> bool:
    keys = chunk_keys(namespace_digest(models.sender.fingerprint), PROMPT, CHUNK)
    return open_store(address, CHUNK).contains_kv(keys[0], [0], deadline_in(5))


@pytest.mark.slow
def test_prompt_embeddings_are_not_stored(models: Models) -> None:
    address = f"{STORE}-embeds"
    engine = Engine(models.folder, "sender", address, {"enable_prompt_embeds": True})
    try:
        (output,) = engine.llm.generate(
            embedded(models.sender), sampling_params(None, 6), use_tqdm=False
        )
        assert engine.worker().flush(30)
        assert not is_stored(models, address)
        (answer,) = engine.answer([PROMPT], [None])
        assert engine.worker().flush(30)
    finally:
        engine.stop()
    assert is_stored(models, address)
    own = own_answer(models.sender.model, PROMPT)
    assert_same(answer, own)
    assert list(output.outputs[0].token_ids) == own[1]


@pytest.mark.slow
def test_a_pooling_request_is_prefilled(models: Models) -> None:
    options = {"runner": "pooling", "convert": "embed"}
    engine = Engine(models.folder, "receiver", STORE, options, plan="[2,4)")
    try:
        pooled = vllm.PoolingParams(task="embed", skip_reading_prefix_cache=False)
        (output,) = engine.llm.embed(
            [{"prompt_token_ids": PROMPT}], pooling_params=pooled, use_tqdm=False
        )
        assert engine.records()[-1]["reason"] == "pooling"
    finally:
        engine.stop()
    hidden = models.receiver.model.model.model(torch.tensor([PROMPT])).last_hidden_state[0, -1]
    wanted = torch.nn.functional.normalize(hidden.detach(), dim=0)
    found = torch.tensor(output.outputs.embedding)
    torch.testing.assert_close(found, wanted, atol=TOLERANCE, rtol=0)


@pytest.fixture(scope="module")
def receiver(models: Models) -> Iterator[Engine]:
    """Of the tests below; those above start engines of their own, and one can live at a time."""
    options = {"enable_prompt_embeds": True, "scheduling_policy": "priority"}
    engine = Engine(models.folder, "receiver", STORE, options, plan="[2,4)")
    yield engine
    engine.stop()


@pytest.mark.slow
def test_prompt_embeddings_are_prefilled(models: Models, receiver: Engine) -> None:
    for plan in (None, "none"):
        (output,) = receiver.llm.generate(
            embedded(models.receiver), sampling_params(plan, 6), use_tqdm=False
        )
        assert list(output.outputs[0].token_ids) == reference(models, PROMPT, None)[1]
        assert receiver.records()[-1]["reason"] == "prompt_embeds"
    (answer,) = receiver.answer([PROMPT], [None])  # the same as tokens, by the server's plan
    assert_same(answer, reference(models, PROMPT, "[2,4)"))


@pytest.mark.slow
def test_priorities_change_no_answer(models: Models, receiver: Engine) -> None:
    plans = [None, "none", "[0,2)", None]
    outputs = receiver.llm.generate(
        [{"prompt_token_ids": prompt} for prompt in PROMPTS],
        [sampling_params(plan, 6) for plan in plans],
        use_tqdm=False,
        priority=[3, 1, 2, 0],
    )
    wanted = [
        reference(models, prompt, plan or "[2,4)")[1]
        for prompt, plan in zip(PROMPTS, plans, strict=True)
    ]
    assert [list(output.outputs[0].token_ids) for output in outputs] == wanted
    assert {each["reason"] for each in receiver.records()[-4:]} == {None}


@pytest.mark.slow
def test_a_batch_with_prompt_embeddings_beside_tokens(models: Models, receiver: Engine) -> None:
    receiver.forget()
    prompts: list[Any] = [embedded(models.receiver), {"prompt_token_ids": PROMPT}]
    outputs = receiver.llm.generate(prompts, [sampling_params("[0,2)", 6)] * 2, use_tqdm=False)
    wanted = [reference(models, PROMPT, plan)[1] for plan in (None, "[0,2)")]
    assert [list(output.outputs[0].token_ids) for output in outputs] == wanted
    answers = receiver.answer(PROMPTS, [None] * 4)
    assert_all_same(models, answers, PROMPTS, ["[2,4)"] * 4)
