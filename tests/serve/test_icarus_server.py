"""`vllm serve` with decoders as it is started by default: worker processes, requests over HTTP."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from serve.engines import BLOCK, LONG, own_answer
from serve.made_decoders import CLASSES, make_decoders, twins

from droidkv.serve.icarus_launch import ask, launch_decoders
from droidkv.serve.processes import free_port, serving

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

NEW = 5
FLAGS = ("--max-model-len", "512", "--block-size", str(BLOCK), "--return-tokens-as-token-ids")
SHOWN = ("--enable-prompt-tokens-details", "--num-gpu-blocks-override", "28")
START_SECONDS = 400.0


def post(url: str, decoder: str | None) -> dict[str, Any]:
    body = {"model": "base", "prompt": LONG, "max_tokens": NEW, "temperature": 0, "logprobs": 0}
    body |= {"ignore_eos": True}
    body |= {} if decoder is None else {"kv_transfer_params": ask(decoder)}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        found: dict[str, Any] = json.loads(answer.read())
        return found


def test_decoders_over_http_are_their_twins(tmp_path: Path) -> None:
    settings = make_decoders(tmp_path)
    started = launch_decoders(
        settings, tmp_path / "base", CLASSES["llama"], "float32", ("base",), (*FLAGS, *SHOWN)
    )
    environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_NO_USAGE_STATS": "1"}
    with serving(started, free_port(), tmp_path / "log", environment) as server:
        server.wait_until_ready(START_SECONDS)
        cached = []
        for decoder in ("one", "two", None):
            answer = post(server.url, decoder)
            tokens = answer["choices"][0]["logprobs"]["tokens"]
            expected = own_answer(twins(settings)[decoder].model, LONG, NEW)[1]
            assert tokens == [f"token_id:{index}" for index in expected]
            details = answer["usage"]["prompt_tokens_details"] or {}
            cached.append(details.get("cached_tokens") or 0)
        assert cached == [0, 5 * BLOCK, 5 * BLOCK]
        with pytest.raises(urllib.error.HTTPError) as refused:
            post(server.url, "oen")
        assert refused.value.code == 400
        assert "unknown decoder 'oen'" in refused.value.read().decode()
        assert post(server.url, "one")["choices"]
