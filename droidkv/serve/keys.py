"""Names of what is stored: whose cache it is, and which tokens it covers. The same everywhere.

No name depends on Python's `hash()`, on PYTHONHASHSEED, on a pickle or on text put together from
users' input: each is a SHA-256 over fields of fixed width.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from droidkv.errors import PlanError
from droidkv.identity import Fingerprint

# Version of names and objects. Another version never meets this one.
STORE_FORMAT_VERSION = 2

_NAMESPACE_LABEL = b"droidkv namespace\0"
_CHUNK_LABEL = b"droidkv chunk\0"
_MAX_TOKEN_ID = 2**63 - 1


@dataclass(frozen=True, order=True)
class ChunkKey:
    """One chunk of a prefix in one sender's namespace.

    Attributes:
        namespace: 64 hexadecimal digits; see `namespace_digest`.
        index: Number of the chunk in its prefix, from 0.
        chunk_hash: 64 hexadecimal digits over all tokens from 0 up to the chunk's end.
    """

    namespace: str
    index: int
    chunk_hash: str


def namespace_digest(sender: Fingerprint, rank: int = 0) -> str:
    """The namespace of one rank of one sender: 64 hexadecimal digits.

    Args:
        sender: Identity of the model whose caches are meant; its tensor-parallel layout is a part.
        rank: Which of the sender's ranks holds the heads.

    Raises:
        IdentityError: A field of the identity is unknown, so nothing may be stored or reused.
        PlanError: The sender has no such rank.
    """
    digest = sender.digest()
    num_ranks = sender.tensor_parallel or 1
    if not 0 <= rank < num_ranks:
        raise PlanError(f"expected a rank within [0,{num_ranks}), got {rank}")
    named = _NAMESPACE_LABEL + bytes.fromhex(digest) + _int(STORE_FORMAT_VERSION) + _int(rank)
    return hashlib.sha256(named).hexdigest()


def chunk_hashes(token_ids: Sequence[int], chunk_tokens: int) -> list[str]:
    """A rolling hash for every whole chunk: over all tokens from 0 up to the chunk's end.

    Tokens behind the last whole chunk have none. Chunks of another size never have equal hashes.

    Args:
        token_ids: The prefix.
        chunk_tokens: Tokens in one chunk.

    Returns:
        64 hexadecimal digits per whole chunk.

    Raises:
        PlanError: `chunk_tokens` is below 1, or a token id is negative.
    """
    if chunk_tokens < 1:
        raise PlanError(f"expected chunk_tokens >= 1, got {chunk_tokens}")
    rolling = hashlib.sha256(_CHUNK_LABEL + _int(STORE_FORMAT_VERSION) + _int(chunk_tokens))
    hashes = []
    for stop in range(chunk_tokens, len(token_ids) + 1, chunk_tokens):
        rolling.update(b"".join(_token(each) for each in token_ids[stop - chunk_tokens : stop]))
        hashes.append(rolling.hexdigest())
    return hashes


def chunk_keys(namespace: str, token_ids: Sequence[int], chunk_tokens: int) -> list[ChunkKey]:
    """Keys of the whole chunks of a prefix, in order; see `chunk_hashes`."""
    hashes = chunk_hashes(token_ids, chunk_tokens)
    return [ChunkKey(namespace, index, each) for index, each in enumerate(hashes)]


def reused_layers(num_layers: int, group: Iterable[int]) -> list[int]:
    """Layers whose KV the sender supplies: all that are not in the group."""
    recomputed = set(group)
    return [layer for layer in range(num_layers) if layer not in recomputed]


def _token(token_id: int) -> bytes:
    if not 0 <= token_id <= _MAX_TOKEN_ID:
        raise PlanError(f"expected token ids from 0 to {_MAX_TOKEN_ID}, got {token_id}")
    return _int(token_id)


def _int(number: int) -> bytes:
    return int(number).to_bytes(8, "little")
