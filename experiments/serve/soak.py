"""Many mixed requests on one receiver's engine: every answer checked, memory watched.

    make install-serve
    .venv-serve/bin/python experiments/serve/soak.py --requests 2000

A sender's engine, in a process of its own, stores 40 prompts in a folder through LMCache; some of
the stored objects are then damaged. The receiver's engine answers plain requests and requests at
many plans, well-formed or not, with few blocks (preemption) and few tokens a step (chunked
prefill); some are aborted on the way. Every finished answer is compared with the Hugging Face
engine's: at the plan if the audit line says that it was carried out, else by full prefill.
Exits with 1 on a mismatch, an unfinished request, a leak of blocks, or memory that grows.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import shlex
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
from serve.engine_process import run_engine
from serve.engines import (
    BLOCK,
    CHUNK,
    LAYERS,
    TOLERANCE,
    Answer,
    Engine,
    Models,
    make_models,
    reference,
    sampling_params,
    token_ids,
)

from droidkv.provenance import provenance
from droidkv.serve.keys import chunk_hashes

NUM_PROMPTS, NUM_DAMAGED, MOST_NEW, IN_FLIGHT = 40, 4, 24, 12
GOOD_PLANS = ["none", "all", "[0,2)", "[2,4)", "[3,5)", "[2,3)", "[1,5)", "[2,4)+stitch"]
BAD_PLANS = ["[4,9)", "first", "[0,2)+stitch"]
MOST_GROWTH_PERCENT = 2.0


@dataclass
class Wanted:
    """One request under way."""

    prompt: int
    plan: str | None
    new: int
    abort_at: int | None
    first: torch.Tensor | None = None


def prompts_of(seed: int) -> list[list[int]]:
    """Prompts of many lengths, a third of which begin like another one."""
    rng, prompts = random.Random(seed), list[list[int]]()
    for index in range(NUM_PROMPTS):
        borders = [CHUNK * k + more for k in (1, 2, 3) for more in (0, 1)] + [4 * BLOCK]
        length = rng.choice([rng.randint(60, 450), *borders])
        fresh = token_ids(length, seed=1000 * seed + index)
        shared = rng.choice(prompts)[: rng.randint(0, length - 1)] if index % 3 == 2 else []
        prompts.append(shared + fresh[len(shared) :])
    return prompts


def damage(folder: Path, prompts: list[list[int]]) -> int:
    """Flip a bit in every object of the last chunk of some prompts."""
    longest = sorted(prompts, key=len)[-NUM_DAMAGED:]
    marks = [bytes.fromhex(chunk_hashes(prompt, CHUNK)[-1]) for prompt in longest]
    damaged = 0
    for path in folder.glob("*.data"):
        whole = path.read_bytes()
        if any(mark in whole[:256] for mark in marks):
            path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
            damaged += 1
    return damaged


class Traffic:
    """The receiver's engine, what is under way on it, and what came of it."""

    def __init__(self, models: Models, engine: Engine, prompts: list[list[int]], seed: int) -> None:
        self.engine, self.core = engine, engine.llm.llm_engine
        self.models, self.prompts = models, prompts
        self.rng = random.Random(seed)
        self.references: dict[tuple[int, str | None, int], Answer] = {}
        self.under_way: dict[str, Wanted] = {}
        self.finished: dict[str, tuple[Wanted, Answer]] = {}
        self.num_started = self.num_steps = self.num_aborted = self.num_checked = 0
        self.mismatches: list[dict[str, Any]] = []
        self.largest_difference = 0.0
        self.reasons: Counter[str] = Counter()
        self.read_lines = 0

    def start_one(self) -> None:
        kind = self.rng.random()
        plan = None if kind < 0.25 else self.rng.choice(BAD_PLANS if kind > 0.95 else GOOD_PLANS)
        wanted = Wanted(
            self.rng.randrange(NUM_PROMPTS),
            plan,
            self.rng.randint(1, MOST_NEW),
            self.num_steps + self.rng.randint(1, 8) if self.rng.random() < 0.04 else None,
        )
        name = f"soak{self.num_started}"
        self.num_started += 1
        self.under_way[name] = wanted
        prompt = {"prompt_token_ids": self.prompts[wanted.prompt]}
        self.core.add_request(name, prompt, sampling_params(plan, wanted.new))

    def step(self) -> None:
        self.num_steps += 1
        for name, wanted in list(self.under_way.items()):
            if wanted.abort_at == self.num_steps:
                self.core.abort_request([name])
                del self.under_way[name]
                self.num_aborted += 1
        for output in self.core.step():
            wanted = self.under_way.get(output.request_id)
            if wanted is None or not output.finished:
                continue
            (sample,) = output.outputs
            first = sample.logprobs[0]
            logprobs = torch.tensor([first[index].logprob for index in range(len(first))])
            del self.under_way[output.request_id]
            self.finished[output.request_id] = (wanted, (logprobs, list(sample.token_ids)))

    def check(self) -> None:
        """Compare what has finished since the last time, by its audit line."""
        with self.engine.audit.open() as file:
            lines = file.readlines()[self.read_lines :]
        self.read_lines += len(lines)
        for record in map(json.loads, lines):
            # vLLM appends to the names that it is given.
            name = record["request_id"].partition("-")[0]
            self.reasons[record["reason"] or "reused"] += 1
            if name not in self.finished:
                continue  # aborted
            wanted, answer = self.finished.pop(name)
            plan, prefix = None, 0
            if record["reason"] is None:
                plan, prefix = wanted.plan, record["local_tokens"] + record["advertised_tokens"]
            theirs = self.reference(wanted.prompt, plan, prefix)
            difference = float((answer[0] - theirs[0]).abs().max())
            self.largest_difference = max(self.largest_difference, difference)
            self.num_checked += 1
            if difference > TOLERANCE or answer[1] != theirs[1][: wanted.new]:
                self.mismatches.append({**asdict(wanted), "first": None, "record": record})

    def reference(self, prompt: int, plan: str | None, prefix: int) -> Answer:
        key = (prompt, plan, prefix)
        if key not in self.references:
            self.references[key] = reference(
                self.models, self.prompts[prompt], plan, MOST_NEW, prefix or None
            )
        return self.references[key]


