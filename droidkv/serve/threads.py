"""Threads beside the engine's own, which leave its cores to the model."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch
from threadpoolctl import threadpool_limits


def background_pool(num_threads: int, name: str) -> ThreadPoolExecutor:
    """Threads in which a tensor operation runs on one core.

    By default each would start a team as large as the model's. The teams would wait for one
    another's turns; and once there are more of their threads than cores, GNU's OpenMP lets those of
    the model sleep where it let them spin, which slows down requests that load nothing, too.

    Args:
        num_threads: Most threads.
        name: What theirs start with.
    """
    return ThreadPoolExecutor(
        num_threads, thread_name_prefix=f"droidkv-{name}", initializer=keep_to_one_core
    )


def keep_to_one_core() -> None:
    """From here on, tensor operations of the calling thread run on one core."""
    torch.get_num_threads()  # torch sets a thread's number at its first operation, never again
    threadpool_limits(1, user_api="openmp")  # of the calling thread only
