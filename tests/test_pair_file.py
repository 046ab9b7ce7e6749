from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from droidkv.errors import PairError
from droidkv.pair import ModelRef, Pair, TaskRef, read_pair
from droidkv.pair_file import pair_text, write_pair
from droidkv.recipe import Recipe

PAIR = Pair(
    name="mine",
    description='A "pair"\nof \\ two, é \x7f.',
    sender=ModelRef("owner/base", revision="v1", aliases=("a", "b")),
    receiver=ModelRef("/models/base", adapter="/pairs/adapters/x", apply="icarus"),
    tasks=(TaskRef("records"), TaskRef("local", {"path": "a b.jsonl", "n": 3, "x": [1.5, True]})),
    chat=False,
    allow_extra_tokens=True,
    train=Recipe(
        "records", 3, 1e-3, {"a": {"b": 1}}, mode="icarus", target_modules=("q_proj",), seed=4
    ),
    reference=ModelRef("tiny:llama?seed=0", trust_remote_code=True),
    path=Path("/pairs/mine.toml"),
)


@pytest.mark.parametrize(
    "pair",
    [
        PAIR,
        dataclasses.replace(PAIR, train=None, reference=None, allow_extra_tokens=False, chat=True),
    ],
)
def test_what_is_written_is_read_back(pair: Pair, tmp_path: Path) -> None:
    moved = tmp_path / "pairs" / "mine.toml"
    receiver = dataclasses.replace(
        pair.receiver, model=str(tmp_path / "m"), adapter=str(tmp_path / "pairs/adapters/x")
    )
    pair = dataclasses.replace(pair, path=moved, receiver=receiver)
    write_pair(pair)
    assert read_pair(moved) == pair
    text = moved.read_text(encoding="utf-8")
    assert str(tmp_path) not in text
    assert 'adapter = "./adapters/x"' in text


@pytest.mark.parametrize("name", ["smollm2-records", "smollm2-tools", "tiny", "qwen2.5-7b-coder"])
def test_shipped_pairs_come_back(name: str, tmp_path: Path) -> None:
    pair = dataclasses.replace(read_pair(name), path=tmp_path / f"{name}.toml")
    write_pair(pair)
    assert read_pair(tmp_path / f"{name}.toml") == pair


def test_what_toml_cannot_say_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PairError, match="leave it out"):
        pair_text(dataclasses.replace(PAIR, tasks=(TaskRef("x", {"a": None}),)), tmp_path)
    with pytest.raises(PairError, match="path of its file"):
        write_pair(dataclasses.replace(PAIR, path=None))
