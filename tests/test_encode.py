"""Encoding: prefix and suffix are tokenised apart, and both models must read the same prefix."""

from __future__ import annotations

import functools
import string
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from droidkv.encode import common_prefix_length, encode, encode_shared
from droidkv.errors import PairError, TaskError
from droidkv.tasks.base import Item

transformers: Any = pytest.importorskip("transformers")

HEAD = "<s><|sys|>Be brief.<|user|>"
TAIL = "<|end|><|bot|>"
TEMPLATE = (
    "<s><|sys|>Be brief.{% for m in messages %}<|user|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|bot|>{% endif %}"
)
TEXT = st.text(alphabet=string.ascii_letters + " .\n", min_size=1, max_size=40).filter(str.strip)


@functools.cache
def make_tokenizer(template: str | None = TEMPLATE, adds_bos: bool = True) -> Any:
    """One token per character, but that a full stop and a line break merge into one."""
    from tokenizers import Tokenizer, decoders, models, processors

    characters = string.ascii_letters + string.digits + string.punctuation + " \n"
    special = ["<s>", "<|sys|>", "<|user|>", "<|end|>", "<|bot|>"]
    vocab = {token: index for index, token in enumerate([*special, *characters, ".\n"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[(".", "\n")]))
    tokenizer.add_special_tokens(special)
    tokenizer.decoder = decoders.Fuse()
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", vocab["<s>"])]
        )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", chat_template=template
    )


def make_item(prefix: str = "Ann is in Rome.", suffix: str = "Where is Ann?") -> Item:
    return Item(id="item-7", prefix=prefix, suffix=suffix, answer="Rome")


@settings(deadline=None)
@given(prefix=TEXT, suffix=TEXT, chat=st.booleans())
def test_tokens_are_those_of_the_rendered_text(prefix: str, suffix: str, chat: bool) -> None:
    tokenizer = make_tokenizer()
    encoded = encode(make_item(prefix, suffix), tokenizer, chat)
    head, tail = (HEAD, TAIL) if chat else ("<s>", "")
    assert tokenizer.decode(encoded.prefix_ids) == head + prefix
    assert tokenizer.decode(encoded.suffix_ids) == "\n" + suffix + tail
    assert tokenizer.decode(encoded.prefix_ids + encoded.suffix_ids) == (
        f"{head}{prefix}\n{suffix}{tail}"
    )


@settings(deadline=None)
@given(prefix=TEXT, suffix=TEXT, other=TEXT, chat=st.booleans())
def test_prefix_tokens_do_not_depend_on_the_suffix(
    prefix: str, suffix: str, other: str, chat: bool
) -> None:
    tokenizer = make_tokenizer()
    one = encode(make_item(prefix, suffix), tokenizer, chat)
    two = encode(make_item(prefix, other), tokenizer, chat)
    assert one.prefix_ids == two.prefix_ids


@pytest.mark.parametrize("chat", [True, False])
def test_border_is_kept_where_joined_text_would_merge(chat: bool) -> None:
    tokenizer = make_tokenizer()
    item = make_item()
    encoded = encode(item, tokenizer, chat)
    ids = [*encoded.prefix_ids, *encoded.suffix_ids]
    joined = tokenizer.encode(tokenizer.decode(ids), add_special_tokens=False)
    merged = tokenizer.convert_tokens_to_ids(".\n")
    assert merged in joined
    assert merged not in ids
    assert len(joined) == len(ids) - 1


def test_chat_adds_no_second_bos() -> None:
    tokenizer = make_tokenizer()
    encoded = encode(make_item(), tokenizer)
    assert encoded.prefix_ids.count(tokenizer.bos_token_id) == 1
    assert tokenizer.bos_token_id not in encoded.suffix_ids


@pytest.mark.parametrize("adds_bos", [True, False])
def test_plain_text_has_bos_only_where_the_tokenizer_adds_one(adds_bos: bool) -> None:
    tokenizer = make_tokenizer(adds_bos=adds_bos)
    encoded = encode(make_item(), tokenizer, chat=False)
    assert (encoded.prefix_ids[0] == tokenizer.bos_token_id) is adds_bos


