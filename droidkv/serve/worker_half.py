"""A receiver's half beside the model: loads and recompute. No engine here.

The engine is behind `PagedModel`, so that all of this runs in tests over plain tensors.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from droidkv.plan import LayerGroup
from droidkv.serve.connector_plan import (
    Fallback,
    LoadJob,
    LoadOrder,
    LoadReport,
    Span,
    SpanKind,
    chunk_pieces,
    slots_of,
)
from droidkv.serve.store import ChunkKey, Store, StoreMiss, chunk_keys, deadline_in
from droidkv.stitch import StitchMap

_LOAD_THREADS = 4
_POLL_SECONDS = 0.001
_GATHERING_SECONDS = 0.01


class PagedModel(Protocol):
    """What the worker half asks of an engine's model and its paged cache.

    Slots are numbers of token places in the paged cache: block times block size plus offset.
    """

    num_layers: int
    block_tokens: int
    kv_shape: tuple[int, int]  # num_kv_heads, head_dim
    hidden_size: int
    dtype: torch.dtype

    def copy_kv(self, layer: int, slots: Tensor) -> Callable[[], tuple[Tensor, Tensor]]:
        """Copy keys and values of some slots now.

        Returns:
            Arranges them, at any time and in any thread: each `[num_kv_heads, num_tokens,
            head_dim]`.
        """

    def write_kv(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Put keys and values `[num_kv_heads, num_tokens, head_dim]` into some slots."""

    def read_hidden(self, layer: int, slots: Tensor) -> Tensor | None:
        """E of some slots, `[num_tokens, hidden_size]`, copied; None if one was never captured."""

    def embed(self, token_ids: Sequence[int]) -> Tensor:
        """Hidden state that enters layer 0, `[num_tokens, hidden_size]`."""

    def recompute(
        self,
        group: LayerGroup,
        hidden: Tensor,
        start: int,
        block_ids: Sequence[int],
        on_layer: Callable[[int], None],
    ) -> None:
        """Run `[num_tokens, hidden_size]` at positions from `start` on through a layer group.

        KV of the group's layers go into the request's blocks; those of tokens before `start` are
        there already. Of the last layer only KV are computed. `on_layer` is called with the number
        of each layer before it runs.
        """

    def weights_changed(self) -> bool:
        """Whether the weights are others than those that the engine started with."""


class PlanFailed(Exception):
    """Ends a load, with the reason."""

    def __init__(self, reason: Fallback) -> None:
        super().__init__(str(reason))
        self.reason = reason


class Timeline:
    """Spans of one load, from two threads; keeps nothing unless asked to.

    Args:
        spans: Where they go.
        is_kept: Whether they are kept.
    """

    def __init__(self, spans: list[Span], is_kept: bool) -> None:
        self._spans = spans
        self._is_kept = is_kept
        self._open: tuple[SpanKind, int | None, float] | None = None

    def add(self, kind: SpanKind, layer: int | None, start: float) -> None:
        """A piece that began at `start`, as `time.time()` has it, and ends now."""
        if self._is_kept:
            self._spans.append(Span(kind, layer, start, time.time()))

    def begin(self, kind: SpanKind, layer: int | None) -> None:
        """The engine's thread turns to a piece; the one before it ends."""
        self.end()
        self._open = (kind, layer, time.time())

    def end(self) -> None:
        """The engine's thread is done with the piece that it began last."""
        if self._open is not None:
            self.add(*self._open)
        self._open = None


