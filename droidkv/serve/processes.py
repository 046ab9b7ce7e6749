"""Serving processes that are started, waited for and stopped."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from droidkv.errors import ServeError
from droidkv.serve.http_client import read_text
from droidkv.serve.launch import Launch

# An engine within a process of ours, on a CPU. In eager mode too vLLM would compile parts of its
# sampler with a C++ compiler.
IN_PROCESS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TORCHDYNAMO_DISABLE": "1",
}
_STOP_SECONDS = 20.0
_POLL_SECONDS = 0.5
_LOG_TAIL = 3000


@dataclass
class ServerProcess:
    """A `vllm serve` of ours.

    Attributes:
        url: Where it answers.
        process: Its first process.
        log: What it writes.
    """

    url: str
    process: subprocess.Popen[bytes]
    log: Path

    def wait_until_ready(self, seconds: float) -> None:
        """Return once it answers.

        Raises:
            ServeError: It ended, or did not answer in time; with the end of its log.
        """
        give_up_at = time.monotonic() + seconds
        while self.process.poll() is None and time.monotonic() < give_up_at:
            try:
                read_text(f"{self.url}/health")
                return
            except ServeError:
                time.sleep(_POLL_SECONDS)
        ended = self.process.poll()
        how = f"did not answer within {seconds:.0f} s" if ended is None else f"ended with {ended}"
        raise ServeError(f"expected the server to start, but it {how}; {end_of(self.log)}")


@contextmanager
def serving(
    launch: Launch, port: int, log: Path, environment: Mapping[str, str] | None = None
) -> Iterator[ServerProcess]:
    """Run a server on this machine; its whole process group is ended afterwards.

    Args:
        launch: What to start, without `--host` and `--port`.
        port: Where it is to answer.
        log: Gets its output.
        environment: Variables besides the launch's.
    """
    command = [*launch.command, "--host", "127.0.0.1", "--port", str(port)]
    variables = {**os.environ, **launch.environment, **(environment or {})}
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=variables, stdout=output, stderr=output, start_new_session=True
        )
    try:
        yield ServerProcess(f"http://127.0.0.1:{port}", process, log)
    finally:
        _stop(process)


def end_of(log: Path) -> str:
    """The last words of a process, for messages."""
    tail = log.read_text(encoding="utf-8", errors="replace")[-_LOG_TAIL:]
    return f"{log} ends with:\n{tail}"


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _stop(process: subprocess.Popen[bytes]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            return
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            continue
    process.wait()
