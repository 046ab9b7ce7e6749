"""The exact sweep against the loops it replaces, on one model pair and the same items."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from droidkv.bench.timing import (
    Elapsed,
    PeakRss,
    median,
    random_tokens,
    rounded,
    surroundings,
    timed,
    total,
)
from droidkv.capture import capture
from droidkv.costs import kv_bytes
from droidkv.errors import PlanError
from droidkv.evaluate import TeacherForced, TokenItem, evaluate_plan, full_prefill_answer
from droidkv.models import DecoderModel
from droidkv.plan import ReusePlan, all_plans
from droidkv.prefill import generate, partial_prefill
from droidkv.run_folder import Progress, no_progress
from droidkv.sweep import sweep

# The naive loop is timed in so many parts, and the sweep before, between and after them.
NUM_PARTS = 2


@dataclass
class _Timings:
    """What was measured on one item.

    Attributes:
        capture: The sender's prefill of the prefix.
        sweeps: Runs of the sweep.
        naive: The naive loop, plan by plan.
        paper: The paper's loop, for the plans that were decoded.
        rss_before_bytes: Resident memory before a sweep, the largest.
        rss_peak_bytes: Resident memory during a sweep, the largest.
        differences: Per plan |sweep - naive|, of KL and of NLL.
        num_flips: Plans on which the two disagree about reproducing the reference answer.
    """

    capture: Elapsed
    sweeps: list[Elapsed] = field(default_factory=list)
    naive: list[Elapsed] = field(default_factory=list)
    paper: list[Elapsed] = field(default_factory=list)
    rss_before_bytes: int = 0
    rss_peak_bytes: int = 0
    differences: list[float] = field(default_factory=list)
    num_flips: int = 0


def bench_sweep(
    sender: DecoderModel,
    receiver: DecoderModel,
    prefix_tokens: int = 2048,
    suffix_tokens: int = 8,
    answer_tokens: int = 4,
    num_items: int = 1,
    granularity: int = 1,
    paper_plans: int | None = 32,
    seed: int = 0,
    command: str = "",
    on_progress: Progress = no_progress,
) -> dict[str, object]:
    """Time three ways to evaluate every plan, each on the same items, answers and captured cache.

    - sweep: `droidkv.sweep.sweep`, all plans from shared work.
    - naive: `evaluate_plan` plan by plan: its partial prefill, then the reference answer forced.
    - paper: plan by plan its partial prefill, then greedy decoding of an answer of the same number
      of tokens, which is how DroidSpeak evaluates a group. Also given with the sender's prefill
      repeated for every plan, as separate runs would do: that is computed, not timed.

    The three are interleaved: the sweep runs before, between and after the halves of the naive
    loop (the median counts), and the paper's plans are spread over the naive loop.

    Args:
        sender: The model whose cache is reused.
        receiver: The model that answers.
        prefix_tokens: Random tokens both models share.
        suffix_tokens: Random tokens only the receiver reads.
        answer_tokens: Tokens of the receiver's reference answer.
        num_items: Items; times are sums over them.
        granularity: Borders of groups are multiples of this.
        paper_plans: Plans decoded for the paper's loop, spread evenly over the number of
            recomputed layers and scaled up; None = all, 0 = leave the paper's loop out.
        seed: Of tokens and order.
        command: What reproduces the result; kept in it.
        on_progress: Told of each plan of the naive loop.

    Raises:
        PlanError: A number of tokens, items or plans is out of range.
    """
    if min(prefix_tokens, suffix_tokens, answer_tokens, num_items) < 1 or (paper_plans or 0) < 0:
        raise PlanError(
            f"expected at least 1 prefix, suffix and answer token and item, got {prefix_tokens}, "
            f"{suffix_tokens}, {answer_tokens} and {num_items}, and paper_plans={paper_plans}"
        )
    started = time.perf_counter()
    plans = all_plans(receiver.num_layers, granularity)
    items: list[_Timings] = []
    for index in range(num_items):
        item_seed = seed + 1000 * index
        item = full_prefill_answer(
            receiver,
            random_tokens(receiver, prefix_tokens, item_seed),
            random_tokens(receiver, suffix_tokens, item_seed + 1),
            answer_tokens,
            eos_ids=(),
        )
        loops = _Loops(sender, receiver, item)
        measured = loops.measure(
            random.Random(item_seed).sample(plans, len(plans)),
            _spread(plans, paper_plans, item_seed),
            partial(_report, on_progress, index, num_items, len(plans)),
        )
        items.append(measured)
    result: dict[str, object] = {
        "prefix_tokens": prefix_tokens,
        "suffix_tokens": suffix_tokens,
        "answer_tokens": answer_tokens,
        "num_items": num_items,
        "granularity": granularity,
        "num_plans": len(plans),
        "num_groups": len(plans) - 1,
        **_figures(items, work_limit(plans)),
        **_paper_figures(items, len(plans)),
        **_memory_figures(items, receiver, prefix_tokens, len(plans)),
    }
    return result | surroundings(receiver, seed, command, time.perf_counter() - started)


def work_limit(plans: Sequence[ReusePlan]) -> float:
    """Prefix layer passes of the naive loop per pass of the sweep, which shares them by start.

    Over all groups of L layers at granularity 1 this is (L + 2) / 3.
    """
    shared: dict[int, int] = {}
    for plan in plans:
        start = plan.group.start
        shared[start] = max(shared.get(start, 0), plan.num_recomputed)
    return sum(plan.num_recomputed for plan in plans) / sum(shared.values())


class _Loops:
    """One item, and the three ways to evaluate plans on it."""

    def __init__(self, sender: DecoderModel, receiver: DecoderModel, item: TokenItem) -> None:
        self.receiver = receiver
        self.item = item
        prefix_ids, layers = item.prefix_ids[None], range(sender.num_layers)
        self.captured, elapsed = timed(
            sender.device, capture, sender, prefix_ids, hidden_layers=layers
        )
        self.timings = _Timings(capture=elapsed)

    def measure(
        self,
        plans: Sequence[ReusePlan],
        decoded: Sequence[ReusePlan],
        on_plan: Callable[[int], None],
    ) -> _Timings:
        """Interleave them.

        Args:
            plans: All plans, in the order of the naive loop.
            decoded: Those that the paper's loop is timed on.
            on_plan: Told how many plans the naive loop has done.
        """
        self._warm_up(plans[:2])
        device, timings = self.receiver.device, self.timings
        swept = self._sweep(plans)
        num_decoded = 0
        for part in range(NUM_PARTS):
            first, last = (len(plans) * (part + k) // NUM_PARTS for k in (0, 1))
            for done, plan in enumerate(plans[first:last], start=first + 1):
                alone, elapsed = timed(
                    device, evaluate_plan, self.receiver, self.captured, self.item, plan
                )
                timings.naive.append(elapsed)
                self._compare(swept[plan], alone)
                due = done * len(decoded) // len(plans)
                for other in decoded[num_decoded:due]:
                    timings.paper.append(timed(device, self._decode, other)[1])
                num_decoded = due
                on_plan(done)
            swept = self._sweep(plans)
        return timings

    def _warm_up(self, plans: Sequence[ReusePlan]) -> None:
        sweep(self.receiver, self.captured, self.item, plans)
        evaluate_plan(self.receiver, self.captured, self.item, plans[0])
        self._decode(plans[0])

    def _sweep(self, plans: Sequence[ReusePlan]) -> dict[ReusePlan, TeacherForced]:
        with PeakRss() as memory:
            results, elapsed = timed(
                self.receiver.device, sweep, self.receiver, self.captured, self.item, plans
            )
        timings = self.timings
        timings.sweeps.append(elapsed)
        timings.rss_before_bytes = max(timings.rss_before_bytes, memory.before_bytes)
        timings.rss_peak_bytes = max(timings.rss_peak_bytes, memory.peak_bytes)
        return results

    def _decode(self, plan: ReusePlan) -> None:
        """One plan the paper's way: its own greedy answer, of the reference answer's length."""
        context = partial_prefill(self.receiver, self.item.prefix_ids[None], self.captured, plan)
        num_tokens = len(self.item.answer_ids)
        generate(self.receiver, context, self.item.suffix_ids[None], num_tokens, eos_ids=())

    def _compare(self, swept: TeacherForced, alone: TeacherForced) -> None:
        self.timings.differences += [abs(swept.kl - alone.kl), abs(swept.nll - alone.nll)]
        self.timings.num_flips += swept.agrees != alone.agrees


def _report(on_progress: Progress, item: int, num_items: int, num_plans: int, done: int) -> None:
    on_progress("naive loop", item * num_plans + done, num_items * num_plans)


def _spread(plans: Sequence[ReusePlan], num_wanted: int | None, seed: int) -> list[ReusePlan]:
    """So many plans, evenly over the number of recomputed layers, in random order."""
    draw = random.Random(seed)
    ordered = sorted(plans, key=lambda plan: (plan.num_recomputed, draw.random()))
    count = len(plans) if num_wanted is None else min(num_wanted, len(plans))
    step = len(plans) / max(count, 1)
    offset = draw.random() * step
    chosen = [ordered[min(int(offset + i * step), len(plans) - 1)] for i in range(count)]
    draw.shuffle(chosen)
    return chosen


def _figures(items: Sequence[_Timings], limit: float) -> dict[str, object]:
    naive = total(run for item in items for run in item.naive)
    swept = total(median(item.sweeps) for item in items)
    return {
        "naive_seconds": rounded(naive.seconds),
        "sweep_seconds": rounded(swept.seconds),
        "ratio": rounded(naive.seconds / swept.seconds),
        "limit": rounded(limit),
        "share_of_limit": rounded(naive.seconds / swept.seconds / limit),
        "naive_cpu_seconds": rounded(naive.cpu_seconds),
        "sweep_cpu_seconds": rounded(swept.cpu_seconds),
        "cpu_ratio": rounded(naive.cpu_seconds / swept.cpu_seconds),
        "sweep_runs_seconds": [[rounded(run.seconds) for run in item.sweeps] for item in items],
        "max_abs_difference": max(max(item.differences) for item in items),
        "num_answer_flips": sum(item.num_flips for item in items),
        "capture_seconds": rounded(total(item.capture for item in items).seconds),
    }


def _paper_figures(items: Sequence[_Timings], num_plans: int) -> dict[str, object]:
    num_measured = len(items[0].paper)
    if num_measured == 0:
        return {"paper_plans_measured": 0}
    measured = total(run for item in items for run in item.paper)
    swept = total(median(item.sweeps) for item in items)
    scale = num_plans / num_measured
    seconds = measured.seconds * scale
    captures = num_plans * total(item.capture for item in items).seconds
    return {
        "paper_seconds": rounded(seconds),
        "paper_ratio": rounded(seconds / swept.seconds),
        "paper_cpu_ratio": rounded(measured.cpu_seconds * scale / swept.cpu_seconds),
        "paper_plans_measured": num_measured,
        "paper_is_scaled_up": num_measured < num_plans,
        "paper_seconds_with_capture_per_plan": rounded(seconds + captures),
        "paper_ratio_with_capture_per_plan": rounded((seconds + captures) / swept.seconds),
    }


def _memory_figures(
    items: Sequence[_Timings], model: DecoderModel, prefix_tokens: int, num_plans: int
) -> dict[str, object]:
    before = max(item.rss_before_bytes for item in items)
    peak = max(item.rss_peak_bytes for item in items)
    cache = kv_bytes(model.shape, prefix_tokens, model.num_layers)
    return {
        "peak_rss_bytes": peak,
        "sweep_rss_growth_bytes": peak - before,
        "kv_cache_bytes": cache,
        "kv_cache_per_plan_would_be_bytes": cache * num_plans,
    }
