"""How much work a run is, and how long it will take here: in prefills of one of its items."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from droidkv.bench.timing import timed
from droidkv.capture import capture
from droidkv.evaluate import TokenItem
from droidkv.models import DecoderModel
from droidkv.plan import Operator, ReusePlan
from droidkv.profile_job import Job

_WARM_UP_TOKENS = 16


def prefill_seconds(model: DecoderModel, prefix_ids: Sequence[int] | torch.Tensor) -> float:
    """How long one prefill of an item takes here, timed once.

    Args:
        model: The model.
        prefix_ids: The item's prefix, `[num_tokens]`.
    """
    prefix = torch.as_tensor(prefix_ids)[None]
    capture(model, prefix[:, :_WARM_UP_TOKENS])
    return timed(model.device, capture, model, prefix)[1].seconds


def estimate_items(
    job: Job,
    missing: Sequence[int],
    prefills: Callable[[TokenItem], float],
    on_estimate: Callable[[float], None] | None,
) -> None:
    """Tell how long the missing items of a run will take, by the first of them.

    Args:
        job: The run.
        missing: Items that are not finished; with none there is nothing to tell.
        prefills: Work of an item, in prefills of it.
        on_estimate: Told the seconds; None = nobody asks.
    """
    if on_estimate is None or not missing:
        return
    item = job.first_answer(missing[0])
    on_estimate(
        len(missing) * prefills(item) * prefill_seconds(job.receiver.model, item.prefix_ids)
    )


def layer_tokens(
    plans: Sequence[ReusePlan], num_layers: int, prefix_tokens: int, forced_tokens: int
) -> int:
    """Work of a sweep: tokens times layers that it runs, prefix and suffix together."""
    depth: dict[tuple[int, Operator], int] = {}
    for plan in plans:
        entry = (plan.group.start, plan.operator)
        depth[entry] = max(depth.get(entry, 0), plan.num_recomputed)
    inside = sum(depth.values())
    above = sum(num_layers - plan.group.stop for plan in plans)
    return inside * (prefix_tokens + forced_tokens) + (above + num_layers) * forced_tokens


def sweep_prefills(item: TokenItem, plans: Sequence[ReusePlan], num_layers: int) -> float:
    """Work of sweeping an item, in prefills of it: the sender's and the receiver's own as well."""
    num_prefix, num_forced = len(item.prefix_ids), item.forced_ids.shape[1]
    work = layer_tokens(plans, num_layers, num_prefix, num_forced)
    return 2 + work / (num_layers * num_prefix)


def probe_prefills(item: TokenItem, num_layers: int) -> float:
    """Work of probing an item, in prefills of it.

    That is a sweep of every layer by itself, one more prefill, and over that a pass of the suffix
    for each layer that is reused alone.
    """
    plans = [ReusePlan.of(layer, layer + 1) for layer in range(num_layers)]
    reused_alone = num_layers * item.forced_ids.shape[1] / len(item.prefix_ids)
    return sweep_prefills(item, plans, num_layers) + 1 + reused_alone
