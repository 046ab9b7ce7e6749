"""The accuracy table of one skill: what each receiver answers, on held-out items.

    python experiments/full_share/table.py smollm2-records --items 60

Arms: the base; the ordinary fine-tune on its own KV, on the base's (naive), and at the plan that
`pick` takes from its confirmed profile (loss at most 5 %); PrefillShare; ICaRus. All answer the
same items, greedily. The items are those of the confirmed profile, so they are no items of the
profile that proposed the plan; among the confirmed plans it was chosen on them. Arms that are in
the output already, of the same models and plan, are kept.
"""

from __future__ import annotations

import argparse
import dataclasses
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from droidkv.capture import capture
from droidkv.encode import encode
from droidkv.errors import ProfileError
from droidkv.evaluate import decode_plans
from droidkv.jsonio import read_json, write_json
from droidkv.loading import LoadedModel, load_model
from droidkv.pair import ModelRef, list_pairs, read_pair
from droidkv.plan import ReusePlan
from droidkv.policy import pick
from droidkv.profile import read_profile
from droidkv.profile_job import load_map
from droidkv.provenance import provenance
from droidkv.quality import percentile_interval, resample_weights
from droidkv.stitch import StitchMap
from droidkv.tasks import Item, get_task

HERE = Path(__file__).resolve().parent
PROFILES = HERE.parents[1] / "profiles"
MODES = ("prefillshare", "prefillshare-full", "icarus")


@dataclasses.dataclass(frozen=True)
class Arm:
    """One row of the table: a receiver and the plan it runs."""

    name: str
    model: ModelRef
    plan: ReusePlan
    stitch: StitchMap | None = None


def arms_of(pair_name: str, num_layers: int) -> list[Arm]:
    """The rows that can be measured: those whose pair file is there."""
    pair = read_pair(pair_name)
    none, full = ReusePlan.of(0, 0), ReusePlan.of(0, num_layers)
    confirmed = PROFILES / f"{pair_name}.confirm.json"
    arms = [
        Arm("base", pair.sender, full),
        Arm("plain, own KV", pair.receiver, full),
        Arm("plain, base's KV (naive)", pair.receiver, none),
    ]
    if confirmed.exists():
        profile = read_profile(confirmed)
        plan = pick(profile, max_loss=5).plan
        stitch = load_map(confirmed, profile) if plan.operator == "stitch" else None
        arms.append(Arm(f"plain, {plan}", pair.receiver, plan, stitch))
    for mode in MODES:
        if f"{pair_name}-{mode}" in list_pairs():
            arms.append(Arm(mode, read_pair(f"{pair_name}-{mode}").receiver, none))
    return arms


def main() -> None:
    """Measure the arms that are missing, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pair", help="the pair of the ordinary fine-tune")
    parser.add_argument("--items", type=int, default=60)
    parser.add_argument("--skip", type=int, default=12, help="items that may have chosen the plan")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--arm", action="append", help="only this one; repeatable")
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    output = options.output or HERE / f"{options.pair}.json"
    pair = read_pair(options.pair)
    task = get_task(pair.tasks[0].name, **pair.tasks[0].options)
    items = task.items("eval", options.skip + options.items, options.seed)[options.skip :]
    base = load_model(pair.sender)
    key = {"pair": options.pair, "task": task.name, "seed": options.seed, "skip": options.skip}
    key |= {"ids": [item.id for item in items], "metric": task.metric}
    table: dict[str, Any] = read_json(output, ProfileError) if output.exists() else {**key}
    if {name: table.get(name) for name in key} != key:
        sys.exit(f"{output} is of other items; remove it or name another output")
    rows: dict[str, Any] = table.setdefault("arms", {})
    for arm in arms_of(options.pair, base.model.num_layers):
        if options.arm and arm.name not in options.arm:
            continue
        started = time.monotonic()
        model = load_model(arm.model)
        of = {"plan": str(arm.plan), "adapter": model.fingerprint.adapter}
        of |= {"weights": model.fingerprint.weights}
        if of.items() <= rows.get(arm.name, {}).items():
            continue
        scores = []
        for done, item in enumerate(items, start=1):
            scores.append(
                answer(base, model, arm, item, task.max_new_tokens, pair.chat, task.score)
            )
            print(f"{arm.name}: {done}/{len(items)}, mean {np.mean(scores):.3f}", file=sys.stderr)
        made = provenance(
            shlex.join(["python", *sys.argv]),
            options.seed,
            "cpu",
            "float32",
            time.monotonic() - started,
        )
        rows[arm.name] = {
            **of,
            "scores": scores,
            "provenance": dataclasses.asdict(made),
        }
        summarise(rows)
        write_json(output, table)
    print(f"n = {len(items)}, {task.metric}; 95 % bootstrap intervals; loss paired, in points")
    for name, row in rows.items():
        lost = ""
        if "loss_points" in row:
            lost = f"{row['loss_points']:.1f} [{row['loss_low']:.1f}, {row['loss_high']:.1f}]"
        print(f"| {name} | {row['mean']:.3f} [{row['low']:.3f}, {row['high']:.3f}] | {lost} |")


@torch.no_grad()
def answer(
    base: LoadedModel,
    model: LoadedModel,
    arm: Arm,
    item: Item,
    max_new_tokens: int,
    chat: bool,
    score: Callable[[Item, str], float],
) -> float:
    """Score of one arm's greedy answer to one item."""
    encoded = encode(item, model.tokenizer, chat)
    prefix = torch.tensor(encoded.prefix_ids)
    starts = [] if arm.plan.transition is None else [arm.plan.transition]
    (ids,) = decode_plans(
        model.model,
        capture(base.model, prefix[None], hidden_layers=starts),
        prefix,
        torch.tensor(encoded.suffix_ids),
        [arm.plan],
        max_new_tokens,
        model.eos_ids,
        arm.stitch,
    )
    return score(item, model.tokenizer.decode(ids, skip_special_tokens=True).strip())


def summarise(rows: dict[str, Any]) -> None:
    """Means, and paired losses against the ordinary fine-tune on its own KV."""
    for row in rows.values():
        scores = np.array(row["scores"])
        weights = resample_weights(len(scores))
        interval = percentile_interval(weights @ scores)
        row |= {"mean": float(scores.mean()), "low": interval.low, "high": interval.high}
        if plain := rows.get("plain, own KV"):
            losses = 100 * (np.array(plain["scores"]) - scores)
            interval = percentile_interval(weights @ losses)
            row |= {"loss_points": float(losses.mean())}
            row |= {"loss_low": interval.low, "loss_high": interval.high}


if __name__ == "__main__":
    main()
