"""Item and Task: what a task must say so that a pair can be profiled on it.

A task decides what is prefix (the text both models share) and what is suffix (what only the
receiver sees). It knows nothing about tokens or models.
"""

from __future__ import annotations

import abc
import dataclasses
import hashlib
from collections.abc import Iterator, Mapping
from typing import ClassVar, Literal, get_args

from droidkv.errors import TaskError, unknown_name

Split = Literal["train", "calibration", "eval"]
SPLITS: tuple[Split, ...] = get_args(Split)


@dataclasses.dataclass(frozen=True, slots=True)
class Item:
    """One question over one shared text.

    Attributes:
        id: Unique within the task; says the split and seed it came from.
        prefix: Text both models share. Never empty.
        suffix: Text only the receiver sees (the instruction or question). Never empty.
        answer: Reference answer; the text a receiver is trained to give.
        metadata: What `Task.score` needs beyond the answer: strings, numbers, lists and tables.
    """

    id: str
    prefix: str
    suffix: str
    answer: str
    metadata: Mapping[str, object] = dataclasses.field(default_factory=dict)


class Task(abc.ABC):
    """A source of items with a score.

    A subclass is a frozen dataclass whose fields are the task's options, and sets the four class
    attributes. The splits are disjoint by construction: no prefix of one split occurs in another,
    whatever the seeds.

    Attributes:
        name: Name in the registry.
        version: Raised whenever the same (split, limit, seed) would give other items or scores.
        metric: Name of the primary metric, the one `score` returns.
        max_new_tokens: Enough to write any answer of the task.
    """

    name: ClassVar[str]
    version: ClassVar[int] = 1
    metric: ClassVar[str]
    max_new_tokens: ClassVar[int]

    @property
    def options(self) -> dict[str, object]:
        """The options this task was made with, by field name."""
        if not dataclasses.is_dataclass(self):
            return {}
        return dataclasses.asdict(self)

    @abc.abstractmethod
    def generate(self, split: Split, seed: int) -> Iterator[Item]:
        """Yield the items of a split, the same ones for the same seed; may be endless.

        Args:
            split: Which of the disjoint splits.
            seed: Which items, or which order of them.
        """

    @abc.abstractmethod
    def score(self, item: Item, prediction: str) -> float:
        """Score a decoded answer.

        Args:
            item: The item that was answered.
            prediction: The decoded text, without the end-of-turn token.

        Returns:
            A value in [0, 1], 1 the best.
        """

    def items(self, split: Split, limit: int, seed: int = 0) -> list[Item]:
        """The first items of a split.

        Args:
            split: "train", "calibration" or "eval".
            limit: How many at most; a finite task may have fewer.
            seed: Which items, or which order of them.

        Returns:
            At most `limit` items; one with a smaller limit is a beginning of one with a larger.

        Raises:
            TaskError: If the split is unknown, the limit is below 1, or the task has no item.
        """
        if split not in SPLITS:
            raise TaskError(unknown_name("split", split, SPLITS))
        if limit < 1:
            raise TaskError(f"The number of items must be at least 1, got {limit}.")
        items = []
        for item in self.generate(split, seed):
            items.append(item)
            if len(items) == limit:
                break
        if not items:
            raise TaskError(
                f"Task {self.name!r} has no item in split {split!r} with options {self.options}; "
                "loosen the options."
            )
        return items


def split_of(text: str, shares: Mapping[Split, int]) -> Split:
    """Assign a text to a split by its content, so that no text can be in two splits.

    Args:
        text: The content that must not cross splits.
        shares: Weight of each split; an integer number of parts.
    """
    digest = hashlib.sha256(text.encode()).digest()
    part = int.from_bytes(digest[:8], "big") % sum(shares.values())
    for split, share in shares.items():
        if part < share:
            return split
        part -= share
    raise TaskError(f"The shares of the splits must be positive, got {dict(shares)}.")


def stable_seed(*parts: str | int) -> int:
    """A 63-bit seed from named parts, the same in every process (Python's `hash` is not)."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
