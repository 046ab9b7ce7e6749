"""Servers that tests start on a free port and stop again."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass
class Server:
    """A running server; `url` is what a store opens."""

    url: str
    port: int
    process: subprocess.Popen[bytes]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def serving(command: Sequence[str], port: int, scheme: str, log: Path) -> Iterator[Server]:
    with open(log, "wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        wait_for_port(port, process, log)
        yield Server(f"{scheme}://127.0.0.1:{port}", port, process)
    finally:
        process.kill()
        process.wait()


def wait_for_port(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    give_up_at = time.monotonic() + 300
    while time.monotonic() < give_up_at and process.poll() is None:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise AssertionError(f"the server did not start:\n{log.read_text(errors='replace')[-2000:]}")


@contextmanager
def redis_server(folder: Path, port: int | None = None) -> Iterator[Server]:
    binary = shutil.which("redis-server")
    if binary is None:
        pytest.skip("no redis-server on this machine (apt-get install redis-server)")
    port = port or free_port()
    options = ["--port", str(port), "--save", "", "--appendonly", "no", "--dir", str(folder)]
    with serving([binary, *options], port, "redis", folder / "redis.log") as server:
        yield server


@contextmanager
def lm_server(folder: Path) -> Iterator[Server]:
    port = free_port()
    command = [sys.executable, "-m", "lmcache.v1.server", "127.0.0.1", str(port)]
    with serving(command, port, "lm", folder / "lm.log") as server:
        yield server
