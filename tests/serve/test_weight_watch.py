from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from droidkv.serve.weight_watch import WeightWatch


class Model(nn.Module):
    """Parameters of several kinds: plain, transposed, empty, of another dtype, never counted."""

    def __init__(self) -> None:
        super().__init__()
        self.num_weight_loads = 0
        self.plain = nn.Linear(8, 200)
        self.transposed = nn.Parameter(torch.randn(40, 30).T, requires_grad=False)
        self.none = nn.Parameter(torch.empty(0), requires_grad=False)
        self.narrow = nn.Parameter(torch.randn(5).bfloat16(), requires_grad=False)
        with torch.inference_mode():
            self.uncounted = nn.Parameter(torch.randn(50), requires_grad=False)


@torch.no_grad()
def copy_into(model: Model) -> None:
    model.plain.weight[3, 5].copy_(torch.tensor(7.0))


def past_the_counter(model: Model) -> None:
    model.transposed.data.mul_(1.01)


def for_inference(model: Model) -> None:
    with torch.inference_mode():
        model.uncounted.add_(1)


def another_memory(model: Model) -> None:
    model.plain.bias = nn.Parameter(model.plain.bias.detach().clone())


def swapped(model: Model) -> None:
    model.narrow.data = model.narrow.data.clone()


def loaded(model: Model) -> None:
    model.num_weight_loads += 1


def discarded(model: Model) -> None:
    model.transposed.data.zero_()


CHANGES = [
    copy_into,
    past_the_counter,
    for_inference,
    another_memory,
    swapped,
    loaded,
    discarded,
]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("asked_in_inference_mode", [False, True])
def test_a_change_is_seen_and_not_forgotten(
    change: Callable[[Model], None], asked_in_inference_mode: bool
) -> None:
    model = Model()
    before = model.transposed.clone()
    with torch.inference_mode(asked_in_inference_mode):
        watch = WeightWatch(model)
        assert not watch.has_changed()
    change(model)
    with torch.inference_mode(asked_in_inference_mode):
        assert watch.has_changed()
    model.transposed.data.copy_(before)
    assert watch.has_changed()


def test_use_is_no_change() -> None:
    model = Model()
    watch = WeightWatch(model)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            model.plain(torch.randn(3, 8)) @ model.plain.weight
            model.transposed.sum()
    model.requires_grad_(False)
    assert not watch.has_changed()


def test_a_model_without_parameters_never_changes() -> None:
    assert not WeightWatch(nn.Module()).has_changed()
