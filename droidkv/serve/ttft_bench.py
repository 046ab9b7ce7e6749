"""Time to the first token in vLLM: full prefill against plans, and orders of loading over a link.

Engines with and without the connector are processes of their own that take turns, so that every
ratio is of one run on one machine.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from droidkv.bench.prefill import middle_group
from droidkv.bench.timing import rounded, run_table
from droidkv.costs import ModelShape, plan_bytes
from droidkv.errors import PlanError, ServeError
from droidkv.loading import DTYPES
from droidkv.model_identity import load_config
from droidkv.pair import Pair
from droidkv.plan import ReusePlan
from droidkv.provenance import provenance
from droidkv.quality import NUM_RESAMPLES, percentile_interval
from droidkv.run_folder import Progress, no_progress
from droidkv.serve.audit import record_from_json
from droidkv.serve.connector_plan import LOAD_ORDERS, AuditRecord
from droidkv.serve.link_model import LinkRuns, link_table
from droidkv.serve.opening import check_address
from droidkv.serve.purge import remove_store
from droidkv.serve.settings import DEFAULT_CHUNK_TOKENS
from droidkv.serve.ttft_engines import EngineProcess, timed_engines

LENGTHS = (512, 1024, 2048, 4096)
LINK_TOKENS = 1024
# Load time over compute time; where both are alike, overlapping saves most.
LINK_FACTORS = (0.25, 0.5, 0.8, 1.0, 1.25, 2.0, 4.0)
# Of 30 layers: none, 5, 10, 15.
SHARES = (0.0, 1 / 6, 1 / 3, 1 / 2)
_PAIRS_PER_REPEAT = 4
_FIRST_TOKEN_ID = 3


@dataclass(frozen=True)
class TtftSettings:
    """What to time.

    Attributes:
        folder: For logs, audit file and store; the `audit.jsonl` and `store` in it are removed
            first.
        dtype: Of both models.
        lengths: Prefix lengths.
        suffix_tokens: Behind each prefix.
        layers: Numbers of recomputed layers; none = spread over the model's, or 0 for a receiver
            that was trained to read the sender's KV.
        repeats: Timed runs of each kind; the median counts, one more warms up.
        link_tokens: Prefix length of the link's sweep; 0 = leave it out.
        link_factors: Load time over compute time.
        chunk_tokens: Tokens in one chunk of the store.
        store: Where caches lie; None = a folder, through LMCache's fs://.
        seed: Of the random tokens.
    """

    folder: Path
    dtype: str = "float32"
    lengths: tuple[int, ...] = LENGTHS
    suffix_tokens: int = 32
    layers: tuple[int, ...] = ()
    repeats: int = 5
    link_tokens: int = LINK_TOKENS
    link_factors: tuple[float, ...] = LINK_FACTORS
    chunk_tokens: int = DEFAULT_CHUNK_TOKENS
    store: str | None = None
    seed: int = 0


def bench_ttft(
    pair: Pair,
    settings: TtftSettings,
    command: str = "",
    on_progress: Progress = no_progress,
) -> dict[str, Any]:
    """Time everything; see the module.

    Args:
        pair: The pair whose models are served.
        settings: What to time.
        command: What reproduces the result; kept in it.
        on_progress: Told of each timed run.

    Raises:
        PlanError: A length or a number of layers is out of range, or makes no sense for a receiver
            that was trained to read the sender's KV.
        ServeError: The store's address is wrong, an engine ended, or something was not reused.
        StorageError: An option of the store's address is wrong, or `store` in the folder is none.
    """
    began = time.perf_counter()
    config = load_config(pair.receiver)
    shape = ModelShape.from_config(config.to_dict(), DTYPES[settings.dtype].itemsize)
    is_full_share = pair.reference is not None
    if is_full_share:
        settings = _full_share_settings(pair, settings)
    plans = _plans(settings, shape.num_layers)
    _check_lengths(settings)
    if settings.store is not None:
        check_address(settings.store)
    settings.folder.mkdir(parents=True, exist_ok=True)
    own_store = settings.folder.absolute() / "store"
    remove_store(own_store)  # what is there would not be stored again
    with timed_engines(
        pair,
        settings.folder,
        settings.dtype,
        settings.store or f"fs://{own_store}?cpu_gib=2",
        settings.chunk_tokens,
        max((*settings.lengths, settings.link_tokens)) + settings.suffix_tokens + 16,
        sorted({plan.transition for plan in plans if plan.transition is not None}),
    ) as engines:
        bench = _Bench(settings, shape, engines, on_progress)
        result: dict[str, Any] = {
            "pair": pair.name,
            "num_layers": shape.num_layers,
            "suffix_tokens": settings.suffix_tokens,
            "chunk_tokens": settings.chunk_tokens,
            "num_repeats": settings.repeats,
            "threads": engines["plain"].num_threads,
            "lengths": [bench.length(n, plans) for n in settings.lengths],
            "overheads": [
                # What such a receiver cannot reuse it refuses.
                bench.overheads(n, None if is_full_share else plans[-1])
                for n in sorted(settings.lengths)[:2]
            ],
        }
        if settings.link_tokens:
            result["link"] = bench.link(settings.link_tokens, plans)
    made = provenance(
        command, settings.seed, "cpu", settings.dtype, round(time.perf_counter() - began, 1)
    )
    return result | run_table(made)


class _Bench:
    """The engines, and what is asked of them."""

    def __init__(
        self,
        settings: TtftSettings,
        shape: ModelShape,
        engines: Mapping[str, EngineProcess],
        on_progress: Progress,
    ) -> None:
        self._settings, self._shape, self._engines = settings, shape, engines
        self._vocabulary = shape.vocab_size
        self._random = random.Random(settings.seed)
        self._salts = (f"bench-{number}" for number in count())
        self._steps = count(1)
        self._on_progress = on_progress

    def length(self, num_tokens: int, plans: Sequence[ReusePlan]) -> dict[str, Any]:
        """Full prefill, each plan, and what vLLM takes where its own cache holds the prefix."""
        prefix, suffix = self._tokens(num_tokens), self._tokens(self._settings.suffix_tokens)
        self._store(prefix)
        kinds = ["full", *map(str, plans)]
        seconds: dict[str, list[float]] = {kind: [] for kind in ("local", *kinds)}
        for repeat in range(self._settings.repeats + 1):
            # Of each kind one, in a random order, so that no kind always follows the same one.
            for kind in self._random.sample(kinds, len(kinds)):
                if kind == "full":
                    salt = next(self._salts)
                    taken = {
                        "full": self._ask("plain", prefix + suffix, salt=salt),
                        "local": self._ask("plain", prefix + suffix[::-1], salt=salt),
                    }
                else:
                    taken = {kind: self._reuse(prefix + suffix, num_tokens, {"plan": kind})[0]}
                for each, value in taken.items():
                    seconds[each] += [value] if repeat else []  # the first one warms up
            self._step(f"{num_tokens} tokens", repeat)
        full = median(seconds["full"])
        return {
            "prefix_tokens": num_tokens,
            "full_seconds": rounded(full),
            "full_seconds_all": [rounded(each) for each in seconds["full"]],
            "local": _against(full, seconds["local"]),
            "plans": [
                {
                    "plan": str(plan),
                    "layers": plan.num_recomputed,
                    **_against(full, seconds[str(plan)]),
                }
                for plan in plans
            ],
        }

    def overheads(self, num_tokens: int, plan: ReusePlan | None) -> dict[str, Any]:
        """What a request for a plan that matches nothing (None: no such), and storing, add.

        With the connector and without take turns, each going first every other time.
        """
        num_pairs = _PAIRS_PER_REPEAT * self._settings.repeats
        compared: dict[str, tuple[str, str, dict[str, Any] | None]] = {
            "sender": ("sender", "base", None)
        }
        if plan is not None:
            compared["no_match"] = ("receiver", "plain", {"plan": str(plan)})
        seconds: dict[str, list[float]] = {
            name: [] for pair in compared.values() for name in pair[:2]
        }
        for repeat in range(num_pairs + 1):
            for with_it, without, ask in compared.values():
                prompt = self._tokens(num_tokens + self._settings.suffix_tokens)
                turn = [(with_it, ask), (without, None)]
                for engine, asked in turn if repeat % 2 else reversed(turn):
                    taken = self._ask(engine, prompt, asked)
                    seconds[engine] += [taken] if repeat else []
                    if engine == "sender":  # what it still writes must not slow down the next one
                        self._engines["sender"].flush()
            self._on_progress(f"overheads, {num_tokens} tokens", repeat + 1, num_pairs + 1)
        return {
            "prefix_tokens": num_tokens,
            "num_pairs": num_pairs,
            **{
                kind: _overhead(seconds[with_it], seconds[without])
                for kind, (with_it, without, _) in compared.items()
            },
        }

    def link(self, num_tokens: int, plans: Sequence[ReusePlan]) -> dict[str, Any]:
        """One plan over links of several bandwidths, loaded in each order.

        Runs without a limit take turns with those of each bandwidth: they are what its time is
        compared with, since a machine's speed moves within minutes.
        """
        settings, shape = self._settings, self._shape
        plan = min(
            (each for each in plans if each.num_recomputed > 1),
            key=lambda each: abs(each.num_recomputed - shape.num_layers / 3),
        )
        prefix, suffix = self._tokens(num_tokens), self._tokens(settings.suffix_tokens)
        self._store(prefix)

        def run(order: str, bandwidth: float | None = None) -> tuple[float, AuditRecord]:
            asked = {"plan": str(plan), "order": order}
            return self._reuse(prefix + suffix, num_tokens, asked, bandwidth)

        links = [LinkRuns(None, [run("streamed") for _ in range(settings.repeats + 1)][1:])]
        for factor in settings.link_factors:
            # Of what was measured last, so that load over compute comes out near the factor.
            load = factor * links[-1].compute_seconds
            link = LinkRuns(plan_bytes(shape, plan, num_tokens) / load)
            for repeat in range(settings.repeats):
                link.free.append(run("streamed"))
                for order in LOAD_ORDERS:
                    link.runs[order].append(run(order, link.bytes_per_second))
                self._on_progress(f"ttft, link x{factor:g}", repeat + 1, settings.repeats)
            links.append(link)
        return link_table(shape, plan, num_tokens, settings.suffix_tokens, settings.dtype, links)

    def _store(self, prefix: Sequence[int]) -> None:
        self._ask("sender", [*prefix, _FIRST_TOKEN_ID])
        self._engines["sender"].flush()

    def _ask(
        self,
        engine: str,
        prompt: Sequence[int],
        ask: Mapping[str, Any] | None = None,
        salt: str | None = None,
    ) -> float:
        answer = self._engines[engine].generate(prompt, salt or next(self._salts), ask)
        seconds: float = answer["seconds"]
        return seconds

    def _reuse(
        self,
        prompt: Sequence[int],
        num_tokens: int,
        ask: Mapping[str, Any] | None,
        bandwidth: float | None = None,
    ) -> tuple[float, AuditRecord]:
        answer = self._engines["receiver"].generate(prompt, next(self._salts), ask, bandwidth)
        record = record_from_json(answer["record"], "the engine's audit record")
        if record.reason is not None or record.advertised_tokens != num_tokens:
            raise ServeError(
                f"expected {num_tokens} tokens to be reused by {ask}, got "
                f"{record.advertised_tokens} and the reason {record.reason}; see the logs in "
                f"{self._settings.folder}"
            )
        return answer["seconds"], record

    def _tokens(self, num_tokens: int) -> list[int]:
        return [
            self._random.randrange(_FIRST_TOKEN_ID, self._vocabulary) for _ in range(num_tokens)
        ]

    def _step(self, stage: str, repeat: int) -> None:
        self._on_progress(f"ttft, {stage}", repeat + 1, self._settings.repeats + 1)


def _full_share_settings(pair: Pair, settings: TtftSettings) -> TtftSettings:
    """For a receiver that was trained to read the sender's KV: nothing is recomputed."""
    if any(settings.layers):
        raise PlanError(
            f"expected no recomputed layers for {pair.name}, whose receiver was trained to read "
            f"the sender's KV, got {', '.join(map(str, settings.layers))}; leave --layers out"
        )
    if settings.link_tokens:
        raise PlanError(
            f"expected --link-tokens 0 for {pair.name}, whose receiver was trained to read the "
            f"sender's KV, got {settings.link_tokens}: the sweep over links times recomputing "
            "beside loading, and nothing is recomputed"
        )
    return replace(settings, layers=(0,))


