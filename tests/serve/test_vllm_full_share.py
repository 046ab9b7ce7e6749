"""PrefillShare on real engines: the base as sender, two tuned modules as receivers.

One engine lives at a time in this process.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from serve.agents import NEW, QUESTIONS, Agent, Turn, make_agents, make_turns
from serve.engines import (
    BLOCK,
    CHUNK,
    TOLERANCE,
    Answer,
    Engine,
    assert_same,
    reference,
    sampling_params,
    token_ids,
)
from torch import Tensor

from droidkv.serve.objects import ObjectName
from droidkv.serve.opening import open_store
from droidkv.serve.vllm_blocks import held_by

pytest.importorskip("peft")
pytestmark = pytest.mark.vllm

STORE = "memory://test-vllm-full-share"
STRANGE = token_ids(200, seed=51)


def start(agent: Agent) -> Engine:
    """An agent's engine."""
    return Engine(
        agent.models.folder,
        "receiver",
        STORE,
        sender=None,
        allow_unprofiled=False,
        stitch=None,
        profiles=[str(agent.profile)],
        max_loss=1e6,
        on_miss="error",
        own_tokens=CHUNK,
    )


@pytest.fixture(scope="module")
def agents(tmp_path_factory: pytest.TempPathFactory) -> list[Agent]:
    return make_agents(tmp_path_factory.mktemp("agents"))


@pytest.fixture(scope="module")
def turns(agents: list[Agent]) -> list[Turn]:
    return make_turns(agents, CHUNK)


@pytest.fixture(scope="module")
def cached_tokens(agents: list[Agent], turns: list[Turn]) -> list[int]:
    """The base's engine reads each turn's prompt: tokens of each that it had already."""
    engine = Engine(agents[0].models.folder, "sender", STORE, hidden_layers=[])
    try:
        cached = []
        for turn in turns:
            (output,) = engine.generate([turn.prompt], [None], new=1)
            cached.append(output.num_cached_tokens)
        assert engine.worker().flush(30)
        return cached
    finally:
        engine.stop()


@pytest.fixture(scope="module")
def second(
    agents: list[Agent], turns: list[Turn], cached_tokens: list[int]
) -> tuple[Answer, dict[str, Any]]:
    """The second agent's engine: its turn's answer and audit line."""
    engine = start(agents[1])
    try:
        (answer,) = engine.answer([turns[1].prompt], [None], new=NEW)
        return answer, engine.records()[-1]
    finally:
        engine.stop()


@pytest.fixture(scope="module")
def engine(agents: list[Agent], second: tuple[Answer, dict[str, Any]]) -> Iterator[Engine]:
    """The first agent's engine, once the second's is gone."""
    engine = start(agents[0])
    yield engine
    engine.stop()


def test_on_a_switch_the_base_prefills_only_the_new_tokens(
    turns: list[Turn], cached_tokens: list[int]
) -> None:
    assert cached_tokens[0] == 0
    for (before, after), cached in zip(pairwise(turns), cached_tokens[1:], strict=True):
        assert cached == len(before.prompt) // BLOCK * BLOCK
        new_tokens = len(before.answer[1]) + len(QUESTIONS[0]) + 1
        assert len(after.prompt) - cached <= new_tokens + BLOCK


def test_each_turn_is_answered_as_by_the_hugging_face_engine(
    agents: list[Agent], turns: list[Turn], engine: Engine
) -> None:
    first, _, third = turns
    for turn in (first, third):
        (answer,) = engine.answer([turn.prompt], [None], new=NEW)
        assert_same(answer, turn.answer)
        record = engine.records()[-1]
        assert (record["reason"], record["plan"]) == (None, "[0,0)")
        assert record["advertised_tokens"] == (len(turn.prompt) - 1) // CHUNK * CHUNK
        # Its own prefill, which it was not trained on, is far from that.
        own = reference(agents[0].models, turn.prompt, None, 1)
        assert (answer[0] - own[0]).abs().max() > 100 * TOLERANCE


