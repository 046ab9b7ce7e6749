from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import pytest
import torch

from droidkv.plan import ReusePlan
from droidkv.serve.breaker import LONGEST_REST_SECONDS, MOST_FAILURES, REST_SECONDS, Breaker
from droidkv.serve.connector_plan import (
    AuditRecord,
    Fallback,
    LoadReport,
    RequestView,
    Span,
    StepJobs,
)
from droidkv.serve.objects import ObjectName
from droidkv.serve.receiver_scheduler import PlanChooser, ReceiverRules, ReceiverScheduler
from droidkv.serve.store import MemoryStore, chunk_keys

CHUNK, NUM_LAYERS = 8, 4
NAMESPACE = "a" * 64
TOKENS = list(range(100, 140))
BLOCKS = (3, 1, 4, 5, 9, 2, 6)


class SlowStore(MemoryStore):
    """A store whose answers wait for `release`."""

    def __init__(self) -> None:
        super().__init__(CHUNK)
        self.release = threading.Event()
        self.release.set()
        self.error: Exception | None = None

    def _count_leading(self, names: Sequence[ObjectName], deadline: float) -> int:
        self.release.wait(20)
        if self.error is not None:
            raise self.error
        return super()._count_leading(names, deadline)


@dataclass
class Engine:
    """A scheduler half with its store, and what the engine would see of it."""

    store: SlowStore
    half: ReceiverScheduler
    records: list[AuditRecord]
    salts: dict[str, str | None] = field(default_factory=dict)
    now: float = 1000.0  # on the clock of the breakers

    def __post_init__(self) -> None:
        self.half.lookups = Breaker(clock=lambda: self.now)
        self.half.loads = Breaker(clock=lambda: self.now)

    def salter(self, request_id: str) -> Callable[[str | None], None]:
        return lambda salt: self.salts.__setitem__(request_id, salt)

    def admit(
        self,
        request_id: str = "r",
        plan: str | None = "[2,4)",
        num_tokens: int = 40,
        obstacle: Fallback | None = None,
    ) -> None:
        params = None if plan is None else {"droidkv": {"plan": plan}}
        view = RequestView(request_id, TOKENS[:num_tokens], params, None, obstacle)
        self.half.admit(view, self.salter(request_id))

    def match(self, request_id: str = "r", local: int = 0) -> tuple[int | None, bool]:
        return self.half.match(request_id, local, self.salter(request_id))

    def load(self, request_id: str = "r") -> tuple[int | None, bool]:
        """A request arrives, and is given blocks for what it is promised."""
        self.admit(request_id)
        promised = self.match(request_id)
        assert promised[0]
        self.half.allocate(request_id, BLOCKS, promised[0])
        return promised

    def refusal(self, request_id: str = "r") -> tuple[bool, Fallback | None]:
        """As the engine does it: a load that fails, the request failed, then the report."""
        assert self.match(request_id) == (1, True)
        self.half.allocate(request_id, BLOCKS[:1], 1)
        assert self.half.take_jobs() == StepJobs(refused=[request_id])
        self.half.finish(request_id, is_failed=True)
        assert not self.half.report(request_id, LoadReport(), self.salter(request_id))
        return self.records[-1].refused, self.records[-1].reason

    def reason(self, request_id: str = "r", is_aborted: bool = False) -> Fallback | None:
        self.half.finish(request_id, is_aborted)
        return self.records[-1].reason


def fill(store: MemoryStore, num_chunks: int, hidden_chunks: int) -> None:
    kv, hidden = torch.zeros(1, CHUNK, 2), torch.zeros(CHUNK, 4)
    for key in chunk_keys(NAMESPACE, TOKENS, CHUNK)[:num_chunks]:
        for layer in range(NUM_LAYERS):
            store.put_kv(key, layer, kv, kv)
        if key.index < hidden_chunks:
            store.put_hidden(key, 2, hidden)


