"""A client's part in full share: where the base's KV is missing, have the base read the prompt."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from droidkv.errors import RefusedError
from droidkv.serve.connector_plan import OVERWRITE, PARAMS_KEY, Fallback
from droidkv.serve.http_client import Completion, complete
from droidkv.serve.refusals import BAD_REQUEST, SERVER_ERROR

_POLL_SECONDS = 0.1
_DAMAGED = (Fallback.LOAD_SHORT, Fallback.LOAD_CORRUPT)
_LOST = (*_DAMAGED, Fallback.LOAD_ABSENT)


@dataclass(frozen=True)
class Served:
    """A model and where it is served.

    Attributes:
        url: The server's, such as `http://127.0.0.1:8000`.
        model: A name it serves the model under.
    """

    url: str
    model: str


def complete_behind_base(
    base: Served,
    receiver: Served,
    prompt_ids: Sequence[int],
    max_tokens: int,
    prefix_tokens: int | None = None,
    wait_seconds: float = 60.0,
) -> Completion:
    """Answer by a receiver that refuses what the base has not read.

    The receiver is asked first. If it refuses, the base reads the prefix, of which it prefills only
    what it has not read before, and the receiver is asked until what the base stored has arrived.

    Args:
        base: The base; with adapters in one engine at the receiver's address.
        receiver: The model that was trained to read the base's KV.
        prompt_ids: The prompt.
        max_tokens: Most tokens of the answer.
        prefix_tokens: Tokens that the base is to read, as in training: a receiver that learned to
            read the question itself answers much worse where the base has read that too. None =
            the whole prompt.
        wait_seconds: Longest time to ask again once the base has read it.

    Raises:
        RefusedError: The receiver still refuses, or would however much the base had read.
        ServeError: A server went away, or the request was wrong.
    """
    params = None if prefix_tokens is None else {PARAMS_KEY: {"prefix_tokens": prefix_tokens}}
    prefix_ids = prompt_ids[:prefix_tokens]
    deadline, is_known_lost = None, False
    while True:
        try:
            return complete(receiver.url, receiver.model, prompt_ids, max_tokens, params)
        except RefusedError as cause:
            _require_hope(cause)
            is_lost = cause.reason in _LOST
            if deadline is None or (is_lost and not is_known_lost):
                # Once; and once more if only then something there turns out damaged or gone.
                _read(base, prefix_ids, cause)
                deadline = deadline or time.monotonic() + wait_seconds
                is_known_lost = is_lost
                continue
            if time.monotonic() > deadline:
                raise RefusedError(
                    f"expected {receiver.model} to answer {len(prompt_ids)} tokens once "
                    f"{base.model} had read them, but it still refuses after {wait_seconds:g} s: "
                    f"{cause}",
                    cause.status,
                    cause.reason,
                ) from cause
        time.sleep(_POLL_SECONDS)


def _require_hope(refusal: RefusedError) -> None:
    """Do nothing if it may help that the base reads the prefix, or to wait."""
    is_final = refusal.status in (BAD_REQUEST, SERVER_ERROR)
    if is_final or refusal.reason == Fallback.WEIGHTS_CHANGED:
        raise refusal


def _read(base: Served, prefix_ids: Sequence[int], refusal: RefusedError) -> None:
    """Have the base read a prefix. What is there is not stored twice, unless it is damaged."""
    again = {PARAMS_KEY: {OVERWRITE: True}} if refusal.reason in _DAMAGED else None
    complete(base.url, base.model, prefix_ids, 1, again)
