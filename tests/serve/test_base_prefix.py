from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from droidkv.errors import ServeError
from droidkv.serve.base_prefix import BasePrefixScheduler, BasePrefixSettings, hash_behind_base
from droidkv.serve.connector_plan import AuditRecord, Fallback

BLOCK, LAYERS = 4, 3
TOKENS = list(range(100, 118))


class Request:
    """Hashes its blocks as vLLM's requests do: chained, the adapter's name in each."""

    def __init__(self, adapter: str | None = "adapter", tokens: list[int] = TOKENS) -> None:
        self.lora_request: Any = adapter
        self.tokens = tokens
        self.block_hashes: list[Any] = []
        self.update_block_hashes()

    def update_block_hashes(self) -> None:
        for block in range(len(self.block_hashes), len(self.tokens) // BLOCK):
            before = self.block_hashes[-1] if block else None
            part = tuple(self.tokens[block * BLOCK : (block + 1) * BLOCK])
            self.block_hashes.append((before, self.lora_request, part))


BASE = Request(None).block_hashes


class Engine:
    """A scheduler half, and what the engine does of it."""

    def __init__(self, own_tokens: int | None = None) -> None:
        self.records: list[AuditRecord] = []
        self.half = BasePrefixScheduler(LAYERS, BLOCK, 2, own_tokens, self.records.append)

    def admit(
        self,
        request: Request,
        params: dict[str, Any] | None = None,
        obstacle: Fallback | None = None,
    ) -> None:
        self.half.admit("r", request, len(request.tokens), params, obstacle)

    def end(self) -> AuditRecord:
        self.half.finish("r")
        return self.records[-1]


@pytest.fixture
def engine() -> Iterator[Engine]:
    yield Engine()


def test_the_first_blocks_are_the_bases_and_the_rest_the_adapters_own() -> None:
    for num_blocks in range(5):
        request = Request()
        hash_behind_base(request, num_blocks)
        assert request.lora_request == "adapter"
        assert request.block_hashes[:num_blocks] == BASE[:num_blocks]
        assert len(request.block_hashes) == 4
        assert not set(request.block_hashes[num_blocks:]) & set(BASE)
    # Behind the base's blocks an adapter's own are not those of its own prefill.
    assert request.block_hashes[3] == BASE[3] and Request().block_hashes[3] != BASE[3]


def test_an_adapters_request_finds_the_bases_blocks(engine: Engine) -> None:
    request = Request()
    engine.admit(request)
    assert request.block_hashes == BASE
    for _ in range(3):  # asked again and again while it waits
        assert not engine.half.match("r", 16)
    engine.half.allocate("r")
    assert engine.half.take_refused() == []
    record = engine.end()
    assert (record.plan, record.local_tokens, record.reason) == ("[0,0)", 16, None)


def test_the_block_with_the_last_token_is_its_own(engine: Engine) -> None:
    request = Request(tokens=TOKENS[:16])
    engine.admit(request)
    assert request.block_hashes[:3] == BASE[:3] and request.block_hashes[3] != BASE[3]
    assert not engine.half.match("r", 12)  # one block of own tokens is allowed


def test_blocks_that_the_adapter_will_compute_are_never_the_bases() -> None:
    engine = Engine(own_tokens=10)
    request = Request()
    engine.admit(request)
    assert not engine.half.match("r", 8)
    assert request.block_hashes[:2] == BASE[:2]
    assert not set(request.block_hashes[2:]) & set(BASE)
    # Preempted: what is left of the base's blocks counts, whatever its own blocks hold.
    assert not engine.half.match("r", 16)
    assert engine.half.match("r", 4)
    assert request.block_hashes[1] != BASE[1]
    record = engine.end()
    assert (record.refused, record.reason) == (True, Fallback.PARTLY_COVERED)


def test_without_the_bases_blocks_a_request_is_refused_once(engine: Engine) -> None:
    engine.admit(Request())
    assert not engine.half.refuses("r")
    assert engine.half.match("r", 0)
    assert engine.half.refuses("r")
    engine.half.allocate("r")
    assert engine.half.take_refused() == ["r"]
    assert engine.half.take_refused() == []
    assert engine.end().reason == Fallback.NOT_COVERED


def test_a_named_prefix_is_found_whole_and_no_more(engine: Engine) -> None:
    request = Request()
    ask = {"droidkv": {"prefix_tokens": 11}}
    engine.admit(request, ask)
    assert request.block_hashes[:2] == BASE[:2] and request.block_hashes[2] != BASE[2]
    assert not engine.half.match("r", 8)  # more of its own tokens than a block, as it said
    assert engine.end().local_tokens == 8
    engine.admit(Request(), ask)
    assert engine.half.match("r", 4)
    assert engine.end().reason == Fallback.PARTLY_COVERED


def test_no_prompt_is_too_short_to_be_refused() -> None:
    for tokens, ask in ((TOKENS[:4], None), (TOKENS, {"droidkv": {"prefix_tokens": 3}})):
        engine = Engine(own_tokens=100)
        engine.admit(Request(tokens=tokens), ask)
        assert engine.half.refuses("r") and engine.half.match("r", 0)
        assert engine.end().reason == Fallback.TOO_SHORT
    engine.admit(Request())  # nothing found, though so many own tokens would be allowed
    assert engine.half.match("r", 0)
    assert engine.end().reason == Fallback.NOT_COVERED


def test_requests_of_a_kind_that_cannot_reuse_are_refused(engine: Engine) -> None:
    engine.admit(Request(), obstacle=Fallback.PROMPT_LOGPROBS)
    assert engine.half.refuses("r") and engine.half.match("r", 16)
    assert engine.end().refused
    engine.admit(Request(), obstacle=Fallback.OPTED_OUT)  # it skips the prefix cache, no more
    assert engine.half.refuses("r") and engine.half.match("r", 0)
    assert engine.end().refused
    engine.admit(Request(), {"droidkv": {"plan": "[0,2)"}})
    assert engine.half.match("r", 16)
    assert engine.end().reason == Fallback.BAD_PLAN


@pytest.mark.parametrize(
    ("ask", "reason"), [({"reuse": False}, "opted_out"), ({"plan": "all"}, "full_prefill")]
)
def test_the_own_prefill_is_answered_if_it_was_asked_for(
    engine: Engine, ask: dict[str, Any], reason: str
) -> None:
    request = Request()
    engine.admit(request, {"droidkv": ask})
    assert request.block_hashes == Request().block_hashes
    assert not engine.half.match("r", 0)
    record = engine.end()
    assert (record.refused, record.reason) == (False, reason)


def test_more_adapters_than_there_is_room_for_are_refused(engine: Engine) -> None:
    for adapter in ("one", "two", "one"):
        engine.admit(Request(adapter))
        assert not engine.half.match("r", 16)
        assert engine.end().reason is None
    engine.admit(Request("three"), {"droidkv": {"reuse": False}})
    assert engine.half.match("r", 16)
    assert engine.end().reason == Fallback.LORA


def test_the_bases_requests_are_left_alone(engine: Engine) -> None:
    request = Request(None)
    engine.admit(request)
    assert request.block_hashes == BASE
    assert not engine.half.match("r", 0)
    engine.half.finish("r")
    assert engine.records == []


def test_an_aborted_request_is_not_refused(engine: Engine) -> None:
    engine.admit(Request())
    engine.half.match("r", 0)
    engine.half.finish("r", is_aborted=True)
    assert (engine.records[0].refused, engine.records[0].reason) == (False, Fallback.ABORTED)


def test_settings_are_read_strictly() -> None:
    table = {"own_tokens": 32, "audit": "/a.jsonl"}
    assert BasePrefixSettings.from_table(table) == BasePrefixSettings(32, "/a.jsonl")
    for wrong in ({"own_tokens": 0}, {"audit": 1}, {"store": "x"}):
        with pytest.raises(ServeError, match=next(iter(wrong))):
            BasePrefixSettings.from_table(wrong)