@pytest.fixture
def engine_of() -> Iterator[Callable[..., Engine]]:
    made: list[Engine] = []

    def make(
        choose: PlanChooser | None = None,
        lookup_seconds: float = 2.0,
        patience_seconds: float = 2.0,
        asynchronous: bool = False,
        tokens_per_step: int = 1000,
        load_seconds: float = 30.0,
        timeline: bool = False,
        own_tokens: int | None = None,
    ) -> Engine:
        store, records = SlowStore(), list[AuditRecord]()
        fill(store, 4, 4)
        rules = ReceiverRules(
            NUM_LAYERS,
            NAMESPACE,
            choose=choose,
            lookup_seconds=lookup_seconds,
            load_seconds=load_seconds,
            patience_seconds=patience_seconds,
            asynchronous=asynchronous,
            tokens_per_step=tokens_per_step,
            timeline=timeline,
            own_tokens=own_tokens,
        )
        engine = Engine(store, ReceiverScheduler(rules, store, records.append), records)
        made.append(engine)
        return engine

    yield make
    for each in made:
        each.store.release.set()
        each.half.close()


EngineOf = Callable[..., Engine]


def test_a_covered_request_is_promised_its_prefix(engine_of: EngineOf) -> None:
    engine = engine_of()
    engine.admit()
    salt = engine.salts["r"]
    assert salt is not None and salt.startswith("droidkv:")
    # Asked again and again while the request waits: the same answer, and no side effect.
    assert [engine.match() for _ in range(50)] == [(32, False)] * 50
    assert engine.half.take_jobs() == StepJobs()
    engine.half.allocate("r", BLOCKS, 32)
    (job,) = engine.half.take_jobs().loads
    assert (job.start, job.stop, job.block_ids) == (0, 32, BLOCKS)
    assert job.token_ids == tuple(TOKENS[:32])
    assert job.plan == ReusePlan.of(2, 4)
    assert engine.half.take_jobs() == StepJobs()
    assert not engine.half.report("r", LoadReport(loaded_bytes=7), engine.salter("r"))
    assert engine.salts["r"] == salt
    assert engine.reason() is None
    record = engine.records[0]
    assert (record.plan, record.advertised_tokens, record.covered_tokens) == ("[2,4)", 32, 32)
    assert record.report.loaded_bytes == 7


@pytest.mark.parametrize(("num_tokens", "promised"), [(8, 0), (9, 8), (32, 24), (33, 32), (40, 32)])
def test_prompts_around_a_chunk(engine_of: EngineOf, num_tokens: int, promised: int) -> None:
    engine = engine_of()
    engine.admit(num_tokens=num_tokens)
    assert engine.match() == (promised, False)
    assert engine.reason() == (None if promised else Fallback.TOO_SHORT)


def test_tokens_that_the_engine_holds_are_not_loaded_again(engine_of: EngineOf) -> None:
    engine = engine_of()
    engine.admit()
    assert engine.match(local=32) == (0, False)
    engine.half.allocate("r", BLOCKS, 0)
    engine.half.finish("r")
    assert engine.records[0].local_tokens == 32
    assert engine.records[0].reason is None


def test_a_request_that_ends_in_the_step_of_its_load_is_recorded_with_its_report(
    engine_of: EngineOf,
) -> None:
    engine = engine_of()
    engine.load()
    engine.half.take_jobs()
    engine.half.finish("r")
    assert engine.records == []
    salt = engine.salts["r"]
    assert not engine.half.report("r", LoadReport(loaded_bytes=7), engine.salter("r"))
    (record,) = engine.records
    assert (record.reason, record.advertised_tokens, record.report.loaded_bytes) == (None, 32, 7)
    assert engine.salts["r"] == salt
    assert engine.half.take_jobs() == StepJobs()
    engine.admit("next")  # and the next one with this prefix need not wait for it
    assert engine.match("next") == (32, False)


def test_a_request_with_blocks_that_others_read_waits(engine_of: EngineOf) -> None:
    engine = engine_of()
    engine.admit()
    assert engine.match(local=16) == (16, True)
    engine.half.allocate("r", BLOCKS, 16)
    (job,) = engine.half.take_jobs().loads
    assert (job.start, job.asynchronous) == (16, True)


def test_long_recomputes_wait_and_full_reuse_does_not(engine_of: EngineOf) -> None:
    engine = engine_of(tokens_per_step=16)
    engine.admit("long")
    engine.admit("none", plan="none")
    assert engine.match("long") == (32, True)
    assert engine.match("none") == (32, False)


def test_coverage_is_the_least_of_kv_and_e(engine_of: EngineOf) -> None:
    engine = engine_of()
    engine.store._objects.clear()
    fill(engine.store, num_chunks=4, hidden_chunks=2)
    engine.admit("needs-e")
    engine.admit("needs-none", plan="[0,2)")
    engine.admit("other-e", plan="[1,2)")
    assert engine.match("needs-e") == (16, False)
    assert engine.match("needs-none") == (32, False)
    assert engine.match("other-e") == (0, False)
    assert engine.reason("other-e") == Fallback.NOT_COVERED


