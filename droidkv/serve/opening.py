"""From the address of a store to the store."""

from __future__ import annotations

import threading
from importlib import import_module
from urllib.parse import urlsplit

from droidkv.errors import ServeError, unknown_name
from droidkv.serve.store import MemoryStore, Store

# Schemes of LMCache's storage manager, which is imported only where one is asked for.
LMCACHE_SCHEMES = ("fs", "redis", "lm", "local")

_memory: dict[str, MemoryStore] = {}
_memory_lock = threading.Lock()


def open_store(address: str, chunk_tokens: int) -> Store:
    """Open a store by its address.

    Args:
        address: `memory://NAME` (one per name in this process), or one of LMCache's:
            `fs:///FOLDER`, `redis://HOST:PORT`, `lm://HOST:PORT`.
        chunk_tokens: Tokens in one chunk.

    Raises:
        ServeError: There is no such kind of store, or it is open with another chunk size.
    """
    scheme = urlsplit(address).scheme
    if scheme == "memory":
        with _memory_lock:
            store = _memory.setdefault(address, MemoryStore(chunk_tokens))
        if store.chunk_tokens != chunk_tokens:
            raise ServeError(
                f"expected {address} to be opened with its {store.chunk_tokens} tokens per chunk, "
                f"got {chunk_tokens}; sender and receiver need the same chunk_tokens"
            )
        return store
    if scheme in LMCACHE_SCHEMES:
        opened: Store = import_module("droidkv.serve.lmcache_store").open_lmcache(
            address, chunk_tokens
        )
        return opened
    raise ServeError(unknown_name("kind of store", scheme, ("memory", *LMCACHE_SCHEMES)))
