from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from droidkv.encode import EncodedItem
from droidkv.errors import RefusedError, ServeError
from droidkv.serve import demo
from droidkv.serve.connector_plan import AuditRecord, Fallback
from droidkv.serve.demo import FULL_SHARE_WAYS, WAYS

ITEM = EncodedItem("one", tuple(range(100)), (7, 8, 9))


@pytest.fixture
def asker_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., demo._Asker]]:
    """An asker of a server whose requests end as told, one after the other."""

    def make(*ends: tuple[int, Fallback | None]) -> demo._Asker:
        audit, left, numbers = tmp_path / "audit.jsonl", iter(ends), count()

        def complete(*asked: Any) -> SimpleNamespace:
            advertised, reason = next(left)
            name = f"cmpl-{next(numbers)}-"
            record = AuditRecord(name, "[2,4)", advertised_tokens=advertised, reason=reason)
            with audit.open("a") as file:
                file.write(json.dumps(record.to_json()) + "\n")
            return SimpleNamespace(request_id=name, text=" answer ", ttft_seconds=0.5)

        monkeypatch.setattr(demo, "complete", complete)
        monkeypatch.setattr(time, "sleep", lambda seconds: None)
        return demo._Asker({"receiver": "http://nowhere"}, audit)

    yield make


def test_the_demo_waits_until_the_whole_prefix_is_reused(
    asker_of: Callable[..., demo._Asker],
) -> None:
    ends = [(0, Fallback.NOT_COVERED), (32, None), (0, Fallback.LOAD_ABSENT), (96, None)]
    asker = asker_of(*ends)
    asker.wait_until_stored(ITEM, 4, WAYS[-1], chunk_tokens=32)
    with pytest.raises(StopIteration):  # all four were asked for
        asker.ask(ITEM, 4, WAYS[1])


@pytest.mark.parametrize("reason", [Fallback.LOOKUP_TIMEOUT, Fallback.TOO_SHORT])
def test_the_demo_says_why_nothing_is_reused(
    asker_of: Callable[..., demo._Asker], reason: Fallback
) -> None:
    asker = asker_of((0, reason))
    with pytest.raises(ServeError, match=reason):
        asker.wait_until_stored(ITEM, 4, WAYS[-1], chunk_tokens=32)


def test_the_demo_waits_for_no_request_that_is_wrong(
    asker_of: Callable[..., demo._Asker], monkeypatch: pytest.MonkeyPatch
) -> None:
    statuses = iter([424, 400])

    def refuse(*asked: Any) -> None:
        raise RefusedError("refused", next(statuses), "too_short")

    asker = asker_of()
    monkeypatch.setattr(demo, "complete", refuse)
    with pytest.raises(RefusedError) as raised:
        asker.wait_until_stored(ITEM, 4, WAYS[-1], chunk_tokens=32)
    assert raised.value.status == 400


def test_a_receiver_that_reads_the_bases_kv_is_told_where_that_ends(
    asker_of: Callable[..., demo._Asker], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[tuple[Any, ...]]()

    def complete(*arguments: Any) -> SimpleNamespace:
        asked.append(arguments)
        return SimpleNamespace(request_id="cmpl-9", text="yes", ttft_seconds=0.5)

    asker_of()
    monkeypatch.setattr(demo, "complete", complete)
    urls = {"sender": "http://base", "receiver": "http://receiver"}
    asker = demo._Asker(urls, Path("there is none"))
    base, own, behind = FULL_SHARE_WAYS
    assert asker.ask(ITEM, 4, base)["advertised_tokens"] == 0  # which no audit line says
    assert (asked[0][0], asked[0][4]) == ("http://base", None)
    assert own.params(ITEM) == {"droidkv": {"reuse": False}}
    assert behind.params(ITEM) == {"droidkv": {"prefix_tokens": 100}}
    assert (own.server, behind.server) == ("receiver", "receiver")


def test_the_demo_tells_the_share_of_the_prefix_that_was_reused(
    asker_of: Callable[..., demo._Asker],
) -> None:
    asker = asker_of((0, Fallback.OPTED_OUT), (96, None), (96, None), (32, None))
    asked = [*WAYS, WAYS[2]]
    rows = [{**asker.ask(ITEM, 4, way), "score": 1.0} for way in asked]
    shares = [way["reused_share"] for way in demo._ways(rows, WAYS)]
    assert shares == pytest.approx([0.0, 0.96, 0.64])
