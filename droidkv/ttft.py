"""Predicted time to the first token of a plan, from one machine's calibration. Arithmetic only."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal, get_args

from droidkv.costs import (
    ModelShape,
    kv_bytes,
    plan_bytes,
    stitch_flops_per_token,
    suffix_pairs,
    transition_bytes,
)
from droidkv.errors import CalibrationError
from droidkv.fields import Fields
from droidkv.plan import ReusePlan

Order = Literal["overlap", "serial"]
ORDERS: tuple[Order, ...] = get_args(Order)
CALIBRATION_SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Calibration:
    """What the steps of a prefill take on one machine, for one model shape. All in seconds.

    Attributes:
        machine: Name of the machine measured on.
        device: Torch device, e.g. `cpu` or `cuda`.
        dtype: Weight and cache dtype, e.g. `float32`.
        shape_digest: `ModelShape.digest` of the model measured.
        prefix_seconds_per_token: One recomputed layer, per prefix token.
        prefix_seconds_per_token_squared: The same layer's attention, per prefix token squared.
        kv_only_seconds_per_token: The last recomputed layer (keys and values only), per token.
        suffix_seconds_per_token: One layer of the suffix pass, per suffix token.
        suffix_seconds_per_token_pair: The same layer's attention, per (suffix token, token read).
        seconds_per_layer_call: Each call of a layer, whatever its length.
        load_seconds_per_byte: Bringing stored KV or E to the device.
        load_fixed_seconds: Each request's load, whatever its size.
        logits_seconds: Final norm and output embedding for one token.
        fixed_seconds: Each request, whatever its plan.

    Raises:
        CalibrationError: A coefficient is negative or not finite.
    """

    machine: str
    device: str
    dtype: str
    shape_digest: str
    prefix_seconds_per_token: float
    prefix_seconds_per_token_squared: float
    kv_only_seconds_per_token: float
    suffix_seconds_per_token: float
    suffix_seconds_per_token_pair: float
    seconds_per_layer_call: float
    load_seconds_per_byte: float
    load_fixed_seconds: float
    logits_seconds: float
    fixed_seconds: float

    def __post_init__(self) -> None:
        for name in COEFFICIENTS:
            value = getattr(self, name)
            if not 0 <= value < float("inf"):
                raise CalibrationError(
                    f"expected {name} to be a finite number of seconds >= 0, got {value!r}; "
                    f"run `droidkv calibrate --overwrite`"
                )

    def to_json(self) -> dict[str, object]:
        return {"schema_version": CALIBRATION_SCHEMA_VERSION, **dataclasses.asdict(self)}

    @classmethod
    def from_json(cls, value: object) -> Calibration:
        """Read what `to_json` wrote.

        Raises:
            CalibrationError: A field is missing, unknown or of the wrong type, or the schema is
                another version's.
        """
        fields = Fields(value, "calibration", CalibrationError)
        fields.take_version(CALIBRATION_SCHEMA_VERSION, "run `droidkv calibrate --overwrite`")
        calibration = cls(
            machine=fields.take("machine", str),
            device=fields.take("device", str),
            dtype=fields.take("dtype", str),
            shape_digest=fields.take("shape_digest", str),
            **{name: fields.take(name, float) for name in COEFFICIENTS},
        )
        fields.done()
        return calibration


COEFFICIENTS: tuple[str, ...] = tuple(
    field.name for field in dataclasses.fields(Calibration) if "seconds" in field.name
)


def predict_ttft_seconds(
    shape: ModelShape,
    plan: ReusePlan,
    prefix_tokens: int,
    suffix_tokens: int,
    calibration: Calibration,
    bandwidth_bytes_per_second: float | None = None,
    order: Order = "overlap",
    stitch_rank: int = 0,
) -> float:
    """Predict the time from a request's arrival to its first token's logits.

    `serial` loads E and the reused layers, then computes. `overlap` loads E first, recomputes the
    group while the reused layers stream in behind it, and lets each layer of the suffix pass wait
    for its own keys and values only.

    Args:
        shape: Sizes of the model, as calibrated.
        plan: The plan.
        prefix_tokens: n, tokens both models share.
        suffix_tokens: m, tokens only the receiver sees.
        calibration: This machine's measured coefficients.
        bandwidth_bytes_per_second: The link the cache comes over. The slower of link and calibrated
            load counts, for the two overlap; None = the calibrated load alone.
        order: How load and compute are arranged.
        stitch_rank: Rank of the stitching map, for plans that use one.

    Raises:
        CalibrationError: The calibration is of another model shape, the bandwidth is not positive,
            or the order is unknown.
        PlanError: The plan reaches past the last layer.
    """
    plan.check(shape.num_layers)
    if calibration.shape_digest != shape.digest:
        raise CalibrationError(
            f"expected a calibration of the model shape {shape.digest}, got one of "
            f"{calibration.shape_digest}; run `droidkv calibrate` with this model"
        )
    if order not in ORDERS:
        raise CalibrationError(f"expected an order of {ORDERS}, got {order!r}")
    n, m = prefix_tokens, suffix_tokens
    per_byte = _load_seconds_per_byte(calibration, bandwidth_bytes_per_second)
    e_loaded = 0.0
    if plan_bytes(shape, plan, n):
        e_loaded = calibration.load_fixed_seconds + per_byte * transition_bytes(shape, plan, n)
    layer_load = per_byte * kv_bytes(shape, n, 1)
    suffix_layer = calibration.seconds_per_layer_call
    suffix_layer += calibration.suffix_seconds_per_token * m
    suffix_layer += calibration.suffix_seconds_per_token_pair * suffix_pairs(n, m)
    recompute = _recompute_seconds(shape, plan, n, calibration, stitch_rank)
    ends = calibration.fixed_seconds + calibration.logits_seconds

    if order == "serial":
        load = e_loaded + layer_load * (shape.num_layers - plan.num_recomputed)
        return ends + load + recompute + suffix_layer * shape.num_layers
    loaded = e_loaded
    now = recompute + (e_loaded if plan.transition is not None else 0.0)
    for layer in range(shape.num_layers):
        if layer not in plan.group:
            loaded += layer_load
            now = max(now, loaded)
        now += suffix_layer
    return ends + now


def break_even_prefix_tokens(
    shape: ModelShape,
    plan: ReusePlan,
    suffix_tokens: int,
    calibration: Calibration,
    bandwidth_bytes_per_second: float | None = None,
    order: Order = "overlap",
    stitch_rank: int = 0,
    max_prefix_tokens: int = 1 << 20,
) -> int | None:
    """Shortest prefix from which on the plan is predicted faster than the full prefill.

    Args:
        shape: Sizes of the model, as calibrated.
        plan: The plan to weigh against `[0, L)`.
        suffix_tokens: m, tokens only the receiver sees.
        calibration: This machine's measured coefficients.
        bandwidth_bytes_per_second: See `predict_ttft_seconds`.
        order: See `predict_ttft_seconds`.
        stitch_rank: See `predict_ttft_seconds`.
        max_prefix_tokens: Longest prefix considered.

    Returns:
        The length in tokens, or None if the plan does not pay at `max_prefix_tokens` either.
    """
    full = ReusePlan.of(0, shape.num_layers)

    def pays(n: int) -> bool:
        seconds = [
            predict_ttft_seconds(
                shape, p, n, suffix_tokens, calibration, bandwidth_bytes_per_second, order, rank
            )
            for p, rank in ((plan, stitch_rank), (full, 0))
        ]
        return seconds[0] < seconds[1]

    # The gain may dip below zero between two lengths (saved layer calls, then a slow link, then
    # saved attention), so walk down from the top rather than bisecting from 1.
    high = max_prefix_tokens
    if not pays(high):
        return None
    while high > 1:
        low = max(1, high * 15 // 16)
        if not pays(low):
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (low, middle) if pays(middle) else (middle, high)
            return high
        high = low
    return 1


def _load_seconds_per_byte(calibration: Calibration, bandwidth: float | None) -> float:
    if bandwidth is None:
        return calibration.load_seconds_per_byte
    if not bandwidth > 0:
        raise CalibrationError(f"expected a bandwidth > 0 bytes per second, got {bandwidth}")
    return max(calibration.load_seconds_per_byte, 1 / bandwidth)


def _recompute_seconds(
    shape: ModelShape, plan: ReusePlan, n: int, calibration: Calibration, stitch_rank: int
) -> float:
    if plan.num_recomputed == 0:
        return 0.0
    full_layer = calibration.seconds_per_layer_call + calibration.prefix_seconds_per_token * n
    full_layer += calibration.prefix_seconds_per_token_squared * n * n
    kv_only = calibration.seconds_per_layer_call + calibration.kv_only_seconds_per_token * n
    # The map is two small matrix products; priced at a layer's measured rate.
    share = stitch_flops_per_token(shape, plan, stitch_rank) / shape.layer_flops_per_token
    stitch = share * calibration.prefix_seconds_per_token * n
    return (plan.num_recomputed - 1) * full_layer + kv_only + stitch
