"""The stitching map: a low-rank affine correction of the sender's E where a group begins.

`E + (E P) Q + b` per start layer, fitted by ridge regression from the sender's to the receiver's
hidden state on calibration prefixes (the stitching layer of Lenc & Vedaldi 2015, reduced to low
rank as in reduced-rank regression).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from droidkv.capture import capture
from droidkv.errors import StitchError, StorageError
from droidkv.jsonio import replacing
from droidkv.models import DecoderModel

FORMAT_VERSION = "1"


@dataclass(frozen=True)
class StitchMap:
    """One low-rank affine map per start layer.

    Args:
        down: Start -> P, `[hidden_size, rank]`.
        up: Start -> Q, `[rank, hidden_size]`.
        bias: Start -> b, `[hidden_size]`.
    """

    down: dict[int, Tensor]
    up: dict[int, Tensor]
    bias: dict[int, Tensor]

    @property
    def rank(self) -> int:
        return next(iter(self.down.values())).shape[1] if self.down else 0

    @property
    def starts(self) -> list[int]:
        return sorted(self.down)

    def apply(self, start: int, hidden: Tensor) -> Tensor:
        """Map the sender's E of a start, `[..., hidden_size]`; costs `2 * hidden_size * rank`.

        Raises:
            StitchError: The map was not fitted for this start.
        """
        if start not in self.down:
            raise StitchError(
                f"expected a stitching map for start {start}, got one for {self.starts}; "
                "fit it again"
            )
        down, up, bias = (
            part[start].to(device=hidden.device, dtype=hidden.dtype)
            for part in (self.down, self.up, self.bias)
        )
        return hidden + (hidden @ down) @ up + bias

    def with_start(self, other: StitchMap, start: int) -> StitchMap:
        """This map, but at one start the other one."""
        return StitchMap(
            {**self.down, start: other.down[start]},
            {**self.up, start: other.up[start]},
            {**self.bias, start: other.bias[start]},
        )

    def to_bytes(self) -> bytes:
        """The map as a safetensors file, the same bytes for the same map."""
        tensors: dict[str, Tensor] = {}
        for name, part in (("down", self.down), ("up", self.up), ("bias", self.bias)):
            tensors |= {f"{name}.{start}": tensor.contiguous() for start, tensor in part.items()}
        return save(tensors, metadata={"format_version": FORMAT_VERSION})

    @property
    def sha256(self) -> str:
        """Identity of the map: the hash of its file."""
        return hashlib.sha256(self.to_bytes()).hexdigest()

    def save(self, path: Path) -> None:
        with replacing(path) as temporary:
            temporary.write_bytes(self.to_bytes())

    @classmethod
    def load(cls, path: Path, sha256: str | None = None) -> StitchMap:
        """Read what `save` wrote.

        Args:
            path: The file.
            sha256: What its hash must be; None = any map will do.

        Raises:
            StitchError: It is another map than the one that is asked for.
            StorageError: The file is missing, truncated, or not a stitching map.
        """
        parts: dict[str, dict[int, Tensor]] = {"down": {}, "up": {}, "bias": {}}
        try:
            with safe_open(path, framework="pt") as file:
                version = (file.metadata() or {}).get("format_version")
                if version != FORMAT_VERSION:
                    raise ValueError(f"format_version {version!r}")
                for key in file.keys():
                    name, start = key.split(".")
                    parts[name][int(start)] = file.get_tensor(key)
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            raise StorageError(
                f"expected a stitching map of format {FORMAT_VERSION} in {path}, got: {error}; "
                "fit it again with `droidkv stitch`"
            ) from error
        if not parts["down"].keys() == parts["up"].keys() == parts["bias"].keys():
            raise StorageError(f"the stitching map {path} is incomplete; fit it again")
        stitch = cls(**parts)
        if sha256 is not None and stitch.sha256 != sha256:
            raise StitchError(
                f"expected the stitching map that the profile was measured with, sha256 {sha256}, "
                f"got {stitch.sha256} in {path}; restore it or profile anew"
            )
        return stitch


class _Moments:
    """Running sums for one start: the regression of `target - source` on `source`."""

    def __init__(self, hidden_size: int) -> None:
        self.num_tokens = 0
        self.source_sum = torch.zeros(hidden_size, dtype=torch.float64)
        self.delta_sum = torch.zeros(hidden_size, dtype=torch.float64)
        self.gram = torch.zeros(hidden_size, hidden_size, dtype=torch.float64)
        self.cross = torch.zeros(hidden_size, hidden_size, dtype=torch.float64)

    def add(self, source: Tensor, target: Tensor) -> None:
        source = source.flatten(0, 1).cpu().double()
        delta = target.flatten(0, 1).cpu().double() - source
        self.num_tokens += len(source)
        self.source_sum += source.sum(dim=0)
        self.delta_sum += delta.sum(dim=0)
        self.gram += source.T @ source
        self.cross += source.T @ delta

    def solve(self, rank: int, ridge: float) -> tuple[Tensor, Tensor, Tensor]:
        source_mean = self.source_sum / self.num_tokens
        delta_mean = self.delta_sum / self.num_tokens
        gram = self.gram / self.num_tokens - torch.outer(source_mean, source_mean)
        cross = self.cross / self.num_tokens - torch.outer(source_mean, delta_mean)
        scale = gram.diagonal().mean()
        penalised = gram + ridge * scale * torch.eye(len(gram), dtype=gram.dtype)
        weight = torch.linalg.solve(penalised, cross)
        explained = weight.T @ gram @ weight
        directions = torch.linalg.eigh((explained + explained.T) / 2).eigenvectors[:, -rank:]
        down, up = weight @ directions, directions.T
        return down.float(), up.float(), (delta_mean - source_mean @ down @ up).float()


def fit_stitch(
    sender: DecoderModel,
    receiver: DecoderModel,
    prefixes: Iterable[list[int]],
    rank: int = 32,
    ridge: float = 1e-3,
    on_prefix: Callable[[int], None] | None = None,
) -> StitchMap:
    """Fit a map for every start above 0 from calibration prefixes.

    Args:
        sender: The model whose E is mapped.
        receiver: The model whose own hidden state is the target.
        prefixes: Token ids of calibration prefixes, never those of evaluated items.
        rank: Columns of P; at most the hidden size.
        ridge: Penalty relative to the mean variance of a hidden dimension.
        on_prefix: Called with the tokens read after each prefix.

    Raises:
        StitchError: No prefix, or rank or ridge out of range.
    """
    hidden_size = receiver.shape.hidden_size
    if not 1 <= rank <= hidden_size or ridge <= 0:
        raise StitchError(
            f"expected 1 <= rank <= {hidden_size} and ridge > 0, got rank={rank}, ridge={ridge}"
        )
    starts = range(1, receiver.num_layers)
    moments = {start: _Moments(hidden_size) for start in starts}
    num_tokens = 0
    for prefix in prefixes:
        input_ids = torch.tensor([prefix])
        source = capture(sender, input_ids, hidden_layers=starts).hidden
        target = capture(receiver, input_ids, hidden_layers=starts).hidden
        for start in starts:
            moments[start].add(source[start], target[start])
        num_tokens += len(prefix)
        if on_prefix is not None:
            on_prefix(num_tokens)
    if num_tokens == 0:
        raise StitchError("expected at least one calibration prefix, got none")
    solved = {start: moments[start].solve(rank, ridge) for start in starts}
    return StitchMap(
        down={start: parts[0] for start, parts in solved.items()},
        up={start: parts[1] for start, parts in solved.items()},
        bias={start: parts[2] for start, parts in solved.items()},
    )
