"""One line of progress with the time left: rewritten on a terminal, else repeated now and then."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TextIO

SECONDS_BETWEEN_REWRITES = 0.2
SECONDS_BETWEEN_LINES = 10.0


class Progress:
    """Callable as `progress(stage, done, total)`, from one thread; a detail may come last.

    Args:
        stream: Where the line goes.
        clock: Seconds that only grow.
    """

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._is_terminal = stream.isatty()
        self._stage = ""
        self._started = self._shown = 0.0
        self._done_before = self._told = 0
        self._line_is_open = False

    def __call__(self, stage: str, done: int, total: int, detail: str = "") -> None:
        now = self._clock()
        is_new = stage != self._stage
        if is_new:
            self.close()
            self._stage, self._started, self._done_before = stage, now, done
            self._told = -1
        wait = SECONDS_BETWEEN_REWRITES if self._is_terminal else SECONDS_BETWEEN_LINES
        is_last = done >= total and done != self._told
        if not (is_new or is_last or now - self._shown >= wait):
            return
        self._shown, self._told = now, done
        self._write(self._text(done, total, detail, now - self._started))
        if is_last:
            self.close()

    def close(self) -> None:
        """End the line, so that something else can be written."""
        if self._line_is_open:
            self._stream.write("\n")
            self._stream.flush()
            self._line_is_open = False

    def _text(self, done: int, total: int, detail: str, seconds: float) -> str:
        text = f"{self._stage} {done}/{total}" + (f", {detail}" if detail else "")
        here = done - self._done_before  # a resumed run found some of it done
        if done >= total:
            return f"{text}, {duration(seconds)}"
        if here > 0:
            return f"{text}, about {duration(seconds / here * (total - done))} left"
        return text

    def _write(self, text: str) -> None:
        if self._is_terminal:
            self._stream.write(f"\r\x1b[K{text}")
            self._line_is_open = True
        else:
            self._stream.write(f"{text}\n")
        self._stream.flush()


def duration(seconds: float) -> str:
    """A length of time for people: `3.1 s`, `2 min 5 s`, `1 h 4 min`."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 1:
        return f"{rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"
