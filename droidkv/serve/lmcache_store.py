"""The store on LMCache's storage manager: its tiers, its eviction, its remote backends.

LMCache is imported only when a store is opened: the import takes seconds, and while vLLM builds its
configuration it would break vLLM's in-process engine.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor

from droidkv.errors import StorageError, require_extra
from droidkv.serve.bounded import BoundedCalls
from droidkv.serve.lmcache_manager import MEMORY, REMOTE, close_manager, start_manager
from droidkv.serve.lmcache_settings import SOCKET_SECONDS, LMCacheSettings
from droidkv.serve.objects import MissReason, ObjectKind, ObjectName, StoreMiss
from droidkv.serve.store import Store, deadline_in
from droidkv.serve.threads import keep_to_one_core

_GIB = 1024**3
# Layer ids of E objects in LMCache's keys start here, past every model's layers.
_FIRST_HIDDEN_LAYER = 100_000
_NUM_THREADS = 12  # a receiver's eight reads and four look-ups, none of which waits for another
_GETS_IN_FLIGHT = 8
_LOOKUPS_IN_FLIGHT = 32
_START_SECONDS = 300.0  # a busy machine needs minutes
_CLOSE_SECONDS = 2 * SOCKET_SECONDS
_STOP_SECONDS = 1.0
_MOST_KEYS_WATCHED = 4096  # before those that are written are let go of
_PAGE_BYTES = 4096  # what LMCache rounds an object's memory up to

Future = concurrent.futures.Future[Any]


class LMCacheStore(Store):
    """Objects in LMCache: this process's memory and disk, then a backend that others read too.

    LMCache's storage manager is used without its engine, which forces a start method on
    `multiprocessing` and whose look-up knows KV only. Its clients are called directly rather than
    through its `RemoteBackend.get_blocking`, which turns every error into an absent object.

    Raises:
        MissingExtraError: lmcache is not installed.
        StorageError: LMCache could not be started. An unreachable backend is no reason: its
            objects are misses until it is reachable.
    """

    def __init__(self, settings: LMCacheSettings) -> None:
        super().__init__(settings.chunk_tokens)
        self.settings = settings
        # It logs every miss and every failed write, which are counted and named here.
        os.environ.setdefault("LMCACHE_LOG_LEVEL", "CRITICAL")
        self._utils = require_extra("lmcache.utils", "store")
        self._format = require_extra("lmcache.v1.memory_management", "store").MemoryFormat.HS_TD
        self._times_full = 0
        self._calls = BoundedCalls(_NUM_THREADS, "droidkv-store", keep_to_one_core)
        try:
            self._manager = self._calls.call(
                partial(start_manager, settings, self._had_no_room), deadline_in(_START_SECONDS)
            )
        except (OSError, RuntimeError, ValueError, AssertionError) as cause:
            raise StorageError(
                f"expected to start LMCache with {settings}, but {type(cause).__name__}: {cause}"
            ) from cause
        self._connecting = BoundedCalls(1, "droidkv-connect", keep_to_one_core)
        self._is_lm = settings.scheme == "lm"
        self._lm_lock: asyncio.Lock | None = None
        self._max_pending_bytes = int(settings.max_local_cpu_gib * _GIB / 2)
        self._pending: dict[Future, int] = {}
        self._most_lent_bytes = int(settings.max_local_cpu_gib * _GIB / 4)
        self._lent_bytes = 0
        self._num_uses = 0
        self._changed = threading.Condition()
        self._on_disk_soon: set[Any] = set()
        self._gets = threading.Semaphore(_GETS_IN_FLIGHT)
        self._is_closed = False
        _close_at_exit(self)

    def flush(self, deadline: float) -> bool:
        if not self._has_written(deadline):
            return False
        if self._is_lm and not self._is_closed:
            # Puts are not answered, but the server takes one client's calls in order.
            probe = self._utils.LayerCacheEngineKey("probe", 1, 0, 0, torch.uint8)
            try:
                self._calls.call(partial(self._count_remote, [probe], deadline), deadline)
            except (OSError, RuntimeError, ValueError):
                return False
        return True

    def close(self) -> None:
        with self._changed:
            if self._is_closed:
                return
            self._is_closed = True
            self._changed.notify_all()
        deadline = deadline_in(_CLOSE_SECONDS)
        is_unused = self._has_written(deadline) and self._is_unused(deadline)
        close = partial(close_manager, self._manager, keep_memory=not is_unused)
        with suppress(Exception):  # a backend that does not answer is left behind
            self._calls.call(close, deadline_in(_CLOSE_SECONDS))
        loop = self._manager.loop
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(loop.stop)
        for calls in (self._calls, self._connecting):
            calls.stop(deadline_in(_STOP_SECONDS))
        _OPEN.discard(self)

    def _write(self, name: ObjectName, buffer: Tensor) -> Future | None:
        with self._using_memory():
            return self._write_now(name, buffer)

    def _write_now(self, name: ObjectName, buffer: Tensor) -> Future | None:
        num_bytes = buffer.numel()
        memory_bytes = _memory_bytes(num_bytes)
        self._wait_for_room(memory_bytes)
        connection = None
        if self._remote is not None:
            connection = self._connection(deadline_in(SOCKET_SECONDS))
        memory = self._manager.allocate(
            torch.Size([num_bytes]), torch.uint8, self._format, busy_loop=False
        )
        if memory is None:
            raise MemoryError(f"no room for {num_bytes} bytes in LMCache's memory")
        key = self._key(name)
        writing: Future | None = None
        try:
            memory.tensor.copy_(buffer)
            for backend_name, backend in self._manager.get_active_storage_backends():
                if backend_name == REMOTE:
                    put = backend.submit_put_task(key, memory)
                    writing = self._track(put, memory_bytes, connection)
                else:
                    backend.batched_submit_put_task([key], [memory])
        finally:
            memory.ref_count_down()
        if self.settings.local_disk is not None:
            # Not before: another thread's flush would take it for written.
            self._on_disk_soon.add(key)
            if len(self._on_disk_soon) > _MOST_KEYS_WATCHED:
                self._is_writing_to_disk()
        return writing

    def _count_leading(self, names: Sequence[ObjectName], deadline: float) -> int:
        self._require_open()
        return self._calls.call(partial(self._count_now, names, deadline), deadline)

    def _count_shared(self, names: Sequence[ObjectName], deadline: float) -> int:
        if self._remote is None:
            return self._count_leading(names, deadline)
        self._require_open()
        keys = [self._key(name) for name in names]
        return self._calls.call(partial(self._count_remote, keys, deadline), deadline)

    def _read(
        self, names: Sequence[ObjectName], deadline: float, lent: ExitStack
    ) -> list[Tensor | None]:
        self._require_open()
        keys = [self._key(name) for name in names]
        found = self._read_memory(keys, lent)
        absent = [i for i, buffer in enumerate(found) if buffer is None]
        if absent:
            read = partial(self._read_now, [keys[i] for i in absent], deadline)
            others, held = self._calls.call(read, deadline, drop=lambda late: late[1].close())
            lent.push(held)
            for i, buffer in zip(absent, others, strict=True):
                found[i] = buffer
        return found

    def _forget(self, name: ObjectName) -> None:
        for backend in self._local_backends():
            backend.remove(self._key(name))

    def _count_now(self, names: Sequence[ObjectName], deadline: float) -> int:
        keys = [self._key(name) for name in names]
        local = list(self._local_backends())
        absent = [i for i, key in enumerate(keys) if not any(b.contains(key) for b in local)]
        if absent and self._remote is not None:
            absent = absent[self._count_remote([keys[i] for i in absent], deadline) :]
        return absent[0] if absent else len(keys)

    def _read_memory(self, keys: Sequence[Any], lent: ExitStack) -> list[Tensor | None]:
        """What this process's memory holds; nothing there can hang, so no thread is in between."""
        memory = next((each for each in self._local_backends() if str(each) == MEMORY), None)
        if memory is None:
            return [None] * len(keys)
        with memory.cpu_lock:  # LMCache itself never says what was used
            for key in filter(memory.hot_cache.__contains__, keys):
                memory.cache_policy.update_on_hit(key, memory.hot_cache)
        found = map(memory.get_blocking, keys)
        return [None if each is None else self._lent(each, lent) for each in found]

    def _read_now(
        self, keys: Sequence[Any], deadline: float
    ) -> tuple[list[Tensor | None], ExitStack]:
        with self._using_memory(), ExitStack() as held:
            found = [self._read_local(key, held) for key in keys]
            absent = [i for i, buffer in enumerate(found) if buffer is None]
            if absent and self._remote is not None:
                fetched = self._read_remote([keys[i] for i in absent], deadline, held)
                for i, buffer in zip(absent, fetched, strict=True):
                    found[i] = buffer
            return found, held.pop_all()

    def _read_local(self, key: Any, held: ExitStack) -> Tensor | None:
        for backend in self._local_backends():
            try:
                memory = backend.get_blocking(key)
            except (OSError, KeyError, AssertionError):  # its file is gone, or memory is full
                continue
            if memory is not None:
                return self._kept(key, memory, held)
        return None

    def _read_remote(
        self, keys: Sequence[Any], deadline: float, held: ExitStack
    ) -> list[Tensor | None]:
        """The objects in order, several on their way at once.

        None is ever cancelled: cancelling a call of LMCache's Redis client ends one of the four
        workers that serve all its calls.
        """
        connection, times_full = self._connection(deadline), self._times_full
        waiting, running = deque(keys), deque[Future]()
        found: list[Tensor | None] = []
        try:
            for key in keys:
                while waiting and self._may_get(deadline, wait=not running):
                    self._begin_use()
                    running.append(self._submit(connection, connection.get, waiting.popleft()))
                    running[-1].add_done_callback(self._got)
                memory = _result(running[0], deadline)
                running.popleft()
                if memory is None:
                    found.append(None)
                    self._require_absent(connection, key, deadline, times_full)
                else:
                    found.append(self._kept(key, memory, held))
        finally:
            while running:  # none stays in this frame, see `_result`
                running.popleft().add_done_callback(_release)
        return found

    def _got(self, _: Future) -> None:
        self._gets.release()
        self._end_use()

    def _may_get(self, deadline: float, wait: bool) -> bool:
        if self._gets.acquire(blocking=False):
            return True
        if not wait:
            return False
        if not self._gets.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise TimeoutError("earlier reads did not end by the deadline")
        return True

    def _had_no_room(self) -> None:
        self._times_full += 1

    def _require_absent(self, connection: Any, key: Any, deadline: float, times_full: int) -> None:
        """LMCache answers nothing for absent objects, and for those it could not read whole.

        Nor for those that its memory had no room for, which are not damaged; `times_full` is how
        often that had happened before.
        """
        if _result(self._submit(connection, connection.exists, key), deadline):
            if self._times_full > times_full:
                raise StoreMiss(
                    MissReason.BACKEND_DOWN,
                    "LMCache's memory had no room for the object; give it more by cpu_gib",
                )
            if self._is_lm:
                self._drop(connection)
            raise StoreMiss(MissReason.SHORT, "the object is there, but could not be read whole")

    def _count_remote(self, keys: Sequence[Any], deadline: float) -> int:
        connection = self._connection(deadline)
        for start in range(0, len(keys), _LOOKUPS_IN_FLIGHT):
            futures = [
                self._submit(connection, connection.exists, key)
                for key in keys[start : start + _LOOKUPS_IN_FLIGHT]
            ]
            for i, future in enumerate(futures):
                if not _result(future, deadline):
                    return start + i
        return len(keys)

    def _submit(
        self, connection: Any, call: Callable[[Any], Coroutine[Any, Any, Any]], key: Any
    ) -> Future:
        run = self._alone(connection, call, key) if self._is_lm else call(key)
        return asyncio.run_coroutine_threadsafe(run, self._manager.loop)

    async def _alone(
        self, connection: Any, call: Callable[[Any], Coroutine[Any, Any, Any]], key: Any
    ) -> Any:
        """One call at a time, for `lm://`: its replies mix where two overlap.

        After a failure the rest of a reply may still arrive, so the connection is given up.
        """
        if self._lm_lock is None:
            self._lm_lock = asyncio.Lock()
        async with self._lm_lock:
            try:
                return await call(key)
            except Exception:
                self._drop(connection)
                raise

    def _kept(self, key: Any, memory: Any, held: ExitStack) -> Tensor:
        """As `_lent`, an object that came from elsewhere: it is in memory for the next reader."""
        for backend in self._local_backends():
            if str(backend) == MEMORY and not backend.contains(key):
                backend.batched_submit_put_task([key], [memory])
        return self._lent(memory, held)

    def _lent(self, memory: Any, held: ExitStack) -> Tensor:
        """The object's bytes in LMCache's memory, which does not reuse it while they are held.

        Past a quarter of it they are copied out, since what is read next needs room too.
        """
        lent: Tensor = memory.tensor
        num_bytes = _memory_bytes(lent.nbytes)
        with self._changed:
            self._require_open()
            self._lent_bytes += num_bytes
            is_too_much = self._lent_bytes > self._most_lent_bytes
        if is_too_much:
            try:
                return lent.clone()
            finally:
                self._returned(memory, num_bytes)
        held.callback(self._returned, memory, num_bytes)
        return lent

    @contextmanager
    def _using_memory(self) -> Iterator[None]:
        """LMCache's memory is read or written: it is not freed meanwhile."""
        self._begin_use()
        try:
            yield
        finally:
            self._end_use()

    def _begin_use(self) -> None:
        with self._changed:
            self._require_open()
            self._num_uses += 1

    def _end_use(self) -> None:
        with self._changed:
            self._num_uses -= 1
            self._changed.notify_all()

    def _is_unused(self, deadline: float) -> bool:
        """Wait until nobody reads or writes LMCache's memory; False if that took longer."""
        with self._changed:
            left = max(0.0, deadline - time.monotonic())
            return self._changed.wait_for(lambda: not self._num_uses and not self._lent_bytes, left)

    def _returned(self, memory: Any, num_bytes: int) -> None:
        memory.ref_count_down()
        with self._changed:
            self._lent_bytes -= num_bytes
            self._changed.notify_all()

    def _wait_for_room(self, num_bytes: int) -> None:
        # Pending objects cannot be evicted, and reading needs room too.
        def may_go_on() -> bool:
            pending_bytes = sum(self._pending.values())
            return self._is_closed or pending_bytes + num_bytes <= self._max_pending_bytes

        with self._changed:
            if not self._changed.wait_for(may_go_on, self.settings.put_seconds):
                raise TimeoutError("earlier objects did not leave in time")
            self._require_open()

    def _track(self, future: Future, num_bytes: int, connection: Any) -> Future:
        """Count a write as pending until all who wait for the end that is returned have heard."""
        written = Future()
        with self._changed:
            self._pending[future] = num_bytes
        future.add_done_callback(partial(self._left, written, connection))
        return written

    def _left(self, written: Future, connection: Any, future: Future) -> None:
        error = concurrent.futures.CancelledError() if future.cancelled() else future.exception()
        if error is None:
            written.set_result(None)
        else:
            if self._is_lm:
                self._drop(connection)  # the server still waits for the rest of the object
            written.set_exception(error)
        with self._changed:
            self._pending.pop(future, None)
            self._changed.notify_all()

    def _has_written(self, deadline: float) -> bool:
        """Wait until nothing is on its way to a backend or the disk; False if that took longer."""
        with self._changed:
            left = max(0.0, deadline - time.monotonic())
            if not self._changed.wait_for(lambda: not self._pending, left):
                return False
        while self._is_writing_to_disk():
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.001)
        return True

    def _is_writing_to_disk(self) -> bool:
        backends = list(self._local_backends())
        for key in list(self._on_disk_soon):
            if not any(backend.exists_in_put_tasks(key) for backend in backends):
                self._on_disk_soon.discard(key)
        return bool(self._on_disk_soon)

    @property
    def _remote(self) -> Any:
        return self._manager.storage_backends.get(REMOTE)

    def _local_backends(self) -> Iterator[Any]:
        for name, backend in self._manager.get_active_storage_backends():
            if name != REMOTE:
                yield backend

    def _connection(self, deadline: float) -> Any:
        remote = self._remote

        def connect() -> None:
            if remote.connection is None:
                remote.init_connection()

        if remote.connection is None:
            # Not in the threads of those who wait for it, who may be all there are.
            self._connecting.call(connect, min(deadline, deadline_in(SOCKET_SECONDS)))
        connection = remote.connection
        if connection is None:
            raise ConnectionError(f"no connection to {self.settings.remote_url}")
        if self._is_lm:
            connection.getWrappedConnector().client_socket.settimeout(SOCKET_SECONDS)
        return connection

    def _drop(self, connection: Any) -> None:
        remote = self._remote
        if remote.connection is connection:
            remote.connection = None
            connection.getWrappedConnector().client_socket.close()

    def _require_open(self) -> None:
        if self._is_closed:
            raise ConnectionError("the store is closed")

    def _key(self, name: ObjectName) -> Any:
        """LMCache's key of an object; `lm://` takes keys of up to 150 characters."""
        first = _FIRST_HIDDEN_LAYER if name.kind is ObjectKind.HIDDEN else 0
        return self._utils.LayerCacheEngineKey(
            model_name=name.key.namespace,
            world_size=1,
            worker_id=0,
            chunk_hash=int(name.key.chunk_hash, 16),
            dtype=torch.uint8,
            layer_id=first + name.layer,
        )


