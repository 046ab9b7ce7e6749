from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from droidkv.serve.breaker import Breaker

MOST, REST, LONGEST = 3, 8.0, 20.0
# What happens: time passes, a call wants to be made, one made earlier succeeds or fails.
EVENTS = st.lists(
    st.one_of(
        st.sampled_from(["ask", "succeed", "fail"]),
        st.floats(0.0, 30.0).map(lambda seconds: round(seconds, 1)),
    ),
    max_size=60,
)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def made() -> tuple[Breaker, Clock]:
    clock = Clock()
    return Breaker(MOST, REST, LONGEST, clock), clock


def rest_of(breaker: Breaker, clock: Clock) -> float:
    """Until the next call is allowed, to a tenth of a second."""
    began = clock.now
    while breaker.is_resting():
        clock.now = round(clock.now + 0.1, 1)
    return round(clock.now - began, 1)


@given(EVENTS)
def test_any_course_of_events(events: list[str | float]) -> None:
    """Against the plainest account of the rules."""
    breaker, clock = made()
    failures, rests = 0, 0
    resting_since: float | None = None
    trials: list[float] = []  # while it rests
    for event in events:
        if isinstance(event, float):
            clock.now += event
        elif event == "succeed":
            breaker.succeeded()
            failures, resting_since, trials = 0, None, []
        elif event == "fail":
            breaker.failed()
            failures += 1
            if resting_since is None and failures == MOST:
                resting_since = clock.now
                rests += 1
        else:
            resting = breaker.is_resting()
            is_allowed = breaker.allows()
            assert is_allowed != resting
            if resting_since is None:
                assert is_allowed
            elif is_allowed:
                # One at a time, and never before the rest is over.
                assert clock.now - (trials[-1] if trials else resting_since) >= REST
                trials.append(clock.now)
        assert (resting_since is None) <= (not breaker.is_resting())
    assert (breaker.new_rests() > 0) == (rests > 0)
    # However it went, it is asked again within the longest rest, and a success ends it all.
    clock.now += LONGEST
    assert breaker.allows()
    breaker.succeeded()
    assert all(breaker.allows() for _ in range(5))


@given(st.integers(0, 2), st.integers(0, 5))
def test_only_failures_in_a_row_count(before: int, after: int) -> None:
    breaker, _ = made()
    for _ in range(before):
        breaker.failed()
    breaker.succeeded()
    for _ in range(after):
        breaker.failed()
    assert breaker.is_resting() == (after >= MOST)


def test_failures_of_calls_made_before_the_rest_do_not_lengthen_it() -> None:
    breaker, clock = made()
    for _ in range(MOST):
        breaker.failed()
    clock.now += 1.0
    for _ in range(5):
        breaker.failed()
    assert rest_of(breaker, clock) == REST - 1.0
    assert breaker.new_rests() == 1
    assert breaker.new_rests() == 0


def test_each_failed_trial_doubles_the_rest_up_to_the_longest() -> None:
    breaker, clock = made()
    for _ in range(MOST):
        breaker.failed()
    rests = []
    for _ in range(4):
        rests.append(rest_of(breaker, clock))
        assert breaker.allows() and not breaker.allows()
        breaker.failed()
    assert rests == [8.0, 16.0, 20.0, 20.0]
    clock.now += LONGEST
    assert breaker.allows()
    breaker.succeeded()
    for _ in range(MOST):
        breaker.failed()
    assert rest_of(breaker, clock) == 8.0  # a success makes it begin anew


def test_a_trial_that_nothing_is_heard_of_does_not_rest_the_store_for_ever() -> None:
    breaker, clock = made()
    for _ in range(MOST):
        breaker.failed()
    clock.now += REST
    assert breaker.allows() and not breaker.allows()
    clock.now += REST
    assert breaker.allows()
