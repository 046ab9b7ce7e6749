"""Weights that are updated in a running engine: reuse and storing end, and answers stay right."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from serve.engines import (
    CHUNK,
    PROMPTS,
    Engine,
    Models,
    assert_same,
    assert_stored,
    make_models,
    own_answer,
    reference,
    store_captured,
)
from torch import nn

from droidkv.serve.opening import open_store
from droidkv.serve.weight_watch import WeightWatch

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

STORE = "memory://test-vllm-updates"
PROMPT, OTHER = PROMPTS[0], PROMPTS[2]
FACTOR = 1.5


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    made = make_models(tmp_path_factory.mktemp("models"))
    store_captured(made, open_store(STORE, CHUNK), PROMPTS)
    return made


def norms(model: nn.Module) -> Iterator[nn.Parameter]:
    """Weights that a model of vLLM and of Hugging Face have in common, in every layer."""
    for name, parameter in model.named_parameters():
        if name.endswith("input_layernorm.weight"):
            yield parameter


def copied(engine: Engine, factor: float) -> None:
    @torch.no_grad()
    def copy(model: nn.Module) -> None:
        for weight in norms(model):
            weight.copy_(weight * factor)

    engine.llm.apply_model(copy)


def copied_in_inference_mode(engine: Engine, factor: float) -> None:
    def copy(model: nn.Module) -> None:
        with torch.inference_mode():
            for weight in norms(model):
                weight.mul_(factor)

    engine.llm.apply_model(copy)


def written_past_the_parameters(engine: Engine, factor: float) -> None:
    def write(model: nn.Module) -> None:
        for weight in norms(model):
            weight.data.mul_(factor)

    engine.llm.apply_model(write)


def loaded(engine: Engine, factor: float) -> None:
    """As trainers do it that send a part of the weights."""

    def load(model: Any) -> None:
        sent = [
            (name, parameter.detach() * factor)
            for name, parameter in model.named_parameters()
            if name.endswith("input_layernorm.weight")
        ]
        model.load_weights(sent)

    engine.llm.apply_model(load)


def reloaded(engine: Engine, factor: float) -> None:
    """vLLM's own way, from the very folder that was served: the same numbers, if factor is 1."""
    engine.llm.collective_rpc("reload_weights")


Update = Callable[[Engine, float], None]
UPDATES = [copied, copied_in_inference_mode, written_past_the_parameters, loaded, reloaded]


def updated_answer(models: Models, model: Any, prompt: list[int], factor: float) -> Any:
    with torch.no_grad():
        for weight in norms(model.model):
            weight.mul_(factor)
        answer = own_answer(model, prompt)
        for weight in norms(model.model):
            weight.div_(factor)
    return answer


def test_a_sender_that_is_updated_stores_no_more(models: Models) -> None:
    address = f"{STORE}-sender"
    engine = Engine(models.folder, "sender", address)
    try:
        engine.answer([PROMPT], [None])
        assert engine.worker().flush(30)
        copied(engine, FACTOR)
        engine.forget()
        (answer,) = engine.answer([OTHER], [None])
        assert engine.worker().flush(30)
        counts = engine.worker()._sender.counts()
        namespace = engine.worker()._setup.namespace
    finally:
        engine.stop()
    assert_same(answer, updated_answer(models, models.sender.model, OTHER, FACTOR))
    store = open_store(address, CHUNK)
    assert_stored(models, store, namespace, [PROMPT])
    assert counts["weights_changed"] == len(OTHER) // CHUNK
    assert counts["stored"] == len(PROMPT) // CHUNK


@pytest.fixture(scope="module")
def receiver(models: Models) -> Iterator[Engine]:
    """Of the tests below; that above starts an engine of its own, and one can live at a time."""
    engine = Engine(models.folder, "receiver", STORE)
    yield engine
    engine.stop()


@pytest.mark.parametrize("update", UPDATES)
def test_a_receiver_that_is_updated_reuses_no_more(
    models: Models, receiver: Engine, update: Update
) -> None:
    receiver.forget()
    (answer,) = receiver.answer([PROMPT], ["[2,4)"])
    assert_same(answer, reference(models, PROMPT, "[2,4)"))
    assert receiver.records()[-1]["reason"] is None
    factor = 1.0 if update is reloaded else FACTOR
    update(receiver, factor)
    receiver.forget()  # as vLLM wants it after an update
    try:
        for prompt in (PROMPT, PROMPT, OTHER):
            (answer,) = receiver.answer([prompt], ["[2,4)"])
            assert_same(answer, updated_answer(models, models.receiver.model, prompt, factor))
            assert receiver.records()[-1]["reason"] == "weights_changed"
            assert receiver.records()[-1]["loaded_bytes"] == 0
    finally:
        start_anew(receiver, update, factor)


def start_anew(receiver: Engine, update: Update, factor: float) -> None:
    """Undo an update, as if the engine had just started."""
    update(receiver, 1 / factor)
    model = receiver.worker()._receiver._model
    model._weights = WeightWatch(model._model)
    receiver.scheduler().connector._receiver_scheduler._weights_changed = False
