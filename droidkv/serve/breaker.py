"""Not asking a store for a while that has failed several times in a row."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

MOST_FAILURES = 3
REST_SECONDS = 10.0
LONGEST_REST_SECONDS = 320.0


class Breaker:
    """Counts failures in a row; after the last one too many the store rests.

    When the rest is over one call tries it again. If that one succeeds all go on; if it fails the
    next rest is twice as long; if nothing is heard of it another one may try after as long.
    Methods may be called from any thread.

    Args:
        most_failures: Failures in a row after which the store rests.
        rest_seconds: The first rest.
        longest_rest_seconds: No rest is longer.
        clock: Tells the time in seconds.
    """

    def __init__(
        self,
        most_failures: int = MOST_FAILURES,
        rest_seconds: float = REST_SECONDS,
        longest_rest_seconds: float = LONGEST_REST_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._most_failures = most_failures
        self._first_rest = rest_seconds
        self._longest_rest = longest_rest_seconds
        self._clock = clock
        self._failures = 0
        self._rest = rest_seconds
        self._asks_again_at: float | None = None
        self._is_trying = False
        self._new_rests = 0
        self._lock = threading.Lock()

    def allows(self) -> bool:
        """Whether to ask the store now; whoever is told so after a rest is the one that tries."""
        with self._lock:
            if not self._is_due():
                return False
            if self._asks_again_at is not None:
                self._is_trying = True
                self._asks_again_at = self._clock() + self._rest
            return True

    def is_resting(self) -> bool:
        """Whether `allows` would say no; changes nothing."""
        with self._lock:
            return not self._is_due()

    def succeeded(self) -> None:
        """The store did what it was asked for."""
        with self._lock:
            self._failures = 0
            self._rest = self._first_rest
            self._asks_again_at = None
            self._is_trying = False

    def failed(self) -> None:
        """The store did not answer, or said that it cannot."""
        with self._lock:
            if self._asks_again_at is None:
                self._failures += 1
                if self._failures < self._most_failures:
                    return
            elif self._is_trying:
                self._rest = min(2 * self._rest, self._longest_rest)
            else:
                return  # asked before the rest began
            self._is_trying = False
            self._asks_again_at = self._clock() + self._rest
            self._new_rests += 1

    def new_rests(self) -> int:
        """How many rests began since this was last asked."""
        with self._lock:
            count, self._new_rests = self._new_rests, 0
            return count

    def _is_due(self) -> bool:
        return self._asks_again_at is None or self._clock() >= self._asks_again_at
