from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from droidkv.serve.threads import background_pool  # noqa: E402


def test_tensor_operations_of_a_background_thread_keep_to_one_core() -> None:
    """And those of the others do not: a limit that reached them would slow the model down."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    if torch.get_num_threads() != 3:
        pytest.skip(
            "an engine of vLLM ran in this process, which then keeps its threads as they are"
        )
    try:
        with background_pool(2, "test") as pool:
            assert pool.submit(torch.get_num_threads).result() == 1
            total = pool.submit(lambda: float(torch.ones(1 << 20).sum())).result()
            assert total == 1 << 20
            assert pool.submit(torch.get_num_threads).result() == 1
            assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
