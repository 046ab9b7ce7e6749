from __future__ import annotations

import multiprocessing
import os
import signal
import time
from pathlib import Path

import optuna
import pytest
from made_tables import made_table, search_worker
from optuna.trial import TrialState

import droidkv.search.storage
from droidkv.errors import PlanError, ProfileError, StorageError
from droidkv.plan import ReusePlan
from droidkv.search import (
    BudgetedSearch,
    DriftTable,
    ItemDrift,
    Loss,
    NoRace,
    SearchResult,
    SearchSettings,
    SearchSpace,
)
from droidkv.search.base import layer_passes

NUM_LAYERS = 8
SPACE = SearchSpace(NUM_LAYERS)
UNRACED = SearchSettings(racing=NoRace())


def search(
    table: DriftTable, file: Path | None = None, settings: SearchSettings = UNRACED
) -> BudgetedSearch:
    return BudgetedSearch(SPACE, table, table.num_items, settings, file)


def found(result: SearchResult) -> dict[ReusePlan, object]:
    return {each.plan: each.drifts for each in result.found}


def test_a_search_goes_on_where_it_stood(tmp_path: Path) -> None:
    whole = made_table(NUM_LAYERS)
    expected = search(whole).run(72)
    parts = made_table(NUM_LAYERS)
    for budget in (18, 36, 72):
        result = search(parts, tmp_path / "study.db").run(budget)
    assert found(result) == found(expected)
    assert parts.calls == whole.calls


def test_what_an_error_interrupts_is_taken_up_again(tmp_path: Path) -> None:
    table = made_table(NUM_LAYERS)

    def fails(plan: ReusePlan, item: int) -> ItemDrift:
        if len(table.calls) == 40:
            raise KeyboardInterrupt
        return table(plan, item)  # type: ignore[return-value]

    with pytest.raises(KeyboardInterrupt):
        BudgetedSearch(SPACE, fails, 6, UNRACED, tmp_path / "study.db").run(100)
    interrupted = table.calls[-1][0]
    before = search(table, tmp_path / "study.db").result()
    assert before.num_evaluations == 40 and interrupted not in found(before)

    result = search(table, tmp_path / "study.db").run(45)
    assert interrupted in found(result)
    assert len(table.calls) == len(set(table.calls)) == result.num_evaluations


def test_workers_share_one_study(tmp_path: Path) -> None:
    file, table = tmp_path / "study.db", made_table(NUM_LAYERS)
    search(table, file)  # made before, so that both find the baselines queued
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=search_worker, args=(file, n, 60, 0.01)) for n in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(120)
        assert worker.exitcode == 0
    result = search(table, file).result()
    assert found(result) == {plan: table.rows[plan] for plan in found(result)}
    assert 60 <= result.num_evaluations < 60 + 2 * table.num_items
    trials = search(table, file).study.get_trials()
    num_results = sum(key.startswith("item:") for t in trials for key in t.user_attrs)
    assert num_results <= result.num_evaluations + 2, "hardly anything was evaluated twice"
    sharing = [sum(key.startswith("item:") for key in t.user_attrs) for t in trials]
    assert max(sharing) == table.num_items


def test_a_killed_workers_plan_is_taken_up_after_the_grace_period(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, table = tmp_path / "study.db", made_table(NUM_LAYERS)
    search(table, file)
    context = multiprocessing.get_context("spawn")
    worker = context.Process(target=search_worker, args=(file, 0, 10**6, 0.2))
    worker.start()
    deadline = time.monotonic() + 60
    while search(table, file).result().num_evaluations < 3:
        assert time.monotonic() < deadline, "the worker must have begun"
        time.sleep(0.1)
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGKILL)
    worker.join()
    done = search(table, file).result().num_evaluations
    monkeypatch.setattr(droidkv.search.storage, "GRACE_SECONDS", 1)
    time.sleep(2)

    result = search(table, file).run(18)

    assert {SPACE.empty, SPACE.full} <= found(result).keys()
    assert len(table.calls) == result.num_evaluations - done, "what was evaluated is not lost"


