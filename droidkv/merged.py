"""Whose weights a folder of merged weights holds: base and adapter, by content."""

from __future__ import annotations

from pathlib import Path

from droidkv.content import weights_sha256
from droidkv.errors import LoadError
from droidkv.fields import Fields
from droidkv.identity import NONE
from droidkv.jsonio import read_json, write_json

MERGED_RECORD = "droidkv-merged.json"
_SCHEMA_VERSION = 1


def record_merged(folder: Path, weights: str, adapter: str) -> None:
    """Write into a folder of merged weights what was merged.

    Args:
        folder: A model folder; its weights are hashed.
        weights: Identity of the base's weights (`Fingerprint.weights`).
        adapter: Identity of the adapter (`Fingerprint.adapter`).

    Raises:
        LoadError: The folder holds no weights.
        StorageError: The record could not be written.
    """
    record = {
        "schema_version": _SCHEMA_VERSION,
        "base_weights": weights,
        "adapter": adapter,
        "merged_weights": weights_sha256(folder),
    }
    write_json(folder / MERGED_RECORD, record)


def merged_from(folder: Path, weights: str) -> tuple[str, str]:
    """The fields `weights` and `adapter` of a model folder's identity.

    Args:
        folder: A model folder.
        weights: Identity of the weights in it. The record counts only for the very weights it was
            written for: changed ones, or ones known by file sizes only, stand for themselves.

    Raises:
        LoadError: The record is damaged.
    """
    path = folder / MERGED_RECORD
    if not path.exists():
        return weights, NONE
    fields = Fields(read_json(path, LoadError), str(path), LoadError)
    fields.take_version(_SCHEMA_VERSION, f"remove {folder}, it is merged anew")
    base, adapter = fields.take("base_weights", str), fields.take("adapter", str)
    written_for = fields.take("merged_weights", str)
    fields.done()
    return (base, adapter) if written_for == weights else (weights, NONE)