class Load:
    """One request's load under way: a thread fetches and writes, the engine's thread recomputes.

    Args:
        job: What to supply.
        model: Where it goes.
        store: Where it comes from.
        keys: The prefix's chunks.
        order: How loading and recomputing are arranged.
        deadline: Moment to give up at.
        stitch: The pair's map, for plans that stitch.
        timeline: Keep a timeline in the report.
    """

    def __init__(
        self,
        job: LoadJob,
        model: PagedModel,
        store: Store,
        keys: Sequence[ChunkKey],
        order: LoadOrder,
        deadline: float,
        stitch: StitchMap | None,
        timeline: bool = False,
    ) -> None:
        self.job = job
        self.report = LoadReport()
        self.timeline = Timeline(self.report.spans, timeline)
        self._model = model
        self._store = store
        self._keys = keys
        self._order = job.order or order
        self._deadline = deadline
        self._stitch = stitch
        self._pieces = chunk_pieces(job.start, job.stop, store.chunk_tokens)
        slots = slots_of(job.block_ids, model.block_tokens, job.start, job.stop)
        lengths = [stop - start for start, stop in (piece.inside for piece in self._pieces)]
        self._slots = torch.split(torch.tensor(slots, dtype=torch.long), lengths)
        group = job.plan.group
        self._reused = [layer for layer in range(model.num_layers) if layer not in group]
        self._arrived = threading.Condition()
        self._num_entered = 0
        self._written = {layer: threading.Event() for layer in self._reused}
        self._done = threading.Event()
        self._hidden: Tensor | None = None
        self._next_token = job.start
        self._writing = threading.Lock()
        self._stopped = False

    @property
    def failed(self) -> bool:
        return self.report.reason is not None

    def fetch(self) -> None:
        """Runs in a thread: E first, then the reused layers from the lowest on."""
        began = time.monotonic()
        try:
            if self.job.plan.transition is not None:
                self._fetch_hidden(self.job.plan.transition)
            else:
                self._enter(self.job.stop - self.job.start)
            unused = self.job.plan.group.layers if self._order == "all_first" else ()
            for layer, pairs in self._fetched([*unused, *self._reused]):
                if layer in self.job.plan.group:
                    continue
                with self._writing:
                    if self._stopped:
                        return
                    for slots, (keys, values) in zip(self._slots, pairs, strict=True):
                        self._model.write_kv(layer, slots, keys, values)
                self._written[layer].set()
        except PlanFailed as failure:
            self.fail(failure.reason)
        except StoreMiss as miss:
            self.fail(Fallback(f"load_{miss.reason}"))
        except Exception:  # nothing that a load may raise is to reach the engine
            self.fail(Fallback.LOAD_BACKEND_DOWN)
        finally:
            self.report.load_seconds = time.monotonic() - began
            self._done.set()
            self._enter(0)
            for event in self._written.values():
                event.set()

    def fail(self, reason: Fallback) -> None:
        """Give up; the first reason stays."""
        self.report.reason = self.report.reason or reason

    def stop(self) -> None:
        """Nothing is written into the request's blocks once this returns."""
        with self._writing:
            self._stopped = True

    def recompute_now(self) -> None:
        """Recompute the whole group, waiting for what it needs first."""
        if not self.job.plan.group or self.failed:
            return
        while not self.failed and self._next_token < self.job.stop:
            if self._order == "streamed":
                self._wait(partial(self._has_entered, self._next_token + 1))
                # One piece is faster than two: what is nearly there is waited for.
                self._has_entered(self.job.stop, _GATHERING_SECONDS)
            else:
                self._wait(self._done.wait)
            self.recompute_some(self.job.stop)

    def recompute_some(self, most_tokens: int) -> int:
        """Recompute up to so many of the next tokens if their E is there; returns their number."""
        job = self.job
        if not job.plan.group or self.failed:
            return 0
        is_ready = self._order == "streamed" or self._done.is_set()
        num_ready = self._num_entered if is_ready else 0
        stop = min(self._next_token + most_tokens, job.start + num_ready)
        if stop <= self._next_token:
            return 0
        began = time.monotonic()
        try:
            self.timeline.begin("enter", job.plan.group.start)
            hidden = self._entering(self._next_token, stop)
            self._model.recompute(
                job.plan.group,
                hidden,
                self._next_token,
                job.block_ids,
                lambda layer: self.timeline.begin("recompute", layer),
            )
        except Exception:  # a request that cannot be recomputed is prefilled
            self.fail(Fallback.RECOMPUTE_FAILED)
            return 0
        finally:
            self.timeline.end()
        self.report.recompute_seconds += time.monotonic() - began
        num_tokens = stop - self._next_token
        self.report.recomputed_tokens += num_tokens
        self._next_token = stop
        return num_tokens

    def wait_for_layer(self, layer: int) -> None:
        """Return once a layer's KV is written, or the load has failed."""
        self.timeline.end()
        event = self._written.get(layer)
        if event is not None and not self.failed:
            self._wait(event.wait, layer)
        self.timeline.begin("suffix", layer)

    def wait_until_done(self) -> None:
        """Return once nothing is left to load, or the load has failed."""
        self.timeline.end()
        if not self.failed:
            self._wait(self._done.wait)

    @property
    def is_complete(self) -> bool:
        """Whether there is nothing left to do, or to hope for."""
        if not self.failed and time.monotonic() > self._deadline:
            self.fail(Fallback.LOAD_TIMEOUT)
        recomputed = not self.job.plan.group or self._next_token == self.job.stop
        return self.failed or (self._done.is_set() and recomputed)

    def _wait(self, wait: Callable[[float], bool], layer: int | None = None) -> None:
        if wait(0.0):
            return
        began, start = time.monotonic(), time.time()
        if not wait(max(self._deadline - began, 0.0)):
            self.fail(Fallback.LOAD_TIMEOUT)
        self.report.wait_seconds += time.monotonic() - began
        self.timeline.add("wait", layer, start)

    def _entering(self, start: int, stop: int) -> Tensor:
        plan = self.job.plan
        if plan.transition is None:
            return self._model.embed(self.job.token_ids[start:stop])
        assert self._hidden is not None
        hidden = self._hidden[start - self.job.start : stop - self.job.start]
        if plan.operator == "copy":
            return hidden
        if self._stitch is None:
            raise PlanFailed(Fallback.NO_STITCH)
        return self._stitch.apply(plan.transition, hidden)

    def _fetch_hidden(self, layer: int) -> None:
        # The first chunk by itself: recomputing it hides the way of the others.
        for pieces in (self._pieces[:1], self._pieces[1:]):
            if not pieces:
                return
            start = time.time()
            keys = [self._keys[piece.chunk] for piece in pieces]
            chunks = self._store.get_hidden_chunks(keys, layer, self._deadline)
            self._check(chunks, (self._store.chunk_tokens, self._model.hidden_size))
            self.timeline.add("load", layer, start)
            parts = [] if self._hidden is None else [self._hidden]
            parts += [
                chunk[slice(*piece.inside)] for chunk, piece in zip(chunks, pieces, strict=True)
            ]
            self._hidden = torch.cat(parts)
            self._enter(len(self._hidden) - self._num_entered)

    def _enter(self, num_tokens: int) -> None:
        """So many more tokens may be recomputed; 0 = no more will come."""
        with self._arrived:
            self._num_entered += num_tokens
            self._arrived.notify_all()

    def _has_entered(self, stop: int, seconds: float) -> bool:
        """Whether the tokens before `stop` may be recomputed, or nothing more will come."""
        with self._arrived:
            return self._arrived.wait_for(
                lambda: self.job.start + self._num_entered >= stop or self._done.is_set(), seconds
            )

    def _fetched(self, layers: Sequence[int]) -> Iterator[tuple[int, list[tuple[Tensor, Tensor]]]]:
        """Each layer's KV; the next one is on its way meanwhile, so that the link is never idle."""
        with ThreadPoolExecutor(1, thread_name_prefix="droidkv-read") as reader:
            coming: deque[tuple[int, Future[list[tuple[Tensor, Tensor]]]]] = deque()
            for layer in layers:
                coming.append((layer, reader.submit(self._fetch_kv, layer)))
                if len(coming) == 2:
                    first, read = coming.popleft()
                    yield first, read.result()
            for last, read in coming:
                yield last, read.result()

    def _fetch_kv(self, layer: int) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of each piece, `[num_kv_heads, num_tokens, head_dim]`."""
        start = time.time()
        keys = [self._keys[piece.chunk] for piece in self._pieces]
        pairs = self._store.get_kv_chunks(keys, layer, self._deadline)
        num_heads, head_dim = self._model.kv_shape
        shape = (num_heads, self._store.chunk_tokens, head_dim)
        self._check([tensor for pair in pairs for tensor in pair], shape)
        self.timeline.add("load", layer, start)
        return [
            (each[:, slice(*piece.inside)], other[:, slice(*piece.inside)])
            for (each, other), piece in zip(pairs, self._pieces, strict=True)
        ]

    def _check(self, tensors: Sequence[Tensor], shape: tuple[int, ...]) -> None:
        for tensor in tensors:
            if tuple(tensor.shape) != shape or tensor.dtype != self._model.dtype:
                raise PlanFailed(Fallback.LOAD_WRONG_SHAPE)
            self.report.loaded_bytes += tensor.nbytes


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
        self._pool = ThreadPoolExecutor(_LOAD_THREADS, thread_name_prefix="droidkv-load")

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
                self._order,
                deadline_in(self._load_seconds),
                self._stitch,
                self._timeline,
            )
            if is_refused:
                load.fail(Fallback.WEIGHTS_CHANGED)
            else:
                self._pool.submit(_in_inference_mode, load.fetch)
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
        if is_idle and not result.finished and left == self._tokens_per_step:
            time.sleep(_POLL_SECONDS)
        return result

    def close(self) -> None:
        """Let go of the threads; never waits for a store that does not answer."""
        for load in [*self._now, *self._waiting.values()]:
            load.stop()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _blocks(self, job: LoadJob) -> Sequence[int]:
        return job.block_ids[: -(-job.stop // self._model.block_tokens)]


def _in_inference_mode(work: Callable[[], None]) -> None:
    """Engines allocate their cache in inference mode, which is a property of the thread."""
    with torch.inference_mode():
        work()
