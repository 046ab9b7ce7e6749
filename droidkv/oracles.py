"""What must hold of a reuse plan on any pair, each against a computation that knows no plans."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from transformers import DynamicCache

from droidkv.cache import CapturedCache
from droidkv.capture import capture
from droidkv.encode import EncodedItem
from droidkv.errors import UnsupportedModelError
from droidkv.evaluate import TeacherForced, TokenItem, evaluate_plan, full_prefill_answer
from droidkv.models import DecoderModel, TwoStreamModel
from droidkv.plan import ReusePlan
from droidkv.prefill import forward_suffix, partial_prefill
from droidkv.stitch import StitchMap
from droidkv.sweep import sweep

# Largest difference of a log-probability, in nats, that rounding alone explains in a small model.
TOLERANCES = {torch.float32: 1e-3, torch.float16: 0.1, torch.bfloat16: 0.6}
# In a deep one it is as much as this many times what the stock model, reading in two passes, is off
# what it says in one.
ROUNDING_TIMES = 2
# A KL or NLL is a mean over tokens, so it may be off by this share of the first.
MEAN_SHARE = 0.1
# Naive reuse must be further off than so many tolerances, or agreeing proves nothing.
DISCRIMINATION = 3
ANSWER_TOKENS = 12


@dataclass(frozen=True)
class VerifyResult:
    """What one oracle found.

    Attributes:
        oracle: What must hold.
        error: The largest deviation found; nats, unless `detail` says otherwise.
        tolerance: The largest one allowed; for the discrimination check, what must be exceeded.
        passed: Whether it held.
        detail: What was compared with what, and what a failure means.
    """

    oracle: str
    error: float
    tolerance: float
    passed: bool
    detail: str


class Oracles:
    """The oracles over one pair and its items; all of batch one unless an oracle says so.

    Raises:
        UnsupportedModelError: The receiver is no model by itself, but a second stream (ICaRus).
    """

    def __init__(
        self,
        sender: DecoderModel,
        receiver: DecoderModel,
        items: Sequence[EncodedItem],
        plans: Sequence[ReusePlan],
        stitch: StitchMap | None,
        eos_ids: Sequence[int],
    ) -> None:
        if isinstance(receiver, TwoStreamModel):
            raise UnsupportedModelError(
                "expected a receiver with a forward pass of its own to compare with, got one that "
                "runs as a second stream beside the base (apply = 'icarus')"
            )
        self.sender = sender
        self.receiver = receiver
        self.items = items
        self.prefixes = [torch.tensor([item.prefix_ids]) for item in items]
        self.suffixes = [torch.tensor([item.suffix_ids]) for item in items]
        self.empty = ReusePlan.of(0, 0)
        self.full = ReusePlan.of(0, receiver.num_layers)
        self.plans = [self.empty, *plans, self.full]
        # Enough where what is checked has little to do with the group's place.
        self.few = list(dict.fromkeys([self.empty, self.plans[len(self.plans) // 2], self.full]))
        self.copies = [plan for plan in self.plans if plan.operator == "copy"]
        self.stitch = stitch
        self.eos_ids = eos_ids
        self.starts = {plan.group.start for plan in self.plans if plan.transition is not None}

    @cached_property
    def rounding(self) -> float:
        """How far the stock receiver is off itself on these items, in nats; no plan is involved."""
        return max(
            _distance(self._by_hand(index, self.receiver), self._stock(index))
            for index in range(len(self.items))
        )

    @property
    def tolerance(self) -> float:
        """Largest difference of a log-probability, in nats, that rounding alone explains here."""
        rounding = self.rounding if math.isfinite(self.rounding) else 0.0
        return max(TOLERANCES[self.receiver.dtype], ROUNDING_TIMES * rounding)

    def all(self) -> list[Callable[[], VerifyResult]]:
        """Every oracle, the one that gives the others their meaning first."""
        return [
            self.discriminates,
            self.full_prefill,
            self.same_model,
            self.empty_plan,
            self.padding,
            self.chunks,
            self.sweep,
            self.noise_floor,
        ]

    def num_prefills(self) -> float:
        """About how many prefills of one item all oracles take together."""

        def recomputed(plans: Sequence[ReusePlan]) -> float:
            return sum(plan.num_recomputed for plan in plans) / self.full.num_recomputed

        num_items, num_few, few = len(self.items), len(self.few), recomputed(self.few)
        rows = max(2, num_items)  # of the padded batch
        per_item = 2 + 2 + 3 + 2 + 1 + len(self.copies) + recomputed(self.copies) + 2 + 2 * few
        padding = rows * (num_few + 2 + 3 * few)
        sweeps = 4 + 2 * recomputed(self.plans) + recomputed(self.copies)
        return num_items * per_item + padding + sweeps

    def discriminates(self) -> VerifyResult:
        error = max(
            _distance(self._by_plan(captured, index, self.empty), self._stock(index))
            for index, captured in self._captured(self.sender)
        )
        needed = DISCRIMINATION * self.tolerance
        told = "so a check that took one cache for the other would fail"
        untold = (
            "which is within rounding: on these items the checks below prove little; take longer "
            "items, or another pair"
        )
        return VerifyResult(
            "naive reuse differs from the full prefill",
            error,
            needed,
            error > needed,
            f"the receiver on the sender's whole cache is {error:.2g} nats off its own prefill, "
            f"{told if error > needed else untold}",
        )

    def full_prefill(self) -> VerifyResult:
        return self._result(
            f"recomputing {self.full} is the stock model's own prefill",
            (
                _distance(self._by_plan(captured, index, self.full), self._stock(index))
                for index, captured in self._captured(self.sender)
            ),
            "against one forward pass of the receiver over prefix and suffix; the stock model in "
            f"two passes, over a cache of its own, is {self.rounding:.2g} nats off that itself",
        )

    def same_model(self) -> VerifyResult:
        return self._result(
            "a receiver that reuses its own cache loses nothing at any plan",
            (
                _distance(self._by_plan(captured, index, plan), self._stock(index))
                for index, captured in self._captured(self.receiver)
                for plan in self.copies
            ),
            f"{len(self.copies)} plans, sender = receiver, against its own forward pass",
        )

    def empty_plan(self) -> VerifyResult:
        return self._result(
            "recomputing nothing is naive reuse built by hand",
            (
                _distance(
                    self._by_plan(captured, index, self.empty), self._by_hand(index, self.sender)
                )
                for index, captured in self._captured(self.sender)
            ),
            "against the receiver's forward pass over a DynamicCache that the sender filled",
        )

    def padding(self) -> VerifyResult:
        """All items as one batch; a single item is joined by its own first half."""
        prefixes, suffixes = list(self.prefixes), list(self.suffixes)
        if len(prefixes) == 1:
            prefixes.append(prefixes[0][:, : max(1, prefixes[0].shape[1] // 2)])
            suffixes.append(suffixes[0])
        return self._result(
            "batching and padding change nothing",
            self._padded_distances(prefixes, suffixes),
            f"{len(prefixes)} items as one batch, padded left and right, against each alone; "
            f"{len(self.few)} plans",
        )

    def chunks(self) -> VerifyResult:
        def distances() -> Iterator[float]:
            for index, whole in self._captured(self.sender):
                prefix = self.prefixes[index]
                size = max(1, prefix.shape[1] // 3)
                pieces = capture(self.sender, prefix, hidden_layers=self.starts, chunk_tokens=size)
                for plan in self.few:
                    context = partial_prefill(
                        self.receiver, prefix, pieces, plan, self.stitch, chunk_tokens=size
                    )
                    hidden = forward_suffix(self.receiver, context, self.suffixes[index])
                    expected = self._by_plan(whole, index, plan)
                    yield _distance(_log_probs(self.receiver, hidden)[0], expected)

        return self._result(
            "prefilling in chunks changes nothing",
            distances(),
            f"{len(self.few)} plans, captured and recomputed in three chunks and a rest",
        )

    def sweep(self) -> VerifyResult:
        index, captured = next(self._captured(self.sender))
        item = self._answered(index)
        swept = sweep(self.receiver, captured, item, self.plans, self.stitch)
        errors, num_flips = [], 0
        for plan in self.plans:
            alone = evaluate_plan(self.receiver, captured, item, plan, self.stitch)
            errors.append(_difference(swept[plan], alone))
            num_flips += swept[plan].agrees != alone.agrees
        return self._result(
            "the sweep gives what plan by plan gives",
            errors,
            f"KL and NLL of {len(self.plans)} plans over {len(item.answer_ids)} answer tokens; "
            f"{num_flips} plans whose answer the two judge differently",
            MEAN_SHARE * TOLERANCES[self.receiver.dtype],
        )

    def noise_floor(self) -> VerifyResult:
        index, captured = next(self._captured(self.receiver))
        results = sweep(self.receiver, captured, self._answered(index), self.copies)
        agreeing = sum(result.agrees for result in results.values())
        return self._result(
            "the noise floor of a loss is small",
            [_nan_as_inf(r.kl) if math.isfinite(r.nll) else math.inf for r in results.values()],
            f"KL of a receiver reusing its own cache, the largest over {len(results)} plans, "
            f"{agreeing} of which give the same answer; a loss below it is none",
            MEAN_SHARE * TOLERANCES[self.receiver.dtype],
        )

    def _padded_distances(
        self, prefixes: Sequence[Tensor], suffixes: Sequence[Tensor]
    ) -> Iterator[float]:
        alone = {
            (row, plan): self._alone(prefix, suffix, plan)
            for row, (prefix, suffix) in enumerate(zip(prefixes, suffixes, strict=True))
            for plan in self.few
        }
        for side in ("left", "right"):
            prefix, prefix_mask = _padded(prefixes, side)
            suffix, suffix_mask = _padded(suffixes, side)
            captured = capture(
                self.sender, prefix, attention_mask=prefix_mask, hidden_layers=self.starts
            )
            for plan in self.few:
                context = partial_prefill(self.receiver, prefix, captured, plan, self.stitch)
                hidden = forward_suffix(self.receiver, context, suffix, suffix_mask)
                batch = _log_probs(self.receiver, hidden)
                for row, mask in enumerate(suffix_mask.bool().to(batch.device)):
                    yield _distance(batch[row][mask], alone[row, plan])

    def _alone(self, prefix: Tensor, suffix: Tensor, plan: ReusePlan) -> Tensor:
        captured = capture(self.sender, prefix, hidden_layers=self.starts)
        context = partial_prefill(self.receiver, prefix, captured, plan, self.stitch)
        return _log_probs(self.receiver, forward_suffix(self.receiver, context, suffix))[0]

    def _captured(self, model: DecoderModel) -> Iterator[tuple[int, CapturedCache]]:
        """Each item's number, and its prefix captured on a model; one at a time."""
        for index, prefix in enumerate(self.prefixes):
            yield index, capture(model, prefix, hidden_layers=self.starts)

    def _by_plan(self, captured: CapturedCache, index: int, plan: ReusePlan) -> Tensor:
        context = partial_prefill(self.receiver, self.prefixes[index], captured, plan, self.stitch)
        hidden = forward_suffix(self.receiver, context, self.suffixes[index])
        return _log_probs(self.receiver, hidden)[0]

    @torch.no_grad()
    def _stock(self, index: int) -> Tensor:
        whole = torch.cat([self.prefixes[index], self.suffixes[index]], dim=1)
        logits = self.receiver.model(
            whole.to(self.receiver.device), logits_to_keep=self.suffixes[index].shape[1]
        ).logits
        return _normalised(logits)[0]

    @torch.no_grad()
    def _by_hand(self, index: int, sender: DecoderModel) -> Tensor:
        """The receiver's log-probabilities over a cache that `sender` filled."""
        cache = DynamicCache()  # without a config it keeps every position, windows or not
        sender.model(self.prefixes[index].to(sender.device), past_key_values=cache, use_cache=True)
        suffix = self.suffixes[index].to(self.receiver.device)
        return _normalised(self.receiver.model(suffix, past_key_values=cache).logits)[0]

    def _answered(self, index: int) -> TokenItem:
        item = self.items[index]
        return full_prefill_answer(
            self.receiver, item.prefix_ids, item.suffix_ids, ANSWER_TOKENS, self.eos_ids
        )

    def _result(
        self, oracle: str, errors: Iterable[float], detail: str, allowed: float | None = None
    ) -> VerifyResult:
        error, tolerance = max(errors), self.tolerance if allowed is None else allowed
        return VerifyResult(oracle, error, tolerance, error <= tolerance, detail)


def _normalised(logits: Tensor) -> Tensor:
    return logits.float().log_softmax(dim=-1)


@torch.no_grad()
def _log_probs(model: DecoderModel, hidden: Tensor) -> Tensor:
    return _normalised(model.logits(hidden))


def _distance(left: Tensor, right: Tensor) -> float:
    """Largest difference."""
    return _nan_as_inf(float((left - right).abs().max()))


def _difference(left: TeacherForced, right: TeacherForced) -> float:
    return max(_nan_as_inf(abs(left.kl - right.kl)), _nan_as_inf(abs(left.nll - right.nll)))


def _nan_as_inf(distance: float) -> float:
    """What is not a number is infinitely far off, which `max` would not see."""
    return math.inf if math.isnan(distance) else distance


def _padded(rows: Sequence[Tensor], side: str) -> tuple[Tensor, Tensor]:
    """Rows `[1, seq_len]` of token ids as one batch, and its mask."""
    longest = max(row.shape[1] for row in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for index, row in enumerate(rows):
        num_tokens = row.shape[1]
        first = longest - num_tokens if side == "left" else 0
        ids[index, first : first + num_tokens] = row[0]
        mask[index, first : first + num_tokens] = 1
    return ids, mask
