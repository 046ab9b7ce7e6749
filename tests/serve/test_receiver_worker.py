"""A receiver's worker over a fake engine builds the mixed cache that `partial_prefill` builds."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from serve.fake_engine import FakePagedModel
from tiny import NUM_LAYERS, VOCAB_SIZE, tiny_model
from torch import Tensor

from droidkv.cache import CapturedCache
from droidkv.capture import capture
from droidkv.plan import ReusePlan
from droidkv.prefill import partial_prefill
from droidkv.serve import load
from droidkv.serve.connector_plan import LOAD_ORDERS, Fallback, LoadJob, LoadOrder, SaveJob
from droidkv.serve.objects import MissReason, ObjectName, StoreMiss
from droidkv.serve.receiver_worker import ReceiverWorker, StepResult
from droidkv.serve.sender_worker import SenderWorker
from droidkv.serve.store import MemoryStore, Store, chunk_keys
from droidkv.stitch import StitchMap, fit_stitch

CHUNK, BLOCK = 8, 4
SLOW = 600.0  # seconds that no load here takes, however busy the machine
NAMESPACE = "a" * 64
TOKENS = torch.randint(3, VOCAB_SIZE, (40,), generator=torch.Generator().manual_seed(1)).tolist()
BLOCKS = (7, 2, 9, 0, 11, 5, 3, 8, 1, 4)
WorkerOf = Callable[..., ReceiverWorker]
PLANS = ["none", "[0,2)", "[2,4)", "[4,6)", "[3,4)", "all"]

SENDER = tiny_model(seed=1)
RECEIVER = tiny_model(seed=1, noise=0.05)


class FaultyStore(MemoryStore):
    """A store whose reads may be slow, fail, or give something else."""

    def __init__(self, chunk_tokens: int) -> None:
        super().__init__(chunk_tokens)
        self.fault: Callable[[ObjectName, Tensor | None], Tensor | None] | None = None

    def _read(
        self, names: Sequence[ObjectName], deadline: float, lent: ExitStack
    ) -> list[Tensor | None]:
        found = super()._read(names, deadline, lent)
        if self.fault is None:
            return found
        return [self.fault(name, each) for name, each in zip(names, found, strict=True)]


def captured(num_tokens: int) -> CapturedCache:
    return capture(SENDER, torch.tensor([TOKENS[:num_tokens]]), hidden_layers=range(NUM_LAYERS))


@pytest.fixture
def store() -> FaultyStore:
    store = FaultyStore(CHUNK)
    cache = captured(len(TOKENS))
    for key in chunk_keys(NAMESPACE, TOKENS, CHUNK):
        part = slice(key.index * CHUNK, (key.index + 1) * CHUNK)
        for layer in range(NUM_LAYERS):
            store.put_kv(key, layer, cache.keys[layer][0, :, part], cache.values[layer][0, :, part])
            store.put_hidden(key, layer, cache.hidden[layer][0, part])
    return store


@pytest.fixture
def engine() -> FakePagedModel:
    return FakePagedModel(RECEIVER, num_blocks=16, block_tokens=BLOCK)


@pytest.fixture
def worker_of() -> Iterator[WorkerOf]:
    """Makes workers, which are closed afterwards."""
    made: list[ReceiverWorker] = []

    def make(engine: FakePagedModel, store: Store, **settings: Any) -> ReceiverWorker:
        made.append(ReceiverWorker(engine, store, NAMESPACE, **settings))
        return made[-1]

    yield make
    for worker in made:
        worker.close()


def job(plan: str, stop: int = 32, start: int = 0, waits: bool = False) -> LoadJob:
    return LoadJob(
        "r", ReusePlan.parse(plan, NUM_LAYERS), tuple(TOKENS[:stop]), start, BLOCKS, waits
    )


def steps_until_over(worker: ReceiverWorker) -> StepResult:
    """Step on as an idle engine does, until a load is over."""
    deadline = time.monotonic() + SLOW
    while time.monotonic() < deadline:
        result = worker.end_step(is_idle=True)
        if result.reports:
            return result
        worker.start([])
    raise AssertionError("the load was never over")


def assert_mixed(engine: FakePagedModel, done: LoadJob, stitch: StitchMap | None = None) -> None:
    ids = torch.tensor([list(done.token_ids)])
    context = partial_prefill(RECEIVER, ids, captured(done.stop), done.plan, stitch)
    slots = torch.tensor(
        [BLOCKS[t // BLOCK] * BLOCK + t % BLOCK for t in range(done.start, done.stop)]
    )
    for layer in range(NUM_LAYERS):
        keys, values = context.cache.layer(layer)
        torch.testing.assert_close(
            engine.keys[layer][:, slots], keys[0, :, done.start :], atol=1e-5, rtol=1e-5
        )
        torch.testing.assert_close(
            engine.values[layer][:, slots], values[0, :, done.start :], atol=1e-5, rtol=1e-5
        )


@pytest.mark.parametrize("order", LOAD_ORDERS)
@pytest.mark.parametrize("plan", PLANS)
def test_a_load_builds_the_mixed_cache(
    plan: str,
    order: LoadOrder,
    store: FaultyStore,
    engine: FakePagedModel,
    worker_of: WorkerOf,
) -> None:
    worker = worker_of(engine, store, order=order, load_seconds=SLOW)
    worker.start([job(plan)])
    for layer in range(NUM_LAYERS):
        worker.wait_for_layer(layer)
    result = worker.end_step()
    assert result.invalid_block_ids == set()
    assert result.reports["r"].reason is None
    assert_mixed(engine, job(plan))


def test_a_partly_local_prefix_is_completed(
    store: FaultyStore, engine: FakePagedModel, worker_of: WorkerOf
) -> None:
    worker = worker_of(engine, store, load_seconds=SLOW)
    worker.start([job("[2,4)", stop=16)])
    worker.end_step()
    worker.start([job("[2,4)", stop=32, start=12)])  # neither chunk- nor request-aligned
    worker.end_step()
    # In one piece or two, as E arrives.
    assert engine.recomputed[0][0] == 0
    assert [stop for _, stop in engine.recomputed if stop in (16, 32)] == [16, 32]
    assert 12 in [start for start, _ in engine.recomputed]
    assert_mixed(engine, job("[2,4)"))


def test_a_waiting_request_is_recomputed_within_the_budget(
    store: FaultyStore, engine: FakePagedModel, worker_of: WorkerOf
) -> None:
    worker = worker_of(engine, store, load_seconds=SLOW, tokens_per_step=10)
    worker.start([job("[2,5)", waits=True)])
    result = steps_until_over(worker)
    assert result.finished == {"r"} and result.failed == set()
    borders = [start for start, _ in engine.recomputed]
    assert engine.recomputed == list(pairwise([*borders, 32]))
    assert all(stop - start <= 10 for start, stop in engine.recomputed)
    assert result.reports["r"].recomputed_tokens == 32
    assert_mixed(engine, job("[2,5)"))


def test_a_stitched_plan_maps_e_first(
    store: FaultyStore, engine: FakePagedModel, worker_of: WorkerOf
) -> None:
    stitch = fit_stitch(SENDER, RECEIVER, [TOKENS], rank=4)
    worker = worker_of(engine, store, load_seconds=SLOW, stitch=stitch)
    worker.start([job("[2,4)+stitch")])
    worker.end_step()
    assert_mixed(engine, job("[2,4)+stitch"), stitch)


def test_bytes_are_counted(store: FaultyStore, engine: FakePagedModel, worker_of: WorkerOf) -> None:
    worker = worker_of(engine, store, load_seconds=SLOW)
    worker.start([job("[2,4)")])
    report = worker.end_step().reports["r"]
    kv = 2 * engine.kv_shape[0] * engine.kv_shape[1] * 32 * 4
    assert report.loaded_bytes == (NUM_LAYERS - 2) * kv + 32 * engine.hidden_size * 4
    assert report.recomputed_tokens == 32


def absent(name: ObjectName, found: Tensor | None) -> Tensor | None:
    return None


def short(name: ObjectName, found: Tensor | None) -> Tensor | None:
    return None if found is None else found[: found.numel() // 2].clone()


def corrupt(name: ObjectName, found: Tensor | None) -> Tensor | None:
    assert found is not None
    found[-1] ^= 1
    return found


def down(name: ObjectName, found: Tensor | None) -> Tensor | None:
    raise ConnectionError("gone")


def timed_out(name: ObjectName, found: Tensor | None) -> Tensor | None:
    raise StoreMiss(MissReason.TIMEOUT, "slow")


FAULTS = [
    (absent, Fallback.LOAD_ABSENT),
    (short, Fallback.LOAD_SHORT),
    (corrupt, Fallback.LOAD_CORRUPT),
    (down, Fallback.LOAD_BACKEND_DOWN),
    (timed_out, Fallback.LOAD_TIMEOUT),
]


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("which", ["hidden", "kv"])
@pytest.mark.parametrize(("fault", "reason"), FAULTS)
def test_any_fault_gives_the_request_back(
    fault: Callable[[ObjectName, Tensor | None], Tensor | None],
    reason: Fallback,
    which: str,
    waits: bool,
    store: FaultyStore,
    engine: FakePagedModel,
    worker_of: WorkerOf,
) -> None:
    last = len(TOKENS) // CHUNK - 2

    def one(name: ObjectName, found: Tensor | None) -> Tensor | None:
        hit = name.kind == which and name.key.index == last and name.layer in (2, 5)
        return fault(name, found) if hit else found

    store.fault = one
    worker = worker_of(engine, store, load_seconds=SLOW)
    worker.start([job("[2,4)", waits=waits)])
    if waits:
        result = steps_until_over(worker)
        assert result.finished == result.failed == {"r"}
        assert result.invalid_block_ids == set()
    else:
        for layer in range(NUM_LAYERS):
            worker.wait_for_layer(layer)
        result = worker.end_step()
        assert result.invalid_block_ids == set(BLOCKS[: 32 // BLOCK])
    assert result.reports["r"].reason == reason


@pytest.mark.parametrize("waits", [False, True])
def test_a_store_that_hangs_is_left_at_the_deadline_and_writes_no_more(
    waits: bool, store: FaultyStore, engine: FakePagedModel, worker_of: WorkerOf
) -> None:
    release = threading.Event()

    def hang(name: ObjectName, found: Tensor | None) -> Tensor | None:
        if name.kind == "kv" and name.layer == 4:
            release.wait(20)
        return found

    store.fault = hang
    worker = worker_of(engine, store, load_seconds=0.3)
    began = time.monotonic()
    worker.start([job("[2,4)", waits=waits)])
    result = steps_until_over(worker)
    assert time.monotonic() - began < 20  # when the store would let go
    assert result.reports["r"].reason == Fallback.LOAD_TIMEOUT
    assert result.reports["r"].load_seconds > 0.2  # the deadline was set a moment before
    before = engine.keys.clone()
    release.set()
    time.sleep(0.2)
    assert torch.equal(engine.keys.nan_to_num(), before.nan_to_num())


def test_what_is_there_already_may_be_recomputed_past_the_deadline(
    store: FaultyStore, engine: FakePagedModel, worker_of: WorkerOf
) -> None:
    worker = worker_of(engine, store, load_seconds=SLOW, tokens_per_step=10)
    worker.start([job("[2,5)", waits=True)])
    load = worker._waiting["r"]
    assert load._done.wait(SLOW)
    load._deadline = time.monotonic() - 1
    assert steps_until_over(worker).reports["r"].reason is None
    assert_mixed(engine, job("[2,5)"))


def test_another_models_shape_is_refused(
    store: FaultyStore, engine: FakePagedModel, worker_of: WorkerOf
) -> None:
    engine.kv_shape = (engine.kv_shape[0] + 1, engine.kv_shape[1])
    worker = worker_of(engine, store, load_seconds=SLOW)
    worker.start([job("none")])
    assert worker.end_step().reports["r"].reason == Fallback.LOAD_WRONG_SHAPE


def test_a_failing_recompute_gives_the_request_back(
    store: FaultyStore,
    engine: FakePagedModel,
    worker_of: WorkerOf,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(engine, "recompute", broken)
    worker = worker_of(engine, store, load_seconds=SLOW)
    worker.start([job("[2,4)")])
    assert worker.end_step().reports["r"].reason == Fallback.RECOMPUTE_FAILED


def test_an_aborted_request_is_let_go(
    store: FaultyStore, engine: FakePagedModel, worker_of: WorkerOf
) -> None:
    release = threading.Event()

    def hang(name: ObjectName, found: Tensor | None) -> Tensor | None:
        release.wait(20)
        return found

    store.fault = hang
    worker = worker_of(engine, store, load_seconds=SLOW)
    worker.start([job("none", waits=True)])
    worker.end_step()
    worker.start([], dropped=["r"])
    result = worker.end_step()
    release.set()
    assert result.finished == {"r"}  # vLLM frees its blocks only then
    assert result.reports["r"].reason == Fallback.ABORTED


def test_a_refused_request_is_told_that_its_load_failed_once(
    engine: FakePagedModel, store: FaultyStore, worker_of: WorkerOf
) -> None:
    worker = worker_of(engine, store)
    worker.start([], refused=["r"])
    assert worker.end_step() == StepResult(finished={"r"}, failed={"r"})
    worker.start([])
    assert worker.end_step() == StepResult()


def test_a_sender_stores_what_a_receiver_can_load(worker_of: WorkerOf) -> None:
    cache = captured(len(TOKENS))
    sender = FakePagedModel(SENDER, num_blocks=16, block_tokens=BLOCK)
    slots = torch.tensor([BLOCKS[t // BLOCK] * BLOCK + t % BLOCK for t in range(len(TOKENS))])
    for layer in range(NUM_LAYERS):
        sender.write_kv(layer, slots, cache.keys[layer][0], cache.values[layer][0])
    sender.hidden[2] = torch.full((64, sender.hidden_size), torch.nan)
    sender.hidden[2][slots] = cache.hidden[2][0]
    store = MemoryStore(CHUNK)
    worker = SenderWorker(sender, store, NAMESPACE, [2])
    worker.save([SaveJob("s", tuple(TOKENS[:16]), 0, BLOCKS)])
    worker.save([SaveJob("s", tuple(TOKENS[:32]), 2, BLOCKS)])
    assert worker.flush(10)
    worker.close()
    assert worker.counts()["stored"] == 4
    engine = FakePagedModel(RECEIVER, num_blocks=16, block_tokens=BLOCK)
    receiver = worker_of(engine, store, load_seconds=SLOW)
    receiver.start([job("[2,4)")])
    assert receiver.end_step().reports["r"].reason is None
    assert_mixed(engine, job("[2,4)"))


def test_a_timeline_covers_every_layer(
    store: FaultyStore, engine: FakePagedModel, worker_of: WorkerOf
) -> None:
    worker = worker_of(engine, store, load_seconds=SLOW, timeline=True)
    worker.start([job("[2,4)")])
    for layer in range(NUM_LAYERS):
        worker.wait_for_layer(layer)
    spans = worker.end_step().reports["r"].spans
    layers = {
        kind: [span.layer for span in spans if span.kind == kind]
        for kind in ("load", "enter", "recompute", "suffix")
    }
    layers["load"][2:] = sorted(layers["load"][2:], key=str)  # two threads may change places
    num_pieces = len(layers["enter"])  # the second one where its E comes later
    assert num_pieces in (1, 2)
    assert layers == {
        # E of layer 2 first, its first chunk by itself, then the reused layers.
        "load": [2, 2, 0, 1, 4, 5],
        "enter": [2] * num_pieces,
        "recompute": [2, 3] * num_pieces,
        "suffix": list(range(NUM_LAYERS)),
    }
    assert all(span.start <= span.stop for span in spans)
    engines = sorted((s.start, s.stop) for s in spans if s.kind != "load")
    assert all(first[1] <= second[0] for first, second in pairwise(engines))


def test_recomputing_starts_with_the_first_chunk(
    store: FaultyStore, engine: FakePagedModel, worker_of: WorkerOf
) -> None:
    seen: list[tuple[int, int]] = []

    def after_the_first(name: ObjectName, buffer: Tensor | None) -> Tensor | None:
        if name.kind == "hidden" and name.key.index == 1:
            deadline = time.monotonic() + 30
            while not engine.recomputed and time.monotonic() < deadline:
                time.sleep(0.001)
            seen.extend(engine.recomputed)
        return buffer

    store.fault = after_the_first
    worker = worker_of(engine, store, load_seconds=SLOW)
    worker.start([job("[2,4)")])
    for layer in range(NUM_LAYERS):
        worker.wait_for_layer(layer)
    worker.end_step()
    assert seen == [(0, CHUNK)]
    assert engine.recomputed == [(0, CHUNK), (CHUNK, 32)]
    assert_mixed(engine, job("[2,4)"))


class WaitsForNextRead(FakePagedModel):
    """Takes a layer's KV only once the next layer's is being read."""

    def __init__(self, reads: list[int]) -> None:
        super().__init__(RECEIVER, num_blocks=16, block_tokens=BLOCK)
        self.reads = reads
        self.written: list[int] = []

    def write_kv(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        deadline = time.monotonic() + 30
        while layer < NUM_LAYERS - 1 and self.reads[-1] == layer and time.monotonic() < deadline:
            time.sleep(0.001)
        if layer == NUM_LAYERS - 1 or self.reads[-1] > layer:
            self.written.append(layer)
        super().write_kv(layer, slots, keys, values)


def test_the_next_layer_is_read_while_one_is_written(
    store: FaultyStore, worker_of: WorkerOf
) -> None:
    reads: list[int] = []

    def reading(name: ObjectName, buffer: Tensor | None) -> Tensor | None:
        reads.append(name.layer)
        return buffer

    store.fault = reading
    engine = WaitsForNextRead(reads)
    worker = worker_of(engine, store, load_seconds=SLOW)
    worker.start([job("[0,0)")])
    for layer in range(NUM_LAYERS):
        worker.wait_for_layer(layer)
    worker.end_step()
    assert sorted(set(engine.written)) == list(range(NUM_LAYERS))
    assert_mixed(engine, job("[0,0)"))


@pytest.fixture
def released(store: FaultyStore, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set it, and the store gives layers from 2 on; every load counts as a long one."""
    monkeypatch.setattr(load, "_LONG_BYTES", 0)
    released = threading.Event()

    def held(name: ObjectName, buffer: Tensor | None) -> Tensor | None:
        assert name.layer < 2 or released.wait(30)
        return buffer

    store.fault = held
    return released