def test_a_batch_of_both_ways_to_load(
    turns: list[Turn], engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    half = engine.scheduler().connector._receiver_scheduler
    engine.forget()
    for asynchronous in (False, True):
        rules = replace(half.rules, asynchronous=asynchronous)
        monkeypatch.setattr(half, "rules", rules)
        prompts = [turns[0].prompt, turns[2].prompt, turns[0].prompt]
        answers = engine.answer(prompts, [None] * 3, new=NEW)
        for answer, turn in zip(answers, (turns[0], turns[2], turns[0]), strict=True):
            assert_same(answer, turn.answer)


def test_an_engine_of_its_own_holds_a_copy_of_the_prefix(turns: list[Turn], engine: Engine) -> None:
    """Why memory is saved by one engine for all agents only."""
    engine.forget()
    prompt = turns[0].prompt
    held = held_by(engine.llm, [prompt], [sampling_params(None, 20)], new_tokens=10)
    assert held == -(-(len(prompt) + 10) // BLOCK)


def outcomes(engine: Engine, prompts: Sequence[list[int]], **sampling: Any) -> list[str]:
    """How requests ended: their finish reasons; what ends in an error has no tokens."""
    outputs = engine.generate(prompts, [None] * len(prompts), **sampling)
    for output in outputs:
        assert (output.outputs[0].finish_reason == "error") == (not output.outputs[0].token_ids)
    return [output.outputs[0].finish_reason for output in outputs]


def test_what_cannot_be_reused_ends_in_an_error_and_the_rest_is_answered(
    turns: list[Turn], engine: Engine
) -> None:
    short = turns[0].prompt[: CHUNK // 2]
    partly = turns[0].prompt[:CHUNK] + STRANGE
    prompts = [STRANGE, turns[0].prompt, short, partly]
    assert outcomes(engine, prompts) == ["error", "length", "error", "error"]
    records = {each["prompt_tokens"]: each for each in engine.records()[-4:]}
    found = [(records[len(each)]["refused"], records[len(each)]["reason"]) for each in prompts]
    assert found == [
        (True, "not_covered"),
        (False, None),
        (True, "too_short"),
        (True, "partly_covered"),
    ]
    engine.forget()  # which fails unless every block was given back


def test_prompt_log_probabilities_would_need_an_own_prefill(
    turns: list[Turn], engine: Engine
) -> None:
    assert outcomes(engine, [turns[0].prompt], prompt_logprobs=0) == ["error"]
    assert engine.records()[-1]["reason"] == "prompt_logprobs"


def test_a_request_may_ask_for_the_own_prefill(
    agents: list[Agent], turns: list[Turn], engine: Engine
) -> None:
    (answer,) = engine.answer([turns[0].prompt], ["all"])
    assert_same(answer, reference(agents[0].models, turns[0].prompt, None))
    assert (engine.records()[-1]["refused"], engine.records()[-1]["reason"]) == (
        False,
        "full_prefill",
    )


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("fault", ["load_absent", "load_corrupt", "load_backend_down"])
def test_a_load_that_fails_ends_in_an_error(
    turns: list[Turn],
    engine: Engine,
    monkeypatch: pytest.MonkeyPatch,
    fault: str,
    asynchronous: bool,
) -> None:
    engine.forget()
    half = engine.scheduler().connector._receiver_scheduler
    monkeypatch.setattr(half, "rules", replace(half.rules, asynchronous=asynchronous))
    store: Any = open_store(STORE, CHUNK)
    read, whole = store._read, dict(store._objects)  # damaged objects are forgotten

    def faulty(
        names: Sequence[ObjectName], deadline: float, lent: ExitStack
    ) -> list[Tensor | None]:
        found: list[Tensor | None] = read(names, deadline, lent)
        if names[0].layer != 1:
            return found
        if fault == "load_backend_down":
            raise ConnectionError("gone")
        if fault == "load_absent":
            return [None] * len(found)
        damaged = [each if each is None else each.clone() for each in found]
        for each in damaged:
            if each is not None:
                each[-1] ^= 1
        return damaged

    with monkeypatch.context() as patch:
        patch.setattr(store, "_read", faulty)
        assert outcomes(engine, [turns[0].prompt]) == ["error"]
    store._objects.update(whole)
    record = engine.records()[-1]
    assert (record["refused"], record["reason"]) == (True, fault)
    engine.forget()
    (answer,) = engine.answer([turns[0].prompt], [None], new=NEW)
    assert_same(answer, turns[0].answer)


def test_a_store_that_does_not_say_what_it_has_ends_in_an_error(
    turns: list[Turn], engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    store: Any = open_store(STORE, CHUNK)
    release = threading.Event()
    monkeypatch.setattr(store, "_count_leading", lambda names, deadline: release.wait(600))
    half = engine.scheduler().connector._receiver_scheduler
    monkeypatch.setattr(half, "rules", replace(half.rules, lookup_seconds=0.5))
    assert outcomes(engine, [turns[0].prompt]) == ["error"]
    release.set()
    assert engine.records()[-1]["reason"] == "lookup_timeout"


def test_the_other_agent_reads_all_that_was_said_before(
    turns: list[Turn], second: tuple[Answer, dict[str, Any]]
) -> None:
    answer, record = second
    assert_same(answer, turns[1].answer)
    assert record["reason"] is None
    assert record["advertised_tokens"] == (len(turns[1].prompt) - 1) // CHUNK * CHUNK
