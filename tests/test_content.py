from __future__ import annotations

import json
import os
import struct
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from droidkv import safetensors_file
from droidkv.content import (
    adapter_sha256,
    check_base,
    record_base,
    state_sha256,
    tokenizer_digests,
    weight_files,
    weights_headers,
    weights_sha256,
)
from droidkv.errors import IdentityError, LoadError
from droidkv.safetensors_file import hash_tensors, read_entries
from droidkv.tiny import tiny_tokenizer

STATE = {
    "a.weight": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "b.weight": torch.ones(4, dtype=torch.bfloat16),
    "empty": torch.zeros(0, 5),
    "scalar": torch.tensor(3, dtype=torch.int64),
}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DROIDKV_CACHE", str(tmp_path / "cache"))


def save(folder: Path, state: dict[str, torch.Tensor] | None = None, **metadata: str) -> Path:
    folder.mkdir(exist_ok=True)
    save_file(STATE if state is None else state, folder / "model.safetensors", metadata or None)
    return folder


def save_shards(folder: Path, *shards: dict[str, torch.Tensor]) -> Path:
    folder.mkdir()
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards):
        save_file(shard, folder / f"shard-{number}.safetensors")
        weight_map |= dict.fromkeys(shard, f"shard-{number}.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def raw(folder: Path, header: object, num_bytes: int, announced: int | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    size = struct.pack("<Q", len(text) if announced is None else announced)
    (folder / "model.safetensors").write_bytes(size + text + bytes(num_bytes))
    return folder


def test_the_hash_is_of_the_tensors_not_of_the_files(tmp_path: Path) -> None:
    one = save(tmp_path / "one")
    names = list(STATE)
    shards = [{name: STATE[name] for name in part} for part in (names[2:], names[:2])]
    assert weights_sha256(one) == state_sha256(STATE)
    assert weights_sha256(save_shards(tmp_path / "two", *shards)) == state_sha256(STATE)
    assert weights_sha256(save(tmp_path / "three", format="pt", note="x")) == state_sha256(STATE)


@pytest.mark.parametrize(
    "change",
    [
        {"b.weight": torch.full((4,), 1.0078125, dtype=torch.bfloat16)},
        {"b.weight": torch.ones(4, dtype=torch.float16)},
        {"a.weight": STATE["a.weight"].reshape(3, 2)},
        {"scalar": torch.tensor(3, dtype=torch.int32)},
        {"extra": torch.zeros(0)},
    ],
)
def test_value_dtype_shape_and_name_of_each_tensor_count(change: dict[str, torch.Tensor]) -> None:
    assert state_sha256(STATE | change) != state_sha256(STATE)
    assert state_sha256({f"x{name}": each for name, each in STATE.items()}) != state_sha256(STATE)


def test_weights_quantised_anew_under_one_name_are_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(safetensors_file, "_SETTLED_SECONDS", -1e9)  # remember at once
    folder = save(tmp_path / "model")
    path = folder / "model.safetensors"
    before, times = weights_sha256(folder), os.stat(path)
    cheap = weights_headers(folder)
    assert weights_sha256(folder) == before
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)  # in place: same name, size, inode
    assert weights_headers(folder) != cheap and cheap.startswith("headers:")
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))  # and the same time, as rsync does
    assert weights_sha256(folder) != before


def test_an_unchanged_file_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(tmp_path / "model") / "model.safetensors"
    cache = tmp_path / "cache"
    monkeypatch.setattr(safetensors_file, "_SETTLED_SECONDS", -1e9)
    first = hash_tensors(path, cache)
    (remembered,) = (cache / "hashes").iterdir()
    entry = json.loads(remembered.read_text())
    entry["tensors"][0][3] = "f" * 64
    remembered.write_text(json.dumps(entry))
    assert hash_tensors(path, cache) == entry["tensors"]
    assert hash_tensors(path, None) == first
    for damage in ("", "[]", json.dumps(entry | {"key": {}}), json.dumps(entry | {"tensors": 3})):
        remembered.write_text(damage)
        assert hash_tensors(path, cache) == first


def test_a_file_written_just_now_is_not_remembered(tmp_path: Path) -> None:
    path = save(tmp_path / "model") / "model.safetensors"
    os.utime(path, (time.time(), time.time()))
    hash_tensors(path, tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_a_folder_that_cannot_be_written_costs_only_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(safetensors_file, "_SETTLED_SECONDS", -1e9)
    path = save(tmp_path / "model") / "model.safetensors"
    (tmp_path / "file").write_text("")
    assert hash_tensors(path, tmp_path / "file") == hash_tensors(path, None)


TENSOR = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("header", "num_bytes", "message"),
    [
        ({"a": TENSOR}, 7, "truncated"),
        ({"a": TENSOR}, 9, "something behind it"),
        ({"a": TENSOR, "b": TENSOR}, 8, "neither overlap nor leave gaps"),
        ({"a": TENSOR | {"data_offsets": [4, 12]}}, 12, "neither overlap nor leave gaps"),
        ({"a": TENSOR | {"data_offsets": [8, 0]}}, 8, "two offsets"),
        ({"a": TENSOR | {"data_offsets": [-8, 0]}}, 8, "two offsets"),
        ({"a": TENSOR | {"data_offsets": [0]}}, 8, "two offsets"),
        ({"a": TENSOR | {"shape": [3]}}, 8, "expected 12 bytes for F32"),
        ({"a": TENSOR | {"shape": [-1, -2]}}, 8, "a shape"),
        ({"a": TENSOR | {"shape": [10**30, 0]}}, 8, "expected 0 bytes"),
        ({"a": TENSOR | {"dtype": "F33"}}, 8, "unknown dtype 'F33'"),
        ({"a": TENSOR | {"run": "x"}}, 8, "unknown key 'run'"),
        ({"a": 3}, 8, "expected a table"),
        ([], 0, "expected a table of tensors"),
        (b'{"a": {}, "a": {}}', 0, "'a' twice"),
        (b"[" * 100_000, 0, "nested levels"),
        (b"\xff\xff", 0, "UTF-8"),
        (b"{", 0, "line 1, column 2"),
    ],
)
def test_a_damaged_file_is_named(
    tmp_path: Path, header: object, num_bytes: int, message: str
) -> None:
    folder = raw(tmp_path / "model", header, num_bytes)
    with pytest.raises(LoadError, match=message) as caught:
        weights_sha256(folder)
    assert str(folder / "model.safetensors") in str(caught.value)


