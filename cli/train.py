"""`droidkv train`: ordinary fine-tunes, and receivers that read a frozen base's KV."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .console import Console
from .framework import Group
from .options import combined, command_line, output_folder, pair_argument
from .places import require_writable
from .progress import duration

if TYPE_CHECKING:
    from droidkv.loading import LoadedModel
    from droidkv.pair import Pair
    from droidkv.recipe import Method, Mode
    from droidkv.training.run import TrainSettings

Options = dict[str, Any]

run_options = combined(
    click.option("--max-tokens", default=1024, show_default=True, help="Most tokens of one item."),
    click.option(
        "--eval-every",
        "eval_steps",
        type=click.IntRange(1),
        help="Steps between evaluations on held-out items. Default: none.",
    ),
    click.option(
        "--eval-items", type=click.IntRange(1), default=16, show_default=True, help="How many."
    ),
    click.option(
        "--checkpoint-every",
        "checkpoint_steps",
        type=click.IntRange(1),
        default=25,
        show_default=True,
        help="Steps between checkpoints.",
    ),
    click.option("--device", default="cpu", show_default=True, help="A torch device."),
)
output_option = click.option(
    "-o",
    "--output",
    type=output_folder,
    help="The folder to make. Default: the one that the pair file names.",
)


@click.group(cls=Group)
def train() -> None:
    """Train a pair's receiver by the recipe in its file.

    A run that was stopped goes on from its last checkpoint and ends as it would have. The learning
    curve lies beside what was trained, as curve.json and, with matplotlib, curve.png. `droidkv pair
    train` trains by any recipe as it is; `train prefillshare` and `train icarus` also derive theirs
    from that of the ordinary fine-tune.
    """


@train.command(
    examples="""
    droidkv train plain smollm2-records --output ./my-adapter
    droidkv train plain smollm2-records --output ./my-adapter --eval-every 20
    """
)
@pair_argument
@output_option
@run_options
@click.pass_obj
def plain(console: Console, /, pair_name: str, output: Path | None, **options: Any) -> None:
    """Train an ordinary fine-tune, which reads its own KV."""
    from droidkv.pair import read_pair

    pair = read_pair(pair_name)
    _require_mode(pair, "plain")
    train_by_recipe(console, pair, output, options)


pair_file_option = click.option(
    "--pair-file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="The pair file to write. Default: PAIR-MODE.toml beside that of PAIR.",
)


@train.command(
    examples="""
    droidkv train prefillshare my-pair.toml
    droidkv train prefillshare smollm2-records --method full --eval-every 20
    droidkv train prefillshare smollm2-records --pair-file ./my-pairs/mine.toml
    """
)
@pair_argument
@click.option(
    "--method",
    type=click.Choice(["lora", "full"]),
    help="An adapter, or all parameters. Default: lora.",
)
@pair_file_option
@run_options
@click.pass_obj
def prefillshare(
    console: Console,
    /,
    pair_name: str,
    method: Method | None,
    pair_file: Path | None,
    **options: Any,
) -> None:
    """Train a receiver to answer from the base's KV.

    This is PrefillShare's cache-conditioned fine-tuning. The sender is the frozen base. It reads
    the prefix; the receiver reads question and answer behind its KV, which is the empty plan. PAIR
    is the pair of the ordinary fine-tune, whose recipe is taken over, or the pair that this command
    made before.
    """
    train_by_recipe(
        console, _full_share(pair_name, "prefillshare", method, pair_file), None, options
    )


@train.command(
    examples="""
    droidkv train icarus my-pair.toml
    droidkv train icarus smollm2-records --pair-file ./my-pairs/mine-icarus.toml --eval-every 20
    """
)
@pair_argument
@pair_file_option
@run_options
@click.pass_obj
def icarus(console: Console, /, pair_name: str, pair_file: Path | None, **options: Any) -> None:
    """Train an adapter that never writes KV of its own.

    This is ICaRus: it decodes from the base's KV of every token. The sender is the frozen base and
    the logical encoder; the adapter, on q, o and the MLP, is the logical decoder. PAIR is the pair
    of the ordinary fine-tune, whose recipe is taken over, or the pair that this command made
    before.
    """
    pair = _full_share(pair_name, "icarus", None, pair_file)
    train_by_recipe(console, pair, None, options)


def _full_share(pair_name: str, mode: Mode, method: Method | None, pair_file: Path | None) -> Pair:
    """The pair to train: as its file says, or derived from that of the ordinary fine-tune."""
    from droidkv.pair import read_pair
    from droidkv.training.pairs import full_share_pair, recipe_of

    pair = read_pair(pair_name)
    recipe = recipe_of(pair)
    if recipe.mode == "plain":
        derived = full_share_pair(pair, mode, method or "lora", pair_file)
        assert derived.path is not None
        if derived.path.exists() and read_pair(derived.path).train != derived.train:
            raise click.UsageError(
                f"expected no file at {derived.path}, or one with the recipe that comes of "
                f"{pair.path}, but it has another; train by it with `droidkv pair train`, or name "
                "another --pair-file"
            )
        return derived
    if pair_file is not None or method not in (None, recipe.method):
        raise click.UsageError(
            f"{pair.path} says itself what is made: --pair-file and --method go with the pair of "
            "the ordinary fine-tune"
        )
    _require_mode(pair, mode)
    return pair


def _require_mode(pair: Pair, mode: str) -> None:
    from droidkv.training.pairs import recipe_of

    recipe = recipe_of(pair)
    if recipe.mode != mode:
        raise click.UsageError(
            f"expected a recipe of mode {mode!r} in {pair.path}, got {recipe.mode!r}; run "
            f"`droidkv train {recipe.mode}`"
        )


def train_by_recipe(console: Console, pair: Pair, output: Path | None, options: Options) -> None:
    """Train a pair's receiver as its recipe says, and tell how it went.

    Args:
        console: Where that is told.
        pair: A pair with a recipe; its file is written if it is not there yet.
        output: The folder to make; None = the one that the pair names.
        options: What `run_options` gave.
    """
    from droidkv.pair_file import write_pair
    from droidkv.training.checkpoints import require_new
    from droidkv.training.pairs import load_base, output_of, train_pair
    from droidkv.training.run import TrainSettings

    target = output or output_of(pair)
    require_new(target)  # before a model is loaded and timed
    require_writable(target)
    is_new = pair.path is not None and not pair.path.exists()
    checkpoints = target.with_name(f"{target.name}.training")
    console.keeps(
        checkpoints,
        f"checkpoints go to {checkpoints}; the same command goes on from the last one",
    )
    base = load_base(pair, options.pop("device"))
    settings = TrainSettings(chat=pair.chat, command=command_line(), **options)
    assert pair.train is not None
    seconds = _train_seconds(base, pair, settings)
    console.note(f"{pair.train.steps} steps, about {duration(seconds)} on this machine")
    result = train_pair(
        pair,
        target,
        settings,
        lambda step, steps, loss: console.progress("step", step, steps, f"loss {loss:.3f}"),
        base,
    )
    if is_new:
        write_pair(pair)
    drawn = _plot(console, target, pair)
    value = dataclasses.asdict(result) | {
        "output": str(result.output),
        "pair": pair.name,
        "pair_file": str(pair.path),
        "curve_plot": drawn,
    }
    held_out = "" if result.held_out_loss is None else f", held out {result.held_out_loss:.3f}"
    lines = [
        f"{result.output}: loss {result.first_loss:.3f} -> {result.last_loss:.3f}{held_out} in "
        f"{result.steps} steps, {duration(result.seconds)}"
    ]
    if is_new:
        lines.append(f"{pair.path}: the pair of it; next: droidkv profile {pair.path}")
    console.result(value, lines)


def _plot(console: Console, folder: Path, pair: Pair) -> str | None:
    """Draw the learning curve; without matplotlib there is only its data."""
    from droidkv.errors import MissingExtraError
    from droidkv.plots import plot_curve
    from droidkv.training.curve import CURVE_FILE, Curve

    path = folder / "curve.png"
    try:
        curve = Curve.read(folder / CURVE_FILE)
        plot_curve({curve.mode: curve.train}, {curve.mode: curve.held_out}, path, pair.name)
    except MissingExtraError as error:
        console.note(f"no plot of the learning curve: {error}")
        return None
    return str(path)


def _train_seconds(base: LoadedModel, pair: Pair, settings: TrainSettings) -> float:
    """About how long training takes: a step costs three times the forward pass of its tokens."""
    import torch

    from droidkv.estimate import prefill_seconds
    from droidkv.tasks import get_task
    from droidkv.training.pairs import recipe_of
    from droidkv.training.rows import training_batches

    recipe = recipe_of(pair)
    task = get_task(recipe.task, **recipe.options)
    items = task.items("train", recipe.batch_size, recipe.seed)
    (rows,) = training_batches(
        items, 1, recipe.batch_size, base.tokenizer, settings.chat, settings.max_tokens
    )
    (ids,) = rows[0].input_ids
    with torch.autocast(base.model.device.type, torch.bfloat16, enabled=recipe.autocast):
        seconds_per_token = prefill_seconds(base.model, ids) / len(ids)
    # The base's pass over what it writes comes on top; what it reads for the receiver falls away.
    # ICaRus's decoder runs over answers only.
    work = {"plain": 3.0, "prefillshare": 3.0, "icarus": 1.5}[recipe.mode]
    return work * seconds_per_token * recipe.steps * sum(row.input_ids.shape[1] for row in rows)