def soak(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """What came of it, as JSON values."""
    began = time.monotonic()
    models, prompts = make_models(folder), prompts_of(args.seed)
    objects = folder / "objects"
    objects.mkdir()
    # The receiver's memory holds a tenth of what is stored, so that it evicts all the time.
    address = f"fs://{objects}?cpu_gib=0.005"
    spec = {
        "role": "sender",
        "store": f"fs://{objects}?cpu_gib=0.1",
        "options": {},
        "extra": {},
        "batches": [(prompts, [None] * len(prompts))],
    }
    sent = run_engine(folder, spec, {})
    assert sent.returncode == 0, sent.stderr[-3000:]
    num_stored, num_damaged = len(list(objects.glob("*.data"))), damage(objects, prompts)
    engine = Engine(folder, "receiver", address)
    traffic = Traffic(models, engine, prompts, args.seed)
    for index in range(NUM_PROMPTS):  # so that memory stays flat when the references are all there
        for plan in (None, *GOOD_PLANS):
            if plan != "all":
                whole = (len(prompts[index]) - 1) // CHUNK * CHUNK
                traffic.reference(index, plan if whole else None, whole if plan else 0)
    scheduler = engine.scheduler()
    preempt, preempted = scheduler._preempt_request, Counter[str]()

    def counting(request: Any, *others: Any, **named: Any) -> Any:
        preempted["all"] += 1
        return preempt(request, *others, **named)

    scheduler._preempt_request = counting
    process, memory, threads = psutil.Process(), list[float](), list[int]()
    answering = time.monotonic()
    while traffic.num_started < args.requests or traffic.under_way:
        most = traffic.rng.randint(1, IN_FLIGHT)
        while traffic.num_started < args.requests and len(traffic.under_way) < most:
            traffic.start_one()
            if traffic.num_started % (args.requests // 40) == 0:
                traffic.check()
                gc.collect()
                memory.append(round(process.memory_info().rss / 2**20, 1))
                threads.append(threading.active_count())
        traffic.step()
    answering = time.monotonic() - answering
    while engine.llm.llm_engine.has_unfinished_requests():
        traffic.step()
    traffic.check()
    half = scheduler.connector._receiver_scheduler
    leftovers = {
        "requests": len(half._requests) + len(half._loading),
        "loads": len(engine.worker()._receiver._waiting),
        "unchecked": len(traffic.finished),
    }
    engine.forget()  # fails if a block is still held
    engine.stop()
    quarter = len(memory) // 4
    early, late = max(memory[quarter : 2 * quarter]), max(memory[-quarter:])
    return {
        "requests": traffic.num_started,
        "checked": traffic.num_checked,
        "aborted": traffic.num_aborted,
        "mismatches": len(traffic.mismatches),
        "first_mismatches": traffic.mismatches[:5],
        "largest_logprob_difference": traffic.largest_difference,
        "reasons": dict(sorted(traffic.reasons.items())),
        "preemptions": preempted["all"],
        "stored_objects": num_stored,
        "damaged_objects": num_damaged,
        "leftovers": leftovers,
        "rss_mib": memory,
        "rss_growth_percent": round(100 * (late / early - 1), 2),
        "threads": threads,
        "settings": {
            "layers": LAYERS,
            "chunk_tokens": CHUNK,
            "block_tokens": BLOCK,
            "new_tokens": [1, MOST_NEW],
            "in_flight": IN_FLIGHT,
            "store": "fs, 0.005 GiB of memory",
        },
        "answering_seconds": round(answering, 1),
        "provenance": asdict(
            provenance(
                "python " + shlex.join(sys.argv),
                args.seed,
                "cpu",
                "float32",
                round(time.monotonic() - began, 1),
            )
        ),
    }


def main() -> int:
    """Run it, write the report, and say whether all is well."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        report = soak(args, Path(folder))
    text = json.dumps(report, indent=2)
    if args.output is not None:
        args.output.write_text(text + "\n")
    print(text)
    is_good = (
        report["mismatches"] == 0
        and not any(report["leftovers"].values())
        and report["checked"] + report["aborted"] == report["requests"]
        and report["rss_growth_percent"] <= MOST_GROWTH_PERCENT
    )
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