def test_two_requests_for_one_prefix_load_it_once(engine_of: EngineOf) -> None:
    engine = engine_of()
    engine.admit("first")
    engine.admit("second")
    engine.admit("other", plan="none")
    assert engine.match("first") == (32, False)
    engine.half.allocate("first", BLOCKS, 32)
    assert engine.match("second") == (None, False)
    assert engine.match("other") == (32, False)
    engine.half.report("first", LoadReport(), engine.salter("first"))
    assert engine.match("second", local=32) == (0, False)


@pytest.mark.parametrize("reason", [Fallback.LOAD_CORRUPT, Fallback.LOAD_TIMEOUT])
def test_a_failed_load_makes_the_request_exact(engine_of: EngineOf, reason: Fallback) -> None:
    engine = engine_of()
    engine.load()
    engine.half.take_jobs()
    assert engine.half.report("r", LoadReport(reason=reason), engine.salter("r"))
    assert engine.salts["r"] is None
    assert engine.match() == (0, False)
    assert engine.reason() == reason
    assert engine.records[0].advertised_tokens == 0


def test_a_failed_waiting_load_starts_over_in_blocks_of_its_own(engine_of: EngineOf) -> None:
    engine = engine_of(asynchronous=True)
    assert engine.load() == (32, True)
    report = LoadReport(reason=Fallback.LOAD_SHORT)
    assert not engine.half.report("r", report, engine.salter("r"))  # no block to hide
    assert engine.match() == (0, False)


@pytest.mark.parametrize(
    ("plan", "obstacle", "reason"),
    [
        (None, None, Fallback.NOT_ASKED),
        ("all", None, Fallback.FULL_PREFILL),
        ("[2,99)", None, Fallback.BAD_PLAN),
        ("[2,4)+stitch", None, Fallback.NO_STITCH),
        ("[2,4)", Fallback.LORA, Fallback.LORA),
        ("[2,4)", Fallback.MULTIMODAL, Fallback.MULTIMODAL),
        ("[2,4)", Fallback.PROMPT_LOGPROBS, Fallback.PROMPT_LOGPROBS),
    ],
)
def test_a_request_that_cannot_reuse_says_why_and_stays_exact(
    engine_of: EngineOf, plan: str | None, obstacle: Fallback | None, reason: Fallback
) -> None:
    engine = engine_of()
    engine.admit(plan=plan, obstacle=obstacle)
    assert engine.match() == (0, False)
    assert engine.salts == {}
    assert engine.reason() == reason


def test_a_request_may_opt_out(engine_of: EngineOf) -> None:
    engine = engine_of(choose=lambda n, m: ReusePlan.of(0, 0))
    view = RequestView("r", TOKENS, {"droidkv": {"reuse": False}})
    engine.half.admit(view, engine.salter("r"))
    assert engine.match() == (0, False)
    assert engine.reason() == Fallback.OPTED_OUT


def test_the_server_chooses_by_what_is_covered(engine_of: EngineOf) -> None:
    asked: list[tuple[int, int]] = []

    def choose(prefix: int, suffix: int) -> ReusePlan | None:
        asked.append((prefix, suffix))
        return ReusePlan.of(2, 4) if prefix > 8 else None

    engine = engine_of(choose=choose)
    engine.admit(plan=None)
    assert engine.match() == (32, False)
    engine.admit("short", plan=None, num_tokens=10)
    assert engine.match("short") == (0, False)
    assert engine.reason("short") == Fallback.NOT_CHOSEN
    assert asked == [(32, 8), (8, 2)]


def test_a_slow_store_does_not_hold_the_scheduler(engine_of: EngineOf) -> None:
    engine = engine_of(patience_seconds=0.0)
    engine.store.release.clear()
    engine.admit()
    assert engine.match() == (None, False)
    engine.store.release.set()
    deadline = time.monotonic() + 20
    while "r" not in engine.salts and time.monotonic() < deadline:
        # None also when the salt is set: what the engine found locally, it found without it.
        assert engine.match() == (None, False)
    assert engine.match() == (32, False)


