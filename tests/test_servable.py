"""A folder that a server serves must be the model, and must be known as the model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import peft
import pytest
import torch

from droidkv.errors import UnsupportedModelError
from droidkv.loading import load_model
from droidkv.merged import MERGED_RECORD, merged_from
from droidkv.model_identity import identify
from droidkv.pair import ModelRef
from droidkv.servable import servable_folder
from droidkv.tiny import TinySpec, tiny_model, tiny_tokenizer

TINY = TinySpec("llama", layers=2)
IDS = torch.arange(3, 43).reshape(1, 40)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DROIDKV_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def tuned(tmp_path: Path) -> ModelRef:
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    model = tiny_model(TINY, torch.float32, "cpu")
    model.save_pretrained(base)
    tiny_tokenizer().save_pretrained(base)
    lora = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"]))
    with torch.no_grad():
        for name, matrix in lora.named_parameters():
            if "lora_B" in name:
                matrix.normal_(std=0.2)
    lora.save_pretrained(str(adapter))
    return ModelRef(str(base), adapter=str(adapter))


def logits(ref: ModelRef) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = load_model(ref).model.model(IDS).logits
    return found


def test_a_merged_folder_computes_and_is_known_as_the_model(tuned: ModelRef) -> None:
    folder = servable_folder(tuned, "float32")
    served = ModelRef(str(folder))
    assert torch.equal(logits(served), logits(tuned))
    assert not torch.equal(logits(served), logits(ModelRef(tuned.model)))
    loaded = load_model(tuned).fingerprint
    assert identify(served, "float32").differences(loaded) == []
    assert identify(ModelRef(tuned.model), "float32").differences(loaded) != []


def test_a_folder_is_made_once_for_each_dtype(tuned: ModelRef) -> None:
    folder = servable_folder(tuned, "float32")
    made = (folder / "model.safetensors").stat()
    assert servable_folder(tuned, "float32") == folder
    assert (folder / "model.safetensors").stat() == made
    assert servable_folder(tuned, "bfloat16") != folder


def test_changed_weights_stand_for_themselves(tuned: ModelRef) -> None:
    folder = servable_folder(tuned, "float32")
    other = tiny_model(TinySpec("llama", layers=2, seed=5), torch.float32, "cpu")
    other.save_pretrained(folder)
    found = identify(ModelRef(str(folder)), "float32")
    assert found.adapter == "none"
    assert found.weights not in json.loads((folder / MERGED_RECORD).read_text()).values()
    # The cheap identity by file sizes cannot vouch for the record either.
    assert merged_from(folder, "headers:" + "0" * 64) == ("headers:" + "0" * 64, "none")


def test_what_needs_no_merging_is_served_from_where_it_lies(tuned: ModelRef) -> None:
    assert servable_folder(ModelRef(tuned.model), "float32") == Path(tuned.model)


def test_a_second_stream_is_refused_by_name(tuned: ModelRef) -> None:
    with pytest.raises(UnsupportedModelError, match="icarus"):
        servable_folder(replace(tuned, apply="icarus"), "float32")


def test_a_tiny_model_becomes_a_folder(tmp_path: Path) -> None:
    ref = ModelRef("tiny:llama?layers=2&noise=0.1")
    served = ModelRef(str(servable_folder(ref, "float32")))
    assert torch.equal(logits(served), logits(ref))
    assert identify(served, "float32").differences(load_model(ref).fingerprint) == []
