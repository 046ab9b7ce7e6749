"""Partial prefill against the stock model's own prefill, by number of recomputed layers."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from droidkv.bench.timing import Elapsed, median, random_tokens, rounded, surroundings, timed
from droidkv.cache import CapturedCache
from droidkv.capture import capture
from droidkv.errors import PlanError, UnsupportedModelError
from droidkv.models import DecoderModel, TwoStreamModel
from droidkv.plan import ReusePlan
from droidkv.prefill import forward_suffix, partial_prefill
from droidkv.run_folder import Progress, no_progress

# Of 30 layers: 1, 2, 3, 5, 10, 15, 20, 25, 30. Of others the same shares.
SHARES = (1 / 30, 2 / 30, 3 / 30, 5 / 30, 1 / 3, 1 / 2, 2 / 3, 5 / 6, 1)


def bench_prefill(
    sender: DecoderModel,
    receiver: DecoderModel,
    num_recomputed: Iterable[int] | None = None,
    prefix_tokens: int = 1000,
    suffix_tokens: int = 32,
    num_repeats: int = 5,
    seed: int = 0,
    command: str = "",
    on_progress: Progress = no_progress,
) -> dict[str, object]:
    """Time from the prompt to the first token's logits: all by the model itself, or k layers.

    The full prefill is the stock model's own forward pass over prefix and suffix. The partial one
    is given the sender's captured cache in memory, recomputes a group of k layers in the middle
    and reads the suffix through all layers. Both return logits of the last token only. Each
    partial run is timed right after a full one.

    Args:
        sender: The model whose cache is reused.
        receiver: The model that answers.
        num_recomputed: Values of k; None = spread over the model's layers.
        prefix_tokens: Random tokens both models share.
        suffix_tokens: Random tokens only the receiver reads.
        num_repeats: Timed runs of each kind and k; the median counts. One more warms up.
        seed: Of the tokens.
        command: What reproduces the result; kept in it.
        on_progress: Told of each timed pair of runs.

    Raises:
        PlanError: A k, or a number of tokens or repeats, is out of range.
        UnsupportedModelError: The receiver is no model by itself, but a second stream (ICaRus).
    """
    if isinstance(receiver, TwoStreamModel):
        raise UnsupportedModelError(
            "expected a receiver with a prefill of its own to time, got one that runs as a second "
            "stream beside the base (apply = 'icarus'); see `droidkv bench icarus`"
        )
    num_layers = receiver.num_layers
    counts = _counts(num_recomputed, num_layers)
    if min(prefix_tokens, suffix_tokens, num_repeats) < 1:
        raise PlanError(
            f"expected at least 1 prefix token, suffix token and repeat, got {prefix_tokens}, "
            f"{suffix_tokens} and {num_repeats}"
        )
    started = time.perf_counter()
    prefix = torch.tensor([random_tokens(receiver, prefix_tokens, seed)], device=receiver.device)
    suffix = torch.tensor(
        [random_tokens(receiver, suffix_tokens, seed + 1)], device=receiver.device
    )
    plans = [middle_group(count, num_layers) for count in counts]
    captured = capture(sender, prefix, hidden_layers={plan.group.start for plan in plans})
    whole = torch.cat([prefix, suffix], dim=1)
    full: list[list[Elapsed]] = [[] for _ in plans]
    partial: list[list[Elapsed]] = [[] for _ in plans]
    stock_logits(receiver, whole)
    for repeat in range(num_repeats + 1):
        for index, plan in enumerate(plans):
            if repeat == 0:
                partial_logits(receiver, prefix, suffix, captured, plan)
                continue
            full[index].append(timed(receiver.device, stock_logits, receiver, whole)[1])
            _, elapsed = timed(
                receiver.device, partial_logits, receiver, prefix, suffix, captured, plan
            )
            partial[index].append(elapsed)
            on_progress("prefill", (repeat - 1) * len(plans) + index + 1, num_repeats * len(plans))
    baseline = median([run for runs in full for run in runs])
    rows = [
        _row(plan, num_layers, baseline, *runs)
        for plan, *runs in zip(plans, full, partial, strict=True)
    ]
    result: dict[str, object] = {
        "prefix_tokens": prefix_tokens,
        "suffix_tokens": suffix_tokens,
        "num_layers": num_layers,
        "num_repeats": num_repeats,
        "rows": rows,
    }
    return result | surroundings(receiver, seed, command, time.perf_counter() - started)


@torch.no_grad()
def stock_logits(model: DecoderModel, input_ids: Tensor) -> Tensor:
    """Logits of the last token by the model's own forward pass, `[batch, vocab]`."""
    return model.model(input_ids, use_cache=True, logits_to_keep=1).logits[:, -1]  # type: ignore[no-any-return]


@torch.no_grad()
def partial_logits(
    receiver: DecoderModel,
    prefix: Tensor,
    suffix: Tensor,
    captured: CapturedCache,
    plan: ReusePlan,
) -> Tensor:
    """Logits of the last token by way of a plan, `[batch, vocab]`."""
    context = partial_prefill(receiver, prefix, captured, plan)
    return receiver.logits(forward_suffix(receiver, context, suffix)[:, -1])


def middle_group(num_recomputed: int, num_layers: int) -> ReusePlan:
    """A group of so many layers, as far from both ends as it can be."""
    start = (num_layers - num_recomputed) // 2
    return ReusePlan.of(start, start + num_recomputed)


def _counts(num_recomputed: Iterable[int] | None, num_layers: int) -> list[int]:
    if num_recomputed is None:
        return sorted({max(1, round(share * num_layers)) for share in SHARES})
    counts = sorted(set(num_recomputed))
    if not counts or counts[0] < 1 or counts[-1] > num_layers:
        raise PlanError(f"expected numbers of layers from 1 to {num_layers}, got {counts}")
    return counts


def _row(
    plan: ReusePlan,
    num_layers: int,
    baseline: Elapsed,
    full_runs: Sequence[Elapsed],
    partial_runs: Sequence[Elapsed],
) -> dict[str, object]:
    count = plan.num_recomputed
    partial = median(partial_runs)
    limit = num_layers / count
    pairs = [
        full.seconds / part.seconds for full, part in zip(full_runs, partial_runs, strict=True)
    ]
    return {
        "k": count,
        "plan": str(plan),
        "full_seconds": rounded(baseline.seconds),
        "partial_seconds": rounded(partial.seconds),
        "ratio": rounded(baseline.seconds / partial.seconds),
        "limit": rounded(limit),
        "share_of_limit": rounded(baseline.seconds / partial.seconds / limit),
        "ratio_of_pairs_min": rounded(min(pairs)),
        "ratio_of_pairs_max": rounded(max(pairs)),
        "partial_seconds_min": rounded(min(run.seconds for run in partial_runs)),
        "partial_seconds_max": rounded(max(run.seconds for run in partial_runs)),
        "full_cpu_seconds": rounded(baseline.cpu_seconds),
        "partial_cpu_seconds": rounded(partial.cpu_seconds),
        "cpu_ratio": rounded(baseline.cpu_seconds / partial.cpu_seconds),
    }
