"""How far a frontier that was found lies behind the exact one. Pure functions of plain numbers.

Layers are whole numbers, so a frontier is a curve: the least loss at no more than c layers, for
every c. Both measures of regret are read off two such curves.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from droidkv.errors import ProfileError
from droidkv.quality import Array


def loss_curve(points: Iterable[tuple[int, float]], num_layers: int) -> Array:
    """Least loss among points of at most c layers, for c = 0 .. num_layers.

    Args:
        points: Layers recomputed and loss of each plan.
        num_layers: Layers of the model.

    Returns:
        `[num_layers + 1]`, falling; infinite below the cheapest point.
    """
    best = np.full(num_layers + 1, np.inf)
    for layers, loss in points:
        best[layers] = min(best[layers], loss)
    return np.minimum.accumulate(best)


def hypervolume(curve: Array, reference_loss: float) -> float:
    """Area between a curve and the reference loss, over the layers 0 .. num_layers.

    Every plan dominates what is right of it and above it; this is the area that the curve's plans
    dominate below `reference_loss`, in layers times the unit of the loss. Exact, since a curve is
    constant from one layer count to the next.
    """
    return float(np.maximum(0.0, reference_loss - curve[:-1]).sum())


def log_losses(losses: Array, floor: float) -> Array:
    """Natural logarithm of losses, those below `floor` counted as `floor`: on this scale a factor
    of ten counts the same wherever it is gained.

    Raises:
        ProfileError: `floor` is not above 0.
    """
    if floor <= 0:
        raise ProfileError(f"expected a floor above 0 to take logarithms, got {floor}")
    return np.log(np.maximum(losses, floor))


def layers_within(curve: Array, max_loss: float) -> int | None:
    """Fewest layers at which the curve is at or below `max_loss`; None if it never is."""
    good = np.flatnonzero(curve <= max_loss)
    return int(good[0]) if len(good) else None


@dataclass(frozen=True)
class Regret:
    """A found frontier against the exact one. 1, 1 and 0 = nothing lost.

    Attributes:
        hypervolume_ratio: Share of the exact frontier's area, on the scale of the loss.
        log_hypervolume_ratio: The same on the logarithmic scale.
        layers_gap: Layers that the cheapest found plan within the threshold recomputes more than
            the cheapest of all.
    """

    hypervolume_ratio: float
    log_hypervolume_ratio: float
    layers_gap: int


def regret(found: Array, exact: Array, threshold: float, floor: float) -> Regret:
    """Compare the curve of the plans found with the curve of all plans.

    Args:
        found: `loss_curve` of the plans measured on every item.
        exact: `loss_curve` of all plans, of the same items.
        threshold: Loss that the user allows.
        floor: Noise floor of the loss, above 0; smaller losses are equal.

    Raises:
        ProfileError: The curves are of different models, full reuse was not measured, it loses
            nothing, or the exact curve never reaches the threshold.
    """
    if found.shape != exact.shape:
        raise ProfileError(f"expected two curves of one model, got {found.shape}, {exact.shape}")
    reference = float(exact[0])
    if not np.isfinite(reference) or reference <= floor:
        raise ProfileError(
            f"expected full reuse to be measured and to lose more than the floor {floor}, got "
            f"{reference}; there is no frontier to find"
        )
    least = layers_within(exact, threshold)
    if least is None:
        raise ProfileError(
            f"expected some plan within a loss of {threshold}, got {exact[-1]} at best"
        )
    num_layers = len(exact) - 1
    reached = layers_within(found, threshold)
    return Regret(
        hypervolume_ratio=_share(found, exact, reference),
        log_hypervolume_ratio=_share(
            log_losses(found, floor), log_losses(exact, floor), float(np.log(reference))
        ),
        layers_gap=(num_layers if reached is None else reached) - least,
    )


def _share(found: Array, exact: Array, reference: float) -> float:
    whole = hypervolume(exact, reference)
    return hypervolume(found, reference) / whole if whole else 1.0
