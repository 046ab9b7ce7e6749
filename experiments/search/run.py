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
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from tables import read_table

from droidkv.plan import ReusePlan
from droidkv.provenance import machine_description
from droidkv.quality import bootstrap_interval
from droidkv.search import (
    BudgetedSearch,
    ConfidentRace,
    DriftTable,
    NoRace,
    RacingRule,
    SearchSettings,
    SearchSpace,
    SureRace,
    additive_plans,
    regret,
)

RACES: dict[str, RacingRule] = {
    "none": NoRace(),
    "sure": SureRace(),
    "confident": ConfidentRace(),
    "confident-1": ConfidentRace(num_errors=1.0),
}
COLUMNS = ("log_hypervolume_ratio", "hypervolume_ratio", "layers_gap")


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
    table, num_layers = read_table(options.table, tuple(options.operators))
    print(
        f"`python {shlex.join(sys.argv)}`; {machine_description()}; {len(table.rows)} plans, "
        f"{table.num_items} items, {table.num_pairs} evaluations in the exact search\n"
    )
    print("| sampler | race | budget | plans found | " + " | ".join(COLUMNS) + " | s per run |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for sampler in options.samplers:
        for race in options.races:
            runs = [
                replay(table, num_layers, sampler, race, seed, options)
                for seed in range(options.seeds)
            ]
            for budget in options.budgets:
                print(_row(sampler, race, budget, [run[budget] for run in runs]), flush=True)
            if options.output:
                with options.output.open("a") as file:
                    for seed, run in enumerate(runs):
                        for budget, row in run.items():
                            key = {"sampler": sampler, "race": race, "seed": seed, "budget": budget}
                            file.write(json.dumps({**key, **row}) + "\n")


def replay(
    table: DriftTable, num_layers: int, sampler: str, race: str, seed: int, options: Any
) -> dict[float, dict[str, float]]:
    """One search up to the largest budget; what it had at each."""
    started = time.monotonic()
    table.calls.clear()
    space = SearchSpace(num_layers, tuple(options.operators))
    settings = SearchSettings(sampler=sampler, racing=RACES[race], seed=seed)
    search = BudgetedSearch(space, table, table.num_items, settings, first_plans=_first(options))
    search.run(max(options.budgets) * table.num_pairs)
    seconds = time.monotonic() - started
    exact = table.curve(num_layers)
    rows = {}
    for budget in options.budgets:
        found = table.completed(int(budget * table.num_pairs))
        curve = table.curve(num_layers, plans=found)
        result = regret(curve, exact, options.threshold * exact[0], floor=1e-3 * exact[0])
        rows[budget] = {**asdict(result), "found": len(found), "seconds": seconds}
    return rows


def _first(options: Any) -> list[ReusePlan]:
    if not options.probe:
        return []
    from droidkv.probe_record import read_probe

    return additive_plans(read_probe(options.probe).mean("reuse_one"), 8, options.operators)


def _row(sampler: str, race: str, budget: float, rows: list[dict[str, float]]) -> str:
    cells = [sampler, race, f"{budget:.0%}", f"{statistics.mean(r['found'] for r in rows):.0f}"]
    for column in COLUMNS:
        values = [row[column] for row in rows]
        cells.append(f"{np.mean(values):.3f} {bootstrap_interval(values)}")
    cells.append(f"{statistics.mean(r['seconds'] for r in rows):.1f}")
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    main()
