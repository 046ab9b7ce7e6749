from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_profiles import FAST_LOAD, fingerprint, item, profile, record, sha, smooth_profile

from droidkv.confirmation import Evidence
from droidkv.errors import CalibrationError, ProfileError
from droidkv.frontier import pareto_front
from droidkv.objectives import Workload, measure
from droidkv.optimism import loss_of_such_picks
from droidkv.plan import ReusePlan
from droidkv.policy import Choice, pick, pick_among
from droidkv.profile import ModelRecord, Profile

NONE, SHORT, LONG, FULL = (ReusePlan.of(*g) for g in ((0, 0), (1, 2), (1, 4), (0, 4)))
STITCHED = ReusePlan.of(2, 3, "stitch")
NUM_ITEMS = 100


def scores(num_wrong: int) -> list[float]:
    return [0.0] * num_wrong + [1.0] * (NUM_ITEMS - num_wrong)


def small_profile(**changes: Any) -> Profile:
    """Loses 60 % at 0 layers, 20 % at 1, 4 % at 1 stitched, 1 % at 3, nothing at 4."""
    records = [
        record(NONE, scores(60), kl=2.0),
        record(SHORT, scores(20), kl=1.0),
        record(STITCHED, scores(4), kl=0.2),
        record(LONG, scores(1), kl=0.1),
        record(FULL, scores(0), kl=0.0),
    ]
    return profile(records, **changes)


def on_machine(**options: Any) -> Choice:
    return pick(small_profile(), calibration=FAST_LOAD, prefix_tokens=1000, **options)


def text(choice: Choice) -> str:
    return "\n".join(choice.message)


def test_without_a_machine_it_is_the_fewest_layers_within_five_percent() -> None:
    choice = pick(small_profile())
    assert choice.plan == STITCHED
    assert choice.loss == pytest.approx(4)
    assert choice.bound_by == "max_loss"
    assert (choice.pays, choice.meets_slo, choice.predicted_ttft_seconds) == (None, None, None)
    assert "recompute 1 of 4 layers (4.00x fewer), loss 4 %" in text(choice)
    assert "over 100 items" in text(choice)
    assert "cheaper plans lose over 5 %" in text(choice)


def test_a_wider_limit_and_another_family_choose_otherwise() -> None:
    p = small_profile()
    assert pick(p, max_loss=20).plan == STITCHED  # as cheap as SHORT, and better
    assert pick(p, max_loss=20, operators=["copy"]).plan == SHORT
    assert pick(p, operators=["copy"]).plan == LONG
    assert pick(p, max_loss=0.5).plan == FULL
    everything = pick(p, max_loss=100)
    assert (everything.plan, everything.bound_by) == (NONE, "nothing")
    assert "recompute 0 of 4 layers, loss 60 %" in text(everything)
    assert pick(p, max_loss=0.15, objective="kl").plan == LONG


def test_no_plan_within_the_loss_means_full_prefill_and_says_so() -> None:
    choice = pick(small_profile(), max_loss=0)
    assert choice.plan == FULL
    assert (choice.loss, choice.claim_holds, choice.bound_by) == (0, True, "max_loss")
    assert not choice.reuses
    assert "reuse nothing, the receiver prefills all 4 layers" in text(choice)
    assert "no reuse loses 0 % or less" in text(choice)


def test_full_prefill_is_a_candidate_even_if_it_was_not_measured() -> None:
    p = profile([record(NONE, scores(60))])
    choice = pick(p)
    assert choice.plan == FULL
    assert choice.bound_by == "max_loss"


