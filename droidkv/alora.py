"""Activated LoRA (aLoRA): adapters that are off until certain tokens, so the prefix's KV is shared.

Before its invocation tokens such an adapter changes nothing, so KV of a prefix that ends there is
the base's own: the empty plan is exact, 0 layers are recomputed, and there is nothing to profile.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from droidkv.content import ADAPTER_CONFIG, read_adapter_config
from droidkv.errors import LoadError


def invocation_tokens(folder: Path) -> tuple[int, ...] | None:
    """The tokens from which on an adapter is active; None for one that always is.

    Args:
        folder: A PEFT adapter.

    Raises:
        LoadError: The settings are missing or damaged.
    """
    tokens = read_adapter_config(folder).get("alora_invocation_tokens")
    if not tokens:
        return None
    if not isinstance(tokens, list) or not all(
        isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in tokens
    ):
        raise LoadError(
            f"{folder / ADAPTER_CONFIG}: expected alora_invocation_tokens to be a list of token "
            f"ids, got {tokens!r}; save the adapter anew"
        )
    return tuple(tokens)


def exact_prefix_tokens(
    prefix_ids: Sequence[int], suffix_ids: Sequence[int], invocation: Sequence[int]
) -> int:
    """How many tokens of a prefix have the base's KV under an activated LoRA.

    The adapter is active from the last occurrence of its invocation tokens on, or not at all where
    there is none; then the whole prefix is the base's too.

    Args:
        prefix_ids: Tokens both models share.
        suffix_ids: Tokens only the receiver sees.
        invocation: The tokens that switch the adapter on.
    """
    start = active_from([*prefix_ids, *suffix_ids], invocation)
    return len(prefix_ids) if start is None else min(start, len(prefix_ids))


def active_from(ids: Sequence[int], invocation: Sequence[int]) -> int | None:
    """Where the last occurrence of the invocation tokens begins; None = there is none."""
    length = len(invocation)
    starts = range(len(ids) - length, -1, -1)
    return next((at for at in starts if list(ids[at : at + length]) == list(invocation)), None)
