from __future__ import annotations

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Engines first: once lmcache is imported, vLLM cannot start one in the same process."""
    items.sort(key=lambda item: ("lmcache" in item.keywords, "vllm" not in item.keywords))
