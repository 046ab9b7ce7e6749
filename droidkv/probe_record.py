"""The record of a single-layer probe: read, written, and what follows from it. No torch here."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from droidkv.errors import ProfileError
from droidkv.fields import Fields
from droidkv.jsonio import read_json, write_json
from droidkv.quality import Array, Interval, percentile_interval, resample_weights
from droidkv.records import (
    ItemRecord,
    ModelRecord,
    Provenance,
    TaskRecord,
    read_model_record,
    read_record,
    rounded,
)
from droidkv.stability import Stability, overlap, spearman, stability

SCHEMA_VERSION = 1
CRITICAL_SHARE = 0.05

Side = Literal["reuse_one", "recompute_one"]
SIDES: tuple[Side, ...] = get_args(Side)
ProbeLoss = Literal["kl", "nll", "disagreement"]


@dataclass(frozen=True)
class LayerRecord:
    """One setting of the caches on every item, in the order of `Probe.items`.

    Attributes:
        kl: Mean KL(full prefill || this) over the answer's tokens, in nats.
        nll: Mean negative log-likelihood of the full prefill's answer, in nats.
        top1: Share of the answer's tokens that are the argmax, in [0, 1].
        agrees: Whether the greedy answer is the full prefill's.

    Raises:
        ProfileError: The columns differ in length, or a number is not finite.
    """

    kl: tuple[float, ...]
    nll: tuple[float, ...]
    top1: tuple[float, ...]
    agrees: tuple[bool, ...]

    def __post_init__(self) -> None:
        for name in ("kl", "nll", "top1", "agrees"):
            column = getattr(self, name)
            if len(column) != len(self.kl):
                raise ProfileError(
                    f"expected {name} to have one value per item like kl, which has "
                    f"{len(self.kl)}, got {len(column)}"
                )
            if not np.isfinite(column).all():
                raise ProfileError(f"expected finite numbers in {name}, got {column}")


@dataclass(frozen=True)
class Probe:
    """What each layer alone does to one ordered pair on one task (DroidSpeak, section 4).

    Attributes:
        pair: Name of the pair.
        sender: The model whose cache is reused.
        receiver: The model that reuses it.
        num_layers: Layers of both.
        task: Which items.
        items: The items, in the order of all columns.
        full_reuse: Every layer reused: what the others are measured by.
        reuse_one: Per layer: only its KV is the sender's, all other KV is the receiver's own.
        recompute_one: Per layer: only its KV is recomputed, from the sender's E; the plan [l, l+1).
        provenance: Where the numbers come from.

    Raises:
        ProfileError: The parts do not fit together; the message names the field.
    """

    pair: str
    sender: ModelRecord
    receiver: ModelRecord
    num_layers: int
    task: TaskRecord
    items: tuple[ItemRecord, ...]
    full_reuse: LayerRecord
    reuse_one: tuple[LayerRecord, ...]
    recompute_one: tuple[LayerRecord, ...]
    provenance: Provenance

    def __post_init__(self) -> None:
        if not self.items:
            raise ProfileError("expected at least 1 item, got none; probe the pair on some")
        for side in SIDES:
            records = getattr(self, side)
            if len(records) != self.num_layers:
                raise ProfileError(
                    f"expected {side} to have one record for each of {self.num_layers} layers, "
                    f"got {len(records)}"
                )
        for record in (self.full_reuse, *self.reuse_one, *self.recompute_one):
            if len(record.kl) != len(self.items):
                raise ProfileError(
                    f"expected one value for each of {len(self.items)} items, got {len(record.kl)}"
                )

    def losses(self, side: Side, loss: ProbeLoss = "kl") -> Array:
        """Losses of each layer on each item, `[num_layers, num_items]`."""
        return np.array([_losses(record, self.items, loss) for record in getattr(self, side)])

    def mean(self, side: Side, loss: ProbeLoss = "kl") -> list[float]:
        """Mean loss of each layer over items; what `plot_critical_layers` draws."""
        means: list[float] = self.losses(side, loss).mean(axis=1).tolist()
        return means

    def intervals(self, side: Side, loss: ProbeLoss = "kl") -> list[Interval]:
        """Bootstrap interval of each layer's mean loss."""
        weights = resample_weights([item.group for item in self.items])
        return [percentile_interval(weights @ row) for row in self.losses(side, loss)]

    def full_reuse_loss(self, loss: ProbeLoss = "kl") -> float:
        """Mean loss of reusing every layer."""
        return float(_losses(self.full_reuse, self.items, loss).mean())

    def critical_layers(self, share: float = CRITICAL_SHARE, loss: ProbeLoss = "kl") -> list[int]:
        """Layers that, reused alone, cost more than `share` of what reusing all of them costs.

        Raises:
            ProfileError: `share` is not above 0.
        """
        if not share > 0:
            raise ProfileError(f"expected a share above 0, such as {CRITICAL_SHARE}, got {share}")
        limit = share * self.full_reuse_loss(loss)
        return [layer for layer, mean in enumerate(self.mean("reuse_one", loss)) if mean > limit]

    def stability(self, side: Side = "reuse_one", loss: ProbeLoss = "kl") -> Stability:
        """How far the curve depends on the items.

        Raises:
            ProfileError: Fewer than 2 layers or 2 items.
        """
        return stability(self.losses(side, loss))


