"""PrefillShare in one engine: a base and two adapters that read its KV, on one prefix cache."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from serve.agents import NEW, Agent, Turn, make_agents, make_turns
from serve.engines import (
    BLOCK,
    OPTIONS,
    TOLERANCE,
    Answer,
    assert_same,
    clean_up,
    own_answer,
    reference,
    sampling_params,
    token_ids,
    vllm,
)

from droidkv.errors import ServeError

pytest.importorskip("peft")
pytestmark = pytest.mark.vllm

STRANGE = token_ids(200, seed=51)


class SharedEngine:
    """An engine with the base and both agents' adapters; None names the base."""

    def __init__(self, agents: Sequence[Agent], folder: Path) -> None:
        from vllm.lora.request import LoRARequest

        self._audit = folder / "shared.jsonl"
        self._adapters = [
            LoRARequest(str(index), index + 1, str(agent.pair.receiver.adapter))
            for index, agent in enumerate(agents)
        ]
        transfer = {
            "kv_connector": "BasePrefixConnector",
            "kv_connector_module_path": "droidkv.serve.vllm_base_prefix",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "fail",
            "kv_connector_extra_config": {"audit": str(self._audit)},
        }
        self.llm = vllm.LLM(
            model=str(agents[0].models.folder / "sender"),
            kv_transfer_config=transfer,
            enable_lora=True,
            max_lora_rank=8,
            max_loras=3,  # one stays empty
            **OPTIONS,
        )

    def generate(
        self,
        agents: Sequence[int | None],
        prompts: Sequence[list[int]],
        new: int = NEW,
        plan: str | None = None,
        **sampling: Any,
    ) -> list[Any]:
        """vLLM's own outputs."""
        outputs: list[Any] = self.llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts],
            [sampling_params(plan, new, **sampling)] * len(prompts),
            use_tqdm=False,
            lora_request=[None if agent is None else self._adapters[agent] for agent in agents],
        )
        return outputs

    def records(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self._audit.read_text().splitlines()]

    def forget(self) -> None:
        """Empty the prefix cache; fails unless every block was given back."""
        assert self.llm.reset_prefix_cache()


def answer_of(output: Any) -> Answer:
    first = output.outputs[0].logprobs[0]
    logprobs = torch.tensor([first[index].logprob for index in range(len(first))])
    return logprobs, list(output.outputs[0].token_ids)


@pytest.fixture(scope="module")
def agents(tmp_path_factory: pytest.TempPathFactory) -> list[Agent]:
    return make_agents(tmp_path_factory.mktemp("agents"))


@pytest.fixture(scope="module")
def turns(agents: list[Agent]) -> list[Turn]:
    return make_turns(agents, BLOCK)


@pytest.fixture(scope="module")
def engine(agents: list[Agent], tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedEngine]:
    engine = SharedEngine(agents, tmp_path_factory.mktemp("engine"))
    yield engine
    engine.llm.llm_engine.engine_core.shutdown()
    del engine.llm
    clean_up()


