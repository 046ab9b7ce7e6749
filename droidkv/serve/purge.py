"""Remove all that one sender stored, where the backend can list what it holds."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from urllib.parse import urlsplit

from droidkv.errors import ServeError, StorageError, require_extra
from droidkv.serve.lmcache_settings import WRITING_PREFIX, LMCacheSettings

_BATCH = 500
_DIGEST = re.compile(r"[0-9a-f]{64}")


def purge(address: str, namespace: str) -> int:
    """Remove a namespace's objects from a store that processes share.

    Copies in the memory of running servers stay until these end; they are of the same weights, so
    they are right, and only their room is lost.

    Args:
        address: `fs:///FOLDER`, `redis://...`, `rediss://...` or `unix:///...`.
        namespace: See `droidkv.serve.keys.namespace_digest`.

    Returns:
        How many files or keys were removed.

    Raises:
        ServeError: The backend cannot list what it holds, or the namespace is none.
        StorageError: It is not there, cannot be reached or written, or the address is wrong.
    """
    if not _DIGEST.fullmatch(namespace):
        raise ServeError(f"expected a namespace of 64 hexadecimal digits, got {namespace!r}")
    scheme = urlsplit(address).scheme
    if scheme == "fs":
        LMCacheSettings.parse(address, chunk_tokens=1)
        return _purge_folder(Path(urlsplit(address).path), namespace)
    if scheme in ("redis", "rediss", "unix"):
        return _purge_redis(address, namespace)
    if scheme == "lm":
        raise ServeError(
            "expected a store that lists its objects, got lm://, whose server has no call for it; "
            "restart the server to empty it. What another model stored is never read as this "
            "one's either way"
        )
    raise ServeError(
        f"expected a store outside of its servers' processes (fs, redis, rediss, unix), got "
        f"{address!r}; objects in a server's memory go when it ends"
    )


def remove_store(folder: Path) -> None:
    """Remove the folder of an `fs://` store, if it is there.

    Raises:
        StorageError: Something in it is no store's; nothing was removed.
    """
    for path in folder.iterdir() if folder.is_dir() else ():
        if not (path.name.startswith(WRITING_PREFIX) or _DIGEST.match(path.name)):
            raise StorageError(
                f"expected a store to remove at {folder}, but it holds {path.name!r}, which no "
                "store wrote; choose another folder"
            )
    shutil.rmtree(folder, ignore_errors=True)


def _purge_folder(folder: Path, namespace: str) -> int:
    if not folder.is_dir():
        raise StorageError(
            f"expected the folder of a store, but there is none at {folder}; give the address that "
            "its sender was given"
        )
    removed = 0
    try:
        # What lies in folders of their own is half written, perhaps by a process that was killed.
        for pattern in (f"{namespace}@*", f"{WRITING_PREFIX}*/{namespace}@*"):
            for path in folder.glob(pattern):
                path.unlink(missing_ok=True)
                removed += 1
    except OSError as cause:
        raise StorageError(f"expected to remove files in {folder}, but: {cause}") from cause
    return removed


def _purge_redis(address: str, namespace: str) -> int:
    redis = require_extra("redis", "store")
    url = LMCacheSettings.parse(address, chunk_tokens=1).lmcache_url
    removed = 0
    try:
        with redis.Redis.from_url(url) as client:
            batch = []
            for key in client.scan_iter(match=f"{namespace}@*", count=_BATCH):
                batch.append(key)
                if len(batch) == _BATCH:
                    removed += client.unlink(*batch)
                    batch = []
            removed += client.unlink(*batch) if batch else 0
    except (redis.RedisError, OSError) as cause:
        raise StorageError(f"expected {address} to answer, but: {cause}; is it running?") from cause
    return removed
