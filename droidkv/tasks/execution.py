"""Run code that a model wrote, against its tests, in a process of its own.

UNSAFE: the process has the caller's user, files and network. Limits of time and memory stop
accidents, not attacks. Run it in a container or machine that has nothing to lose.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import tempfile

from droidkv.errors import TaskError

_MAX_OUTPUT_BYTES = 1 << 20

# The limits are set in the child itself: a hook between fork and exec is unsafe beside threads.
# The code never sees the mark, so that an early exit with status 0 does not pass.
_RUNNER = """
import resource, sys
seconds, memory, output = map(int, sys.argv[1:4])
for name, value in (
    (resource.RLIMIT_CPU, seconds),
    (resource.RLIMIT_AS, memory),
    (resource.RLIMIT_FSIZE, output),
    (resource.RLIMIT_CORE, 0),
):
    hard = resource.getrlimit(name)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    try:
        resource.setrlimit(name, (value, value))
    except (ValueError, OSError):
        pass  # some systems know a limit but cannot set it
mark, program = sys.stdin.readline().strip(), sys.stdin.read()
sys.stdin.close()
exec(compile(program, "<answer>", "exec"), {"__name__": "__main__"})
print(flush=True)
print(mark, flush=True)
"""


def passes(program: str, timeout_seconds: float, max_memory_bytes: int) -> bool:
    """Whether a program runs to its end without an error, within its limits.

    UNSAFE: see the module.

    Args:
        program: Python source; its last statements are the tests.
        timeout_seconds: Wall-clock limit; the CPU limit is the same, rounded up.
        max_memory_bytes: Limit of the process's address space.

    Raises:
        TaskError: If the platform cannot limit a process's resources.
    """
    if os.name != "posix":
        raise TaskError(
            f"Running a model's code needs the resource limits of Unix, but this is {os.name!r}; "
            "switch execution off."
        )
    mark = secrets.token_hex(16)
    limits = [str(int(timeout_seconds) + 1), str(max_memory_bytes), str(_MAX_OUTPUT_BYTES)]
    with tempfile.TemporaryDirectory(prefix="droidkv-run-") as folder:
        with tempfile.TemporaryFile(dir=folder) as output:
            process = subprocess.Popen(
                [sys.executable, "-I", "-c", _RUNNER, *limits],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.DEVNULL,
                cwd=folder,
                env={"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )
            try:
                process.communicate(f"{mark}\n{program}".encode(), timeout=timeout_seconds)
            except subprocess.TimeoutExpired:
                return False
            finally:
                _kill_group(process)
            output.seek(0)
            lines = output.read().splitlines()
    return process.returncode == 0 and lines[-1:] == [mark.encode()]


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """End the process and what it started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass  # nothing of the group is left
    process.wait()
