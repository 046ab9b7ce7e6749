"""The profile of one ordered pair: every measurement of every plan, with where it comes from.

A profile is a record that checks itself: one that was made or read is consistent. The frontier is
derived from it (`droidkv.objectives`) and never stored. Files are JSON with one line per plan.
"""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from droidkv.costs import ModelShape
from droidkv.errors import DroidKVError, IdentityError, PlanError, ProfileError
from droidkv.fields import Fields
from droidkv.identity import Fingerprint
from droidkv.jsonio import read_json, write_text
from droidkv.plan import ReusePlan
from droidkv.records import (
    ItemRecord,
    ModelRecord,
    NoiseFloor,
    PlanRecord,
    Provenance,
    StitchRecord,
    TaskRecord,
    read_model_record,
    read_plan_record,
    read_record,
    rounded,
)

__all__ = [
    "SCHEMA_VERSION",
    "ItemRecord",
    "ModelRecord",
    "NoiseFloor",
    "PlanRecord",
    "Profile",
    "Provenance",
    "StitchRecord",
    "TaskRecord",
    "map_path",
    "profile_from_json",
    "profile_to_json",
    "read_profile",
    "require_identity",
    "require_reference",
    "write_profile",
]

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Profile:
    """Everything measured for one ordered pair on one task.

    Attributes:
        pair: Name of the pair.
        sender: The model whose cache is reused.
        receiver: The model that reuses it.
        reference: The model whose own full prefill every loss is against; None = the receiver. A
            receiver trained to read the sender's KV (full share) is held against the ordinary
            fine-tune of the same recipe; then `full_score` and `full_nll` of an item are the
            reference's, and the plan `[0, L)`, the receiver on its own KV, can lose like any other.
        shape: Sizes of both models.
        task: Which items.
        items: The items, in the order of the columns of `measurements`.
        measurements: One record per plan, no plan twice.
        noise_floor: What an exact plan loses; None if it was not measured.
        stitch: The stitching map; None if no plan used one.
        provenance: Where the numbers come from.

    Raises:
        ProfileError: The parts do not fit together; the message names the field.
    """

    pair: str
    sender: ModelRecord
    receiver: ModelRecord
    shape: ModelShape
    task: TaskRecord
    items: tuple[ItemRecord, ...]
    measurements: tuple[PlanRecord, ...]
    noise_floor: NoiseFloor | None
    stitch: StitchRecord | None
    provenance: Provenance
    reference: ModelRecord | None = None

    def __post_init__(self) -> None:
        if not self.items:
            raise ProfileError("expected at least 1 item, got none; profile the pair on some")
        _check_unique("item id", [item.id for item in self.items])
        _check_unique("plan", [record.plan for record in self.measurements])
        for record in self.measurements:
            self._check_record(record)
        shared = {item.id for item in self.items} & set(
            self.stitch.calibration_ids if self.stitch else ()
        )
        if shared:
            raise ProfileError(
                f"expected no evaluated item among stitch.calibration_ids, "
                f"got {', '.join(sorted(shared))}; fit the stitching map on other items"
            )

    def _check_record(self, record: PlanRecord) -> None:
        try:
            record.plan.check(self.num_layers)
        except PlanError as error:
            raise ProfileError(f"measurement of the plan {record.plan}: {error}") from error
        if len(record.kl) != self.num_items:
            raise ProfileError(
                f"measurement of the plan {record.plan}: expected one value for each of "
                f"{self.num_items} items, got {len(record.kl)}"
            )
        if record.plan.operator == "stitch" and self.stitch is None:
            raise ProfileError(
                f"expected the field 'stitch' to describe the map that the plan {record.plan} "
                f"used, got null"
            )

    @property
    def num_layers(self) -> int:
        return self.shape.num_layers

    @property
    def num_items(self) -> int:
        return len(self.items)

    def record(self, plan: ReusePlan) -> PlanRecord:
        """The record of one plan.

        Raises:
            ProfileError: The plan was not measured.
        """
        for record in self.measurements:
            if record.plan == plan:
                return record
        raise ProfileError(
            f"expected a measurement of the plan {plan}, but this profile of {self.pair!r} has "
            f"none; profile the pair with that plan included"
        )


