"""A receiver's half beside the model: its loads, step by step. No engine here."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from droidkv.serve.connector_plan import Fallback, LoadJob, LoadOrder, LoadReport, Span
from droidkv.serve.load import Load, Timeline
from droidkv.serve.paged_model import PagedModel
from droidkv.serve.store import Store, chunk_keys, deadline_in
from droidkv.serve.threads import background_pool
from droidkv.stitch import StitchMap

_LOAD_THREADS = 4
_POLL_SECONDS = 0.001


@dataclass
class StepResult:
    """What the worker tells the scheduler at the end of a step.

    Attributes:
        finished: Requests whose asynchronous load is over, the failed ones included.
        failed: Of these, those that have to be prefilled.
        invalid_block_ids: Blocks of synchronous loads that failed.
        reports: How each load went that ended in this step.
        suffixes: Timelines of the suffix passes that were to be timed in this step.
    """

    finished: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    invalid_block_ids: set[int] = field(default_factory=set)
    reports: dict[str, LoadReport] = field(default_factory=dict)
    suffixes: dict[str, list[Span]] = field(default_factory=dict)


class ReceiverWorker:
    """Supplies prefixes to the engine's paged cache.

    Args:
        model: The engine's model.
        store: Where the sender's caches are.
        namespace: The sender's.
        order: How loading and recomputing are arranged.
        load_seconds: Longest time a load may take.
        tokens_per_step: Most tokens of waiting requests to recompute in one step.
        stitch: The pair's map.
        timeline: Keep each load's timeline in its report.
    """

    def __init__(
        self,
        model: PagedModel,
        store: Store,
        namespace: str,
        order: LoadOrder = "streamed",
        load_seconds: float = 30.0,
        tokens_per_step: int = 4096,
        stitch: StitchMap | None = None,
        timeline: bool = False,
    ) -> None:
        self._timeline = timeline
        self._model = model
        self._store = store
        self._namespace = namespace
        self._order: LoadOrder = order
        self._load_seconds = load_seconds
        self._tokens_per_step = tokens_per_step
        self._stitch = stitch
        self._now: list[Load] = []
        self._suffixes: dict[str, list[Span]] = {}
        self._passing: list[Timeline] = []
        self._waiting: dict[str, Load] = {}
        self._refused: list[str] = []
        self._pool = background_pool(_LOAD_THREADS, "load")
        self._readers = background_pool(_LOAD_THREADS, "read")

    def begin_step(self, suffixes: Iterable[str]) -> None:
        """First in a step: these requests' part in its forward pass is timed."""
        self._suffixes = {request_id: [] for request_id in suffixes}
        self._passing = [Timeline(spans, is_kept=True) for spans in self._suffixes.values()]

    def start(
        self,
        jobs: Sequence[LoadJob],
        dropped: Iterable[str] = (),
        refused: Iterable[str] = (),
    ) -> None:
        """Start loads, and recompute what this step needs.

        Before the forward pass if the step needs any of these loads, else behind it.
        """
        self._now = []
        self._refused.extend(refused)
        is_refused = bool(jobs) and self._model.weights_changed()
        for job in jobs:
            keys = chunk_keys(self._namespace, job.token_ids, self._store.chunk_tokens)
            load = Load(
                job,
                self._model,
                self._store,
                keys,
                self._readers,
                self._order,
                deadline_in(self._load_seconds),
                self._stitch,
                self._timeline,
            )
            if is_refused:
                load.fail(Fallback.WEIGHTS_CHANGED)
            else:
                self._pool.submit(load.fetch)
            if job.asynchronous:
                self._waiting[job.request_id] = load
            else:
                self._now.append(load)
        for request_id in dropped:
            if request_id in self._waiting:
                self._waiting[request_id].fail(Fallback.ABORTED)
        for load in self._now:
            load.recompute_now()

    def wait_for_layer(self, layer: int) -> None:
        """In a layer of the forward pass, before its attention reads the cache."""
        for load in self._now:
            load.wait_for_layer(layer)
        for timeline in self._passing:
            timeline.begin("suffix", layer)

    def end_step(self, is_idle: bool = False) -> StepResult:
        """After a step's forward pass: recompute for waiting requests, and say what ended.

        Args:
            is_idle: The step had no forward pass, so that the engine would spin until data comes.
        """
        for timeline in self._passing:
            timeline.end()
        result = StepResult(
            finished=set(self._refused), failed=set(self._refused), suffixes=self._suffixes
        )
        self._refused = []
        self._suffixes, self._passing = {}, []
        for load in self._now:
            load.wait_until_done()
            if load.failed:
                load.stop()
                result.invalid_block_ids.update(self._blocks(load.job))
            result.reports[load.job.request_id] = load.report
        self._now = []
        left = self._tokens_per_step
        for load in self._waiting.values():
            left -= load.recompute_some(left)
        for request_id, load in list(self._waiting.items()):
            if not load.is_complete:
                continue
            if not load.failed and self._model.weights_changed():
                load.fail(Fallback.WEIGHTS_CHANGED)
            load.stop()
            del self._waiting[request_id]
            result.finished.add(request_id)
            if load.failed:
                result.failed.add(request_id)
            result.reports[request_id] = load.report
        if is_idle and self._waiting and not result.finished and left == self._tokens_per_step:
            time.sleep(_POLL_SECONDS)
        return result

    def close(self) -> None:
        """Let go of the threads; never waits for a store that does not answer."""
        for load in [*self._now, *self._waiting.values()]:
            load.stop()
        for pool in (self._pool, self._readers):
            pool.shutdown(wait=False, cancel_futures=True)

    def _blocks(self, job: LoadJob) -> Sequence[int]:
        return job.block_ids[: -(-job.stop // self._model.block_tokens)]
