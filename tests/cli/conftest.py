from __future__ import annotations

from pathlib import Path

import pytest
from command_line import SMALL, run
from made_profiles import smooth_profile

from droidkv.profile import write_profile


@pytest.fixture(autouse=True)
def _apart(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each test runs in an empty folder; what droidkv caches stays within this test run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DROIDKV_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture(scope="session")
def profiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A profile of the tiny pair, made by the command."""
    file = tmp_path_factory.mktemp("profiled") / "tiny.json"
    run("profile", "tiny", *SMALL, "-o", file)
    return file


@pytest.fixture(scope="session")
def smooth(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A made-up profile of 12 layers and both families, whose frontier is as one expects."""
    file = tmp_path_factory.mktemp("smooth") / "smooth.json"
    write_profile(file, smooth_profile(num_layers=12))
    return file
