"""Replay budgeted searches on an exact sweep: regret and evaluations used, no model needed.

    python experiments/search/run.py --table profiles/smollm2-records.json --seeds 20
    python experiments/search/run.py --table tiny --seeds 20
    python experiments/search/run.py --table synthetic:80 --budgets 0.01 0.02 0.05 --seeds 5

Prints one markdown row per sampler, race and budget: means over seeds, 95 % bootstrap intervals.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tables import Replay, read_table

from droidkv.plan import ReusePlan
from droidkv.provenance import machine_description
from droidkv.quality import bootstrap_interval
from droidkv.search import (
    BudgetedSearch,
    ConfidentRace,
    NoRace,
    RacingRule,
    SearchSettings,
    SearchSpace,
    SureRace,
    additive_plans,
    loss_curve,
    regret,
)
from droidkv.search.regret import layers_within

RACES: dict[str, RacingRule] = {
    "none": NoRace(),
    "sure": SureRace(),
    "confident": ConfidentRace(),
    "confident-1": ConfidentRace(num_errors=1.0),
}
COLUMNS = {
    "log_hypervolume_ratio": "area, log KL",
    "hypervolume_ratio": "area, KL",
    "layers_gap": "layers gap, KL",
    "score_layers_gap": "layers gap, score",
    "sweep_passes": "passes / sweep's",
    "seconds": "s per run",
}


def main() -> None:
    """Read the command line, replay, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--table", required=True, help="profile, 'tiny' or 'synthetic:LAYERS'")
    parser.add_argument("--operators", nargs="+", default=["copy"], choices=["copy", "stitch"])
    parser.add_argument(
        "--samplers", nargs="+", default=["random", "grid", "nsga2", "tpe", "frontier"]
    )
    parser.add_argument("--races", nargs="+", default=["sure"], choices=RACES)
    parser.add_argument(
        "--budgets",
        nargs="+",
        type=float,
        default=[0.05, 0.1, 0.2],
        help="shares of the exact search's evaluations",
    )
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument(
        "--threshold",
        type=float,
        default=0.05,
        help="loss allowed, as a share of full reuse's mean KL",
    )
    parser.add_argument("--probe", help="JSON file of `droidkv probe`, to seed the search with")
    parser.add_argument("--output", type=Path, help="JSON lines, one per run and budget")
    options = parser.parse_args()
    target = read_table(options.table, tuple(options.operators))
    table = target.table
    print(
        f"`python {shlex.join(sys.argv)}`; {machine_description()}; "
        f"{len(table.rows)} plans, {table.num_items} items, {table.num_pairs} evaluations in the "
        f"exact search; {options.seeds} seeds\n"
    )
    print("| sampler | race | budget | plans found | " + " | ".join(COLUMNS.values()) + " |")
    print("| --- " * (4 + len(COLUMNS)) + "|", flush=True)
    for sampler in options.samplers:
        for race in options.races:
            runs = [replay(target, sampler, race, seed, options) for seed in range(options.seeds)]
            for budget in options.budgets:
                print(_row(sampler, race, budget, [run[budget] for run in runs]), flush=True)
            if options.output:
                with options.output.open("a") as file:
                    for seed, run in enumerate(runs):
                        for budget, row in run.items():
                            key = {"sampler": sampler, "race": race, "seed": seed, "budget": budget}
                            file.write(json.dumps({**key, **row}) + "\n")


def replay(
    target: Replay, sampler: str, race: str, seed: int, options: Any
) -> dict[float, dict[str, float]]:
    """One search up to the largest budget; what it had at each."""
    started = time.monotonic()
    table, num_layers = target.table, target.num_layers
    table.calls.clear()
    space = SearchSpace(num_layers, tuple(options.operators))
    settings = SearchSettings(sampler=sampler, racing=RACES[race], seed=seed)
    search = BudgetedSearch(space, table, table.num_items, settings, first_plans=_first(options))
    search.run(max(options.budgets) * table.num_pairs)
    seconds = time.monotonic() - started
    exact = table.curve(num_layers)
    # The exact sweep runs each layer once per start and operator it can be entered by.
    sweep_passes = num_layers * (num_layers + 1) / 2 * len(options.operators) * table.num_items
    rows = {}
    for budget in options.budgets:
        num_calls = int(budget * table.num_pairs)
        found = table.completed(num_calls)
        curve = table.curve(num_layers, plans=found)
        result = regret(curve, exact, options.threshold * exact[0], floor=1e-3 * exact[0])
        passes = sum(plan.num_recomputed for plan, _ in table.calls[:num_calls])
        rows[budget] = {
            **asdict(result),
            "found": len(found),
            "sweep_passes": passes / sweep_passes,
            "seconds": seconds,
        }
        if target.score_losses:
            rows[budget]["score_layers_gap"] = _score_gap(target, found)
    return rows


def _score_gap(target: Replay, found: Sequence[ReusePlan], max_percent: float = 5.0) -> int:
    """Layers that the cheapest found plan within 5 % of the score needs beyond the exact one's."""
    assert target.score_losses is not None
    least = []
    for plans in (found, target.table.rows):
        points = ((plan.num_recomputed, target.score_losses[plan]) for plan in plans)
        layers = layers_within(loss_curve(points, target.num_layers), max_percent)
        least.append(target.num_layers if layers is None else layers)
    return least[0] - least[1]


def _first(options: Any) -> list[ReusePlan]:
    if not options.probe:
        return []
    from droidkv.probe_record import read_probe

    return additive_plans(read_probe(options.probe).mean("reuse_one"), 8, options.operators)


def _row(sampler: str, race: str, budget: float, rows: list[dict[str, float]]) -> str:
    cells = [sampler, race, f"{budget:.0%}", f"{statistics.mean(r['found'] for r in rows):.0f}"]
    for column in COLUMNS:
        values = [row[column] for row in rows if column in row]
        if not values:
            cells.append("")
        elif column in ("sweep_passes", "seconds"):
            cells.append(f"{statistics.mean(values):.2g}")
        else:
            cells.append(f"{statistics.mean(values):.3f} {bootstrap_interval(values)}")
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    main()
