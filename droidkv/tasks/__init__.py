"""Tasks by name. A task's file is imported only when the task is asked for."""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any, cast, get_type_hints

from droidkv.errors import TaskError, unknown_name
from droidkv.fields import Fields
from droidkv.records import take
from droidkv.tasks.base import SPLITS, Item, Split, Task

__all__ = ["SPLITS", "Item", "Split", "Task", "get_task", "task_names"]

_TASKS: dict[str, str] = {
    "bfcl": "droidkv.tasks.bfcl:BfclTask",
    "hub": "droidkv.tasks.hub:HubTask",
    "human_eval": "droidkv.tasks.human_eval:HumanEvalTask",
    "local": "droidkv.tasks.local:LocalTask",
    "reasoning": "droidkv.tasks.reasoning:ReasoningTask",
    "records": "droidkv.tasks.records:RecordsTask",
}


def task_names() -> list[str]:
    """Names of all tasks, sorted."""
    return sorted(_TASKS)


def get_task(name: str, /, **options: Any) -> Task:
    """Make a task.

    Args:
        name: One of `task_names()`.
        **options: The task's options; each has a default.

    Raises:
        TaskError: If the name or an option is unknown, or an option's value is wrong.
        MissingExtraError: If the task's data comes with a package that is not installed.
    """
    if name not in _TASKS:
        raise TaskError(unknown_name("task", name, task_names()))
    module_name, _, class_name = _TASKS[name].partition(":")
    task_class = getattr(importlib.import_module(module_name), class_name)
    known = [field.name for field in dataclasses.fields(task_class)]
    hints = get_type_hints(task_class)
    where = f"options of task {name!r}"
    given = Fields(options, where, TaskError)
    checked = {}
    for option in options:
        if option not in known:
            raise TaskError(unknown_name(f"option of task {name!r}", option, known))
        checked[option] = take(given, option, hints[option], where)
    return cast(Task, task_class(**checked))
