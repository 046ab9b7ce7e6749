"""From a pair and a task to a profile: every plan on every item.

The flow: fit the stitching map on calibration items; sweep each evaluated item; decode the
diverging plans whose score the frontier needs; assemble. Each step is kept in a run folder beside
the output, so a killed run resumes and several processes calling `profile_pair` share the work.
"""

from __future__ import annotations

import dataclasses
import itertools
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from droidkv.capture import capture
from droidkv.encode import EncodedItem, encode_shared
from droidkv.errors import ProfileError, unknown_name
from droidkv.evaluate import TokenItem, decode_plans, full_prefill_answer
from droidkv.jsonio import sha256_file
from droidkv.loading import LoadedModel, load_pair
from droidkv.objectives import measure_noise_floor
from droidkv.pair import Pair, TaskRef
from droidkv.plan import Operator, ReusePlan, all_plans
from droidkv.profile import Profile, write_profile
from droidkv.provenance import provenance
from droidkv.records import ItemRecord, ModelRecord, PlanRecord, StitchRecord, TaskRecord
from droidkv.run_folder import Progress, RunFolder, no_progress
from droidkv.stitch import StitchMap, fit_stitch
from droidkv.sweep import sweep
from droidkv.tasks import Item, Task, get_task

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
    dtype: str = "float32"
    device: str = "cpu"

    def __post_init__(self) -> None:
        for name in ("num_items", "granularity", "calibration_items", "rank"):
            if getattr(self, name) < 1:
                raise ProfileError(f"expected {name} >= 1, got {getattr(self, name)}")
        if not self.operators:
            raise ProfileError("expected at least one operator, got none; 'copy' is the paper's")
        if self.decode not in DECODES:
            raise ProfileError(unknown_name("way to decode", self.decode, DECODES))


def profile_pair(
    pair: Pair,
    settings: ProfileSettings,
    output: Path,
    on_progress: Progress = no_progress,
    command: str = "",
) -> Profile:
    """Profile a pair on a task, and write the profile and its stitching map.

    Args:
        pair: The ordered pair.
        settings: What is measured.
        output: The profile's file, `NAME.json`; the map is written beside it as
            `NAME.stitch.safetensors`, and an unfinished run lies in `NAME.run/`.
        on_progress: Told after each step.
        command: What reproduces this, for the provenance.

    Raises:
        ProfileError: An unfinished run with other settings lies in the way.
        DroidKVError: The pair, task or models are wrong; nothing was written.
    """
    started = time.monotonic()
    task = get_task(settings.task.name, **settings.task.options)
    sender, receiver = load_pair(pair, settings.dtype, settings.device)
    job = _Job(pair, settings, task, sender, receiver)
    folder = RunFolder(output.with_suffix(".run"), job.key())

    stitch = fit_map(job, folder, on_progress) if "stitch" in settings.operators else None
    swept = folder.complete(
        "sweep", len(job.items), lambda i: job.sweep_item(i, stitch), on_progress
    )
    wanted = job.plans_to_decode(swept)
    scores = folder.complete(
        "decode",
        len(job.items),
        lambda i: job.decode_item(i, swept[i], wanted, stitch),
        on_progress,
    )

    map_file = output.with_suffix(".stitch.safetensors")
    if stitch is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(folder.path / "map.safetensors", map_file)
    profile = job.assemble(swept, scores, map_file if stitch else None, command, started)
    write_profile(output, profile)
    folder.remove()
    return profile


def fit_map(job: _Job, folder: RunFolder, on_progress: Progress) -> StitchMap:
    """Fit the pair's map once per run, whichever process comes first."""
    file = folder.path / "map.safetensors"

    def fit(_: int) -> dict[str, str]:
        total = len(job.calibration)
        done = itertools.count(1)
        stitch = fit_stitch(
            job.sender.model,
            job.receiver.model,
            [list(job.encode(item).prefix_ids) for item in job.calibration],
            job.settings.rank,
            job.settings.ridge,
            on_prefix=lambda _: on_progress("stitch", next(done), total),
        )
        stitch.save(file)
        return {"sha256": stitch.sha256}

    folder.complete("map", 1, fit)
    return StitchMap.load(file)


