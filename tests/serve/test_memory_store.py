from __future__ import annotations

import pytest
from serve.conformance_store import CHUNK_TOKENS, StoreConformance

from droidkv.errors import PlanError
from droidkv.serve.store import MemoryStore, Store


class TestMemoryStore(StoreConformance):
    @pytest.fixture
    def store(self) -> Store:
        return MemoryStore(CHUNK_TOKENS)


def test_a_chunk_has_tokens() -> None:
    with pytest.raises(PlanError, match="chunk_tokens >= 1"):
        MemoryStore(0)
