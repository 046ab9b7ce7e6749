"""The tasks of the shipped skills: splits are disjoint, items stable, scores right."""

from __future__ import annotations

import importlib.resources
from typing import Any

import pytest

from droidkv.errors import MissingExtraError, TaskError
from droidkv.tasks import SPLITS, Task, get_task, task_names
from droidkv.tasks.calls import call_text, matches

SKILLS = {"records": "droidkv", "reasoning": "reasoning_gym", "bfcl": "bfcl_eval"}


@pytest.fixture(params=SKILLS)
def task(request: pytest.FixtureRequest) -> Task:
    pytest.importorskip(SKILLS[request.param])
    return get_task(request.param)


def test_names_are_registered() -> None:
    assert SKILLS.keys() <= set(task_names())


def test_unknown_name_and_option_name_the_known() -> None:
    with pytest.raises(TaskError, match="Did you mean 'records'"):
        get_task("record")
    with pytest.raises(TaskError, match="num_records"):
        get_task("records", num_record=8)
    with pytest.raises(TaskError, match="1 to 20, got 0"):
        get_task("records", num_records=0)


def test_items_are_stable_and_a_beginning_of_more(task: Task) -> None:
    more = task.items("eval", 12, seed=3)
    assert task.items("eval", 5, seed=3) == more[:5]
    assert task.items("eval", 5, seed=4) != more[:5]
    assert len({item.id for item in more}) == len(more)


def test_splits_share_no_prefix(task: Task) -> None:
    seen: dict[str, str] = {}
    for split in SPLITS:
        for seed in (0, 1):
            for item in task.items(split, 60, seed=seed):
                assert seen.setdefault(item.prefix, split) == split


def test_reference_answer_scores_one_and_another_zero(task: Task) -> None:
    first, second = task.items("eval", 2)
    for item in (first, second):
        assert item.prefix and item.suffix and item.answer
        assert task.score(item, item.answer) == 1.0
        assert task.score(item, item.answer + "X") == 0.0
        assert task.score(item, "") == 0.0


def test_bad_split_and_limit(task: Task) -> None:
    with pytest.raises(TaskError, match="unknown split"):
        task.items("test", 1)  # type: ignore[arg-type]
    with pytest.raises(TaskError, match="at least 1"):
        task.items("eval", 0)


def test_records_want_capitals_and_contexts_hold_several_questions() -> None:
    task = get_task("records", num_records=5, questions_per_context=3)
    items = task.items("train", 6)
    assert len({item.prefix for item in items}) == 2
    assert items[0].prefix == items[2].prefix
    assert items[0].prefix.count("\n") == 4
    assert task.score(items[0], items[0].answer.lower()) == 0.0
    assert items[0].answer.lower() in items[0].prefix.lower()


def test_needle_questions_are_answered_by_their_haystack() -> None:
    pytest.importorskip("reasoning_gym")
    items = get_task("reasoning", questions_per_context=4).items("train", 8)
    assert len({item.prefix for item in items}) == 2
    for item in items:
        fact = item.suffix.removeprefix("Who ").removesuffix("? Reply only with a name.")
        assert f"{item.answer} {fact}" in item.prefix


def test_bfcl_functions_do_not_cross_splits_and_questions_name_theirs() -> None:
    pytest.importorskip("bfcl_eval")
    task = get_task("bfcl", num_functions=4, questions_per_context=2)
    functions = {
        split: {str(item.metadata["function"]) for item in task.items(split, 200)}
        for split in SPLITS
    }
    assert not functions["train"] & functions["eval"]
    assert not functions["train"] & functions["calibration"]
    assert not functions["calibration"] & functions["eval"]
    for item in task.items("eval", 20):
        assert f"\n{item.metadata['function']}(" in item.prefix
        assert item.prefix.count("\n") == 4
        assert item.answer.startswith(f"{item.metadata['function']}(")


def test_bfcl_says_how_to_get_its_data(monkeypatch: pytest.MonkeyPatch) -> None:
    from droidkv.tasks import bfcl

    def missing(package: str) -> None:
        raise ModuleNotFoundError(f"No module named {package!r}")

    bfcl._requests.cache_clear()
    monkeypatch.setattr(importlib.resources, "files", missing)
    with pytest.raises(MissingExtraError, match="--no-deps bfcl-eval"):
        get_task("bfcl").items("eval", 1)


ALLOWED: dict[str, list[Any]] = {"place": ["New York", "NYC"], "days": [3], "unit": ["km", ""]}


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("f.g(place='New York', days=3)", True),
        ("f.g('nyc', 3, unit='KM')", True),
        (" f.g(days=3.0, place='new-york') ", True),
        ("f.g(place='New York')", False),
        ("f.g(place='New York', days=True)", False),
        ("f.g(place='Boston', days=3)", False),
        ("f.g(place='New York', days=3, more=1)", False),
        ("f.g('NYC', place='NYC', days=3)", False),
        ("f.g('NYC', 3, 'km', 1)", False),
        ("g(place='New York', days=3)", False),
        ("f.g(place=open('x'), days=3)", False),
        ("f.g(**{'place': 'NYC'}, days=3)", False),
        ("f.g(place='New York', days=3", False),
        ("f.g", False),
    ],
)
def test_call_comparison(text: str, right: bool) -> None:
    assert matches(text, "f.g", ["place", "days", "unit"], ALLOWED) is right


def test_call_text_prefers_what_the_question_says() -> None:
    assert call_text("f.g", ALLOWED) == "f.g(place='New York', days=3)"
    assert call_text("f.g", ALLOWED, "from NYC") == "f.g(place='NYC', days=3)"
