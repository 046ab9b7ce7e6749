"""Training a receiver: exact rows, a seeded resumable run, a clean base, early refusals."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")

from safetensors.torch import load_file  # noqa: E402

from droidkv.adapter_folder import write_adapter  # noqa: E402
from droidkv.content import ADAPTER_CONFIG, ADAPTER_WEIGHTS  # noqa: E402
from droidkv.errors import PairError, StorageError, TaskError  # noqa: E402
from droidkv.loading import LoadedModel, load_model  # noqa: E402
from droidkv.pair import ModelRef  # noqa: E402
from droidkv.recipe import METHODS, MODES, Method, Mode, Recipe, default_targets  # noqa: E402
from droidkv.tasks import Item, Split, Task, get_task  # noqa: E402
from droidkv.training.curve import CURVE_FILE, Curve  # noqa: E402
from droidkv.training.run import TrainSettings, train_receiver  # noqa: E402
from droidkv.training.trainer import training_arguments  # noqa: E402

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


@pytest.mark.parametrize("autocast", [False, True])
def test_training_learns_and_leaves_the_base_as_it_was(
    base: LoadedModel, tmp_path: Path, autocast: bool
) -> None:
    before = weights_of(base)
    steps = []
    result = train_receiver(
        base,
        get_task("records", **OPTIONS),
        dataclasses.replace(RECIPE, autocast=autocast),
        tmp_path / "adapter",
        TrainSettings(eval_steps=3, eval_items=3),
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


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("autocast", [False, True])
def test_layers_compute_in_bfloat16_with_autocast_only(
    base: LoadedModel, tmp_path: Path, method: Method, autocast: bool
) -> None:
    """In training and in evaluation, whichever weights are trained."""
    recipe = dataclasses.replace(RECIPE, steps=1, method=method, autocast=autocast)
    layer = base.model.model.model.layers[1].mlp.act_fn
    seen = []
    hook = layer.register_forward_hook(
        lambda _, args, output: seen.append((torch.is_grad_enabled(), output.dtype))
    )
    try:
        train_receiver(
            base,
            get_task("records", **OPTIONS),
            recipe,
            tmp_path / "trained",
            TrainSettings(eval_steps=1, eval_items=3),
        )
    finally:
        hook.remove()
    dtype = torch.bfloat16 if autocast else torch.float32
    assert set(seen) == {(False, dtype), (True, dtype)}


@pytest.mark.parametrize("mode", MODES)
def test_a_killed_run_goes_on_and_ends_the_same(
    base: LoadedModel, tmp_path: Path, mode: Mode
) -> None:
    task = get_task("records", **OPTIONS)
    recipe = dataclasses.replace(RECIPE, mode=mode, target_modules=default_targets(mode))
    whole = train_receiver(
        base, task, recipe, tmp_path / "whole", TrainSettings(eval_steps=3, eval_items=3)
    )

    def kill(step: int, total: int, loss: float) -> None:
        if step == 5:
            raise KeyboardInterrupt

    often = TrainSettings(checkpoint_steps=2, eval_steps=3, eval_items=3)
    with pytest.raises(KeyboardInterrupt):
        train_receiver(base, task, recipe, tmp_path / "killed", often, progress=kill)
    assert not (tmp_path / "killed").exists()
    other = dataclasses.replace(recipe, seed=6)
    with pytest.raises(PairError, match="recipe"):
        train_receiver(base, task, other, tmp_path / "killed", often)
    resumed = train_receiver(base, task, recipe, tmp_path / "killed", often)
    assert (whole.resumed_from, resumed.resumed_from) == (0, 4)
    files = [path / ADAPTER_WEIGHTS for path in (whole.output, resumed.output)]
    one, two = map(load_file, files)
    assert all(torch.equal(one[name], two[name]) for name in one)
    curves = [Curve.read(each.output / CURVE_FILE) for each in (whole, resumed)]
    assert [step for step, _ in curves[0].train] == [1, 2, 3, 4, 5, 6]
    assert [step for step, _ in curves[0].held_out] == [0, 3, 6]
    assert curves[0].held_out_items == 3
    assert curves[0].train == curves[1].train
    assert curves[0].held_out == curves[1].held_out


def test_a_run_does_not_go_on_with_other_data(base: LoadedModel, tmp_path: Path) -> None:
    """The same task by name and options, as a file that was edited meanwhile is."""

    def kill(step: int, total: int, loss: float) -> None:
        raise KeyboardInterrupt

    settings = TrainSettings(checkpoint_steps=1)
    with pytest.raises(KeyboardInterrupt):
        train_receiver(base, OneItem("yes"), RECIPE, tmp_path / "one", settings, kill)
    with pytest.raises(PairError, match="data is sha256:"):
        train_receiver(base, OneItem("no"), RECIPE, tmp_path / "one", settings)


def test_a_run_that_diverges_is_ended(base: LoadedModel, tmp_path: Path) -> None:
    with torch.no_grad():
        norm = base.model.model.model.norm.weight
        before = norm.clone()
        norm.fill_(float("inf"))
    try:
        with pytest.raises(PairError, match="finite loss, got nan"):
            train_receiver(base, get_task("records", **OPTIONS), RECIPE, tmp_path / "adapter")
    finally:
        with torch.no_grad():
            norm.copy_(before)
    assert not (tmp_path / "adapter").exists()


def test_weights_past_float16_are_not_written(tmp_path: Path) -> None:
    config = peft.LoraConfig(r=2, target_modules=["q_proj"])
    with pytest.raises(PairError, match="float16's range"):
        write_adapter(tmp_path / "adapter", {"a": torch.tensor([1e6])}, config, "a base")
    assert not (tmp_path / "adapter").exists()


def test_fewer_held_out_items_than_asked_for_are_counted(base: LoadedModel, tmp_path: Path) -> None:
    recipe = dataclasses.replace(RECIPE, steps=1)
    settings = TrainSettings(eval_steps=1, eval_items=9)
    result = train_receiver(base, OneItem("yes"), recipe, tmp_path / "few", settings)
    assert Curve.read(result.output / CURVE_FILE).held_out_items == 1


def test_another_gpu_than_the_first_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PairError, match="CUDA_VISIBLE_DEVICES=1"):
        training_arguments(tmp_path, RECIPE, torch.device("cuda:1"), 1, None, is_resumed=False)


def test_full_training_makes_a_model_folder(base: LoadedModel, tmp_path: Path) -> None:
    before = weights_of(base)
    recipe = dataclasses.replace(RECIPE, method="full", learning_rate=0.003)
    result = train_receiver(base, get_task("records", **OPTIONS), recipe, tmp_path / "full")
    assert result.last_loss < result.first_loss
    assert all(torch.equal(before[name], now) for name, now in weights_of(base).items())
    tuned = load_model(ModelRef(model=str(tmp_path / "full")))
    after = weights_of(tuned)
    assert all(not torch.equal(before[name], after[name]) for name in before if "proj" in name)
    assert tuned.tokenizer.get_vocab() == base.tokenizer.get_vocab()


@pytest.mark.parametrize("method", ["lora", "full"])
def test_layers_below_the_first_keep_the_weights_of_the_base(
    base: LoadedModel, tmp_path: Path, method: Literal["lora", "full"]
) -> None:
    before = weights_of(base)
    recipe = dataclasses.replace(RECIPE, first_layer=1, steps=2, method=method)
    train_receiver(base, get_task("records", **OPTIONS), recipe, tmp_path / "upper")
    ref = ModelRef(model="tiny:llama?seed=0&layers=2", adapter=str(tmp_path / "upper"))
    if method == "full":
        ref = ModelRef(model=str(tmp_path / "upper"))
    after = weights_of(load_model(ref))
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert len(changed) == 9 if method == "full" else 7  # its two norms too
    assert all(name.startswith("model.layers.1.") for name in changed)
    with pytest.raises(PairError, match="below the model's 2 layers"):
        train_receiver(
            base,
            get_task("records", **OPTIONS),
            dataclasses.replace(recipe, first_layer=2),
            tmp_path / "none",
        )


def test_bad_input_is_refused_before_training(base: LoadedModel, tmp_path: Path) -> None:
    target = tmp_path / "adapter"
    task = get_task("records", **OPTIONS)
    wrong = dataclasses.replace(RECIPE, target_modules=("q_proj", "k_prj"))
    with pytest.raises(PairError, match="Did you mean 'k_proj'"):
        train_receiver(base, task, wrong, target)
    with pytest.raises(PairError, match="k_proj, v_proj: the decoder reads the KV"):
        train_receiver(base, task, dataclasses.replace(RECIPE, mode="icarus"), target)
    full = dataclasses.replace(RECIPE, mode="icarus", method="full")
    with pytest.raises(PairError, match="expected method 'lora'"):
        train_receiver(base, task, full, target)
    bordered = dataclasses.replace(RECIPE, border_tokens=8)
    with pytest.raises(PairError, match="expected border_tokens with mode 'prefillshare' only"):
        train_receiver(base, task, bordered, target)
    with pytest.raises(TaskError, match="must have an answer"):
        train_receiver(base, OneItem("  "), RECIPE, target)
    with pytest.raises(TaskError, match="at most 20 tokens"):
        train_receiver(base, OneItem("yes"), RECIPE, target, TrainSettings(max_tokens=20))
    assert not list(tmp_path.iterdir())
    target.mkdir()
    with pytest.raises(StorageError, match="remove it, or name another"):
        train_receiver(base, task, RECIPE, target)
