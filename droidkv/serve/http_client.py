"""A client of the OpenAI API that times the first token; enough for demonstrations and tests."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from droidkv.errors import RefusedError, ServeError
from droidkv.serve.refusals import REFUSED_TYPE

_REQUEST_SECONDS = 600.0


@dataclass(frozen=True)
class Completion:
    """One answer.

    Attributes:
        request_id: The server's name for it; audit lines begin with it.
        text: What it said.
        ttft_seconds: From sending the request to the first piece of the answer.
        seconds: Until the answer ended.
    """

    request_id: str
    text: str
    ttft_seconds: float
    seconds: float


def complete(
    url: str,
    model: str,
    prompt_ids: Sequence[int],
    max_tokens: int,
    kv_transfer_params: Mapping[str, Any] | None = None,
    cache_salt: str | None = None,
) -> Completion:
    """Answer token ids greedily through `/v1/completions`.

    Args:
        url: The server's, such as `http://127.0.0.1:8000`.
        model: A name it serves the model under.
        prompt_ids: The prompt.
        max_tokens: Most tokens of the answer.
        kv_transfer_params: What the request says to the connector.
        cache_salt: Keeps the server's own prefix cache from answering.

    Raises:
        RefusedError: A receiver without an own prefill refused it; says why.
        ServeError: The server went away, or the request was wrong.
    """
    body: dict[str, Any] = {
        "model": model,
        "prompt": list(prompt_ids),
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
    }
    if kv_transfer_params is not None:
        body["kv_transfer_params"] = dict(kv_transfer_params)
    if cache_salt is not None:
        body["cache_salt"] = cache_salt
    request = urllib.request.Request(
        f"{url}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    began, first, request_id, text = time.perf_counter(), None, "", ""
    is_whole = False
    try:
        with urllib.request.urlopen(request, timeout=_REQUEST_SECONDS) as answer:
            for line in answer:
                data = line.decode().strip().removeprefix("data: ")
                is_whole = is_whole or data == "[DONE]"
                if not data.startswith("{"):
                    continue
                event = json.loads(data)
                if "choices" not in event:
                    raise _failure(event)
                first = first or time.perf_counter()
                request_id = event["id"]
                text += event["choices"][0]["text"] if event["choices"] else ""
    except ServeError:
        raise
    except (OSError, ValueError) as cause:
        raise ServeError(f"expected {url} to answer, but: {_detail(cause)}") from cause
    if first is None:
        raise ServeError(f"expected an answer from {url}, got an empty one; see the server's log")
    if not is_whole:
        raise ServeError(f"expected a whole answer from {url}, but it broke off; see its log")
    ended = time.perf_counter()
    return Completion(request_id, text, first - began, ended - began)


def read_text(url: str, seconds: float = 10.0) -> str:
    """What a GET brings.

    Raises:
        ServeError: The server refused, or is not there.
    """
    try:
        with urllib.request.urlopen(url, timeout=seconds) as answer:
            text: str = answer.read().decode()
            return text
    except (OSError, ValueError) as cause:
        raise ServeError(f"expected {url} to answer, but: {_detail(cause)}") from cause


def _failure(event: Mapping[str, Any]) -> ServeError:
    """What a streamed event says that is no piece of an answer; vLLM streams refusals too."""
    error = event.get("error")
    if isinstance(error, dict) and error.get("type") == REFUSED_TYPE:
        return RefusedError(error["message"], error["code"], error["reason"])
    return ServeError(f"expected a piece of an answer, got {json.dumps(event)[:300]}")


def _detail(cause: Exception) -> str:
    if isinstance(cause, urllib.error.HTTPError):
        return f"{cause}: {cause.read().decode(errors='replace')[:500]}"
    return str(cause)
