"""Small pair files for tests."""

from __future__ import annotations

from pathlib import Path

RECORDS = '[{ name = "records", num_records = 2 }]'


def write_pair(
    path: Path,
    sender: str,
    receiver: str,
    adapter: str | None = None,
    tasks: str = RECORDS,
    train: str | None = None,
    chat: bool = True,
) -> Path:
    """Write the file of a pair, with a recipe if `train` has the lines of one."""
    lines = ["schema_version = 1", 'description = "x"', f"tasks = {tasks}"]
    lines += [f"chat = {str(chat).lower()}", "[sender]", f'model = "{sender}"']
    lines += ["[receiver]", f'model = "{receiver}"']
    lines += [] if adapter is None else [f'adapter = "{adapter}"']
    lines += [] if train is None else ["[train]", train]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path