def test_of_a_full_share_receiver_the_full_prefill_is_a_plan_like_any_other() -> None:
    reference = ModelRecord("fine-tune", fingerprint(12))
    good = profile([record(NONE, scores(1)), record(FULL, scores(60))], reference=reference)
    choice = pick(good)
    assert (choice.plan, choice.loss, choice.full.loss) == (NONE, 1, 60)
    bad = profile([record(NONE, scores(30)), record(FULL, scores(60))], reference=reference)
    choice = pick(bad)
    assert (choice.plan, choice.loss, choice.claim_holds) == (NONE, 30, False)
    assert (choice.bound_by, choice.meets_max_loss) == ("max_loss", False)
    assert "no plan, and not its own full prefill, loses 5 % or less" in text(choice)
    worse = profile([record(NONE, scores(60)), record(FULL, scores(30))], reference=reference)
    choice = pick(worse)
    assert (choice.plan, choice.loss, choice.claim_holds) == (FULL, 30, False)
    with pytest.raises(ProfileError, match=r"\[0,4\)"):
        pick(profile([record(NONE, scores(1))], reference=reference))


def test_an_interval_past_the_limit_does_not_allow_the_claim() -> None:
    wide = pick(small_profile(), max_loss=5)
    assert wide.interval.high > 5
    assert not wide.claim_holds
    assert "not certain: the interval reaches" in text(wide)
    narrow = pick(small_profile(), max_loss=12)
    assert narrow.interval.high < 12
    assert narrow.claim_holds
    assert "not certain" not in text(narrow)


@pytest.mark.parametrize(("num_items", "holds"), [(8, False), (58, False), (59, True)])
def test_few_items_without_a_loss_do_not_allow_the_claim_either(
    num_items: int, holds: bool
) -> None:
    choice = pick(profile([record(SHORT, [1.0] * num_items)]))
    assert (choice.plan, choice.loss) == (SHORT, 0)
    assert choice.claim_holds == holds
    assert (f"could hide behind {num_items} items" in text(choice)) == (not holds)


def test_a_few_gains_do_not_hide_that_no_loss_was_seen_yet() -> None:
    full = [0.0] * 2 + [1.0] * 8
    items = tuple(item(index, score) for index, score in enumerate(full))
    choice = pick(profile([record(SHORT, [1.0] * 10)], items=items))
    assert choice.interval.low < choice.interval.high <= 0
    assert not choice.claim_holds
    assert "could hide behind 8 items" in text(choice)


@pytest.mark.parametrize(("max_loss", "holds"), [(8, False), (11, False), (12, True)])
def test_one_loss_among_few_items_does_not_allow_a_narrow_claim(
    max_loss: float, holds: bool
) -> None:
    """1 of 40: resampling says at most 7.5 %, while 11.3 % show so few one time in twenty."""
    choice = pick(profile([record(SHORT, [0.0] + [1.0] * 39)]), max_loss)
    assert choice.interval.high < 8
    assert choice.claim_holds == holds
    assert ("1 of 40 items lost, but 11 % could hide" in text(choice)) == (not holds)


def test_items_that_the_full_prefill_gets_wrong_have_nothing_to_lose() -> None:
    full = [0.0] * 80 + [1.0] * 20
    items = tuple(item(index, score) for index, score in enumerate(full))
    choice = pick(profile([record(SHORT, full)], items=items))
    assert choice.loss == 0 and not choice.claim_holds
    assert "no loss seen, but 14 % could hide behind 20 items" in text(choice)


def test_undecoded_answers_are_mentioned() -> None:
    p = profile([record(SHORT, [None, *scores(0)[1:]])])
    assert "1 of 100 answers differ and were not decoded; they count as 0" in text(pick(p))


def test_on_a_machine_it_is_the_fastest_within_the_loss_and_tells_the_break_even() -> None:
    choice = on_machine()
    assert choice.plan == STITCHED
    assert choice.pays
    assert choice.predicted_ttft_seconds is not None
    assert choice.full_ttft_seconds is not None
    assert choice.predicted_ttft_seconds < choice.full_ttft_seconds
    assert choice.break_even_prefix_tokens is not None
    assert 1 < choice.break_even_prefix_tokens < 1000
    assert f"pays from {choice.break_even_prefix_tokens} prefix tokens on" in text(choice)
    assert "full prefill 0.0" in text(choice)


