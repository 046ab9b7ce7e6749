"""A sender's and a receiver's engine in processes of their own, LMCache's backends between them.

What the processes vary beside the backend: torch.compile, a worker process of vLLM's, asynchronous
scheduling, the way of loading.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from serve.engine_process import answers_of, run_engine
from serve.engines import (
    CHUNK,
    LONG,
    PLANS,
    PROMPTS,
    STITCHED,
    Answer,
    Models,
    assert_all_same,
    assert_stored,
    make_models,
    token_ids,
)
from serve.servers import lm_server, redis_server

from droidkv.serve.keys import chunk_hashes, namespace_digest
from droidkv.serve.lmcache_settings import LMCacheSettings

pytestmark = [
    pytest.mark.lmcache,
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("lmcache") is None, reason="lmcache is not installed"),
]

DAMAGED = token_ids(200, seed=30)
COMPILED = {"enforce_eager": False}


@dataclass
class Backend:
    """Where caches lie: its address, and how to flip a bit of the objects that hold some bytes."""

    address: str
    flip: Callable[[bytes], int]


@dataclass
class Case:
    """How the two engines are set up; `tiers` are LMCache's, in the store's address."""

    options: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    tiers: str = ""


WORKER = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
CASES = {
    # Everything as `vllm serve` does it by default, as far as `sync` allows.
    "fs": Case(COMPILED, WORKER | {"TORCHDYNAMO_DISABLE": "0"}, {"order": "streamed"}),
    "redis": Case(
        {},
        WORKER,
        {"order": "reused_first", "load": "async"},
        "&keep_local=0&disk={}",
    ),
    "lm": Case({}, {}, {"order": "all_first"}),
}


@contextmanager
def backend(name: str, folder: Path) -> Iterator[Backend]:
    if name == "fs":
        (folder / "objects").mkdir()
        yield Backend(f"fs://{folder}/objects", lambda inside: flip_files(folder, inside))
    elif name == "redis":
        with redis_server(folder) as server:
            yield Backend(server.url, lambda inside: flip_values(server.port, inside))
    else:
        with lm_server(folder) as server:
            yield Backend(server.url, lambda inside: 0)


def flip_files(folder: Path, inside: bytes) -> int:
    paths = [path for path in (folder / "objects").glob("*.data") if inside in path.read_bytes()]
    for path in paths:
        whole = path.read_bytes()
        path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    return len(paths)


def flip_values(port: int, inside: bytes) -> int:
    client: Any = import_module("redis").Redis(port=port)
    keys = [
        key for key in client.keys() if client.type(key) == b"string" and inside in client.get(key)
    ]
    for key in keys:
        whole = client.get(key)
        client.set(key, whole[:-1] + bytes([whole[-1] ^ 1]))
    return len(keys)


def run(
    models: Models,
    role: str,
    store: str,
    case: Case,
    batches: Sequence[tuple[list[list[int]], list[str | None]]],
) -> list[Answer]:
    """What an engine in a process of its own answers."""
    disk = models.folder / f"disk-{role}"
    disk.mkdir(exist_ok=True)
    spec = {
        "role": role,
        "store": f"{store}?cpu_gib=0.1{case.tiers.format(disk)}",
        "options": case.options,
        "extra": case.extra if role == "receiver" else {},
        "batches": batches,
    }
    result = run_engine(models.folder, spec, case.environment)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
    return answers_of(models.folder)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return make_models(tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize("name", CASES)
def test_two_engines_share_a_backend(models: Models, name: str, tmp_path: Path) -> None:
    case = CASES[name]
    with backend(name, tmp_path) as between:
        sent = [*PROMPTS, DAMAGED]
        answers = run(models, "sender", between.address, case, [(sent, [None] * len(sent))])
        assert [len(tokens) for _, tokens in answers] == [6] * len(sent)
        check_stored(models, between.address, sent)
        last = bytes.fromhex(chunk_hashes(DAMAGED, CHUNK)[-1])
        is_damaged = between.flip(last) > 0
        plans: list[str | None] = [None, *PLANS, STITCHED]
        prompts = [PROMPTS[index % len(PROMPTS)] for index in range(len(plans))]
        answers = run(
            models,
            "receiver",
            between.address,
            case,
            [
                (prompts, plans),
                ([DAMAGED, LONG], ["[2,4)", "[2,4)"]),
                ([LONG, DAMAGED], [None, None]),
            ],
        )
    prompts = [*prompts, DAMAGED, LONG, LONG, DAMAGED]
    plans = [*plans, None if is_damaged else "[2,4)", "[2,4)", None, None]
    assert_all_same(models, answers, prompts, plans)
    audit = (models.folder / "receiver.jsonl").read_text().splitlines()[-len(prompts) :]
    reasons = [json.loads(line)["reason"] for line in audit]
    assert reasons.count(None) == len(PLANS) - 1 + 1 + 1 + (not is_damaged)
    assert reasons.count("load_corrupt") == is_damaged
    assert name == "lm" or is_damaged


def check_stored(models: Models, address: str, prompts: list[list[int]]) -> None:
    """As `assert_stored`, read through LMCache in this third process."""
    from droidkv.serve.lmcache_store import LMCacheStore

    store = LMCacheStore(LMCacheSettings(address, CHUNK, max_local_cpu_gib=0.1))
    namespace = namespace_digest(models.sender.fingerprint)
    assert_stored(models, store, namespace, prompts)
    store.close()
