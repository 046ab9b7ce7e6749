"""A sender's half in the scheduler: which chunks to store. No engine here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from droidkv.serve.connector_plan import RequestView, SaveJob, filled_chunks, wants_overwrite


@dataclass(frozen=True)
class Scheduled:
    """One request in one step of a sender's engine.

    Attributes:
        request_id: The request.
        block_ids: Blocks of its page table, the first one for token 0.
        computed_tokens: Tokens whose KV is in the cache when the step ends.
    """

    request_id: str
    block_ids: Sequence[int]
    computed_tokens: int


@dataclass
class _Sending:
    view: RequestView
    saved_chunks: int = 0


class SenderScheduler:
    """Decides which chunks to store as a sender's blocks fill.

    Args:
        chunk_tokens: Tokens in one chunk of the store.
    """

    def __init__(self, chunk_tokens: int) -> None:
        self._chunk_tokens = chunk_tokens
        self._requests: dict[str, _Sending] = {}

    def admit(self, view: RequestView) -> None:
        """A request arrived. One of a kind that cannot be reused is not stored."""
        if view.obstacle is None:
            self._requests[view.request_id] = _Sending(view)

    def step(self, scheduled: Iterable[Scheduled]) -> list[SaveJob]:
        """Chunks of prompts that will be whole when this step ends, each exactly once."""
        jobs = []
        for each in scheduled:
            sending = self._requests.get(each.request_id)
            if sending is None:
                continue
            tokens = sending.view.token_ids
            chunks = filled_chunks(
                sending.saved_chunks, each.computed_tokens, len(tokens), self._chunk_tokens
            )
            if not chunks:
                continue
            stop = chunks.stop * self._chunk_tokens
            jobs.append(
                SaveJob(
                    each.request_id,
                    tuple(tokens[:stop]),
                    chunks.start,
                    tuple(each.block_ids),
                    wants_overwrite(sending.view.params),
                )
            )
            sending.saved_chunks = chunks.stop
        return jobs

    def finish(self, request_id: str) -> None:
        """The request ended."""
        self._requests.pop(request_id, None)
