"""From the address of a store to the store, opened once in a process."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from importlib import import_module
from urllib.parse import urlsplit

from droidkv.content import cache_folder
from droidkv.errors import ServeError, unknown_name
from droidkv.serve.lmcache_settings import LMCacheSettings
from droidkv.serve.store import MemoryStore, Store

# Schemes of LMCache's storage manager, which is imported only where one is asked for.
LMCACHE_SCHEMES = ("fs", "local", "lm", "redis", "rediss", "unix")


@dataclass
class _Opened:
    store: Store
    num_users: int = 0


_opened: dict[str, _Opened] = {}
_lock = threading.Lock()


def default_store() -> str:
    """Address of the store that one user's processes on one machine share unless told otherwise."""
    return f"fs://{cache_folder().absolute() / 'store'}"


def lend_store(address: str, store: Store) -> None:
    """Let connectors of this process use a store that the caller made, and closes himself.

    Args:
        address: `memory://NAME`, of a name that was not used before.
        store: The store.

    Raises:
        ServeError: The name is taken, or no name for a store of this process.
    """
    with _lock:
        if urlsplit(address).scheme != "memory" or address in _opened:
            raise ServeError(f"expected a new memory://NAME, got {address!r}; choose another name")
        _opened[address] = _Opened(store, num_users=1)


def check_address(address: str) -> None:
    """Refuse what no store has for an address, without opening one.

    Raises:
        ServeError: There is no such kind of store.
        StorageError: The rest of the address, or an option, is wrong.
    """
    scheme = urlsplit(address).scheme
    if scheme in LMCACHE_SCHEMES:
        LMCacheSettings.parse(address, chunk_tokens=1)
    elif scheme != "memory":
        raise ServeError(unknown_name("kind of store", scheme, ("memory", *LMCACHE_SCHEMES)))


def open_store(address: str, chunk_tokens: int) -> Store:
    """Open a store by its address; a scheduler and a worker in one process share it.

    Args:
        address: `memory://NAME`, which lives as long as the process, or one of LMCache's, such as
            `fs:///FOLDER`, `redis://HOST:PORT`, `lm://HOST:PORT`; see `LMCacheSettings.parse`.
        chunk_tokens: Tokens in one chunk.

    Raises:
        ServeError: There is no such kind of store, or it is open with another chunk size.
        StorageError: An option of the address is wrong.
    """
    with _lock:
        if address not in _opened:
            _opened[address] = _Opened(_open(address, chunk_tokens))
        opened = _opened[address]
        if opened.store.chunk_tokens != chunk_tokens:
            raise ServeError(
                f"expected {address} to be opened with its {opened.store.chunk_tokens} tokens per "
                f"chunk, got {chunk_tokens}; sender and receiver need the same chunk_tokens"
            )
        opened.num_users += 1
        return opened.store


def release_store(address: str) -> None:
    """One of those who opened a store needs it no more; the last one closes it."""
    with _lock:
        opened = _opened.get(address)
        if opened is None or isinstance(opened.store, MemoryStore):
            return
        opened.num_users -= 1
        if opened.num_users == 0:
            _opened.pop(address).store.close()


def _open(address: str, chunk_tokens: int) -> Store:
    check_address(address)
    if urlsplit(address).scheme == "memory":
        return MemoryStore(chunk_tokens)
    module = import_module("droidkv.serve.lmcache_store")
    store: Store = module.open_lmcache(address, chunk_tokens)
    return store
