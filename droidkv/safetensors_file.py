"""Hashes of the tensors in safetensors files, without loading them. Standard library only."""

from __future__ import annotations

import hashlib
import itertools
import math
import os
import stat
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from droidkv.errors import LoadError, StorageError
from droidkv.fields import Fields
from droidkv.identity import content_digest
from droidkv.jsonio import canonical_json, parse_json, read_json, write_json

_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_CHUNK_BYTES = 4 * 1024 * 1024
_BITS = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "C64": 64,
    "I64": 64,
    "U64": 64,
    "F64": 64,
    "F4": 4,
}
# A file younger than this may change once more within one tick of its file system's clock.
_SETTLED_SECONDS = 3.0


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a file: `[start, stop)` are bytes of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def read_entries(path: Path) -> list[TensorEntry]:
    """The tensors of a safetensors file in the order of their bytes, the header fully checked.

    Raises:
        LoadError: The file is missing, truncated or not in the format; says where.
        StorageError: The file could not be read.
    """
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise LoadError(f"{path}: expected a regular file, got a folder, pipe or device")
        with open(path, "rb") as file:
            num_bytes = os.fstat(file.fileno()).st_size
            header_bytes = int.from_bytes(file.read(8), "little")
            if num_bytes < 8 or header_bytes > min(num_bytes - 8, _MAX_HEADER_BYTES):
                raise LoadError(
                    f"{path}: expected a safetensors file, got {num_bytes} bytes that announce a "
                    f"header of {header_bytes}; it is truncated or of another kind: fetch it anew"
                )
            header = file.read(header_bytes)
    except FileNotFoundError as cause:
        raise LoadError(f"{path}: expected a safetensors file, but there is none") from cause
    except OSError as cause:
        raise StorageError(f"expected to read {str(path)!r}, but: {cause}") from cause
    try:
        table = parse_json(header.decode("utf-8"), f"{path}, header", LoadError, max_depth=8)
    except UnicodeDecodeError as cause:
        raise LoadError(f"{path}, header: expected UTF-8 text ({cause})") from cause
    if not isinstance(table, dict):
        raise LoadError(f"{path}, header: expected a table of tensors")
    table.pop("__metadata__", None)
    entries = [_entry(path, name, value, 8 + header_bytes) for name, value in table.items()]
    entries.sort(key=lambda entry: (entry.start, entry.stop))
    position = 8 + header_bytes
    for entry in entries:
        if entry.start != position:
            raise LoadError(
                f"{path}: expected tensor {entry.name!r} to start at byte {position}, got "
                f"{entry.start}; tensors must neither overlap nor leave gaps"
            )
        position = entry.stop
    if position != num_bytes:
        raise LoadError(
            f"{path}: expected {position} bytes by its header, got {num_bytes}; the file is "
            f"truncated or has something behind it: fetch it anew"
        )
    return entries


def hash_tensors(path: Path, cache_folder: Path | None) -> list[list[Any]]:
    """`[name, dtype, shape, sha256 of the bytes]` of each tensor of a file, sorted by name.

    Args:
        path: The safetensors file.
        cache_folder: Where the answer is remembered, by the file's path, size, inode and both its
            times; None = read the file whatever was remembered.

    Raises:
        LoadError: As `read_entries`.
        StorageError: The file could not be read.
    """
    entries = read_entries(path)
    key = _file_key(path)
    remembered = None
    if cache_folder is not None:
        remembered = cache_folder / "hashes" / f"{content_digest(key)[7:]}.json"
        if (found := _remembered(remembered, key)) is not None:
            return found
    hashed = []
    with open(path, "rb") as file:
        for entry in entries:
            file.seek(entry.start)
            digest = hashlib.sha256()
            left = entry.stop - entry.start
            while left:
                chunk = file.read(min(left, _CHUNK_BYTES))
                if not chunk:
                    raise LoadError(f"{path}: the file became shorter while it was read")
                digest.update(chunk)
                left -= len(chunk)
            hashed.append([entry.name, entry.dtype, list(entry.shape), digest.hexdigest()])
    hashed.sort()
    if _file_key(path) != key:
        raise LoadError(f"{path}: the file was changed while it was read; try again")
    newest = max(key["mtime_ns"], key["ctime_ns"])
    if remembered is not None and time.time() - newest / 1e9 > _SETTLED_SECONDS:
        with suppress(StorageError):  # not being able to remember costs time only
            write_json(remembered, {"key": key, "tensors": hashed}, indent=None)
    return hashed


def combine(tensors: Iterable[list[Any]]) -> str:
    """`sha256:...` of tensors from `hash_tensors`, whatever files they were spread over.

    Raises:
        LoadError: Two tensors have one name.
    """
    ordered = sorted(tensors, key=lambda tensor: str(tensor[0]))
    for left, right in itertools.pairwise(ordered):
        if left[0] == right[0]:
            raise LoadError(f"expected each tensor once, got {left[0]!r} in two files")
    return content_digest(ordered)


def headers_digest(paths: Iterable[Path]) -> str:
    """`headers:...` of files by name, size, time and header only; the tensors are not read.

    Cheap, and never equal to a content hash. The time is in it because weights that were quantised
    anew have the same sizes and headers; so a copied file counts as another one.
    """
    table = []
    for path in sorted(paths):
        key = _file_key(path)
        tensors = [[entry.name, entry.dtype, list(entry.shape)] for entry in read_entries(path)]
        table.append([path.name, key["size"], key["mtime_ns"], sorted(tensors)])
    return "headers:" + hashlib.sha256(canonical_json(table).encode("ascii")).hexdigest()


def _entry(path: Path, name: str, value: object, offset: int) -> TensorEntry:
    where = f"{path}, tensor {name!r}"
    fields = Fields(value, where, LoadError)
    dtype = fields.take("dtype", str, choices=tuple(_BITS))
    shape = fields.take_list("shape", int)
    offsets = fields.take_list("data_offsets", int)
    fields.done()
    if len(offsets) != 2 or not 0 <= offsets[0] <= offsets[1] or any(size < 0 for size in shape):
        raise LoadError(f"{where}: expected a shape and two offsets >= 0, got {shape}, {offsets}")
    num_bits = math.prod(shape) * _BITS[dtype]
    if num_bits != 8 * (offsets[1] - offsets[0]):
        raise LoadError(
            f"{where}: expected {num_bits / 8:g} bytes for {dtype} {list(shape)}, "
            f"got {offsets[1] - offsets[0]}"
        )
    return TensorEntry(name, dtype, shape, offset + offsets[0], offset + offsets[1])


def _file_key(path: Path) -> dict[str, Any]:
    real = os.path.realpath(path)
    status = os.stat(real)
    return {
        "path": real,
        "size": status.st_size,
        "mtime_ns": status.st_mtime_ns,
        "ctime_ns": status.st_ctime_ns,  # unlike the other, nobody can set it back
        "inode": status.st_ino,
        "device": status.st_dev,
    }


def _remembered(path: Path, key: dict[str, Any]) -> list[list[Any]] | None:
    with suppress(LoadError, StorageError, KeyError, TypeError):
        entry = read_json(path, LoadError)
        if entry["key"] == key and all(len(each[3]) == 64 for each in entry["tensors"]):
            return list(entry["tensors"])
    return None
