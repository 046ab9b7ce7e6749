"""The store on LMCache: every backend for real, two processes, and what happens when they fail."""

from __future__ import annotations

import asyncio
import concurrent.futures
import errno
import gc
import hashlib
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from serve import store_process
from serve.conformance_store import (
    CHUNK_TOKENS,
    KEYS,
    NUM_LAYERS,
    SENDER,
    StoreConformance,
    miss_reason,
    random_hidden,
    random_kv,
    soon,
)
from serve.fake_engine import FakePagedModel
from serve.servers import Server, lm_server, redis_server
from tiny import tiny_model

from droidkv import prefill
from droidkv.plan import ReusePlan
from droidkv.serve import verbs
from droidkv.serve.breaker import MOST_FAILURES, REST_SECONDS, Breaker
from droidkv.serve.connector_plan import SaveJob
from droidkv.serve.keys import ChunkKey, chunk_keys
from droidkv.serve.lmcache_settings import SOCKET_SECONDS, LMCacheSettings
from droidkv.serve.objects import MissReason, ObjectKind, ObjectName, StoreMiss
from droidkv.serve.sender_worker import ChunkEnd, SenderWorker
from droidkv.serve.store import Store, coverage, deadline_in

if find_spec("lmcache") is None:  # importing it here would be too early: see conftest.py
    pytest.skip("lmcache is not installed (make test-serve)", allow_module_level=True)

from droidkv.serve import lmcache_store
from droidkv.serve.lmcache_store import LMCacheStore, open_lmcache

SETTINGS = LMCacheSettings(chunk_tokens=CHUNK_TOKENS, max_local_cpu_gib=0.02, put_seconds=60.0)
MIB = 1 / 1024


class SaltedStore(LMCacheStore):
    """Meets no object of another test on the same server."""

    def __init__(self, settings: LMCacheSettings, salt: str) -> None:
        super().__init__(settings)
        self.salt = salt

    def _key(self, name: ObjectName) -> Any:
        key = super()._key(name)
        key.model_name = hashlib.sha256((key.model_name + self.salt).encode()).hexdigest()
        return key