@dataclass(frozen=True)
class ProbeAgreement:
    """Two probes of models with as many layers, side by side: other tasks, or other pairs.

    Attributes:
        spearman: Rank correlation of the mean curves.
        critical_overlap: Jaccard index of the critical layers.
        shared_layers: Layers critical in both.
        num_items: Items of each probe.
    """

    spearman: float
    critical_overlap: float
    shared_layers: tuple[int, ...]
    num_items: tuple[int, int]


def compare_probes(
    a: Probe,
    b: Probe,
    side: Side = "reuse_one",
    share: float = CRITICAL_SHARE,
    loss: ProbeLoss = "kl",
) -> ProbeAgreement:
    """How far two probes point at the same layers.

    Raises:
        ProfileError: The models have different numbers of layers, or fewer than 2.
    """
    critical = [probe.critical_layers(share, loss) for probe in (a, b)]
    return ProbeAgreement(
        spearman=spearman(a.mean(side, loss), b.mean(side, loss)),
        critical_overlap=overlap(*critical),
        shared_layers=tuple(sorted({*critical[0]} & {*critical[1]})),
        num_items=(len(a.items), len(b.items)),
    )


def write_probe(path: str | os.PathLike[str], probe: Probe) -> None:
    """Write a probe in one step; measured numbers are rounded to 6 significant digits.

    Raises:
        StorageError: The file system refused; an older file is still whole.
    """
    write_json(path, probe_to_json(probe), indent=None)


def read_probe(path: str | os.PathLike[str]) -> Probe:
    """Read and check a probe file.

    Raises:
        ProfileError: It is no probe, one of another schema version, or inconsistent.
        StorageError: It could not be read.
    """
    return probe_from_json(read_json(path, ProfileError), str(path))


def probe_to_json(probe: Probe) -> dict[str, Any]:
    """The probe as JSON values, in the order of the file."""
    table = {
        field.name: _to_json(getattr(probe, field.name)) for field in dataclasses.fields(probe)
    }
    return {"schema_version": SCHEMA_VERSION, **table}


def probe_from_json(value: object, where: str = "probe") -> Probe:
    """Read what `probe_to_json` gave; every field must be there, and no other.

    Raises:
        ProfileError: A field is missing, unknown, of the wrong type or out of range, or the
            schema version is another one's.
    """
    fields = Fields(value, where, ProfileError)
    fields.take_version(SCHEMA_VERSION, "probe the pair anew")
    arguments: dict[str, Any] = {
        "pair": fields.take("pair", str),
        "num_layers": fields.take("num_layers", int, minimum=1),
        "full_reuse": read_record(
            LayerRecord, fields.take("full_reuse", dict), f"{where}, full_reuse"
        ),
    }
    for role in ("sender", "receiver"):
        arguments[role] = read_model_record(fields.take(role, dict), f"{where}, {role}")
    kinds: dict[str, type] = {"task": TaskRecord, "provenance": Provenance}
    for name, kind in kinds.items():
        arguments[name] = read_record(kind, fields.take(name, dict), f"{where}, {name}")
    rows: dict[str, type] = {"items": ItemRecord, **dict.fromkeys(SIDES, LayerRecord)}
    for name, kind in rows.items():
        arguments[name] = tuple(
            read_record(kind, row, f"{where}, {name}[{index}]")
            for index, row in enumerate(fields.take(name, list))
        )
    fields.done()
    try:
        return Probe(**arguments)
    except ProfileError as error:
        raise ProfileError(f"{where}: {error}") from error


def _losses(record: LayerRecord, items: Sequence[ItemRecord], loss: ProbeLoss) -> Array:
    match loss:
        case "kl":
            return np.array(record.kl)
        case "nll":
            return np.array(record.nll) - [item.full_nll for item in items]
        case "disagreement":
            return 1.0 - np.array(record.agrees, dtype=float)


def _to_json(value: Any) -> Any:
    if isinstance(value, ModelRecord):
        return {"name": value.name, "fingerprint": value.fingerprint.to_json()}
    if isinstance(value, float):
        return rounded(value)
    if isinstance(value, tuple | list):
        return [_to_json(each) for each in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _to_json(getattr(value, f.name)) for f in dataclasses.fields(value)}
    return dict(value) if isinstance(value, dict) else value