class _Job:
    """A profile's run: models, items and the work of one step."""

    def __init__(
        self,
        pair: Pair,
        settings: ProfileSettings,
        task: Task,
        sender: LoadedModel,
        receiver: LoadedModel,
    ) -> None:
        self.pair, self.settings, self.task = pair, settings, task
        self.sender, self.receiver = sender, receiver
        self.items: list[Item] = task.items("eval", settings.num_items, settings.seed)
        self.calibration: list[Item] = []
        if "stitch" in settings.operators:
            self.calibration = task.items("calibration", settings.calibration_items, settings.seed)
        self.plans = all_plans(receiver.model.num_layers, settings.granularity, settings.operators)

    def key(self) -> dict[str, Any]:
        """What every kept step depends on."""
        return {
            "pair": self.pair.name,
            "settings": dataclasses.asdict(self.settings),
            "task_version": self.task.version,
            "sender": self.sender.fingerprint.digest(),
            "receiver": self.receiver.fingerprint.digest(),
        }

    def encode(self, item: Item) -> EncodedItem:
        return encode_shared(
            item, self.sender.tokenizer, self.receiver.tokenizer, chat=self.pair.chat
        )

    def sweep_item(self, index: int, stitch: StitchMap | None) -> dict[str, Any]:
        item = self.items[index]
        encoded = self.encode(item)
        answer = full_prefill_answer(
            self.receiver.model,
            encoded.prefix_ids,
            encoded.suffix_ids,
            self.task.max_new_tokens,
            self.receiver.eos_ids,
        )
        starts = {plan.transition for plan in self.plans if plan.transition is not None}
        captured = capture(self.sender.model, answer.prefix_ids[None], hidden_layers=starts)
        results = sweep(self.receiver.model, captured, answer, self.plans, stitch)
        steps = torch.arange(len(answer.answer_ids))
        return {
            "id": item.id,
            "prefix_tokens": len(encoded.prefix_ids),
            "suffix_tokens": len(encoded.suffix_ids),
            "answer_ids": answer.answer_ids.tolist(),
            "full_score": self.score(item, answer.answer_ids.tolist()),
            "full_nll": -float(answer.log_probs[steps, answer.answer_ids].mean()),
            "plans": {str(plan): dataclasses.astuple(result) for plan, result in results.items()},
        }

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
        items = tuple(
            ItemRecord(
                id=row["id"],
                prefix_tokens=row["prefix_tokens"],
                suffix_tokens=row["suffix_tokens"],
                answer_tokens=len(row["answer_ids"]),
                full_score=row["full_score"],
                full_nll=row["full_nll"],
            )
            for row in swept
        )
        records = {plan: _plan_record(plan, swept, scores) for plan in self.plans}
        settings = self.settings
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
            noise_floor=measure_noise_floor(
                items, records[ReusePlan.of(0, self.receiver.model.num_layers)]
            ),
            stitch=None
            if map_file is None
            else StitchRecord(
                file=map_file.name,
                sha256=sha256_file(map_file),
                rank=settings.rank,
                ridge=settings.ridge,
                calibration_ids=tuple(item.id for item in self.calibration),
            ),
            provenance=provenance(
                command,
                settings.seed,
                settings.device,
                settings.dtype,
                time.monotonic() - started,
            ),
        )


def _plan_record(
    plan: ReusePlan, swept: Sequence[dict[str, Any]], scores: Sequence[dict[str, float]]
) -> PlanRecord:
    kl, nll, top1, agrees = zip(*(row["plans"][str(plan)] for row in swept), strict=True)
    return PlanRecord(
        plan=plan,
        kl=kl,
        nll=nll,
        top1=top1,
        agrees=agrees,
        score=tuple(
            row["full_score"] if same else decoded.get(str(plan))
            for row, same, decoded in zip(swept, agrees, scores, strict=True)
        ),
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


def estimate_seconds(
    receiver: LoadedModel, item: TokenItem, num_items: int, plans: Sequence[ReusePlan]
) -> float:
    """How long sweeping items like this one will take here, from one timed prefill of it."""
    started = time.monotonic()
    capture(receiver.model, item.prefix_ids[None])
    seconds = time.monotonic() - started
    num_layers, num_prefix = receiver.model.num_layers, len(item.prefix_ids)
    work = layer_tokens(plans, num_layers, num_prefix, item.forced_ids.shape[1])
    return seconds * num_items * work / (num_layers * num_prefix)
