"""Training a receiver: exact rows, a seeded resumable run, a clean base, early refusals."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("peft")

from safetensors.torch import load_file  # noqa: E402

from droidkv.content import ADAPTER_CONFIG, ADAPTER_WEIGHTS  # noqa: E402
from droidkv.errors import PairError, StorageError, TaskError  # noqa: E402
from droidkv.finetune import _row_losses, train_pair, train_receiver  # noqa: E402
from droidkv.loading import LoadedModel, load_model  # noqa: E402
from droidkv.low_rank import lora_of_delta  # noqa: E402
from droidkv.pair import ModelRef, read_pair  # noqa: E402
from droidkv.recipe import Recipe  # noqa: E402
from droidkv.tasks import Item, Split, Task, get_task  # noqa: E402
from droidkv.training_rows import training_batches  # noqa: E402

OPTIONS = {"num_records": 2, "questions_per_context": 3}
RECIPE = Recipe(
    task="records",
    steps=6,
    learning_rate=0.01,
    options=OPTIONS,
    rank=4,
    alpha=8.0,
    batch_size=6,
    warmup_steps=1,
    seed=5,
)


@pytest.fixture(scope="module")
def base() -> LoadedModel:
    return load_model(ModelRef(model="tiny:llama?seed=0&layers=2"))


def weights_of(base: LoadedModel) -> dict[str, Any]:
    return {name: weight.clone() for name, weight in base.model.model.state_dict().items()}


class OneItem(Task):
    name: ClassVar[str] = "one"
    metric: ClassVar[str] = "exact_match"
    max_new_tokens: ClassVar[int] = 4

    def __init__(self, answer: str) -> None:
        self.answer = answer

    def generate(self, split: Split, seed: int) -> Iterator[Item]:
        yield Item("one-0", "A text.", "A question?", self.answer)

    def score(self, item: Item, prediction: str) -> float:
        return float(prediction == item.answer)


def test_questions_in_one_row_have_the_losses_of_separate_rows(base: LoadedModel) -> None:
    items = get_task("records", **OPTIONS).items("train", 3)
    ((row,),) = training_batches(items, 1, 3, base.tokenizer, True, 1024)
    apart = [training_batches([item], 1, 1, base.tokenizer, True, 1024)[0][0] for item in items]
    device = torch.device("cpu")
    with torch.no_grad():
        together = _row_losses(base.model.model, row, device)
        separate = torch.cat([_row_losses(base.model.model, each, device) for each in apart])
    torch.testing.assert_close(together, separate, atol=1e-5, rtol=1e-5)
    assert together.std() > 1e-3
    assert row.targets[-1] == base.tokenizer.eos_token_id


def test_training_learns_and_leaves_the_base_as_it_was(base: LoadedModel, tmp_path: Path) -> None:
    before = weights_of(base)
    steps = []
    result = train_receiver(
        base,
        get_task("records", **OPTIONS),
        RECIPE,
        tmp_path / "adapter",
        progress=lambda step, total, loss: steps.append((step, total)),
    )
    assert result.last_loss < result.first_loss
    assert steps == [(step, 6) for step in range(1, 7)]
    assert result.resumed_from == 0
    after = weights_of(base)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert not base.model.model.training
    assert not (tmp_path / "adapter.training").exists()

    settings = (tmp_path / "adapter" / ADAPTER_CONFIG).read_text()
    assert str(tmp_path) not in settings
    assert json.loads(settings)["target_modules"] == sorted(RECIPE.target_modules)
    state = load_file(tmp_path / "adapter" / ADAPTER_WEIGHTS)
    assert {tensor.dtype for tensor in state.values()} == {torch.float16}
    assert any(tensor.abs().max() > 0 for name, tensor in state.items() if "lora_B" in name)


def test_a_killed_run_goes_on_and_ends_the_same(base: LoadedModel, tmp_path: Path) -> None:
    task = get_task("records", **OPTIONS)
    whole = train_receiver(base, task, RECIPE, tmp_path / "whole")

    def kill(step: int, total: int, loss: float) -> None:
        if step == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_receiver(base, task, RECIPE, tmp_path / "killed", checkpoint_steps=2, progress=kill)
    assert not (tmp_path / "killed").exists()
    other = dataclasses.replace(RECIPE, seed=6)
    with pytest.raises(PairError, match="recipe"):
        train_receiver(base, task, other, tmp_path / "killed")
    resumed = train_receiver(base, task, RECIPE, tmp_path / "killed", checkpoint_steps=2)
    assert (whole.resumed_from, resumed.resumed_from) == (0, 4)
    files = [path / ADAPTER_WEIGHTS for path in (whole.adapter, resumed.adapter)]
    one, two = map(load_file, files)
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_full_training_is_shipped_as_a_low_rank_change(base: LoadedModel, tmp_path: Path) -> None:
    before = weights_of(base)
    recipe = dataclasses.replace(
        RECIPE, method="full", target_modules=("q_proj", "k_proj"), learning_rate=0.003
    )
    result = train_receiver(base, get_task("records", **OPTIONS), recipe, tmp_path / "full")
    assert result.last_loss < result.first_loss
    assert all(torch.equal(before[name], now) for name, now in weights_of(base).items())
    tuned = load_model(ModelRef(model="tiny:llama?seed=0&layers=2", adapter=str(tmp_path / "full")))
    changed = {
        name
        for name, now in tuned.model.model.state_dict().items()
        if not torch.equal(before[name], now)
    }
    assert changed == {name for name in before if "q_proj" in name or "k_proj" in name}


@pytest.mark.parametrize("method", ["lora", "full"])
def test_layers_below_the_first_keep_the_weights_of_the_base(
    base: LoadedModel, tmp_path: Path, method: Literal["lora", "full"]
) -> None:
    before = weights_of(base)
    recipe = dataclasses.replace(RECIPE, first_layer=1, steps=2, method=method)
    train_receiver(base, get_task("records", **OPTIONS), recipe, tmp_path / "upper")
    ref = ModelRef(model="tiny:llama?seed=0&layers=2", adapter=str(tmp_path / "upper"))
    after = weights_of(load_model(ref))
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert len(changed) == 7
    assert all(name.startswith("model.layers.1.") for name in changed)
    with pytest.raises(PairError, match="below the model's 2 layers"):
        train_receiver(
            base,
            get_task("records", **OPTIONS),
            dataclasses.replace(recipe, first_layer=2),
            tmp_path / "none",
        )


def test_low_rank_part_is_exact_where_the_change_has_that_rank() -> None:
    generator = torch.Generator().manual_seed(0)
    delta = torch.randn(12, 3, generator=generator) @ torch.randn(3, 9, generator=generator)
    a, b = lora_of_delta(delta, 3)
    torch.testing.assert_close(b @ a, delta, atol=1e-5, rtol=1e-5)
    a, b = lora_of_delta(delta, 2)
    left = torch.linalg.matrix_norm(delta - b @ a)
    assert left == pytest.approx(float(torch.linalg.svdvals(delta)[2]), rel=1e-4)


def test_bad_input_is_refused_before_training(base: LoadedModel, tmp_path: Path) -> None:
    target = tmp_path / "adapter"
    task = get_task("records", **OPTIONS)
    wrong = dataclasses.replace(RECIPE, target_modules=("q_proj", "k_prj"))
    with pytest.raises(PairError, match="Did you mean 'k_proj'"):
        train_receiver(base, task, wrong, target)
    with pytest.raises(TaskError, match="must have an answer"):
        train_receiver(base, OneItem("  "), RECIPE, target)
    with pytest.raises(TaskError, match="at most 20 tokens"):
        train_receiver(base, OneItem("yes"), RECIPE, target, max_tokens=20)
    assert not list(tmp_path.iterdir())
    target.mkdir()
    with pytest.raises(StorageError, match="remove it or name another"):
        train_receiver(base, task, RECIPE, target)


def test_a_pair_is_trained_by_its_own_recipe(tmp_path: Path) -> None:
    path = tmp_path / "small.toml"
    path.write_text(
        """
schema_version = 1
description = "x"
tasks = ["records"]
[sender]
model = "tiny:llama?layers=2"
[receiver]
model = "tiny:llama?layers=2"
adapter = "./adapter"
[train]
task = "records"
options = { num_records = 2, questions_per_context = 2 }
steps = 2
learning_rate = 0.01
rank = 2
batch_size = 4
autocast = true
""",
        encoding="utf-8",
    )
    pair = read_pair(path)
    result = train_pair(pair)
    assert result.adapter == tmp_path / "adapter"
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
