from __future__ import annotations

import dataclasses

import pytest

from droidkv.costs import ModelShape, e_bytes, kv_bytes, plan_bytes, prefill_flops
from droidkv.errors import PlanError, UnsupportedModelError
from droidkv.fields import Fields
from droidkv.plan import ReusePlan, all_plans

SMOLLM2 = ModelShape(
    num_layers=30,
    hidden_size=576,
    num_attention_heads=9,
    num_kv_heads=3,
    head_dim=64,
    intermediate_size=1536,
    vocab_size=49152,
    dtype_bytes=4,
)
TINY = ModelShape(4, 8, 2, 1, 4, 16, 32, 4)
LLAMA_CONFIG: dict[str, object] = {
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": None,
    "intermediate_size": 14336,
    "vocab_size": 128256,
}


def test_layer_params_of_smollm2_match_its_published_size() -> None:
    # 134,515,008 parameters: 30 layers, tied embeddings, and two norms a layer plus the last.
    norms = 576 * (2 * 30 + 1)
    assert 30 * SMOLLM2.layer_params + 49152 * 576 + norms == 134_515_008


def test_bytes_of_caches() -> None:
    assert kv_bytes(SMOLLM2, num_tokens=10, num_layers=2) == 2 * 3 * 64 * 4 * 10 * 2
    assert e_bytes(SMOLLM2, num_tokens=10) == 576 * 4 * 10
    # The E cache of SmolLM2-135M is 1.5 times the KV cache of one layer.
    assert e_bytes(SMOLLM2, 7) * 2 == kv_bytes(SMOLLM2, 7, 1) * 3


def test_plan_bytes_count_reused_layers_and_one_e() -> None:
    assert plan_bytes(SMOLLM2, ReusePlan.of(0, 30), 100) == 0
    assert plan_bytes(SMOLLM2, ReusePlan.of(0, 0), 100) == kv_bytes(SMOLLM2, 100, 30)
    assert plan_bytes(SMOLLM2, ReusePlan.of(0, 12), 100) == kv_bytes(SMOLLM2, 100, 18)
    middle = plan_bytes(SMOLLM2, ReusePlan.of(12, 24), 100)
    assert middle == kv_bytes(SMOLLM2, 100, 18) + e_bytes(SMOLLM2, 100)


@pytest.mark.parametrize("count", [plan_bytes, lambda s, p, n: prefill_flops(s, p, n, 1)])
def test_a_plan_past_the_last_layer_is_refused(count) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(PlanError, match=r"within \[0,30\)"):
        count(SMOLLM2, ReusePlan.of(12, 31), 100)


def flops_by_counting(shape: ModelShape, plan: ReusePlan, n: int, m: int) -> int:
    """Walk over layers, tokens and keys one by one, as the definition says."""
    kv = 2 * 2 * shape.hidden_size * shape.num_kv_heads * shape.head_dim
    q_and_o = 2 * 2 * shape.hidden_size * shape.num_attention_heads * shape.head_dim
    mlp = 2 * 3 * shape.hidden_size * shape.intermediate_size
    pair = 2 * 2 * shape.num_attention_heads * shape.head_dim
    total = 2 * shape.hidden_size * shape.vocab_size
    for layer in plan.group.layers:
        for position in range(n):
            total += kv
            if layer != plan.group.stop - 1:
                total += q_and_o + mlp + pair * (position + 1)
    for _ in range(shape.num_layers):
        for position in range(n, n + m):
            total += kv + q_and_o + mlp + pair * (position + 1)
    return total


@pytest.mark.parametrize("plan", all_plans(TINY.num_layers), ids=str)
def test_flops_equal_counting_one_by_one(plan: ReusePlan) -> None:
    assert prefill_flops(TINY, plan, 7, 3) == flops_by_counting(TINY, plan, 7, 3)


def test_attention_makes_long_prefixes_cost_more_than_linearly() -> None:
    full = ReusePlan.of(0, 30)
    short, long = (prefill_flops(SMOLLM2, full, n, 0) for n in (1_000, 10_000))
    assert long > 11 * short


def test_a_stitching_map_costs_two_low_rank_products_a_token() -> None:
    copy, stitch = ReusePlan.of(12, 21), ReusePlan.of(12, 21, "stitch")
    extra = prefill_flops(SMOLLM2, stitch, 100, 10, 32) - prefill_flops(SMOLLM2, copy, 100, 10, 32)
    assert extra == 100 * 2 * (576 * 32 + 32 * 576)


def test_config_defaults_head_dim_and_kv_heads() -> None:
    shape = ModelShape.from_config(LLAMA_CONFIG, dtype_bytes=2)
    assert (shape.head_dim, shape.num_kv_heads, shape.num_experts) == (128, 8, 1)
    without = {k: v for k, v in LLAMA_CONFIG.items() if k != "num_key_value_heads"}
    assert ModelShape.from_config(without, 2).num_kv_heads == 32
    assert ModelShape.from_config({"text_config": LLAMA_CONFIG}, 2) == shape


def test_config_of_mixture_of_experts() -> None:
    mixtral = LLAMA_CONFIG | {"num_local_experts": 8, "num_experts_per_tok": 2}
    shape = ModelShape.from_config(mixtral, 2)
    dense = ModelShape.from_config(LLAMA_CONFIG, 2)
    mlp = 3 * 4096 * 14336
    assert shape.layer_params - dense.layer_params == 7 * mlp + 4096 * 8
    assert shape.layer_flops_per_token - dense.layer_flops_per_token == 2 * (mlp + 4096 * 8)
    qwen = mixtral | {"moe_intermediate_size": 768}
    assert ModelShape.from_config(qwen, 2).intermediate_size == 768


@pytest.mark.parametrize("value", [None, 0, -3, "32", 1.5, True])
def test_config_without_a_usable_size_is_refused_by_name(value: object) -> None:
    with pytest.raises(UnsupportedModelError, match="'num_hidden_layers'"):
        ModelShape.from_config(LLAMA_CONFIG | {"num_hidden_layers": value}, 2)


def test_impossible_shapes_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="hidden_size"):
        dataclasses.replace(TINY, hidden_size=0)
    with pytest.raises(UnsupportedModelError, match="2 > 1"):
        dataclasses.replace(TINY, num_experts_per_token=2)


def test_shape_survives_json_and_its_digest_sees_every_size() -> None:
    fields = Fields(dataclasses.asdict(SMOLLM2), "shape", UnsupportedModelError)
    assert ModelShape.from_fields(fields) == SMOLLM2
    roomy = dataclasses.replace(SMOLLM2, num_experts=8)
    others = {
        dataclasses.replace(roomy, **{f.name: getattr(roomy, f.name) + 1}).digest
        for f in dataclasses.fields(ModelShape)
    }
    assert len(others | {roomy.digest}) == len(dataclasses.fields(ModelShape)) + 1
