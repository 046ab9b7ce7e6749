"""The single-layer probe: which layers cannot be reused, one layer at a time.

Two questions per layer (DroidSpeak, section 4): what is lost if only this layer's KV is the
sender's, and what is left of full reuse's loss if only this layer is recomputed.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from droidkv.cache import CapturedCache
from droidkv.capture import capture
from droidkv.estimate import estimate_items, probe_prefills
from droidkv.evaluate import TeacherForced, TokenItem, compare
from droidkv.loading import load_pair
from droidkv.models import DecoderModel
from droidkv.pair import Pair, TaskRef
from droidkv.plan import ReusePlan
from droidkv.prefill import forward_suffix, full_prefill
from droidkv.probe_record import (
    LayerRecord,
    Probe,
    ProbeAgreement,
    compare_probes,
    read_probe,
    write_probe,
)
from droidkv.profile_job import Job, ProfileSettings
from droidkv.provenance import provenance
from droidkv.records import ItemRecord, ModelRecord, TaskRecord, require_numbers
from droidkv.run_folder import Progress, RunFolder, no_progress
from droidkv.sweep import sweep
from droidkv.tasks import get_task

__all__ = [
    "ItemProbe",
    "Probe",
    "ProbeAgreement",
    "ProbeSettings",
    "compare_probes",
    "probe_item",
    "probe_pair",
    "read_probe",
    "write_probe",
]


@dataclass(frozen=True)
class ItemProbe:
    """One item's probe.

    Attributes:
        full_reuse: Every layer's KV is the sender's.
        reuse_one: Per layer: only its KV is the sender's.
        recompute_one: Per layer: only its KV is the receiver's, recomputed from the sender's E.
    """

    full_reuse: TeacherForced
    reuse_one: list[TeacherForced]
    recompute_one: list[TeacherForced]


@torch.no_grad()
def probe_item(receiver: DecoderModel, captured: CapturedCache, item: TokenItem) -> ItemProbe:
    """Probe every layer on one item.

    Reusing one layer takes one pass of the suffix per layer over the receiver's own prefill, with
    that layer's KV replaced; recomputing one layer is part of a sweep.

    Args:
        receiver: The model that answers.
        captured: The sender's cache of the item's prefix (batch of one), with the E of every layer
            above the first.
        item: The item and the receiver's own answer.

    Raises:
        PlanError: The captured cache lacks an E.
    """
    layers = range(receiver.num_layers)
    plans = [ReusePlan.of(layer, layer + 1) for layer in layers]
    swept = sweep(receiver, captured, item, [ReusePlan.of(0, 0), *plans])
    own = full_prefill(receiver, item.prefix_ids[None])
    states = []
    for layer in layers:
        context = own.fork()
        context.cache.keys[layer] = captured.keys[layer].to(receiver.device)
        context.cache.values[layer] = captured.values[layer].to(receiver.device)
        states.append(forward_suffix(receiver, context, item.forced_ids))
    return ItemProbe(
        full_reuse=swept[ReusePlan.of(0, 0)],
        reuse_one=compare(torch.cat(states), receiver, item),
        recompute_one=[swept[plan] for plan in plans],
    )


@dataclass(frozen=True)
class ProbeSettings:
    """What is probed.

    Attributes:
        task: The task and its options.
        num_items: Probed items.
        seed: Seed of the items.
        dtype: Of weights and caches.
        device: Torch device.
    """

    task: TaskRef
    num_items: int = 16
    seed: int = 0
    dtype: str = "float32"
    device: str = "cpu"


def probe_pair(
    pair: Pair,
    settings: ProbeSettings,
    output: Path,
    on_progress: Progress = no_progress,
    command: str = "",
    on_estimate: Callable[[float], None] | None = None,
) -> Probe:
    """Probe a pair on a task, and write the probe.

    A killed run resumes item by item, and several processes with one output share the work; until
    it is finished it lies in a folder `NAME.run` beside the output.

    Args:
        pair: The ordered pair.
        settings: What is probed.
        output: The probe's file, `NAME.probe.json`.
        on_progress: Told after each item.
        command: What reproduces this, for the provenance.
        on_estimate: Told at the start about how many seconds it will take.

    Raises:
        ProfileError: An unfinished run with other settings lies in the way.
        DroidKVError: The pair, task or models are wrong; nothing was written.
    """
    started = time.monotonic()
    task = get_task(settings.task.name, **settings.task.options)
    sender, receiver = load_pair(pair, settings.dtype, settings.device)
    same_items = ProfileSettings(operators=("copy",), **vars(settings))
    job = Job(pair, same_items, task, sender, receiver)
    folder = RunFolder(output.with_suffix(".run"), {"kind": "probe", **job.key()})
    estimate_items(
        job,
        folder.missing("probe", len(job.items)),
        lambda item: probe_prefills(item, receiver.model.num_layers),
        on_estimate,
    )

    def measure() -> Probe:
        rows = folder.complete("probe", len(job.items), lambda i: _probe_row(job, i), on_progress)
        probe = _assemble(job, rows, command, started)
        write_probe(output, probe)
        return probe

    return folder.finish(output, measure, read_probe)


def _assemble(job: Job, rows: Sequence[dict[str, Any]], command: str, started: float) -> Probe:
    task, settings = job.task, job.settings
    return Probe(
        pair=job.pair.name,
        sender=ModelRecord(job.sender.name, job.sender.fingerprint),
        receiver=ModelRecord(job.receiver.name, job.receiver.fingerprint),
        num_layers=job.receiver.model.num_layers,
        task=TaskRecord(task.name, task.version, task.metric, "eval", settings.seed, task.options),
        items=tuple(ItemRecord(**row["item"]) for row in rows),
        full_reuse=_layer_record([row["full_reuse"] for row in rows]),
        reuse_one=_layer_records([row["reuse_one"] for row in rows]),
        recompute_one=_layer_records([row["recompute_one"] for row in rows]),
        provenance=provenance(
            command,
            settings.seed,
            settings.device,
            settings.dtype,
            time.monotonic() - started,
        ),
    )


def _probe_row(job: Job, index: int) -> dict[str, Any]:
    receiver = job.receiver.model
    answer = job.answer(index)
    captured = capture(
        job.sender.model, answer.prefix_ids[None], hidden_layers=range(1, receiver.num_layers)
    )
    record = job.item_record(index, answer)
    probed = probe_item(receiver, captured, answer)
    for result in (probed.full_reuse, *probed.reuse_one, *probed.recompute_one):
        require_numbers("every layer by itself", record.id, result.kl, result.nll)
    return {"item": dataclasses.asdict(record), **dataclasses.asdict(probed)}


def _layer_record(results: Sequence[Mapping[str, Any]]) -> LayerRecord:
    names = [field.name for field in dataclasses.fields(LayerRecord)]
    return LayerRecord(**{name: tuple(each[name] for each in results) for name in names})


def _layer_records(items: Sequence[Sequence[Mapping[str, Any]]]) -> tuple[LayerRecord, ...]:
    return tuple(_layer_record(layer) for layer in zip(*items, strict=True))
