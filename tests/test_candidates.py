from __future__ import annotations

from made_profiles import profile, record, smooth_profile

from droidkv.candidates import plans_to_confirm
from droidkv.plan import ReusePlan


def plan(start: int, stop: int) -> ReusePlan:
    return ReusePlan.of(start, stop)


LUCKY = profile(
    [
        record(plan(0, 0), [0.0] * 4, kl=1.0),
        record(plan(3, 4), [0.0, 0.0, 0.0, 1.0], kl=0.9),
        record(plan(2, 3), [1.0] * 4, kl=0.8),
        record(plan(2, 4), [1.0] * 4, kl=0.1),
        record(plan(1, 4), [1.0] * 4, kl=0.01),
        record(plan(0, 4), [1.0] * 4, kl=0.0),
    ]
)


def test_safer_plans_than_the_first_that_lost_nothing_are_confirmed_too() -> None:
    # The frontier by score ends at [2,3), that by KL at the nearly exact [1,4).
    kept = {plan(0, 0), plan(2, 3), plan(2, 4), plan(1, 4)}
    assert set(plans_to_confirm(LUCKY, "score")) == kept


def test_plans_that_surely_lose_too_much_are_left_out() -> None:
    kept = {plan(2, 3), plan(2, 4), plan(1, 4)}
    assert set(plans_to_confirm(LUCKY, "score", max_loss=5.0)) == kept
    kept = {plan(2, 4), plan(1, 4), plan(0, 4)}
    assert set(plans_to_confirm(LUCKY, "kl", max_loss=0.2)) == kept


def test_both_families_and_copying_alone_are_confirmed() -> None:
    operators = {each.operator for each in plans_to_confirm(smooth_profile(8), "score")}
    assert operators == {"copy", "stitch"}
