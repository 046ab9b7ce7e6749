"""What the connector costs a request that matches nothing, beside what two like engines differ by.

    make install-serve
    .venv-serve/bin/python experiments/serve/no_match.py > experiments/serve/no-match.json

Each restart starts three engines of the receiver's model: two without the connector and one with
it, in an order drawn anew. They take turns on prompts that no store has. A restart gives one
median ratio per comparison; the intervals are over restarts, since engines that run the same code
differ by more than their requests do.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from droidkv.pair import read_pair
from droidkv.provenance import provenance
from droidkv.quality import NUM_RESAMPLES, percentile_interval
from droidkv.servable import servable_folder
from droidkv.serve.settings import ServeSettings
from droidkv.serve.ttft_engines import EngineProcess, whole_config

COMPARED = {"connector": ("receiver", "plain"), "none": ("again", "plain")}
FIRST_TOKEN_ID, SUFFIX_TOKENS = 3, 32


def restart(arguments: argparse.Namespace, index: int, folder: Path) -> dict[str, list[float]]:
    """Seconds to the first token of each engine, prompt by prompt, the first prompt left out."""
    pair, rng = read_pair(arguments.pair), random.Random(1000 * arguments.seed + index)
    models = {
        side: str(servable_folder(getattr(pair, side), "float32").absolute())
        for side in ("sender", "receiver")
    }
    settings = ServeSettings(
        role="receiver",
        store=f"fs://{folder}/store",
        sender=models["sender"],
        allow_unprofiled=True,
        audit=str(folder / "audit.jsonl"),
    )
    setup = {
        "folder": models["receiver"],
        "dtype": "float32",
        "max_tokens": arguments.tokens + SUFFIX_TOKENS + 8,
    }
    transfers = {"plain": None, "again": None, "receiver": whole_config(settings)}
    names = rng.sample(list(transfers), len(transfers))
    with ExitStack() as running:
        engines = {}
        for name in names:
            engines[name] = EngineProcess(name, {**setup, "transfer": transfers[name]}, folder)
            running.callback(engines[name].stop)
        seconds: dict[str, list[float]] = {name: [] for name in names}
        for turn in range(arguments.prompts + 1):
            prompt = [
                rng.randrange(FIRST_TOKEN_ID, arguments.vocabulary)
                for _ in range(arguments.tokens + SUFFIX_TOKENS)
            ]
            for name in rng.sample(names, len(names)):
                asked = {"plan": arguments.plan} if name == "receiver" else None
                answer = engines[name].generate(prompt, f"{index}-{turn}", asked)
                if turn:
                    seconds[name].append(answer["seconds"])
    return seconds


def compared(restarts: list[dict[str, list[float]]]) -> dict[str, Any]:
    """Percent by which the first is slower than the second: one median per restart, their mean."""
    result = {}
    for name, (first, second) in COMPARED.items():
        percents = [
            100 * (median(a / b for a, b in zip(each[first], each[second], strict=True)) - 1)
            for each in restarts
        ]
        drawn = np.random.default_rng(0).choice(percents, (NUM_RESAMPLES, len(percents)))
        interval = percentile_interval(drawn.mean(axis=1))
        result[name] = {
            "percent": round(float(np.mean(percents)), 2),
            "percent_low": round(interval.low, 2),
            "percent_high": round(interval.high, 2),
            "percent_by_restart": [round(each, 2) for each in percents],
        }
    return result


def main() -> None:
    """Run the restarts and print the result as JSON."""
    began = time.perf_counter()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pair", default="smollm2-records")
    parser.add_argument("--plan", default="[10,20)")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--prompts", type=int, default=12, help="timed in each restart")
    parser.add_argument("--restarts", type=int, default=6)
    parser.add_argument("--vocabulary", type=int, default=49_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    restarts = []
    for index in range(arguments.restarts):
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            restarts.append(restart(arguments, index, Path(folder)))
        print(f"restart {index + 1}/{arguments.restarts}", file=sys.stderr)
    print(
        json.dumps(
            {
                "settings": vars(arguments),
                **compared(restarts),
                "seconds": [
                    {name: [round(each, 4) for each in taken] for name, taken in one.items()}
                    for one in restarts
                ],
                "provenance": asdict(
                    provenance(
                        " ".join(["python", *sys.argv]),
                        arguments.seed,
                        "cpu",
                        "float32",
                        time.perf_counter() - began,
                    )
                ),
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