def _plans(settings: TtftSettings, num_layers: int) -> list[ReusePlan]:
    counts = sorted(set(settings.layers or (round(share * num_layers) for share in SHARES)))
    if not counts or counts[0] < 0 or counts[-1] >= num_layers:
        raise PlanError(
            f"expected numbers of recomputed layers from 0 to {num_layers - 1}, got {counts}"
        )
    if settings.link_tokens and counts[-1] < 2:
        raise PlanError("expected a plan of 2 layers or more for the link's sweep, got none")
    return [ReusePlan.of(0, 0) if k == 0 else middle_group(k, num_layers) for k in counts]


def _check_lengths(settings: TtftSettings) -> None:
    for length in (*settings.lengths, settings.link_tokens):
        if length % settings.chunk_tokens or (length < 1 and length != settings.link_tokens):
            raise PlanError(
                f"expected prefixes of whole chunks of {settings.chunk_tokens} tokens, got "
                f"{length}; choose others, or another --chunk-tokens"
            )
    if settings.suffix_tokens < 1 or settings.repeats < 1:
        raise PlanError(
            f"expected at least 1 suffix token and 1 repeat, got {settings.suffix_tokens} and "
            f"{settings.repeats}"
        )


def _against(full: float, seconds: Sequence[float]) -> dict[str, Any]:
    taken = median(seconds)
    return {
        "seconds": rounded(taken),
        "ratio": rounded(full / taken),
        "seconds_all": [rounded(each) for each in seconds],
    }


def _overhead(with_it: Sequence[float], without: Sequence[float]) -> dict[str, Any]:
    """Median of the pairs' ratios, with its 95 % bootstrap interval."""
    percent = 100 * (np.array(with_it) / np.array(without) - 1)
    drawn = np.random.default_rng(0).choice(percent, (NUM_RESAMPLES, len(percent)))
    interval = percentile_interval(np.median(drawn, axis=1))
    return {
        "seconds": rounded(median(with_it)),
        "plain_seconds": rounded(median(without)),
        "overhead_percent": round(float(np.median(percent)), 2),
        "overhead_percent_low": round(interval.low, 2),
        "overhead_percent_high": round(interval.high, 2),
    }