def open_lmcache(address: str, chunk_tokens: int) -> LMCacheStore:
    """Open a store by its address; see `LMCacheSettings.parse`."""
    return LMCacheStore(LMCacheSettings.parse(address, chunk_tokens))


def _memory_bytes(num_bytes: int) -> int:
    return -(-num_bytes // _PAGE_BYTES) * _PAGE_BYTES


def _result(future: Future, deadline: float) -> Any:
    try:
        return future.result(max(0.0, deadline - time.monotonic()))
    except TimeoutError:
        if future.done():
            raise  # the call's own
        raise TimeoutError("LMCache did not answer by the deadline") from None
    finally:
        # An error's traceback holds this frame, and the future the error; with them goes the memory
        # that LMCache took for it. In a circle it would be given back by the garbage collector,
        # perhaps within LMCache's own lock, which then waits for itself.
        del future


def _release(future: Future) -> None:
    """Give back the memory of an object that nobody waits for any more."""
    if not future.cancelled() and future.exception() is None and future.result() is not None:
        future.result().ref_count_down()


_OPEN: set[LMCacheStore] = set()
_OPEN_LOCK = threading.Lock()
_WATCHING = threading.Event()


def _close_at_exit(store: LMCacheStore) -> None:
    """LMCache's threads are no daemons: an open store would keep the process alive.

    The thread that closes them is none either, so that the interpreter waits for it: it would
    otherwise end while LMCache's memory is being freed, and abort.
    """
    with _OPEN_LOCK:
        _OPEN.add(store)
        if _WATCHING.is_set():
            return
        _WATCHING.set()
    threading.Thread(target=_close_all_at_exit, name="droidkv-store-exit").start()


def _close_all_at_exit() -> None:
    # `atexit` would be too late: the interpreter joins all threads before it.
    threading.main_thread().join()
    for store in list(_OPEN):
        store.close()