def test_below_the_break_even_length_nothing_is_reused() -> None:
    break_even = on_machine().break_even_prefix_tokens
    assert break_even is not None
    p = small_profile()
    at = pick(p, calibration=FAST_LOAD, prefix_tokens=break_even)
    below = pick(p, calibration=FAST_LOAD, prefix_tokens=break_even - 1)
    assert at.reuses
    assert not below.reuses
    assert (below.pays, below.bound_by) == (False, "break_even")
    assert below.break_even_prefix_tokens == break_even
    assert f"pays from {break_even} prefix tokens on" in text(below)
    assert "full prefill is faster than any good enough reuse" in text(below)


def test_a_link_too_slow_to_ever_pay_is_named() -> None:
    slow = dataclasses.replace(FAST_LOAD, prefix_seconds_per_token_squared=0)
    choice = pick(small_profile(), calibration=slow, bandwidth_bytes_per_second=1e4)
    assert (choice.plan, choice.bound_by) == (FULL, "break_even")
    assert choice.break_even_prefix_tokens is None
    assert "never pays on this machine and link" in text(choice)


def test_with_an_slo_it_is_the_least_loss_in_time() -> None:
    seconds = {
        m.plan: m.cost
        for m in measure(small_profile(), cost="ttft", workload=Workload(1000, 10, FAST_LOAD))
    }
    assert seconds[NONE] < seconds[STITCHED] < seconds[LONG] < seconds[FULL]
    for plan, bound_by in (
        (STITCHED, "slo_ttft"),
        (LONG, "slo_ttft"),
        (FULL, "nothing"),
    ):
        choice = on_machine(slo_ttft_seconds=seconds[plan])
        assert choice.plan == plan
        assert choice.meets_slo
        assert choice.bound_by == bound_by


def test_an_slo_that_only_lossy_plans_meet_is_reported_with_both_sides() -> None:
    seconds = on_machine(max_loss=100).chosen.cost
    choice = on_machine(slo_ttft_seconds=seconds)
    assert (choice.plan, choice.bound_by) == (STITCHED, "slo_ttft")
    assert choice.meets_slo is False
    assert choice.fast_reuse is not None
    assert choice.fast_reuse.plan == NONE
    assert "no plan meets both" in text(choice)
    assert "[0,0) loses least: 60 %" in text(choice)


def test_an_slo_that_nothing_meets_is_reported() -> None:
    choice = on_machine(slo_ttft_seconds=1e-6)
    assert (choice.plan, choice.meets_slo, choice.fast_reuse) == (STITCHED, False, None)
    assert "no plan takes 1e-06 s or less" in text(choice)


def test_of_several_files_the_one_with_the_best_plan_is_picked_from() -> None:
    """Two layers copied in one file, one stitched in the other, which loses more."""
    copied = profile([record(NONE, scores(60)), record(ReusePlan.of(1, 3), scores(0))])
    trained = profile(
        [record(NONE, scores(60)), record(STITCHED, scores(4)), record(FULL, scores(0))]
    )
    evidence = [
        Evidence(Path(name), each, True, "")
        for name, each in (("copied", copied), ("trained", trained))
    ]

    def picked(max_loss: float, slo: float | None = None) -> tuple[str, ReusePlan]:
        machine = None if slo is None else FAST_LOAD
        for order in (evidence, evidence[::-1]):
            found, choice = pick_among(
                order, lambda each: pick(each, max_loss, slo, None, 1000, 10, machine)
            )
        return str(found.path), choice.plan

    assert picked(5) == ("trained", STITCHED)
    assert picked(1) == ("copied", ReusePlan.of(1, 3))
    # With time to spare, less loss is better than less time.
    assert picked(5, slo=100) == ("copied", ReusePlan.of(1, 3))
    # Where nothing is fast enough, the fastest within the loss.
    assert picked(5, slo=1e-6) == ("trained", STITCHED)