def test_a_store_that_hangs_is_given_up(engine_of: EngineOf) -> None:
    engine = engine_of(lookup_seconds=0.05, patience_seconds=0.2)
    engine.store.release.clear()
    engine.admit()
    assert engine.match() == (0, False)
    assert engine.reason() == Fallback.LOOKUP_TIMEOUT


def test_a_store_that_is_down_is_given_up(engine_of: EngineOf) -> None:
    engine = engine_of()
    engine.store.error = ConnectionError("refused")
    engine.admit()
    assert engine.match() == (0, False)
    assert engine.reason() == Fallback.LOOKUP_BACKEND_DOWN


def test_nobody_waits_longer_for_another_ones_load_than_for_his_own(engine_of: EngineOf) -> None:
    engine = engine_of(load_seconds=0.05)
    engine.load("first")
    engine.admit("second")
    assert engine.match("second") == (None, False)
    time.sleep(0.06)
    # Once more, since what the engine found locally was found under the plan's salt.
    assert engine.match("second") == (None, False)
    assert engine.salts["second"] is None
    assert engine.match("second") == (0, False)
    assert engine.reason("second") == Fallback.LOAD_TIMEOUT


def test_a_preempted_request_waits_anew_for_another_ones_load(engine_of: EngineOf) -> None:
    engine = engine_of(load_seconds=0.05)
    engine.load("first")
    engine.admit("second")
    assert engine.match("second") == (None, False)
    engine.half.report("first", LoadReport(), engine.salter("first"))
    assert engine.match("second") == (32, False)
    engine.half.allocate("second", BLOCKS, 32)
    engine.half.report("second", LoadReport(), engine.salter("second"))
    time.sleep(0.06)  # it decodes, is preempted, and meets a third one that loads its prefix
    engine.load("third")
    assert engine.match("second") == (None, False)
    engine.half.report("third", LoadReport(), engine.salter("third"))
    assert engine.match("second") == (32, False)
    assert engine.reason("second") is None


def test_lookups_that_never_began_say_nothing_of_the_store(engine_of: EngineOf) -> None:
    engine = engine_of(lookup_seconds=0.05, patience_seconds=0.0)
    engine.store.release.clear()
    names = [f"{index}" for index in range(20)]
    for name in names:
        engine.admit(name)
    time.sleep(0.06)
    # The last ones have waited for the threads that the first ones keep.
    for name in names[-10:]:
        assert engine.match(name) == (0, False)
        assert engine.reason(name) == Fallback.LOOKUP_TIMEOUT
    assert not engine.half.lookups.is_resting()
    for name in names[:MOST_FAILURES]:
        assert engine.match(name) == (0, False)
    assert engine.half.lookups.is_resting()


def test_an_aborted_request_leaves_nothing_behind(engine_of: EngineOf) -> None:
    engine = engine_of(asynchronous=True)
    engine.load("first")
    engine.admit("second")
    assert engine.reason("first", is_aborted=True) == Fallback.ABORTED
    jobs = engine.half.take_jobs()
    assert [job.request_id for job in jobs.loads] == jobs.dropped == ["first"]
    assert engine.match("second") == (32, True)
    assert engine.match("first") == (0, False)
    assert not engine.half.report("first", LoadReport(), engine.salter("first"))


@pytest.mark.parametrize("end", ["is_aborted", "is_failed"])
def test_blocks_of_a_load_that_was_cut_off_are_found_by_no_other(
    engine_of: EngineOf, end: str
) -> None:
    """They are in the engine's cache as soon as they are given, whatever came of the load."""
    engine = engine_of()
    assert engine.load() == (32, False)
    assert engine.half.finish("r", **{end: True})
    engine.half.report("r", LoadReport(reason=Fallback.LOAD_ABSENT), engine.salter("r"))
    waiting = engine_of(asynchronous=True)  # in no cache before the load is over
    waiting.load()
    assert not waiting.half.finish("r", **{end: True})
    over = engine_of()
    over.load()
    over.half.report("r", LoadReport(), over.salter("r"))
    assert not over.half.finish("r", **{end: True})


def test_blocks_that_are_being_filled_are_not_taken_for_full(engine_of: EngineOf) -> None:
    engine = engine_of()
    engine.load("first")
    engine.admit("second")
    assert engine.match("second", local=32) == (None, False)
    engine.half.report("first", LoadReport(), engine.salter("first"))
    assert engine.match("second", local=32) == (0, False)


