from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_file_map_names_every_module_once() -> None:
    tree = README.partition("## Files")[2].partition("```")[2].partition("```")[0]
    folder, named = "", []
    for line in tree.splitlines():
        if match := re.match(r"( *)(\S+)  +\S", line):
            depth, name = len(match[1]) // 2, match[2]
            folder = "/".join([*folder.split("/")[:depth]]) if depth else ""
            path = f"{folder}/{name}".strip("/")
            if name.endswith("/"):
                folder = path.rstrip("/")
            elif name.endswith(".py"):
                named.append(path)
    modules = [
        path.relative_to(ROOT).as_posix()
        for top in ("droidkv", "cli")
        for path in (ROOT / top).rglob("*.py")
        if path.name != "__init__.py"
    ]
    assert sorted(named) == sorted(modules)


def test_exit_codes_are_the_commands() -> None:
    from droidkv.cli import exits

    listed = [int(code) for code in re.findall(r"^\| (\d+) \|", README, re.MULTILINE)]
    codes = [value for name, value in vars(exits).items() if name.isupper() and name != "EPILOG"]
    assert listed == sorted(codes)
