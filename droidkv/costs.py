"""What a reuse plan costs in bytes moved and floating-point operations.

Arithmetic only, standard library only. One convention throughout: the prefix has n tokens, the
suffix m, and one multiply-add is two operations. Of the recomputed layers the last needs only its
keys and values: its attention and MLP over the prefix would feed a layer that is not recomputed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass

from droidkv.errors import UnsupportedModelError
from droidkv.fields import Fields
from droidkv.plan import ReusePlan


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a decoder-only model that its costs depend on.

    Every layer is taken to have the same sizes and a gated MLP (three matrices), which holds for
    the supported architectures. Sliding-window layers are counted as if they saw every token.

    Attributes:
        num_layers: Decoder layers.
        hidden_size: Width of the residual stream.
        num_attention_heads: Query heads.
        num_kv_heads: Key and value heads.
        head_dim: Width of one head.
        intermediate_size: Width of the MLP, or of one expert's MLP.
        vocab_size: Rows of the output embedding.
        dtype_bytes: Bytes of one number in the caches.
        num_experts: Experts per layer; 1 = a dense model without a router.
        num_experts_per_token: Experts that each token passes through.

    Raises:
        UnsupportedModelError: A size is below 1, or tokens use more experts than there are.
    """

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    dtype_bytes: int
    num_experts: int = 1
    num_experts_per_token: int = 1

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if type(value) is not int or value < 1:
                raise UnsupportedModelError(
                    f"expected the model's {field.name} to be an integer >= 1, got {value!r}"
                )
        if self.num_experts_per_token > self.num_experts:
            raise UnsupportedModelError(
                f"expected num_experts_per_token <= num_experts, "
                f"got {self.num_experts_per_token} > {self.num_experts}"
            )

    @classmethod
    def from_config(cls, config: Mapping[str, object], dtype_bytes: int) -> ModelShape:
        """Read the sizes from a Hugging Face configuration as a plain mapping.

        Args:
            config: `PretrainedConfig.to_dict()`, or the parsed config.json.
            dtype_bytes: Bytes of one number in the caches.

        Raises:
            UnsupportedModelError: A size is missing or is not a positive integer.
        """
        nested = config.get("text_config")
        table = nested if isinstance(nested, Mapping) else config

        def size(*names: str, default: int | None = None) -> int:
            value = next((table[name] for name in names if table.get(name) is not None), default)
            if type(value) is not int or value < 1:
                raise UnsupportedModelError(
                    f"expected a positive integer in the model's config field {names[0]!r}, "
                    f"got {value!r}; droidkv serves decoder-only transformers"
                )
            return value

        num_heads = size("num_attention_heads")
        hidden_size = size("hidden_size")
        num_experts = size("num_local_experts", "num_experts", default=1)
        widths = ("moe_intermediate_size", "intermediate_size")
        return cls(
            num_layers=size("num_hidden_layers"),
            hidden_size=hidden_size,
            num_attention_heads=num_heads,
            num_kv_heads=size("num_key_value_heads", default=num_heads),
            head_dim=size("head_dim", default=hidden_size // num_heads),
            intermediate_size=size(*(widths if num_experts > 1 else widths[1:])),
            vocab_size=size("vocab_size"),
            dtype_bytes=dtype_bytes,
            num_experts=num_experts,
            num_experts_per_token=size("num_experts_per_tok") if num_experts > 1 else 1,
        )

    @classmethod
    def from_fields(cls, fields: Fields) -> ModelShape:
        """Read a shape from the JSON form that `dataclasses.asdict` writes."""
        shape = cls(**{f.name: fields.take(f.name, int) for f in dataclasses.fields(cls)})
        fields.done()
        return shape

    @property
    def digest(self) -> str:
        """SHA-256 (first 16 hex digits) over all sizes; equal shapes have equal digests."""
        text = json.dumps(dataclasses.asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def kv_projection_params(self) -> int:
        """Parameters of one layer's key and value projections."""
        return 2 * self.hidden_size * self.num_kv_heads * self.head_dim

    @property
    def layer_params(self) -> int:
        """Parameters of one layer's matrices, all experts included."""
        return self._attention_params + self._router_params + self.num_experts * self._mlp_params

    @property
    def layer_flops_per_token(self) -> int:
        """Operations of one layer for one token, without attention's part over other tokens."""
        mlp = self.num_experts_per_token * self._mlp_params
        return 2 * (self._attention_params + self._router_params + mlp)

    @property
    def attention_flops_per_token_pair(self) -> int:
        """Operations of one layer for one query reading one key and its value."""
        return 4 * self.num_attention_heads * self.head_dim

    @property
    def _attention_params(self) -> int:
        query_and_output = 2 * self.hidden_size * self.num_attention_heads * self.head_dim
        return query_and_output + self.kv_projection_params

    @property
    def _mlp_params(self) -> int:
        return 3 * self.hidden_size * self.intermediate_size

    @property
    def _router_params(self) -> int:
        return self.hidden_size * self.num_experts if self.num_experts > 1 else 0


def kv_bytes(shape: ModelShape, num_tokens: int, num_layers: int) -> int:
    """Bytes of the keys and values of `num_layers` layers for `num_tokens` tokens."""
    per_layer = 2 * shape.num_kv_heads * shape.head_dim * shape.dtype_bytes
    return per_layer * num_tokens * num_layers


def e_bytes(shape: ModelShape, num_tokens: int) -> int:
    """Bytes of the E cache (the hidden state entering one layer) for `num_tokens` tokens."""
    return shape.hidden_size * shape.dtype_bytes * num_tokens


def plan_bytes(shape: ModelShape, plan: ReusePlan, prefix_tokens: int) -> int:
    """Bytes a receiver loads: KV of the reused layers, and one E where the plan reads one.

    Raises:
        PlanError: The plan reaches past the last layer.
    """
    plan.check(shape.num_layers)
    reused = kv_bytes(shape, prefix_tokens, shape.num_layers - plan.num_recomputed)
    return reused + transition_bytes(shape, plan, prefix_tokens)


def prefill_flops(
    shape: ModelShape, plan: ReusePlan, prefix_tokens: int, suffix_tokens: int, stitch_rank: int = 0
) -> int:
    """Operations until the first token's logits: recomputed prefix layers, whole suffix pass.

    Args:
        shape: Sizes of the model.
        plan: The plan; `[0, L)` is the receiver's own prefill, counted by the same rules.
        prefix_tokens: n, tokens both models share.
        suffix_tokens: m, tokens only the receiver sees.
        stitch_rank: Rank of the stitching map, for plans that use one.

    Raises:
        PlanError: The plan reaches past the last layer.
    """
    plan.check(shape.num_layers)
    n, m = prefix_tokens, suffix_tokens
    prefix = 0
    if plan.num_recomputed:
        full_layer = shape.layer_flops_per_token * n
        full_layer += shape.attention_flops_per_token_pair * causal_pairs(n)
        prefix = (plan.num_recomputed - 1) * full_layer + 2 * shape.kv_projection_params * n
    suffix = shape.layer_flops_per_token * m
    suffix += shape.attention_flops_per_token_pair * suffix_pairs(n, m)
    logits = 2 * shape.hidden_size * shape.vocab_size
    stitch = stitch_flops_per_token(shape, plan, stitch_rank) * n
    return prefix + stitch + shape.num_layers * suffix + logits


def causal_pairs(num_tokens: int) -> int:
    """(query, key) pairs of a causal attention of `num_tokens` tokens over themselves."""
    return num_tokens * (num_tokens + 1) // 2


def suffix_pairs(prefix_tokens: int, suffix_tokens: int) -> int:
    """(query, key) pairs of the suffix reading the prefix and itself."""
    return prefix_tokens * suffix_tokens + causal_pairs(suffix_tokens)


def transition_bytes(shape: ModelShape, plan: ReusePlan, prefix_tokens: int) -> int:
    """Bytes of the E cache a plan reads; 0 where it reads none."""
    return 0 if plan.transition is None else e_bytes(shape, prefix_tokens)


def stitch_flops_per_token(shape: ModelShape, plan: ReusePlan, stitch_rank: int) -> int:
    """Operations of the stitching map for one token; 0 for a plan without one."""
    return 4 * shape.hidden_size * stitch_rank if plan.operator == "stitch" else 0
