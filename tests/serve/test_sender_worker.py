"""What of a sender's chunks reaches the store, and what a store that fails costs the engine."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import pytest
import torch
from serve.fake_engine import FakePagedModel
from serve.faulty_store import FaultyStore
from tiny import NUM_LAYERS, VOCAB_SIZE, tiny_model
from torch import Tensor

from droidkv.serve.breaker import MOST_FAILURES, REST_SECONDS, Breaker
from droidkv.serve.connector_plan import SaveJob
from droidkv.serve.objects import ObjectName
from droidkv.serve.sender_worker import CHUNK_ENDS, ChunkEnd, SenderWorker
from droidkv.serve.store import MemoryStore

CHUNK, BLOCK = 8, 4
NAMESPACE = "a" * 64
TOKENS = torch.randint(3, VOCAB_SIZE, (40,), generator=torch.Generator().manual_seed(1)).tolist()
BLOCKS = (7, 2, 9, 0, 11, 5, 3, 8, 1, 4)
SENDER = tiny_model(seed=1)


def test_kv_is_never_stored_without_its_e() -> None:
    sender = FakePagedModel(SENDER, num_blocks=16, block_tokens=BLOCK)
    sender.hidden[2] = torch.full((64, sender.hidden_size), torch.nan)
    store = MemoryStore(CHUNK)
    worker = SenderWorker(sender, store, NAMESPACE, [2])
    worker.save([SaveJob("s", tuple(TOKENS[:16]), 0, BLOCKS)])
    worker.close()
    assert worker.counts()["without_hidden"] == 2
    assert store.stats().puts == 0


def test_a_store_that_refuses_does_not_stop_the_sender() -> None:
    class Full(MemoryStore):
        def _write(self, name: ObjectName, buffer: Tensor) -> None:
            raise OSError("no space left")

    sender = FakePagedModel(SENDER, num_blocks=16, block_tokens=BLOCK)
    worker = SenderWorker(sender, Full(CHUNK), NAMESPACE, [])
    worker.save([SaveJob("s", tuple(TOKENS[:16]), 0, BLOCKS)])
    worker.flush(10)
    worker.close()
    assert worker.counts()["failed"] == 2


def test_a_store_that_hangs_costs_the_sender_its_chunks_and_no_more() -> None:
    release, written = threading.Event(), list[ObjectName]()

    class Hanging(MemoryStore):
        def _write(self, name: ObjectName, buffer: Tensor) -> None:
            release.wait(60)
            written.append(name)
            if name.key.index == 1:
                raise OSError("no space left")

    sender = FakePagedModel(SENDER, num_blocks=16, block_tokens=BLOCK)
    worker = SenderWorker(sender, Hanging(CHUNK), NAMESPACE, [], most_pending=2, wait_seconds=0.01)
    worker.save([SaveJob("s", tuple(TOKENS[:32]), 0, BLOCKS)])  # returns although nothing leaves
    assert worker.counts()["failed"] == 2
    release.set()
    assert worker.flush(10)
    assert (worker.counts()["stored"], worker.counts()["failed"]) == (1, 3)
    # The second chunk was given up at its first failure.
    assert [name.key.index for name in written] == [0] * NUM_LAYERS + [1]
    worker.save([SaveJob("t", tuple(TOKENS[8:16]), 0, BLOCKS)])  # there is room again
    worker.close()
    assert (worker.counts()["stored"], worker.counts()["failed"]) == (2, 3)


def test_a_store_that_fails_again_and_again_is_not_asked_for_a_while() -> None:
    asked, is_down, now = list[ObjectName](), True, 1000.0

    class Down(MemoryStore):
        def _write(self, name: ObjectName, buffer: Tensor) -> None:
            asked.append(name)
            if is_down:
                raise ConnectionError("gone")

    def save(num_chunks: int) -> None:
        worker.save([SaveJob("s", tuple(TOKENS[: num_chunks * CHUNK]), 0, BLOCKS)])
        assert worker.flush(10)

    sender = FakePagedModel(SENDER, num_blocks=16, block_tokens=BLOCK)
    worker = SenderWorker(sender, Down(CHUNK), NAMESPACE, [])
    worker.puts = Breaker(clock=lambda: now)
    for _ in range(MOST_FAILURES):
        save(1)
    assert len(asked) == MOST_FAILURES
    save(4)
    assert len(asked) == MOST_FAILURES
    assert worker.new_counts() == dict.fromkeys(CHUNK_ENDS, 0) | {"failed": 3, "resting": 4}
    assert worker.puts.new_rests() == 1
    is_down = False
    now += REST_SECONDS
    save(1)  # the one that tries
    save(4)
    assert worker.new_counts() == dict.fromkeys(CHUNK_ENDS, 0) | {"stored": 5}
    assert worker.counts()["stored"] == 5
    worker.close()


class WritesLater(FaultyStore):
    """Takes everything at once; the test says what comes of it."""

    def __init__(self) -> None:
        super().__init__(MemoryStore(CHUNK))
        self.writing: list[Future[None]] = []

    def _write(self, name: ObjectName, buffer: Tensor) -> Future[None]:
        self.writing.append(Future())
        return self.writing[-1]


def lose(writing: Future[None]) -> None:
    writing.set_exception(ConnectionError("gone"))


def write(writing: Future[None]) -> None:
    writing.set_result(None)


def test_a_chunk_is_stored_when_its_last_object_is_written() -> None:
    store = WritesLater()
    worker = SenderWorker(
        FakePagedModel(SENDER, num_blocks=16, block_tokens=BLOCK), store, NAMESPACE, []
    )
    worker.save([SaveJob("s", tuple(TOKENS[:CHUNK]), 0, BLOCKS)])
    assert worker.flush(10)
    for writing in reversed(store.writing):
        assert worker.counts() == dict.fromkeys(CHUNK_ENDS, 0)
        write(writing)
    assert worker.counts() == dict.fromkeys(CHUNK_ENDS, 0) | {"stored": 1}
    worker.close()


@pytest.mark.parametrize("lost", [[0], [NUM_LAYERS - 1], range(NUM_LAYERS)])
def test_a_chunk_with_an_object_lost_after_it_was_taken_failed_once(lost: list[int]) -> None:
    store = WritesLater()
    worker = SenderWorker(
        FakePagedModel(SENDER, num_blocks=16, block_tokens=BLOCK), store, NAMESPACE, []
    )
    worker.save([SaveJob("s", tuple(TOKENS[:CHUNK]), 0, BLOCKS)])
    assert worker.flush(10)
    for i, writing in enumerate(store.writing):
        (lose if i in lost else write)(writing)
    assert worker.counts() == dict.fromkeys(CHUNK_ENDS, 0) | {"failed": 1}
    assert store.stats().put_failures == len(lost)
    worker.close()


def test_a_store_that_loses_what_it_took_is_not_asked_for_a_while() -> None:
    now = 1000.0

    def save(num_chunks: int, end: Callable[[Future[None]], None]) -> None:
        before = len(store.writing)
        worker.save([SaveJob("s", tuple(TOKENS[: num_chunks * CHUNK]), 0, BLOCKS)])
        assert worker.flush(10)
        for writing in store.writing[before:]:
            end(writing)

    store = WritesLater()
    worker = SenderWorker(
        FakePagedModel(SENDER, num_blocks=16, block_tokens=BLOCK), store, NAMESPACE, []
    )
    worker.puts = Breaker(clock=lambda: now)
    save(MOST_FAILURES, lose)
    asked = len(store.writing)
    save(4, write)
    assert len(store.writing) == asked
    assert worker.new_counts() == dict.fromkeys(CHUNK_ENDS, 0) | {"failed": 3, "resting": 4}
    assert worker.puts.new_rests() == 1
    now += REST_SECONDS
    save(4, lose)  # the first of them tries; taken is not written
    assert worker.new_counts() == dict.fromkeys(CHUNK_ENDS, 0) | {"failed": 1, "resting": 3}
    now += REST_SECONDS
    assert worker.puts.is_resting()
    now += REST_SECONDS
    save(1, write)
    save(4, write)
    assert worker.new_counts() == dict.fromkeys(CHUNK_ENDS, 0) | {"stored": 5}
    worker.close()


def test_nothing_is_put_behind_an_object_that_is_lost() -> None:
    class LosesAtOnce(WritesLater):
        def _write(self, name: ObjectName, buffer: Tensor) -> Future[None]:
            writing = super()._write(name, buffer)
            lose(writing)
            return writing

    store = LosesAtOnce()
    worker = SenderWorker(
        FakePagedModel(SENDER, num_blocks=16, block_tokens=BLOCK), store, NAMESPACE, []
    )
    worker.save([SaveJob("s", tuple(TOKENS[:CHUNK]), 0, BLOCKS)])
    assert worker.flush(10)
    assert len(store.writing) == 1
    worker.close()


def test_what_the_store_holds_is_not_stored_twice() -> None:
    written = list[ObjectName]()

    class Noting(MemoryStore):
        def _write(self, name: ObjectName, buffer: Tensor) -> None:
            written.append(name)
            super()._write(name, buffer)

    store = Noting(CHUNK)

    def restarted(overwrite: bool = False) -> dict[ChunkEnd, int]:
        written.clear()
        sender = FakePagedModel(SENDER, num_blocks=16, block_tokens=BLOCK)
        sender.hidden[2] = torch.zeros(64, sender.hidden_size)
        worker = SenderWorker(sender, store, NAMESPACE, [2])
        worker.save([SaveJob("s", tuple(TOKENS[:16]), 0, BLOCKS, overwrite)])
        worker.close()
        return {end: count for end, count in worker.counts().items() if count}

    assert restarted() == {"stored": 2}
    objects = list(written)
    assert len(objects) == 2 * (NUM_LAYERS + 1)
    assert restarted() == {"present": 2}
    assert not written
    for gone in objects[: NUM_LAYERS + 1]:  # any of them, for a receiver needs all
        store._forget(gone)
        assert restarted() == {"stored": 1, "present": 1}
        assert written == objects[: NUM_LAYERS + 1]
    assert restarted(overwrite=True) == {"stored": 2}
    assert written == objects


def test_a_store_that_is_read_only_is_not_asked_again_for_what_it_holds() -> None:
    is_read_only = False

    class Full(MemoryStore):
        def _write(self, name: ObjectName, buffer: Tensor) -> None:
            if is_read_only:
                raise OSError("no space left")
            super()._write(name, buffer)

    sender = FakePagedModel(SENDER, num_blocks=16, block_tokens=BLOCK)
    worker = SenderWorker(sender, Full(CHUNK), NAMESPACE, [])
    for fresh in range(MOST_FAILURES + 1):  # the first chunk is stored, and there each time after
        prompt = TOKENS[:CHUNK] + [fresh + 3] * CHUNK
        worker.save([SaveJob("s", tuple(prompt), 0, BLOCKS)])
        assert worker.flush(10)
        is_read_only = True
    assert worker.puts.is_resting()
    assert worker.counts()["present"] == worker.counts()["failed"] == MOST_FAILURES
    worker.close()


def test_a_store_that_does_not_say_what_it_holds_has_failed() -> None:
    class Deaf(MemoryStore):
        def _count_leading(self, names: Sequence[ObjectName], deadline: float) -> int:
            raise ConnectionError("gone")

    sender = FakePagedModel(SENDER, num_blocks=16, block_tokens=BLOCK)
    store = Deaf(CHUNK)
    worker = SenderWorker(sender, store, NAMESPACE, [])
    worker.save([SaveJob("s", tuple(TOKENS[:16]), 0, BLOCKS)])
    worker.close()
    assert (worker.counts()["failed"], store.stats().puts) == (2, 0)


def test_nothing_is_stored_from_a_step_on_that_ran_the_base_through_an_adapter() -> None:
    sender = FakePagedModel(SENDER, num_blocks=16, block_tokens=BLOCK)
    store = MemoryStore(CHUNK)
    worker = SenderWorker(sender, store, NAMESPACE, [])
    worker.save([SaveJob("s", tuple(TOKENS[:8]), 0, BLOCKS)])
    sender.is_mixed = True
    worker.save([])  # it completed no chunk, but what it computed may be in one that comes later
    sender.is_mixed = False
    worker.save([SaveJob("s", tuple(TOKENS[:32]), 1, BLOCKS)])
    worker.close()
    assert (worker.counts()["stored"], worker.counts()["mixed_adapters"]) == (1, 3)
    assert store.stats().puts == NUM_LAYERS


def test_nothing_of_a_model_that_was_updated_is_stored() -> None:
    sender = FakePagedModel(SENDER, num_blocks=16, block_tokens=BLOCK)
    store = MemoryStore(CHUNK)
    worker = SenderWorker(sender, store, NAMESPACE, [])
    worker.save([SaveJob("s", tuple(TOKENS[:16]), 0, BLOCKS)])
    assert worker.flush(10)
    puts = store.stats().puts
    sender.is_updated = True
    worker.save([SaveJob("s", tuple(TOKENS[:32]), 2, BLOCKS)])
    worker.close()
    assert (worker.counts()["stored"], worker.counts()["weights_changed"]) == (2, 2)
    assert store.stats().puts == puts == 2 * NUM_LAYERS
