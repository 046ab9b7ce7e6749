"""A store of KV and E objects that a sender fills and receivers read, object by object.

A backend is a subclass with six small methods that move bytes. Names, checksums, deadlines,
counting and the closed list of reasons are the same for all of them.
"""

from __future__ import annotations

import itertools
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field

from torch import Tensor

from droidkv.errors import PlanError
from droidkv.plan import ReusePlan
from droidkv.serve.keys import ChunkKey, chunk_hashes, chunk_keys, namespace_digest, reused_layers
from droidkv.serve.objects import MissReason, ObjectKind, ObjectName, StoreMiss, decode, encode

__all__ = [
    "ChunkKey",
    "MemoryStore",
    "MissReason",
    "Store",
    "StoreMiss",
    "StoreStats",
    "chunk_hashes",
    "chunk_keys",
    "coverage",
    "deadline_in",
    "namespace_digest",
]


def deadline_in(seconds: float) -> float:
    """The moment so many seconds from now, on the clock that deadlines are given in."""
    return time.monotonic() + seconds


@dataclass(frozen=True)
class StoreStats:
    """What a store did since it was opened.

    Attributes:
        puts: Objects handed to the backend.
        put_bytes: Their bytes, headers included.
        put_failures: Objects that the backend refused, or lost later; they will be absent.
        gets: Objects that were read and checked.
        get_bytes: Their bytes, headers included.
        misses: How often an object could not be had, by reason.
    """

    puts: int = 0
    put_bytes: int = 0
    put_failures: int = 0
    gets: int = 0
    get_bytes: int = 0
    misses: dict[MissReason, int] = field(default_factory=dict)