@pytest.fixture(autouse=True)
def _forget(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "engine" in request.fixturenames:
        request.getfixturevalue("engine").forget()


def test_agents_take_turns_and_only_new_tokens_are_prefilled(
    agents: list[Agent], turns: list[Turn], engine: SharedEngine
) -> None:
    known = 0
    for turn in turns:
        (base,) = engine.generate([None], [turn.prompt], new=1)
        assert base.num_cached_tokens == known
        (output,) = engine.generate([turn.agent], [turn.prompt])
        assert_same(answer_of(output), turn.answer)
        assert output.num_cached_tokens == (len(turn.prompt) - 1) // BLOCK * BLOCK
        # What the agent generated the base has not read yet: its blocks are the agent's own.
        known = len(turn.prompt) // BLOCK * BLOCK
        own = reference(agents[turn.agent].models, turn.prompt, None, 1)
        assert (turn.answer[0] - own[0]).abs().max() > 100 * TOLERANCE


def test_a_batch_of_both_agents_and_the_base(
    agents: list[Agent], turns: list[Turn], engine: SharedEngine
) -> None:
    prompt = turns[2].prompt
    engine.generate([None], [prompt], new=1)
    asked = [0, 1, None, 0, 1]
    for output, agent in zip(engine.generate(asked, [prompt] * 5), asked, strict=True):
        if agent is None:
            wanted = own_answer(agents[0].models.sender.model, prompt, NEW)
        else:
            wanted = agents[agent].answer(prompt, BLOCK)
        assert_same(answer_of(output), wanted)


def test_without_the_bases_kv_a_request_ends_in_an_error(
    turns: list[Turn], engine: SharedEngine
) -> None:
    prompt = turns[0].prompt
    engine.generate([None], [prompt], new=1)
    partly = prompt[: 2 * BLOCK] + STRANGE
    asked = [STRANGE, prompt, partly]
    ends = [output.outputs[0].finish_reason for output in engine.generate([0] * 3, asked)]
    assert ends == ["error", "length", "error"]
    reasons = {each["prompt_tokens"]: each["reason"] for each in engine.records()[-3:]}
    assert [reasons[len(each)] for each in asked] == ["not_covered", None, "partly_covered"]
    (output,) = engine.generate([0], [prompt], prompt_logprobs=0)
    assert output.outputs[0].finish_reason == "error"
    # Nothing of what was refused is left to be mistaken for the base's.
    (base,) = engine.generate([None], [partly], new=1)
    assert base.num_cached_tokens == 2 * BLOCK


def test_an_own_prefill_by_choice_is_found_by_nobody_else(
    agents: list[Agent], turns: list[Turn], engine: SharedEngine
) -> None:
    prompt = turns[0].prompt
    (own,) = engine.generate([0], [prompt], new=6, plan="all")
    assert_same(answer_of(own), own_answer(agents[0].models.receiver.model, prompt))
    (base,) = engine.generate([None], [prompt], new=6)
    assert base.num_cached_tokens == 0
    assert_same(answer_of(base), own_answer(agents[0].models.sender.model, prompt))
    (other,) = engine.generate([1], [prompt])
    assert_same(answer_of(other), agents[1].answer(prompt, BLOCK))


@pytest.mark.parametrize("new", [90])
def test_preempted_requests_answer_the_same(
    agents: list[Agent], turns: list[Turn], engine: SharedEngine, new: int
) -> None:
    """Blocks are scarce (28 of 64 tokens), so that some are taken away and found again."""
    prompts = [turns[0].prompt + token_ids(3 + index, seed=70 + index) for index in range(8)]
    for prompt in prompts:
        engine.generate([None], [prompt], new=1)
    num_answered = 0
    for output, prompt in zip(engine.generate([0, 1] * 4, prompts, new), prompts, strict=True):
        if output.outputs[0].finish_reason == "error":
            continue  # the base's blocks were gone: refused, never answered otherwise
        num_answered += 1
        agent = agents[prompts.index(prompt) % 2]
        assert_same(answer_of(output), agent.answer(prompt, BLOCK, new))
    assert num_answered >= 4


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"lora_config": None}, "enable-lora"),
        ({"lora_config": SimpleNamespace(max_loras=1)}, "max-loras"),
        ({"policy": "recompute"}, "'fail'"),
        ({"enable_prefix_caching": False}, "enable-prefix-caching"),
        ({"own_tokens": BLOCK - 1}, "own_tokens"),
    ],
)
def test_what_cannot_work_is_refused_by_name(changes: dict[str, Any], named: str) -> None:
    from droidkv.serve.vllm_base_prefix import check_engine

    def check(**changes: Any) -> None:
        config = SimpleNamespace(
            kv_transfer_config=SimpleNamespace(
                kv_load_failure_policy=changes.get("policy", "fail")
            ),
            lora_config=changes.get("lora_config", SimpleNamespace(max_loras=2)),
            cache_config=SimpleNamespace(
                enable_prefix_caching=changes.get("enable_prefix_caching", True)
            ),
        )
        check_engine(config, changes.get("own_tokens"), BLOCK)

    check()
    with pytest.raises(ServeError, match=named):
        check(**changes)
