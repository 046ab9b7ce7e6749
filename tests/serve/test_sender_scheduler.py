from __future__ import annotations

from droidkv.serve.connector_plan import Fallback, RequestView
from droidkv.serve.sender_scheduler import Scheduled, SenderScheduler

CHUNK = 8
TOKENS = list(range(100, 140))
BLOCKS = (3, 1, 4, 5, 9, 2, 6)


def test_a_sender_stores_chunks_as_they_fill_and_once() -> None:
    half = SenderScheduler(CHUNK)
    half.admit(RequestView("r", TOKENS))
    half.admit(RequestView("lora", TOKENS, obstacle=Fallback.LORA))
    saved: list[int] = []
    for computed in (5, 15, 20, 8, 40, 41, 60):  # 8: preempted, and prefilled once more
        for job in half.step(
            [Scheduled("r", BLOCKS, computed), Scheduled("lora", BLOCKS, computed)]
        ):
            assert job.request_id == "r"
            assert len(job.token_ids) % CHUNK == 0
            saved += range(job.first_chunk, len(job.token_ids) // CHUNK)
    assert saved == [0, 1, 2, 3, 4]
    half.finish("r")
    assert half.step([Scheduled("r", BLOCKS, 40)]) == []
