from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from droidkv.errors import RefusedError, ServeError
from droidkv.serve.behind_base import Served, complete_behind_base

PROMPT = [1, 2, 3]


class Servers:
    """A base and a receiver at one address; the receiver refuses until the base has read.

    Attributes:
        asked: Models in the order they were asked, and for how many tokens.
        refusals: How often the receiver refuses once the base has read.
        error: What it refuses with.
        in_stream: Whether errors come as events of an answer that has begun.
        is_whole: Whether answers end as they should.
    """

    def __init__(self) -> None:
        self.asked: list[tuple[str, int]] = []
        self.bodies: list[dict[str, Any]] = []
        self.refusals = 0
        self.in_stream = self.is_whole = True
        self.error: dict[str, Any] = {
            "message": "it is refused",
            "type": "droidkv_refused",
            "code": 424,
            "reason": "not_covered",
        }
        servers = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                servers.answer(self, body)

            def log_message(self, *arguments: Any) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._http.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._http.server_port}"

    def answer(self, handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        has_read = ("base", 1) in self.asked
        self.asked.append((body["model"], body["max_tokens"]))
        self.bodies.append(body)
        is_refused = body["model"] != "base" and (not has_read or self.refusals > 0)
        if is_refused and has_read:
            self.refusals -= 1
        error = {"error": self.error}
        handler.send_response(self.error["code"] if is_refused and not self.in_stream else 200)
        handler.end_headers()
        pieces: list[Any] = [{"id": "cmpl-1", "choices": [{"text": "yes"}]}]
        for piece in [error] if is_refused else pieces:
            handler.wfile.write(f"data: {json.dumps(piece)}\n\n".encode())
        if self.is_whole:
            handler.wfile.write(b"data: [DONE]\n\n")

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()

    def ask(self, wait_seconds: float = 20.0, prefix_tokens: int | None = None) -> str:
        base, receiver = Served(self.url, "base"), Served(self.url, "tuned")
        return complete_behind_base(
            base, receiver, PROMPT, 5, prefix_tokens, wait_seconds=wait_seconds
        ).text


@pytest.fixture
def servers() -> Iterator[Servers]:
    made = Servers()
    yield made
    made.close()


def test_the_base_reads_what_the_receiver_refuses(servers: Servers) -> None:
    servers.refusals = 2
    assert servers.ask() == "yes"
    assert servers.asked == [("tuned", 5), ("base", 1), *[("tuned", 5)] * 3]
    servers.asked.clear()
    servers.asked.append(("base", 1))
    assert servers.ask() == "yes"
    assert servers.asked[1:] == [("tuned", 5)]  # the base is not asked for nothing


def test_the_base_reads_no_more_than_the_prefix(servers: Servers) -> None:
    assert servers.ask(prefix_tokens=2) == "yes"
    refused, base, answered = servers.bodies
    assert (refused["prompt"], base["prompt"], answered["prompt"]) == (PROMPT, PROMPT[:2], PROMPT)
    for body in (refused, answered):
        assert body["kv_transfer_params"] == {"droidkv": {"prefix_tokens": 2}}


@pytest.mark.parametrize(
    ("reason", "params"),
    [("load_corrupt", {"droidkv": {"overwrite": True}}), ("load_absent", None)],
)
def test_the_base_stores_anew_what_is_damaged(
    servers: Servers, reason: str, params: dict[str, Any] | None
) -> None:
    servers.error["reason"] = reason
    assert servers.ask() == "yes"
    assert servers.bodies[1].get("kv_transfer_params") == params


def test_what_turns_out_to_be_damaged_later_is_read_once_more(servers: Servers) -> None:
    """The first refusal told of something else, so the base stored nothing over what was there."""
    answer = servers.answer

    def later(handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        answer(handler, body)
        if body["model"] == "base":
            servers.error["reason"] = "load_corrupt"

    servers.answer, servers.refusals = later, 2  # type: ignore[method-assign]
    assert servers.ask() == "yes"
    models = [model for model, _ in servers.asked]
    assert models == ["tuned", "base", "tuned", "base", "tuned", "tuned"]
    assert servers.bodies[3]["kv_transfer_params"] == {"droidkv": {"overwrite": True}}


@pytest.mark.parametrize(("code", "reason"), [(503, "weights_changed"), (500, "load_wrong_shape")])
def test_what_no_waiting_mends_is_not_waited_for(servers: Servers, code: int, reason: str) -> None:
    servers.error |= {"code": code, "reason": reason}
    with pytest.raises(RefusedError, match="it is refused"):
        servers.ask()
    assert servers.asked == [("tuned", 5)]


def test_an_answer_that_breaks_off_is_none(servers: Servers) -> None:
    servers.asked.append(("base", 1))
    servers.is_whole = False
    with pytest.raises(ServeError, match="broke off"):
        servers.ask()


def test_a_receiver_that_goes_on_refusing_is_given_up(servers: Servers) -> None:
    servers.refusals = 1000
    with pytest.raises(RefusedError, match=r"still refuses.*it is refused") as raised:
        servers.ask(wait_seconds=0.2)
    assert (raised.value.status, raised.value.reason) == (424, "not_covered")


def test_what_is_refused_whatever_the_base_has_read_is_given_up_at_once(servers: Servers) -> None:
    servers.error |= {"code": 400, "reason": "too_short"}
    with pytest.raises(RefusedError, match="it is refused"):
        servers.ask()
    assert servers.asked == [("tuned", 5)]


@pytest.mark.parametrize("in_stream", [False, True])
def test_a_wrong_request_is_no_refusal(servers: Servers, in_stream: bool) -> None:
    servers.in_stream, servers.error = in_stream, {"message": "no such model", "code": 404}
    with pytest.raises(ServeError) as raised:
        servers.ask()
    assert not isinstance(raised.value, RefusedError)
    assert servers.asked == [("tuned", 5)]
