"""How the client of a refused request learns why. ASGI alone; no engine here.

    vllm serve ... --middleware droidkv.serve.refusals.ExplainRefusals

vLLM makes HTTP 500 without a reason of every request that its engine fails. So the engine's process
notes the reason in a file of droidkv's cache folder, before vLLM answers, and this middleware, in
any number of API server processes, finds it by vLLM's name for the request and answers with it. The
processes must see one cache folder.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from pathlib import Path
from typing import Any

from droidkv.content import cache_folder
from droidkv.serve.connector_plan import ASK_KEYS, OVERWRITE, PARAMS_KEY, AuditRecord, Fallback

MIDDLEWARE = f"{__name__}.ExplainRefusals"
REFUSED_TYPE = "droidkv_refused"
BAD_REQUEST, FAILED_DEPENDENCY, SERVER_ERROR, UNAVAILABLE = 400, 424, 500, 503
# The file begins anew beyond that; the one before stays beside it.
_MOST_BYTES = 1 << 16
_STREAMED_ERROR = b'data: {"error"'

_READ_FIRST = "let the sender read the prefix, then ask again"
_STORE_DOWN = (UNAVAILABLE, "the store does not answer; ask again later")
_DAMAGED = (
    FAILED_DEPENDENCY,
    f"the store's copy is damaged; {_READ_FIRST}. The sender's request has to say "
    f"'{OVERWRITE}': true, since it stores nothing twice otherwise",
)
_MISPLACED = (SERVER_ERROR, "the store holds something else in its place; see the server's log")
_NEEDS_OWN = "would need a prefill of its own; ask a model that has one"
_EXPLANATIONS: Mapping[Fallback, tuple[int, str]] = {
    Fallback.NOT_COVERED: (FAILED_DEPENDENCY, f"the sender has not read its prefix; {_READ_FIRST}"),
    Fallback.PARTLY_COVERED: (
        FAILED_DEPENDENCY,
        f"the sender has read too little of its prefix; {_READ_FIRST}, or name the prefix with "
        "'prefix_tokens'",
    ),
    Fallback.LOAD_ABSENT: (FAILED_DEPENDENCY, f"the store has dropped its prefix; {_READ_FIRST}"),
    Fallback.LOAD_SHORT: _DAMAGED,
    Fallback.LOAD_CORRUPT: _DAMAGED,
    Fallback.LOOKUP_TIMEOUT: _STORE_DOWN,
    Fallback.LOOKUP_BACKEND_DOWN: _STORE_DOWN,
    Fallback.STORE_RESTING: _STORE_DOWN,
    Fallback.LOAD_TIMEOUT: _STORE_DOWN,
    Fallback.LOAD_BACKEND_DOWN: _STORE_DOWN,
    Fallback.LOAD_WRONG_NAMESPACE: _MISPLACED,
    Fallback.LOAD_WRONG_SHAPE: _MISPLACED,
    Fallback.RECOMPUTE_FAILED: (SERVER_ERROR, "recomputing failed; see the server's log"),
    Fallback.WEIGHTS_CHANGED: (
        UNAVAILABLE,
        "the server's weights were updated while it ran; it has to be started anew",
    ),
    Fallback.BAD_PLAN: (
        BAD_REQUEST,
        f"kv_transfer_params[{PARAMS_KEY!r}] says what cannot be read or done here; expected a "
        f"table with some of {', '.join(sorted(ASK_KEYS))}",
    ),
    Fallback.NO_STITCH: (BAD_REQUEST, "its plan needs a stitching map that the server lacks"),
    Fallback.NOT_ASKED: (BAD_REQUEST, "the server picks no plan by itself; name one with 'plan'"),
    Fallback.TOO_SHORT: (
        BAD_REQUEST,
        "its prefix is shorter than what is reused at once (a chunk or block) and one token more",
    ),
    Fallback.LORA: (
        BAD_REQUEST,
        "it names an adapter that does not read the sender's KV, or one more than were started",
    ),
    Fallback.MULTIMODAL: (BAD_REQUEST, f"images {_NEEDS_OWN}"),
    Fallback.PROMPT_EMBEDS: (BAD_REQUEST, f"prompt embeddings {_NEEDS_OWN}"),
    Fallback.PROMPT_LOGPROBS: (BAD_REQUEST, f"log-probabilities of the prompt {_NEEDS_OWN}"),
    Fallback.POOLING: (BAD_REQUEST, f"pooling {_NEEDS_OWN}"),
    Fallback.STREAMED_INPUT: (BAD_REQUEST, f"input in pieces {_NEEDS_OWN}"),
    Fallback.OPTED_OUT: (BAD_REQUEST, f"a request that reads no prefix cache {_NEEDS_OWN}"),
}

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


def note_refusal(record: AuditRecord) -> None:
    """The engine's part: keep why a request is refused until its client is told.

    Raises:
        OSError: The cache folder cannot be written.
    """
    path = _notes()
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and path.stat().st_size > _MOST_BYTES:
        path.replace(_before(path))
    note = {
        "time": time.time(),
        "request_id": record.request_id,
        "reason": str(record.reason),
        "prompt_tokens": record.prompt_tokens,
        "held_tokens": max(record.covered_tokens, record.local_tokens),
    }
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(note) + "\n")


def find_refusal(request_id: str, since: float) -> dict[str, Any] | None:
    """Why a request was refused, as the `error` of an answer; None = it was not, or is not known.

    Args:
        request_id: The API server's name for it; the engine's name holds it.
        since: When it arrived: clients may use a name again.
    """
    # vLLM adds which of several answers and prompts it is, and something random.
    name = re.compile(rf"(\d+_)?{re.escape(request_id)}(_\d+)?(-\d+)?(-[0-9a-f]+)?")
    path = _notes()
    for file in (path, _before(path)):
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except OSError:
            continue
        for line in reversed(lines):
            try:
                note = json.loads(line)
            except ValueError:  # being written by another server
                continue
            if note["time"] >= since and name.fullmatch(note["request_id"]):
                return _error(note)
    return None


class ExplainRefusals:
    """ASGI middleware that answers refused requests with status and reason.

    An answer that has begun as a stream keeps its status, as vLLM's own errors do; its error event
    holds the other.

    Args:
        app: What it stands before.
    """

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        state = dict(scope.get("state") or {})
        explained = _Explained(state, send)
        try:
            await self._app({**scope, "state": state}, receive, explained.send)
        except Exception:
            # vLLM has no event for an error in a stream of /v1/responses, and breaks it off.
            if not await explained.end_stream():
                raise


class _Explained:
    """One answer on its way out: its errors, if the request was refused, become the reason."""

    def __init__(self, state: Mapping[str, Any], send: Send) -> None:
        self._state, self._send = state, send
        self._since = time.time()
        self._start: Message | None = None
        self._body = b""
        self._is_streaming = False

    def _refusal(self) -> dict[str, Any] | None:
        """Of the request as vLLM calls it, which it leaves in the state of the connection."""
        metadata = self._state.get("request_metadata")
        return None if metadata is None else find_refusal(metadata.request_id, self._since)

    async def end_stream(self) -> bool:
        """End an answer that broke off with the reason; False if it is none, or none is known."""
        error = self._refusal() if self._is_streaming else None
        if error is None:
            return False
        body = b"event: error\ndata: %s\n\n" % _json(error)
        await self._send({"type": "http.response.body", "body": body})
        return True

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start" and message["status"] == SERVER_ERROR:
            self._start = message  # held back until its body is there
            return
        self._is_streaming = self._start is None and (
            message["type"] == "http.response.start" or message.get("more_body", False)
        )
        if message["type"] != "http.response.body":
            await self._send(message)
        elif self._start is not None:
            self._body += message.get("body", b"")
            if not message.get("more_body", False):
                await self._send_whole(self._start)
        elif message.get("body", b"").startswith(_STREAMED_ERROR):
            error = self._refusal()
            if error is not None:
                message = {**message, "body": b"data: %s\n\n" % _json(error)}
            await self._send(message)
        else:
            await self._send(message)

    async def _send_whole(self, start: Message) -> None:
        error = self._refusal()
        if error is not None:
            self._body = _json(error)
            kept = [each for each in start["headers"] if each[0].lower() != b"content-length"]
            length = (b"content-length", str(len(self._body)).encode())
            start = {**start, "status": error["code"], "headers": [*kept, length]}
        await self._send(start)
        await self._send({"type": "http.response.body", "body": self._body})


def _error(note: Mapping[str, Any]) -> dict[str, Any]:
    reason = Fallback(note["reason"])
    status, why = _EXPLANATIONS[reason]
    held = ""
    if status == FAILED_DEPENDENCY:
        held = f" ({note['held_tokens']} of the prompt's {note['prompt_tokens']} tokens are there)"
    return {
        "message": f"droidkv refused the request, {reason}: {why}{held}",
        "type": REFUSED_TYPE,
        "param": None,
        "code": status,
        "reason": str(reason),
    }


def _json(error: Mapping[str, Any]) -> bytes:
    return json.dumps({"error": error}).encode()


def _notes() -> Path:
    return cache_folder() / "refusals.jsonl"


def _before(path: Path) -> Path:
    return path.with_suffix(".old.jsonl")
