from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from serve.made_decoders import LAYERS, make_base, make_decoder

from droidkv.content import ADAPTER_CONFIG, ADAPTER_WEIGHTS, weights_sha256
from droidkv.errors import DroidKVError, IdentityError, LoadError, PairError, UnsupportedModelError
from droidkv.model_identity import load_config
from droidkv.pair import ModelRef, Pair, read_pair
from droidkv.serve.decoders import Decoder, read_decoder, read_updates
from droidkv.serve.icarus_launch import pair_decoders


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_base(tmp_path_factory.mktemp("decoders"))


def read(base: Path, folder: Path) -> Decoder:
    return read_decoder("one", folder, load_config(ModelRef(str(base))), weights_sha256(base))


def test_matrices_are_those_of_the_adapter(base: Path) -> None:
    folder = make_decoder(base, "plain", rank=2, layers_to_transform=[1])
    decoder = read(base, folder)
    assert (decoder.rank, decoder.scale) == (2, 1.5)
    updates = read_updates(decoder, torch.float32, torch.device("cpu"))
    assert set(updates) == {
        (1, name) for name in ("q_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    }
    stored = load_file(folder / ADAPTER_WEIGHTS)
    place = "base_model.model.model.layers.1.mlp.down_proj.lora_{}.weight"
    down, up = updates[1, "down_proj"]
    assert torch.equal(down, stored[place.format("A")].float().T)
    assert torch.equal(up, stored[place.format("B")].float().T * 1.5)


def test_a_stabilised_rank_has_its_scale(base: Path) -> None:
    assert read(base, make_decoder(base, "stable", rank=4, use_rslora=True)).scale == 1.5


@pytest.mark.parametrize(
    ("settings", "error", "named"),
    [
        ({"targets": ("q_proj", "v_proj")}, UnsupportedModelError, "k_proj or v_proj"),
        ({"targets": ("q_proj", "k_proj")}, UnsupportedModelError, "never be used"),
        ({"mode": "plain"}, IdentityError, "trained as 'plain'"),
        ({"use_dora": True}, UnsupportedModelError, "use_dora"),
        ({"rank_pattern": {"q_proj": 1}}, UnsupportedModelError, "rank_pattern"),
        ({"alora_invocation_tokens": [5]}, UnsupportedModelError, "alora_invocation_tokens"),
    ],
)
def test_what_is_no_decoder_is_refused(
    base: Path, settings: dict[str, Any], error: type[DroidKVError], named: str
) -> None:
    with pytest.raises(error, match=named):
        read(base, make_decoder(base, "refused", **settings))


def changed(folder: Path, table: dict[str, Any], drop: str = "", extra: str = "") -> Path:
    """The adapter with other settings, without tensors that end so, or with one more."""
    path = folder / ADAPTER_CONFIG
    path.write_text(json.dumps({**json.loads(path.read_text()), **table}))
    tensors = load_file(folder / ADAPTER_WEIGHTS)
    kept = {n: tensor for n, tensor in tensors.items() if not drop or not n.endswith(drop)}
    if extra:
        kept[extra] = torch.zeros(2, 2)
    save_file(kept, folder / ADAPTER_WEIGHTS)
    return folder


@pytest.mark.parametrize(
    ("change", "error", "named"),
    [
        ({"table": {"r": 3}}, LoadError, "matrices of rank 3"),
        ({"table": {"r": 0}}, LoadError, "r >= 1"),
        ({"table": {"init_lora_weights": "pissa_niter_4"}}, UnsupportedModelError, "pissa_niter"),
        ({"table": {"init_lora_weights": "olora"}}, UnsupportedModelError, "olora"),
        ({"table": {"peft_type": "IA3"}}, UnsupportedModelError, "IA3"),
        ({"table": {}, "drop": "q_proj.lora_B.weight"}, LoadError, "two matrices for q_proj"),
        ({"table": {}, "drop": "weight"}, LoadError, "got none"),
        ({"table": {}, "extra": "base_model.model.lm_head.lora_A.weight"}, DroidKVError, "lm_head"),
    ],
)
def test_a_damaged_adapter_is_refused(
    base: Path, change: dict[str, Any], error: type[DroidKVError], named: str
) -> None:
    folder = changed(make_decoder(base, "damaged"), **change)
    with pytest.raises(error, match=named):
        read(base, folder)


def test_another_base_is_refused(base: Path) -> None:
    folder, config = make_decoder(base, "other"), load_config(ModelRef(str(base)))
    with pytest.raises(IdentityError, match="trained on"):
        read_decoder("one", folder, config, "sha256:other")
    (folder / "droidkv.json").unlink()  # nobody says what it was trained on
    config.num_hidden_layers = LAYERS - 1
    with pytest.raises(LoadError, match="another base"):
        read_decoder("one", folder, config, "sha256:other")
    config.num_hidden_layers, config.intermediate_size = LAYERS, 64
    with pytest.raises(LoadError, match="another base"):
        read_decoder("one", folder, config, "sha256:other")


def a_pair(base: Path, name: str, **receiver: Any) -> Pair:
    shown = read_pair("smollm2-records-icarus")
    ref = ModelRef(str(base), adapter=str(base.with_name(name)), apply="icarus")
    return replace(shown, name=name, sender=ModelRef(str(base)), receiver=replace(ref, **receiver))


def test_pairs_bring_a_base_and_its_decoders(base: Path) -> None:
    folders = {name: make_decoder(base, name) for name in ("one", "two")}
    ref, decoders = pair_decoders([a_pair(base, name) for name in folders])
    assert ref == ModelRef(str(base))
    assert decoders == folders


def test_pairs_that_share_no_base_are_refused(base: Path) -> None:
    make_decoder(base, "one")
    one = a_pair(base, "one")
    with pytest.raises(PairError, match="apply = 'icarus'"):
        pair_decoders([a_pair(base, "one", apply="merge")])
    with pytest.raises(PairError, match="expected pairs with one sender"):
        pair_decoders([one, replace(one, name="two", sender=ModelRef("tiny:llama"))])
    with pytest.raises(PairError, match="base of its receiver"):
        pair_decoders([a_pair(base, "one", model="tiny:llama")])