def test_limits_without_a_machine_or_sense_are_refused() -> None:
    p = small_profile()
    for options in ({"slo_ttft_seconds": 1.0}, {"bandwidth_bytes_per_second": 1e9}):
        with pytest.raises(CalibrationError, match="droidkv calibrate"):
            pick(p, **options)  # type: ignore[arg-type]
    for impossible in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ProfileError, match="largest loss"):
            pick(p, max_loss=impossible)
    with pytest.raises(ProfileError, match="measured in kl here, which has no default"):
        pick(p, objective="kl")
    with pytest.raises(ProfileError, match="SLO > 0"):
        pick(p, slo_ttft_seconds=0.0, calibration=FAST_LOAD)
    with pytest.raises(ProfileError, match="at least 1 token, got 0 and 10"):
        pick(p, prefix_tokens=0)
    hopeless = small_profile(items=tuple(item(i, full_score=0.0) for i in range(NUM_ITEMS)))
    with pytest.raises(ProfileError, match="scores 0 on all"):
        pick(hopeless)


def test_one_item_allows_no_claim() -> None:
    one = profile(
        [
            record(ReusePlan.of(0, 0), [1.0], kl=0.1),
            record(ReusePlan.of(0, 4), [1.0]),
        ],
        items=(item(0),),
        stitch=None,
    )
    choice = pick(one, max_loss=0.2, objective="kl")
    assert (choice.reuses, choice.claim_holds) == (True, False)
    assert any("one prefix says nothing" in line for line in choice.message)


@pytest.mark.parametrize("num_prefixes", [1, 4, 40])
def test_items_over_one_prefix_count_as_one(num_prefixes: int) -> None:
    n = 120
    items = [dataclasses.replace(item(i), prefix_digest=sha(i % num_prefixes)) for i in range(n)]
    many = profile(
        [record(ReusePlan.of(0, 0), [1.0] * n), record(ReusePlan.of(0, 4), [1.0] * n)],
        items=tuple(items),
        stitch=None,
    )
    choice = pick(many, max_loss=10)
    assert choice.lost_items == (0, num_prefixes)
    assert choice.claim_holds == (num_prefixes == 40)  # 7 % of the prefixes could be spoiled
    halves = loss_of_such_picks(many, "score", 10)
    assert (halves is None) == (num_prefixes == 1)


def test_a_choice_survives_json() -> None:
    table = json.loads(json.dumps(on_machine(slo_ttft_seconds=1.0).to_json()))
    assert table["plan"] == "[0,4)"
    assert table["num_items"] == NUM_ITEMS
    assert table["meets_slo"] is True
    assert table["message"]


limits = st.floats(0, 120)


@settings(deadline=None, max_examples=60)
@given(limits, st.none() | st.floats(1e-4, 0.2), st.integers(1, 4000), st.floats(5, 12))
def test_a_choice_keeps_its_limits_and_nothing_better_exists(
    max_loss: float, slo: float | None, n: int, log_bandwidth: float
) -> None:
    p = smooth_profile(num_layers=4, num_items=12)
    bandwidth = 10**log_bandwidth
    choice = pick(p, max_loss, slo, bandwidth, n, calibration=FAST_LOAD)
    assert choice == pick(p, max_loss, slo, bandwidth, n, calibration=FAST_LOAD)
    points = measure(p, cost="ttft", workload=Workload(n, 10, FAST_LOAD, bandwidth))
    assert choice.loss <= max_loss
    assert choice.chosen.cost <= choice.full.cost
    good = [m for m in points if m.loss <= max_loss]
    in_time = [m for m in good if slo is not None and m.cost <= slo]
    if slo is None or not in_time:
        assert choice.chosen.cost == min(m.cost for m in good)
        assert choice.meets_slo is (None if slo is None else False)
    else:
        assert choice.loss == min(m.loss for m in in_time)
        assert choice.meets_slo
    if slo is None and choice.reuses:
        assert choice.plan in {m.plan for m in pareto_front(points)}