class RemoteOnly(SaltedStore):
    """Reads nothing from its own memory: what another process would find."""

    def _read_local(self, key: Any, held: ExitStack) -> None:
        return None

    def _local_backends(self) -> Iterator[Any]:
        return iter([b for b in super()._local_backends() if str(b) != "LocalCPUBackend"])


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with redis_server(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(scope="module")
def lm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with lm_server(tmp_path_factory.mktemp("lm")) as server:
        yield server


@pytest.fixture
def salt(request: pytest.FixtureRequest) -> str:
    return str(request.node.nodeid)


class TestLocalMemory(StoreConformance):
    @pytest.fixture
    def store(self) -> Iterator[Store]:
        store = LMCacheStore(SETTINGS)
        yield store
        store.close()


class TestLocalDisk(StoreConformance):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[Store]:
        store = LMCacheStore(replace(SETTINGS, keep_local=False, local_disk=tmp_path))
        yield store
        store.close()


class TestFolder(StoreConformance):
    @pytest.fixture
    def store(self, tmp_path: Path, salt: str) -> Iterator[Store]:
        store = RemoteOnly(replace(SETTINGS, remote_url=f"fs://{tmp_path}"), salt)
        yield store
        store.close()


class TestRedis(StoreConformance):
    @pytest.fixture
    def store(self, redis: Server, salt: str) -> Iterator[Store]:
        store = RemoteOnly(replace(SETTINGS, remote_url=redis.url), salt)
        yield store
        store.close()


class TestLmServer(StoreConformance):
    @pytest.fixture
    def store(self, lm: Server, salt: str) -> Iterator[Store]:
        store = RemoteOnly(replace(SETTINGS, remote_url=lm.url), salt)
        yield store
        store.close()


def test_two_processes_share_every_backend(redis: Server, lm: Server, tmp_path: Path) -> None:
    urls = [f"fs://{tmp_path}", redis.url, lm.url]
    stores = [LMCacheStore(replace(SETTINGS, remote_url=url)) for url in urls]
    for store in stores:
        assert store_process.put_objects(store, 1)
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONHASHSEED"}
    result = subprocess.run(
        [sys.executable, store_process.__file__, *urls],
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    report = json.loads(result.stdout.splitlines()[-1])
    assert report == {url: {"read": True, "wrote": True, "stored": True} for url in urls}
    sender, receiver = tiny_model(), tiny_model(noise=0.04)
    captured = store_process.captured_by(sender)
    ids, num_reused = store_process.TOKEN_IDS, 24
    for store in stores:
        assert store_process.has_objects(store, 2)
        for plan in (ReusePlan.of(0, 0), ReusePlan.of(0, 2), ReusePlan.of(2, 4)):
            found = verbs.partial_prefill(
                store, receiver, store_process.THERE, ids, plan, seconds=60
            )
            assert found.fallback is None and found.num_reused == num_reused, found.message
            fetched = verbs.fetch(store, store_process.THERE, ids, plan, 6, soon())
            direct = prefill.partial_prefill(
                receiver,
                torch.tensor([ids[:num_reused]]),
                replace(
                    captured,
                    keys=[each[:, :, :num_reused] for each in captured.keys],
                    values=[each[:, :, :num_reused] for each in captured.values],
                    hidden={i: each[:, :num_reused] for i, each in captured.hidden.items()},
                    axis=captured.axis.narrow(0, num_reused),
                ),
                plan,
            )
            for layer in range(6):
                if layer not in plan.group:
                    assert torch.equal(fetched.keys[layer], captured.keys[layer][:, :, :num_reused])
            prefill.forward_suffix(receiver, direct, torch.tensor([ids[num_reused:]]))
            for layer in range(6):
                for one, other in zip(
                    direct.cache.layer(layer), found.context.cache.layer(layer), strict=True
                ):
                    assert (one - other).abs().max() < 1e-5
        store.close()


def test_the_process_is_left_as_it_was() -> None:
    store = LMCacheStore(SETTINGS)
    assert gc.isenabled()
    assert multiprocessing.get_start_method(allow_none=True) in (None, "fork")
    loop_thread = store._manager.thread
    assert loop_thread.is_alive()
    store.close()
    loop_thread.join(20)
    assert not loop_thread.is_alive()


@pytest.mark.usefixtures("three_threads")
def test_its_threads_start_no_team_beside_the_models() -> None:
    store = LMCacheStore(SETTINGS)
    try:
        assert store._calls.call(torch.get_num_threads, deadline_in(10)) == 1
        assert torch.get_num_threads() == 3
    finally:
        store.close()


def test_a_closed_store_misses() -> None:
    store = open_lmcache(f"local://?cpu_gib={8 * MIB}", CHUNK_TOKENS)
    store.put_hidden(KEYS[0], 0, random_hidden())
    store.close()
    assert miss_reason(lambda: store.get_hidden(KEYS[0], 0, soon())) is MissReason.BACKEND_DOWN
    assert not store.put_hidden(KEYS[0], 1, random_hidden())


def test_the_least_recently_used_is_evicted_and_shortens_coverage() -> None:
    store = LMCacheStore(replace(SETTINGS, max_local_cpu_gib=MIB / 2))  # 128 pages of 4 KiB
    keys = chunk_keys(SENDER, range(100 * CHUNK_TOKENS), CHUNK_TOKENS)
    hidden = random_hidden()
    assert all(store.put_hidden(key, 1, hidden) for key in keys)
    for key in keys:
        assert store.put_kv(key, 0, *random_kv())  # two pages each
    plan = ReusePlan.of(1, NUM_LAYERS)
    assert coverage(store, keys, plan, NUM_LAYERS, soon()) == 0  # the first E went first
    assert not store.contains_hidden(keys[0], [1], soon())
    assert store.contains_kv(keys[-1], [0], soon())
    assert miss_reason(lambda: store.get_hidden(keys[0], 1, soon())) is MissReason.ABSENT
    store.close()


def test_a_flush_amid_a_put_leaves_the_put_to_the_next_flush(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = LMCacheStore(replace(SETTINGS, keep_local=False, local_disk=tmp_path))
    disk = store._manager.storage_backends["LocalDiskBackend"]
    submit = disk.batched_submit_put_task

    def flushed_first(*args: Any, **kwargs: Any) -> Any:
        assert store.flush(soon())  # as another thread may
        return submit(*args, **kwargs)

    monkeypatch.setattr(disk, "batched_submit_put_task", flushed_first)
    try:
        store.put_hidden(KEYS[0], 0, random_hidden())
        assert len(store._on_disk_soon) == 1
        assert store.flush(soon())
        store.get_hidden(KEYS[0], 0, soon())
    finally:
        store.close()


@pytest.mark.parametrize(
    "settings", ["local_disk=folder", "remote_url=f'fs://{folder}'"], ids=["disk", "backend"]
)
def test_a_store_may_be_closed_right_behind_a_put(settings: str, tmp_path: Path) -> None:
    """In a process of its own, since a writer that reads freed memory takes it down."""
    code = (
        "from pathlib import Path\n"
        "from serve.conformance_store import KEYS, random_hidden\n"
        "from serve.test_lmcache_store import SETTINGS, LMCacheStore, replace\n"
        "for round in range(20):\n"
        f"    folder = Path({str(tmp_path)!r}) / str(round)\n"
        f"    store = LMCacheStore(replace(SETTINGS, keep_local=False, {settings}))\n"
        "    for layer in range(6):\n"
        "        store.put_hidden(KEYS[0], layer, random_hidden())\n"
        "    store.close()\n"
    )
    tests = str(Path(__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": tests}
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300, env=environment)


def test_what_memory_evicts_comes_from_the_folder(tmp_path: Path) -> None:
    settings = replace(SETTINGS, remote_url=f"fs://{tmp_path}", max_local_cpu_gib=MIB / 4)
    store = LMCacheStore(settings)  # 64 pages of 4 KiB
    keys = chunk_keys(SENDER, range(100 * CHUNK_TOKENS), CHUNK_TOKENS)
    values = [torch.full((CHUNK_TOKENS, 24), float(key.index)) for key in keys]
    for key, hidden in zip(keys, values, strict=True):
        assert store.put_hidden(key, 1, hidden)
    assert store.flush(soon())
    found = store.get_hidden_chunks(keys, 1, deadline_in(60))
    assert all(torch.equal(one, other) for one, other in zip(found, values, strict=True))
    store.close()


def test_what_is_lent_is_not_evicted_and_is_all_given_back(tmp_path: Path) -> None:
    settings = replace(SETTINGS, remote_url=f"fs://{tmp_path}", max_local_cpu_gib=MIB / 2)
    store = LMCacheStore(settings)  # 128 pages of 4 KiB, of which 32 may be lent
    keys = chunk_keys(SENDER, range(100 * CHUNK_TOKENS), CHUNK_TOKENS)
    pairs = [random_kv() for _ in keys]  # two pages each
    for key, pair in zip(keys, pairs, strict=True):
        assert store.put_kv(key, 1, *pair)
    assert store.flush(soon())
    for _ in range(3):  # what was not given back would be missing the next time
        with store.lent_kv_chunks(keys[:40], 1, deadline_in(60)) as lent:
            assert 0 < store._lent_bytes <= store._most_lent_bytes
            store.get_kv_chunks(keys[40:], 1, deadline_in(60))
            for found, pair in zip(lent, pairs, strict=False):
                assert all(map(torch.equal, found, pair))
        assert store._lent_bytes == 0
    held = [
        memory.get_ref_count() for memory in store._manager.local_cpu_backend.hot_cache.values()
    ]
    assert held and set(held) == {1}
    store.close()


def test_an_object_that_memory_has_no_room_for_is_not_damaged(tmp_path: Path) -> None:
    settings = replace(SETTINGS, remote_url=f"fs://{tmp_path}", max_local_cpu_gib=MIB / 16)
    store = LMCacheStore(settings)  # 16 pages of 4 KiB
    pair = random_kv()
    store.put_kv(KEYS[0], 0, *pair)
    assert store.flush(soon())
    store._forget(ObjectName(KEYS[0], ObjectKind.KV, 0))
    taken = []
    memory = store._manager.local_cpu_backend
    while (page := memory.allocate(torch.Size([1]), torch.uint8, store._format)) is not None:
        taken.append(page)
    assert miss_reason(lambda: store.get_kv(KEYS[0], 0, soon())) is MissReason.BACKEND_DOWN
    for page in taken:
        page.ref_count_down()
    assert all(map(torch.equal, store.get_kv(KEYS[0], 0, soon()), pair))
    store.close()


def test_a_store_is_closed_once_what_it_lent_is_given_back() -> None:
    store = LMCacheStore(SETTINGS)
    pair = random_kv()
    store.put_kv(KEYS[0], 0, *pair)
    closing = threading.Thread(target=store.close)
    with store.lent_kv_chunks(KEYS[:1], 0, soon()) as lent:
        closing.start()
        closing.join(0.5)
        assert closing.is_alive()
        assert all(map(torch.equal, lent[0], pair))
        assert miss_reason(lambda: store.get_kv(KEYS[0], 0, soon())) is MissReason.BACKEND_DOWN
    closing.join(SOCKET_SECONDS)  # less than it would wait for what is never given back
    assert not closing.is_alive()


def test_what_memory_holds_is_read_while_every_thread_is_stuck() -> None:
    store, pair = LMCacheStore(SETTINGS), random_kv()
    store.put_kv(KEYS[0], 0, *pair)
    ended, stuck = threading.Event(), []

    def stick() -> None:
        stuck.append(threading.current_thread())
        ended.wait()

    while len(stuck) < lmcache_store._NUM_THREADS:  # a call may be given up before it begins
        with pytest.raises(TimeoutError):
            store._calls.call(stick, deadline_in(0.05))
    assert all(map(torch.equal, store.get_kv(KEYS[0], 0, soon()), pair))
    assert miss_reason(lambda: store.get_kv(KEYS[1], 0, deadline_in(0.1))) is MissReason.TIMEOUT
    ended.set()
    store.close()


def test_two_stores_write_one_object_in_places_of_their_own(tmp_path: Path) -> None:
    stores = [LMCacheStore(replace(SETTINGS, remote_url=f"fs://{tmp_path}")) for _ in range(2)]
    key = stores[0]._key(ObjectName(KEYS[0], ObjectKind.HIDDEN, 0))
    clients = [store._remote.connection.getWrappedConnector() for store in stores]
    (final, place), (other_final, other_place) = [
        client._get_file_and_tmp_path(key) for client in clients
    ]
    assert final == other_final
    assert place != other_place
    for store in stores:
        store.put_hidden(KEYS[0], 0, random_hidden())
        assert store.flush(soon())
        store.get_hidden(KEYS[0], 0, soon())
        store.close()
    assert list(tmp_path.iterdir()) == [final]


def test_memory_lets_go_of_what_was_used_longest_ago() -> None:
    store = LMCacheStore(replace(SETTINGS, max_local_cpu_gib=MIB / 4))  # 64 pages of 4 KiB
    keys = chunk_keys(SENDER, range(80 * CHUNK_TOKENS), CHUNK_TOKENS)
    for key in keys:
        store.put_hidden(key, 0, random_hidden())
        store.get_hidden(keys[0], 0, soon())
    assert not store.contains_hidden(keys[1], [0], soon())
    store.close()


def test_a_disk_that_is_full_keeps_nothing_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = LMCacheStore(replace(SETTINGS, local_disk=tmp_path))
    disk = store._manager.storage_backends["LocalDiskBackend"]

    def fail(*args: Any) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    with monkeypatch.context() as full:
        full.setattr(disk, "write_file", fail)
        store.put_hidden(KEYS[0], 0, random_hidden())
        assert store.flush(soon())
    (memory,) = store._manager.local_cpu_backend.hot_cache.values()
    assert memory.get_ref_count() == 1
    assert disk.current_cache_size == 0
    store.put_hidden(KEYS[0], 0, random_hidden())
    assert store.flush(soon())
    assert only_file(tmp_path).exists()
    store.close()


def test_as_many_reads_as_threads_connect_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = LMCacheStore(replace(SETTINGS, remote_url=f"fs://{tmp_path}"))
    remote, connect = store._remote, store._remote.init_connection
    tried: list[float] = []

    def slowly() -> None:
        tried.append(time.monotonic())
        time.sleep(0.2)
        connect()

    monkeypatch.setattr(remote, "init_connection", slowly)
    remote.connection = None
    started = threading.Barrier(lmcache_store._NUM_THREADS)

    def read(_: int) -> MissReason:
        started.wait()
        return miss_reason(lambda: store.get_hidden(KEYS[0], 0, soon()))

    with ThreadPoolExecutor(lmcache_store._NUM_THREADS) as readers:
        reasons = set(readers.map(read, range(lmcache_store._NUM_THREADS)))
    assert (reasons, len(tried)) == ({MissReason.ABSENT}, 1)
    store.close()


def test_what_a_failed_read_took_is_given_back_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = LMCacheStore(replace(SETTINGS, remote_url=f"fs://{tmp_path}"))
    store.put_hidden(KEYS[0], 0, random_hidden())
    assert store.flush(soon())
    taken: list[Any] = []

    async def fail(key: Any) -> None:
        memory = store._manager.local_cpu_backend.allocate(
            torch.Size([100]), torch.uint8, store._format
        )
        taken.append(weakref.ref(memory))
        raise OSError("the connection broke")

    monkeypatch.setattr(store._remote.connection, "get", fail)
    gc.disable()  # it might run within LMCache's lock
    try:
        try:
            store.get_hidden(KEYS[1], 0, soon())
        except StoreMiss as miss:  # `pytest.raises` would keep it
            assert miss.reason is MissReason.BACKEND_DOWN
        time.sleep(0.2)  # for the event loop to let go, too
        assert [each() for each in taken] == [None]
    finally:
        gc.enable()
    store.close()


@pytest.mark.parametrize("ends", [True, False], ids=["ends", "hangs"])
def test_memory_is_not_freed_under_a_read(
    ends: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = LMCacheStore(replace(SETTINGS, remote_url=f"fs://{tmp_path}"))
    monkeypatch.setattr(lmcache_store, "_CLOSE_SECONDS", 30.0 if ends else 0.5)
    events: list[str] = []
    may_end, begun = threading.Event(), threading.Event()

    async def get(key: Any) -> None:
        begun.set()
        while not may_end.is_set():
            await asyncio.sleep(0.01)
        events.append("read")

    monkeypatch.setattr(store._remote.connection, "get", get)
    allocator = store._manager.local_cpu_backend.memory_allocator
    monkeypatch.setattr(allocator, "close", lambda: events.append("freed"))
    with pytest.raises(StoreMiss):
        store.get_hidden(KEYS[0], 0, deadline_in(0.2))  # given up, but still under way
    assert begun.wait(10)
    if ends:
        threading.Timer(0.5, may_end.set).start()
    store.close()
    assert events == (["read", "freed"] if ends else [])
    may_end.set()


def test_a_put_that_waits_for_room_ends_when_the_store_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = replace(SETTINGS, remote_url=f"fs://{tmp_path}", max_local_cpu_gib=MIB / 4)
    store = LMCacheStore(settings)
    monkeypatch.setattr(lmcache_store, "_CLOSE_SECONDS", 0.5)
    with store._changed:
        store._pending[concurrent.futures.Future()] = store._max_pending_bytes  # never ends
    with ThreadPoolExecutor(1) as putting:
        put = putting.submit(store.put_hidden, KEYS[0], 0, random_hidden())
        time.sleep(0.2)
        assert not put.done()
        store.close()
        assert put.result(10) is False


def only_file(folder: Path) -> Path:
    (path,) = [path for path in folder.iterdir() if path.is_file()]
    return path


def test_a_damaged_file_of_the_folder_is_named(tmp_path: Path, salt: str) -> None:
    store = RemoteOnly(replace(SETTINGS, remote_url=f"fs://{tmp_path}"), salt)
    store.put_hidden(KEYS[0], 0, random_hidden())
    assert store.flush(soon())
    whole = only_file(tmp_path).read_bytes()
    for damaged, reason in (
        (whole[:-100], MissReason.SHORT),
        (whole[:10], MissReason.SHORT),
        (b"", MissReason.SHORT),
        (whole[:-100] + bytes([whole[-100] ^ 1]) + whole[-99:], MissReason.CORRUPT),
        (whole[:100] + bytes([whole[100] ^ 1]) + whole[101:], MissReason.CORRUPT),
    ):
        only_file(tmp_path).write_bytes(damaged)
        assert miss_reason(lambda: store.get_hidden(KEYS[0], 0, soon())) is reason
    only_file(tmp_path).write_bytes(whole)
    store.get_hidden(KEYS[0], 0, soon())
    only_file(tmp_path).unlink()
    assert miss_reason(lambda: store.get_hidden(KEYS[0], 0, soon())) is MissReason.ABSENT
    store.close()


def test_a_damaged_copy_in_memory_is_replaced_by_the_folders(tmp_path: Path) -> None:
    url = f"fs://{tmp_path}"
    store, hidden = LMCacheStore(replace(SETTINGS, remote_url=url)), random_hidden()
    store.put_hidden(KEYS[0], 0, hidden)
    assert store.flush(soon())
    memory = store._manager.local_cpu_backend.get_blocking(
        store._key(ObjectName(KEYS[0], ObjectKind.HIDDEN, 0))
    )
    memory.tensor[-1] ^= 1
    memory.ref_count_down()
    assert miss_reason(lambda: store.get_hidden(KEYS[0], 0, soon())) is MissReason.CORRUPT
    assert torch.equal(store.get_hidden(KEYS[0], 0, soon()), hidden)
    store.close()


def test_what_only_this_process_holds_is_stored_anew_for_others(tmp_path: Path) -> None:
    store = LMCacheStore(replace(SETTINGS, remote_url=f"fs://{tmp_path}"))
    name = ObjectName(KEYS[0], ObjectKind.HIDDEN, 0)
    for _ in range(2):
        assert store.count_for_others([name], soon()) == 0
        store.put_hidden(KEYS[0], 0, random_hidden())
        assert store.flush(soon())
        assert store.count_for_others([name], soon()) == 1
        only_file(tmp_path).unlink()
        assert store.contains_hidden(KEYS[0], [0], soon())  # in memory
    store.close()


def test_a_damaged_file_of_the_disk_tier_is_never_read_as_good(tmp_path: Path) -> None:
    settings = replace(SETTINGS, keep_local=False, local_disk=tmp_path)
    store = LMCacheStore(settings)

    def flip(path: Path) -> None:
        path.write_bytes(path.read_bytes()[:-1] + b"\x55")

    for damage, reason in ((flip, MissReason.CORRUPT), (Path.unlink, MissReason.ABSENT)):
        store.put_hidden(KEYS[0], 0, random_hidden())
        assert store.flush(soon())
        store.get_hidden(KEYS[0], 0, soon())
        damage(only_file(tmp_path))
        for expected in (reason, MissReason.ABSENT):  # and then it is forgotten
            assert miss_reason(lambda: store.get_hidden(KEYS[0], 0, soon())) is expected
    store.close()


def test_a_cut_file_of_the_disk_tier_leaves_no_other_objects_bytes(tmp_path: Path) -> None:
    # LMCache reads it into memory that still holds what was read there before, and says nothing.
    store = LMCacheStore(replace(SETTINGS, keep_local=False, local_disk=tmp_path))
    store.put_hidden(KEYS[0], 0, random_hidden())
    assert store.flush(soon())
    cut = only_file(tmp_path)
    store.put_hidden(KEYS[0], 1, random_hidden())
    assert store.flush(soon())
    cut.write_bytes(cut.read_bytes()[:-200])
    store.get_hidden(KEYS[0], 1, soon())
    assert miss_reason(lambda: store.get_hidden(KEYS[0], 0, soon())) is MissReason.CORRUPT
    store.close()


def test_a_folder_that_cannot_be_is_a_backend_that_is_down(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    store = LMCacheStore(replace(SETTINGS, remote_url=f"fs://{blocked}/folder"))
    assert not store.put_hidden(KEYS[0], 0, random_hidden())
    assert store.stats().put_failures == 1
    assert miss_reason(lambda: store.get_hidden(KEYS[0], 0, soon())) is MissReason.BACKEND_DOWN
    look_up = lambda: store.contains_hidden(KEYS[0], [0], soon())  # noqa: E731
    assert miss_reason(look_up) is MissReason.BACKEND_DOWN
    store.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "droidkv-test", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no right to mount a small disk here")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_takes_whole_objects_or_none_and_goes_on_when_there_is_room(
    small_disk: Path, salt: str
) -> None:
    store = RemoteOnly(replace(SETTINGS, remote_url=f"fs://{small_disk}"), salt)
    keys = chunk_keys(SENDER, range(100 * CHUNK_TOKENS), CHUNK_TOKENS)
    ends: dict[ChunkKey, bool] = {}
    for key in keys:
        store.put_kv(key, 0, *random_kv(), on_end=partial(ends.__setitem__, key))
    assert store.flush(soon())
    written = [key for key in keys if ends[key]]
    assert 0 < len(written) < len(keys)
    assert store.stats().put_failures == len(keys) - len(written)
    assert len(list(small_disk.glob("*.data"))) == len(written)
    assert [store.contains_kv(key, [0], soon()) for key in keys] == [ends[key] for key in keys]
    store.get_kv_chunks(written, 0, soon())
    lost = next(key for key in keys if not ends[key])
    for path in small_disk.glob("*.data"):
        path.unlink()
    store.put_kv(lost, 0, *random_kv(), on_end=partial(ends.__setitem__, lost))
    assert store.flush(soon())
    assert ends[lost]
    store.get_kv(lost, 0, soon())
    store.close()


def test_redis_may_die_and_come_back(tmp_path: Path, salt: str) -> None:
    with redis_server(tmp_path) as server:
        store = RemoteOnly(replace(SETTINGS, remote_url=server.url), salt)
        store.put_hidden(KEYS[0], 0, random_hidden())
        assert store.flush(soon())
        store.get_hidden(KEYS[0], 0, soon())
        assert store.stats().put_failures == 0
    start = time.monotonic()
    assert miss_reason(lambda: store.get_hidden(KEYS[0], 0, soon())) is MissReason.BACKEND_DOWN
    look_up = lambda: store.contains_hidden(KEYS[0], [0], soon())  # noqa: E731
    assert miss_reason(look_up) is MissReason.BACKEND_DOWN
    store.put_hidden(KEYS[0], 0, random_hidden())
    assert store.flush(soon())
    assert store.stats().put_failures == 1
    assert time.monotonic() - start < 60
    with redis_server(tmp_path, server.port):
        assert not store.contains_hidden(KEYS[0], [0], soon())
        store.put_hidden(KEYS[0], 0, random_hidden())
        assert store.flush(soon())
        store.get_hidden(KEYS[0], 0, soon())
        store.close()


def test_a_sender_stops_writing_to_a_redis_that_died_and_goes_on_when_it_is_back(
    tmp_path: Path, salt: str
) -> None:
    now = 1000.0
    tokens = torch.randint(3, 90, (4 * CHUNK_TOKENS,)).tolist()
    model = FakePagedModel(tiny_model(), num_blocks=8, block_tokens=4)
    ends: Counter[ChunkEnd] = Counter()

    def save(num_chunks: int) -> Counter[ChunkEnd]:
        sender.save([SaveJob("s", tuple(tokens[: num_chunks * CHUNK_TOKENS]), 0, tuple(range(8)))])
        assert sender.flush(60)
        return Counter(sender.new_counts())

    with redis_server(tmp_path) as server:
        store = RemoteOnly(replace(SETTINGS, remote_url=server.url), salt)
        sender = SenderWorker(model, store, SENDER, [])
        sender.puts = Breaker(clock=lambda: now)
        assert save(1)["stored"] == 1
    for _ in range(MOST_FAILURES):
        ends += save(1)
    assert ends == Counter(failed=MOST_FAILURES) and sender.puts.new_rests() == 1
    puts = store.stats().puts
    assert save(4)["resting"] == 4 and store.stats().puts == puts
    now += REST_SECONDS
    assert save(4) == Counter(failed=1, resting=3)  # one tries, and rests twice as long
    now += REST_SECONDS
    assert save(1)["resting"] == 1
    with redis_server(tmp_path, server.port):
        now += REST_SECONDS
        assert save(1)["stored"] == 1
        assert save(4) == Counter(present=1, stored=3)
        keys = chunk_keys(SENDER, tokens, CHUNK_TOKENS)
        assert all(store.contains_kv(key, range(model.num_layers), soon()) for key in keys)
        sender.close()
        store.close()


def test_a_stalled_redis_costs_a_deadline_and_no_more(tmp_path: Path, salt: str) -> None:
    with redis_server(tmp_path) as server:
        settings = replace(SETTINGS, remote_url=f"{server.url}?socket_timeout=2", put_seconds=0.05)
        store = RemoteOnly(replace(settings, max_local_cpu_gib=1 * MIB), salt)
        hidden = random_hidden()
        store.put_hidden(KEYS[0], 0, hidden)
        assert store.flush(soon())
        os.kill(server.process.pid, signal.SIGSTOP)
        for _ in range(6):  # more than the workers of LMCache's client
            start = time.monotonic()
            read = lambda: store.get_hidden(KEYS[0], 0, deadline_in(0.3))  # noqa: E731
            assert miss_reason(read) is MissReason.TIMEOUT
            assert time.monotonic() - start < 5
        start = time.monotonic()
        taken = [store.put_hidden(KEYS[1], layer, hidden) for layer in range(150)]
        assert taken[0] and not taken[-1]  # half of the memory waits, and then no more is taken
        assert not store.flush(deadline_in(0.1))
        os.kill(server.process.pid, signal.SIGCONT)
        give_up_at = time.monotonic() + 60
        while time.monotonic() < give_up_at:
            if store.contains_hidden(KEYS[0], [0], soon()):
                break
        assert torch.equal(store.get_hidden(KEYS[0], 0, soon()), hidden)
        store.close()


def test_closing_does_not_wait_for_a_stalled_redis(tmp_path: Path, salt: str) -> None:
    with redis_server(tmp_path) as server:
        store = RemoteOnly(replace(SETTINGS, remote_url=server.url), salt)
        store.put_hidden(KEYS[0], 0, random_hidden())
        assert store.flush(soon())
        os.kill(server.process.pid, signal.SIGSTOP)
        store.put_hidden(KEYS[1], 0, random_hidden())
        start = time.monotonic()
        store.close()
        assert time.monotonic() - start < 40


def test_an_lm_server_may_die(tmp_path: Path, salt: str) -> None:
    with lm_server(tmp_path) as server:
        store = RemoteOnly(replace(SETTINGS, remote_url=server.url), salt)
        store.put_hidden(KEYS[0], 0, random_hidden())
        assert store.flush(soon())
        store.get_hidden(KEYS[0], 0, soon())
        os.kill(server.process.pid, signal.SIGSTOP)
        read = lambda: store.get_hidden(KEYS[0], 0, deadline_in(0.3))  # noqa: E731
        assert miss_reason(read) is MissReason.TIMEOUT
    for _ in range(2):
        reason = miss_reason(lambda: store.get_hidden(KEYS[0], 0, soon()))
        assert reason is MissReason.BACKEND_DOWN
    store.close()
