from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from tiny import tiny_model
from transformers import AutoConfig

from droidkv.cache import PADDING, TokenAxis
from droidkv.errors import UnsupportedModelError
from droidkv.models import SUPPORTED, DecoderModel, attention_mask, check_supported


def axis(*positions: int, segments: list[int] | None = None) -> TokenAxis:
    return TokenAxis(
        torch.tensor([positions]), None if segments is None else torch.tensor([segments])
    )


def visible(queries: TokenAxis, keys: TokenAxis, window: int | None = None) -> list[list[int]]:
    mask = attention_mask(queries, keys, window, torch.float32)
    assert mask is not None
    return [[int(cell == 0) for cell in row] for row in mask[0, 0]]


def test_mask_is_left_to_the_kernel_only_where_it_is_plain_causality() -> None:
    plain = axis(0, 1, 2)
    assert attention_mask(plain, plain, None, torch.float32) is None
    assert attention_mask(plain, plain, 3, torch.float32) is None
    assert visible(plain, plain, window=2) == [[1, 0, 0], [1, 1, 0], [0, 1, 1]]
    padded = axis(PADDING, 0, 1)
    assert visible(padded, padded) == [[0, 0, 0], [0, 1, 0], [0, 1, 1]]


def test_the_last_token_needs_no_mask_and_an_earlier_one_does() -> None:
    keys = axis(0, 1, 2)
    assert attention_mask(axis(2), keys, None, torch.float32) is None
    assert attention_mask(axis(2), keys, 3, torch.float32) is None
    assert visible(axis(2), keys, window=2) == [[0, 1, 1]]
    assert visible(axis(1), keys) == [[1, 1, 0]]
    assert visible(axis(1), axis(PADDING, 0, 1)) == [[0, 1, 1]]
    assert visible(axis(2, segments=[1]), axis(0, 1, 2, segments=[0, 2, 1])) == [[1, 0, 1]]
    rows = TokenAxis(torch.tensor([[0, 1, 2], [0, 1, 2]]))
    assert (
        attention_mask(TokenAxis(torch.tensor([[2], [1]])), rows, None, torch.float32) is not None
    )


def test_mask_of_later_queries_over_earlier_keys() -> None:
    assert visible(axis(2, 3), axis(0, 1, 2, 3)) == [[1, 1, 1, 0], [1, 1, 1, 1]]


def test_segments_see_the_prefix_and_themselves() -> None:
    prefix = axis(0, 1)
    suffixes = axis(2, 3, 2, segments=[1, 1, 2])
    assert visible(suffixes, prefix.cat(suffixes)) == [
        [1, 1, 1, 0, 0],
        [1, 1, 1, 1, 0],
        [1, 1, 0, 0, 1],
    ]


def test_positions_of_a_padded_row_count_only_tokens() -> None:
    mask = torch.tensor([[0, 1, 1, 0, 1]])
    counted = TokenAxis.of_mask(mask, first_position=7)
    assert counted.positions.tolist() == [[PADDING, 7, 8, PADDING, 9]]
    assert counted.next_position.tolist() == [[10]]


@pytest.mark.parametrize(
    ("architecture", "changes", "named"),
    [
        ("gpt2", {}, "gpt2"),
        ("t5", {}, "encoder-decoder"),
        ("mamba", {}, "mamba"),
        ("qwen3_next", {}, "linear_attention"),
        ("deepseek_v3", {}, "kv_lora_rank"),
        ("gemma3n_text", {}, "num_kv_shared_layers"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "bidirectional"),
        ("llama4_text", {}, "chunked_attention"),
    ],
)
def test_what_cannot_be_exact_is_refused_by_name(
    architecture: str, changes: dict[str, object], named: str
) -> None:
    config = AutoConfig.for_model(architecture)
    for name, value in changes.items():
        setattr(config, name, value)
    with pytest.raises(UnsupportedModelError, match=named):
        check_supported(config)


def test_per_layer_head_counts_are_refused() -> None:
    config = SimpleNamespace(model_type="llama", num_key_value_heads=[2, 4])
    with pytest.raises(UnsupportedModelError, match="num_key_value_heads differs per layer"):
        check_supported(config)


def test_all_supported_architectures_are_known_to_the_library() -> None:
    for architecture in SUPPORTED:
        check_supported(AutoConfig.for_model(architecture))


def test_training_mode_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="training mode"):
        DecoderModel(tiny_model().model.train())


@pytest.mark.parametrize("kernel", ["eager", "flash_attention_2"])
def test_kernels_that_may_apply_no_causal_mask_are_refused(kernel: str) -> None:
    model = tiny_model().model
    model.config._attn_implementation = kernel
    with pytest.raises(
        UnsupportedModelError, match=f"'{kernel}'; load the model with attn_impl.*'sdpa'"
    ):
        DecoderModel(model)
