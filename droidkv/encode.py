"""From an item's text to the token ids that both models work on.

A cache is indexed by tokens, so the text is tokenised once, here, and only ids travel further. The
prefix and the suffix are tokenised apart: the tokens of the prefix then never depend on the
question, whatever the tokenizer would merge across the border.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

from droidkv.errors import PairError, TaskError
from droidkv.tasks.base import Item


class Tokenizer(Protocol):
    """What is used of a Hugging Face tokenizer."""

    chat_template: Any
    bos_token_id: Any

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a text."""

    def decode(self, token_ids: list[int]) -> Any:
        """Text of token ids."""

    def apply_chat_template(
        self, conversation: list[dict[str, str]], *, tokenize: bool, add_generation_prompt: bool
    ) -> Any:
        """Render a conversation; a string when `tokenize` is false."""


@dataclasses.dataclass(frozen=True, slots=True)
class EncodedItem:
    """The tokens of one item; what the receiver reads is `prefix_ids + suffix_ids`.

    Attributes:
        id: The item's id.
        prefix_ids: Tokens both models share, the template's opening included. Never empty.
        suffix_ids: Tokens only the receiver sees, the template's generation prompt included.
            Never empty.
    """

    id: str
    prefix_ids: tuple[int, ...]
    suffix_ids: tuple[int, ...]


def encode(item: Item, tokenizer: Tokenizer, chat: bool = True) -> EncodedItem:
    """Tokenise one item for one model.

    Args:
        item: Prefix and suffix as text.
        tokenizer: The model's tokenizer.
        chat: Put prefix, a line break and suffix into one user turn of the tokenizer's chat
            template. Otherwise plain text, after the BOS token where the tokenizer adds one.

    Raises:
        TaskError: If the prefix or the suffix is blank or has no token.
        PairError: If the tokenizer has no chat template, or the place where the prefix ends cannot
            be found in what the template makes of the text.
    """
    for part, text in (("prefix", item.prefix), ("suffix", item.suffix)):
        if not text.strip():
            raise TaskError(
                f"Item {item.id!r} must have a {part}, but it is {text!r}; "
                "leave the item out or change what the task calls prefix and suffix."
            )
    bos_ids: list[int] = []
    if chat:
        prefix, suffix = _render(item, tokenizer)
    else:
        prefix, suffix = item.prefix, "\n" + item.suffix
        bos_ids = _leading_bos(tokenizer)
    prefix_ids = tokenizer.encode(prefix, add_special_tokens=False)
    suffix_ids = tokenizer.encode(suffix, add_special_tokens=False)
    for part, ids in (("prefix", prefix_ids), ("suffix", suffix_ids)):
        if not ids:
            raise TaskError(f"The {part} of item {item.id!r} must have a token, but it has none.")
    return EncodedItem(item.id, (*bos_ids, *prefix_ids), tuple(suffix_ids))


def encode_shared(
    item: Item, sender_tokenizer: Tokenizer, receiver_tokenizer: Tokenizer, chat: bool = True
) -> EncodedItem:
    """Tokenise one item for the receiver, after checking that the sender reads the same prefix.

    Args:
        item: Prefix and suffix as text.
        sender_tokenizer: Tokenizer (and chat template) of the model that prefills the prefix.
        receiver_tokenizer: Tokenizer (and chat template) of the model that answers.
        chat: As for `encode`, for both.

    Returns:
        The receiver's tokens.

    Raises:
        TaskError: As for `encode`.
        PairError: As for `encode`, or if the two prefixes differ in a token; the message shows the
            first that differs.
    """
    sent = encode(item, sender_tokenizer, chat)
    received = encode(item, receiver_tokenizer, chat)
    if sent.prefix_ids != received.prefix_ids:
        num_common = common_prefix_length(sent.prefix_ids, received.prefix_ids)
        raise PairError(
            f"Both models must read the same prefix tokens in item {item.id!r}, but token "
            f"{num_common} differs: the sender has "
            f"{_show(sent.prefix_ids, num_common, sender_tokenizer)}, the receiver has "
            f"{_show(received.prefix_ids, num_common, receiver_tokenizer)}. The longest common "
            f"token prefix is {num_common} tokens of {len(sent.prefix_ids)} (sender) and "
            f"{len(received.prefix_ids)} (receiver). Use one tokenizer and one chat template for "
            "both, or switch the chat template off for this pair."
        )
    return received


def common_prefix_length(left: Sequence[int], right: Sequence[int]) -> int:
    """How many tokens two sequences share from their beginning."""
    num_common = 0
    for left_id, right_id in zip(left, right, strict=False):
        if left_id != right_id:
            break
        num_common += 1
    return num_common


def _render(item: Item, tokenizer: Tokenizer) -> tuple[str, str]:
    """The chat template's text, cut right after the prefix."""
    if not tokenizer.chat_template:
        raise PairError(
            "A chat item needs a tokenizer with a chat template, but this one has none; "
            "switch the chat template off for this pair."
        )
    content = f"{item.prefix}\n{item.suffix}"
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )
    start = rendered.find(content)
    if start < 0:
        raise PairError(
            f"The chat template must keep the text of item {item.id!r} as it is, but it alters it "
            "(many templates strip blanks at its ends); strip the item's text, or switch the chat "
            "template off for this pair."
        )
    if start != rendered.rfind(content):
        raise PairError(
            f"The chat template must contain the text of item {item.id!r} once, but it occurs "
            "more often, so where the prefix ends is unclear; switch the chat template off for "
            "this pair."
        )
    cut = start + len(item.prefix)
    return rendered[:cut], rendered[cut:]


def _leading_bos(tokenizer: Tokenizer) -> list[int]:
    """The BOS token if the tokenizer puts it before a text of its own accord."""
    added = tokenizer.encode("", add_special_tokens=True)
    if tokenizer.bos_token_id is not None and added[:1] == [tokenizer.bos_token_id]:
        return added[:1]
    return []


def _show(ids: Sequence[int], index: int, tokenizer: Tokenizer) -> str:
    if index >= len(ids):
        return "no token there"
    return f"{ids[index]} ({tokenizer.decode([ids[index]])!r})"
