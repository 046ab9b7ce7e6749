from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from droidkv.serve import refusals
from droidkv.serve.connector_plan import AuditRecord, Fallback
from droidkv.serve.refusals import ExplainRefusals, find_refusal, note_refusal

# Ways of answering by choice, and what no client waits for.
NEVER_TOLD = {Fallback.FULL_PREFILL, Fallback.NOT_CHOSEN, Fallback.ABORTED}
FAILED = json.dumps({"error": {"message": "Internal server error", "code": 500}}).encode()
Messages = list[dict[str, Any]]


@pytest.fixture(autouse=True)
def _notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DROIDKV_CACHE", str(tmp_path / "cache"))


def note(request_id: str, reason: Fallback = Fallback.PARTLY_COVERED) -> None:
    note_refusal(
        AuditRecord(request_id, prompt_tokens=900, covered_tokens=64, reason=reason, refused=True)
    )


def whole(status: int, *pieces: bytes) -> Messages:
    """An answer that is no stream."""
    bodies = [
        {"type": "http.response.body", "body": piece, "more_body": index + 1 < len(pieces)}
        for index, piece in enumerate(pieces)
    ]
    length = str(sum(map(len, pieces))).encode()
    headers = [(b"content-length", length), (b"content-type", b"application/json")]
    return [{"type": "http.response.start", "status": status, "headers": headers}, *bodies]


def answered(
    messages: Messages, request_id: str = "cmpl-mine", error: Exception | None = None
) -> Messages:
    """What reaches the client of an app that answers so, and then fails."""
    sent = Messages()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        scope["state"]["request_metadata"] = SimpleNamespace(request_id=request_id)
        note(f"{request_id}-0-1a2b3c4d")
        for message in messages:
            await send(message)
        if error is not None:
            raise error

    async def send(message: Any) -> None:
        sent.append(message)

    scope: Any = {"type": "http", "headers": []}
    asyncio.run(ExplainRefusals(app)(scope, None, send))  # type: ignore[arg-type]
    assert scope == {"type": "http", "headers": []}
    return sent


@pytest.mark.parametrize("request_id", ["cmpl-mine", "chatcmpl-a/../b [1]", "resp_1f"])
@pytest.mark.parametrize("pieces", [(FAILED,), (FAILED[:9], FAILED[9:])])
def test_a_refused_request_is_answered_with_status_and_reason(
    request_id: str, pieces: Sequence[bytes]
) -> None:
    start, body = answered(whole(500, *pieces), request_id)
    error = json.loads(body["body"])["error"]
    assert (start["status"], error["code"], error["reason"]) == (424, 424, "partly_covered")
    assert "64 of the prompt's 900 tokens" in error["message"]
    assert dict(start["headers"])[b"content-length"] == str(len(body["body"])).encode()
    assert len(start["headers"]) == 2


def test_a_stream_is_passed_on_as_it_comes_and_ends_in_the_reason() -> None:
    events = [b'data: {"id": "cmpl-x"}\n\n', b"data: %s\n\n" % FAILED, b"data: [DONE]\n\n"]
    sent = answered(whole(200, *events))
    assert [sent[0]["status"], sent[1]["body"], sent[3]["body"]] == [200, events[0], events[2]]
    event = sent[2]["body"]
    assert event.startswith(b"data: {") and event.endswith(b"}\n\n") and sent[2]["more_body"]
    assert json.loads(event.removeprefix(b"data: "))["error"]["reason"] == "partly_covered"


@pytest.mark.parametrize("status", [200, 400, 500])
def test_other_answers_are_left_alone(status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if status == 500:  # an error that is no refusal
        monkeypatch.setattr(refusals, "find_refusal", lambda *_: None)
    messages = whole(status, FAILED)
    sent = answered(messages)
    assert [each["type"] for each in sent] == [each["type"] for each in messages]
    assert (sent[0], sent[1]["body"]) == (messages[0], FAILED)


def test_what_is_no_request_passes() -> None:
    scopes = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        scopes.append(scope)

    asyncio.run(ExplainRefusals(app)({"type": "lifespan"}, None, None))  # type: ignore[arg-type]
    assert scopes == [{"type": "lifespan"}]


@pytest.mark.parametrize(
    "engine_name", ["cmpl-1-0-9f", "cmpl-1-9f", "1_cmpl-1-0-9f", "cmpl-1_2-9f"]
)
def test_a_request_is_known_by_what_the_engine_calls_it(engine_name: str) -> None:
    assert find_refusal("cmpl-1", 0) is None
    note(engine_name)
    assert find_refusal("cmpl-1", 0) is not None
    for other in ("", "1", "cmpl-11", "cmpl-", "9f", ".", "cmpl-2"):
        assert find_refusal(other, 0) is None


def test_a_request_is_not_told_of_another_of_a_longer_or_the_same_name() -> None:
    note("cmpl-a-1-0-9f")
    note("cmpl-b-0-9f")
    assert find_refusal("cmpl-a", 0) is None
    assert find_refusal("cmpl-b", 0) is not None
    assert find_refusal("cmpl-b", time.time()) is None  # a retry by the same X-Request-Id


def test_a_stream_that_breaks_off_ends_in_the_reason() -> None:
    started = whole(200, b"event: response.created\n\n", b"")[:-1]
    *sent, last = answered(started, "resp_1", ValueError("no such event"))
    assert sent == started and not last.get("more_body", False)
    assert last["body"].startswith(b"event: error\ndata: {")
    with pytest.raises(ValueError, match="no such event"):
        answered(whole(200, b"all of it"), "resp_2", ValueError("no such event"))


def test_of_two_refusals_the_last_one_counts() -> None:
    note("cmpl-a-0-1f", Fallback.STORE_RESTING)
    note("cmpl-a-0-2f", Fallback.TOO_SHORT)
    found = find_refusal("cmpl-a", 0)
    assert found is not None and (found["code"], found["reason"]) == (400, "too_short")


def test_every_reason_is_explained() -> None:
    for reason in set(Fallback) - NEVER_TOLD:
        note(f"cmpl-{reason}-0-1f", reason)
        found = find_refusal(f"cmpl-{reason}", 0)
        assert found is not None and found["code"] in (400, 424, 500, 503)
    assert set(refusals._EXPLANATIONS) == set(Fallback) - NEVER_TOLD


def test_notes_do_not_grow_for_ever_and_the_last_ones_are_found(tmp_path: Path) -> None:
    for number in range(3000):
        note(f"cmpl-r{number}-0-1f")
    files = list((tmp_path / "cache").iterdir())
    assert sum(file.stat().st_size for file in files) < 3 * refusals._MOST_BYTES
    assert all(find_refusal(f"cmpl-r{number}", 0) for number in range(2700, 3000))
    assert find_refusal("cmpl-r0", 0) is None


def test_a_note_that_is_being_written_is_passed_over(tmp_path: Path) -> None:
    note("cmpl-a-0-1f")
    with (tmp_path / "cache" / "refusals.jsonl").open("a") as file:
        file.write('{"request_id": "cm')
    assert find_refusal("cmpl-a", 0) is not None
