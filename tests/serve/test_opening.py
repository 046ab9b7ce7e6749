from __future__ import annotations

import pytest

from droidkv.errors import ServeError
from droidkv.serve import opening
from droidkv.serve.opening import open_store, release_store
from droidkv.serve.store import MemoryStore, Store


def test_a_memory_store_is_one_per_name_and_outlives_its_users() -> None:
    store = open_store("memory://opening-a", 8)
    assert open_store("memory://opening-a", 8) is store
    assert open_store("memory://opening-b", 8) is not store
    release_store("memory://opening-a")
    release_store("memory://opening-a")
    assert open_store("memory://opening-a", 8) is store


def test_sender_and_receiver_need_one_chunk_size() -> None:
    open_store("memory://opening-c", 8)
    with pytest.raises(ServeError, match="8 tokens per chunk, got 16"):
        open_store("memory://opening-c", 16)


def test_the_last_user_closes_a_store(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[Store] = []

    class Remote:
        chunk_tokens = 8

        def close(self) -> None:
            closed.append(self)  # type: ignore[arg-type]

    monkeypatch.setattr(opening, "_open", lambda address, chunk_tokens: Remote())
    first, second = open_store("fs:///x", 8), open_store("fs:///x", 8)
    assert first is second
    release_store("fs:///x")
    assert closed == []
    release_store("fs:///x")
    assert closed == [first]
    release_store("fs:///x")
    assert closed == [first]


def test_an_unknown_kind_is_named() -> None:
    with pytest.raises(ServeError, match="memory"):
        open_store("memry://x", 8)
    assert isinstance(open_store("memory://opening-d", 8), MemoryStore)