@pytest.fixture
def loading(
    store: FaultyStore,
    engine: FakePagedModel,
    worker_of: WorkerOf,
    released: threading.Event,
) -> ReceiverWorker:
    """It has begun to load all layers."""
    worker = worker_of(engine, store, load_seconds=SLOW)
    worker.start([job("[0,0)")])
    return worker


def test_a_load_that_waits_for_its_link_is_passed_layer_by_layer(
    loading: ReceiverWorker, engine: FakePagedModel, released: threading.Event
) -> None:
    loading.wait_for_layer(0)
    loading.wait_for_layer(1)
    released.set()
    for layer in range(2, NUM_LAYERS):
        loading.wait_for_layer(layer)
    assert loading.end_step().reports["r"].reason is None
    assert_mixed(engine, job("[0,0)"))


def test_a_load_that_keeps_cores_busy_is_over_before_the_pass(
    loading: ReceiverWorker, engine: FakePagedModel, released: threading.Event
) -> None:
    loading._now[0]._core_seconds = 1e9
    passing = threading.Thread(target=loading.wait_for_layer, args=(0,))
    passing.start()
    passing.join(0.2)
    assert passing.is_alive()
    released.set()
    passing.join(30)
    assert not passing.is_alive()
    assert_mixed(engine, job("[0,0)"))
    assert loading.end_step().reports["r"].wait_seconds > 0


