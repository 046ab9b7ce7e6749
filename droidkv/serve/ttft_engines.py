"""Engines of vLLM in processes of their own, to be compared: with the connector and without."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

from droidkv.errors import ServeError
from droidkv.pair import Pair
from droidkv.servable import servable_folder
from droidkv.serve.launch import ROLE_VARIABLES, V1_RUNNER, transfer_config
from droidkv.serve.processes import IN_PROCESS, end_of
from droidkv.serve.settings import ServeSettings

_ENVIRONMENT = {**IN_PROCESS, **ROLE_VARIABLES, **V1_RUNNER}


class EngineProcess:
    """A `droidkv.serve.vllm_timed` of ours.

    Args:
        name: Of its log.
        setup: What it is to be.
        folder: For its log.
    """

    def __init__(self, name: str, setup: Mapping[str, Any], folder: Path) -> None:
        self.name = name
        self._log = folder / f"{name}.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "droidkv.serve.vllm_timed"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**_threads(), **os.environ, **_ENVIRONMENT},
                text=True,
            )
        try:
            self._send(setup)
            self.num_threads: int = self.read()["threads"]
        except BaseException:
            self.stop()
            raise

    def read(self) -> dict[str, Any]:
        """Its next answer.

        Raises:
            ServeError: It ended; with the end of its log.
        """
        line = _pipe(self._process.stdout).readline()
        if not line:
            raise ServeError(
                f"expected the engine {self.name!r} to answer, but it ended; {end_of(self._log)}"
            )
        answer: dict[str, Any] = json.loads(line)
        return answer

    def generate(
        self,
        prompt: Sequence[int],
        salt: str,
        ask: Mapping[str, Any] | None = None,
        bandwidth: float | None = None,
    ) -> dict[str, Any]:
        """One token behind a prompt, timed; see `droidkv.serve.vllm_timed.TimedEngine.answer`."""
        command = {"do": "generate", "prompt": list(prompt), "salt": salt, "ask": ask}
        self._send({**command, "bandwidth": bandwidth})
        return self.read()

    def flush(self) -> None:
        """Wait until all that it stored can be read.

        Raises:
            ServeError: That took too long; or something was there before, so that storing it was
                not measured.
        """
        self._send({"do": "flush"})
        answer = self.read()
        if answer["present"]:
            raise ServeError(
                f"expected a store without what {self.name!r} reads, but {answer['present']} "
                "chunks were there, of an earlier run maybe; empty the store, for instance with "
                "`droidkv serve purge`, or name another"
            )
        if not answer["flushed"]:
            raise ServeError(
                f"expected the engine {self.name!r} to have stored what it read, but its store "
                f"still writes; {end_of(self._log)}"
            )

    def stop(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            _pipe(pipe).close()

    def _send(self, value: Mapping[str, Any]) -> None:
        try:
            _pipe(self._process.stdin).write(json.dumps(value) + "\n")
            _pipe(self._process.stdin).flush()
        except BrokenPipeError:
            self.read()  # says why


@contextmanager
def timed_engines(
    pair: Pair,
    folder: Path,
    dtype: str,
    store: str,
    chunk_tokens: int,
    max_tokens: int,
    hidden_layers: Sequence[int],
) -> Iterator[dict[str, EngineProcess]]:
    """Receiver and sender, each with the connector and without; started one after the other.

    Args:
        pair: Whose models they serve: `plain` and `receiver` its receiver, `base` and `sender` the
            other one.
        folder: For logs and the receiver's audit file.
        dtype: Of both models.
        store: Where caches lie.
        chunk_tokens: Tokens in one chunk of the store.
        max_tokens: Longest prompt and answer.
        hidden_layers: Layers whose E the sender stores.

    Raises:
        ServeError: An engine did not start, or they compute with different numbers of threads.
    """
    folders = {
        "receiver": servable_folder(pair.receiver, dtype).absolute(),
        "sender": servable_folder(pair.sender, dtype).absolute(),
    }
    audit = folder.absolute() / "audit.jsonl"
    audit.unlink(missing_ok=True)
    roles = {
        "sender": ServeSettings(
            role="sender",
            store=store,
            chunk_tokens=chunk_tokens,
            hidden_layers=tuple(hidden_layers),
        ),
        "receiver": ServeSettings(
            role="receiver",
            store=store,
            chunk_tokens=chunk_tokens,
            sender=str(folders["sender"]),
            allow_unprofiled=True,
            tokens_per_step=1 << 20,
            load_seconds=600.0,
            lookup_seconds=60.0,
            audit=str(audit),
            timeline=True,
        ),
    }
    transfers: dict[str, tuple[str, dict[str, Any] | None]] = {
        "plain": ("receiver", None),
        "receiver": ("receiver", whole_config(roles["receiver"])),
        "base": ("sender", None),
        "sender": ("sender", whole_config(roles["sender"])),
    }
    with ExitStack() as running:
        engines = {}
        for name, (model, transfer) in transfers.items():
            setup = {
                "folder": str(folders[model]),
                "dtype": dtype,
                "max_tokens": max_tokens,
                "transfer": transfer,
            }
            engines[name] = EngineProcess(name, setup, folder)
            running.callback(engines[name].stop)
        if len({engine.num_threads for engine in engines.values()}) > 1:
            counts = {name: engine.num_threads for name, engine in engines.items()}
            raise ServeError(
                f"expected all engines to compute with as many threads, got {counts}; set "
                "OMP_NUM_THREADS"
            )
        yield engines


def _threads() -> dict[str, str]:
    """vLLM may leave a process without a connector at one thread unless told otherwise."""
    return {"OMP_NUM_THREADS": str(len(os.sched_getaffinity(0)))}


def whole_config(settings: ServeSettings) -> dict[str, Any]:
    """With what the engine's process reads itself, whether or not it is as by default."""
    config = transfer_config(settings)
    table = {**config["kv_connector_extra_config"], "chunk_tokens": settings.chunk_tokens}
    return {**config, "kv_connector_extra_config": table}


def _pipe(pipe: IO[str] | None) -> IO[str]:
    assert pipe is not None
    return pipe
