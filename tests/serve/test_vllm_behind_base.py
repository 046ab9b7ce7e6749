"""A server with a base and adapters that read its KV, over HTTP, by the client that knows both."""

from __future__ import annotations

import json
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
        with pytest.raises(RefusedError, match="500"):
            complete(server.url, names[0], turns[0].prompt, NEW)
        base = Served(server.url, "base")
        for turn in turns:
            agent = Served(server.url, names[turn.agent])
            answer = complete_behind_base(base, agent, turn.prompt, NEW)
            receiver = agents[turn.agent].models.receiver
            said = turn.answer[1]
            ends = [index for index, each in enumerate(said) if each in receiver.eos_ids]
            said = said[: ends[0]] if ends else said  # the engine's tests go on behind an end
            assert answer.text == receiver.tokenizer.decode(said)
        metrics = read_text(f"{server.url}/metrics")
    # Each agent was asked before the base had read what was said since.
    reasons = [json.loads(line)["reason"] for line in audit.read_text().splitlines()]
    refused = ["not_covered", "partly_covered", "partly_covered"]
    assert reasons == ["not_covered", *(each for reason in refused for each in (reason, None))]
    for outcome, number in (("reused", 3), ("refused: not_covered", 2)):
        (line,) = (each for each in metrics.splitlines() if f'outcome="{outcome}"' in each)
        assert line.startswith("droidkv_requests_total") and line.endswith(f" {number}.0")
