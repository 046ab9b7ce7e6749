from __future__ import annotations

import pytest
from tiny import NUM_LAYERS, tiny_model

from droidkv.bench.sweep import _spread, bench_sweep, work_limit
from droidkv.cache import CapturedCache
from droidkv.errors import PlanError
from droidkv.evaluate import TeacherForced, TokenItem
from droidkv.models import DecoderModel
from droidkv.plan import ReusePlan, all_plans
from droidkv.sweep import sweep

ASKED = {
    "naive_seconds",
    "sweep_seconds",
    "ratio",
    "max_abs_difference",
    "prefix_tokens",
    "peak_rss_bytes",
}


def test_it_says_what_is_asked_and_the_sweep_equals_the_loop() -> None:
    calls: list[tuple[int, int]] = []
    result = bench_sweep(
        tiny_model(),
        tiny_model(noise=0.03),
        prefix_tokens=32,
        suffix_tokens=4,
        answer_tokens=3,
        num_items=2,
        paper_plans=5,
        command="a command",
        on_progress=lambda _, done, total: calls.append((done, total)),
    )
    assert result.keys() >= ASKED
    assert isinstance(result["max_abs_difference"], float) and result["num_answer_flips"] == 0
    assert 0 < result["max_abs_difference"] < 1e-4, "exactly 0 means the two are one computation"
    assert result["num_groups"] == NUM_LAYERS * (NUM_LAYERS + 1) // 2
    assert result["paper_plans_measured"] == 5 and result["paper_is_scaled_up"]
    assert result["command"] == "a command"
    assert calls == [(done + 1, 44) for done in range(44)]
    for loop in ("naive", "sweep", "paper"):
        assert isinstance(seconds := result[f"{loop}_seconds"], float) and seconds > 0


def test_a_sweep_that_gave_other_numbers_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(
        receiver: DecoderModel, captured: CapturedCache, item: TokenItem, plans: list[ReusePlan]
    ) -> dict[ReusePlan, TeacherForced]:
        results = sweep(receiver, captured, item, plans)
        return dict.fromkeys(results, results[plans[0]])

    monkeypatch.setattr("droidkv.bench.sweep.sweep", wrong)
    result = bench_sweep(tiny_model(), tiny_model(noise=0.03), 32, 4, 3, paper_plans=0)
    assert isinstance(difference := result["max_abs_difference"], float) and difference > 1e-2
    assert result["paper_plans_measured"] == 0 and "paper_seconds" not in result


@pytest.mark.parametrize("num_layers", [1, 2, 6, 30, 32])
def test_the_limit_is_a_third_of_the_layers_and_two(num_layers: int) -> None:
    assert work_limit(all_plans(num_layers)) == pytest.approx((num_layers + 2) / 3)


def test_plans_for_the_papers_loop_are_spread_over_the_work() -> None:
    plans = all_plans(30)
    mean = sum(plan.num_recomputed for plan in plans) / len(plans)
    for seed in range(20):
        chosen = _spread(plans, 32, seed)
        assert len(set(chosen)) == 32
        of_chosen = sum(plan.num_recomputed for plan in chosen) / 32
        assert of_chosen == pytest.approx(mean, rel=0.06)
    assert _spread(plans, 32, 1) == _spread(plans, 32, 1) != _spread(plans, 32, 2)
    assert set(_spread(plans, None, 0)) == set(plans)
    assert _spread(plans, 0, 0) == []


def test_numbers_out_of_range_are_refused() -> None:
    with pytest.raises(PlanError, match="at least 1 prefix"):
        bench_sweep(tiny_model(), tiny_model(), prefix_tokens=0)
    with pytest.raises(PlanError, match="paper_plans=-1"):
        bench_sweep(tiny_model(), tiny_model(), paper_plans=-1)
