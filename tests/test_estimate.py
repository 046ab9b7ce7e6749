from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny import NUM_LAYERS, VOCAB_SIZE, tiny_model

from droidkv.capture import capture
from droidkv.encode import EncodedItem
from droidkv.estimate import layer_tokens, prefill_seconds, probe_prefills, sweep_prefills
from droidkv.evaluate import TokenItem, full_prefill_answer
from droidkv.models import DecoderModel
from droidkv.oracles import Oracles
from droidkv.plan import OPERATORS, ReusePlan, all_plans
from droidkv.probe import probe_item
from droidkv.stitch import StitchMap, fit_stitch
from droidkv.sweep import sweep
from droidkv.verify import spread_plans

NUM_PREFIX = 160
# Of a group's last layer only keys and values are computed, which hooks do not see.
TOLERANCE = 0.25


@pytest.fixture
def models() -> tuple[DecoderModel, DecoderModel]:
    return tiny_model(), tiny_model(noise=0.03)


def tokens(count: int) -> list[int]:
    return torch.randint(3, VOCAB_SIZE, (count,)).tolist()


def prefills_run(models: tuple[DecoderModel, DecoderModel], work: Callable[[], Any]) -> float:
    """What both models' layers really ran, in prefills."""
    ran = 0

    def count(_module: Any, arguments: Any, keywords: Any, _output: Any) -> None:
        nonlocal ran
        hidden = arguments[0] if arguments else keywords["hidden_states"]
        ran += hidden.shape[0] * hidden.shape[1]

    hooks = [
        layer.register_forward_hook(count, with_kwargs=True)
        for model in models
        for layer in model.model.model.layers
    ]
    work()
    for hook in hooks:
        hook.remove()
    return ran / (NUM_LAYERS * NUM_PREFIX)


def answered(receiver: DecoderModel) -> TokenItem:
    return full_prefill_answer(receiver, tokens(NUM_PREFIX), tokens(4), 4, {2})


def a_map(models: tuple[DecoderModel, DecoderModel]) -> StitchMap:
    return fit_stitch(*models, [tokens(64) for _ in range(4)], rank=4)


def test_work_is_counted_as_the_design_says() -> None:
    """L(L+1)/2 layer passes over the prefix instead of about L^3/6."""
    plans = all_plans(30)
    assert layer_tokens(plans, 30, prefix_tokens=1, forced_tokens=0) == 465
    assert sum(plan.num_recomputed for plan in plans) == 4960


@pytest.mark.parametrize(
    "plans",
    [all_plans(NUM_LAYERS, operators=OPERATORS), [ReusePlan.of(0, 0), ReusePlan.of(1, 5)]],
    ids=["all", "few"],
)
def test_the_work_of_a_sweep_is_what_it_runs(
    models: tuple[DecoderModel, DecoderModel], plans: list[ReusePlan]
) -> None:
    sender, receiver = models
    stitch = a_map(models)

    def work() -> None:
        item = answered(receiver)
        captured = capture(sender, item.prefix_ids[None], hidden_layers=range(NUM_LAYERS))
        sweep(receiver, captured, item, plans, stitch)

    expected = sweep_prefills(answered(receiver), plans, NUM_LAYERS)
    assert prefills_run(models, work) == pytest.approx(expected, rel=TOLERANCE)


def test_the_work_of_a_probe_is_what_it_runs(models: tuple[DecoderModel, DecoderModel]) -> None:
    sender, receiver = models

    def work() -> None:
        item = answered(receiver)
        captured = capture(sender, item.prefix_ids[None], hidden_layers=range(NUM_LAYERS))
        probe_item(receiver, captured, item)

    expected = probe_prefills(answered(receiver), NUM_LAYERS)
    assert prefills_run(models, work) == pytest.approx(expected, rel=TOLERANCE)


@pytest.mark.parametrize("num_items", [1, 3])
def test_the_work_of_the_oracles_is_what_they_run(
    models: tuple[DecoderModel, DecoderModel], num_items: int
) -> None:
    items = [
        EncodedItem(str(index), tuple(tokens(NUM_PREFIX)), tuple(tokens(4)))
        for index in range(num_items)
    ]
    oracles = Oracles(*models, items, spread_plans(NUM_LAYERS, True), a_map(models), (2,))
    ran = prefills_run(models, lambda: [oracle() for oracle in oracles.all()])
    assert ran == pytest.approx(oracles.num_prefills(), rel=TOLERANCE)


def test_a_prefill_is_timed_on_any_length(models: tuple[DecoderModel, DecoderModel]) -> None:
    for count in (1, 40):
        assert prefill_seconds(models[1], tokens(count)) > 0
