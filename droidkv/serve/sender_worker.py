"""A sender's half beside the model: whole chunks go to the store. No engine here."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Literal, get_args

import torch
from torch import Tensor

from droidkv.serve.breaker import Breaker
from droidkv.serve.connector_plan import SaveJob, slots_of
from droidkv.serve.objects import ObjectKind, ObjectName
from droidkv.serve.paged_model import PagedModel
from droidkv.serve.store import ChunkKey, Store, chunk_keys, deadline_in
from droidkv.serve.threads import background_pool

# What came of a chunk. `present`: the store had it, from an earlier request or from before this
# process began. `resting`: the store is not asked, having failed several times in a row.
# `mixed_adapters`: the engine has run requests without a LoRA through one.
ChunkEnd = Literal[
    "stored",
    "present",
    "failed",
    "resting",
    "without_hidden",
    "weights_changed",
    "mixed_adapters",
]
CHUNK_ENDS: tuple[ChunkEnd, ...] = get_args(ChunkEnd)
_LOOKUP_SECONDS = 2.0
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Copied:
    """One chunk on its way to the store.

    Attributes:
        key: Its name.
        kv: What arranges the copied KV of each layer.
        hidden: E by layer.
        overwrite: Store it even if it is there.
    """

    key: ChunkKey
    kv: Sequence[Callable[[], tuple[Tensor, Tensor]]]
    hidden: Mapping[int, Tensor]
    overwrite: bool


class _Writes:
    """Hears of one chunk's objects, some of which are written long after they were handed over.

    Args:
        num_objects: How many they are.
        ended: Called once: whether all are written, as soon as that is known.
    """

    def __init__(self, num_objects: int, ended: Callable[[bool], None]) -> None:
        self._left = num_objects
        self._ended = ended
        self._lock = threading.Lock()

    def is_over(self) -> bool:
        return self._left == 0

    def object_ended(self, is_written: bool) -> None:
        with self._lock:
            if self._left == 0:
                return  # one before was lost
            self._left = self._left - 1 if is_written else 0
            if self._left > 0:
                return
        self._ended(is_written)


class SenderWorker:
    """Stores whole chunks from the engine's paged cache, in the background.

    Args:
        model: The engine's model.
        store: Where the caches go.
        namespace: This sender's.
        hidden_layers: Layers whose E is stored.
        most_pending: Chunks that may wait for the store; beyond that the engine waits.
        wait_seconds: Longest time it waits in one step; chunks that find no room are not stored.

    Attributes:
        puts: Keeps chunks from a store that does not take them.
    """

    def __init__(
        self,
        model: PagedModel,
        store: Store,
        namespace: str,
        hidden_layers: Sequence[int],
        most_pending: int = 32,
        wait_seconds: float = 1.0,
    ) -> None:
        self._wait_seconds = wait_seconds
        self._model = model
        self._store = store
        self._namespace = namespace
        self._hidden_layers = list(hidden_layers)
        self._pool = background_pool(1, "save")
        self._room = threading.Semaphore(most_pending)
        self.puts = Breaker()
        self._counting = threading.Lock()
        self._counts: Counter[ChunkEnd] = Counter()
        self._told: Counter[ChunkEnd] = Counter()
        self._has_mixed_adapters = False

    def save(self, jobs: Sequence[SaveJob]) -> None:
        """After a step's forward pass: copy what it completed, and hand it to the store."""
        self._watch_adapters()
        deadline = deadline_in(self._wait_seconds)
        copied: list[_Copied] = []
        refused: ChunkEnd | None = None
        if self._has_mixed_adapters:
            refused = "mixed_adapters"
        elif jobs and self._model.weights_changed():
            refused = "weights_changed"
        for job in jobs:
            chunk = self._store.chunk_tokens
            keys = chunk_keys(self._namespace, job.token_ids, chunk)
            for key in keys[job.first_chunk :]:
                if refused is not None:
                    self._count(refused)
                    continue
                start = key.index * chunk
                slots = torch.tensor(
                    slots_of(job.block_ids, self._model.block_tokens, start, start + chunk)
                )
                self._copy_chunk(key, slots, job.overwrite, deadline, copied)
        self._hand_over(copied)

    def _watch_adapters(self) -> None:
        """Once a step went wrong, later ones may find its blocks in the engine's prefix cache."""
        if not self._has_mixed_adapters and self._model.mixes_adapters():
            self._has_mixed_adapters = True
            _LOG.warning(
                "nothing more is stored: with all places for adapters taken, vLLM computes the "
                "base's own KV wrong on a CPU; start with a larger --max-loras"
            )

    def _copy_chunk(
        self,
        key: ChunkKey,
        slots: Tensor,
        overwrite: bool,
        deadline: float,
        copied: list[_Copied],
    ) -> None:
        hidden: dict[int, Tensor] = {}
        for layer in self._hidden_layers:
            captured = self._model.read_hidden(layer, slots)
            if captured is None:  # never KV without its E: a receiver would wait for it in vain
                self._count("without_hidden")
                return
            hidden[layer] = captured
        if not self.puts.allows():
            self._count("resting")
            return
        if not self._room.acquire(blocking=False):
            self._hand_over(copied)  # there is room once they have left
            if not self._room.acquire(timeout=max(0.0, deadline - time.monotonic())):
                self._ended("failed")
                return
        kv = [self._model.copy_kv(layer, slots) for layer in range(self._model.num_layers)]
        copied.append(_Copied(key, kv, hidden, overwrite))

    def _hand_over(self, copied: list[_Copied]) -> None:
        """Start to store what was copied: last in a step, for storing slows down the copying."""
        for each in copied:
            writes = _Writes(len(each.kv) + len(each.hidden), self._written)
            put = self._pool.submit(self._put, each, writes)
            put.add_done_callback(partial(self._leave, writes))
        copied.clear()

    def _put(self, chunk: _Copied, writes: _Writes) -> None:
        if not chunk.overwrite and self._is_present(chunk):
            self._ended("present")
            return
        # E first: what is looked up last, a receiver finds only when all is there. Nothing behind
        # a failure: no plan could use it, and a store that is down takes its time to say so.
        for layer, each in chunk.hidden.items():
            if not self._store.put_hidden(chunk.key, layer, each, writes.object_ended):
                return
        for layer, arrange in enumerate(chunk.kv):
            if writes.is_over() or not self._store.put_kv(
                chunk.key, layer, *arrange(), on_end=writes.object_ended
            ):
                return

    def _is_present(self, chunk: _Copied) -> bool:
        """Whether a receiver would find all of a chunk; what is put last is looked for first."""
        names = [
            *(ObjectName(chunk.key, ObjectKind.HIDDEN, layer) for layer in chunk.hidden),
            *(ObjectName(chunk.key, ObjectKind.KV, layer) for layer in range(len(chunk.kv))),
        ]
        found = self._store.count_for_others(names[::-1], deadline_in(_LOOKUP_SECONDS))
        return found == len(names)

    def _leave(self, writes: _Writes, put: Future[None]) -> None:
        self._room.release()
        if put.cancelled() or put.exception() is not None:
            writes.object_ended(False)

    def _written(self, is_written: bool) -> None:
        self._ended("stored" if is_written else "failed")

    def _ended(self, end: ChunkEnd) -> None:
        if end == "failed":
            self.puts.failed()
        elif end == "stored":  # what is present says nothing of whether the store still takes any
            self.puts.succeeded()
        self._count(end)

    def _count(self, end: ChunkEnd) -> None:
        with self._counting:
            self._counts[end] += 1

    def counts(self) -> dict[ChunkEnd, int]:
        """Chunks so far, by what came of them."""
        with self._counting:
            return {end: self._counts[end] for end in CHUNK_ENDS}

    def new_counts(self) -> dict[ChunkEnd, int]:
        """Chunks since this was last asked, by what came of them."""
        counts = self.counts()
        new = {end: count - self._told[end] for end, count in counts.items()}
        self._told = Counter(counts)
        return new

    def flush(self, seconds: float) -> bool:
        """Wait until all that was handed over can be read by others; False if it takes longer."""
        deadline = deadline_in(seconds)
        try:
            self._pool.submit(lambda: None).result(timeout=seconds)
        except (TimeoutError, RuntimeError):
            return False
        return self._store.flush(deadline)

    def close(self, seconds: float = 5.0) -> None:
        """Finish what was handed over if that takes no longer than this, then let go."""
        self.flush(seconds)
        self._pool.shutdown(wait=False, cancel_futures=True)
