"""The file a calibration is kept in, with how far its predictions were off. Needs no model."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from droidkv.content import cache_folder
from droidkv.costs import ModelShape
from droidkv.errors import CalibrationError
from droidkv.fields import Fields
from droidkv.jsonio import read_json, write_json
from droidkv.ttft import Calibration

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class HeldOut:
    """One request that the fit never saw: a plan and lengths, measured and predicted.

    Attributes:
        plan: The plan, as text.
        prefix_tokens: n.
        suffix_tokens: m.
        measured_seconds: Median over the rounds, the load from a file included.
        predicted_seconds: By the calibration, load before compute (`serial`).
    """

    plan: str
    prefix_tokens: int
    suffix_tokens: int
    measured_seconds: float
    predicted_seconds: float


@dataclass(frozen=True)
class MeasuredCalibration:
    """A calibration, how it was made, and what it is worth.

    Attributes:
        calibration: The coefficients.
        shape: Sizes of the model measured.
        held_out: Requests the fit never saw.
        median_error_percent: Median of |predicted - measured| / measured over them.
        max_error_percent: Its largest.
        fit_error_percent: The same median over the steps that were fitted.
        max_prefix_tokens: Longest prefix timed; beyond it predictions extrapolate.
        num_rounds: Timed rounds over all steps; each step counts by its median.
        provenance: Command, commit, packages, load of the machine and the like.
    """

    calibration: Calibration
    shape: ModelShape
    held_out: tuple[HeldOut, ...]
    median_error_percent: float
    max_error_percent: float
    fit_error_percent: float
    max_prefix_tokens: int
    num_rounds: int
    provenance: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        table = asdict(self)
        table["calibration"] = self.calibration.to_json()
        table["held_out"] = [asdict(each) for each in self.held_out]
        return {"schema_version": SCHEMA_VERSION, **table}

    @classmethod
    def from_json(cls, value: object, where: str = "calibration file") -> MeasuredCalibration:
        """Read what `to_json` wrote.

        Raises:
            CalibrationError: A field is missing, unknown or of the wrong type, or the schema is
                another version's.
        """
        fields = Fields(value, where, CalibrationError)
        fields.take_version(SCHEMA_VERSION, "run `droidkv calibrate --overwrite`")
        shape = Fields(fields.take("shape", dict), f"{where}, shape", CalibrationError)
        measured = cls(
            calibration=Calibration.from_json(fields.take("calibration", dict)),
            shape=ModelShape.from_fields(shape),
            held_out=tuple(
                _held_out(table, f"{where}, held_out[{index}]")
                for index, table in enumerate(fields.take_list("held_out", dict))
            ),
            median_error_percent=fields.take("median_error_percent", float, minimum=0),
            max_error_percent=fields.take("max_error_percent", float, minimum=0),
            fit_error_percent=fields.take("fit_error_percent", float, minimum=0),
            max_prefix_tokens=fields.take("max_prefix_tokens", int, minimum=1),
            num_rounds=fields.take("num_rounds", int, minimum=1),
            provenance=fields.take("provenance", dict),
        )
        fields.done()
        if measured.calibration.shape_digest != measured.shape.digest:
            raise CalibrationError(
                f"{where}: expected the calibration to be of the model shape "
                f"{measured.shape.digest}, got {measured.calibration.shape_digest}; "
                f"run `droidkv calibrate --overwrite`"
            )
        return measured


def calibration_path(shape_digest: str, device: str, dtype: str) -> Path:
    """Where a calibration of this machine is kept, for one model shape, device and dtype."""
    name = re.sub(r"[^a-z0-9]+", "-", f"{shape_digest} {device} {dtype}".lower())
    return cache_folder() / "calibrations" / f"{name}.json"


def write_calibration(measured: MeasuredCalibration, path: Path | None = None) -> Path:
    """Keep a calibration, in the cache folder if no path is given; says where.

    Raises:
        StorageError: It cannot be written.
    """
    made = measured.calibration
    target = path or calibration_path(made.shape_digest, made.device, made.dtype)
    write_json(target, measured.to_json())
    return target


def read_calibration(path: Path) -> MeasuredCalibration:
    """Read a calibration file.

    Raises:
        CalibrationError: It is missing, damaged, or of another version.
        StorageError: It could not be read.
    """
    return MeasuredCalibration.from_json(read_json(path, CalibrationError), str(path))


def find_calibration(
    shape: ModelShape, device: str = "cpu", dtype: str = "float32"
) -> MeasuredCalibration | None:
    """The calibration made on this machine for a model shape, or None if there is none.

    Raises:
        CalibrationError: There is one, and it is damaged.
        StorageError: It could not be read.
    """
    path = calibration_path(shape.digest, device, dtype)
    return read_calibration(path) if path.exists() else None


def _held_out(table: Mapping[str, Any], where: str) -> HeldOut:
    fields = Fields(table, where, CalibrationError)
    held_out = HeldOut(
        plan=fields.take("plan", str),
        prefix_tokens=fields.take("prefix_tokens", int, minimum=1),
        suffix_tokens=fields.take("suffix_tokens", int, minimum=1),
        measured_seconds=fields.take("measured_seconds", float, minimum=0),
        predicted_seconds=fields.take("predicted_seconds", float, minimum=0),
    )
    fields.done()
    return held_out
