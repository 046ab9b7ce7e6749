from __future__ import annotations

import io

import pytest

from droidkv.cli.progress import Progress, duration


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def steps(stream: io.StringIO, seconds: float, total: int, first: int = 0) -> list[str]:
    clock = Clock()
    progress = Progress(stream, clock)
    for done in range(first, total + 1):
        progress("sweep", done, total)
        clock.now += seconds
    return stream.getvalue().replace("\r\x1b[K", "\n").strip().split("\n")


def test_a_terminal_sees_one_line_rewritten_and_then_ended() -> None:
    stream = Terminal()
    lines = steps(stream, 30, 4)
    assert lines[0] == "sweep 0/4"
    assert lines[1] == "sweep 1/4, about 1 min 30 s left"
    assert lines[-1] == "sweep 4/4, 2 min 0 s"
    assert stream.getvalue().count("\n") == 1


def test_a_log_gets_a_line_every_ten_seconds_and_the_last() -> None:
    assert steps(io.StringIO(), 1, 25) == [
        "sweep 0/25",
        "sweep 10/25, about 15 s left",
        "sweep 20/25, about 5.0 s left",
        "sweep 25/25, 25 s",
    ]


def test_what_an_earlier_run_did_does_not_count_for_the_time_left() -> None:
    lines = steps(io.StringIO(), 20, 10, first=8)
    assert lines[1] == "sweep 9/10, about 20 s left"


def test_the_end_of_a_stage_is_told_once() -> None:
    stream = io.StringIO()
    progress = Progress(stream, Clock())
    for _ in range(3):
        progress("map", 1, 1)
    assert stream.getvalue().count("map") == 1


def test_a_detail_may_change_without_losing_the_time_left() -> None:
    stream, clock = Terminal(), Clock()
    progress = Progress(stream, clock)
    for done in range(3):
        progress("step", done, 4, f"loss {9 - done}")
        clock.now += 30
    assert stream.getvalue().endswith("step 2/4, loss 7, about 1 min 0 s left")


def test_a_new_stage_gets_a_line_at_once() -> None:
    stream = io.StringIO()
    progress = Progress(stream, Clock())
    for stage in ("stitch", "sweep", "decode"):
        progress(stage, 0, 9)
    assert stream.getvalue().split() == ["stitch", "0/9", "sweep", "0/9", "decode", "0/9"]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.04, "0.0 s"), (9.94, "9.9 s"), (9.96, "10 s"), (59.6, "1 min 0 s"), (3660, "1 h 1 min")],
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text
