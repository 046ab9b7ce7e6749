"""Adapters: what a LoRA computes is never stored as the base's, nor found as another's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from serve.engines import (
    CHUNK,
    PROMPTS,
    TOLERANCE,
    Engine,
    Models,
    assert_same,
    assert_stored,
    make_models,
    own_answer,
    reference,
    sampling_params,
    store_captured,
    token_ids,
)

from droidkv.loading import load_model
from droidkv.models import DecoderModel
from droidkv.pair import ModelRef
from droidkv.serve.keys import chunk_keys, namespace_digest
from droidkv.serve.opening import open_store
from droidkv.serve.store import deadline_in
from droidkv.tiny import tiny_tokenizer

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

STORE = "memory://test-vllm-lora"
LATER = token_ids(2 * CHUNK + 5, seed=7)


def tuned_model(folder: Path, models: Models) -> DecoderModel:
    """The sender under an adapter that changes much, saved in `folder`."""
    base = load_model(ModelRef(str(models.folder / "sender"))).model.model
    config = peft.LoraConfig(r=8, lora_alpha=64, target_modules=["q_proj", "k_proj", "v_proj"])
    tuned = peft.get_peft_model(base, config)
    for name, parameter in tuned.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    tuned.save_pretrained(str(folder))
    return DecoderModel(tuned.eval().get_base_model())


def test_a_lora_request_is_answered_and_not_stored(tmp_path: Path) -> None:
    from vllm.lora.request import LoRARequest

    models = make_models(tmp_path)
    tuned = tuned_model(tmp_path / "adapter", models)
    adapter = LoRARequest("adapter", 1, str(tmp_path / "adapter"))
    options = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 2}
    engine = Engine(tmp_path, "sender", STORE, options)
    try:
        with_lora = engine.answer(PROMPTS[:1], [None], lora_request=adapter)
        assert engine.worker().flush(30)
        store = open_store(STORE, CHUNK)
        keys = chunk_keys(namespace_digest(models.sender.fingerprint), PROMPTS[0], CHUNK)
        assert not store.contains_kv(keys[0], [0], deadline_in(5))
        # The same prompt without it, and with it again, from whatever the engine has cached.
        without = engine.answer(PROMPTS[:1], [None])
        again = engine.answer(PROMPTS[:1], [None], lora_request=adapter)
        assert engine.worker().flush(30)
        # Side by side, on a CPU: right as long as a place for adapters stays empty.
        requests = [{"prompt_token_ids": prompt} for prompt in PROMPTS[1:3]]
        outputs: list[Any] = engine.llm.generate(
            requests, [sampling_params(None, 6)] * 2, use_tqdm=False, lora_request=[adapter, None]
        )
        assert engine.worker().flush(30)
        assert engine.worker().saved_chunks()["mixed_adapters"] == 0
        # One that is loaded and never asked for takes the last place.
        engine.llm.llm_engine.add_lora(LoRARequest("x", 2, adapter.lora_path))
        engine.answer(PROMPTS[3:4], [None])
        assert engine.worker().flush(30)
        assert engine.worker().saved_chunks()["mixed_adapters"] == 0
        requests = [{"prompt_token_ids": prompt} for prompt in (PROMPTS[0], LATER)]
        engine.llm.generate(
            requests, [sampling_params(None, 6)] * 2, use_tqdm=False, lora_request=[adapter, None]
        )
        assert engine.worker().flush(30)
        assert engine.worker().saved_chunks()["mixed_adapters"] == len(LATER) // CHUNK
    finally:
        engine.stop()
    beside = list(outputs[1].outputs[0].token_ids)
    assert beside == own_answer(models.sender.model, PROMPTS[2])[1]
    assert_stored(models, store, keys[0].namespace, PROMPTS[2:4])
    spoilt = chunk_keys(keys[0].namespace, LATER, CHUNK)
    assert not store.contains_kv(spoilt[0], [0], deadline_in(5))
    assert_stored(models, store, keys[0].namespace, PROMPTS[:1])
    own = own_answer(models.sender.model, PROMPTS[0])
    assert_same(without[0], own)
    for answer in (with_lora[0], again[0]):
        assert_same(answer, own_answer(tuned, PROMPTS[0]))
        assert (answer[0] - own[0]).abs().max() > 1000 * TOLERANCE


def test_the_cache_of_a_model_without_an_adapter_is_not_found_as_that_with_it(
    tmp_path: Path,
) -> None:
    models = make_models(tmp_path)
    tuned_model(tmp_path / "adapter", models)
    base = load_model(ModelRef(str(tmp_path / "sender"))).model.model
    merged = peft.PeftModel.from_pretrained(base, str(tmp_path / "adapter")).merge_and_unload()
    merged.save_pretrained(tmp_path / "tuned")
    tiny_tokenizer().save_pretrained(tmp_path / "tuned")
    of_tuned = replace(models, sender=load_model(ModelRef(str(tmp_path / "tuned"))), stitch=None)
    store = open_store(f"{STORE}-two", CHUNK)
    store_captured(models, store, PROMPTS[:1])
    engine = Engine(
        tmp_path, "receiver", f"{STORE}-two", sender=str(tmp_path / "tuned"), stitch=None
    )
    try:
        (before,) = engine.answer(PROMPTS[:1], ["none"])
        store_captured(of_tuned, store, PROMPTS[:1])
        engine.forget()
        (after,) = engine.answer(PROMPTS[:1], ["none"])
        reasons = [record["reason"] for record in engine.records()]
    finally:
        engine.stop()
    assert reasons == ["not_covered", None]
    assert_same(before, reference(models, PROMPTS[0], None))
    assert_same(after, reference(of_tuned, PROMPTS[0], "none"))
    assert (after[0] - reference(models, PROMPTS[0], "none")[0]).abs().max() > 100 * TOLERANCE
