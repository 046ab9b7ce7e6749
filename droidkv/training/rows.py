"""From items to rows of training tokens: one prefix, then all questions over it side by side.

Questions over one prefix are trained in one row: each sees the prefix and itself, not its
neighbours, and its positions go on from the prefix. The loss is that of separate rows, at the cost
of one prefix.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from droidkv.cache import TokenAxis
from droidkv.encode import encode
from droidkv.errors import TaskError
from droidkv.identity import content_digest
from droidkv.tasks.base import Item


@dataclass(frozen=True, eq=False)
class TrainingRow:
    """One prefix and the questions over it.

    Attributes:
        input_ids: `[1, seq_len]`: prefix, then each question with its answer.
        axis: Positions and segments of the same tokens; the prefix is segment 0 and stands first.
        num_read: How many of the prefix's tokens the sender reads under `prefillshare`.
        predicting: `[num_targets]`, indices of the tokens whose next token is learned.
        targets: `[num_targets]`, these next tokens: the answers, each with its end-of-turn token.
    """

    input_ids: Tensor
    axis: TokenAxis
    num_read: int
    predicting: Tensor
    targets: Tensor


@dataclass(frozen=True)
class _Example:
    prefix_ids: tuple[int, ...]
    suffix_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]


def training_batches(
    items: Sequence[Item],
    num_batches: int,
    batch_size: int,
    tokenizer: Any,
    chat: bool,
    max_tokens: int,
    border_tokens: int = 0,
    seed: int = 0,
) -> list[list[TrainingRow]]:
    """All rows of a training run, batch by batch; a task with fewer items is gone through again.

    Args:
        items: The items in training order; those over one prefix stand together.
        num_batches: Optimiser steps.
        batch_size: Items per step.
        tokenizer: A Hugging Face tokenizer.
        chat: Put items into the chat template.
        max_tokens: Most tokens one item may have, answer included.
        border_tokens: Most tokens of a prefix that are not read by the sender, drawn for each row.
        seed: Of that draw.

    Raises:
        TaskError: An item has no answer, or is too long; nothing has been trained then.
        PairError: The tokenizer or its chat template does not fit (see `encode`).
    """
    end_id = tokenizer.eos_token_id
    if end_id is None:
        raise TaskError(
            "expected a tokenizer with an end token (eos_token), which ends every answer; "
            "this one has none"
        )
    examples = [_example(item, tokenizer, chat, max_tokens, end_id) for item in items]
    endless = itertools.cycle(examples)
    rng = random.Random(seed)
    return [
        [
            _row(list(group), rng.randint(0, border_tokens))
            for group in _by_prefix(itertools.islice(endless, batch_size))
        ]
        for _ in range(num_batches)
    ]


def rows_digest(batches: Sequence[Sequence[TrainingRow]]) -> str:
    """Identity of what is learned, step by step, whatever it was read from."""
    return content_digest(
        [
            [
                [
                    row.num_read,
                    *(part.flatten().tolist() for part in (row.input_ids, row.axis.positions)),
                    *(part.tolist() for part in (row.predicting, row.targets)),
                ]
                for row in batch
            ]
            for batch in batches
        ]
    )


def _example(item: Item, tokenizer: Any, chat: bool, max_tokens: int, end_id: int) -> _Example:
    encoded = encode(item, tokenizer, chat)
    answer_ids = tokenizer.encode(item.answer, add_special_tokens=False)
    if not item.answer.strip() or not answer_ids:
        raise TaskError(
            f"Item {item.id!r} must have an answer to train on, but it is {item.answer!r}; "
            "leave it out of the train split."
        )
    num_tokens = len(encoded.prefix_ids) + len(encoded.suffix_ids) + len(answer_ids) + 1
    if num_tokens > max_tokens:
        raise TaskError(
            f"Item {item.id!r} must have at most {max_tokens} tokens, answer included, but it has "
            f"{num_tokens}; choose task options that make shorter items, or raise --max-tokens as "
            "far as the model's positions reach."
        )
    return _Example(encoded.prefix_ids, encoded.suffix_ids, (*answer_ids, end_id))


def _by_prefix(examples: Iterator[_Example]) -> Iterator[Iterator[_Example]]:
    return (group for _, group in itertools.groupby(examples, key=lambda each: each.prefix_ids))


def _row(examples: Sequence[_Example], num_left: int) -> TrainingRow:
    prefix_ids = examples[0].prefix_ids
    ids, positions = list(prefix_ids), list(range(len(prefix_ids)))
    segments = [0] * len(prefix_ids)
    predicting: list[int] = []
    targets: list[int] = []
    for segment, example in enumerate(examples, start=1):
        own_ids = (*example.suffix_ids, *example.answer_ids[:-1])
        last_of_suffix = len(ids) + len(example.suffix_ids) - 1
        predicting += range(last_of_suffix, last_of_suffix + len(example.answer_ids))
        targets += example.answer_ids
        positions += range(len(prefix_ids), len(prefix_ids) + len(own_ids))
        segments += [segment] * len(own_ids)
        ids += own_ids
    axis = TokenAxis(torch.tensor([positions]), torch.tensor([segments]))
    return TrainingRow(
        input_ids=torch.tensor([ids]),
        axis=axis,
        num_read=max(1, len(prefix_ids) - num_left),
        predicting=torch.tensor(predicting),
        targets=torch.tensor(targets),
    )
