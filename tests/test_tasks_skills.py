"""The tasks of the shipped skills: splits are disjoint, items stable, scores right."""

from __future__ import annotations

import pytest

from droidkv.errors import TaskError
from droidkv.tasks import SPLITS, Task, get_task, task_names

SKILLS = ["records", "reasoning"]


@pytest.fixture(params=SKILLS)
def task(request: pytest.FixtureRequest) -> Task:
    if request.param == "reasoning":
        pytest.importorskip("reasoning_gym")
    return get_task(request.param)


def test_names_are_registered() -> None:
    assert set(SKILLS) <= set(task_names())


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
