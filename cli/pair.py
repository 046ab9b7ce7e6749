"""`droidkv pair`: list, show, check and train pairs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from droidkv.errors import DroidKVError, PairError

from . import exits
from .console import Console
from .framework import Group
from .options import output_folder, pair_argument, run_options
from .progress import duration
from .table import table

if TYPE_CHECKING:
    from droidkv.loading import LoadedModel
    from droidkv.pair import Pair
    from droidkv.recipe import Recipe
    from droidkv.tasks import Task

CHECKED_ITEMS = 4


@click.group(cls=Group)
def pair() -> None:
    """List, show, check and train ordered pairs of models."""


@pair.command(
    "list",
    examples="""
    droidkv pair list
    DROIDKV_PAIRS=~/my-pairs droidkv pair list --json
    """,
)
@click.pass_obj
def list_(console: Console) -> int:
    """List the pairs that can be named in a command.

    They are the *.toml files of the folders in DROIDKV_PAIRS, of ./pairs and of the checkout.
    """
    from droidkv.pair import list_pairs, read_pair

    entries: list[dict[str, Any]] = []
    for name, path in list_pairs().items():
        entry: dict[str, Any] = {"name": name, "path": str(path)}
        try:
            found = read_pair(path)
            entry |= {"sender": found.sender.name, "receiver": found.receiver.name}
            entry |= {"tasks": [str(task) for task in found.tasks], "error": None}
        except DroidKVError as error:
            entry |= {"sender": None, "receiver": None, "tasks": [], "error": str(error)}
        entries.append(entry)
    broken = [entry for entry in entries if entry["error"]]
    rows = [
        (entry["name"], entry["sender"], entry["receiver"], _first(entry["tasks"]))
        for entry in entries
        if not entry["error"]
    ]
    lines = table(("pair", "sender", "receiver", "tasks"), rows, "<<<<")
    lines += [f"cannot be read: {entry['error']}" for entry in broken]
    console.result({"pairs": entries}, lines)
    return exits.CHECK_FAILED if broken else exits.OK


@pair.command(examples="droidkv pair show smollm2-records\ndroidkv pair show ./my-pair.toml --json")
@pair_argument
@click.pass_obj
def show(console: Console, pair_name: str) -> None:
    """Show what a pair file says."""
    from droidkv.pair import read_pair

    found = read_pair(pair_name)
    value = dataclasses.asdict(found) | {"path": str(found.path)}
    console.result(value, _described(found))


@pair.command(
    examples="""
    droidkv pair check smollm2-records
    droidkv pair check llama-3.1-8b-instruct --configs-only
    droidkv pair check smollm2-records --profile profiles/smollm2-records.json
    """
)
@pair_argument
@click.option("--configs-only", is_flag=True, help="Compare the configurations; read no weights.")
@click.option("--profile", "profile_name", help="Also check that this profile is of these models.")
@run_options
@click.pass_obj
def check(
    console: Console,
    pair_name: str,
    configs_only: bool,
    profile_name: str | None,
    dtype: str,
    device: str,
) -> int:
    """Check that the receiver can attend to the sender's cache.

    Architecture, layers, heads, RoPE, vocabulary, and that both models read the first items of
    each task as the same prefix tokens.
    """
    from droidkv.pair import read_pair

    if configs_only and profile_name:
        raise click.UsageError("--profile compares weights, so it cannot go with --configs-only")
    found = read_pair(pair_name)
    checks: list[dict[str, Any]] = []
    for name, work in _checks(found, configs_only, profile_name, dtype, device):
        console.note(f"{name} ...")
        try:
            detail, passed = work(), True
        except DroidKVError as error:
            detail, passed = str(error), False
        checks.append({"name": name, "passed": passed, "detail": detail})
        if not passed and name in ("configurations", "models"):
            break
    passed = all(each["passed"] for each in checks)
    lines = [
        f"{'ok  ' if each['passed'] else 'FAIL'} {each['name']}: {each['detail']}"
        for each in checks
    ]
    console.result({"pair": found.name, "passed": passed, "checks": checks}, lines)
    return exits.OK if passed else exits.CHECK_FAILED


@pair.command(
    examples="""
    droidkv pair train smollm2-records --output ./my-adapter
    """
)
@pair_argument
@click.option(
    "-o",
    "--output",
    type=output_folder,
    help="The adapter folder to make. Default: the one that the pair file names.",
)
@click.option("--max-tokens", default=1024, show_default=True, help="Most tokens of one item.")
@click.option("--device", default="cpu", show_default=True, help="A torch device.")
@click.pass_obj
def train(
    console: Console, pair_name: str, output: Path | None, max_tokens: int, device: str
) -> None:
    """Train a pair's receiver by the recipe in its file.

    A run that was stopped goes on from its last checkpoint.
    """
    from droidkv.pair import read_pair

    found = read_pair(pair_name)
    if found.train is None:
        raise PairError(
            f"expected a [train] table in {found.path}, but it has none: the receiver of "
            f"{found.name!r} comes ready"
        )
    adapter = found.receiver.adapter
    if output is None and (adapter is None or not adapter.startswith("/")):
        raise click.UsageError("the pair file names no adapter folder; name one with --output")
    target = output or Path(str(adapter))

    console.resume_hint = (
        f"checkpoints are kept in {target}.training; the same command goes on from the last one"
    )

    from droidkv.finetune import train_receiver
    from droidkv.loading import load_model
    from droidkv.tasks import get_task

    base = load_model(
        dataclasses.replace(found.receiver, adapter=None, adapter_revision=None), device=device
    )
    task = get_task(found.train.task, **found.train.options)
    seconds = _train_seconds(base, task, found.train, found.chat, max_tokens)
    console.note(f"{found.train.steps} steps, about {duration(seconds)} on this machine")
    result = train_receiver(
        base,
        task,
        found.train,
        target,
        chat=found.chat,
        max_tokens=max_tokens,
        progress=lambda step, steps, loss: console.progress(f"loss {loss:.3f}, step", step, steps),
    )
    value = dataclasses.asdict(result) | {"adapter": str(result.adapter), "pair": found.name}
    line = (
        f"{result.adapter}: loss {result.first_loss:.3f} -> {result.last_loss:.3f} in "
        f"{result.steps} steps, {duration(result.seconds)}"
    )
    console.result(value, [line])


def _checks(
    found: Pair, configs_only: bool, profile_name: str | None, dtype: str, device: str
) -> Iterator[tuple[str, Callable[[], str]]]:
    """Name and work of each check, in order; the work says what was found."""
    from droidkv.encode import encode_shared
    from droidkv.loading import check_pair_configs, load_pair
    from droidkv.profile import require_identity
    from droidkv.tasks import get_task

    from .places import read_named_profile

    models: list[LoadedModel] = []

    def configurations() -> str:
        check_pair_configs(found)
        return "both architectures are served, and their caches have one meaning"

    def weights() -> str:
        models.extend(load_pair(found, dtype, device))
        sender, receiver = (each.fingerprint.weights for each in models)
        adapter = models[1].fingerprint.adapter
        return f"sender {sender}, receiver {receiver}, its adapter {adapter}"

    yield "configurations", configurations
    if configs_only:
        return
    yield "models", weights
    sender, receiver = models
    for ref in found.tasks:

        def items(name: str = ref.name, options: Any = ref.options) -> str:
            items = get_task(name, **options).items("eval", CHECKED_ITEMS)
            for item in items:
                encode_shared(item, sender.tokenizer, receiver.tokenizer, found.chat)
            return f"the same prefix tokens under both models in {len(items)} items"

        yield f"task {ref}", items
    if profile_name is not None:

        def identity() -> str:
            path, profile = read_named_profile(profile_name)
            require_identity(profile, sender.fingerprint, receiver.fingerprint)
            return f"{path} was measured on these very models"

        yield "profile", identity


def _train_seconds(
    base: LoadedModel, task: Task, recipe: Recipe, chat: bool, max_tokens: int
) -> float:
    """About how long training takes: a step costs three times the forward pass of its tokens."""
    import time

    from droidkv.capture import capture
    from droidkv.training_rows import training_batches

    items = task.items("train", recipe.batch_size, recipe.seed)
    (rows,) = training_batches(items, 1, recipe.batch_size, base.tokenizer, chat, max_tokens)
    capture(base.model, rows[0].input_ids)  # the first pass also warms up
    started = time.perf_counter()
    capture(base.model, rows[0].input_ids)
    seconds_per_token = (time.perf_counter() - started) / rows[0].input_ids.shape[1]
    return 3 * seconds_per_token * recipe.steps * sum(row.input_ids.shape[1] for row in rows)


def _first(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def _described(found: Pair) -> Iterator[str]:
    yield f"{found.name}: {found.description.strip()}"
    yield f"file      {found.path}"
    for role, ref in (("sender", found.sender), ("receiver", found.receiver)):
        details = [ref.source, *([ref.apply] if ref.adapter else [])]
        yield f"{role:<9} {ref.name} ({', '.join(details)})"
    yield f"tasks     {', '.join(map(str, found.tasks))}"
    yield f"chat      {'yes' if found.chat else 'no'}"
    if found.train is not None:
        recipe = found.train
        yield (
            f"training  {recipe.method}, {recipe.steps} steps of {recipe.batch_size} items, "
            f"learning rate {recipe.learning_rate:g}, seed {recipe.seed}"
        )
