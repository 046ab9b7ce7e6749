"""Exit codes of every command."""

from __future__ import annotations

OK = 0
CHECK_FAILED = 1  # a check failed, or no plan meets the bounds
BAD_INPUT = 2  # wrong usage or bad input; one message says what to do
BUG = 3  # an error droidkv did not foresee; its traceback is shown
HUNG_UP = 129  # SIGHUP
INTERRUPTED = 130  # Ctrl-C; nothing that was finished is lost
TERMINATED = 143  # SIGTERM

EPILOG = (
    "Exit codes: 0 ok; 1 a check failed, or no plan meets the bounds; 2 wrong usage or bad input; "
    "3 a bug in droidkv; 130 interrupted; 129 or 143 ended by SIGHUP or SIGTERM."
)
