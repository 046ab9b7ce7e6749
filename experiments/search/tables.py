"""What searches are replayed on: a profile, a tiny pair swept here, or made-up losses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from droidkv.plan import Operator, ReusePlan, all_plans
from droidkv.search import DriftTable, ItemDrift

TINY_LAYERS = 24


@dataclass(frozen=True)
class Replay:
    """What a search is replayed on.

    Attributes:
        table: Results of every plan on every item.
        num_layers: Layers of the model.
        score_losses: Relative loss of each plan's score in percent; None where nothing is scored.
    """

    table: DriftTable
    num_layers: int
    score_losses: Mapping[ReusePlan, float] | None = None


def read_table(name: str, operators: tuple[Operator, ...]) -> Replay:
    """A table by name.

    Args:
        name: `tiny`, `synthetic:LAYERS`, or the path of a profile.
        operators: Families of plans to keep.
    """
    if name == "tiny":
        return Replay(_tiny(operators), TINY_LAYERS)
    if name.startswith("synthetic:"):
        num_layers = int(name.removeprefix("synthetic:"))
        return Replay(_synthetic(num_layers, operators), num_layers)
    from droidkv.objectives import measure
    from droidkv.profile import read_profile

    profile = read_profile(Path(name))
    kept = set(all_plans(profile.num_layers, operators=operators))
    records = [record for record in profile.measurements if record.plan in kept]
    losses = {point.plan: point.loss for point in measure(profile, "score")}
    return Replay(DriftTable.of_records(records), profile.num_layers, losses)


def _tiny(operators: tuple[Operator, ...], num_items: int = 16) -> DriftTable:
    """A sweep of random tiny models, 24 layers deep; seconds."""
    import torch

    from droidkv.capture import capture
    from droidkv.evaluate import full_prefill_answer
    from droidkv.models import DecoderModel
    from droidkv.stitch import fit_stitch
    from droidkv.sweep import sweep
    from droidkv.tiny import TinySpec, tiny_model

    sender, receiver = (
        DecoderModel(
            tiny_model(
                TinySpec("llama", noise=noise, layers=TINY_LAYERS), torch.float32, device="cpu"
            )
        )
        for noise in (0.0, 0.08)
    )
    generator = torch.Generator().manual_seed(0)

    def tokens(count: int) -> list[int]:
        return torch.randint(3, 256, (count,), generator=generator).tolist()

    stitch = fit_stitch(sender, receiver, [tokens(64) for _ in range(16)])
    plans = all_plans(TINY_LAYERS, operators=operators)
    columns: dict[object, list[ItemDrift]] = {plan: [] for plan in plans}
    for _ in range(num_items):
        item = full_prefill_answer(receiver, tokens(48), tokens(6), 6, [2])
        captured = capture(sender, item.prefix_ids[None], hidden_layers=range(TINY_LAYERS))
        for plan, drift in sweep(receiver, captured, item, plans, stitch).items():
            columns[plan].append(ItemDrift(drift.kl, drift.nll, drift.top1, drift.agrees))
    return DriftTable({plan: tuple(columns[plan]) for plan in plans})


def _synthetic(
    num_layers: int, operators: tuple[Operator, ...], num_items: int = 16, seed: int = 0
) -> DriftTable:
    """Made-up losses with the shape of real ones: a few layers matter, entering late costs, items
    differ in difficulty, and plans span three orders of magnitude."""
    rng = np.random.default_rng(seed)
    weights = 0.2 + rng.gamma(0.5, 1.0, num_layers)
    weights /= weights.sum()
    difficulty = rng.gamma(1.0, 1.0, num_items)
    rows = {}
    for plan in all_plans(num_layers, operators=operators):
        recomputed = np.zeros(num_layers, dtype=bool)
        recomputed[plan.group.start : plan.group.stop] = True
        entry = 0.15 * plan.group.start / num_layers * 0.8**plan.num_recomputed
        entry *= (plan.num_recomputed > 0) * (0.3 if plan.operator == "stitch" else 1.0)
        damage = 3 * (weights[~recomputed].sum() + entry) ** 2
        scatter = np.exp(0.3 * rng.standard_normal(num_items))
        kls = damage * difficulty * scatter + 1e-7 * rng.random(num_items)
        rows[plan] = tuple(
            ItemDrift(kl, kl, 1.0 if kl < 0.1 else 0.5, bool(kl < 0.1)) for kl in kls.tolist()
        )
    return DriftTable(rows)
