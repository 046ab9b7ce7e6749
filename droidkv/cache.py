"""KV and E caches as plain tensors, and where their tokens stand."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from droidkv.errors import StorageError
from droidkv.jsonio import replacing

FORMAT_VERSION = 1
PADDING = -1
_ROOM_TOKENS = 64


@dataclass(frozen=True)
class TokenAxis:
    """Where the tokens along one axis stand, which is all that attention masks are made from.

    Padding may stand anywhere (left, right, between): it is a token without a position.

    Args:
        positions: `[batch, num_tokens]` int64, `PADDING` where there is no token.
        segments: `[batch, num_tokens]` int64 or None. A query sees keys of segment 0 and of its
            own segment; used to run many suffixes side by side over one prefix.
    """

    positions: Tensor
    segments: Tensor | None = None

    @classmethod
    def of_mask(cls, attention_mask: Tensor, first_position: Tensor | int = 0) -> TokenAxis:
        """Positions counted over the tokens of a 0/1 mask `[batch, num_tokens]`."""
        counted = attention_mask.long().cumsum(dim=1) - 1 + first_position
        return cls(counted.masked_fill(attention_mask == 0, PADDING))

    @property
    def num_tokens(self) -> int:
        return self.positions.shape[1]

    @property
    def next_position(self) -> Tensor:
        """First free position of each row, `[batch, 1]`."""
        return self.positions.amax(dim=1, keepdim=True) + 1

    @property
    def is_contiguous(self) -> bool:
        """Every row counts 0, 1, 2, ... without padding, and there is one segment."""
        counted = torch.arange(self.num_tokens, device=self.positions.device)
        return self.segments is None and bool((self.positions == counted).all())

    def narrow(self, start: int, stop: int) -> TokenAxis:
        segments = None if self.segments is None else self.segments[:, start:stop]
        return TokenAxis(self.positions[:, start:stop], segments)

    def take(self, indices: Tensor) -> TokenAxis:
        """Some of the tokens, `[num_taken]` int64."""
        segments = None if self.segments is None else self.segments[:, indices]
        return TokenAxis(self.positions[:, indices], segments)

    def cat(self, other: TokenAxis) -> TokenAxis:
        positions = torch.cat([self.positions, other.positions], dim=1)
        if self.segments is None and other.segments is None:
            return TokenAxis(positions)
        parts = [
            torch.zeros_like(axis.positions) if axis.segments is None else axis.segments
            for axis in (self, other)
        ]
        return TokenAxis(positions, torch.cat(parts, dim=1))

    def to(self, device: torch.device) -> TokenAxis:
        segments = None if self.segments is None else self.segments.to(device)
        return TokenAxis(self.positions.to(device), segments)


class KVCache:
    """Keys (after RoPE) and values per layer; grows as decoder layers append to it.

    Decoder layers know it as their `past_key_values`: they call `update` and attend to what it
    returns. What it was built from or has returned is never written to: it appends to memory of its
    own, behind all that anyone has seen.

    Args:
        keys: Per layer `[batch, num_kv_heads, seq_len, head_dim]`, or None for an empty layer.
        values: The same for values.
    """

    def __init__(self, keys: list[Tensor | None], values: list[Tensor | None]) -> None:
        self.keys = keys
        self.values = values
        self._growing: dict[int, tuple[_Growing, _Growing]] = {}

    @classmethod
    def empty(cls, num_layers: int) -> KVCache:
        return cls([None] * num_layers, [None] * num_layers)

    def fork(self) -> KVCache:
        """A cache that holds the same and grows by itself; no tensor is copied."""
        return KVCache(list(self.keys), list(self.values))

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer that holds some."""
        keys, values = self.keys[layer], self.values[layer]
        assert keys is not None and values is not None, f"layer {layer} is empty"
        return keys, values

    def update(
        self, keys: Tensor, values: Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        """Append along seq_len and return all of the layer."""
        held_keys, held_values = self.keys[layer_idx], self.values[layer_idx]
        if held_keys is not None and held_values is not None:
            if layer_idx not in self._growing:
                self._growing[layer_idx] = (_Growing(), _Growing())
            growing_keys, growing_values = self._growing[layer_idx]
            keys = growing_keys.append(held_keys, keys)
            values = growing_values.append(held_values, values)
        self.keys[layer_idx], self.values[layer_idx] = keys, values
        return keys, values


class _Growing:
    """A tensor `[batch, num_kv_heads, seq_len, head_dim]` with room behind it along seq_len.

    Without room, each generated token would copy all tokens before it.
    """

    def __init__(self) -> None:
        self._whole = self._used = torch.empty(0)

    def append(self, held: Tensor, new: Tensor) -> Tensor:
        """`held` and `new` in one; `held` stays as it is."""
        if held.requires_grad or new.requires_grad:  # a backward pass needs what it has seen
            return torch.cat([held, new], dim=2)
        assert held.shape[:2] == new.shape[:2], (held.shape, new.shape)
        start, stop = held.shape[2], held.shape[2] + new.shape[2]
        # What is held may have been replaced since.
        is_lost = held is not self._used or stop > self._whole.shape[2]
        # What was made in inference mode is not to be written to outside of it.
        if is_lost or (self._whole.is_inference() and not torch.is_inference_mode_enabled()):
            shape = (*held.shape[:2], stop + _ROOM_TOKENS, held.shape[3])
            self._whole = torch.empty(shape, dtype=held.dtype, device=held.device)
            self._whole[:, :, :start] = held
        self._whole[:, :, start:stop] = new
        self._used = self._whole[:, :, :stop]
        return self._used


class PrefixView:
    """One layer's prefix KV that decoder layers read behind; what they append is not kept."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.keys = keys
        self.values = values

    def update(
        self, keys: Tensor, values: Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        """Return prefix and new keys and values, and forget the new ones."""
        return torch.cat([self.keys, keys], dim=2), torch.cat([self.values, values], dim=2)


class ReadOnlyCache:
    """KV that decoder layers read in place of their own, which are dropped."""

    def __init__(self, cache: KVCache) -> None:
        self.cache = cache

    def update(
        self, keys: Tensor, values: Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        """Return the held keys and values; forget the given ones."""
        return self.cache.layer(layer_idx)


@dataclass(frozen=True)
class CapturedCache:
    """What a sender keeps of a prefix: KV of every layer, and E where a receiver may enter.

    Args:
        keys: Per layer `[batch, num_kv_heads, seq_len, head_dim]`, after RoPE.
        values: Per layer, the same shape.
        hidden: Layer -> the hidden state entering it, `[batch, seq_len, hidden_size]` (E cache).
        axis: Where the prefix tokens stand.
        fingerprint: The sender's identity as plain fields; empty when unknown.
    """

    keys: list[Tensor]
    values: list[Tensor]
    hidden: dict[int, Tensor]
    axis: TokenAxis
    fingerprint: Mapping[str, object] = field(default_factory=dict)

    @property
    def num_layers(self) -> int:
        return len(self.keys)

    def save(self, path: Path) -> None:
        """Write as one safetensors file; the fingerprint goes into its header."""
        tensors = {f"keys.{i}": t.contiguous() for i, t in enumerate(self.keys)}
        tensors |= {f"values.{i}": t.contiguous() for i, t in enumerate(self.values)}
        tensors |= {f"hidden.{i}": t.contiguous() for i, t in self.hidden.items()}
        tensors["positions"] = self.axis.positions.contiguous()
        metadata = {
            "format_version": str(FORMAT_VERSION),
            "num_layers": str(self.num_layers),
            "fingerprint": json.dumps(dict(self.fingerprint), sort_keys=True),
        }
        with replacing(path) as temporary:
            save_file(tensors, temporary, metadata=metadata)

    @classmethod
    def load(cls, path: Path) -> CapturedCache:
        """Read what `save` wrote.

        Raises:
            StorageError: The file is missing, truncated, or not a captured cache.
        """
        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}
            if metadata.get("format_version") != str(FORMAT_VERSION):
                raise KeyError(f"format_version {metadata.get('format_version')!r}")
            num_layers = int(metadata["num_layers"])
            return cls(
                keys=[tensors[f"keys.{i}"] for i in range(num_layers)],
                values=[tensors[f"values.{i}"] for i in range(num_layers)],
                hidden={
                    int(name.removeprefix("hidden.")): tensor
                    for name, tensor in tensors.items()
                    if name.startswith("hidden.")
                },
                axis=TokenAxis(tensors["positions"]),
                fingerprint=json.loads(metadata["fingerprint"]),
            )
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            raise StorageError(
                f"expected a captured cache of format {FORMAT_VERSION} in {path}, got: {error}; "
                "capture the prefix again"
            ) from error
