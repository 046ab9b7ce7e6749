"""Sender and receiver as the command starts them, over HTTP, while what is between them comes and
goes."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from command_line import SMALL, run, run_json
from serve.engines import ENVIRONMENT, token_ids
from serve.servers import free_port, redis_server

from droidkv.serve.audit import read_audit
from droidkv.serve.connector_plan import Fallback
from droidkv.serve.http_client import complete, read_text
from droidkv.serve.launch import Launch
from droidkv.serve.processes import ServerProcess, serving

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("lmcache") is None, reason="lmcache is not installed"),
]

CHUNK, NEW, SECONDS = 32, 8, 300.0
COMMAND = (sys.executable, "-c", "from droidkv.cli.main import main; main()")
FLAGS = (
    *("--enforce-eager", "--max-model-len", "512", "--block-size", "32"),
    *("--served-model-name", "tiny"),  # the sender would be called by its model only
)
FIRST, *OTHERS = [token_ids(4 * CHUNK + 5, seed=70 + index) for index in range(40)]


@contextmanager
def served(folder: Path, role: str, *options: str) -> Iterator[ServerProcess]:
    """`droidkv serve ROLE tiny`, ready."""
    command = (*COMMAND, "serve", role, "tiny", *options, "--", *FLAGS)
    environment = {**ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    with serving(
        Launch(command, {}, {}), free_port(), folder / f"{role}.log", environment
    ) as server:
        server.wait_until_ready(SECONDS)
        yield server


class Client:
    """Asks a receiver past its own prefix cache, and reads its audit file."""

    def __init__(self, url: str, audit: Path) -> None:
        self._url, self._audit = url, audit
        self._number = 0

    def ask(self, prompt: list[int], **params: Any) -> tuple[str, Fallback | None]:
        """The answer, and why nothing was reused."""
        self._number += 1
        salt = f"salt-{self._number}"
        answer = complete(self._url, "tiny", prompt, NEW, {"droidkv": params}, salt)
        give_up_at = time.monotonic() + SECONDS
        while time.monotonic() < give_up_at:
            for record in read_audit(self._audit) if self._audit.exists() else []:
                if record.request_id.startswith(answer.request_id):
                    return answer.text, record.reason
            time.sleep(0.05)
        raise AssertionError(f"no audit line of {answer.request_id}")

    def ask_until_reused(self, prompt: list[int]) -> str:
        give_up_at = time.monotonic() + SECONDS
        while True:
            text, reason = self.ask(prompt)
            covered = read_audit(self._audit)[-1].advertised_tokens
            if reason is None and covered == len(prompt) // CHUNK * CHUNK:
                return text  # not before the last chunk is stored: fewer give another answer
            assert time.monotonic() < give_up_at, reason
            time.sleep(1.0)


def chunks(server: ServerProcess) -> Counter[str]:
    """What came of a sender's chunks, and of its store."""
    found: Counter[str] = Counter()
    for line in read_text(f"{server.url}/metrics").splitlines():
        for name in ("droidkv_saved_chunks_total", "droidkv_store_rests_total"):
            if line.startswith(name):
                label, value = line.rsplit('"', 2)[-2:]
                found[label] += int(float(value.rpartition(" ")[2]))
    return found


def test_servers_outlive_their_store_and_one_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DROIDKV_CACHE", str(tmp_path / "cache"))
    profile, audit = tmp_path / "tiny.json", tmp_path / "audit.jsonl"
    run("profile", "tiny", *SMALL, "-o", profile)
    others = iter(OTHERS)
    port = free_port()
    store = f"redis://127.0.0.1:{port}?cpu_gib=0.1&keep_local=0"
    shared = ("--plan", "[1,3)", "--store", store, "--chunk-tokens", str(CHUNK))
    reuses = ("--profile", str(profile), "--audit", str(audit), "--lookup-deadline", "20s")
    # Both start while the store is down, and say so.
    with (
        served(tmp_path, "sender", *shared) as sender,
        served(tmp_path, "receiver", *shared, *reuses) as receiver,
    ):
        for role in ("sender", "receiver"):
            assert "until then nothing is stored" in (tmp_path / f"{role}.log").read_text()
        client = Client(receiver.url, audit)
        own = client.ask(FIRST, reuse=False)[0]
        assert client.ask(FIRST) == (own, Fallback.LOOKUP_BACKEND_DOWN)
        with redis_server(tmp_path, port):
            complete(sender.url, "tiny", FIRST, 1)
            mixed = client.ask_until_reused(FIRST)
            assert mixed != own
        while not chunks(sender)["save"]:  # it is gone again
            complete(sender.url, "tiny", next(others), 1)
        while not chunks(sender)["resting"]:
            complete(sender.url, "tiny", next(others), 1)
        assert client.ask(FIRST)[0] == own
        before = chunks(sender)["stored"]
        with redis_server(tmp_path, port):
            give_up_at = time.monotonic() + SECONDS
            while chunks(sender)["stored"] == before and time.monotonic() < give_up_at:
                time.sleep(1.0)
                complete(sender.url, "tiny", FIRST, 1, cache_salt=f"salt-{time.monotonic()}")
            assert client.ask_until_reused(FIRST) == mixed
            sender.process.kill()
            assert client.ask(FIRST) == (mixed, None)
            assert run_json("serve", "purge", "tiny", "--store", store)["removed"] > 0
            assert client.ask(FIRST) == (own, Fallback.NOT_COVERED)
    reasons = Counter(str(record.reason) for record in read_audit(audit))
    found = {each["name"]: each["num_requests"] for each in run_json("stats", audit)["outcomes"]}
    assert found.pop("reused") == reasons.pop("None")
    assert found == reasons
