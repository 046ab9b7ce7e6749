"""Who made a KV cache: everything that changes its numbers. Unknown means no reuse."""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from droidkv.differences import UNKNOWN, Difference, differences, flatten, lines
from droidkv.errors import IdentityError, unknown_name
from droidkv.fields import Fields
from droidkv.jsonio import canonical_json

FORMAT_VERSION = 1
NONE = "none"
DTYPE_NAMES = (
    "float64",
    "float32",
    "float16",
    "bfloat16",
    "float8_e4m3fn",
    "float8_e5m2",
    "int8",
    "uint8",
)

# Settings of a model, flat and sorted by name; lists are tuples. Hashable, unlike a dict.
Settings = tuple[tuple[str, Any], ...]

_CONTENT = re.compile(r"sha256:[0-9a-f]{64}")
_WEIGHTS = re.compile(r"(sha256|headers):[0-9a-f]{64}")


@dataclass(frozen=True)
class Fingerprint:
    """Identity of one producer of KV and E caches. Names are no part of it: they prove nothing.

    Every field but `format_version` may be None = unknown. An unknown field is never the same as
    anything, so a fingerprint with one matches nothing, not even itself.

    Attributes:
        weights: `sha256:...` over all tensors (`droidkv.content.weights_sha256`), or, declared as
            such and never equal to it, `headers:...` over shapes, file sizes and times only.
        architecture: Settings of the configuration that shape the computation.
        rope: Settings of the rotary position embedding, scaling included.
        vocabulary: `sha256:...` of the full map token -> id, added tokens included.
        tokenizer: `sha256:...` of the pipeline: merges, normaliser, pre- and post-processing.
        added_tokens: `sha256:...` of the added tokens with their flags.
        weight_dtype: Name of the dtype the model computes in, such as `bfloat16`.
        cache_dtype: Name of the dtype of its KV and E caches.
        quantisation: Canonical JSON of the quantisation of the weights, `none` if there is none.
        adapter: `sha256:...` of the adapter's settings and tensors, `none` if there is none. The
            same adapter merged or applied as LoRA is the same function, so the same identity.
        tensor_parallel: Number of ranks the KV heads are split over.
        format_version: Version of this list of fields.

    Raises:
        IdentityError: A field has a form it cannot have.
    """

    weights: str | None = None
    architecture: Settings | None = None
    rope: Settings | None = None
    vocabulary: str | None = None
    tokenizer: str | None = None
    added_tokens: str | None = None
    weight_dtype: str | None = None
    cache_dtype: str | None = None
    quantisation: str | None = None
    adapter: str | None = None
    tensor_parallel: int | None = None
    format_version: int = FORMAT_VERSION

    def __post_init__(self) -> None:
        self._check_digest("weights", _WEIGHTS)
        for name in ("vocabulary", "tokenizer", "added_tokens"):
            self._check_digest(name, _CONTENT)
        if self.adapter != NONE:
            self._check_digest("adapter", _CONTENT)
        if self.quantisation is not None and not isinstance(self.quantisation, str):
            raise IdentityError(f"expected quantisation to be a text, got {self.quantisation!r}")
        for name in ("weight_dtype", "cache_dtype"):
            dtype = getattr(self, name)
            if dtype is not None and dtype not in DTYPE_NAMES:
                raise IdentityError(unknown_name(name, str(dtype), DTYPE_NAMES))
        for name in ("architecture", "rope"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, settings(dict(value)))
        for name in ("tensor_parallel", "format_version"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise IdentityError(f"expected {name} to be a whole number >= 1, got {value!r}")

    @property
    def unknown_fields(self) -> list[str]:
        """Names of the fields that are unknown; with any of these nothing may be reused."""
        return [
            field.name for field in dataclasses.fields(self) if getattr(self, field.name) is None
        ]

    def differences(self, other: Fingerprint) -> list[Difference]:
        """Every field that differs or is unknown on either side, with both values.

        Settings are compared one by one: `rope.rope_theta`, `architecture.hidden_size`.
        """
        found = []
        for field in dataclasses.fields(self):
            mine, theirs = getattr(self, field.name), getattr(other, field.name)
            if isinstance(mine, tuple) and isinstance(theirs, tuple):
                inner = differences(dict(mine), dict(theirs))
                found += [replace(each, field=f"{field.name}.{each.field}") for each in inner]
            else:
                found += differences({field.name: _known(mine)}, {field.name: _known(theirs)})
        return found

    def require_same(
        self,
        other: Fingerprint,
        mine: str = "what was expected",
        theirs: str = "what was loaded",
        way_out: str = "use the model that it was made with, or make it anew for this one",
    ) -> None:
        """Do nothing if the two are one producer.

        Args:
            other: The fingerprint to compare with.
            mine: What this fingerprint belongs to, for the message.
            theirs: What the other one belongs to, for the message.
            way_out: What the user should do, for the message.

        Raises:
            IdentityError: They are not; the message names each differing field and both values.
        """
        found = self.differences(other)
        if found:
            raise IdentityError(
                f"expected {mine} and {theirs} to come from one model, but they differ in:"
                + lines(each.between(mine, theirs) for each in found)
                + f"\nNothing is reused; {way_out}."
            )

    def digest(self) -> str:
        """A stable key of all fields: 64 hexadecimal digits, the same in every process.

        Raises:
            IdentityError: A field is unknown; a key without it could meet another producer's.
        """
        if self.unknown_fields:
            raise IdentityError(
                f"expected a complete identity to make a key of, but these fields are unknown: "
                f"{', '.join(self.unknown_fields)}; load the model with droidkv.loading"
            )
        return hashlib.sha256(canonical_json(self.to_json()).encode("ascii")).hexdigest()

    def to_json(self) -> dict[str, Any]:
        """The fingerprint as JSON values; unknown fields are null."""
        table: dict[str, Any] = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            table[field.name] = dict(value) if isinstance(value, tuple) else value
        return table

    @classmethod
    def from_json(cls, value: object, where: str = "fingerprint") -> Fingerprint:
        """Read what `to_json` wrote. Every field must be there, and no other.

        Raises:
            IdentityError: A field is missing, unheard of, or of the wrong kind.
        """
        fields = Fields(value, where, IdentityError)
        table: dict[str, Any] = {}
        for field in dataclasses.fields(cls):
            if not isinstance(value, Mapping) or field.name not in value:
                raise IdentityError(
                    f"{where}: expected the field {field.name!r}, but it is missing; "
                    f"it was written by another version: make it anew"
                )
            kind: type = str
            if field.name in ("architecture", "rope"):
                kind = dict
            elif field.name in ("tensor_parallel", "format_version"):
                kind = int
            table[field.name] = fields.optional(field.name, kind)
        fields.done()
        if table["format_version"] is None:
            raise IdentityError(f"{where}: expected a whole number as format_version, got null")
        return cls(**table)

    def _check_digest(self, name: str, form: re.Pattern[str]) -> None:
        value = getattr(self, name)
        if value is not None and (not isinstance(value, str) or not form.fullmatch(value)):
            raise IdentityError(f"expected {name} to match {form.pattern!r}, got {value!r}")


def settings(table: Mapping[str, Any]) -> Settings:
    """A table of JSON values as `Settings`: one form, so that equal tables have equal digests.

    Raises:
        IdentityError: A value is not a JSON value.
    """
    try:
        flat = flatten(table)
    except ValueError as cause:
        raise IdentityError(f"settings: {cause}") from cause
    return tuple(sorted((name, _frozen(name, each)) for name, each in flat.items()))


def content_digest(value: Any) -> str:
    """`sha256:...` of a JSON value, over its canonical text."""
    return "sha256:" + hashlib.sha256(canonical_json(value).encode("ascii")).hexdigest()


def _known(value: Any) -> Any:
    if value is None:
        return UNKNOWN
    return "known" if isinstance(value, tuple) else value


def _frozen(name: str, value: Any) -> Any:
    if isinstance(value, list | tuple):
        return tuple(_frozen(name, each) for each in value)
    if isinstance(value, Mapping):
        return tuple(sorted((str(key), _frozen(name, each)) for key, each in value.items()))
    if isinstance(value, float) and abs(value) < 2**53 and value == int(value):
        return int(value)  # 10000.0 and 10000 are one setting
    if isinstance(value, float) and value - value != 0:
        raise IdentityError(f"expected a finite number for the setting {name!r}, got {value}")
    if value is None or isinstance(value, str | int | float):
        return value
    raise IdentityError(
        f"expected a JSON value for the setting {name!r}, got a {type(value).__name__}"
    )
