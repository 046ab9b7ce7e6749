"""`droidkv ask`: unseen questions answered three ways, side by side."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from droidkv.errors import ProfileError, TaskError

from .console import Console
from .framework import Command
from .options import choose_objective, pair_argument, run_options, unconfirmed_option
from .places import named_evidence
from .table import table

if TYPE_CHECKING:
    from droidkv.confirmation import Evidence
    from droidkv.plan import ReusePlan
    from droidkv.profile import Profile
    from droidkv.tasks import Item


@click.command(
    cls=Command,
    examples="""
    droidkv ask smollm2-records
    droidkv ask smollm2-records --plan '[12,24)' --items 5
    droidkv ask smollm2-records --document report.txt --question 'Who wrote this?'
    """,
)
@pair_argument
@click.option(
    "--profile", "profile_name", help="A profile of the pair. Default: named as the pair."
)
@click.option("--plan", "plan_text", help="A plan, such as '[12,24)+stitch'. Default: pick one.")
@click.option("--max-loss", type=float, help="Largest loss of the picked plan. Default: 5.")
@unconfirmed_option
@click.option("--items", default=3, show_default=True, type=click.IntRange(1), help="Questions.")
@click.option(
    "--document",
    type=click.Path(dir_okay=False, exists=True, path_type=Path),
    help="Ask over this text file instead of the profile's task.",
)
@click.option("--question", help="The question over --document.")
@click.option("--max-new-tokens", type=click.IntRange(1), help="Default: as the task says.")
@run_options
@click.pass_obj
def ask(
    console: Console,
    pair_name: str,
    profile_name: str | None,
    plan_text: str | None,
    max_loss: float | None,
    unconfirmed: bool,
    items: int,
    document: Path | None,
    question: str | None,
    max_new_tokens: int | None,
    dtype: str,
    device: str,
) -> None:
    """Answer unseen questions three ways, with prefill times.

    By the receiver's full prefill, by naive full reuse, and by a plan: the one that `droidkv
    frontier pick` picks, unless told otherwise. The questions are items of the profile's task that
    were not measured. The prefill time is that from the request to the
    first token, the sender's cache being in memory.
    """
    if (document is None) != (question is None):
        raise click.UsageError("--document and --question go together")
    from droidkv.confirmation import own_evidence, trained_for
    from droidkv.pair import read_pair
    from droidkv.plan import ReusePlan
    from droidkv.tasks import get_task

    pair = read_pair(pair_name)
    path, profile, evidence = named_evidence(profile_name or pair.name, unconfirmed)
    if profile.pair != pair.name:
        raise ProfileError(
            f"expected a profile of the pair {pair.name!r}, but {path} is of {profile.pair!r}; "
            f"name the right one with --profile"
        )
    if plan_text is None:
        source, plan = _picked(evidence, profile, max_loss)
    else:
        plan = ReusePlan.parse(plan_text, profile.num_layers)
        source = trained_for(plan, evidence) or own_evidence(path, profile)
    task = get_task(profile.task.name, **profile.task.options)
    if document is None:
        profiles = [profile, *(each.profile for each in evidence)]
        measured = {item.id for each in profiles for item in each.items}
        asked = _unseen(
            measured, task.name, task.items("eval", len(measured) + items, profile.task.seed)
        )
    else:
        asked = [_own_item(document, str(question))]

    from droidkv.encode import encode_shared
    from droidkv.loading import load_pair
    from droidkv.profile import require_identity
    from droidkv.profile_job import load_map

    from .answers import answer_each_way, warm_up

    sender, receiver = load_pair(pair, dtype, device)
    require_identity(profile, sender.fingerprint, receiver.fingerprint)
    stitch = load_map(source.path, source.profile) if plan.operator == "stitch" else None
    encoded = [
        encode_shared(item, sender.tokenizer, receiver.tokenizer, pair.chat) for item in asked
    ]
    ways = [("naive full reuse", ReusePlan.of(0, 0)), ("plan", plan)]
    warm_up(receiver, encoded[0])
    results: list[dict[str, Any]] = []
    for done, (item, tokens) in enumerate(zip(asked, encoded, strict=True)):
        console.progress("questions", done, len(asked))
        answers = answer_each_way(
            sender, receiver, tokens, ways, max_new_tokens or task.max_new_tokens, stitch
        )
        entry: dict[str, Any] = {
            "id": item.id,
            "question": item.suffix,
            "expected": item.answer or None,
            "prefix_tokens": len(tokens.prefix_ids),
            "suffix_tokens": len(tokens.suffix_ids),
            "answers": [dataclasses.asdict(answer) for answer in answers],
        }
        for answer in entry["answers"]:
            answer["score"] = task.score(item, answer["text"]) if document is None else None
        results.append(entry)
    console.progress("questions", len(asked), len(asked))
    ways_told = _summary(results)
    map_file = source.map_file(plan)
    value = {
        "profile": str(path),
        "pair": pair.name,
        "plan": str(plan),
        "picked_from": None if plan_text else str(source.path),
        "map": None if map_file is None else str(map_file),
        "ways": ways_told,
        "items": results,
    }
    origin = "" if map_file is None else f" through {map_file}"
    origin += "" if plan_text else f"; {source.remark}"
    lines = _lines(plan, profile.num_layers, origin, results)
    console.result(value, [*lines, "", *_way_lines(ways_told)])


def _picked(
    evidence: Sequence[Evidence], profile: Profile, max_loss: float | None
) -> tuple[Evidence, ReusePlan]:
    from droidkv.policy import pick, pick_among

    objective = choose_objective(profile, None)
    source, choice = pick_among(
        evidence, lambda measured: pick(measured, max_loss, objective=objective)
    )
    return source, choice.plan


def _unseen(measured: set[str], task_name: str, items: list[Item]) -> list[Item]:
    unseen = [item for item in items if item.id not in measured]
    if not unseen:
        raise TaskError(
            f"expected items of {task_name!r} that were not measured, but all of them were; ask "
            f"over a text of yours with --document and --question"
        )
    return unseen


def _own_item(document: Path, question: str) -> Item:
    from droidkv.tasks import Item

    try:
        text = document.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise TaskError(f"{document}: expected UTF-8 text, but: {error}") from error
    return Item(id=document.name, prefix=text.strip(), suffix=question.strip(), answer="")


def _lines(
    plan: ReusePlan, num_layers: int, origin: str, results: list[dict[str, Any]]
) -> Iterator[str]:
    yield f"plan {plan}: {plan.num_recomputed} of {num_layers} layers recomputed{origin}"
    for entry in results:
        tokens = f"{entry['prefix_tokens']} + {entry['suffix_tokens']} tokens"
        yield ""
        yield f"{entry['question'].strip()}   ({tokens})"
        rows = [
            (
                answer["method"],
                f"{answer['prefill_seconds']:.3f} s",
                "" if answer["score"] is None else f"{answer['score']:.2f}",
                _printable(answer["text"]),
            )
            for answer in entry["answers"]
        ]
        header = ("", "prefill", "score", "answer")
        yield from (f"  {line}" for line in table(header, rows, align="<>><"))


def _summary(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each way over all questions."""
    ways = []
    for answers in zip(*(entry["answers"] for entry in results), strict=True):
        scores = [answer["score"] for answer in answers]
        ways.append(
            {
                "method": answers[0]["method"],
                "plan": answers[0]["plan"],
                "num_items": len(answers),
                "mean_score": None if None in scores else sum(scores) / len(scores),
                "median_prefill_seconds": statistics.median(a["prefill_seconds"] for a in answers),
            }
        )
    return ways


def _way_lines(ways: list[dict[str, Any]]) -> list[str]:
    full_seconds = ways[0]["median_prefill_seconds"]
    rows = [
        (
            way["method"],
            way["plan"],
            f"{way['median_prefill_seconds']:.3f} s",
            f"{full_seconds / way['median_prefill_seconds']:.2f}x",
            "" if way["mean_score"] is None else f"{way['mean_score']:.2f}",
        )
        for way in ways
    ]
    header = ("", "plan", "median prefill", "less", f"mean score, n = {ways[0]['num_items']}")
    return table(header, rows, "<<")


def _printable(text: str) -> str:
    """One short line that is safe on a terminal: models may write any character."""
    shown = "".join(each if each.isprintable() else "\N{MIDDLE DOT}" for each in text)
    return f"{shown[:60]}..." if len(shown) > 60 else shown
