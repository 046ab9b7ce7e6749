"""A server with a base and adapters that read its KV, over HTTP, by the client that knows both."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path

import pytest
from serve.agents import NEW, make_agents, make_turns
from serve.engines import BLOCK, ENVIRONMENT

from droidkv.errors import RefusedError
from droidkv.serve.base_prefix import BasePrefixSettings
from droidkv.serve.base_prefix_launch import launch_adapters, pair_adapters
from droidkv.serve.behind_base import Served, complete_behind_base
from droidkv.serve.http_client import complete, read_text
from droidkv.serve.processes import free_port, serving

pytest.importorskip("peft")
pytestmark = [pytest.mark.vllm, pytest.mark.slow]

FLAGS = ("--enforce-eager", "--max-model-len", "512", "--block-size", str(BLOCK))


def tokens(agent: Served, prompt: list[int]) -> list[int]:
    """An answer's token ids: random bytes are no text that two decoders would agree on."""
    body = {"model": agent.model, "prompt": prompt, "max_tokens": NEW, "temperature": 0}
    request = urllib.request.Request(
        f"{agent.url}/v1/completions",
        json.dumps({**body, "ignore_eos": True, "return_token_ids": True}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=300) as answer:
        found: list[int] = json.load(answer)["choices"][0]["token_ids"]
        return found


def test_agents_take_turns_over_http(tmp_path: Path) -> None:
    agents = make_agents(tmp_path)
    turns = make_turns(agents, BLOCK)
    _, adapters = pair_adapters([agent.pair for agent in agents])
    names, audit, port = list(adapters), tmp_path / "audit.jsonl", free_port()
    launch = launch_adapters(
        BasePrefixSettings(audit=str(audit)),
        adapters,
        agents[0].models.folder / "sender",
        "float32",
        ("base",),
        FLAGS,
    )
    environment = {**ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    with serving(launch, port, tmp_path / "server.log", environment) as server:
        server.wait_until_ready(500)
        with pytest.raises(RefusedError, match="not_covered") as raised:
            complete(server.url, names[0], turns[0].prompt, NEW)
        assert raised.value.status == 424
        base = Served(server.url, "base")
        for turn in turns:
            agent = Served(server.url, names[turn.agent])
            complete_behind_base(base, agent, turn.prompt, NEW)
            assert tokens(agent, turn.prompt) == turn.answer[1]
        metrics = read_text(f"{server.url}/metrics")
    # Each agent was asked before the base had read what was said since.
    reasons = [json.loads(line)["reason"] for line in audit.read_text().splitlines()]
    refused = ["not_covered", "partly_covered", "partly_covered"]
    each_turn = [reason for why in refused for reason in (why, None, None)]
    assert reasons == ["not_covered", *each_turn]
    for outcome, number in (("reused", 6), ("refused: not_covered", 2)):
        (line,) = (
            each
            for each in metrics.splitlines()
            if each.startswith("droidkv_requests_total") and f'outcome="{outcome}"' in each
        )
        assert line.endswith(f" {number}.0")