def test_a_step_recomputes_no_more_than_its_limit(engine_of: EngineOf) -> None:
    engine = engine_of(tokens_per_step=40)
    other = RequestView("other", TOKENS[:24], {"droidkv": {"plan": "[2,4)"}})
    assert engine.load("first") == (32, False)
    engine.half.admit(other, engine.salter("other"))
    assert engine.match("other") == (16, True)  # 48 in all
    engine.half.take_jobs()
    assert engine.match("other") == (16, False)


@pytest.mark.parametrize("end", ["is_aborted", "is_failed"])
def test_a_request_that_ends_before_it_runs_has_reused_nothing(
    engine_of: EngineOf, end: str
) -> None:
    engine = engine_of()
    engine.admit()
    engine.match()
    engine.half.finish("r", **{end: True})
    assert engine.records[-1].reason == Fallback.ABORTED


def test_without_an_own_prefill_a_miss_is_refused(engine_of: EngineOf) -> None:
    engine = engine_of(own_tokens=20, choose=lambda prefix, suffix: ReusePlan.of(0, 0))
    stranger = RequestView("stranger", TOKENS[::-1])
    engine.half.admit(stranger, engine.salter("stranger"))
    assert engine.refusal("stranger") == (True, Fallback.NOT_COVERED)
    engine.admit("short", num_tokens=8)
    assert engine.refusal("short") == (True, Fallback.TOO_SHORT)
    engine.admit("wrong", plan="[2,9)")
    assert engine.refusal("wrong") == (True, Fallback.BAD_PLAN)
    engine.admit("logprobs", obstacle=Fallback.PROMPT_LOGPROBS)
    assert engine.half.refuses("logprobs")
    assert engine.refusal("logprobs") == (True, Fallback.PROMPT_LOGPROBS)
    engine.store.error = ConnectionError("gone")
    engine.admit("down")
    assert engine.refusal("down") == (True, Fallback.LOOKUP_BACKEND_DOWN)


def test_nor_may_it_compute_more_of_a_prompt_than_its_limit(engine_of: EngineOf) -> None:
    engine = engine_of(own_tokens=20)
    for request_id, own, is_refused in (("fits", 20, False), ("long", 21, True)):
        view = RequestView(request_id, [*TOKENS[:32], *range(own)], {"droidkv": {"plan": "[0,0)"}})
        engine.half.admit(view, engine.salter(request_id))
        assert engine.match(request_id) == ((1, True) if is_refused else (32, False))
    assert engine.refusal("long") == (True, Fallback.PARTLY_COVERED)


@pytest.mark.parametrize("own_tokens", [None, 9])
def test_a_named_prefix_is_reused_whole_and_no_more(
    engine_of: EngineOf, own_tokens: int | None
) -> None:
    engine = engine_of(own_tokens=own_tokens)

    def admit(prefix_tokens: int, tokens: Sequence[int]) -> tuple[int | None, bool]:
        ask = {"plan": "[0,0)", "prefix_tokens": prefix_tokens}
        engine.half.admit(RequestView("r", tokens, {"droidkv": ask}), engine.salter("r"))
        return engine.match()

    assert admit(23, TOKENS) == (16, False)  # and 24 of its own, as it said
    engine.reason()
    assert admit(500, TOKENS) == (32, False)
    engine.reason()
    partly = [*TOKENS[:16], *range(20)]
    assert admit(24, partly) == ((1, True) if own_tokens else (16, False))
    assert engine.reason() == (Fallback.PARTLY_COVERED if own_tokens else None)
    assert admit(7, TOKENS) == ((1, True) if own_tokens else (0, False))
    assert engine.reason() == Fallback.TOO_SHORT


def test_the_own_prefill_by_choice_is_not_refused(engine_of: EngineOf) -> None:
    engine = engine_of(own_tokens=20, choose=lambda prefix, suffix: None)
    params = {"droidkv": {"reuse": False}}
    engine.half.admit(RequestView("r", TOKENS, params), engine.salter("r"))
    assert engine.match() == (0, False)
    assert engine.reason() == Fallback.OPTED_OUT
    for plan, reason in ((None, Fallback.NOT_CHOSEN), ("all", Fallback.FULL_PREFILL)):
        engine.admit(plan=plan)
        assert engine.match() == (0, False)
        assert engine.reason() == reason
    assert not any(record.refused for record in engine.records)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_failed_load_that_the_engine_does_not_prefill_is_recorded_as_refused(
    engine_of: EngineOf, asynchronous: bool
) -> None:
    engine = engine_of(own_tokens=20, asynchronous=asynchronous)
    engine.admit()
    assert engine.match() == (32, asynchronous)
    engine.half.allocate("r", BLOCKS, 32)
    engine.half.take_jobs()
    engine.half.finish("r", is_failed=True)
    assert engine.records == []
    engine.half.report("r", LoadReport(reason=Fallback.LOAD_CORRUPT), engine.salter("r"))
    (record,) = engine.records
    assert (record.refused, record.reason) == (True, Fallback.LOAD_CORRUPT)
    assert record.advertised_tokens == 0


