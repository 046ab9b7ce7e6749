from __future__ import annotations

import time

import pytest
import torch

from droidkv.errors import ServeError
from droidkv.serve.keys import chunk_keys
from droidkv.serve.objects import MissReason, StoreMiss
from droidkv.serve.opening import lend_store, open_store, release_store
from droidkv.serve.store import MemoryStore, deadline_in
from droidkv.serve.throttled import ThrottledStore, TokenBucket

(KEY,) = chunk_keys("a" * 64, [1, 2, 3, 4], 4)
HIDDEN = torch.arange(32.0).reshape(4, 8)


def test_a_bucket_lets_its_bandwidth_through_and_no_more() -> None:
    bucket = TokenBucket(100.0)
    assert bucket.reserve(50, now=10.0) == 10.5
    # Whoever comes while it is busy queues up behind.
    assert bucket.reserve(100, now=10.1) == 11.5
    # A pause is lost: nothing was saved up.
    assert bucket.reserve(100, now=20.0) == 21.0


def test_a_burst_passes_at_once_after_a_pause() -> None:
    bucket = TokenBucket(100.0, burst_bytes=50)
    assert bucket.reserve(50, now=10.0) == 10.0
    assert bucket.reserve(50, now=10.0) == 10.5
    assert bucket.reserve(150, now=100.0) == 101.0


@pytest.mark.parametrize(("bandwidth", "burst"), [(0.0, 0.0), (-1.0, 0.0), (1.0, -1.0)])
def test_an_impossible_link_is_refused(bandwidth: float, burst: float) -> None:
    with pytest.raises(ServeError, match="bandwidth"):
        TokenBucket(bandwidth, burst)


@pytest.fixture
def store() -> ThrottledStore:
    inner = MemoryStore(4)
    inner.put_hidden(KEY, 0, HIDDEN)
    return ThrottledStore(lambda: inner, 4)


def test_what_comes_over_the_link_is_whole_and_not_too_early(store: ThrottledStore) -> None:
    assert torch.equal(store.get_hidden(KEY, 0, deadline_in(600)), HIDDEN)
    store.limit(1000.0)
    began = time.monotonic()
    assert torch.equal(store.get_hidden(KEY, 0, deadline_in(600)), HIDDEN)
    assert time.monotonic() - began >= HIDDEN.nbytes / 1000.0


def test_a_link_too_slow_for_the_deadline_is_a_timeout(store: ThrottledStore) -> None:
    store.limit(0.001)
    with pytest.raises(StoreMiss) as missed:
        store.get_hidden(KEY, 0, deadline_in(0.2))
    assert missed.value.reason == MissReason.TIMEOUT
    assert store.contains_hidden(KEY, [0], deadline_in(600))  # looking up is not slowed down


def test_the_store_behind_is_opened_at_the_first_use() -> None:
    opened: list[MemoryStore] = []

    def open_it() -> MemoryStore:
        opened.append(MemoryStore(4))
        return opened[-1]

    store = ThrottledStore(open_it, 4)
    store.close()
    assert opened == []
    store.put_hidden(KEY, 0, HIDDEN)
    store.get_hidden(KEY, 0, deadline_in(600))
    assert len(opened) == 1


def test_a_lent_store_is_what_connectors_open(store: ThrottledStore) -> None:
    address = "memory://test-a-lent-store"
    lend_store(address, store)
    assert open_store(address, 4) is store
    release_store(address)
    assert open_store(address, 4) is store
    with pytest.raises(ServeError, match="new memory"):
        lend_store(address, store)
    with pytest.raises(ServeError, match="new memory"):
        lend_store("fs:///folder", store)