def test_no_timeline_is_kept_unasked(
    store: FaultyStore, engine: FakePagedModel, worker_of: WorkerOf
) -> None:
    worker = worker_of(engine, store, load_seconds=SLOW)
    worker.start([job("[2,4)")])
    assert worker.end_step().reports["r"].spans == []


def test_the_suffix_pass_behind_a_load_that_was_waited_for_is_timed(
    store: FaultyStore, engine: FakePagedModel, worker_of: WorkerOf
) -> None:
    worker = worker_of(engine, store, load_seconds=SLOW, timeline=True)
    worker.start([job("[2,4)", waits=True)])
    load = steps_until_over(worker).reports["r"]
    assert [span for span in load.spans if span.kind == "suffix"] == []
    worker.begin_step(["r"])
    for layer in range(NUM_LAYERS):
        worker.wait_for_layer(layer)
    worker.start([])  # behind the forward pass, as engines do where it needs no load
    result = worker.end_step()
    assert result.reports == {}
    spans = result.suffixes["r"]
    assert [(span.kind, span.layer) for span in spans] == [
        ("suffix", layer) for layer in range(NUM_LAYERS)
    ]
    assert all(first.stop <= second.start for first, second in pairwise(spans))
    assert spans[0].start >= max(span.stop for span in load.spans)
    worker.begin_step([])
    worker.wait_for_layer(0)
    assert worker.end_step().suffixes == {}


