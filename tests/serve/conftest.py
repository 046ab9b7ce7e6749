from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture
def three_threads() -> Iterator[None]:
    """The test's own thread computes with three, so that a limit on others shows."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(3)
    if torch.get_num_threads() != 3:
        pytest.skip(
            "an engine of vLLM ran in this process, which then keeps its threads as they are"
        )
    yield
    torch.set_num_threads(before)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Engines first: once lmcache is imported, vLLM cannot start one in the same process."""
    items.sort(key=lambda item: ("lmcache" in item.keywords, "vllm" not in item.keywords))
