"""What every sampler must do in a search, by name. A new one is tested by being registered."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest
from made_tables import made_table

from droidkv.errors import MissingExtraError, PlanError
from droidkv.plan import Operator, ReusePlan
from droidkv.search import (
    SAMPLERS,
    BudgetedSearch,
    ConfidentRace,
    NoRace,
    RacingRule,
    SearchSettings,
    SearchSpace,
    SureRace,
    regret,
)

NUM_LAYERS = 10
RACES = [NoRace(), SureRace(), ConfidentRace()]
NEEDS = {"gp": "scipy"}
# A second or more for each plan it proposes.
SLOW = {"gp"}


@pytest.fixture(
    params=[
        pytest.param(name, marks=pytest.mark.slow if name in SLOW else ())
        for name in sorted(SAMPLERS)
    ]
)
def sampler(request: pytest.FixtureRequest) -> Iterator[str]:
    name: str = request.param
    if name in NEEDS and importlib.util.find_spec(NEEDS[name]) is None:
        with pytest.raises(MissingExtraError, match=NEEDS[name]):
            BudgetedSearch(SearchSpace(4), made_table(4), 6, SearchSettings(sampler=name))
        pytest.skip(f"{name} needs {NEEDS[name]}")
    yield name


@pytest.mark.parametrize("race", RACES, ids=lambda race: type(race).__name__)
@pytest.mark.parametrize("operators", [("copy",), ("copy", "stitch")], ids=str)
def test_what_it_finds_is_the_tables_and_no_more_than_paid_for(
    sampler: str, race: RacingRule, operators: tuple[Operator, ...]
) -> None:
    table = made_table(NUM_LAYERS, operators=operators)
    space = SearchSpace(NUM_LAYERS, operators)
    settings = SearchSettings(sampler=sampler, racing=race)
    budget = table.num_pairs // 3
    result = BudgetedSearch(space, table, table.num_items, settings).run(budget)

    assert len(table.calls) == len(set(table.calls)), "nothing is evaluated twice"
    assert result.num_evaluations == result.used == len(table.calls)
    assert budget <= result.used < budget + table.num_items
    found = {each.plan: each.drifts for each in result.found}
    assert found == {plan: table.rows[plan] for plan in found}
    assert {space.empty, space.full} <= found.keys()
    assert not found.keys() & result.lost.keys()
    assert all(items < table.num_items for items in result.lost.values())
    if isinstance(race, NoRace):
        assert not result.lost


@pytest.mark.parametrize("race", RACES[:2], ids=lambda race: type(race).__name__)
def test_with_budget_enough_the_frontier_is_exact(sampler: str, race: RacingRule) -> None:
    table = made_table(6)
    settings = SearchSettings(sampler=sampler, racing=race)
    result = BudgetedSearch(SearchSpace(6), table, table.num_items, settings).run(10**9)
    assert len(result.found) + len(result.lost) == len(table.rows)
    exact = table.curve(6)
    curve = table.curve(6, plans=[each.plan for each in result.found])
    lost_nothing = regret(curve, exact, 0.05 * exact[0], 1e-6)
    assert lost_nothing.hypervolume_ratio == pytest.approx(1)
    assert lost_nothing.layers_gap == 0


def test_the_same_seed_gives_the_same_search(sampler: str) -> None:
    calls = []
    for seed in (1, 1, 2):
        table = made_table(NUM_LAYERS)
        settings = SearchSettings(sampler=sampler, seed=seed)
        BudgetedSearch(SearchSpace(NUM_LAYERS), table, table.num_items, settings).run(150)
        calls.append(table.calls)
    assert calls[0] == calls[1] != calls[2]


def test_it_respects_the_granularity(sampler: str) -> None:
    table = made_table(7)
    space = SearchSpace(7, granularity=3)
    result = BudgetedSearch(space, table, 6, SearchSettings(sampler=sampler)).run(10**9)
    assert {each.plan for each in result.found} | result.lost.keys() == set(space.plans)


def test_it_takes_first_plans_up_first(sampler: str) -> None:
    table = made_table(NUM_LAYERS)
    first = [ReusePlan.of(3, 7), ReusePlan.of(2, 9)]
    settings = SearchSettings(sampler=sampler, racing=NoRace())
    search = BudgetedSearch(SearchSpace(NUM_LAYERS), table, 6, settings, first_plans=first)
    search.run(24)
    taken = list(dict.fromkeys(plan for plan, _ in table.calls))
    assert taken == [ReusePlan.of(0, 0), ReusePlan.of(0, NUM_LAYERS), *first]


def test_a_sampler_that_learns_beats_random_on_average() -> None:
    """The default must be worth its place; the experiment measures by how much."""
    exact = made_table(16, seed=3).curve(16)
    shares = {}
    for name in ("frontier", "random"):
        results = []
        for seed in range(3):
            table = made_table(16, seed=3)
            settings = SearchSettings(sampler=name, seed=seed)
            found = BudgetedSearch(SearchSpace(16), table, 6, settings).run(0.2 * table.num_pairs)
            curve = table.curve(16, plans=[each.plan for each in found.found])
            results.append(regret(curve, exact, 0.05 * exact[0], 1e-3 * exact[0]))
        shares[name] = sum(each.log_hypervolume_ratio for each in results) / 3
    assert shares["frontier"] > shares["random"] + 0.02


def test_unknown_names_are_refused() -> None:
    with pytest.raises(PlanError, match="Did you mean 'random'"):
        BudgetedSearch(SearchSpace(4), made_table(4), 6, SearchSettings(sampler="randon"))
