from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import NUM_LAYERS, tiny_model

from droidkv.bench.prefill import bench_prefill, middle_group, partial_logits, stock_logits
from droidkv.capture import capture
from droidkv.errors import PlanError


def test_it_says_what_is_asked_for_every_k() -> None:
    result: dict[str, Any] = bench_prefill(
        tiny_model(), tiny_model(noise=0.03), [6, 2, 3], 32, 4, num_repeats=2
    )
    assert [row["k"] for row in result["rows"]] == [2, 3, 6]
    for row in result["rows"]:
        assert row.keys() >= {"k", "full_seconds", "partial_seconds", "ratio", "limit"}
        assert row["limit"] == NUM_LAYERS / row["k"]
        assert row["ratio"] == pytest.approx(row["full_seconds"] / row["partial_seconds"], rel=1e-2)
        assert row["partial_seconds_min"] <= row["partial_seconds"] <= row["partial_seconds_max"]


def test_both_sides_of_the_ratio_compute_the_same_where_they_must() -> None:
    model = tiny_model()
    prefix, suffix = torch.randint(3, 97, (1, 19)), torch.randint(3, 97, (1, 4))
    captured = capture(model, prefix, hidden_layers=range(NUM_LAYERS))
    expected = stock_logits(model, torch.cat([prefix, suffix], dim=1))
    for count in range(1, NUM_LAYERS + 1):
        got = partial_logits(model, prefix, suffix, captured, middle_group(count, NUM_LAYERS))
        assert got.shape == expected.shape
        assert torch.allclose(got, expected, atol=1e-4)


def test_groups_have_the_size_asked_for_and_fit() -> None:
    for count in range(1, 31):
        plan = middle_group(count, 30).check(30)
        assert plan.num_recomputed == count
        assert abs(plan.group.start - (30 - plan.group.stop)) <= 1


def test_numbers_out_of_range_are_refused() -> None:
    model = tiny_model()
    for counts in ([], [0], [7]):
        with pytest.raises(PlanError, match="from 1 to 6"):
            bench_prefill(model, model, counts)
    with pytest.raises(PlanError, match="at least 1 prefix token"):
        bench_prefill(model, model, suffix_tokens=0)
