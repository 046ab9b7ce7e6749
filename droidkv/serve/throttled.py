"""A store behind a link of a given bandwidth, to measure what a slow network would do."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack

from torch import Tensor

from droidkv.errors import ServeError
from droidkv.serve.objects import ObjectName
from droidkv.serve.store import Store


class TokenBucket:
    """Lets so many bytes per second through, whoever asks; a quiet link saves up a burst.

    Args:
        bytes_per_second: The bandwidth.
        burst_bytes: Most bytes that pass at once after a pause.

    Raises:
        ServeError: The bandwidth is not positive, or the burst negative.
    """

    def __init__(self, bytes_per_second: float, burst_bytes: float = 0.0) -> None:
        if not bytes_per_second > 0 or not burst_bytes >= 0:
            raise ServeError(
                f"expected a bandwidth > 0 and a burst >= 0, got {bytes_per_second} and "
                f"{burst_bytes}"
            )
        self._bytes_per_second = bytes_per_second
        self._burst_seconds = burst_bytes / bytes_per_second
        self._free_at = 0.0
        self._lock = threading.Lock()

    def reserve(self, num_bytes: int, now: float) -> float:
        """Take the next place on the link.

        Args:
            num_bytes: How much is to pass.
            now: The moment, on any clock.

        Returns:
            The moment on the same clock when all of it has passed.
        """
        with self._lock:
            start = max(self._free_at, now - self._burst_seconds)
            self._free_at = start + num_bytes / self._bytes_per_second
            return max(self._free_at, now)


class ThrottledStore(Store):
    """Another store, whose reads take the time that a link would; writing and looking up do not.

    Args:
        open_it: Opens where the objects are, at the first use: importing LMCache while vLLM builds
            its configuration breaks vLLM's in-process engine.
        chunk_tokens: Tokens in one chunk.
    """

    def __init__(self, open_it: Callable[[], Store], chunk_tokens: int) -> None:
        super().__init__(chunk_tokens)
        self._open_it = open_it
        self._opened: Store | None = None
        self._opening = threading.Lock()
        self._bucket: TokenBucket | None = None

    def limit(self, bytes_per_second: float | None) -> None:
        """From now on this bandwidth; None = as fast as the store is."""
        self._bucket = None if bytes_per_second is None else TokenBucket(bytes_per_second)

    @property
    def _store(self) -> Store:
        with self._opening:
            if self._opened is None:
                self._opened = self._open_it()
            return self._opened

    def flush(self, deadline: float) -> bool:
        return self._store.flush(deadline)

    def close(self) -> None:
        if self._opened is not None:
            self._opened.close()

    def _write(self, name: ObjectName, buffer: Tensor) -> Future[None] | None:
        return self._store._write(name, buffer)

    def _count_leading(self, names: Sequence[ObjectName], deadline: float) -> int:
        return self._store._count_leading(names, deadline)

    def _read(
        self, names: Sequence[ObjectName], deadline: float, lent: ExitStack
    ) -> list[Tensor | None]:
        began, bucket = time.monotonic(), self._bucket
        found = self._store._read(names, deadline, lent)
        if bucket is not None:
            num_bytes = sum(buffer.numel() for buffer in found if buffer is not None)
            done_at = bucket.reserve(num_bytes, began)
            time.sleep(max(min(done_at, deadline) - time.monotonic(), 0.0))
            if done_at > deadline:
                raise TimeoutError("the link was too slow for the deadline")
        return found

    def _forget(self, name: ObjectName) -> None:
        self._store._forget(name)
