"""Imports go one way: a module may import only from rows above its own. Packages are one unit."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# One row per layer, from what everything may import to what nothing may.
LAYERS = """
errors
plan jsonio fields differences tiny check
costs identity recipe quality run_folder architecture
ttft frontier records safetensors_file pair stability
calibration_fit profile content cache pair_file provenance probe_record
objectives models sources adapter_folder alora calibration_file confirmation merged
model_identity
choice sharing capture loading tasks candidates optimism
policy stitch encode plots servable
prefill
evaluate training
sweep refine
search profile_job oracles bench
estimate
profiler probe verify canary calibration_steps
calibrate doctor sharing_sweep
serve
cli
"""
ROW = {name: row for row, line in enumerate(LAYERS.split("\n")) for name in line.split()}


def sources() -> dict[str, str]:
    """Source text of every module, by dotted name; `cli/` is installed as `droidkv.cli`."""
    found = {}
    for folder, package in ((ROOT / "droidkv", "droidkv"), (ROOT / "cli", "droidkv.cli")):
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            name = ".".join([package, *parts])
            found[name] = path.read_text(encoding="utf-8")
    return found


def unit(module: str) -> str:
    """The row's entry a module belongs to: `droidkv.tasks.base` -> `tasks`."""
    return module.split(".")[1]


def imported(module: str, text: str, known: set[str]) -> Iterator[str]:
    """Dotted names of droidkv's modules that a module imports anywhere in its text."""
    package = module.rpartition(".")[0]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, *filter(None, [node.module])])
            names = [f"{base}.{alias.name}" for alias in node.names]
            # What is no module is a name that the module `base` holds.
            names = [n if {n, f"{n}.__init__"} & known else base for n in names]
        else:
            continue
        yield from (name for name in names if name.startswith("droidkv."))


def upward_imports(texts: Mapping[str, str]) -> list[str]:
    """Every import that does not go to a row above, and every module without a row."""
    found = []
    for module, text in texts.items():
        mine = unit(module)
        if mine == "__init__":
            continue
        if mine not in ROW:
            found.append(f"{module} has no row in LAYERS of tests/test_layers.py")
            continue
        for name in imported(module, text, set(texts)):
            other = unit(name)
            if other != mine and ROW.get(other, len(ROW)) >= ROW[mine]:
                found.append(f"{module} imports {name}, which is not above it")
    return found


def test_imports_go_one_way() -> None:
    assert upward_imports(sources()) == []


def test_the_walk_sees_the_modules_and_their_imports() -> None:
    texts = sources()
    assert {"droidkv.plan", "droidkv.tasks.base", "droidkv.cli.__init__"} <= set(texts)
    assert "droidkv.errors" in imported("droidkv.plan", texts["droidkv.plan"], set(texts))


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("droidkv.plan", "import droidkv.cli.main"),
        ("droidkv.plan", "import os, droidkv.frontier as f"),
        ("droidkv.plan", "from droidkv import frontier"),
        ("droidkv.plan", "from droidkv import tasks"),
        ("droidkv.plan", "from droidkv.frontier import pareto_front"),
        ("droidkv.plan", "from droidkv.tasks.base import Item"),
        ("droidkv.plan", "from . import frontier"),
        ("droidkv.plan", "from .frontier import pareto_front"),
        ("droidkv.plan", "def f():\n    from droidkv.frontier import pareto_front"),
        ("droidkv.plan", "if TYPE_CHECKING:\n    from droidkv.frontier import Measurement"),
        ("droidkv.plan", "from droidkv.jsonio import read_json"),
        ("droidkv.tasks.base", "from ..cli import main"),
        ("droidkv.tasks.base", "from droidkv.cli.main import main"),
        ("droidkv.tasks.base", "from droidkv.unheard_of import x"),
        ("droidkv.search.budgeted", "from droidkv.bench import sweep"),
        ("droidkv.unheard_of", ""),
    ],
)
def test_a_planted_upward_import_is_found(module: str, text: str) -> None:
    found = upward_imports(sources() | {module: text})
    assert [line for line in found if line.startswith(f"{module} ")]


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("droidkv.frontier", "from droidkv import plan"),
        ("droidkv.frontier", "from droidkv import __version__"),
        ("droidkv.frontier", "import numpy, droidkv.plan"),
        ("droidkv.tasks.records", "from . import base\nfrom .base import Item"),
        ("droidkv.tasks.records", "from droidkv.tasks.base import Item"),
        ("droidkv.cli.profile", "from . import output\nfrom droidkv.policy import pick"),
    ],
)
def test_a_planted_downward_import_is_not(module: str, text: str) -> None:
    assert upward_imports({**sources(), module: text}) == upward_imports(sources())
