"""The three losses: rows are exact, no gradient reaches the base, training is what is served."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("peft")

from torch import Tensor  # noqa: E402

from droidkv.capture import capture  # noqa: E402
from droidkv.encode import encode  # noqa: E402
from droidkv.loading import LoadedModel, load_model  # noqa: E402
from droidkv.models import DecoderModel, TwoStreamModel  # noqa: E402
from droidkv.pair import ModelRef  # noqa: E402
from droidkv.plan import ReusePlan  # noqa: E402
from droidkv.prefill import forward_suffix, full_prefill, partial_prefill  # noqa: E402
from droidkv.recipe import MODES, Method, Mode, Recipe, default_targets  # noqa: E402
from droidkv.tasks import Item, get_task  # noqa: E402
from droidkv.training.losses import RowLosses, row_losses  # noqa: E402
from droidkv.training.rows import TrainingRow, training_batches  # noqa: E402
from droidkv.training.trainable import Trainable, trainable  # noqa: E402

OPTIONS = {"num_records": 2, "questions_per_context": 3}
CASES: list[tuple[Mode, Method]] = [(mode, "lora") for mode in MODES]
CASES += [("plain", "full"), ("prefillshare", "full")]


@pytest.fixture(scope="module")
def base() -> LoadedModel:
    return load_model(ModelRef(model="tiny:llama?seed=0&layers=3"))


@pytest.fixture(scope="module")
def items() -> list[Item]:
    return get_task("records", **OPTIONS).items("train", 3)


def rows_of(items: list[Item], base: LoadedModel) -> list[TrainingRow]:
    (rows,) = training_batches(items, 1, len(items), base.tokenizer, True, 1024)
    return rows


def recipe_of(mode: Mode, method: Method = "lora") -> Recipe:
    return Recipe(
        "records", 1, 0.01, mode=mode, method=method, rank=4, target_modules=default_targets(mode)
    )


@contextmanager
def moved(base: LoadedModel, recipe: Recipe) -> Iterator[tuple[Trainable, RowLosses]]:
    """A receiver that is no longer its base, as after some training."""
    with trainable(base, recipe) as ready:
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for weight in ready.module.parameters():
                if weight.requires_grad and weight.ndim == 2:
                    weight.add_(0.1 * torch.randn(weight.shape, generator=generator))
        yield ready, row_losses(recipe.mode, ready.receiver, ready.base)


@pytest.mark.parametrize(("mode", "method"), CASES)
def test_questions_in_one_row_have_the_losses_of_separate_rows(
    base: LoadedModel, items: list[Item], mode: Mode, method: Method
) -> None:
    with moved(base, recipe_of(mode, method)) as (_, losses), torch.no_grad():
        together = losses(rows_of(items, base))
        separate = torch.cat([losses(rows_of([item], base)) for item in items])
    torch.testing.assert_close(together, separate, atol=2e-4, rtol=1e-4)
    assert together.std() > 1e-3


@pytest.mark.parametrize(("mode", "method"), CASES)
def test_no_gradient_reaches_the_base(
    base: LoadedModel, items: list[Item], mode: Mode, method: Method
) -> None:
    recipe = recipe_of(mode, method)
    with moved(base, recipe) as (ready, losses):
        with ready.base() as frozen:
            before = {n: w.detach().clone() for n, w in frozen.model.named_parameters()}
            kv = capture(frozen, rows_of(items, base)[0].input_ids)
        torch.autograd.backward(losses(rows_of(items, base)).mean())
        for name, weight in ready.module.named_parameters():
            is_trained = method == "full" or "lora_" in name
            assert weight.requires_grad == is_trained, name
            assert (weight.grad is not None) == is_trained, name
        with ready.base() as frozen:
            if method == "full":
                assert frozen.model is not ready.receiver.model
                assert all(weight.grad is None for weight in frozen.model.parameters())
        torch.optim.AdamW([w for w in ready.module.parameters() if w.requires_grad], 0.1).step()
        with ready.base() as frozen:
            after = dict(frozen.model.named_parameters())
            assert all(torch.equal(before[n], after[n]) for n in before if "lora_" not in n)
            again = capture(frozen, rows_of(items, base)[0].input_ids)
        assert all(map(torch.equal, kv.keys, again.keys))
        assert all(map(torch.equal, kv.values, again.values))


@pytest.mark.parametrize("mode", MODES)
def test_weights_rounded_once_are_those_that_autocast_rounds_at_every_use(
    base: LoadedModel, items: list[Item], mode: Mode
) -> None:
    rows, found = rows_of(items, base), {}
    for rounded_once in (False, True):
        recipe = dataclasses.replace(recipe_of(mode), autocast=rounded_once)
        with moved(base, recipe) as (ready, losses):
            frozen = {w.dtype for n, w in ready.module.named_parameters() if "base_layer" in n}
            assert frozen == {torch.bfloat16 if rounded_once else torch.float32}
            with torch.autocast("cpu", torch.bfloat16):
                loss = losses(rows).mean()
            torch.autograd.backward(loss)
            grads = [w.grad for w in ready.module.parameters() if w.requires_grad]
            found[rounded_once] = [loss.detach(), *grads]
    assert all(map(torch.equal, found[False], found[True]))
    assert {w.dtype for w in base.model.model.parameters()} == {torch.float32}


@pytest.mark.parametrize("mode", ["prefillshare", "icarus"])
def test_the_prefix_counts_only_through_the_kv_of_the_base(
    base: LoadedModel, items: list[Item], mode: Mode
) -> None:
    """A receiver of other weights reads the same KV; a base of other weights gives another loss."""
    rows = rows_of(items[:1], base)
    other = load_model(ModelRef(model="tiny:llama?seed=0&layers=3&noise=0.1")).model

    @contextmanager
    def by(model: DecoderModel) -> Iterator[DecoderModel]:
        yield model

    with torch.no_grad():
        own = row_losses("plain", base.model, lambda: by(base.model))(rows)
        same = row_losses(mode, base.model, lambda: by(base.model))(rows)
        changed = row_losses(mode, base.model, lambda: by(other))(rows)
    torch.testing.assert_close(own, same, atol=1e-5, rtol=1e-5)
    assert (same - changed).abs().max() > 1e-2


@pytest.mark.parametrize(("mode", "method"), CASES)
def test_training_and_inference_give_the_same_logits(
    base: LoadedModel, items: list[Item], mode: Mode, method: Method
) -> None:
    """The loss of a row is the log-probability that serving gives its answer."""
    (item,) = items[:1]
    encoded = encode(item, base.tokenizer, True)
    rows = rows_of([item], base)
    answer = rows[0].targets
    prefix = torch.tensor([encoded.prefix_ids])
    suffix = torch.cat([torch.tensor(encoded.suffix_ids), answer[:-1]])[None]
    with moved(base, recipe_of(mode, method)) as (ready, losses):
        trained = -losses(rows).detach()
        with ready.base() as frozen:
            captured = capture(frozen, prefix)
        receiver = ready.receiver
        if mode == "icarus":
            receiver = TwoStreamModel(copy.deepcopy(receiver.model))
        if mode == "plain":
            context = full_prefill(receiver, prefix)
        else:
            context = partial_prefill(receiver, prefix, captured, ReusePlan.of(0, 0))
        served = log_probs(receiver, forward_suffix(receiver, context, suffix), answer)
        own = log_probs(
            ready.receiver,
            forward_suffix(ready.receiver, full_prefill(ready.receiver, prefix), suffix),
            answer,
        )
    torch.testing.assert_close(trained, served, atol=2e-4, rtol=1e-4)
    if mode == "prefillshare":  # else the check above would prove nothing
        assert (trained - own).abs().max() > 1e-2


def test_the_border_is_drawn_and_the_receiver_reads_what_the_sender_leaves(
    base: LoadedModel, items: list[Item]
) -> None:
    """Each row stops at a border of its own; its loss is that of serving at this border."""

    def rows_with(border_tokens: int, seed: int) -> list[TrainingRow]:
        batches = training_batches(
            items[:1], 40, 1, base.tokenizer, True, 1024, border_tokens, seed
        )
        return [row for (row,) in batches]

    encoded = encode(items[0], base.tokenizer, True)
    num_prefix, borders = len(encoded.prefix_ids), [row.num_read for row in rows_with(3, 0)]
    assert {row.num_read for row in rows_with(0, 0)} == {num_prefix}
    assert {num_prefix - border for border in borders} == {0, 1, 2, 3}
    assert borders == [row.num_read for row in rows_with(3, 0)]
    assert borders != [row.num_read for row in rows_with(3, 1)]
    assert {row.num_read for row in rows_with(10 * num_prefix, 0)} <= set(range(1, num_prefix + 1))

    row = next(row for row in rows_with(3, 0) if row.num_read == num_prefix - 3)
    prefix, suffix = row.input_ids[:, : num_prefix - 3], row.input_ids[:, num_prefix - 3 :]
    with moved(base, recipe_of("prefillshare")) as (ready, losses), torch.no_grad():
        trained = -losses([row])
        with ready.base() as frozen:
            captured = capture(frozen, prefix)
        context = partial_prefill(ready.receiver, prefix, captured, ReusePlan.of(0, 0))
        served = log_probs(
            ready.receiver, forward_suffix(ready.receiver, context, suffix), row.targets
        )
    torch.testing.assert_close(trained, served, atol=2e-4, rtol=1e-4)


def log_probs(model: DecoderModel, hidden: Tensor, answer: Tensor) -> Tensor:
    logits = model.logits(hidden[0, -len(answer) :]).detach()
    return logits.log_softmax(-1).gather(-1, answer[:, None])[:, 0]


def test_the_base_is_as_it_was(base: LoadedModel, items: list[Item]) -> None:
    before = {name: weight.clone() for name, weight in base.model.model.state_dict().items()}
    for mode, method in CASES:
        with moved(base, dataclasses.replace(recipe_of(mode, method))) as (_, losses):
            losses(rows_of(items, base))
    after = base.model.model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