def test_a_request_that_fails_for_another_reason_gives_up_its_load(engine_of: EngineOf) -> None:
    engine = engine_of(own_tokens=20, asynchronous=True)
    engine.load()
    engine.half.take_jobs()
    engine.half.finish("r", is_failed=True)
    assert engine.half.take_jobs() == StepJobs(dropped=["r"])
    engine.half.report("r", LoadReport(reason=Fallback.ABORTED), engine.salter("r"))
    assert (engine.records[0].refused, engine.records[0].reason) == (False, Fallback.ABORTED)


def test_a_preempted_request_is_promised_the_same_again(engine_of: EngineOf) -> None:
    engine = engine_of()
    engine.admit()
    for blocks in (BLOCKS, BLOCKS[::-1]):
        assert engine.match() == (32, False)
        engine.half.allocate("r", blocks, 32)
        (job,) = engine.half.take_jobs().loads
        assert job.block_ids == blocks
        engine.half.report("r", LoadReport(), engine.salter("r"))


def load(engine: Engine, request_id: str, reason: Fallback | None) -> None:
    """A request whose load ends so."""
    engine.admit(request_id)
    assert engine.match(request_id) == (32, False)
    engine.half.allocate(request_id, BLOCKS, 32)
    engine.half.take_jobs()
    engine.half.report(request_id, LoadReport(reason=reason), engine.salter(request_id))


def test_a_store_that_cannot_be_asked_again_and_again_is_not_asked_for_a_while(
    engine_of: EngineOf,
) -> None:
    engine = engine_of()
    engine.store.error = ConnectionError("refused")
    for index in range(MOST_FAILURES):
        engine.admit(f"{index}")
        assert engine.reason(f"{index}") == Fallback.LOOKUP_BACKEND_DOWN
    engine.store.error = AssertionError("asked although it rests")
    engine.admit("resting")
    assert engine.match("resting") == (0, False)
    assert engine.reason("resting") == Fallback.STORE_RESTING
    engine.store.error = None
    engine.now += REST_SECONDS
    engine.store.release.clear()  # the one that tries takes its time, and the others do not wait
    engine.half.rules = replace(engine.half.rules, patience_seconds=0.0)
    engine.admit("trial")
    engine.admit("beside")
    assert engine.reason("beside") == Fallback.STORE_RESTING
    engine.store.release.set()
    deadline = time.monotonic() + 20
    while "trial" not in engine.salts and time.monotonic() < deadline:
        engine.match("trial")
    engine.half.rules = replace(engine.half.rules, patience_seconds=2.0)
    engine.admit("behind")
    assert engine.match("behind") == (32, False)
    assert engine.half.lookups.new_rests() == 1


@pytest.mark.parametrize("reason", [Fallback.LOAD_TIMEOUT, Fallback.LOAD_BACKEND_DOWN])
def test_a_store_that_does_not_give_what_it_says_it_has_rests_too(
    engine_of: EngineOf, reason: Fallback
) -> None:
    engine = engine_of()
    engine.admit("looked-up-before", plan="none")
    for index in range(MOST_FAILURES):
        load(engine, f"{index}", reason)
    engine.admit("resting")
    assert engine.reason("resting") == Fallback.STORE_RESTING
    # Asked once more, since what the engine found locally was found under the plan's salt.
    assert engine.match("looked-up-before") == (None, False)
    assert engine.salts["looked-up-before"] is None
    assert engine.match("looked-up-before") == (0, False)
    assert engine.reason("looked-up-before") == Fallback.STORE_RESTING
    engine.now += REST_SECONDS
    load(engine, "trial", None)
    load(engine, "behind", None)


