from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
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


def answered(messages: Messages, request_id: str | None = "mine") -> tuple[Messages, str]:
    """What reaches the client of an app that answers so, and the id that the app saw."""
    sent, seen = Messages(), []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(dict(scope["headers"])[b"x-request-id"].decode())
        note(f"cmpl-{seen[0]}-0-1a2b3c4d")
        for message in messages:
            await send(message)

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [] if request_id is None else [(b"x-request-id", request_id.encode())]
    scope = {"type": "http", "headers": headers}
    asyncio.run(ExplainRefusals(app)(scope, None, send))  # type: ignore[arg-type]
    return sent, seen[0]


@pytest.mark.parametrize("request_id", ["mine", "a/../b [1]", None])
@pytest.mark.parametrize("pieces", [(FAILED,), (FAILED[:9], FAILED[9:])])
def test_a_refused_request_is_answered_with_status_and_reason(
    request_id: str | None, pieces: Sequence[bytes]
) -> None:
    (start, body), seen = answered(whole(500, *pieces), request_id)
    error = json.loads(body["body"])["error"]
    assert (start["status"], error["code"], error["reason"]) == (424, 424, "partly_covered")
    assert "64 of the prompt's 900 tokens" in error["message"]
    assert dict(start["headers"])[b"content-length"] == str(len(body["body"])).encode()
    assert len(start["headers"]) == 2
    assert seen == request_id or request_id is None


def test_a_stream_is_passed_on_as_it_comes_and_ends_in_the_reason() -> None:
    events = [b'data: {"id": "cmpl-x"}\n\n', b"data: %s\n\n" % FAILED, b"data: [DONE]\n\n"]
    sent, _ = answered(whole(200, *events))
    assert [sent[0]["status"], sent[1]["body"], sent[3]["body"]] == [200, events[0], events[2]]
    event = sent[2]["body"]
    assert event.startswith(b"data: {") and event.endswith(b"}\n\n") and sent[2]["more_body"]
    assert json.loads(event.removeprefix(b"data: "))["error"]["reason"] == "partly_covered"


@pytest.mark.parametrize("status", [200, 400, 500])
def test_other_answers_are_left_alone(status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if status == 500:  # an error that is no refusal
        monkeypatch.setattr(refusals, "find_refusal", lambda request_id: None)
    messages = whole(status, FAILED)
    sent, _ = answered(messages)
    assert [each["type"] for each in sent] == [each["type"] for each in messages]
    assert (sent[0], sent[1]["body"]) == (messages[0], FAILED)


def test_what_is_no_request_passes() -> None:
    scopes = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        scopes.append(scope)

    asyncio.run(ExplainRefusals(app)({"type": "lifespan"}, None, None))  # type: ignore[arg-type]
    assert scopes == [{"type": "lifespan"}]


@pytest.mark.parametrize(
    "engine_name", ["cmpl-1-0-9f", "chatcmpl-1-9f", "1_cmpl-1-0-9f", "chatcmpl-1_2-9f"]
)
def test_a_request_is_known_by_what_the_engine_calls_it(engine_name: str) -> None:
    assert find_refusal("1") is None
    note(engine_name)
    assert find_refusal("1") is not None
    for other in ("", "11", "cmpl-1", "9f", ".", "2"):
        assert find_refusal(other) is None


def test_of_two_refusals_the_last_one_counts() -> None:
    note("cmpl-a-0-1f", Fallback.STORE_RESTING)
    note("cmpl-a-0-2f", Fallback.TOO_SHORT)
    found = find_refusal("a")
    assert found is not None and (found["code"], found["reason"]) == (400, "too_short")


def test_every_reason_is_explained() -> None:
    for reason in set(Fallback) - NEVER_TOLD:
        note(f"cmpl-{reason}-0-1f", reason)
        found = find_refusal(reason)
        assert found is not None and found["code"] in (400, 424, 500, 503)
    assert set(refusals._EXPLANATIONS) == set(Fallback) - NEVER_TOLD


def test_notes_do_not_grow_for_ever_and_the_last_ones_are_found(tmp_path: Path) -> None:
    for number in range(3000):
        note(f"cmpl-r{number}-0-1f")
    files = list((tmp_path / "cache").iterdir())
    assert sum(file.stat().st_size for file in files) < 3 * refusals._MOST_BYTES
    assert all(find_refusal(f"r{number}") for number in range(2700, 3000))
    assert find_refusal("r0") is None


def test_a_note_that_is_being_written_is_passed_over(tmp_path: Path) -> None:
    note("cmpl-a-0-1f")
    with (tmp_path / "cache" / "refusals.jsonl").open("a") as file:
        file.write('{"request_id": "cm')
    assert find_refusal("a") is not None
