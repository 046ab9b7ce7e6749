"""Calls that never outlast a deadline, whatever the code they run does."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from functools import partial
from typing import TypeVar

T = TypeVar("T")


class BoundedCalls:
    """A few daemon threads that run calls; whoever waits for one gives up at his deadline.

    `concurrent.futures` would not do: its threads are joined when the interpreter exits, so one
    stuck call would keep the process alive.

    Args:
        num_threads: Most threads that are started. A call that never returns keeps its thread;
            when all are kept, every further call ends at its deadline.
        name: Of the threads.
        begin: What each does first.
    """

    def __init__(
        self, num_threads: int, name: str, begin: Callable[[], object] = lambda: None
    ) -> None:
        self._num_threads = num_threads
        self._name = name
        self._begin = begin
        self._jobs: queue.SimpleQueue[tuple[Future[object], Callable[[], object]] | None]
        self._jobs = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._num_idle = 0
        self._lock = threading.Lock()

    def call(
        self,
        function: Callable[[], T],
        deadline: float,
        drop: Callable[[T], object] = lambda _: None,
    ) -> T:
        """What `function` returns or raises.

        Args:
            function: What to run.
            deadline: Moment to give up at.
            drop: Given what it returns too late.

        Raises:
            TimeoutError: It did not return by the deadline. It may still be running.
        """
        future: Future[T] = Future()
        with self._lock:
            if self._num_idle == 0 and len(self._threads) < self._num_threads:
                name = f"{self._name}-{len(self._threads) + 1}"
                self._threads.append(threading.Thread(target=self._work, name=name, daemon=True))
                self._threads[-1].start()
            else:
                self._num_idle -= self._num_idle > 0
        self._jobs.put((future, function))  # type: ignore[arg-type]
        try:
            return future.result(max(0.0, deadline - time.monotonic()))
        except TimeoutError:
            if future.cancel() or not future.done():
                future.add_done_callback(partial(_drop_result, drop))
                raise TimeoutError("it did not return by the deadline") from None
            return future.result()  # it came this very moment, or timed out by itself
        finally:
            del future  # an error's traceback holds this frame, and the future the error

    def stop(self, deadline: float) -> None:
        """End the threads, and wait for those that are not stuck.

        A daemon thread that is still in C++ code when the interpreter ends takes it down.
        """
        with self._lock:
            threads = list(self._threads)
        for _ in threads:
            self._jobs.put(None)
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _work(self) -> None:
        self._begin()
        while (job := self._jobs.get()) is not None:
            future, function = job
            if future.set_running_or_notify_cancel():
                with suppress(InvalidStateError):
                    try:
                        future.set_result(function())
                    except BaseException as error:
                        future.set_exception(error)
            del future, function, job
            with self._lock:
                self._num_idle += 1


def _drop_result(drop: Callable[[T], object], future: Future[T]) -> None:
    if not future.cancelled() and future.exception() is None:
        drop(future.result())