class Store(ABC):
    """Objects named by sender, tokens, kind and layer. Methods may be called from any thread.

    Args:
        chunk_tokens: Tokens in one chunk; the same for all who share a store.

    Raises:
        PlanError: `chunk_tokens` is below 1.
    """

    def __init__(self, chunk_tokens: int) -> None:
        if chunk_tokens < 1:
            raise PlanError(f"expected chunk_tokens >= 1, got {chunk_tokens}")
        self.chunk_tokens = chunk_tokens
        self._counts: Counter[str] = Counter()
        self._misses: Counter[MissReason] = Counter()
        self._lock = threading.Lock()

    def put_kv(
        self,
        key: ChunkKey,
        layer: int,
        keys: Tensor,
        values: Tensor,
        on_end: Callable[[bool], None] | None = None,
    ) -> bool:
        """Store one layer's KV of one chunk; the tensors may be changed once this returns.

        Args:
            key: The chunk.
            layer: The decoder layer.
            keys: `[num_kv_heads, chunk_tokens, head_dim]`, after RoPE.
            values: The same shape.
            on_end: Called once, from any thread and before `flush` returns: whether others can
                read it now. A backend may lose what it took.

        Returns:
            Whether the backend took it. Storing never raises for a backend's sake: what it does
            not take is absent for readers.

        Raises:
            PlanError: The tensors are not one chunk.
        """
        if (
            keys.shape != values.shape
            or keys.dtype != values.dtype
            or keys.ndim != 3
            or keys.shape[1] != self.chunk_tokens
        ):
            raise PlanError(
                f"expected keys and values of shape [num_kv_heads, {self.chunk_tokens}, head_dim] "
                f"and one dtype, got {tuple(keys.shape)} of {keys.dtype} and "
                f"{tuple(values.shape)} of {values.dtype}"
            )
        return self._put(ObjectName(key, ObjectKind.KV, layer), (keys, values), on_end)

    def put_hidden(
        self,
        key: ChunkKey,
        layer: int,
        hidden: Tensor,
        on_end: Callable[[bool], None] | None = None,
    ) -> bool:
        """Store the hidden state entering a layer over one chunk (E). As `put_kv`.

        Args:
            key: The chunk.
            layer: The decoder layer that it enters.
            hidden: `[chunk_tokens, hidden_size]`.
            on_end: As there.
        """
        if hidden.ndim != 2 or hidden.shape[0] != self.chunk_tokens:
            raise PlanError(
                f"expected E of shape [{self.chunk_tokens}, hidden_size], got {tuple(hidden.shape)}"
            )
        return self._put(ObjectName(key, ObjectKind.HIDDEN, layer), (hidden,), on_end)

    def contains_kv(self, key: ChunkKey, layers: Iterable[int], deadline: float) -> bool:
        """Whether the KV of all these layers is there now; it may be gone at the next moment.

        Raises:
            StoreMiss: The backend did not answer: `timeout` or `backend_down`.
        """
        names = [ObjectName(key, ObjectKind.KV, layer) for layer in layers]
        return self.count_leading(names, deadline) == len(names)

    def contains_hidden(self, key: ChunkKey, layers: Iterable[int], deadline: float) -> bool:
        """Whether E of all these layers is there now. As `contains_kv`."""
        names = [ObjectName(key, ObjectKind.HIDDEN, layer) for layer in layers]
        return self.count_leading(names, deadline) == len(names)

    def count_leading(self, names: Sequence[ObjectName], deadline: float) -> int:
        """How many objects, from the first on, are there now. As `contains_kv`."""
        return self._counted(self._count_leading, names, deadline)

    def count_for_others(self, names: Sequence[ObjectName], deadline: float) -> int:
        """The same, without what only this process holds a copy of."""
        return self._counted(self._count_shared, names, deadline)

    def _counted(
        self,
        count: Callable[[Sequence[ObjectName], float], int],
        names: Sequence[ObjectName],
        deadline: float,
    ) -> int:
        if not names:
            return 0
        try:
            if time.monotonic() >= deadline:
                raise TimeoutError("the deadline had passed before anything was asked for")
            return count(names, deadline)
        except Exception as cause:
            raise self._missed(_as_miss(cause, "looking up", names)) from cause

    def get_kv(self, key: ChunkKey, layer: int, deadline: float) -> tuple[Tensor, Tensor]:
        """One layer's KV of one chunk: keys and values, `[num_kv_heads, chunk_tokens, head_dim]`.

        Args:
            key: The chunk.
            layer: The decoder layer.
            deadline: Moment to give up at; see `deadline_in`.

        Raises:
            StoreMiss: It cannot be had; says why.
        """
        return self.get_kv_chunks([key], layer, deadline)[0]

    def get_hidden(self, key: ChunkKey, layer: int, deadline: float) -> Tensor:
        """E entering a layer over one chunk, `[chunk_tokens, hidden_size]`. As `get_kv`."""
        return self.get_hidden_chunks([key], layer, deadline)[0]

    def get_kv_chunks(
        self, keys: Sequence[ChunkKey], layer: int, deadline: float
    ) -> list[tuple[Tensor, Tensor]]:
        """`get_kv` of several chunks at once, which most backends do faster than one by one."""
        with self.lent_kv_chunks(keys, layer, deadline) as pairs:
            return [(each.clone(), other.clone()) for each, other in pairs]

    @contextmanager
    def lent_kv_chunks(
        self, keys: Sequence[ChunkKey], layer: int, deadline: float
    ) -> Iterator[list[tuple[Tensor, Tensor]]]:
        """`get_kv_chunks` without a copy, for reading only, until the context ends."""
        names = [ObjectName(key, ObjectKind.KV, layer) for key in keys]
        with ExitStack() as lent:
            yield [(pair[0], pair[1]) for pair in self._get(names, 4, deadline, lent)]

    def get_hidden_chunks(
        self, keys: Sequence[ChunkKey], layer: int, deadline: float
    ) -> list[Tensor]:
        """`get_hidden` of several chunks at once."""
        names = [ObjectName(key, ObjectKind.HIDDEN, layer) for key in keys]
        with ExitStack() as lent:
            return [stacked[0].clone() for stacked in self._get(names, 3, deadline, lent)]

    def stats(self) -> StoreStats:
        """What was done so far."""
        with self._lock:
            return StoreStats(**self._counts, misses=dict(self._misses))

    @abstractmethod
    def flush(self, deadline: float) -> bool:
        """Wait until everything that was put can be read by others; False if that took longer."""

    @abstractmethod
    def close(self) -> None:
        """Let go of the backend. Never waits for one that does not answer."""

    @abstractmethod
    def _write(self, name: ObjectName, buffer: Tensor) -> Future[None] | None:
        """Take an object's bytes, `[num_bytes]` uint8; may raise anything.

        Returns:
            The end of a write that goes on, whose callbacks run before `flush` returns; None if
            the object is written.
        """

    @abstractmethod
    def _count_leading(self, names: Sequence[ObjectName], deadline: float) -> int:
        """How many are there before the first absent one; may raise as `_read`."""

    def _count_shared(self, names: Sequence[ObjectName], deadline: float) -> int:
        """As `_count_leading`, of what other processes find too."""
        return self._count_leading(names, deadline)

    @abstractmethod
    def _read(
        self, names: Sequence[ObjectName], deadline: float, lent: ExitStack
    ) -> list[Tensor | None]:
        """The bytes of each object, None for an absent one; may raise anything.

        `TimeoutError` means a timeout. The tensors are read, never written, until `lent` is closed,
        which gives back what the backend put there.
        """

    @abstractmethod
    def _forget(self, name: ObjectName) -> None:
        """Drop a copy that proved unusable, so that a good one can be fetched next time."""

    def _put(
        self,
        name: ObjectName,
        tensors: Sequence[Tensor],
        on_end: Callable[[bool], None] | None,
    ) -> bool:
        def end(is_written: bool) -> None:
            if not is_written:
                self._count(put_failures=1)
            if on_end is not None:
                on_end(is_written)

        buffer = encode(name, tensors)
        try:
            writing = self._write(name, buffer)
        except Exception:  # whatever a backend's client may raise, the sender goes on
            end(False)
            return False
        self._count(puts=1, put_bytes=buffer.numel())
        if writing is None:
            end(True)
        else:
            writing.add_done_callback(lambda written: end(written.exception() is None))
        return True

    def _get(
        self, names: Sequence[ObjectName], num_dimensions: int, deadline: float, lent: ExitStack
    ) -> list[Tensor]:
        try:
            if time.monotonic() >= deadline:
                raise TimeoutError("the deadline had passed before the first byte was asked for")
            buffers = self._read(names, deadline, lent)
            if time.monotonic() > deadline:
                raise TimeoutError("it came after the deadline")
            if len(buffers) != len(names):
                raise RuntimeError(f"expected {len(names)} objects, got {len(buffers)}")
        except Exception as cause:
            raise self._missed(_as_miss(cause, "reading", names)) from cause
        found = []
        for name, buffer in zip(names, buffers, strict=True):
            try:
                found.append(self._decoded(name, buffer, num_dimensions))
            except StoreMiss as miss:
                if miss.reason is not MissReason.ABSENT:
                    with suppress(Exception):  # the miss is what counts
                        self._forget(name)
                raise self._missed(miss) from None
        num_bytes = sum(buffer.numel() for buffer in buffers if buffer is not None)
        self._count(gets=len(names), get_bytes=num_bytes)
        return found

    def _decoded(self, name: ObjectName, buffer: Tensor | None, num_dimensions: int) -> Tensor:
        if buffer is None:
            raise StoreMiss(MissReason.ABSENT, f"{name} is not in the store")
        tensor = decode(name, buffer)
        if tensor.ndim != num_dimensions or tensor.shape[-2] != self.chunk_tokens:
            raise StoreMiss(
                MissReason.SHORT,
                f"{name}: expected {self.chunk_tokens} tokens, got shape {tuple(tensor.shape)}",
            )
        return tensor

    def _missed(self, miss: StoreMiss) -> StoreMiss:
        with self._lock:
            self._misses[miss.reason] += 1
        return miss

    def _count(self, **amounts: int) -> None:
        with self._lock:
            self._counts.update(amounts)


