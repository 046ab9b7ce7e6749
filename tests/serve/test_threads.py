from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from droidkv.serve.threads import background_pool  # noqa: E402


@pytest.mark.usefixtures("three_threads")
def test_tensor_operations_of_a_background_thread_keep_to_one_core() -> None:
    """And those of the others do not: a limit that reached them would slow the model down."""
    with background_pool(2, "test") as pool:
        assert pool.submit(torch.get_num_threads).result() == 1
        total = pool.submit(lambda: float(torch.ones(1 << 20).sum())).result()
        assert total == 1 << 20
        assert pool.submit(torch.get_num_threads).result() == 1
        assert torch.get_num_threads() == 3
