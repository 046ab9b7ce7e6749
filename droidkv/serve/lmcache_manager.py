"""LMCache's storage manager: started as droidkv needs it, mended where it would hang or leak."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any
from uuid import uuid4

import torch

from droidkv.errors import require_extra
from droidkv.serve.lmcache_settings import WRITING_PREFIX, LMCacheSettings

MEMORY, DISK, REMOTE = "LocalCPUBackend", "LocalDiskBackend", "RemoteBackend"


def start_manager(settings: LMCacheSettings, on_no_room: Callable[[], None]) -> Any:
    """A storage manager with the tiers and the backend of these settings.

    Args:
        settings: What it is to have.
        on_no_room: Called whenever its memory is too full for an object.

    Raises:
        MissingExtraError: lmcache is not installed.
        OSError, RuntimeError, ValueError, AssertionError: What LMCache raises where it cannot be
            started.
    """
    config_module = require_extra("lmcache.v1.config", "store")
    metadata_module = require_extra("lmcache.v1.metadata", "store")
    events_module = require_extra("lmcache.v1.event_manager", "store")
    manager_module = require_extra("lmcache.v1.storage_backend.storage_manager", "store")
    extra: dict[str, Any] = {"save_chunk_meta": True}
    if settings.scheme == "fs":
        # By itself it would write where others write the same object, and mix the two.
        extra["fs_connector_relative_tmp_dir"] = f"{WRITING_PREFIX}{uuid4().hex}"
    config = config_module.LMCacheEngineConfig.from_defaults(
        chunk_size=settings.chunk_tokens,
        local_cpu=settings.keep_local,
        max_local_cpu_size=settings.max_local_cpu_gib,
        local_disk=None if settings.local_disk is None else f"{settings.local_disk}/",
        max_local_disk_size=settings.max_local_disk_gib,
        remote_url=settings.lmcache_url,
        remote_serde="naive",
        use_layerwise=True,
        extra_config=extra,
    )
    metadata = metadata_module.LMCacheMetadata(
        model_name="droidkv",
        world_size=1,
        local_world_size=1,
        worker_id=0,
        local_worker_id=0,
        kv_dtype=torch.uint8,
        kv_shape=(1, 2, settings.chunk_tokens, 1, 1),
        chunk_size=settings.chunk_tokens,
    )
    manager = manager_module.StorageManager(config, metadata, events_module.EventManager())
    # Its clients allocate on the event loop, and would spin there for ever where memory is full.
    memory = manager.local_cpu_backend
    memory.allocate = partial(_allocate, memory.allocate, on_no_room)
    disk = manager.storage_backends.get(DISK)
    if disk is not None:
        disk.async_save_bytes_to_disk = partial(_save, disk, disk.async_save_bytes_to_disk)
    return manager


def _allocate(allocate: Any, on_no_room: Callable[[], None], *args: Any, **options: Any) -> Any:
    memory = allocate(*args, **{**options, "busy_loop": False})
    if memory is None:
        on_no_room()
    return memory


def _save(disk: Any, save: Any, key: Any, memory_obj: Any, **options: Any) -> None:
    """LMCache's write to disk, which keeps an object in memory for ever if the disk fails it."""
    try:
        save(key=key, memory_obj=memory_obj, **options)
    except OSError:
        with disk.disk_lock:
            disk.current_cache_size -= memory_obj.get_physical_size()
        memory_obj.ref_count_down()
        disk.disk_worker.remove_put_task(key)
        raise


def close_manager(manager: Any, keep_memory: bool = False) -> None:
    """Close it; may wait for a backend that does not answer.

    Args:
        manager: What `start_manager` gave.
        keep_memory: Never free its memory, since somebody may still read or write there, which
            would take the process down.
    """
    remote = manager.storage_backends.get(REMOTE)
    client: Any = None
    if remote is not None and remote.connection is not None:
        client = remote.connection.getWrappedConnector()
        executor = getattr(client, "pq_executor", None)
        if executor is not None and not inspect.iscoroutinefunction(executor.shutdown):
            # LMCache awaits the blocking one on the loop that it waits for.
            executor.shutdown = executor.shutdown_async
    if keep_memory:
        manager.local_cpu_backend.memory_allocator.close = lambda: None
    manager.close()
    if (written_in := getattr(client, "relative_tmp_dir", None)) is not None:
        for folder in client.base_paths:
            with suppress(OSError):  # what was being written stays
                (folder / written_in).rmdir()