def test_the_baselines_are_found_whatever_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even where another worker holds one, and other plans are queued before it."""
    table = made_table(NUM_LAYERS)
    first = [ReusePlan.of(1, 3), ReusePlan.of(2, 5)]
    budgeted = BudgetedSearch(SPACE, table, 6, UNRACED, first_plans=first)
    held = budgeted.study.ask()

    def dies(_: float) -> None:
        budgeted.study.tell(held, state=TrialState.FAIL)

    monkeypatch.setattr("droidkv.search.study.time.sleep", dies)
    result = budgeted.run(1)
    assert found(result).keys() == {*SPACE.baselines}
    assert result.num_evaluations == len(table.calls) == 12
    assert {*first} < found(budgeted.run(200)).keys(), "the others are still to come"


def test_no_baseline_is_lost_in_the_race() -> None:
    """As where the sender is the receiver, and nothing is lost at all."""
    lossless = (ItemDrift(0.0, 0.1, 1.0, True),) * 2
    table = DriftTable(dict.fromkeys(SPACE.plans, lossless))
    result = BudgetedSearch(SPACE, table, 2, SearchSettings()).run(10)
    assert found(result).keys() == {*SPACE.baselines}


def test_a_search_over_something_else_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "study.db"
    table = made_table(NUM_LAYERS)
    identity = {"sender": "a", "items": ("x", "y")}
    BudgetedSearch(SPACE, table, 6, UNRACED, file, identity=identity).run(6)
    BudgetedSearch(SPACE, table, 6, UNRACED, file, identity=identity).run(12)
    with pytest.raises(ProfileError, match=r"identity\.sender: this search has b"):
        BudgetedSearch(SPACE, table, 6, UNRACED, file, identity=identity | {"sender": "b"})
    with pytest.raises(ProfileError, match="num_items"):
        BudgetedSearch(SPACE, table, 5, UNRACED, file, identity=identity)


@pytest.mark.parametrize("content", [b"", b"no database, but long enough to look like one" * 9])
def test_a_file_that_is_no_study(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "study.db"
    file.write_bytes(content)
    if content:
        with pytest.raises(StorageError, match=r"study\.db"):
            search(made_table(NUM_LAYERS), file)
    else:
        search(made_table(NUM_LAYERS), file).run(6)  # SQLite's way to begin a file
    with pytest.raises(StorageError, match="name another file"):
        search(made_table(NUM_LAYERS), file / "below")


def test_a_budget_in_another_unit() -> None:
    table = made_table(NUM_LAYERS)
    cost = layer_passes(NUM_LAYERS, prefix_tokens=100, forced_tokens=10)
    result = BudgetedSearch(SPACE, table, 6, UNRACED, plan_cost=cost).run(150)
    spent = sum(cost(plan) for plan, _ in table.calls)
    assert result.used == pytest.approx(spent)
    assert 150 <= spent < 150 + 6 * cost(SPACE.full)


def test_progress_and_storage_of_ones_own() -> None:
    table, seen = made_table(NUM_LAYERS), []
    storage = optuna.storages.InMemoryStorage()
    search_ = BudgetedSearch(SPACE, table, 6, UNRACED, storage)
    search_.run(30, lambda *step: seen.append(step))
    assert seen[0] == ("search", 0, 30) and seen[-1] == ("search", 30, 30)
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)


def test_other_losses_are_minimised_too() -> None:
    losses: tuple[Loss, ...] = ("disagreement", "top1_error")
    for loss in losses:
        table = made_table(NUM_LAYERS)
        settings = SearchSettings(loss=loss)
        result = BudgetedSearch(SPACE, table, 6, settings).run(10**9)
        exact = table.curve(NUM_LAYERS, loss)
        plans = [each.plan for each in result.found]
        assert table.curve(NUM_LAYERS, loss, plans)[0] == exact[0]
        assert len(result.lost) > 0


def test_a_found_plan_as_a_profile_stores_it() -> None:
    table = made_table(NUM_LAYERS)
    result = search(table).run(12)
    full_scores = [1.0, 0.5, 1.0, 0.0, 1.0, 1.0]
    for each in result.found:
        record = each.record(full_scores)
        assert record.kl == tuple(drift.kl for drift in table.rows[each.plan])
        for score, drift, full in zip(record.score, each.drifts, full_scores, strict=True):
            assert score == (full if drift.agrees else None)


def test_results_that_are_no_numbers_are_refused() -> None:
    broken = ItemDrift(float("nan"), 1.0, 0.0, False)
    budgeted = BudgetedSearch(SPACE, lambda plan, item: broken, 6, UNRACED)
    with pytest.raises(ProfileError, match=r"the plan \[0,0\) on the item 0, got KL nan"):
        budgeted.run(6)
    assert budgeted.result().num_evaluations == 0


def test_no_items_are_refused() -> None:
    with pytest.raises(PlanError, match="at least 1 item"):
        BudgetedSearch(SPACE, made_table(NUM_LAYERS), 0)