def read_profile(path: str | os.PathLike[str]) -> Profile:
    """Read and check a profile file.

    Raises:
        ProfileError: It is no profile, one of another schema version, or inconsistent.
        StorageError: It could not be read.
    """
    return profile_from_json(read_json(path, ProfileError), str(path))


def map_path(profile_file: Path) -> Path:
    """Where a profile's stitching map is written: `NAME.stitch.safetensors` beside `NAME.json`."""
    return profile_file.with_suffix(".stitch.safetensors")


def write_profile(path: str | os.PathLike[str], profile: Profile) -> None:
    """Write a profile in one step: header fields, then one line per item and per plan.

    Measured numbers are rounded to 6 significant digits, beyond which they are noise.

    Raises:
        StorageError: The file system refused; an older file is still whole.
    """
    lines = []
    for name, value in profile_to_json(profile).items():
        if isinstance(value, list):
            rows = ",\n".join(f"  {_compact(row)}" for row in value)
            lines.append(f" {_compact(name)}: [\n{rows}\n ]")
        else:
            lines.append(f" {_compact(name)}: {_compact(value)}")
    write_text(path, "{\n" + ",\n".join(lines) + "\n}\n")


def profile_to_json(profile: Profile) -> dict[str, Any]:
    """The profile as JSON values, in the order of the file."""
    roles = {
        "sender": profile.sender,
        "receiver": profile.receiver,
        "reference": profile.reference,
    }
    models = {
        name: {"name": model.name, "fingerprint": model.fingerprint.to_json()}
        for name, model in roles.items()
        if model is not None
    }
    return {
        "schema_version": SCHEMA_VERSION,
        "pair": profile.pair,
        **models,
        "num_layers": profile.num_layers,
        "shape": dataclasses.asdict(profile.shape),
        "task": dataclasses.asdict(profile.task),
        "noise_floor": profile.noise_floor and dataclasses.asdict(profile.noise_floor),
        "stitch": profile.stitch
        and {
            **dataclasses.asdict(profile.stitch),
            "calibration_ids": list(profile.stitch.calibration_ids),
            "refined": list(profile.stitch.refined),
        },
        "provenance": dataclasses.asdict(profile.provenance),
        "items": [
            {name: _rounded(value) for name, value in dataclasses.asdict(item).items()}
            for item in profile.items
        ],
        "measurements": [
            {
                "plan": str(record.plan),
                "kl": _rounded(record.kl),
                "nll": _rounded(record.nll),
                "top1": _rounded(record.top1),
                "agrees": list(record.agrees),
                "score": _rounded(record.score),
            }
            for record in profile.measurements
        ],
    }


