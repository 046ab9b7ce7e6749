from __future__ import annotations

import concurrent.futures
import subprocess
import sys
import threading
import time

import pytest

from droidkv.serve import bounded
from droidkv.serve.bounded import BoundedCalls
from droidkv.serve.store import deadline_in


def fail() -> None:
    raise ZeroDivisionError("on purpose")


def time_out() -> None:
    raise TimeoutError("its own")


def test_a_call_returns_or_raises_what_the_function_does() -> None:
    calls = BoundedCalls(2, "test")
    assert calls.call(lambda: 7, deadline_in(10)) == 7
    with pytest.raises(ZeroDivisionError, match="on purpose"):
        calls.call(fail, deadline_in(10))
    with pytest.raises(TimeoutError, match="its own"):
        calls.call(time_out, deadline_in(10))
    calls.stop(deadline_in(10))


def test_what_comes_as_the_deadline_passes_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    class JustLate(concurrent.futures.Future[object]):
        def result(self, timeout: float | None = None) -> object:
            found = super().result()
            if timeout is not None:
                raise TimeoutError
            return found

    monkeypatch.setattr(bounded, "Future", JustLate)
    calls = BoundedCalls(1, "test")
    assert calls.call(lambda: 7, deadline_in(0.01)) == 7
    with pytest.raises(TimeoutError, match="its own"):
        calls.call(time_out, deadline_in(0.01))
    calls.stop(deadline_in(10))


def test_a_call_that_does_not_return_ends_at_its_deadline() -> None:
    calls, release = BoundedCalls(2, "test"), threading.Event()
    for _ in range(3):  # two threads are stuck, the third call finds none
        start = time.monotonic()
        with pytest.raises(TimeoutError, match="deadline"):
            calls.call(lambda: release.wait(60), deadline_in(0.05))
        assert time.monotonic() - start < 5
    release.set()
    assert calls.call(lambda: 7, deadline_in(10)) == 7
    calls.stop(deadline_in(10))


def test_each_thread_begins_once_before_its_calls() -> None:
    began: list[str] = []
    calls = BoundedCalls(2, "test", lambda: began.append(threading.current_thread().name))
    for _ in range(3):
        name = calls.call(lambda: threading.current_thread().name, deadline_in(10))
        assert name in began
    assert len(began) == len(set(began)) <= 2
    calls.stop(deadline_in(10))


def test_what_comes_too_late_is_given_to_whoever_gives_it_back() -> None:
    calls, release = BoundedCalls(1, "test"), threading.Event()
    late: list[str] = []

    def answer() -> str:
        release.wait(60)
        return "held"

    with pytest.raises(TimeoutError):
        calls.call(answer, deadline_in(0.05), late.append)
    assert late == []
    release.set()
    assert calls.call(lambda: "in time", deadline_in(10), late.append) == "in time"
    calls.stop(deadline_in(10))
    assert late == ["held"]


def test_idle_threads_are_used_again() -> None:
    calls = BoundedCalls(8, "reused")
    for _ in range(20):
        calls.call(lambda: None, deadline_in(10))
        time.sleep(0.001)
    names = [thread.name for thread in threading.enumerate() if thread.name.startswith("reused")]
    assert 1 <= len(names) <= 4
    calls.stop(deadline_in(10))


def test_many_callers_get_their_own_results() -> None:
    calls = BoundedCalls(3, "test")
    found: dict[int, int] = {}

    def ask(number: int) -> None:
        found[number] = calls.call(lambda: number * number, deadline_in(30))

    threads = [threading.Thread(target=ask, args=[number]) for number in range(40)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {number: number * number for number in range(40)}
    calls.stop(deadline_in(10))


def test_a_stuck_call_does_not_keep_the_process_alive() -> None:
    code = (
        "import time; from droidkv.serve.bounded import BoundedCalls\n"
        "try:\n"
        "    BoundedCalls(1, 'stuck').call(lambda: time.sleep(600), time.monotonic() + 0.05)\n"
        "except TimeoutError: print('gave up')"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert result.stdout.strip() == "gave up"


def test_stopping_waits_for_what_runs_but_not_for_what_is_stuck() -> None:
    calls, release, done = BoundedCalls(2, "stopped"), threading.Event(), threading.Event()

    def finish_late() -> bool:
        time.sleep(0.2)
        done.set()
        return True

    for function in (lambda: release.wait(60), finish_late):
        with pytest.raises(TimeoutError):
            calls.call(function, deadline_in(0.02))
    start = time.monotonic()
    calls.stop(deadline_in(1.0))
    assert done.is_set()
    assert time.monotonic() - start < 10
    release.set()
