"""Threads beside the engine's own, which leave its cores to the model."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch
from threadpoolctl import threadpool_limits


def background_pool(num_threads: int, name: str) -> ThreadPoolExecutor:
    """Threads in which a tensor operation runs on one core.

    By default each would start a team as large as the model's, and the two teams would wait for
    one another's turns.

    Args:
        num_threads: Most threads.
        name: What theirs start with.
    """
    return ThreadPoolExecutor(
        num_threads, thread_name_prefix=f"droidkv-{name}", initializer=_keep_to_one_core
    )


def _keep_to_one_core() -> None:
    torch.get_num_threads()  # torch sets a thread's number at its first operation, never again
    threadpool_limits(1, user_api="openmp")  # of the calling thread only