def profile_from_json(value: object, where: str = "profile") -> Profile:
    """Read what `profile_to_json` gave.

    Every field must be there, and no other; only one that may be null may also be missing.

    Args:
        value: The parsed JSON.
        where: Name of the file, for messages.

    Raises:
        ProfileError: A field is missing, unknown, of the wrong type or out of range, or the
            schema version is another one's.
    """
    fields = Fields(value, where, ProfileError)
    fields.take_version(SCHEMA_VERSION, "profile the pair anew")
    shape = _shape(fields, where)
    noise_floor = fields.optional("noise_floor", dict)
    stitch = fields.optional("stitch", dict)
    if stitch is not None:
        stitch = {"refined": [], **stitch}  # written since maps can be trained
    reference = fields.optional("reference", dict)
    arguments: dict[str, Any] = {
        "pair": fields.take("pair", str),
        "sender": read_model_record(fields.take("sender", dict), f"{where}, sender"),
        "receiver": read_model_record(fields.take("receiver", dict), f"{where}, receiver"),
        "shape": shape,
        "task": read_record(TaskRecord, fields.take("task", dict), f"{where}, task"),
        "items": tuple(
            read_record(ItemRecord, row, f"{where}, items[{index}]")
            for index, row in enumerate(fields.take("items", list))
        ),
        "measurements": tuple(
            read_plan_record(row, f"{where}, measurements[{index}]", shape.num_layers)
            for index, row in enumerate(fields.take("measurements", list))
        ),
        "noise_floor": None
        if noise_floor is None
        else read_record(NoiseFloor, noise_floor, f"{where}, noise_floor"),
        "stitch": None if stitch is None else read_record(StitchRecord, stitch, f"{where}, stitch"),
        "provenance": read_record(
            Provenance, fields.take("provenance", dict), f"{where}, provenance"
        ),
        "reference": None
        if reference is None
        else read_model_record(reference, f"{where}, reference"),
    }
    fields.done()
    try:
        return Profile(**arguments)
    except ProfileError as error:
        raise ProfileError(f"{where}: {error}") from error


def require_identity(profile: Profile, sender: Fingerprint, receiver: Fingerprint) -> None:
    """Refuse a profile that was not measured on these very models, in this order.

    Args:
        profile: The profile about to be used.
        sender: Fingerprint of the model that captures.
        receiver: Fingerprint of the model that reuses.

    Raises:
        IdentityError: A model differs; the message names each differing field and both values.
    """
    straight = profile.sender.fingerprint.differences(sender)
    crossed = profile.sender.fingerprint.differences(receiver)
    crossed += profile.receiver.fingerprint.differences(sender)
    if straight and not crossed:
        raise IdentityError(
            f"expected the sender {profile.sender.name!r} and the receiver "
            f"{profile.receiver.name!r} of this profile, got the two the other way round; a "
            f"profile holds for one order: make one for the other"
        )
    for role, model, given in (
        ("sender", profile.sender, sender),
        ("receiver", profile.receiver, receiver),
    ):
        model.fingerprint.require_same(
            given,
            mine=f"the profile's {role} {model.name!r}",
            theirs=f"the {role} in use",
            way_out="profile this pair of models, or load the ones that were profiled",
        )


def require_reference(profile: Profile, answering: Fingerprint) -> None:
    """Refuse a profile whose losses are against another model's full prefill.

    Args:
        profile: The profile about to be used.
        answering: Fingerprint of the model that losses are to be against: the reference, or the
            receiver where there is none.

    Raises:
        IdentityError: It is another; the message names each differing field and both values.
    """
    model = profile.reference or profile.receiver
    model.fingerprint.require_same(
        answering,
        mine=f"the model {model.name!r} that the profile's losses are against",
        theirs="the one that these would be against",
        way_out="profile the pair anew, or name the reference that it was profiled with",
    )


def _check_unique(name: str, values: list[Any]) -> None:
    seen: set[Any] = set()
    for index, value in enumerate(values):
        if value in seen:
            raise ProfileError(f"expected each {name} once, got {value} twice, again at [{index}]")
        seen.add(value)


def _shape(fields: Fields, where: str) -> ModelShape:
    num_layers = fields.take("num_layers", int)
    table = Fields(fields.take("shape", dict), f"{where}, shape", ProfileError)
    try:
        shape = ModelShape.from_fields(table)
    except DroidKVError as error:
        raise ProfileError(f"{where}, shape: {error}") from error
    if shape.num_layers != num_layers:
        raise ProfileError(
            f"{where}: expected num_layers to be shape.num_layers = {shape.num_layers}, "
            f"got {num_layers}"
        )
    return shape


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return rounded(value)
    if isinstance(value, tuple):
        return [_rounded(each) for each in value]
    return value


def _compact(value: object) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
