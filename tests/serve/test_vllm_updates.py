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

from droidkv.loading import load_model
from droidkv.pair import ModelRef
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


def reloaded_from_elsewhere(engine: Engine, factor: float) -> None:
    """vLLM's own way, from a folder with other numbers; or back from that which was served."""
    served = engine.audit.parent / "receiver"
    folder = served.with_name("updated")
    if factor == FACTOR and not folder.exists():
        updated = load_model(ModelRef(str(served))).model.model
        with torch.no_grad():
            for weight in norms(updated):
                weight.mul_(factor)
        updated.save_pretrained(folder)
    path = str(folder if factor == FACTOR else served)
    engine.llm.collective_rpc("reload_weights", kwargs={"weights_path": path})


Update = Callable[[Engine, float], None]
UPDATES = [
    copied,
    copied_in_inference_mode,
    written_past_the_parameters,
    loaded,
    reloaded,
    reloaded_from_elsewhere,
]


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


def test_a_single_number_that_vllm_reloads_past_the_model_is_seen(receiver: Engine) -> None:
    """By the way of weights in the engine's own format, which `load_weights` hears nothing of."""

    def weight(model: Any) -> torch.Tensor:
        kept: torch.Tensor = model.model.embed_tokens.weight.detach().clone()
        return kept

    def reload(sent: torch.Tensor) -> None:
        options = {"weights_iterator": [(name, sent)], "is_checkpoint_format": False}
        receiver.llm.collective_rpc("reload_weights", kwargs=options)

    name = "model.embed_tokens.weight"
    receiver.forget()
    receiver.answer([PROMPT], ["[2,4)"])
    assert receiver.records()[-1]["reason"] is None
    (before,) = receiver.llm.apply_model(weight)
    changed = before.clone()
    changed[3, 5] += 1e-3  # none of those that are compared
    try:
        reload(changed)
        receiver.forget()
        receiver.answer([PROMPT], ["[2,4)"])
        assert receiver.records()[-1]["reason"] == "weights_changed"
    finally:
        reload(before)
        watch_anew(receiver)


def test_sleep_and_waking_up_are_no_update(models: Models, receiver: Engine) -> None:
    # Level 2 drops weights where there is memory to drop, which this build's engine has not.
    for level in (1, 2):
        receiver.llm.sleep(level=level)
        receiver.llm.wake_up()
        receiver.forget()
        (answer,) = receiver.answer([PROMPT], ["[2,4)"])
        assert_same(answer, reference(models, PROMPT, "[2,4)"))
        assert receiver.records()[-1]["reason"] is None


def start_anew(receiver: Engine, update: Update, factor: float) -> None:
    """Undo an update, and watch anew."""
    update(receiver, 1 / factor)
    watch_anew(receiver)


def watch_anew(receiver: Engine) -> None:
    """As an engine does that just started."""
    model = receiver.worker()._receiver._model
    model._weights = WeightWatch(model._model)
    receiver.scheduler().connector._receiver_scheduler._weights_changed = False
