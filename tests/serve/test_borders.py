"""Which files may know the packages that serving is built on."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import droidkv

FOLDER = Path(droidkv.__file__).parent


def packages_named(text: str) -> Iterator[str]:
    """Top-level packages that a module imports, or names in a call that imports."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]
        elif isinstance(node, ast.Call) and node.args:
            function = node.func.attr if isinstance(node.func, ast.Attribute) else None
            function = node.func.id if isinstance(node.func, ast.Name) else function
            first = node.args[0]
            if function in ("require_extra", "import_module") and isinstance(first, ast.Constant):
                yield str(first.value).partition(".")[0]


def files_naming(package: str) -> set[str]:
    paths = FOLDER.rglob("*.py")
    return {path.name for path in paths if package in packages_named(path.read_text("utf-8"))}


def test_lmcache_is_known_by_the_files_that_say_so() -> None:
    assert files_naming("lmcache") == {"lmcache_store.py", "lmcache_manager.py"}


def test_vllm_is_known_by_the_files_that_say_so() -> None:
    assert all(name.startswith("vllm_") for name in files_naming("vllm"))


def test_a_planted_import_is_seen() -> None:
    assert "lmcache" in packages_named("def f():\n    from lmcache.v1 import config")
    assert "lmcache" in packages_named("x = require_extra('lmcache.utils', 'store')")
