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
from droidkv.errors import ServeError
from droidkv.serve import demo
from droidkv.serve.connector_plan import AuditRecord, Fallback
from droidkv.serve.demo import WAYS

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
        return demo._Asker("http://nowhere", audit)

    yield make


def test_the_demo_waits_until_the_whole_prefix_is_reused(
    asker_of: Callable[..., demo._Asker],
) -> None:
    ends = [(0, Fallback.NOT_COVERED), (32, None), (0, Fallback.LOAD_ABSENT), (96, None)]
    asker = asker_of(*ends)
    asker.wait_until_stored(ITEM, 4, chunk_tokens=32)
    with pytest.raises(StopIteration):  # all four were asked for
        asker.ask(ITEM, 4, "naive reuse", None)


@pytest.mark.parametrize("reason", [Fallback.LOOKUP_TIMEOUT, Fallback.TOO_SHORT])
def test_the_demo_says_why_nothing_is_reused(
    asker_of: Callable[..., demo._Asker], reason: Fallback
) -> None:
    asker = asker_of((0, reason))
    with pytest.raises(ServeError, match=reason):
        asker.wait_until_stored(ITEM, 4, chunk_tokens=32)


def test_the_demo_tells_the_share_of_the_prefix_that_was_reused(
    asker_of: Callable[..., demo._Asker],
) -> None:
    asker = asker_of((0, Fallback.OPTED_OUT), (96, None), (96, None), (32, None))
    names = [WAYS[0][0], WAYS[1][0], WAYS[2][0], WAYS[2][0]]
    rows = [{**asker.ask(ITEM, 4, name, None), "score": 1.0} for name in names]
    shares = [way["reused_share"] for way in demo._ways(rows)]
    assert shares == pytest.approx([0.0, 0.96, 0.64])
