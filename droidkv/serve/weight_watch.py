"""Noticing that a running engine's weights were updated: its identity is unknown from then on.

An engine has several ways of updating weights in place, and whoever can reach its model has more.
Some go through the model's own `load_weights`, which is counted; some copy into parameters, which
PyTorch counts; some write into their memory past both, which a few numbers of each parameter show.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

_SAMPLES = 32  # numbers of each parameter


class WeightWatch:
    """Compares a model's parameters with what they were when this was made.

    It reads no more than a few numbers of each, so it can be asked in any step that stores or
    reuses. What it cannot see is a write into the memory of parameters that hits none of them.
    vLLM has such writes in some backends of its weight transfer, which is refused at start; else
    only code that whoever runs the engine sends into it can do so.

    Args:
        model: The model. If it has a `num_weight_loads`, that must not go up.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._has_changed = False
        self._marks = self._current_marks()
        # Views, which show whatever is written into the memory of these parameters.
        self._views = [_spread(parameter.detach()) for parameter in model.parameters()]
        self._samples = self._current_samples()

    def has_changed(self) -> bool:
        """Whether anything differs, or ever did when this was asked."""
        self._has_changed = (
            self._has_changed
            or self._current_marks() != self._marks
            or not torch.equal(self._current_samples(), self._samples)
        )
        return self._has_changed

    def _current_marks(self) -> list[Any]:
        loads = getattr(self._model, "num_weight_loads", 0)
        return [loads, *map(_marks, self._model.parameters())]

    def _current_samples(self) -> Tensor:
        return torch.cat(self._views) if self._views else torch.empty(0)


def _marks(parameter: Tensor) -> tuple[Any, ...]:
    """Another memory, or a write that PyTorch counts; tensors made for inference count none."""
    version = -1 if parameter.is_inference() else parameter._version
    return parameter.data_ptr(), version, tuple(parameter.shape), parameter.dtype


def _spread(tensor: Tensor) -> Tensor:
    """A view of some numbers spread over a tensor's memory, whatever its strides."""
    count = min(tensor.numel(), _SAMPLES)
    step = tensor.numel() // max(count, 1)
    return tensor.as_strided((count,), (step,), tensor.storage_offset())
