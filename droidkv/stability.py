"""How far layers' losses agree from item to item and from probe to probe. Pure numpy."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from droidkv.errors import ProfileError
from droidkv.quality import Array


def ranks(values: Array) -> Array:
    """Ranks from 0, ties sharing their mean rank."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts) - 1
    return np.asarray((last - (counts - 1) / 2)[inverse])


def spearman(a: Sequence[float] | Array, b: Sequence[float] | Array) -> float:
    """Rank correlation of two curves over the same layers, in [-1, 1].

    0 where a curve is constant, which has no order to agree with.

    Raises:
        ProfileError: The curves are of different lengths, or of fewer than 2 layers.
    """
    left, right = (ranks(np.asarray(curve, dtype=float)) for curve in (a, b))
    if left.shape != right.shape or len(left) < 2:
        raise ProfileError(
            f"expected two curves over the same 2 or more layers, got {len(left)} and {len(right)}"
        )
    left, right = left - left.mean(), right - right.mean()
    spread = float(np.sqrt((left @ left) * (right @ right)))
    return float(left @ right) / spread if spread else 0.0


@dataclass(frozen=True)
class Stability:
    """How far a probe's curve depends on its items.

    Attributes:
        deviation: Standard deviation of each layer's loss over items, `num_layers` values.
        pairwise_spearman: Mean rank correlation of two items' curves over all pairs of items.
        split_half_spearman: Rank correlation of the mean curves of two halves of the items, the
            mean over random halvings: what to expect of as many fresh items as half of these.
        num_items: Items.
    """

    deviation: tuple[float, ...]
    pairwise_spearman: float
    split_half_spearman: float
    num_items: int


def stability(losses: Array, num_halvings: int = 100, seed: int = 0) -> Stability:
    """Stability of layers' losses across items.

    Args:
        losses: `[num_layers, num_items]`.
        num_halvings: Random halvings to average over.
        seed: Of the halvings.

    Raises:
        ProfileError: Fewer than 2 layers or 2 items.
    """
    num_layers, num_items = losses.shape
    if num_layers < 2 or num_items < 2:
        raise ProfileError(
            f"expected at least 2 layers and 2 items to compare, got {num_layers} and {num_items}"
        )
    pairs = itertools.combinations(range(num_items), 2)
    pairwise = [spearman(losses[:, i], losses[:, j]) for i, j in pairs]
    rng = np.random.default_rng(seed)
    halves = []
    for _ in range(num_halvings):
        order = rng.permutation(num_items)
        first, second = order[: num_items // 2], order[num_items // 2 :]
        halves.append(spearman(losses[:, first].mean(axis=1), losses[:, second].mean(axis=1)))
    return Stability(
        deviation=tuple(losses.std(axis=1, ddof=1).tolist()),
        pairwise_spearman=float(np.mean(pairwise)),
        split_half_spearman=float(np.mean(halves)),
        num_items=num_items,
    )


def overlap(a: Collection[int], b: Collection[int]) -> float:
    """Jaccard index of two sets of critical layers: shared over all; 1 where both are empty."""
    union = {*a, *b}
    return len({*a} & {*b}) / len(union) if union else 1.0
