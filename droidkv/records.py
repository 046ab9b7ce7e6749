"""The parts of a profile: frozen records that check themselves and are read from strict JSON."""

from __future__ import annotations

import json
import math
import types
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from droidkv.errors import DroidKVError, ProfileError
from droidkv.fields import Fields
from droidkv.identity import Fingerprint
from droidkv.plan import ReusePlan

Record = TypeVar("Record")

SIGNIFICANT_DIGITS = 6


@dataclass(frozen=True)
class ModelRecord:
    """A model of the pair: a name for people, a fingerprint for proof."""

    name: str
    fingerprint: Fingerprint


@dataclass(frozen=True)
class TaskRecord:
    """Which items were measured: the task, its version and options, the split and the seed.

    Raises:
        ProfileError: An option is not a JSON value.
    """

    name: str
    version: int
    metric: str
    split: str
    seed: int
    options: Mapping[str, Any]

    def __post_init__(self) -> None:
        try:
            # Tuples become lists, so that a record read from JSON equals its source.
            options = json.loads(json.dumps(dict(self.options), allow_nan=False))
        except (TypeError, ValueError) as error:
            raise ProfileError(
                f"expected task options that JSON can hold, got {dict(self.options)!r}: {error}"
            ) from error
        object.__setattr__(self, "options", options)


@dataclass(frozen=True)
class ItemRecord:
    """One item: its lengths in tokens, and how the receiver's own full prefill does on it.

    Attributes:
        id: The task's id of the item.
        prefix_tokens: Tokens both models share.
        suffix_tokens: Tokens only the receiver sees.
        answer_tokens: Tokens of the full prefill's greedy answer.
        full_score: Score of that answer, in [0, 1].
        full_nll: Its mean negative log-likelihood per token, in nats.
        prefix_digest: Of the prefix, by which items over one text are known; None = not recorded.

    Raises:
        ProfileError: A length is below 1, or a number out of range.
    """

    id: str
    prefix_tokens: int
    suffix_tokens: int
    answer_tokens: int
    full_score: float
    full_nll: float
    prefix_digest: str | None = None

    def __post_init__(self) -> None:
        for name in ("prefix_tokens", "suffix_tokens", "answer_tokens"):
            _check_range(getattr(self, name), name, low=1)
        _check_range(self.full_score, "full_score", low=0, high=1)
        _check_range(self.full_nll, "full_nll")

    @property
    def group(self) -> str:
        """A name that items over one prefix share, and no others."""
        return self.prefix_digest or self.id


@dataclass(frozen=True)
class PlanRecord:
    """One plan on every item, in the order of `Profile.items`.

    Attributes:
        plan: The plan.
        kl: Mean KL(full prefill || plan) over the answer's tokens, in nats.
        nll: Mean negative log-likelihood of the full prefill's answer, in nats.
        top1: Share of the answer's tokens that are the plan's argmax, in [0, 1].
        agrees: Whether the plan's greedy answer is the full prefill's.
        score: Score of the plan's answer in [0, 1]; None = it diverged and was not decoded.

    Raises:
        ProfileError: The columns differ in length, a number is out of range, or an answer that
            agrees has no score.
    """

    plan: ReusePlan
    kl: tuple[float, ...]
    nll: tuple[float, ...]
    top1: tuple[float, ...]
    agrees: tuple[bool, ...]
    score: tuple[float | None, ...]

    def __post_init__(self) -> None:
        for name in ("nll", "top1", "agrees", "score"):
            if len(getattr(self, name)) != len(self.kl):
                raise ProfileError(
                    f"expected {name} to have one value per item like kl, which has "
                    f"{len(self.kl)}, got {len(getattr(self, name))}"
                )
        for index, (kl, nll, top1, agrees, score) in enumerate(
            zip(self.kl, self.nll, self.top1, self.agrees, self.score, strict=True)
        ):
            _check_range(kl, f"kl[{index}]")
            _check_range(nll, f"nll[{index}]")
            _check_range(top1, f"top1[{index}]", low=0, high=1)
            if score is not None:
                _check_range(score, f"score[{index}]", low=0, high=1)
            elif agrees:
                raise ProfileError(
                    f"expected score[{index}] to be the full prefill's score, since agrees[{index}]"
                    f" says that the answer is the same, got null"
                )


# Resolved once: a profile has a thousand plan records.
_COLUMNS = {n: hint for n, hint in get_type_hints(PlanRecord).items() if n != "plan"}


@dataclass(frozen=True)
class NoiseFloor:
    """Losses of a plan that is exact by construction; smaller ones of other plans are no loss.

    Attributes:
        kl: In nats.
        nll: Above the full prefill's, in nats.
        disagreement: Share of items whose greedy answer changed.
        relative_percent: Share of the full prefill's score, in percent.

    Raises:
        ProfileError: A number is negative or not finite.
    """

    kl: float
    nll: float
    disagreement: float
    relative_percent: float

    def __post_init__(self) -> None:
        for name in ("kl", "nll", "disagreement", "relative_percent"):
            _check_range(getattr(self, name), name, low=0)


