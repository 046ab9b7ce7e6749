"""Where a measurement comes from: packages, commit, machine, time."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path

from droidkv.records import Provenance

_PACKAGES = ("droidkv", "torch", "transformers", "peft", "numpy", "optuna")


def provenance(
    command: str, seed: int, device: str, dtype: str, seconds: float, machine: str | None = None
) -> Provenance:
    """The provenance of something just measured on this machine.

    Args:
        command: What reproduces it.
        seed: Its seed.
        device: Torch device it ran on.
        dtype: Of weights and caches.
        seconds: How long it took.
        machine: Description of the machine; None = of this one.
    """
    return Provenance(
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        command=command,
        seed=seed,
        git_commit=git_commit(),
        packages=package_versions(),
        machine=machine or machine_description(),
        device=device,
        dtype=dtype,
        seconds=seconds,
    )


def package_versions() -> dict[str, str]:
    """Versions of the installed packages that numbers depend on."""
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def git_commit() -> str | None:
    """Commit of the checkout droidkv runs from, with `+changes` if it has any; None if none."""
    folder = Path(__file__).resolve().parent
    try:
        commit, status = (
            subprocess.run(
                ["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=True
            ).stdout.strip()
            for arguments in (["rev-parse", "HEAD"], ["status", "--porcelain", "--", "."])
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return f"{commit}+changes" if status else commit


def machine_description() -> str:
    """Processor, its number of cores, and the operating system."""
    return f"{_processor()}, {os.cpu_count()} cores, {platform.system()} {platform.machine()}"


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or "unknown processor"
