"""Made-up profiles for tests, and hypothesis strategies over them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st

from droidkv.costs import ModelShape
from droidkv.identity import Fingerprint
from droidkv.plan import OPERATORS, ReusePlan, all_plans
from droidkv.profile import (
    ItemRecord,
    ModelRecord,
    NoiseFloor,
    PlanRecord,
    Profile,
    Provenance,
    StitchRecord,
    TaskRecord,
)
from droidkv.ttft import Calibration


def sha(seed: int) -> str:
    return f"sha256:{seed:064x}"


def fingerprint(seed: int) -> Fingerprint:
    return Fingerprint(
        weights=sha(seed),
        architecture=(("hidden_size", 64), ("model_type", "llama")),
        rope=(("rope_theta", 10000),),
        vocabulary=sha(1),
        tokenizer=sha(2),
        added_tokens=sha(3),
        weight_dtype="float32",
        cache_dtype="float32",
        quantisation="none",
        adapter="none",
        tensor_parallel=1,
    )


def shape(num_layers: int) -> ModelShape:
    return ModelShape(num_layers, 64, 4, 2, 16, 128, 512, 4)


SHAPE = shape(4)
FAST_LOAD = Calibration(
    machine="m",
    device="cpu",
    dtype="float32",
    shape_digest=SHAPE.digest,
    prefix_seconds_per_token=1e-5,
    prefix_seconds_per_token_squared=1e-9,
    kv_only_seconds_per_token=1e-6,
    suffix_seconds_per_token=2e-5,
    suffix_seconds_per_token_pair=1e-8,
    seconds_per_layer_call=1e-4,
    load_seconds_per_byte=1e-12,
    load_fixed_seconds=1e-3,
    logits_seconds=3e-4,
    fixed_seconds=5e-4,
)


def item(index: int, full_score: float = 1.0) -> ItemRecord:
    return ItemRecord(f"eval/0/{index}", 100 + index, 10, 3, full_score, 0.25)


def record(
    plan: ReusePlan, scores: Sequence[float | None], kl: float = 0.5, full: float = 1.0
) -> PlanRecord:
    """A plan whose answer agrees exactly where its score is the full one."""
    agrees = tuple(score == full for score in scores)
    n = len(scores)
    return PlanRecord(
        plan, (kl,) * n, (0.25 + kl,) * n, tuple(map(float, agrees)), agrees, tuple(scores)
    )


def profile(
    measurements: list[PlanRecord] | None = None, num_layers: int = 4, **changes: Any
) -> Profile:
    """A profile of `num_layers` layers with as many items as the measurements have."""
    if measurements is None:
        measurements = [record(plan, [1.0, 0.0, 1.0, None]) for plan in all_plans(num_layers)]
    num_items = len(measurements[0].kl) if measurements else 1
    parts: dict[str, Any] = {
        "pair": "tiny",
        "sender": ModelRecord("base", fingerprint(10)),
        "receiver": ModelRecord("tuned", fingerprint(11)),
        "shape": shape(num_layers),
        "task": TaskRecord("records", 1, "exact_match", "eval", 0, {"num_records": 8}),
        "items": tuple(item(index) for index in range(num_items)),
        "measurements": tuple(measurements),
        "noise_floor": None,
        "stitch": stitch(),
        "provenance": Provenance(
            "2025-01-01T00:00:00+00:00", "droidkv profile tiny", 0, None, {}, "m", "cpu", "f32", 1.5
        ),
    }
    return Profile(**(parts | changes))


def stitch(*calibration_ids: str) -> StitchRecord:
    return StitchRecord("tiny.safetensors", sha(5), 32, 0.01, calibration_ids or ("calib/0/0",))


def smooth_profile(num_layers: int = 30, num_items: int = 16, seed: int = 0) -> Profile:
    """A realistic one, both operators: more layers recomputed, less lost; stitching helps."""
    rng = np.random.default_rng(seed)
    difficulty = rng.random(num_items)
    records = []
    for plan in all_plans(num_layers, operators=OPERATORS):
        share = plan.num_recomputed / num_layers
        damage = (1 - share) * (0.6 if plan.operator == "stitch" else 1.0)
        kl = tuple((damage * 3 * difficulty + 1e-7 * rng.random(num_items)).tolist())
        agrees = tuple((difficulty > damage).tolist()) if share < 1 else (True,) * num_items
        scores = tuple(1.0 if same else 0.5 for same in agrees)
        top1 = tuple(1.0 if same else float(rng.random()) for same in agrees)
        records.append(PlanRecord(plan, kl, tuple(k + 0.2 for k in kl), top1, agrees, scores))
    return profile(records, num_layers)


# Six significant digits survive the file.
numbers = st.floats(-1e6, 1e6).map(lambda x: float(f"{x:.6g}"))
shares = st.integers(0, 1000).map(lambda x: x / 1000)
texts = st.text(st.characters(codec="utf-8"), max_size=8)


@st.composite
def profiles(draw: st.DrawFn) -> Profile:
    """Any consistent profile of up to 5 layers and 4 items."""
    num_layers = draw(st.integers(1, 5))
    n = draw(st.integers(1, 4))

    def column(values: st.SearchStrategy[Any]) -> tuple[Any, ...]:
        return tuple(draw(st.lists(values, min_size=n, max_size=n)))

    records = []
    for plan in draw(st.sets(st.sampled_from(all_plans(num_layers, operators=OPERATORS)))):
        agrees = column(st.booleans())
        scores = tuple(draw(shares) if same or draw(st.booleans()) else None for same in agrees)
        records.append(
            PlanRecord(plan, column(numbers), column(numbers), column(shares), agrees, scores)
        )
    items = tuple(
        ItemRecord(f"e{i}", i + 1, draw(st.integers(1, 99)), 1, draw(shares), draw(numbers))
        for i in range(n)
    )
    return profile(
        records,
        num_layers,
        pair=draw(texts),
        items=items,
        task=TaskRecord(draw(texts), 1, "m", "eval", 0, {draw(texts): [draw(numbers), None]}),
        noise_floor=draw(st.none() | st.builds(NoiseFloor, shares, shares, shares, shares)),
        stitch=StitchRecord("m.safetensors", sha(1), 4, 0.5, tuple(draw(st.lists(texts)))),
    )