class MemoryStore(Store):
    """Objects in this process's memory; for tests, and for two models in one process."""

    def __init__(self, chunk_tokens: int) -> None:
        super().__init__(chunk_tokens)
        self._objects: dict[ObjectName, Tensor] = {}

    def flush(self, deadline: float) -> bool:
        return True

    def close(self) -> None:
        self._objects.clear()

    def _write(self, name: ObjectName, buffer: Tensor) -> None:
        self._objects[name] = buffer

    def _count_leading(self, names: Sequence[ObjectName], deadline: float) -> int:
        return sum(1 for _ in itertools.takewhile(self._objects.__contains__, names))

    def _read(
        self, names: Sequence[ObjectName], deadline: float, lent: ExitStack
    ) -> list[Tensor | None]:
        return [self._objects.get(name) for name in names]

    def _forget(self, name: ObjectName) -> None:
        self._objects.pop(name, None)


def coverage(
    store: Store, keys: Sequence[ChunkKey], plan: ReusePlan, num_layers: int, deadline: float
) -> int:
    """How many tokens from 0 on a plan can reuse: min(KV of its reused layers, E at its start).

    Args:
        store: Where to look.
        keys: The prefix's chunks, from `chunk_keys`.
        plan: The plan.
        num_layers: Decoder layers of sender and receiver.
        deadline: Moment to give up at.

    Returns:
        A multiple of the store's chunk. It may have shrunk by the time the objects are read.

    Raises:
        StoreMiss: The backend did not answer: `timeout` or `backend_down`.
        PlanError: The plan reaches past the last layer.
    """
    parts = [
        (ObjectKind.KV, i) for i in reused_layers(num_layers, plan.check(num_layers).group.layers)
    ]
    if plan.transition is not None:
        parts.append((ObjectKind.HIDDEN, plan.transition))
    if not parts:
        return len(keys) * store.chunk_tokens
    names = [ObjectName(key, kind, layer) for key in keys for kind, layer in parts]
    return store.count_leading(names, deadline) // len(parts) * store.chunk_tokens


def _as_miss(cause: Exception, doing: str, names: Sequence[ObjectName]) -> StoreMiss:
    if isinstance(cause, StoreMiss):
        return cause
    what = f"{doing} {names[0]}" + (f" and {len(names) - 1} more" if len(names) > 1 else "")
    if isinstance(cause, TimeoutError):
        return StoreMiss(MissReason.TIMEOUT, f"{what}: {cause}")
    return StoreMiss(MissReason.BACKEND_DOWN, f"{what}: {type(cause).__name__}: {cause}")
