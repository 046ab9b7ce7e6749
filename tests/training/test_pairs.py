"""Recipes of pair files: what is derived for full share, what is trained, what is refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from pair_files import write_pair

torch = pytest.importorskip("torch")
pytest.importorskip("peft")

from droidkv.errors import IdentityError, PairError, TaskError  # noqa: E402
from droidkv.loading import load_model  # noqa: E402
from droidkv.models import TwoStreamModel  # noqa: E402
from droidkv.pair import ModelRef, Pair, read_pair  # noqa: E402
from droidkv.recipe import MODES  # noqa: E402
from droidkv.training.pairs import full_share_pair, load_base, output_of, train_pair  # noqa: E402
from droidkv.training.run import TrainSettings  # noqa: E402

BASE = "tiny:llama?layers=2"


def plain_pair(folder: Path, sender: str = BASE, receiver: str = BASE, extra: str = "") -> Pair:
    path = folder / "small.toml"
    recipe = f"""task = "records"
options = {{ num_records = 2, questions_per_context = 2 }}
steps = 2
learning_rate = 0.01
rank = 2
batch_size = 4
autocast = true
{extra}"""
    return read_pair(write_pair(path, sender, receiver, "./adapter", '["records"]', recipe))


def test_a_pair_is_trained_by_its_own_recipe(tmp_path: Path) -> None:
    pair = plain_pair(tmp_path)
    result = train_pair(pair)
    assert result.output == tmp_path / "adapter"
    assert result.num_answer_tokens > 0
    sender, receiver = load_model(pair.sender), load_model(pair.receiver)
    assert sender.fingerprint.weights == receiver.fingerprint.weights
    assert sender.fingerprint.adapter != receiver.fingerprint.adapter
    with pytest.raises(PairError, match=r"\[train\] table"):
        train_pair(dataclasses.replace(pair, train=None))
    with pytest.raises(PairError, match="adapter folder to make"):
        train_pair(
            dataclasses.replace(pair, receiver=dataclasses.replace(pair.receiver, adapter=None))
        )


@pytest.mark.parametrize(
    ("mode", "method"), [("prefillshare", "lora"), ("prefillshare", "full"), ("icarus", "lora")]
)
def test_a_full_share_pair_is_derived_and_trained(tmp_path: Path, mode: str, method: str) -> None:
    plain = plain_pair(tmp_path)
    pair = full_share_pair(plain, mode, method)  # type: ignore[arg-type]
    assert pair.sender == plain.sender and pair.reference == plain.receiver
    assert pair.train is not None and plain.train is not None
    assert pair.train.mode == mode and pair.train.seed == plain.train.seed
    assert not any("k_proj" in pair.train.target_modules for _ in range(mode == "icarus"))
    train_pair(pair, settings=TrainSettings(max_tokens=600))
    assert output_of(pair).is_dir() and output_of(pair).is_relative_to(tmp_path)
    receiver = load_model(pair.receiver)
    assert isinstance(receiver.model, TwoStreamModel) == (mode == "icarus")
    with pytest.raises(PairError, match="mode 'plain'"):
        full_share_pair(pair, "icarus")


@pytest.mark.parametrize(
    ("trained", "wanted", "rate"),
    [
        ("lora", "lora", 0.01),
        ("lora", "full", 0.001),
        ("full", "lora", 0.1),
        ("full", "full", 0.01),
    ],
)
def test_all_parameters_take_a_tenth_of_a_loras_learning_rate(
    tmp_path: Path, trained: str, wanted: str, rate: float
) -> None:
    plain = plain_pair(tmp_path, extra=f'method = "{trained}"')
    recipe = full_share_pair(plain, "prefillshare", wanted).train  # type: ignore[arg-type]
    assert recipe is not None and recipe.learning_rate == pytest.approx(rate)


def test_an_adapter_is_applied_only_as_it_was_trained(tmp_path: Path) -> None:
    pair = full_share_pair(plain_pair(tmp_path), "icarus")
    train_pair(pair)
    for apply in ("merge", "lora"):
        with pytest.raises(IdentityError, match="trained as 'icarus'"):
            load_model(dataclasses.replace(pair.receiver, apply=apply))
    shared = full_share_pair(plain_pair(tmp_path), "prefillshare")
    train_pair(shared)
    with pytest.raises(IdentityError, match="trained as 'prefillshare'"):
        load_model(dataclasses.replace(shared.receiver, apply="icarus"))


def test_another_base_is_refused_before_training(tmp_path: Path) -> None:
    plain = plain_pair(tmp_path, sender="tiny:llama?layers=2&noise=0.1")
    load_base(plain)  # an ordinary fine-tune never reads the sender
    for mode in ("prefillshare", "icarus"):
        with pytest.raises(IdentityError, match="weights"):
            train_pair(full_share_pair(plain, mode))
    assert list(tmp_path.iterdir()) == [tmp_path / "small.toml"]


def test_another_tokenizer_is_refused_before_training(tmp_path: Path) -> None:
    for name, extra in (("one", []), ("two", ["<extra>"])):
        made = load_model(ModelRef(BASE))
        made.tokenizer.add_tokens(extra)
        made.model.model.save_pretrained(tmp_path / name)
        made.tokenizer.save_pretrained(tmp_path / name)
    plain = plain_pair(tmp_path, sender="./one", receiver="./two")
    with pytest.raises(IdentityError, match="vocabulary"):
        train_pair(full_share_pair(plain, "prefillshare"))


def test_targets_that_write_kv_are_refused_where_they_were_chosen(tmp_path: Path) -> None:
    plain = plain_pair(tmp_path, extra='target_modules = ["q_proj", "v_proj"]')
    with pytest.raises(PairError, match="v_proj: the decoder reads the KV"):
        full_share_pair(plain, "icarus")
    with pytest.raises(PairError, match="v_proj: the decoder reads the KV"):
        plain_pair(tmp_path, extra='mode = "icarus"\ntarget_modules = ["v_proj"]')
    with pytest.raises(PairError, match="expected method 'lora'"):
        plain_pair(tmp_path, extra='mode = "icarus"\nmethod = "full"')


@pytest.mark.parametrize("mode", MODES)
def test_items_that_cannot_be_learned_are_refused(tmp_path: Path, mode: str) -> None:
    pair = plain_pair(tmp_path)
    if mode != "plain":
        pair = full_share_pair(pair, mode)  # type: ignore[arg-type]
    with pytest.raises(TaskError, match="at most 50 tokens"):
        train_pair(pair, settings=TrainSettings(max_tokens=50))
    assert pair.train is not None
    data = tmp_path / "data.jsonl"
    data.write_text('{"prefix": "some text", "suffix": "what?"}\n' * 2, encoding="utf-8")
    recipe = dataclasses.replace(pair.train, task="local", options={"path": str(data)})
    with pytest.raises(TaskError, match="answer"):
        train_pair(dataclasses.replace(pair, train=recipe))
    assert not output_of(pair).exists()
    assert not output_of(pair).with_name(output_of(pair).name + ".training").exists()
