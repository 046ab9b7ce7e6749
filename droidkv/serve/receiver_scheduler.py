"""A receiver's half in the scheduler: which prefix to supply, by which plan. No engine here.

One object per engine; all that belongs to a request hangs on its own record, so that requests
never see one another's plan.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from typing import Literal

from droidkv.errors import PlanError
from droidkv.plan import ReusePlan
from droidkv.serve.breaker import Breaker
from droidkv.serve.connector_plan import (
    Ask,
    AuditRecord,
    Fallback,
    LoadJob,
    LoadOrder,
    LoadReport,
    RequestView,
    Span,
    StepJobs,
    mixed_salt,
    parse_ask,
    reusable_tokens,
)
from droidkv.serve.store import MissReason, Store, StoreMiss, chunk_keys, coverage, deadline_in

# Called with the tokens that could be reused and those that could not; None = reuse nothing.
PlanChooser = Callable[[int, int], ReusePlan | None]
# The own prefill by choice, of a request or of the profile: no failure, so never refused.
_BY_CHOICE = (Fallback.FULL_PREFILL, Fallback.NOT_CHOSEN)
# Sets the salt of a request's block hashes; None = the one it came with.
Salter = Callable[[str | None], None]
_LOOKUP_THREADS = 4
# What of a load's end says that the store did not answer it; and what says nothing of the store.
_STORE_FAILED = {Fallback.LOAD_TIMEOUT, Fallback.LOAD_BACKEND_DOWN}
_STORE_UNTRIED = {Fallback.ABORTED, Fallback.RECOMPUTE_FAILED, Fallback.WEIGHTS_CHANGED}


@dataclass(frozen=True)
class ReceiverRules:
    """What a receiver's scheduler half goes by.

    Attributes:
        num_layers: Decoder layers of both models.
        namespace: The sender's, in the store.
        stitch_sha256: Identity of the pair's stitching map; None = only copy plans.
        stitch_starts: Starts that the map was fitted for.
        choose: The server's own choice of plan; None = only requests that ask for one reuse.
        lookup_seconds: Longest time the store may take to say what it has.
        load_seconds: Longest time a request waits for another one that loads the same prefix.
        patience_seconds: Of these, how long the scheduler itself stands still.
        asynchronous: Requests wait for their load while the engine goes on with others.
        tokens_per_step: Most prefix tokens recomputed in one engine step; longer prefixes wait.
        timeline: Suffix passes behind loads that were waited for are timed.
        own_tokens: For a receiver whose own prefill is no way out: the longest end of a prompt
            that it may compute itself behind what it reuses, where the request does not say how
            long its prefix is. What cannot reuse so much is refused, unless it asked for the own
            prefill. None = nothing is refused.
    """

    num_layers: int
    namespace: str
    stitch_sha256: str | None = None
    stitch_starts: frozenset[int] = frozenset()
    choose: PlanChooser | None = None
    lookup_seconds: float = 2.0
    load_seconds: float = 30.0
    patience_seconds: float = 0.005
    asynchronous: bool = False
    tokens_per_step: int = 4096
    timeline: bool = False
    own_tokens: int | None = None


@dataclass(frozen=True)
class _Found:
    """What the store can supply to a request."""

    plan: ReusePlan | None
    num_tokens: int
    covered_tokens: int
    last_chunk_hash: str
    reason: Fallback | None
    seconds: float


@dataclass
class _Tracked:
    """One request, from its arrival to its end."""

    view: RequestView
    record: AuditRecord
    lookup: Future[_Found] | None = None
    deadline: float = 0.0
    waits_until: float | None = None
    plan: ReusePlan | None = None
    order: LoadOrder | None = None
    num_tokens: int = 0
    salt: str | None = None
    may_load: bool = False
    suffix: Literal["untimed", "due", "passing"] = "untimed"
    may_be_refused: bool = True


class ReceiverScheduler:
    """Decides, per request, how much of its prefix the worker supplies.

    Args:
        rules: What to go by.
        store: Where the sender's caches are.
        on_record: Called with the record of every request that ended.

    Attributes:
        lookups: Keeps requests from asking a store that does not say what it has.
        loads: Keeps them from loading out of a store that does not give it.
    """

    def __init__(
        self, rules: ReceiverRules, store: Store, on_record: Callable[[AuditRecord], None]
    ) -> None:
        self.rules = rules
        self._store = store
        self._on_record = on_record
        self.lookups = Breaker()
        self.loads = Breaker()
        self._weights_changed = False
        self._requests: dict[str, _Tracked] = {}
        self._loading: dict[str, str] = {}  # salt -> the request that loads this prefix
        self._ended_loading: dict[str, _Tracked] = {}
        self._jobs: list[LoadJob] = []
        self._dropped: list[str] = []
        self._refused: list[str] = []
        self._pool = ThreadPoolExecutor(_LOOKUP_THREADS, thread_name_prefix="droidkv-lookup")

    def admit(self, view: RequestView, set_salt: Salter) -> None:
        """A request arrived: find out what it asks for and what the store has for it."""
        tracked = _Tracked(view, AuditRecord(view.request_id, prompt_tokens=len(view.token_ids)))
        self._requests[view.request_id] = tracked
        try:
            ask = parse_ask(view.params, self.rules.num_layers)
        except PlanError:
            tracked.record.reason = Fallback.BAD_PLAN
            return
        tracked.order = ask.order
        tracked.may_be_refused = ask.reuse
        tracked.record.reason = self._obstacle(view, ask)
        if tracked.record.reason is None:
            tracked.deadline = deadline_in(self.rules.lookup_seconds)
            tracked.lookup = self._pool.submit(self._look_up, view, ask, tracked.deadline)
            self._settle(tracked, set_salt, self.rules.patience_seconds)

    def match(
        self, request_id: str, local_tokens: int, set_salt: Salter
    ) -> tuple[int | None, bool]:
        """Tokens to supply behind the `local_tokens` that the engine holds.

        Returns:
            Their number, None = ask again at the next step, and whether the request is to wait
            for them while the engine goes on.
        """
        tracked = self._requests.get(request_id)
        if tracked is None:
            return 0, False
        if tracked.lookup is not None:
            if not self._settle(tracked, set_salt, 0.0):
                return None, False
            if tracked.salt is not None:
                return None, False  # what the engine found locally was found without the salt
        if self._is_refused(tracked):
            # An engine fails a request only for a load that fails, so one token is promised.
            tracked.record.refused = True
            return 1, True
        if tracked.record.reason is not None:
            return 0, False
        if self._weights_changed:
            self._fall_back(tracked, Fallback.WEIGHTS_CHANGED, set_salt)
            return None, False
        assert tracked.salt is not None and tracked.plan is not None
        if self._loading.get(tracked.salt, request_id) != request_id:
            # Another request is loading this very prefix. The engine may have found its blocks
            # already, but what they are to hold is not there before it reports.
            self._wait_for_other(tracked, set_salt)
            return None, False
        if tracked.num_tokens <= local_tokens:
            return 0, False
        if not tracked.may_load and not self.loads.allows():
            self._fall_back(tracked, Fallback.STORE_RESTING, set_salt)
            return None, False
        tracked.may_load = True
        missing = tracked.num_tokens - local_tokens
        # Blocks that others may be reading must not be prefilled anew in place if the load
        # fails, so a request that has any waits, and starts over in blocks of its own.
        waits = (
            self.rules.asynchronous
            or local_tokens > 0
            or (
                tracked.plan.num_recomputed > 0
                and self._recomputed_now() + missing > self.rules.tokens_per_step
            )
        )
        tracked.record.asynchronous = waits
        return missing, waits

    def allocate(self, request_id: str, block_ids: Sequence[int], external_tokens: int) -> None:
        """The engine gave the request blocks for the tokens that `match` promised."""
        tracked = self._requests.get(request_id)
        if tracked is None:
            return
        if tracked.record.refused:
            self._refused.append(request_id)
            return
        if external_tokens == 0:
            if tracked.record.reason is None and tracked.record.advertised_tokens == 0:
                tracked.record.local_tokens = tracked.num_tokens
            return
        assert tracked.plan is not None and tracked.salt is not None
        start = tracked.num_tokens - external_tokens
        tracked.may_load = False  # asked anew should it be preempted
        tracked.waits_until = None
        tracked.record.local_tokens = start
        tracked.record.advertised_tokens = external_tokens
        tracked.record.num_loads += 1
        self._loading[tracked.salt] = request_id
        self._jobs.append(
            LoadJob(
                request_id,
                tracked.plan,
                tuple(tracked.view.token_ids[: tracked.num_tokens]),
                start,
                tuple(block_ids),
                tracked.record.asynchronous,
                tracked.order,
            )
        )

    def take_jobs(self) -> StepJobs:
        """Loads to start in this step, requests whose loads are to be given up, and refusals."""
        jobs = StepJobs(loads=self._jobs, dropped=self._dropped, refused=self._refused)
        self._jobs, self._dropped, self._refused = [], [], []
        return jobs

    def refuses(self, request_id: str) -> bool:
        """Whether it is known already that the request ends in an error."""
        tracked = self._requests.get(request_id)
        return tracked is not None and tracked.lookup is None and self._is_refused(tracked)

    def take_suffixes(self, scheduled: Iterable[str]) -> list[str]:
        """Of the requests in this step, those behind a load that they waited for, each once."""
        taken = []
        for request_id in scheduled:
            tracked = self._requests.get(request_id)
            if tracked is not None and tracked.suffix == "due":
                tracked.suffix = "passing"
                taken.append(request_id)
        return taken

    def report(self, request_id: str, report: LoadReport, set_salt: Salter) -> bool:
        """The worker is done with a load.

        Returns:
            Whether its blocks, which the request fills by itself now, must be found by no other.
        """
        self._judge(report.reason)
        if (ended := self._ended_loading.pop(request_id, None)) is not None:
            ended.record.report = ended.record.report.merge(report)
            if report.reason is not None and ended.record.reason is None:
                ended.record.reason = report.reason
                ended.record.advertised_tokens = 0
                is_failure = report.reason != Fallback.ABORTED
                ended.record.refused = self.rules.own_tokens is not None and is_failure
            self._on_record(ended.record)
            return False
        tracked = self._requests.get(request_id)
        if tracked is None:
            return False
        self._let_go(tracked)
        tracked.record.report = tracked.record.report.merge(report)
        if report.reason is None:
            is_timed = self.rules.timeline and tracked.record.asynchronous
            tracked.suffix = "due" if is_timed else "untimed"
            return False
        self._fall_back(tracked, report.reason, set_salt)
        return not tracked.record.asynchronous

    def report_suffix(self, request_id: str, spans: Sequence[Span]) -> None:
        """The worker has timed a suffix pass that `take_suffixes` named."""
        ended = self._ended_loading.pop(request_id, None)
        tracked = ended or self._requests.get(request_id)
        if tracked is None:
            return
        tracked.suffix = "untimed"
        tracked.record.report.spans.extend(spans)
        if ended is not None:
            self._on_record(ended.record)

    def finish(self, request_id: str, is_aborted: bool = False, is_failed: bool = False) -> bool:
        """The request ended: answered, aborted by its client, or failed by the engine.

        One that needs a single step, or whose load failed and which the engine does not prefill
        then, ends before its last report arrives, and is recorded then.

        Returns:
            Whether its blocks must be found by no other: it was cut off in the step that loads
            them, so the engine has them under the plan's salt, whatever came of the load.
        """
        tracked = self._requests.pop(request_id, None)
        if tracked is None:
            return False
        record = tracked.record
        is_early = is_aborted or is_failed
        if tracked.lookup is not None:
            tracked.lookup.cancel()
            record.reason = Fallback.ABORTED
        elif is_early and record.reason is None and record.num_loads == record.local_tokens == 0:
            record.reason = Fallback.ABORTED  # before it ran
        record.ended = time.time()
        is_loading = self._let_go(tracked)
        is_cut_off = is_early and is_loading and not record.asynchronous
        if not is_aborted and (is_loading or tracked.suffix == "passing"):
            self._ended_loading[request_id] = tracked
            if is_failed:  # for another reason maybe, so that its load still goes on
                self._dropped.append(request_id)
            return is_cut_off
        if is_loading:
            self._dropped.append(request_id)
            record.reason = Fallback.ABORTED
        self._on_record(record)
        return is_cut_off

    def close(self) -> None:
        """Let go of the threads; never waits for a store that does not answer."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _recomputed_now(self) -> int:
        """Tokens that the step being put together recomputes for requests that do not wait."""
        return sum(
            job.stop - job.start
            for job in self._jobs
            if job.plan.num_recomputed > 0 and not job.asynchronous
        )

    def _wait_for_other(self, tracked: _Tracked, set_salt: Salter) -> None:
        """No longer than one load may take: many would else wait for one failure after another."""
        if tracked.waits_until is None:
            tracked.waits_until = deadline_in(self.rules.load_seconds)
        elif time.monotonic() >= tracked.waits_until:
            self._fall_back(tracked, Fallback.LOAD_TIMEOUT, set_salt)

    def _fall_back(self, tracked: _Tracked, reason: Fallback, set_salt: Salter) -> None:
        """The request is prefilled; what the engine found of it under the plan's salt, too."""
        tracked.record.reason = reason
        tracked.record.advertised_tokens = 0
        tracked.salt = None
        set_salt(tracked.view.cache_salt)

    def _judge(self, reason: Fallback | None) -> None:
        """What the end of a load says of the store, and of the model."""
        self._weights_changed = self._weights_changed or reason == Fallback.WEIGHTS_CHANGED
        if reason in _STORE_FAILED:
            self.loads.failed()
        elif reason not in _STORE_UNTRIED:
            self.loads.succeeded()

    def _let_go(self, tracked: _Tracked) -> bool:
        if tracked.salt is None or self._loading.get(tracked.salt) != tracked.view.request_id:
            return False
        del self._loading[tracked.salt]
        return True

    def _obstacle(self, view: RequestView, ask: Ask) -> Fallback | None:
        if not ask.reuse:
            return Fallback.OPTED_OUT
        if ask.plan is None and self.rules.choose is None:
            return Fallback.NOT_ASKED
        if view.obstacle is not None:
            return view.obstacle
        if ask.plan is not None and (reason := self._plan_obstacle(ask.plan)):
            return reason
        if self._most_reusable(view, ask) == 0:
            return Fallback.TOO_SHORT
        if self._weights_changed:
            return Fallback.WEIGHTS_CHANGED
        if self.loads.is_resting() or not self.lookups.allows():
            return Fallback.STORE_RESTING
        return None

    def _is_refused(self, tracked: _Tracked) -> bool:
        reason = tracked.record.reason
        return (
            self.rules.own_tokens is not None
            and tracked.may_be_refused
            and reason is not None
            and reason not in _BY_CHOICE
        )

    def _most_reusable(self, view: RequestView, ask: Ask) -> int:
        """Tokens that would be reused if the sender had read all of the prompt."""
        num_tokens = len(view.token_ids)
        prefix = num_tokens if ask.prefix_tokens is None else ask.prefix_tokens
        return reusable_tokens(num_tokens, prefix, self._store.chunk_tokens)

    def _plan_obstacle(self, plan: ReusePlan) -> Fallback | None:
        if plan.num_recomputed == self.rules.num_layers:
            return Fallback.FULL_PREFILL
        if plan.operator == "stitch" and plan.transition not in self.rules.stitch_starts:
            return Fallback.NO_STITCH
        return None

    def _look_up(self, view: RequestView, ask: Ask, deadline: float) -> _Found:
        """Runs in a thread of its own: the store may be slow."""
        began = time.monotonic()
        chunk, tokens = self._store.chunk_tokens, view.token_ids
        most = self._most_reusable(view, ask)  # what could not be reused is not asked for
        keys = chunk_keys(self.rules.namespace, tokens[:most], chunk)

        def found(plan: ReusePlan | None, covered: int, reason: Fallback | None) -> _Found:
            num_tokens = reusable_tokens(len(tokens), covered, chunk)
            last = keys[num_tokens // chunk - 1].chunk_hash if num_tokens else ""
            seconds = time.monotonic() - began
            return _Found(plan, num_tokens, covered, last, reason, seconds)

        plan = ask.plan
        if plan is None:
            assert self.rules.choose is not None
            covered = coverage(
                self._store, keys, ReusePlan.of(0, 0), self.rules.num_layers, deadline
            )
            if covered == 0:
                return found(None, 0, Fallback.NOT_COVERED)
            plan = self.rules.choose(covered, len(tokens) - covered)
            if plan is None:
                return found(None, covered, Fallback.NOT_CHOSEN)
            if reason := self._plan_obstacle(plan):
                return found(plan, covered, reason)
        covered = coverage(self._store, keys, plan, self.rules.num_layers, deadline)
        if covered == 0:
            return found(plan, covered, Fallback.NOT_COVERED)
        is_partly = self.rules.own_tokens is not None and (
            len(tokens) - covered > self.rules.own_tokens
            if ask.prefix_tokens is None
            else covered < most
        )
        return found(plan, covered, Fallback.PARTLY_COVERED if is_partly else None)

    def _settle(self, tracked: _Tracked, set_salt: Salter, patience_seconds: float) -> bool:
        """Take the lookup's result if it is there, or give up; False = neither yet."""
        assert tracked.lookup is not None
        record = tracked.record
        try:
            found = tracked.lookup.result(timeout=patience_seconds)
        except FutureTimeout:
            if time.monotonic() < tracked.deadline:
                return False
            if not tracked.lookup.cancel():  # one that never began says nothing of the store
                self.lookups.failed()
            tracked.lookup = None
            record.reason = Fallback.LOOKUP_TIMEOUT
            return True
        except StoreMiss as miss:
            self.lookups.failed()
            tracked.lookup = None
            timed_out = miss.reason == MissReason.TIMEOUT
            record.reason = Fallback.LOOKUP_TIMEOUT if timed_out else Fallback.LOOKUP_BACKEND_DOWN
            return True
        except Exception:  # whatever goes wrong in a lookup, the request is answered
            self.lookups.failed()
            tracked.lookup = None
            record.reason = Fallback.LOOKUP_BACKEND_DOWN
            return True
        self.lookups.succeeded()
        tracked.lookup = None
        record.lookup_seconds = found.seconds
        record.covered_tokens = found.covered_tokens
        record.reason = found.reason
        if found.plan is not None:
            record.plan = str(found.plan)
        if found.reason is None:
            assert found.plan is not None
            record.recomputed_layers = found.plan.num_recomputed
            tracked.plan, tracked.num_tokens = found.plan, found.num_tokens
            stitch = self.rules.stitch_sha256 if found.plan.operator == "stitch" else None
            tracked.salt = mixed_salt(
                self.rules.namespace,
                found.plan,
                stitch,
                found.last_chunk_hash,
                found.num_tokens,
                tracked.view.cache_salt,
            )
            set_salt(tracked.salt)
        return True