@pytest.mark.parametrize("between", [None, Fallback.LOAD_ABSENT, Fallback.LOAD_CORRUPT])
def test_a_store_that_answers_between_two_failures_does_not_rest(
    engine_of: EngineOf, between: Fallback | None
) -> None:
    engine = engine_of()
    for index in range(3 * MOST_FAILURES):
        is_failing = index % MOST_FAILURES
        load(engine, f"{index}", Fallback.LOAD_TIMEOUT if is_failing else between)
    engine.admit("behind")
    assert engine.match("behind") == (32, False)


def test_a_failed_recompute_says_nothing_of_the_store(engine_of: EngineOf) -> None:
    engine = engine_of()
    for index in range(MOST_FAILURES - 1):
        load(engine, f"{index}", Fallback.LOAD_TIMEOUT)
    load(engine, "recompute", Fallback.RECOMPUTE_FAILED)
    load(engine, "last", Fallback.LOAD_TIMEOUT)
    engine.admit("resting")
    assert engine.reason("resting") == Fallback.STORE_RESTING


def test_a_request_that_is_to_try_the_store_keeps_its_turn_until_it_has(
    engine_of: EngineOf,
) -> None:
    engine = engine_of()
    for index in range(MOST_FAILURES):
        load(engine, f"{index}", Fallback.LOAD_TIMEOUT)
    engine.now += REST_SECONDS
    engine.admit("trial")
    engine.admit("beside", plan="none")
    # The engine may have no blocks for it yet, and asks again.
    assert [engine.match("trial") for _ in range(5)] == [(32, False)] * 5
    assert engine.match("beside") == (None, False)
    assert engine.reason("beside") == Fallback.STORE_RESTING
    # Preempted before its load was over, it is asked about anew.
    engine.half.allocate("trial", BLOCKS, 32)
    engine.half.report("trial", LoadReport(), engine.salter("trial"))
    for _ in range(MOST_FAILURES):
        engine.half.loads.failed()
    assert engine.match("trial") == (None, False)
    assert engine.match("trial") == (0, False)
    engine.now += LONGEST_REST_SECONDS
    load(engine, "later", None)


def test_an_updated_model_reuses_nothing_from_then_on(engine_of: EngineOf) -> None:
    engine = engine_of()
    engine.admit("waiting", plan="none")
    load(engine, "first", Fallback.WEIGHTS_CHANGED)
    assert engine.match("waiting", local=32) == (None, False)  # not even what the engine holds
    assert engine.salts["waiting"] is None
    assert engine.match("waiting") == (0, False)
    engine.admit("later")
    for name in ("first", "waiting", "later"):
        assert engine.reason(name) == Fallback.WEIGHTS_CHANGED
    assert not engine.half.loads.is_resting()


SUFFIX = [Span("suffix", layer, 1.0, 2.0) for layer in range(NUM_LAYERS)]


@pytest.mark.parametrize("ends_first", [False, True])
def test_the_suffix_pass_of_a_request_that_waited_is_timed_once(
    engine_of: EngineOf, ends_first: bool
) -> None:
    engine = engine_of(asynchronous=True, timeline=True)
    load = Span("load", 0, 0.0, 1.0)
    assert engine.load() == (32, True)
    assert engine.half.take_suffixes(["r"]) == []
    engine.half.report("r", LoadReport(loaded_bytes=7, spans=[load]), engine.salter("r"))
    assert engine.half.take_suffixes(["other"]) == []
    assert engine.half.take_suffixes(["r"]) == ["r"]
    assert engine.half.take_suffixes(["r"]) == []
    if ends_first:  # a request for one token
        engine.half.finish("r")
        assert engine.records == []
    engine.half.report_suffix("r", SUFFIX)
    assert engine.half.take_suffixes(["r"]) == []
    if not ends_first:
        engine.half.finish("r")
    (record,) = engine.records
    assert record.report.spans == [load, *SUFFIX]
    assert (record.reason, record.report.loaded_bytes) == (None, 7)
    engine.half.report_suffix("r", SUFFIX)  # of a request that is gone
    assert len(engine.records) == 1


def test_no_suffix_pass_is_timed_unasked(engine_of: EngineOf) -> None:
    for timeline, asynchronous in ((True, False), (False, True)):
        engine = engine_of(asynchronous=asynchronous, timeline=timeline)
        engine.admit()
        engine.match()
        engine.half.allocate("r", BLOCKS, 32)
        engine.half.report("r", LoadReport(), engine.salter("r"))
        assert engine.half.take_suffixes(["r"]) == []