@pytest.mark.parametrize("announced", [2**63, 10**9, 3])
def test_a_header_longer_than_the_file_is_not_read(tmp_path: Path, announced: int) -> None:
    folder = raw(tmp_path / "model", b"{}", 0, announced)
    with pytest.raises(LoadError, match=f"announce a header of {announced}"):
        read_entries(folder / "model.safetensors")


def test_files_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "short").write_bytes(b"abc")
    with pytest.raises(LoadError, match="got 3 bytes"):
        read_entries(tmp_path / "short")
    with pytest.raises(LoadError, match="there is none"):
        read_entries(tmp_path / "missing")
    with pytest.raises(LoadError, match="regular file"):
        read_entries(tmp_path)


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="got none"):
        weight_files(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(LoadError, match=r"only pytorch_model\.bin, which can run code"):
        weight_files(tmp_path)


def test_a_list_of_shards_names_files_beside_it_once_each(tmp_path: Path) -> None:
    folder = save_shards(tmp_path / "twice", STATE, STATE)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "shard-0.safetensors", "b": "../x"}}))
    with pytest.raises(LoadError, match=r"files beside it, got '\.\./x'"):
        weights_sha256(folder)
    shards = {"a": "shard-0.safetensors", "b": "shard-1.safetensors"}
    index.write_text(json.dumps({"weight_map": shards}))
    with pytest.raises(LoadError, match=r"got 'a\.weight' in two files"):
        weights_sha256(folder)


def adapter(folder: Path, scale: float = 1.0, **settings: Any) -> Path:
    folder.mkdir()
    table = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(table | settings))
    save_file({"lora_A": torch.full((4, 4), scale)}, folder / "adapter_model.safetensors")
    return folder


def test_an_adapter_is_its_tensors_and_the_settings_that_matter(tmp_path: Path) -> None:
    identity = adapter_sha256(adapter(tmp_path / "a"))
    same: dict[str, Any] = {
        "base_model_name_or_path": "elsewhere",
        "peft_version": "9",
        "inference_mode": True,
        "lora_dropout": 0.1,
        "target_modules": ["v_proj", "q_proj"],
        "use_rslora": False,
        "init_lora_weights": "gaussian",
        "some_new_option": None,
    }
    assert adapter_sha256(adapter(tmp_path / "same", **same)) == identity
    others = [
        adapter(tmp_path / "scaled", scale=2.0),
        adapter(tmp_path / "alpha", lora_alpha=16),
        adapter(tmp_path / "rslora", use_rslora=True),
        adapter(tmp_path / "targets", target_modules=["q_proj"]),
        adapter(tmp_path / "unheard", some_new_option=1),
        adapter(tmp_path / "pattern", rank_pattern={"q_proj": 8}),
        # When loaded it takes a part out of the base's weights.
        adapter(tmp_path / "pissa", init_lora_weights="pissa"),
    ]
    assert len({identity, *map(adapter_sha256, others)}) == 1 + len(others)


def test_adapters_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="droidkv train MODE PAIR"):
        adapter_sha256(tmp_path)
    folder = adapter(tmp_path / "pickled")
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(LoadError, match=r"got only a \.bin file"):
        adapter_sha256(folder)
    (folder / "adapter_config.json").write_text("[]")
    with pytest.raises(LoadError, match="table of settings"):
        adapter_sha256(folder)


def test_an_adapter_knows_its_base_by_content(tmp_path: Path) -> None:
    folder = adapter(tmp_path / "a")
    base, other = "sha256:" + "1" * 64, "sha256:" + "2" * 64
    identity = adapter_sha256(folder)
    check_base(folder, other)  # nobody recorded anything
    record_base(folder, base)
    check_base(folder, base)
    assert adapter_sha256(folder) == identity
    with pytest.raises(IdentityError, match=f"trained on .weights: {base}.*got another.*{other}"):
        check_base(folder, other)


def test_a_tokenizer_is_its_vocabulary_pipeline_and_added_tokens(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    digests = tokenizer_digests(tokenizer)
    tokenizer(["a", "bcd"], padding=True, truncation=True, max_length=2)  # leaves settings behind
    assert tokenizer_digests(tokenizer) == digests
    tokenizer.save_pretrained(tmp_path)
    assert tokenizer_digests(type(tokenizer).from_pretrained(tmp_path)) == digests
    tokenizer.add_tokens(["<tool>"])
    assert [a == b for a, b in zip(tokenizer_digests(tokenizer), digests, strict=True)] == [
        False,
        True,
        False,
    ]
    other = tiny_tokenizer()
    from tokenizers.normalizers import Lowercase

    other.backend_tokenizer.normalizer = Lowercase()
    assert [a == b for a, b in zip(tokenizer_digests(other), digests, strict=True)] == [
        True,
        False,
        True,
    ]
