"""Pairs of model folders that cannot share a cache: refused by the field, with a way out."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import error_of, run_json
from pair_files import write_pair

from droidkv.tiny import TinySpec, tiny_model, tiny_tokenizer

FOLDERS = ("./sender", "./receiver")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "model"
    tiny_model(TinySpec("llama", layers=2), torch.float32, "cpu").save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def receiver(saved: Path, tmp_path: Path) -> Path:
    """The receiver's folder, to be changed; the sender's and `pair.toml` lie beside it."""
    write_pair(tmp_path / "pair.toml", *FOLDERS)
    shutil.copytree(saved, tmp_path / "sender")
    return Path(shutil.copytree(saved, tmp_path / "receiver"))


def edit(file: Path, change: Callable[[Any], None]) -> None:
    table = json.loads(file.read_text())
    change(table)
    file.write_text(json.dumps(table))


def refused(*commands: str) -> str:
    """The message of each command, which must be one and the same and leave nothing behind."""
    before = sorted(path.name for path in Path().iterdir())
    messages = {error_of(*command.split(), "./pair.toml") for command in commands}
    assert sorted(path.name for path in Path().iterdir()) == before
    assert len(messages) == 1
    return messages.pop()


def test_two_folders_of_one_model_are_a_pair(receiver: Path) -> None:
    assert run_json("pair", "check", "./pair.toml")["passed"]


@pytest.mark.parametrize(
    ("field", "there"), [("num_key_value_heads", 2), ("num_attention_heads", 4), ("head_dim", 32)]
)
def test_other_head_shapes(receiver: Path, field: str, there: int) -> None:
    edit(receiver / "config.json", lambda config: config.update({field: 2 * there}))
    message = refused("profile", "verify", "probe", "stitch", "search", "bench sweep --pair")
    assert f"{field}: " in message and f"{there}" in message and f"{2 * there}" in message
    assert "fine-tunes of one base" in message


def test_other_rope_parameters(receiver: Path) -> None:
    edit(
        receiver / "config.json",
        lambda config: config["rope_parameters"].update(rope_theta=500000.0),
    )
    message = refused("profile", "verify")
    assert "rope_theta" in message and "10000" in message and "500000" in message


def test_another_kind_of_rope(receiver: Path) -> None:
    edit(
        receiver / "config.json",
        lambda config: config["rope_parameters"].update(rope_type="linear", factor=2.0),
    )
    message = refused("profile", "verify")
    assert "rope_type" in message and "factor" in message


def test_vocabularies_of_another_size_say_how_to_allow_extra_tokens(receiver: Path) -> None:
    edit(receiver / "config.json", lambda config: config.update(vocab_size=300))
    message = refused("profile", "verify")
    assert "vocab_size" in message and "259" in message and "300" in message
    assert "allow_extra_tokens = true" in message


def test_vocabularies_of_one_size_with_two_tokens_swapped(receiver: Path) -> None:
    def swap(tokenizer: Any) -> None:
        vocabulary = tokenizer["model"]["vocab"]
        vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]

    edit(receiver / "tokenizer.json", swap)
    message = refused("profile", "verify")
    assert "'a'" in message and "vocabular" in message


def test_a_prefix_that_one_tokenizer_starts_with_a_blank(receiver: Path) -> None:
    write_pair(receiver.parent / "pair.toml", *FOLDERS, chat=False)

    def blank_first(tokenizer: Any) -> None:
        tokenizer["pre_tokenizer"]["add_prefix_space"] = True

    edit(receiver / "tokenizer.json", blank_first)
    message = refused("profile", "verify")
    assert "token 0 differs" in message and "one tokenizer" in message


def test_a_prefix_that_one_chat_template_opens_otherwise(receiver: Path) -> None:
    template = receiver / "chat_template.jinja"
    template.write_text("System: be brief.\n" + template.read_text())
    message = refused("profile", "verify")
    assert "token 0 differs" in message and "switch the chat template off" in message
    write_pair(receiver.parent / "pair.toml", *FOLDERS, chat=False)
    assert run_json("pair", "check", "./pair.toml")["passed"], "the way out is one"