@dataclass(frozen=True)
class StitchRecord:
    """The stitching map that the `stitch` plans used.

    Attributes:
        file: Name of its safetensors file, which lies beside the profile.
        sha256: Of its content.
        rank: Rank of the map.
        ridge: Regularisation of the fit.
        calibration_ids: Items it was fitted on; never among the evaluated ones.
        refined: Plans whose start was then trained by KL (`droidkv refine`), as text.

    Raises:
        ProfileError: `file` leaves the profile's folder, or a number is out of range.
    """

    file: str
    sha256: str
    rank: int
    ridge: float
    calibration_ids: tuple[str, ...]
    refined: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if PurePosixPath(self.file).name != self.file or "\\" in self.file:
            raise ProfileError(
                f"expected file to be the name of a file beside the profile, got {self.file!r}"
            )
        _check_range(self.rank, "rank", low=1)
        _check_range(self.ridge, "ridge", low=0)


@dataclass(frozen=True)
class Provenance:
    """When, how and on what the measurements were made.

    Raises:
        ProfileError: `seconds` is negative or not finite.
    """

    created: str
    command: str
    seed: int
    git_commit: str | None
    packages: Mapping[str, str]
    machine: str
    device: str
    dtype: str
    seconds: float

    def __post_init__(self) -> None:
        _check_range(self.seconds, "seconds", low=0)


def require_numbers(what: str, item: str, kl: float, nll: float) -> None:
    """Refuse what was measured on an item where it is no number.

    Args:
        what: What did it, in words.
        item: Name of the item.
        kl: In nats.
        nll: In nats.

    Raises:
        ProfileError: KL or NLL is NaN or infinite.
    """
    if not (math.isfinite(kl) and math.isfinite(nll)):
        raise ProfileError(
            f"expected numbers for {what} on the item {item}, got KL {kl} and NLL {nll}: a model "
            "overflows; use a wider dtype, such as float32"
        )


def rounded(value: float) -> float:
    """A measured number as files keep it: beyond 6 significant digits it is noise."""
    return float(f"{value:.{SIGNIFICANT_DIGITS}g}")


def read_record(kind: type[Record], table: object, where: str) -> Record:
    """Read a record of plain fields from the JSON form that `dataclasses.asdict` gives.

    Args:
        kind: Class of the record; its fields are texts, numbers, tables, lists or null.
        table: The parsed JSON.
        where: Name of the place, for messages.

    Raises:
        ProfileError: A field is missing, unknown, of the wrong type or out of range.
    """
    fields = Fields(table, where, ProfileError)
    values = {name: take(fields, name, hint, where) for name, hint in get_type_hints(kind).items()}
    fields.done()
    return _checked(kind, values, where)


def read_plan_record(table: object, where: str, num_layers: int) -> PlanRecord:
    """Read a `PlanRecord`, whose plan is written as text, such as `[12,24)+stitch`.

    Raises:
        ProfileError: As `read_record`; or the plan is malformed or out of range.
    """
    fields = Fields(table, where, ProfileError)
    values = {name: take(fields, name, hint, where) for name, hint in _COLUMNS.items()}
    text = fields.take("plan", str)
    fields.done()
    try:
        values["plan"] = ReusePlan.parse(text, num_layers)
    except DroidKVError as error:
        raise ProfileError(f"{where}: {error}") from error
    return _checked(PlanRecord, values, where)


def read_model_record(table: object, where: str) -> ModelRecord:
    """Read a `ModelRecord` with its fingerprint.

    Raises:
        ProfileError: As `read_record`; or the fingerprint is malformed.
    """
    fields = Fields(table, where, ProfileError)
    name = fields.take("name", str)
    fingerprint = fields.take("fingerprint", dict)
    fields.done()
    try:
        return ModelRecord(name, Fingerprint.from_json(fingerprint, f"{where}, fingerprint"))
    except DroidKVError as error:
        raise ProfileError(str(error)) from error


def take(fields: Fields, name: str, hint: Any, where: str) -> Any:
    """Take a field whose type is given as in a record's annotation."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is tuple and _is_nullable(arguments[0]):
        (element,) = set(get_args(arguments[0])) - {types.NoneType}
        values = fields.take(name, list)
        # Reading element by element keeps the position for the message.
        inner = Fields({f"{name}[{i}]": v for i, v in enumerate(values)}, where, ProfileError)
        return tuple(inner.optional(f"{name}[{i}]", element) for i in range(len(values)))
    if origin is tuple:
        return fields.take_list(name, arguments[0])
    if _is_nullable(hint):
        (element,) = set(arguments) - {types.NoneType}
        return fields.optional(name, element)
    return fields.take(name, dict if origin is not None else hint)


def _is_nullable(hint: Any) -> bool:
    return get_origin(hint) is types.UnionType


def _checked(kind: type[Record], values: dict[str, Any], where: str) -> Record:
    try:
        return kind(**values)
    except ProfileError as error:
        raise ProfileError(f"{where}: {error}") from error


def _check_range(value: float, name: str, low: float = -math.inf, high: float = math.inf) -> None:
    if not (math.isfinite(value) and low <= value <= high):
        raise ProfileError(
            f"expected {name} to be a finite number in [{low:g}, {high:g}], got {value}"
        )
