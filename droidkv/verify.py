"""Run the oracles of a reuse plan on the user's own pair and items, with figures.

Log-probabilities over the whole vocabulary, at every suffix token, are compared with the stock
model's forward pass, or with a cache built by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from droidkv.content import state_sha256
from droidkv.encode import EncodedItem
from droidkv.errors import PlanError
from droidkv.estimate import prefill_seconds
from droidkv.loading import LoadedModel
from droidkv.models import DecoderModel
from droidkv.oracles import Oracles, VerifyResult
from droidkv.plan import ReusePlan
from droidkv.run_folder import Progress, no_progress
from droidkv.stitch import StitchMap

__all__ = ["VerifyResult", "spread_plans", "verify_pair"]


def verify_pair(
    sender: LoadedModel,
    receiver: LoadedModel,
    items: Sequence[EncodedItem],
    plans: Sequence[ReusePlan] | None = None,
    stitch: StitchMap | None = None,
    on_progress: Progress = no_progress,
    on_estimate: Callable[[float], None] | None = None,
) -> list[VerifyResult]:
    """Run every oracle on a pair.

    Args:
        sender: The model that prefills.
        receiver: The model that answers.
        items: One or more; the more and the longer, the more is shown, and the longer it takes.
        plans: Plans to try beside the empty one and the full prefill; None = five spread over the
            layers, and the stitched ones among them if there is a map.
        stitch: The pair's map.
        on_progress: Told of each finished oracle.
        on_estimate: Told at the start about how many seconds it will take.

    Raises:
        PlanError: No items, or a plan is out of range.
        StitchError: A plan stitches without a map.
    """
    if not items:
        raise PlanError("expected at least one item to verify the pair on, got none")
    num_layers = receiver.model.num_layers
    tried = spread_plans(num_layers, stitch is not None) if plans is None else list(plans)
    for plan in tried:
        plan.check(num_layers)
    before = [_state(model.model) for model in (sender, receiver)]
    checked = Oracles(sender.model, receiver.model, items, tried, stitch, receiver.eos_ids)
    if on_estimate is not None:
        longest = max(items, key=lambda item: len(item.prefix_ids))
        seconds = prefill_seconds(receiver.model, longest.prefix_ids)
        on_estimate(checked.num_prefills() * seconds)
    oracles = checked.all()
    on_progress("verify", 0, len(oracles) + 1)
    results = []
    for done, oracle in enumerate(oracles, start=1):
        results.append(oracle())
        on_progress("verify", done, len(oracles) + 1)
    results.append(_unchanged(before, [_state(model.model) for model in (sender, receiver)]))
    on_progress("verify", len(results), len(results))
    return results


def spread_plans(num_layers: int, stitched: bool = False) -> list[ReusePlan]:
    """A few groups of different sizes and places: lower half, upper half, thirds, one layer."""
    half, third = num_layers // 2, num_layers // 3
    borders = [(0, half), (half, num_layers), (third, 2 * third), (2 * third, 2 * third + 1)]
    borders.append((max(0, num_layers - third - 1), num_layers - 1))
    plans = [ReusePlan.of(start, stop) for start, stop in borders]
    if stitched:
        plans += [ReusePlan.of(start, stop, "stitch") for start, stop in borders]
    return [plan for plan in dict.fromkeys(plans) if plan.group]


def _state(model: DecoderModel) -> tuple[str, int]:
    """All weights by content, and the number of hooks."""
    hooks = sum(
        len(module._forward_pre_hooks) + len(module._forward_hooks)
        for module in model.model.modules()
    )
    return state_sha256(model.model.state_dict()), hooks


def _unchanged(before: Sequence[object], after: Sequence[object]) -> VerifyResult:
    num_changed = sum(old != new for old, new in zip(before, after, strict=True))
    return VerifyResult(
        "both models are bit for bit what they were",
        float(num_changed),
        0.0,
        num_changed == 0,
        "number of models whose weights (SHA-256) or hooks differ after all of the above",
    )
