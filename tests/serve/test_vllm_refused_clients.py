"""What clients of a refusing receiver are told over HTTP, by two API server processes."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from serve.engines import BLOCK, CHUNK, LONG, make_models

from droidkv.serve.launch import launch
from droidkv.serve.processes import free_port, serving
from droidkv.serve.settings import ServeSettings

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

START_SECONDS = 500.0
FLAGS = ("--enforce-eager", "--max-model-len", "512", "--block-size", str(BLOCK))
COMPLETION = ("completions", {"prompt": LONG})
RESPONSE = ("responses", {"input": "word " * 60, "max_output_tokens": 2})
CHAT = ("chat/completions", {"messages": [{"role": "user", "content": "word " * 60}]})


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A receiver whose store is empty, and lives in its own process."""
    folder = tmp_path_factory.mktemp("refused")
    make_models(folder)
    settings = ServeSettings(
        role="receiver",
        store="memory://nothing",
        chunk_tokens=CHUNK,
        sender=str(folder / "sender"),
        allow_unprofiled=True,
        plan="[0,0)",
        on_miss="error",
    )
    flags = (*FLAGS, "--api-server-count", "2")
    started = launch(settings, folder / "receiver", "float32", ("tiny",), flags)
    environment = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DROIDKV_CACHE": str(folder / "cache"),
    }
    with serving(started, free_port(), folder / "server.log", environment) as server:
        server.wait_until_ready(START_SECONDS)
        yield server.url


def ask(
    url: str, endpoint: str, headers: Mapping[str, str] | None = None, **body: Any
) -> tuple[int, Any]:
    """Status and answer; of a stream its events."""
    body = {"model": "tiny", "max_tokens": 2, "temperature": 0, **body}
    request = urllib.request.Request(
        f"{url}/v1/{endpoint}",
        json.dumps(body).encode(),
        {"Content-Type": "application/json", **(headers or {})},
    )
    try:
        with urllib.request.urlopen(request, timeout=300) as answer:
            status, text = answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        status, text = error.code, error.read().decode()
    if not body.get("stream") or status != 200:
        return status, json.loads(text)
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line[:6] == "data: "]
    assert endpoint == "responses" or lines.pop() == "[DONE]"
    return status, [json.loads(line) for line in lines]


@pytest.mark.parametrize(("endpoint", "body"), [COMPLETION, CHAT, RESPONSE])
def test_a_refused_client_is_told_why(url: str, endpoint: str, body: dict[str, Any]) -> None:
    for number in range(4):  # so that both processes are asked
        headers = {"X-Request-Id": "my own"} if number == 3 else None
        status, answer = ask(url, endpoint, headers, **body)
        error = answer["error"]
        assert (status, error["code"], error["reason"]) == (424, 424, "not_covered")
        assert error["type"] == "droidkv_refused"
        _, events = ask(url, endpoint, stream=True, **body)
        assert events[-1]["error"]["reason"] == "not_covered"


def test_each_reason_has_its_status(url: str) -> None:
    for prompt, params, reason in (
        (LONG[: CHUNK // 2], None, "too_short"),
        (LONG, {"droidkv": {"plan": "[7,9)"}}, "bad_plan"),
    ):
        status, answer = ask(url, "completions", prompt=prompt, kv_transfer_params=params)
        assert (status, answer["error"]["reason"]) == (400, reason)


def test_one_refused_prompt_of_several_is_told_too(url: str) -> None:
    status, answer = ask(url, "completions", prompt=[LONG, LONG[:20]], n=2, temperature=1)
    assert status in (400, 424)
    assert answer["error"]["reason"] in ("not_covered", "too_short")


@pytest.mark.parametrize("stream", [False, True])
def test_other_answers_are_vllms(url: str, stream: bool) -> None:
    own = {"droidkv": {"reuse": False}}
    status, answer = ask(url, "completions", prompt=LONG, kv_transfer_params=own, stream=stream)
    assert status == 200
    assert (answer[0] if stream else answer)["choices"]
    status, answer = ask(url, "completions", prompt=LONG, model="another", stream=stream)
    assert status == 404
    assert "another" in answer["error"]["message"]
