"""The bytes of one stored object: a header of fixed width, then the tensors' own bytes.

The header repeats the object's whole name, so that bytes found under a wrong name are told apart,
and holds a checksum over everything else. Tensors keep their dtype; nothing is cast.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch
import xxhash
from torch import Tensor

from droidkv.errors import DroidKVError
from droidkv.identity import DTYPE_NAMES
from droidkv.serve.keys import STORE_FORMAT_VERSION, ChunkKey

HEADER_BYTES = 256
_MAGIC = b"droidkv\0"
# magic, format version, kind, dtype, namespace, chunk index, chunk hash, layer, shape (four
# numbers), bytes of the tensors, padding. The last eight bytes of the header are the checksum.
_FIELDS = struct.Struct("<8sQ8s16s32sQ32sQ4QQ")
_CHECKSUM = struct.Struct("<Q")
_CHECKED_BYTES = HEADER_BYTES - _CHECKSUM.size


class MissReason(StrEnum):
    """Why an object could not be had. Every one makes the whole request prefill by itself."""

    ABSENT = "absent"
    SHORT = "short"
    CORRUPT = "corrupt"
    TIMEOUT = "timeout"
    BACKEND_DOWN = "backend_down"
    WRONG_NAMESPACE = "wrong_namespace"


class StoreMiss(DroidKVError, LookupError):
    """An object could not be had from the store.

    Attributes:
        reason: Why, as one of a closed list.
    """

    def __init__(self, reason: MissReason, message: str) -> None:
        super().__init__(f"{reason}: {message}")
        self.reason = reason


class ObjectKind(StrEnum):
    """What an object holds."""

    KV = "kv"
    HIDDEN = "hidden"


@dataclass(frozen=True, order=True)
class ObjectName:
    """One object: keys and values, or the entering hidden state, of one layer of one chunk."""

    key: ChunkKey
    kind: ObjectKind
    layer: int

    def __str__(self) -> str:
        return f"{self.kind} of layer {self.layer}, chunk {self.key.index}"


def encode(name: ObjectName, tensors: Sequence[Tensor]) -> Tensor:
    """Tensors of equal shape and dtype as one object, `[num_bytes]` uint8 on the CPU.

    Args:
        name: Goes into the header.
        tensors: Of up to three dimensions each.
    """
    shape = (len(tensors), *tensors[0].shape)
    num_bytes = tensors[0].nbytes * len(tensors)
    buffer = torch.empty(HEADER_BYTES + num_bytes, dtype=torch.uint8)
    body = buffer[HEADER_BYTES:].view(tensors[0].dtype).view(shape)
    for slot, tensor in zip(body, tensors, strict=True):
        slot.copy_(tensor)
    fields = _FIELDS.pack(*_header(name, tensors[0].dtype, shape), num_bytes)
    fields = fields.ljust(_CHECKED_BYTES, b"\0")
    header = bytearray(
        fields + _CHECKSUM.pack(_checksum(fields, buffer[HEADER_BYTES:].numpy().data))
    )
    buffer[:HEADER_BYTES] = torch.frombuffer(header, dtype=torch.uint8)
    return buffer


def decode(name: ObjectName, buffer: Tensor) -> Tensor:
    """The tensors of an object, stacked: `[num_tensors, *shape]`, a view of `buffer`.

    Args:
        name: What was asked for.
        buffer: `[num_bytes]` uint8, aligned as a fresh tensor is.

    Raises:
        StoreMiss: The object is short, corrupt, or another one.
    """
    if buffer.numel() < HEADER_BYTES:
        raise _miss(MissReason.SHORT, name, f"at least {HEADER_BYTES} bytes", buffer.numel())
    raw = buffer.numpy().data
    head = raw[:HEADER_BYTES].tobytes()
    magic, version, kind, dtype, namespace, index, chunk_hash, layer, *shape, num_bytes = (
        _FIELDS.unpack_from(head)
    )
    if magic != _MAGIC or version != STORE_FORMAT_VERSION:
        wanted = f"an object of format {STORE_FORMAT_VERSION}"
        raise _miss(MissReason.CORRUPT, name, wanted, f"{magic!r}, version {version}")
    stop = HEADER_BYTES + num_bytes
    if len(raw) < stop:
        left = len(raw) - HEADER_BYTES
        raise _miss(MissReason.SHORT, name, f"{num_bytes} bytes of tensors", left)
    (expected,) = _CHECKSUM.unpack_from(head, _CHECKED_BYTES)
    checksum = _checksum(head[:_CHECKED_BYTES], raw[HEADER_BYTES:stop])
    if checksum != expected:
        raise _miss(MissReason.CORRUPT, name, f"checksum {expected:016x}", f"{checksum:016x}")
    if namespace.hex() != name.key.namespace:
        raise _miss(MissReason.WRONG_NAMESPACE, name, name.key.namespace, namespace.hex())
    found = (_text(kind), layer, index, chunk_hash.hex())
    if found != (name.kind, name.layer, name.key.index, name.key.chunk_hash):
        raise _miss(MissReason.CORRUPT, name, "this very object", f"another one: {found}")
    if _text(dtype) not in DTYPE_NAMES:
        raise _miss(MissReason.CORRUPT, name, f"a dtype of {DTYPE_NAMES}", repr(dtype))
    shape = [size for size in shape if size]
    torch_dtype = getattr(torch, _text(dtype))
    if num_bytes != math.prod(shape) * torch_dtype.itemsize:
        raise _miss(MissReason.CORRUPT, name, f"a tensor of shape {shape}", f"{num_bytes} bytes")
    return buffer[HEADER_BYTES:stop].view(torch_dtype).view(shape)


def _header(name: ObjectName, dtype: torch.dtype, shape: tuple[int, ...]) -> list[bytes | int]:
    return [
        _MAGIC,
        STORE_FORMAT_VERSION,
        name.kind.encode(),
        str(dtype).removeprefix("torch.").encode(),
        bytes.fromhex(name.key.namespace),
        name.key.index,
        bytes.fromhex(name.key.chunk_hash),
        name.layer,
        *shape,
        *[0] * (4 - len(shape)),
    ]


def _checksum(header: bytes, body: memoryview) -> int:
    checksum = xxhash.xxh3_64(header)
    checksum.update(body)
    return checksum.intdigest()


def _text(field: bytes) -> str:
    return field.rstrip(b"\0").decode("latin-1")


def _miss(reason: MissReason, name: ObjectName, wanted: object, got: object) -> StoreMiss:
    return StoreMiss(reason, f"{name}: expected {wanted}, got {got}")
