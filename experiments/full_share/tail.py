"""What a PrefillShare receiver loses when the base has read less of a prompt than in training.

    python experiments/full_share/tail.py smollm2-records-prefillshare --items 60

Served in whole chunks or blocks, the end of a prefix is computed by the receiver, which was trained
to compute the question only. Each tail is that many tokens of the prefix; a negative one means that
the base has read so much of the question too ("all": all but the last token).
"""

from __future__ import annotations

import argparse
import dataclasses
import shlex
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from droidkv.capture import capture
from droidkv.encode import encode
from droidkv.evaluate import decode_plans
from droidkv.jsonio import write_json
from droidkv.loading import load_pair
from droidkv.pair import read_pair
from droidkv.plan import ReusePlan
from droidkv.provenance import provenance
from droidkv.quality import percentile_interval, resample_weights
from droidkv.tasks import get_task

HERE = Path(__file__).resolve().parent
TAILS = ("-all", "0", "8", "16", "32", "64", "128")


@torch.no_grad()
def main() -> None:
    """Measure every tail on the same items, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pair", help="a pair that `droidkv train prefillshare` made")
    parser.add_argument("--items", type=int, default=60)
    parser.add_argument("--skip", type=int, default=12, help="as in table.py: the same items")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    pair = read_pair(options.pair)
    task = get_task(pair.tasks[0].name, **pair.tasks[0].options)
    items = task.items("eval", options.skip + options.items, options.seed)[options.skip :]
    base, receiver = load_pair(pair)
    started = time.monotonic()
    scores: dict[str, list[float]] = {tail: [] for tail in TAILS}
    for done, item in enumerate(items, start=1):
        encoded = encode(item, receiver.tokenizer, pair.chat)
        ids, num_prefix = [*encoded.prefix_ids, *encoded.suffix_ids], len(encoded.prefix_ids)
        for tail, found in scores.items():
            read = len(ids) - 1 if tail == "-all" else max(num_prefix - int(tail), 1)
            prefix = torch.tensor(ids[:read])
            (answer,) = decode_plans(
                receiver.model,
                capture(base.model, prefix[None]),
                prefix,
                torch.tensor(ids[read:]),
                [ReusePlan.of(0, 0)],
                task.max_new_tokens,
                receiver.eos_ids,
            )
            text = receiver.tokenizer.decode(answer, skip_special_tokens=True).strip()
            found.append(task.score(item, text))
        print(f"{done}/{len(items)}", file=sys.stderr)
    made = provenance(
        shlex.join(["python", *sys.argv]),
        options.seed,
        "cpu",
        "float32",
        time.monotonic() - started,
    )
    weights = resample_weights(len(items))
    rows: dict[str, Any] = {}
    for tail, found in scores.items():
        interval = percentile_interval(weights @ np.array(found))
        rows[tail] = {"mean": float(np.mean(found)), "low": interval.low, "high": interval.high}
        rows[tail]["scores"] = found
        print(f"| {tail} | {np.mean(found):.3f} [{interval.low:.3f}, {interval.high:.3f}] |")
    table = {
        "pair": options.pair,
        "task": task.name,
        "metric": task.metric,
        "ids": [item.id for item in items],
        "tails": rows,
        "provenance": dataclasses.asdict(made),
    }
    write_json(HERE / f"{options.pair}.tail.json", table)


if __name__ == "__main__":
    main()
