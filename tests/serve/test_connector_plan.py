from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from droidkv.errors import PlanError
from droidkv.plan import ReusePlan
from droidkv.serve.connector_plan import (
    Ask,
    AuditRecord,
    Fallback,
    LoadReport,
    chunk_pieces,
    filled_chunks,
    mixed_salt,
    parse_ask,
    reusable_tokens,
    slots_of,
)
from droidkv.serve.store import MissReason

counts = st.integers(0, 500)
sizes = st.integers(1, 100)


@settings(deadline=None)
@given(counts, counts, sizes)
def test_a_prefix_is_whole_chunks_and_shorter_than_the_prompt(
    prompt: int, covered: int, chunk: int
) -> None:
    tokens = reusable_tokens(prompt, covered, chunk)
    assert tokens % chunk == 0
    assert 0 <= tokens <= covered
    assert tokens < prompt or tokens == 0
    # The longest such prefix.
    assert tokens + chunk > min(covered, prompt - 1)


@pytest.mark.parametrize(
    ("prompt", "tokens"), [(0, 0), (1, 0), (63, 0), (64, 0), (65, 64), (128, 64), (129, 128)]
)
def test_prompts_around_a_chunk(prompt: int, tokens: int) -> None:
    assert reusable_tokens(prompt, 10_000, 64) == tokens


@settings(deadline=None)
@given(st.data(), sizes)
def test_slots_are_one_per_token_and_never_shared(data: st.DataObject, block: int) -> None:
    block_ids = data.draw(st.lists(st.integers(0, 500), unique=True, max_size=12))
    held = len(block_ids) * block
    start = data.draw(st.integers(0, held))
    stop = data.draw(st.integers(start, held))
    slots = slots_of(block_ids, block, start, stop)
    assert len(slots) == stop - start == len(set(slots))
    for token, slot in zip(range(start, stop), slots, strict=True):
        assert slot // block == block_ids[token // block]
        assert slot % block == token % block


def test_slots_beyond_the_blocks_are_refused() -> None:
    with pytest.raises(PlanError, match="3 blocks of 16"):
        slots_of([4, 5, 6], 16, 0, 49)


@settings(deadline=None)
@given(counts, counts, sizes)
@example(1, 0, 2)
def test_pieces_cover_the_range_once_in_order(start: int, length: int, chunk: int) -> None:
    stop = start + length
    pieces = chunk_pieces(start, stop, chunk)
    tokens = [piece.chunk * chunk + offset for piece in pieces for offset in range(*piece.inside)]
    assert tokens == list(range(start, stop))
    assert all(0 <= low < high <= chunk for low, high in (piece.inside for piece in pieces))
    borders = [border for piece in pieces for border in piece.at]
    assert not pieces or (borders[0], borders[-1]) == (0, length)
    assert all(left.at[1] == right.at[0] for left, right in pairwise(pieces))
    for piece in pieces:
        assert piece.inside[1] - piece.inside[0] == piece.at[1] - piece.at[0]


@settings(deadline=None)
@given(st.lists(st.integers(1, 200), max_size=20), counts, sizes)
def test_every_chunk_of_a_prompt_is_stored_once_however_it_is_computed(
    steps: list[int], prompt: int, chunk: int
) -> None:
    saved, computed = 0, 0
    found: list[int] = []
    for step in steps:
        computed += step
        chunks = filled_chunks(saved, computed, prompt, chunk)
        found += chunks
        saved = chunks.stop
    assert found == list(range(min(computed, prompt) // chunk))


def test_a_preempted_request_stores_nothing_twice() -> None:
    assert list(filled_chunks(3, 64, 1000, 64)) == []
    assert list(filled_chunks(3, 256, 1000, 64)) == [3]


def test_asks_are_read_strictly() -> None:
    assert parse_ask(None, 8) == parse_ask({"other": 1}, 8) == Ask()
    assert parse_ask({"droidkv": {"plan": "[2,4)"}}, 8) == Ask(ReusePlan.of(2, 4))
    assert parse_ask({"droidkv": {"plan": "none"}}, 8) == Ask(ReusePlan.of(0, 0))
    assert parse_ask({"droidkv": {"reuse": False}}, 8) == Ask(reuse=False)
    assert parse_ask({"droidkv": {"prefix_tokens": 9}}, 8) == Ask(prefix_tokens=9)


@pytest.mark.parametrize(
    "value",
    [
        "[2,4)",
        {"plan": "[2,99)"},
        {"plan": 3},
        {"reuse": 1},
        {"plans": "none"},
        {"prefix_tokens": -1},
        {"prefix_tokens": True},
        {"prefix_tokens": "9"},
        [1],
    ],
)
def test_bad_asks_are_refused(value: object) -> None:
    with pytest.raises(PlanError):
        parse_ask({"droidkv": value}, 8)


SALTED: dict[str, object] = {
    "namespace": "a" * 64,
    "plan": ReusePlan.of(2, 4),
    "stitch_sha256": None,
    "last_chunk_hash": "b" * 64,
    "num_tokens": 128,
    "cache_salt": None,
}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("namespace", "c" * 64),
        ("plan", ReusePlan.of(2, 5)),
        ("plan", ReusePlan.of(2, 4, "stitch")),
        ("stitch_sha256", "d" * 64),
        ("last_chunk_hash", "e" * 64),
        ("num_tokens", 192),
        ("cache_salt", "tenant"),
    ],
)
def test_whatever_changes_the_mixed_blocks_changes_the_salt(name: str, value: object) -> None:
    salt = mixed_salt(**SALTED)  # type: ignore[arg-type]
    assert salt == mixed_salt(**SALTED)  # type: ignore[arg-type]
    assert salt != mixed_salt(**{**SALTED, name: value})  # type: ignore[arg-type]


def test_the_salt_is_the_same_in_every_process() -> None:
    assert mixed_salt(**SALTED) == (  # type: ignore[arg-type]
        "droidkv:fd1fdca8e6154151628ab812959e4e39f66f3cc189213757f142d18288641fcd"
    )


def test_every_miss_has_a_fallback_reason() -> None:
    assert {f"load_{reason}" for reason in MissReason} <= set(Fallback)


def test_an_audit_record_is_flat_json() -> None:
    record = AuditRecord("r", plan="[2,4)", report=LoadReport(loaded_bytes=5))
    record.reason = Fallback.LOAD_CORRUPT
    table = json.loads(json.dumps(record.to_json()))
    assert table["loaded_bytes"] == 5
    assert table["reason"] == "load_corrupt"
    assert not any(isinstance(value, dict) for value in table.values())


def test_two_ranks_reports_add_up() -> None:
    left = LoadReport(10, 5, 0.1, 0.2, 0.3)
    right = LoadReport(20, 5, 0.3, 0.1, 0.0, Fallback.LOAD_SHORT)
    assert left.merge(right) == LoadReport(30, 5, 0.3, 0.2, 0.3, Fallback.LOAD_SHORT)
