"""What every store must do. A backend's tests are a subclass with a `store` fixture."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from droidkv.errors import PlanError
from droidkv.plan import ReusePlan
from droidkv.serve.objects import (
    HEADER_BYTES,
    MissReason,
    ObjectKind,
    ObjectName,
    StoreMiss,
    encode,
)
from droidkv.serve.store import ChunkKey, Store, chunk_keys, coverage, deadline_in

CHUNK_TOKENS = 8
NUM_LAYERS = 4
NUM_KV_HEADS, HEAD_DIM, HIDDEN_SIZE = 2, 32, 24
SENDER, OTHER_SENDER = "5e" * 32, "0f" * 32
TOKEN_IDS = range(5, 5 + 3 * CHUNK_TOKENS)
KEYS = chunk_keys(SENDER, TOKEN_IDS, CHUNK_TOKENS)
OTHER_TOKENS = chunk_keys(SENDER, range(1, 1 + 3 * CHUNK_TOKENS), CHUNK_TOKENS)


def soon() -> float:
    return deadline_in(20.0)


def random_kv(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    keys, values = torch.randn(2, NUM_KV_HEADS, CHUNK_TOKENS, HEAD_DIM)
    return keys.to(dtype), values.to(dtype)


def random_hidden(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(CHUNK_TOKENS, HIDDEN_SIZE).to(dtype)


def same_bits(one: Tensor, other: Tensor) -> bool:
    return (
        one.dtype == other.dtype
        and one.shape == other.shape
        and torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
    )


def write_raw(store: Store, name: ObjectName, buffer: Tensor) -> None:
    """Put bytes under a name, whatever they are: what a damaged backend would answer."""
    store._write(name, buffer)
    assert store.flush(soon())


def miss_reason(read: Callable[[], object]) -> MissReason:
    with pytest.raises(StoreMiss) as caught:
        read()
    return caught.value.reason


class StoreConformance:
    """Every backend's tests."""

    @pytest.mark.parametrize(
        "dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn]
    )
    def test_tensors_come_back_bit_by_bit(self, store: Store, dtype: torch.dtype) -> None:
        keys, values = random_kv(dtype)
        hidden = random_hidden(dtype)
        assert store.put_kv(KEYS[0], 1, keys, values)
        assert store.put_hidden(KEYS[0], 1, hidden)
        assert store.flush(soon())

        found_keys, found_values = store.get_kv(KEYS[0], 1, soon())
        assert same_bits(found_keys, keys) and same_bits(found_values, values)
        assert same_bits(store.get_hidden(KEYS[0], 1, soon()), hidden)

    def test_views_are_stored_as_what_they_show(self, store: Store) -> None:
        whole = torch.randn(CHUNK_TOKENS * 2, NUM_KV_HEADS, HEAD_DIM).transpose(0, 1)
        keys, values = whole[:, CHUNK_TOKENS:], whole[:, :CHUNK_TOKENS]
        store.put_kv(KEYS[0], 0, keys, values)
        assert store.flush(soon())
        found_keys, found_values = store.get_kv(KEYS[0], 0, soon())
        assert torch.equal(found_keys, keys) and torch.equal(found_values, values)

    def test_nobody_shares_memory_with_the_store(self, store: Store) -> None:
        hidden = random_hidden()
        stored = hidden.clone()
        store.put_hidden(KEYS[0], 2, hidden)
        hidden.zero_()
        assert store.flush(soon())
        store.get_hidden(KEYS[0], 2, soon()).fill_(7)
        assert torch.equal(store.get_hidden(KEYS[0], 2, soon()), stored)

    def test_several_chunks_at_once_come_in_order(self, store: Store) -> None:
        written = [random_kv() for _ in KEYS]
        for key, (keys, values) in zip(KEYS, written, strict=True):
            store.put_kv(key, 3, keys, values)
        assert store.flush(soon())
        asked = [KEYS[2], KEYS[0], KEYS[1]]
        found = store.get_kv_chunks(asked, 3, soon())
        for key, (keys, values) in zip(asked, found, strict=True):
            assert torch.equal(keys, written[key.index][0])
            assert torch.equal(values, written[key.index][1])

    def test_what_is_lent_stays_as_it_is_until_it_is_given_back(self, store: Store) -> None:
        keys, values = random_kv()
        for key in KEYS:
            store.put_kv(key, 3, keys, values)
        assert store.flush(soon())
        with store.lent_kv_chunks(KEYS, 3, soon()) as pairs:
            for layer in range(4, 12):  # others come and go meanwhile
                store.put_kv(KEYS[0], layer, *random_kv())
            assert store.flush(soon())
            store.get_kv_chunks(KEYS[:1], 5, soon())
            for each, other in pairs:
                assert torch.equal(each, keys) and torch.equal(other, values)
        with pytest.raises(StoreMiss), store.lent_kv_chunks([KEYS[0], KEYS[1]], 4, soon()):
            pytest.fail("one of the two is not there")

    def test_one_absent_chunk_of_several_is_a_miss(self, store: Store) -> None:
        store.put_hidden(KEYS[0], 1, random_hidden())
        assert store.flush(soon())
        read = lambda: store.get_hidden_chunks(KEYS[:2], 1, soon())  # noqa: E731
        assert miss_reason(read) is MissReason.ABSENT

    @pytest.mark.parametrize(
        "other",
        [
            replace(KEYS[1], namespace=OTHER_SENDER),
            replace(KEYS[1], chunk_hash=OTHER_TOKENS[1].chunk_hash),
        ],
        ids=["sender", "tokens"],
    )
    def test_another_name_is_absent(self, store: Store, other: ChunkKey) -> None:
        keys, values = random_kv()
        store.put_kv(KEYS[1], 0, keys, values)
        store.put_hidden(KEYS[1], 0, random_hidden())
        assert store.flush(soon())
        assert store.contains_kv(KEYS[1], [0], soon()) and store.contains_hidden(
            KEYS[1], [0], soon()
        )
        assert not store.contains_kv(other, [0], soon())
        assert not store.contains_hidden(other, [0], soon())
        assert miss_reason(lambda: store.get_kv(other, 0, soon())) is MissReason.ABSENT
        assert miss_reason(lambda: store.get_hidden(other, 0, soon())) is MissReason.ABSENT

    def test_kv_and_hidden_of_a_layer_are_two_objects(self, store: Store) -> None:
        store.put_hidden(KEYS[0], 1, random_hidden())
        assert store.flush(soon())
        assert store.contains_hidden(KEYS[0], [1], soon())
        assert not store.contains_kv(KEYS[0], [1], soon())
        assert miss_reason(lambda: store.get_kv(KEYS[0], 1, soon())) is MissReason.ABSENT

    def test_contains_means_all_the_layers_asked_for(self, store: Store) -> None:
        for layer in (0, 2):
            store.put_kv(KEYS[0], layer, *random_kv())
        assert store.flush(soon())
        assert store.contains_kv(KEYS[0], [0, 2], soon())
        assert store.contains_kv(KEYS[0], [], soon())
        assert not store.contains_kv(KEYS[0], [0, 1, 2], soon())

    def test_storing_again_keeps_one_whole_object(self, store: Store) -> None:
        # Names say what the bytes are, so a backend may keep either.
        first, second = random_hidden(), random_hidden()
        store.put_hidden(KEYS[0], 0, first)
        assert store.flush(soon())
        store.put_hidden(KEYS[0], 0, second)
        assert store.flush(soon())
        found = store.get_hidden(KEYS[0], 0, soon())
        assert torch.equal(found, first) or torch.equal(found, second)

    def test_a_passed_deadline_is_a_timeout(self, store: Store) -> None:
        store.put_hidden(KEYS[0], 0, random_hidden())
        assert store.flush(soon())
        past = deadline_in(-0.001)
        assert miss_reason(lambda: store.get_hidden(KEYS[0], 0, past)) is MissReason.TIMEOUT

    def test_a_changed_byte_is_corrupt_wherever_it_is(self, store: Store) -> None:
        name = ObjectName(KEYS[0], ObjectKind.KV, 0)
        good = encode(name, random_kv())
        for layer, position in enumerate([0, 30, 90, 200, HEADER_BYTES, good.numel() - 1]):
            name = replace(name, layer=layer)
            bad = encode(name, random_kv())
            bad[position] ^= 1
            write_raw(store, name, bad)
            read = lambda layer=layer: store.get_kv(KEYS[0], layer, soon())  # noqa: E731
            assert miss_reason(read) is MissReason.CORRUPT, position

    def test_a_truncated_object_is_short(self, store: Store) -> None:
        for layer, num_bytes in enumerate([4, HEADER_BYTES, HEADER_BYTES + 64]):
            name = ObjectName(KEYS[0], ObjectKind.HIDDEN, layer)
            write_raw(store, name, encode(name, [random_hidden()])[:num_bytes].clone())
            read = lambda layer=layer: store.get_hidden(KEYS[0], layer, soon())  # noqa: E731
            assert miss_reason(read) is MissReason.SHORT

    def test_an_object_of_fewer_tokens_is_short(self, store: Store) -> None:
        name = ObjectName(KEYS[0], ObjectKind.HIDDEN, 0)
        write_raw(store, name, encode(name, [random_hidden()[:-1]]))
        assert miss_reason(lambda: store.get_hidden(KEYS[0], 0, soon())) is MissReason.SHORT

    def test_another_senders_object_under_this_name_is_named(self, store: Store) -> None:
        name = ObjectName(KEYS[0], ObjectKind.HIDDEN, 0)
        theirs = replace(name, key=replace(KEYS[0], namespace=OTHER_SENDER))
        write_raw(store, name, encode(theirs, [random_hidden()]))
        read = lambda: store.get_hidden(KEYS[0], 0, soon())  # noqa: E731
        assert miss_reason(read) is MissReason.WRONG_NAMESPACE

    @pytest.mark.parametrize("change", ["layer", "kind", "tokens"])
    def test_another_object_under_this_name_is_corrupt(self, store: Store, change: str) -> None:
        name = ObjectName(KEYS[0], ObjectKind.HIDDEN, 0)
        other = {
            "layer": replace(name, layer=1),
            "kind": replace(name, kind=ObjectKind.KV),
            "tokens": replace(name, key=OTHER_TOKENS[0]),
        }[change]
        write_raw(store, name, encode(other, [random_hidden()]))
        assert miss_reason(lambda: store.get_hidden(KEYS[0], 0, soon())) is MissReason.CORRUPT

    def test_tensors_that_are_no_chunk_are_refused(self, store: Store) -> None:
        keys, values = random_kv()
        for bad_keys, bad_values in [
            (keys[:, 1:], values[:, 1:]),
            (keys, values[:1]),
            (keys, values.half()),
            (keys[0], values[0]),
        ]:
            with pytest.raises(PlanError, match="num_kv_heads, 8, head_dim"):
                store.put_kv(KEYS[0], 0, bad_keys, bad_values)
        with pytest.raises(PlanError, match="8, hidden_size"):
            store.put_hidden(KEYS[0], 0, random_hidden()[1:])

    def test_stats_count_what_was_done(self, store: Store) -> None:
        store.put_kv(KEYS[0], 0, *random_kv())
        assert store.flush(soon())
        store.get_kv(KEYS[0], 0, soon())
        miss_reason(lambda: store.get_kv(KEYS[1], 0, soon()))
        stats = store.stats()
        num_bytes = HEADER_BYTES + 2 * NUM_KV_HEADS * CHUNK_TOKENS * HEAD_DIM * 4
        assert (stats.puts, stats.put_bytes, stats.put_failures) == (1, num_bytes, 0)
        assert (stats.gets, stats.get_bytes) == (1, num_bytes)
        assert stats.misses == {MissReason.ABSENT: 1}

    def test_coverage_is_the_least_of_kv_and_hidden(self, store: Store) -> None:
        plan = ReusePlan.of(1, 3)
        for key in KEYS:
            store.put_kv(key, 0, *random_kv())
        for key in KEYS[:2]:
            store.put_kv(key, 3, *random_kv())
        store.put_hidden(KEYS[0], 1, random_hidden())
        assert store.flush(soon())
        assert coverage(store, KEYS, plan, NUM_LAYERS, soon()) == CHUNK_TOKENS
        store.put_hidden(KEYS[2], 1, random_hidden())  # behind a gap: of no use
        assert store.flush(soon())
        assert coverage(store, KEYS, plan, NUM_LAYERS, soon()) == CHUNK_TOKENS
        store.put_hidden(KEYS[1], 1, random_hidden())
        assert store.flush(soon())
        assert coverage(store, KEYS, plan, NUM_LAYERS, soon()) == 2 * CHUNK_TOKENS
        assert coverage(store, KEYS, ReusePlan.of(0, 0), NUM_LAYERS, soon()) == 0
        assert coverage(store, [], plan, NUM_LAYERS, soon()) == 0

    def test_the_end_of_a_put_is_told_once_and_before_a_flush_returns(self, store: Store) -> None:
        ends: list[bool] = []
        for layer, key in enumerate(KEYS):
            assert store.put_kv(key, layer, *random_kv(), on_end=ends.append)
            assert store.put_hidden(key, layer, random_hidden(), on_end=ends.append)
        assert store.flush(soon())
        assert ends == [True] * 6

    def test_threads_may_share_it(self, store: Store) -> None:
        failures: list[BaseException] = []

        def work(layer: int) -> None:
            try:
                for key in KEYS:
                    keys, values = torch.full(
                        (2, NUM_KV_HEADS, CHUNK_TOKENS, HEAD_DIM), float(layer)
                    )
                    store.put_kv(key, layer, keys, values)
                assert store.flush(soon())
                for keys, values in store.get_kv_chunks(KEYS, layer, soon()):
                    assert bool((keys == layer).all()) and bool((values == layer).all())
            except BaseException as failure:
                failures.append(failure)

        threads = [threading.Thread(target=work, args=[layer]) for layer in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []

    def test_closing_twice_is_closing_once(self, store: Store) -> None:
        store.close()
        store.close()