@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize(
    ("prefix", "suffix", "part"), [("", "a", "prefix"), ("a", " \n", "suffix")]
)
def test_blank_part_is_refused(prefix: str, suffix: str, part: str, chat: bool) -> None:
    with pytest.raises(TaskError, match=f"'item-7' must have a {part}"):
        encode(make_item(prefix, suffix), make_tokenizer(), chat)


def test_template_that_alters_the_text_is_refused() -> None:
    trimming = make_tokenizer(TEMPLATE.replace("m['content']", "m['content'] | trim"))
    assert encode(make_item(), trimming) == encode(make_item(), make_tokenizer())
    with pytest.raises(PairError, match="alters it"):
        encode(make_item(prefix="  Ann is in Rome."), trimming)


def test_template_that_repeats_the_text_is_refused() -> None:
    repeating = make_tokenizer(TEMPLATE.replace("<|end|>", "<|end|>{{ m['content'] }}"))
    with pytest.raises(PairError, match="occurs more often"):
        encode(make_item(), repeating)


def test_no_chat_template_is_refused_only_for_chat() -> None:
    tokenizer = make_tokenizer(template=None)
    with pytest.raises(PairError, match="needs a tokenizer with a chat template"):
        encode(make_item(), tokenizer)
    assert encode(make_item(), tokenizer, chat=False).prefix_ids


def test_shared_prefix_is_the_receivers_encoding() -> None:
    # The templates differ after the prefix only, which only the receiver reads.
    sender = make_tokenizer(TEMPLATE.replace("<|bot|>", "<|bot|>So:"))
    receiver = make_tokenizer()
    assert encode_shared(make_item(), sender, receiver) == encode(make_item(), receiver)


def test_first_differing_token_is_shown() -> None:
    sender = make_tokenizer(TEMPLATE.replace("brief", "bold"))
    receiver = make_tokenizer()
    num_common = len(["<s>", "<|sys|>", *"Be b"])
    ids = receiver.convert_tokens_to_ids
    num_prefix = len(encode(make_item(), receiver).prefix_ids)
    with pytest.raises(PairError) as caught:
        encode_shared(make_item(), sender, receiver)
    message = str(caught.value)
    assert f"token {num_common} differs" in message
    assert f"sender has {ids('o')} ('o')" in message
    assert f"receiver has {ids('r')} ('r')" in message
    assert (
        f"common token prefix is {num_common} tokens of {num_prefix - 1} (sender) and "
        f"{num_prefix} (receiver)" in message
    )


def test_prefix_that_ends_early_is_shown() -> None:
    sender = make_tokenizer(adds_bos=False)
    item = make_item(prefix="aa")
    longer = _OneMoreToken(make_tokenizer(adds_bos=False))
    with pytest.raises(PairError, match=r"token 2 differs: the sender has no token there"):
        encode_shared(item, sender, longer, chat=False)


class _OneMoreToken:
    """A tokenizer that puts one more token after every text."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.chat_template = tokenizer.chat_template
        self.bos_token_id = tokenizer.bos_token_id

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return [*ids, ids[-1]] if ids else ids

    def decode(self, token_ids: list[int]) -> Any:
        return self._tokenizer.decode(token_ids)

    def apply_chat_template(
        self, conversation: list[dict[str, str]], *, tokenize: bool, add_generation_prompt: bool
    ) -> Any:
        return self._tokenizer.apply_chat_template(
            conversation, tokenize=tokenize, add_generation_prompt=add_generation_prompt
        )


@given(st.lists(st.integers(0, 2)), st.lists(st.integers(0, 2)))
def test_common_prefix_length_is_the_longest(left: list[int], right: list[int]) -> None:
    length = common_prefix_length(left, right)
    assert left[:length] == right[:length]
    assert left[: length + 1] != right[: length + 1] or left == right
