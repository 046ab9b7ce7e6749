"""The exact sweep: every plan's quality from shared work instead of one run per plan.

DroidSpeak (section 5.2) evaluates its O(L^2) layer groups one by one, which takes about L^3/6
layer passes over the prefix. But the recomputed KV of a layer depends only on the start of the
group, below the start all plans are one trunk, and above the stop all plans read the same sender
KV. So L(L+1)/2 layer passes over the prefix give every plan exactly.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from droidkv.cache import CapturedCache, KVCache, PrefixView, TokenAxis
from droidkv.evaluate import TeacherForced, TokenItem, compare
from droidkv.models import DecoderModel, Step
from droidkv.plan import Operator, ReusePlan
from droidkv.prefill import enter_group
from droidkv.stitch import StitchMap

# Suffixes of several plans are read in one call, as segments of one sequence of about this many
# tokens: enough to keep the cores busy, few enough that segments masked from each other are cheap.
STACKED_TOKENS = 256


@torch.no_grad()
def sweep(
    receiver: DecoderModel,
    captured: CapturedCache,
    item: TokenItem,
    plans: Sequence[ReusePlan],
    stitch: StitchMap | None = None,
) -> dict[ReusePlan, TeacherForced]:
    """Evaluate many plans on one item; equals `evaluate_plan` plan by plan, up to rounding.

    Peak memory above the captured cache is one layer's KV of the prefix, the prefix's hidden
    state, and one suffix's hidden state per plan: never a cache per plan.

    Args:
        receiver: The model that answers.
        captured: The sender's cache of the item's prefix (batch of one), with the E of every
            start in `plans`.
        item: The item and the receiver's own answer.
        plans: Any plans, in any order.
        stitch: The pair's map, if a plan stitches.

    Raises:
        PlanError: A plan is out of range, or the captured cache lacks an E.
        StitchError: A plan stitches without a map.
    """
    for plan in plans:
        plan.check(receiver.num_layers)
    run = _Sweep(receiver, captured, item)
    trunk = run.trunk()
    waiting: dict[int, list[tuple[ReusePlan, Tensor]]] = defaultdict(list)
    for entry in _by_entry(plans):
        for plan, state in run.recompute(entry, trunk[entry[0].group.start], stitch):
            waiting[plan.group.stop].append((plan, state))
    ordered, hidden = run.above(waiting)
    results = dict(zip(ordered, compare(hidden, receiver, item), strict=True))
    return {plan: results[plan] for plan in plans}


def _by_entry(plans: Iterable[ReusePlan]) -> list[list[ReusePlan]]:
    """Plans that enter at one layer by one operator, by rising stop."""
    entries: dict[tuple[int, Operator], list[ReusePlan]] = defaultdict(list)
    for plan in dict.fromkeys(plans):
        entries[plan.group.start, plan.operator].append(plan)
    return [sorted(entry) for _, entry in sorted(entries.items())]


class _Sweep:
    """One item's sweep: the steps shared by its passes."""

    def __init__(self, receiver: DecoderModel, captured: CapturedCache, item: TokenItem) -> None:
        self.receiver = receiver
        self.captured = captured
        self.item = item
        self.forced = item.forced_ids.to(receiver.device)
        self.prefix_axis = captured.axis.to(receiver.device)
        both_axis = self.prefix_axis.cat(self._suffix_axis(1))
        self.prefix_step = receiver.step(self.prefix_axis, self.prefix_axis)
        self.both_step = receiver.step(both_axis, both_axis)
        self.suffix_step = self._stacked_step(1)
        self.plans_per_call = max(1, STACKED_TOKENS // self.forced.shape[1])
        self.whole_step = self._stacked_step(self.plans_per_call)

    def trunk(self) -> list[Tensor]:
        """Suffix hidden state entering each layer when all layers below read sender KV."""
        states = [self.receiver.embed(self.forced)]
        for layer in range(self.receiver.num_layers - 1):
            states.append(self._read(layer, states[-1], self._sender_view(layer)))
        return states

    def recompute(
        self, entry: Sequence[ReusePlan], state: Tensor, stitch: StitchMap | None
    ) -> Iterator[tuple[ReusePlan, Tensor]]:
        """Run prefix and suffix up from one start; yield the suffix state at each plan's stop.

        Inside a group the suffix reads the receiver's own KV, so both run as one sequence. The
        state leaves layer `stop - 1`. An empty plan leaves nothing: it yields its trunk.
        """
        plans = {plan.group.stop: plan for plan in entry}
        first = entry[0]
        if not first.group:
            yield plans.pop(first.group.stop), state
        if not plans:
            return
        prefix = enter_group(
            self.receiver, self.item.prefix_ids[None], self.captured, max(entry), stitch
        )
        num_prefix = prefix.shape[1]
        hidden = torch.cat([self.receiver.widen(prefix), state], dim=1)
        for layer in range(first.group.start, max(plans) - 1):
            cache = KVCache.empty(self.receiver.num_layers)  # forgotten with the layer
            hidden = self.receiver.run_layer(layer, hidden, self.both_step, cache)
            if layer + 1 in plans:
                # A copy: a view would keep the prefix's hidden state as long as the plan waits.
                yield plans[layer + 1], hidden[:, num_prefix:].clone()
        last = max(plans) - 1
        prefix, state = hidden[:, :num_prefix], hidden[:, num_prefix:]
        cache = KVCache.empty(self.receiver.num_layers)
        self.receiver.store_kv(last, prefix, self.prefix_step, cache)
        yield plans[last + 1], self._read(last, state, PrefixView(*cache.layer(last)))

    def above(
        self, waiting: dict[int, list[tuple[ReusePlan, Tensor]]]
    ) -> tuple[list[ReusePlan], Tensor]:
        """Carry all plans through the layers above their stop, side by side over sender KV."""
        ordered: list[ReusePlan] = []
        pool = self.receiver.embed(self.forced)[:0]
        for layer in range(self.receiver.num_layers + 1):
            arrived = waiting[layer]
            ordered += [plan for plan, _ in arrived]
            pool = torch.cat([pool, *(state for _, state in arrived)])
            if layer < self.receiver.num_layers and len(pool):
                pool = self._read_stacked(layer, pool)
        return ordered, pool

    def _read_stacked(self, layer: int, pool: Tensor) -> Tensor:
        """One layer over `[num_plans, num_forced, hidden]`, several plans a call."""
        view = self._sender_view(layer)
        parts = []
        for part in torch.split(pool, self.plans_per_call):
            whole = len(part) == self.plans_per_call
            step = self.whole_step if whole else self._stacked_step(len(part))
            hidden = part.reshape(1, -1, part.shape[-1])
            hidden = self.receiver.run_layer(layer, hidden, step, view)
            parts.append(hidden.reshape(part.shape))
        return torch.cat(parts)

    def _stacked_step(self, num_plans: int) -> Step:
        axis = self._suffix_axis(num_plans)
        return self.receiver.step(axis, self.prefix_axis.cat(axis))

    def _suffix_axis(self, num_plans: int) -> TokenAxis:
        """The suffixes of several plans side by side, each a segment of its own."""
        num_forced = self.forced.shape[1]
        first = self.prefix_axis.next_position
        positions = (first + torch.arange(num_forced, device=first.device)).repeat(1, num_plans)
        if num_plans == 1:
            return TokenAxis(positions)
        segments = torch.arange(1, num_plans + 1, device=first.device).repeat_interleave(num_forced)
        return TokenAxis(positions, segments[None])

    def _read(self, layer: int, hidden: Tensor, view: PrefixView) -> Tensor:
        return self.receiver.run_layer(layer, hidden, self.suffix_step, view)

    def _sender_view(self, layer: int) -> PrefixView:
        device = self.receiver.device
        return PrefixView(
            self.captured.keys[layer].to(device), self.captured.values[layer].to(device)
        )
