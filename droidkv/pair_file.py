"""Writing pair files, which people then read and edit: TOML, folders as seen from the file."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from droidkv.errors import PairError
from droidkv.jsonio import write_text
from droidkv.pair import SCHEMA_VERSION, ModelRef, Pair, TaskRef
from droidkv.recipe import Recipe, default_targets


def write_pair(pair: Pair) -> None:
    """Write a pair to its `path`; `read_pair` gives it back as it was.

    Raises:
        PairError: The pair has no path, or an option that TOML cannot say.
        StorageError: The file could not be written.
    """
    if pair.path is None:
        raise PairError(f"expected a pair with the path of its file, got {pair.name!r} without")
    write_text(pair.path, pair_text(pair, pair.path.parent))


def pair_text(pair: Pair, folder: Path) -> str:
    """The text of a pair file that lies in `folder`.

    Raises:
        PairError: An option of a task is of a kind that TOML cannot say.
    """
    top = {
        "schema_version": SCHEMA_VERSION,
        "description": pair.description,
        "chat": pair.chat,
        "tasks": [_task(task) for task in pair.tasks],
    }
    if pair.allow_extra_tokens:
        top["allow_extra_tokens"] = True
    tables = {"sender": _model(pair.sender, folder), "receiver": _model(pair.receiver, folder)}
    if pair.reference is not None:
        tables["reference"] = _model(pair.reference, folder)
    if pair.train is not None:
        tables["train"] = _recipe(pair.train)
    parts = ["\n".join(_lines(top))]
    parts += ["\n".join([f"[{name}]", *_lines(table)]) for name, table in tables.items()]
    return "\n\n".join(parts) + "\n"


def _lines(table: Mapping[str, Any]) -> Iterator[str]:
    return (f"{name} = {_value(value)}" for name, value in table.items())


def _value(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # A JSON text is a TOML text, but for one character that TOML wants escaped.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, Mapping):
        inside = ", ".join(f"{_value(str(key))} = {_value(each)}" for key, each in value.items())
        return f"{{ {inside} }}"
    raise PairError(f"expected an option that a pair file can hold, got {value!r}; leave it out")


def _task(task: TaskRef) -> str | dict[str, object]:
    return {"name": task.name, **task.options} if task.options else task.name


def _model(ref: ModelRef, folder: Path) -> dict[str, object]:
    table = _changed(ref)
    for name in ("model", "adapter"):
        text = getattr(ref, name)
        if text is not None and text.startswith("/"):
            relative = os.path.relpath(text, folder)
            table[name] = relative if relative.startswith(".") else f"./{relative}"
    return table


def _recipe(recipe: Recipe) -> dict[str, object]:
    table = _changed(recipe)
    if recipe.target_modules == default_targets(recipe.mode):
        table.pop("target_modules", None)
    return table


def _changed(record: Any) -> dict[str, object]:
    """Fields that differ from their default, in the order of the class."""
    given = {field.name: (getattr(record, field.name), field) for field in fields(record)}
    return {
        name: value
        for name, (value, field) in given.items()
        if value not in (field.default, {}, ())
    }
