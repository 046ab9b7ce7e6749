"""Identities of made-up senders."""

from __future__ import annotations

from typing import Any

from droidkv.identity import Fingerprint, settings

FIELDS: dict[str, Any] = {
    "weights": "sha256:" + "1" * 64,
    "architecture": settings({"model_type": "llama", "hidden_size": 576}),
    "rope": settings({"rope_type": "default", "rope_theta": 100000.0}),
    "vocabulary": "sha256:" + "2" * 64,
    "tokenizer": "sha256:" + "3" * 64,
    "added_tokens": "sha256:" + "4" * 64,
    "weight_dtype": "float32",
    "cache_dtype": "float32",
    "quantisation": "none",
    "adapter": "none",
    "tensor_parallel": 1,
}


def a_sender(**changes: Any) -> Fingerprint:
    """A complete identity; `changes` replace fields."""
    return Fingerprint(**(FIELDS | changes))
