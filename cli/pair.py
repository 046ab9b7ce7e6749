"""`droidkv pair`: list, show and check pairs, and train their receivers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from droidkv.errors import DroidKVError, LoadError, PairError

from . import exits
from .console import Console
from .framework import Group
from .options import pair_argument, run_options
from .places import read_named_profile
from .table import table
from .train import output_option, train_by_recipe
from .train import run_options as train_options

if TYPE_CHECKING:
    from droidkv.loading import LoadedModel
    from droidkv.pair import Pair
    from droidkv.profile import Profile

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
    named = None if profile_name is None else read_named_profile(profile_name)

    from droidkv.loading import check_place

    check_place(dtype, device)
    checks: list[dict[str, Any]] = []
    for name, work in _checks(found, configs_only, named, dtype, device):
        console.note(f"{name} ...")
        try:
            detail, passed = work(), True
        except LoadError:  # what is not there cannot be checked
            raise
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
    droidkv pair train smollm2-records-prefillshare --output ./my-adapter --eval-every 20
    """
)
@pair_argument
@output_option
@train_options
@click.pass_obj
def train(console: Console, /, pair_name: str, output: Path | None, **options: Any) -> None:
    """Train a pair's receiver by the recipe in its file.

    Whatever the recipe's mode is: plain, prefillshare or icarus. `droidkv train prefillshare` and
    `train icarus` write such a pair file first.
    """
    from droidkv.pair import read_pair

    train_by_recipe(console, read_pair(pair_name), output, options)


def _checks(
    found: Pair, configs_only: bool, named: tuple[Path, Profile] | None, dtype: str, device: str
) -> Iterator[tuple[str, Callable[[], str]]]:
    """Name and work of each check, in order; the work says what was found."""
    from droidkv.encode import encode_shared
    from droidkv.loading import check_pair_configs, load_pair
    from droidkv.profile import require_identity
    from droidkv.tasks import get_task

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
    if (activated := _activated(found)) is not None:
        yield "activated adapter", activated
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
    if named is not None:
        path, profile = named

        def identity() -> str:
            require_identity(profile, sender.fingerprint, receiver.fingerprint)
            return f"{path} was measured on these very models"

        yield "profile", identity


def _activated(found: Pair) -> Callable[[], str] | None:
    """The check of a receiver that is its base up to some tokens (aLoRA), or None for others."""
    from droidkv.alora import active_from, exact_prefix_tokens, invocation_tokens
    from droidkv.encode import encode
    from droidkv.loading import load_model
    from droidkv.sources import adapter_folder
    from droidkv.tasks import get_task

    if found.receiver.adapter is None:
        return None
    invocation = invocation_tokens(adapter_folder(found.receiver))
    if invocation is None:
        return None

    def check() -> str:
        sender = load_model(found.sender)
        under = dataclasses.replace(found.receiver, adapter=None, adapter_revision=None)
        load_model(under).fingerprint.require_same(
            sender.fingerprint, mine="the base of the activated adapter", theirs="the sender"
        )
        for ref in found.tasks:
            for item in get_task(ref.name, **ref.options).items("eval", CHECKED_ITEMS):
                encoded = encode(item, sender.tokenizer, found.chat)
                ids = encoded.prefix_ids
                exact = exact_prefix_tokens(ids, encoded.suffix_ids, invocation)
                if active_from([*ids, *encoded.suffix_ids], invocation) is None:
                    raise PairError(
                        f"expected the invocation tokens {list(invocation)} in every prompt, but "
                        f"item {item.id!r} has them nowhere, so the adapter is never switched on; "
                        "see to the pair's chat template"
                    )
                if exact < len(ids):
                    raise PairError(
                        f"expected the invocation tokens {list(invocation)} after the prefix, "
                        f"but in item {item.id!r} they stand at token {exact} of {len(ids)}; the "
                        "base's KV is exact only before them"
                    )
        return (
            f"active from the tokens {list(invocation)} on; before them KV is the sender's own, so "
            "the plan [0,0) is exact: 0 layers to recompute, nothing to profile"
        )

    return check


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