@pytest.mark.parametrize("waits", [False, True])
def test_nothing_is_supplied_to_a_model_that_was_updated(
    waits: bool, store: FaultyStore, engine: FakePagedModel, worker_of: WorkerOf
) -> None:
    worker = worker_of(engine, store, load_seconds=SLOW)
    engine.is_updated = True
    worker.start([job("[2,4)", waits=waits)])
    for layer in range(NUM_LAYERS):
        worker.wait_for_layer(layer)
    result = worker.end_step()
    assert result.reports["r"].reason == Fallback.WEIGHTS_CHANGED
    assert bool(result.invalid_block_ids) != waits
    assert result.failed == ({"r"} if waits else set())
    assert engine.recomputed == []
    assert bool(engine.keys.isnan().all())


def test_an_update_while_a_load_is_waited_for_makes_it_worthless(
    store: FaultyStore, engine: FakePagedModel, worker_of: WorkerOf
) -> None:
    worker = worker_of(engine, store, load_seconds=SLOW, tokens_per_step=16)
    worker.start([job("[2,4)", waits=True)])
    deadline = time.monotonic() + SLOW
    while not engine.recomputed and time.monotonic() < deadline:
        worker.end_step(is_idle=True)
    engine.is_updated = True
    assert steps_until_over(worker).reports["r"].reason == Fallback.WEIGHTS_CHANGED


def test_a_request_may_choose_its_order(
    store: FaultyStore, engine: FakePagedModel, worker_of: WorkerOf
) -> None:
    worker = worker_of(engine, store, load_seconds=SLOW, timeline=True)
    worker.start([replace(job("[2,4)"), order="all_first")])
    spans = worker.end_step().reports["r"].spans
    loads = [span for span in spans if span.kind == "load"]
    assert [span.layer for span in loads[:2]] == [2, 2]  # E, in two pieces
    # Two threads load, so neighbours may change places.
    places = [[2, 3, 0, 1, 4, 5].index(span.layer or 0) for span in loads[2:]]
    assert sorted(places) == [0, 1, 2, 3, 4, 5]
    assert all(abs(place - index) <= 1 for index, place in enumerate(places))
    (first,) = (span for span in spans if span.kind == "recompute" and span.layer == 2)
    assert first.start >= max(span.stop for span in loads)
