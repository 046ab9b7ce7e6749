"""One request's load: threads fetch and write, the engine's thread recomputes. No engine here."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

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
from droidkv.serve.paged_model import PagedModel
from droidkv.serve.store import ChunkKey, Store, StoreMiss
from droidkv.stitch import StitchMap

_GATHERING_SECONDS = 0.01
# A load of so much KV that keeps this many cores busy, looked at so often, and a pass beside it
# would only slow down each other. A smaller one is over before it matters.
_LONG_BYTES = 64 << 20
_BUSY_CORES = 0.5
_LOOKING_SECONDS = 0.02


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
        readers: Read one layer while another is written.
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
        readers: Executor,
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
        self._readers = readers
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
        self._writing = (threading.Lock(), threading.Lock())
        self._stopped = False
        num_heads, head_dim = model.kv_shape
        token_bytes = 2 * num_heads * head_dim * model.dtype.itemsize
        self._is_long = len(self._reused) * len(slots) * token_bytes >= _LONG_BYTES
        self._began = time.monotonic()
        self._core_seconds = 0.0
        self._is_passing = False

    @property
    def failed(self) -> bool:
        return self.report.reason is not None

    def fetch(self) -> None:
        """Runs in a thread: E first, then the reused layers from the lowest on."""
        began = time.monotonic()
        with self._failing():
            if self.job.plan.transition is not None:
                self._fetch_hidden(self.job.plan.transition)
            else:
                self._enter(self.job.stop - self.job.start)
            unused = self.job.plan.group.layers if self._order == "all_first" else ()
            self._load([*unused, *self._reused])
        self.report.load_seconds = time.monotonic() - began
        self._done.set()
        self._enter(0)
        for event in self._written.values():
            event.set()

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """A thread's work; what goes wrong ends the load, and nothing of it reaches the engine."""
        try:
            # Engines allocate their cache in inference mode, which is a property of the thread.
            with torch.inference_mode():
                yield
        except PlanFailed as failure:
            self.fail(failure.reason)
        except StoreMiss as miss:
            self.fail(Fallback(f"load_{miss.reason}"))
        except Exception:
            self.fail(Fallback.LOAD_BACKEND_DOWN)

    def fail(self, reason: Fallback) -> None:
        """Give up; the first reason stays."""
        self.report.reason = self.report.reason or reason

    def stop(self) -> None:
        """Nothing is written into the request's blocks once this returns."""
        first, second = self._writing
        with first, second:
            self._stopped = True
        if not self._done.is_set():
            self.report.load_seconds = time.monotonic() - self._began

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
        if self._is_long and not self._is_passing and not self.failed:
            self._is_passing = True
            self._wait(self._leaves_cores, layer)
        self.timeline.begin("suffix", layer)

    def wait_until_done(self) -> None:
        """Return once nothing is left to load, or the load has failed."""
        self.timeline.end()
        if not self.failed:
            self._wait(self._done.wait)

    @property
    def is_complete(self) -> bool:
        """Whether there is nothing left to do, or to hope for."""
        if time.monotonic() > self._deadline and not self._done.is_set():
            # Data that is there waits as long as it must.
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

    def _leaves_cores(self, seconds: float) -> bool:
        """Whether the load is over, or waits for data more than it computes.

        One that is bound by cores (checksums, writing) takes them from the pass layer by layer, and
        is over sooner by itself; one that waits for a link costs the pass nothing.
        """
        ends = time.monotonic() + seconds
        while not self._done.wait(min(_LOOKING_SECONDS, seconds)):
            now = time.monotonic()
            if now >= ends:
                return False
            if self._core_seconds < _BUSY_CORES * (now - self._began):
                return True
        return True

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

    def _load(self, layers: Sequence[int]) -> None:
        """Load some layers in this order; two are on their way at any moment."""
        left, (mine, others) = deque(layers), self._writing

        def load_too() -> None:
            with self._failing():
                self._load_layers(left, others)

        other = self._readers.submit(load_too)
        self._load_layers(left, mine)
        other.result()

    def _load_layers(self, layers: deque[int], writing: threading.Lock) -> None:
        """Load the next layer until none is left. Runs twice at once: one reads, one writes."""
        keys = [self._keys[piece.chunk] for piece in self._pieces]
        while not self.failed and not self._stopped:
            try:
                layer = layers.popleft()
            except IndexError:
                return
            start, cores_start = time.time(), time.thread_time()
            with self._store.lent_kv_chunks(keys, layer, self._deadline) as pairs:
                self._check_kv(pairs)
                self.timeline.add("load", layer, start)
                if layer in self._written:
                    with writing:
                        self._write(layer, pairs)
            with self._arrived:
                self._core_seconds += time.thread_time() - cores_start

    def _write(self, layer: int, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        if self._stopped:
            return
        for slots, piece, pair in zip(self._slots, self._pieces, pairs, strict=True):
            keys, values = (part[:, slice(*piece.inside)] for part in pair)
            self._model.write_kv(layer, slots, keys, values)
        self._written[layer].set()

    def _check_kv(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        num_heads, head_dim = self._model.kv_shape
        shape = (num_heads, self._store.chunk_tokens, head_dim)
        self._check([tensor for pair in pairs for tensor in pair], shape)

    def _check(self, tensors: Sequence[Tensor], shape: tuple[int, ...]) -> None:
        for tensor in tensors:
            if tuple(tensor.shape) != shape or tensor.dtype != self._model.dtype:
                raise PlanFailed(Fallback.LOAD_WRONG_SHAPE)
        with self._arrived:
            self.report.loaded_bytes += sum(tensor.nbytes for tensor in tensors)
