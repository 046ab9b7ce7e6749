"""The other architectures on real engines."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from serve.engines import (
    CHUNK,
    LAYERS,
    PLANS,
    PROMPTS,
    STITCHED,
    TOLERANCE,
    Engine,
    Models,
    assert_all_same,
    assert_stored,
    make_models,
    own_answer,
    reference,
)

from droidkv.serve.keys import namespace_digest
from droidkv.serve.opening import open_store

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


@dataclass(frozen=True)
class Pair:
    """Two models of one architecture, and where the sender's engine left its caches."""

    models: Models
    store: str


@pytest.fixture(scope="module", params=["mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe"])
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    folder: Path = tmp_path_factory.mktemp(request.param)
    models, store = make_models(folder, request.param), f"memory://test-{request.param}"
    # vLLM's Mixtral hands out no hidden states, and hooks see garbage when it is compiled.
    options = {"enforce_eager": True} if request.param == "mixtral" else {}
    engine = Engine(folder, "sender", store, options)
    engine.answer(PROMPTS, [None] * len(PROMPTS))
    assert engine.worker().flush(30)
    engine.stop()
    yield Pair(models, store)


def test_the_sender_stores_what_the_hugging_face_engine_captures(pair: Pair) -> None:
    namespace = namespace_digest(pair.models.sender.fingerprint)
    assert_stored(pair.models, open_store(pair.store, CHUNK), namespace, PROMPTS)


def test_the_receiver_answers_as_the_hugging_face_engine(pair: Pair) -> None:
    engine = Engine(pair.models.folder, "receiver", pair.store)
    try:
        plans = [None, *PLANS, STITCHED, None, f"[1,{LAYERS})"]
        prompts = [PROMPTS[index % len(PROMPTS)] for index in range(len(plans))]
        assert_all_same(pair.models, engine.answer(prompts, plans), prompts, plans)
        reused = [each for each in engine.records() if each["reason"] is None]
        assert len(reused) == len(plans) - 3
    finally:
        engine.stop()
    # The two models are far apart, so that the comparison tells them apart.
    sender = own_answer(pair.models.sender.model, PROMPTS[0])
    receiver = reference(pair.models, PROMPTS[0], None)
    assert (sender[0] - receiver[0]).abs().max() > 1000 * TOLERANCE
