"""A store that fails at one chosen call, in one chosen way."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, replace

from torch import Tensor

from droidkv.serve.objects import HEADER_BYTES, MissReason, ObjectName, StoreMiss, encode
from droidkv.serve.store import Store

Buffers = list[Tensor | None]


def _flipped(names: Sequence[ObjectName], found: Buffers, position: int) -> Buffers:
    assert found[-1] is not None
    flipped = found[-1].clone()
    flipped[position] ^= 0x10
    return [*found[:-1], flipped]


def _cut(names: Sequence[ObjectName], found: Buffers) -> Buffers:
    assert found[0] is not None
    return [found[0][: HEADER_BYTES + 40], *found[1:]]


def _gone(names: Sequence[ObjectName], found: Buffers) -> Buffers:
    return [*found[:-1], None]


def _others(names: Sequence[ObjectName], found: Buffers) -> Buffers:
    assert found[0] is not None
    theirs = replace(names[0], key=replace(names[0].key, namespace="0f" * 32))
    return [encode(theirs, [found[0][HEADER_BYTES:]]), *found[1:]]


def _fewer(names: Sequence[ObjectName], found: Buffers) -> Buffers:
    return found[:-1]


# What a damaged backend may answer, and the reason that is to be named.
ANSWERS: Mapping[str, tuple[Callable[[Sequence[ObjectName], Buffers], Buffers], MissReason]] = {
    "flipped header": (lambda names, found: _flipped(names, found, 40), MissReason.CORRUPT),
    "flipped tensor": (lambda names, found: _flipped(names, found, -1), MissReason.CORRUPT),
    "cut": (_cut, MissReason.SHORT),
    "gone": (_gone, MissReason.ABSENT),
    "another sender's": (_others, MissReason.WRONG_NAMESPACE),
    "fewer": (_fewer, MissReason.BACKEND_DOWN),
}
# What a call may raise instead of answering.
ERRORS: Mapping[str, tuple[Exception, MissReason]] = {
    "refused": (ConnectionRefusedError("refused"), MissReason.BACKEND_DOWN),
    "bug": (ZeroDivisionError("a bug"), MissReason.BACKEND_DOWN),
    "out of memory": (MemoryError("no room"), MissReason.BACKEND_DOWN),
    "timeout": (TimeoutError("too slow"), MissReason.TIMEOUT),
    "named": (StoreMiss(MissReason.SHORT, "read 3 of 4 bytes"), MissReason.SHORT),
}
SLOW = "slow"
FAULTS = [*ANSWERS, *ERRORS, SLOW]


@dataclass
class FaultyStore(Store):
    """Passes calls on to `inner`; call number `at` (from 0) fails as `fault` says."""

    inner: Store
    fault: str = ""
    at: int = -1

    def __post_init__(self) -> None:
        super().__init__(self.inner.chunk_tokens)
        self.calls: list[str] = []

    def flush(self, deadline: float) -> bool:
        return self.inner.flush(deadline)

    def close(self) -> None:
        self.inner.close()

    def _write(self, name: ObjectName, buffer: Tensor) -> Future[None] | None:
        self._call("write", time.monotonic())
        return self.inner._write(name, buffer)

    def _count_leading(self, names: Sequence[ObjectName], deadline: float) -> int:
        if self._call("count", deadline):
            return len(names)  # it was there a moment ago, says a backend that is wrong
        return self.inner._count_leading(names, deadline)

    def _read(self, names: Sequence[ObjectName], deadline: float, lent: ExitStack) -> Buffers:
        is_faulty = self._call("read", deadline)
        found = self.inner._read(names, deadline, lent)
        return ANSWERS[self.fault][0](names, found) if is_faulty else found

    def _forget(self, name: ObjectName) -> None:
        self.inner._forget(name)

    def _call(self, kind: str, deadline: float) -> bool:
        """Whether this call must answer wrongly."""
        self.calls.append(kind)
        if len(self.calls) - 1 != self.at:
            return False
        if self.fault in ERRORS:
            raise ERRORS[self.fault][0]
        if self.fault == SLOW:
            time.sleep(max(0.0, deadline - time.monotonic()) + 0.01)
            return False
        return True
