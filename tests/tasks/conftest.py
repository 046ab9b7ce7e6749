from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

DATA = Path(__file__).parent / "data"


@pytest.fixture
def data() -> Path:
    """Folder of tiny files with invented content, in the shapes of public data sets."""
    return DATA


@pytest.fixture
def dataset_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keep what `datasets` stores out of the user's own cache."""
    datasets = pytest.importorskip("datasets")
    folder = tmp_path / "datasets-cache"
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", folder)
    return folder


@pytest.fixture
def write_rows(tmp_path: Path) -> Callable[..., str]:
    """Write rows to a JSONL file; returns its path."""

    def write(rows: list[dict[str, Any]], name: str = "rows.jsonl") -> str:
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(path)

    return write
