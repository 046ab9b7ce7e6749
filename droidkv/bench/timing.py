"""Timing that can be believed: devices are waited for, CPU time is kept, memory is sampled."""

from __future__ import annotations

import math
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import ParamSpec, TypeVar

import psutil
import torch

from droidkv.models import DecoderModel
from droidkv.provenance import provenance
from droidkv.records import Provenance

T = TypeVar("T")
P = ParamSpec("P")
_SAMPLE_SECONDS = 0.01


@dataclass(frozen=True)
class Elapsed:
    """What something took.

    Attributes:
        seconds: By the wall clock.
        cpu_seconds: Processor time of this process, all threads; other processes do not count,
            waiting for a device does not either.
    """

    seconds: float
    cpu_seconds: float


def timed(
    device: torch.device, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs
) -> tuple[T, Elapsed]:
    """Call, and say how long it took until the device had finished."""
    synchronize(device)
    start, cpu_start = time.perf_counter(), time.process_time()
    result = call(*args, **kwargs)
    synchronize(device)
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
    return result, Elapsed(seconds, cpu_seconds)


def synchronize(device: torch.device) -> None:
    """Wait for what was handed to an accelerator."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def total(runs: Iterable[Elapsed]) -> Elapsed:
    """Sums of wall and CPU time."""
    listed = list(runs)
    return Elapsed(sum(run.seconds for run in listed), sum(run.cpu_seconds for run in listed))


def median(runs: Sequence[Elapsed]) -> Elapsed:
    """Medians of wall and CPU time, each by itself."""
    return Elapsed(
        statistics.median(run.seconds for run in runs),
        statistics.median(run.cpu_seconds for run in runs),
    )


class PeakRss:
    """Samples this process's resident memory while a block runs.

    Attributes:
        before_bytes: When the block began.
        peak_bytes: The largest sample, `before_bytes` included.
    """

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.before_bytes = self.peak_bytes = 0

    def __enter__(self) -> PeakRss:
        self.before_bytes = self.peak_bytes = self._process.memory_info().rss
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(_SAMPLE_SECONDS):
            self.peak_bytes = max(self.peak_bytes, self._process.memory_info().rss)


def surroundings(model: DecoderModel, seed: int, command: str, seconds: float) -> dict[str, object]:
    """Where and by what a benchmark was measured, and how busy the machine was at its end."""
    made = provenance(command, seed, str(model.device), dtype_name(model), round(seconds, 1))
    return {
        **run_table(made),
        "device": device_name(model.device),
        "torch_threads": torch.get_num_threads(),
        "model": {
            "type": model.config.model_type,
            "num_layers": model.num_layers,
            "hidden_size": model.shape.hidden_size,
            "vocab_size": model.shape.vocab_size,
        },
    }


def run_table(made: Provenance) -> dict[str, object]:
    """By what and where a benchmark was measured, and how busy the machine is now."""
    return {
        "command": made.command,
        "created": made.created,
        "git_commit": made.git_commit,
        "seed": made.seed,
        "machine": made.machine,
        "dtype": made.dtype,
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "packages": dict(made.packages),
        "seconds": made.seconds,
    }


def device_name(device: torch.device) -> str:
    """A device for people: `cpu`, or the accelerator's model."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)


def dtype_name(model: DecoderModel) -> str:
    """A dtype without its library, such as `float32`."""
    return str(model.dtype).removeprefix("torch.")


def random_tokens(model: DecoderModel, num_tokens: int, seed: int) -> list[int]:
    """Token ids for timing, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(model.shape.vocab_size, (num_tokens,), generator=generator).tolist()


def rounded(seconds: float) -> float:
    """A time with four significant digits."""
    return 0.0 if seconds == 0 else round(seconds, 3 - math.floor(math.log10(abs(seconds))))
