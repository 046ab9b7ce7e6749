"""What a profile run measures, and the work of each of its steps."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from droidkv.capture import capture
from droidkv.encode import EncodedItem, encode_shared
from droidkv.errors import ProfileError, StitchError, TaskError, unknown_name
from droidkv.evaluate import (
    TeacherForced,
    TokenItem,
    decode_plans,
    evaluate_plan,
    full_prefill_states,
)
from droidkv.identity import content_digest
from droidkv.jsonio import sha256_file
from droidkv.loading import LoadedModel
from droidkv.objectives import measure_noise_floor
from droidkv.pair import Pair, TaskRef
from droidkv.plan import Operator, ReusePlan, all_plans
from droidkv.profile import Profile, read_profile, require_identity, require_reference
from droidkv.provenance import provenance
from droidkv.records import (
    ItemRecord,
    ModelRecord,
    PlanRecord,
    StitchRecord,
    TaskRecord,
    require_numbers,
)
from droidkv.refine import RefineItem
from droidkv.stitch import StitchMap
from droidkv.sweep import sweep
from droidkv.tasks import Item, Task

_LOG = logging.getLogger(__name__)

Decode = Literal["none", "frontier", "all"]
DECODES: tuple[Decode, ...] = ("none", "frontier", "all")
# Of the plans with one operator and one number of layers, this many may matter to a frontier.
NEAR_FRONTIER = 2


@dataclass(frozen=True)
class ProfileSettings:
    """What is measured.

    Args:
        task: The task and its options.
        num_items: Evaluated items.
        seed: Seed of the items.
        granularity: Borders of groups are multiples of this.
        operators: Families of plans; `stitch` fits a map first.
        decode: Which diverging plans are decoded for their score: none, those near the frontier
            (the others count as score 0, and say so), or all.
        calibration_items: Items whose prefixes the map is fitted on; never evaluated ones.
        rank: Rank of the map.
        ridge: Penalty of its fit.
        confirms: A profile to confirm on fresh items: its items are skipped, its map is used.
        plans: The only plans to measure, as text; empty = all that granularity and operators give.
        refine: Stitched plans, as text, at whose starts the map is trained by KL first.
        refine_items: Calibration items it is trained on.
        refine_steps: Steps of that training, per plan.
        dtype: Of weights and caches.
        device: Torch device.

    Raises:
        ProfileError: A number or name is out of range.
    """

    task: TaskRef
    num_items: int = 16
    seed: int = 0
    granularity: int = 1
    operators: tuple[Operator, ...] = ("copy", "stitch")
    decode: Decode = "frontier"
    calibration_items: int = 24
    rank: int = 32
    ridge: float = 1e-3
    confirms: str | None = None
    plans: tuple[str, ...] = ()
    refine: tuple[str, ...] = ()
    refine_items: int = 192
    refine_steps: int = 200
    dtype: str = "float32"
    device: str = "cpu"

    def __post_init__(self) -> None:
        for name in (
            "num_items",
            "granularity",
            "calibration_items",
            "rank",
            "refine_items",
            "refine_steps",
        ):
            if getattr(self, name) < 1:
                raise ProfileError(f"expected {name} >= 1, got {getattr(self, name)}")
        if not 0 < self.ridge < float("inf"):
            raise ProfileError(f"expected ridge > 0, got {self.ridge}")
        if not self.operators:
            raise ProfileError("expected at least one operator, got none; 'copy' is the paper's")
        if self.decode not in DECODES:
            raise ProfileError(unknown_name("way to decode", self.decode, DECODES))


def load_map(profile_file: Path, profile: Profile) -> StitchMap:
    """The stitching map that lies beside a profile.

    Raises:
        StitchError: The profile has none, or the file is not the one it was measured with.
        StorageError: The file is missing or damaged.
    """
    if profile.stitch is None:
        raise StitchError(f"expected a profile with a stitching map, got {profile_file} with none")
    return StitchMap.load(profile_file.parent / profile.stitch.file, profile.stitch.sha256)


class Job:
    """A profile's run: models, items and the work of one step.

    Raises:
        ProfileError: The pair has a reference and none is given, or a profile cannot be read.
        IdentityError: A profile to confirm is of other models.
        TaskError: The task has no item left.
    """

    def __init__(
        self,
        pair: Pair,
        settings: ProfileSettings,
        task: Task,
        sender: LoadedModel,
        receiver: LoadedModel,
        reference: LoadedModel | None = None,
    ) -> None:
        if pair.reference is not None and reference is None:
            raise ProfileError(
                f"expected a pair whose receiver is its own reference, got {pair.name!r}, whose "
                "receiver was trained to read the sender's KV as it is: there are no layers to "
                "choose; use `droidkv profile` and `droidkv confirm`"
            )
        self.pair, self.settings, self.task = pair, settings, task
        self.sender, self.receiver, self.reference = sender, receiver, reference
        self._first: dict[int, TokenItem] = {}
        self.confirmed = read_profile(settings.confirms) if settings.confirms else None
        if self.confirmed is not None:
            require_identity(self.confirmed, sender.fingerprint, receiver.fingerprint)
            require_reference(self.confirmed, (reference or receiver).fingerprint)
        self.items = self._items()
        self.plans = self._plans()
        self.calibration: list[Item] = []
        if self.stitches:
            num_items = settings.refine_items if settings.refine else settings.calibration_items
            self.calibration = task.items("calibration", num_items, settings.seed)
        # One that the two models read differently is refused before anything is written.
        for item in (*self.items, *self.calibration):
            self.encode(item)

    @property
    def stitches(self) -> bool:
        """Whether a plan needs a stitching map."""
        return any(plan.operator == "stitch" for plan in self.plans)

    def _plans(self) -> list[ReusePlan]:
        """The plans asked for; of a full-share receiver the empty one and its own prefill.

        Such a receiver has learned to read the sender's KV alone, so nothing between the two is of
        use to it.
        """
        settings, num_layers = self.settings, self.receiver.model.num_layers
        if settings.plans:
            return [ReusePlan.parse(text, num_layers) for text in settings.plans]
        if self.reference is not None:
            return [ReusePlan.of(0, 0), ReusePlan.of(0, num_layers)]
        return all_plans(num_layers, settings.granularity, settings.operators)

    def _items(self) -> list[Item]:
        """The evaluated items; those of a confirmed profile come first in the task and are cut.

        Other questions over their prefixes come last: they are hardly fresher.
        """
        wanted = self.settings.num_items
        seen = {item.id for item in self.confirmed.items} if self.confirmed else set()
        limit = 2 * (len(seen) + wanted) if seen else wanted
        items = self.task.items("eval", limit, self.settings.seed)
        prefixes = {item.prefix for item in items if item.id in seen}
        fresh = [item for item in items if item.id not in seen]
        fresh.sort(key=lambda item: item.prefix in prefixes)
        if not fresh:
            raise TaskError(
                f"expected fresh items to confirm {self.settings.confirms} on, but the task "
                f"{self.task.name!r} has only {len(items)}, all in that profile"
            )
        if len(fresh) < wanted:
            _LOG.info(
                "the task has %d fresh items to evaluate on, not %d; its others are for training "
                "and calibration",
                len(fresh),
                wanted,
            )
        if known := sum(item.prefix in prefixes for item in fresh[:wanted]):
            _LOG.warning("%d items ask about a text that the confirmed profile asked about", known)
        return fresh[:wanted]

    def key(self) -> dict[str, Any]:
        """What every kept step depends on."""
        return {
            "pair": self.pair.name,
            "chat": self.pair.chat,
            "settings": dataclasses.asdict(self.settings),
            "task_version": self.task.version,
            "items": content_digest(
                [dataclasses.astuple(item) for item in (*self.items, *self.calibration)]
            ),
            "sender": self.sender.fingerprint.digest(),
            "receiver": self.receiver.fingerprint.digest(),
            "reference": self.reference and self.reference.fingerprint.digest(),
        }

    def encode(self, item: Item) -> EncodedItem:
        return encode_shared(
            item, self.sender.tokenizer, self.receiver.tokenizer, chat=self.pair.chat
        )

    def answer(self, index: int) -> TokenItem:
        """The answer to an item that plans are held against: the reference's own."""
        return self._first.pop(index, None) or self._answer(self.items[index])

    def first_answer(self, index: int) -> TokenItem:
        """The same ahead of time, kept for the one call of `answer` that needs it."""
        self._first[index] = self._answer(self.items[index])
        return self._first[index]

    def _answer(self, item: Item) -> TokenItem:
        answer, _ = self._states(item)
        return answer

    def _states(self, item: Item) -> tuple[TokenItem, torch.Tensor]:
        encoded = self.encode(item)
        answering = self.reference or self.receiver
        return full_prefill_states(
            answering.model,
            encoded.prefix_ids,
            encoded.suffix_ids,
            self.task.max_new_tokens,
            answering.eos_ids,
        )

    def sweep_item(self, index: int, stitch: StitchMap | None) -> dict[str, Any]:
        answer = self.answer(index)
        starts = {plan.transition for plan in self.plans if plan.transition is not None}
        captured = capture(self.sender.model, answer.prefix_ids[None], hidden_layers=starts)
        results = sweep(self.receiver.model, captured, answer, self.plans, stitch)
        row = self.row(index, answer, results)
        if self.reference is not None:
            # What an exact plan loses here: the reference itself, by way of a partial prefill.
            model = self.reference.model
            exact = evaluate_plan(model, captured, answer, ReusePlan.of(0, model.num_layers))
            row["exact"] = dataclasses.astuple(exact)
        return row

    def row(
        self, index: int, answer: TokenItem, results: Mapping[ReusePlan, TeacherForced]
    ) -> dict[str, Any]:
        """One evaluated item as it is kept in the run folder.

        Raises:
            ProfileError: A result is no number.
        """
        for plan, result in results.items():
            require_numbers(f"the plan {plan}", self.items[index].id, result.kl, result.nll)
        return {
            "item": dataclasses.asdict(self.item_record(index, answer)),
            "plans": {str(plan): dataclasses.astuple(result) for plan, result in results.items()},
        }

    def item_record(self, index: int, answer: TokenItem) -> ItemRecord:
        """One item's own figures, by the reference's full prefill."""
        item = self.items[index]
        steps = torch.arange(len(answer.answer_ids))
        return ItemRecord(
            id=item.id,
            prefix_tokens=len(answer.prefix_ids),
            suffix_tokens=len(answer.suffix_ids),
            answer_tokens=len(answer.answer_ids),
            full_score=self.score(item, answer.answer_ids.tolist()),
            full_nll=-float(answer.log_probs[steps, answer.answer_ids].mean()),
            prefix_digest=content_digest(item.prefix),
        )

    def refine_item(self, item: Item, starts: Sequence[int]) -> RefineItem:
        """A calibration item as both models see it, with the sender's E of some starts."""
        answer, hidden = self._states(item)
        captured = capture(self.sender.model, answer.prefix_ids[None], hidden_layers=starts)
        return RefineItem(answer, captured, hidden)

    def score(self, item: Item, answer_ids: Sequence[int]) -> float:
        text = self.receiver.tokenizer.decode(list(answer_ids), skip_special_tokens=True)
        return self.task.score(item, text.strip())

    def plans_to_decode(self, swept: Sequence[dict[str, Any]]) -> list[ReusePlan]:
        """Plans whose diverging answers are decoded.

        Near the frontier means: the best by KL and by agreement among plans of one operator and
        one number of layers; plus the empty plan.
        """
        if self.settings.decode == "none":
            return []
        if self.settings.decode == "all":
            return self.plans
        kl = {p: sum(row["plans"][str(p)][0] for row in swept) for p in self.plans}
        flips = {p: sum(not row["plans"][str(p)][3] for row in swept) for p in self.plans}
        near = {self.plans[0]}
        families: dict[tuple[Operator, int], list[ReusePlan]] = {}
        for plan in self.plans:
            families.setdefault((plan.operator, plan.num_recomputed), []).append(plan)
        for family in families.values():
            near |= set(sorted(family, key=lambda p: (kl[p], p))[:NEAR_FRONTIER])
            near |= set(sorted(family, key=lambda p: (flips[p], kl[p], p))[:NEAR_FRONTIER])
        return [plan for plan in self.plans if plan in near]

    def decode_item(
        self,
        index: int,
        swept: dict[str, Any],
        wanted: Sequence[ReusePlan],
        stitch: StitchMap | None,
    ) -> dict[str, float]:
        """Scores of the wanted plans that diverge on an item."""
        diverging = [plan for plan in wanted if not swept["plans"][str(plan)][3]]
        if not diverging:
            return {}
        item = self.items[index]
        encoded = self.encode(item)
        prefix_ids = torch.tensor(encoded.prefix_ids)
        starts = {plan.transition for plan in diverging if plan.transition is not None}
        captured = capture(self.sender.model, prefix_ids[None], hidden_layers=starts)
        answers = decode_plans(
            self.receiver.model,
            captured,
            prefix_ids,
            torch.tensor(encoded.suffix_ids),
            diverging,
            self.task.max_new_tokens,
            self.receiver.eos_ids,
            stitch,
        )
        return {str(p): self.score(item, a) for p, a in zip(diverging, answers, strict=True)}

    def assemble(
        self,
        swept: Sequence[dict[str, Any]],
        scores: Sequence[dict[str, float]],
        map_file: Path | None,
        command: str,
        started: float,
    ) -> Profile:
        items = tuple(ItemRecord(**row["item"]) for row in swept)
        records = {
            plan: _plan_record(plan, swept, [row["plans"][str(plan)] for row in swept], scores)
            for plan in self.plans
        }
        settings, reference = self.settings, self.reference
        full = ReusePlan.of(0, self.receiver.model.num_layers)
        exact = records[full]
        if reference is not None:
            exact = _plan_record(full, swept, [row["exact"] for row in swept], [{}] * len(swept))
        return Profile(
            pair=self.pair.name,
            sender=ModelRecord(self.sender.name, self.sender.fingerprint),
            receiver=ModelRecord(self.receiver.name, self.receiver.fingerprint),
            shape=self.receiver.model.shape,
            task=TaskRecord(
                name=self.task.name,
                version=self.task.version,
                metric=self.task.metric,
                split="eval",
                seed=settings.seed,
                options=self.task.options,
            ),
            items=items,
            measurements=tuple(records.values()),
            noise_floor=measure_noise_floor(items, exact),
            stitch=None
            if map_file is None
            else StitchRecord(
                file=map_file.name,
                sha256=sha256_file(map_file),
                rank=settings.rank,
                ridge=settings.ridge,
                calibration_ids=tuple(item.id for item in self.calibration),
                refined=settings.refine,
            ),
            provenance=provenance(
                command,
                settings.seed,
                settings.device,
                settings.dtype,
                time.monotonic() - started,
            ),
            reference=None
            if reference is None
            else ModelRecord(reference.name, reference.fingerprint),
        )


def _plan_record(
    plan: ReusePlan,
    swept: Sequence[dict[str, Any]],
    results: Sequence[Sequence[Any]],
    scores: Sequence[dict[str, float]],
) -> PlanRecord:
    kl, nll, top1, agrees = zip(*results, strict=True)
    return PlanRecord(
        plan=plan,
        kl=kl,
        nll=nll,
        top1=top1,
        agrees=agrees,
        score=tuple(
            row["item"]["full_score"] if same else decoded.get(str(plan))
            for row, same, decoded in zip(swept, agrees, scores, strict=True)
        ),
    )
