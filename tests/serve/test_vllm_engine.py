"""Two real engines of vLLM, a sender's and then a receiver's, against the Hugging Face engine.

One engine lives at a time, in this process, and all tests share the two: starting one takes long.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest
import torch
from serve.engines import (
    BLOCK,
    CHUNK,
    LAYERS,
    LONG,
    PLANS,
    PROMPTS,
    STITCHED,
    TOLERANCE,
    Answer,
    Engine,
    Models,
    assert_all_same,
    assert_same,
    assert_stored,
    make_models,
    own_answer,
    reference,
    rest_no_more,
    sampling_params,
    token_ids,
)
from torch import Tensor

from droidkv.errors import UnsupportedModelError
from droidkv.plan import ReusePlan
from droidkv.prefill import forward_suffix, full_prefill
from droidkv.serve.breaker import MOST_FAILURES, REST_SECONDS, Breaker
from droidkv.serve.connector_plan import LOAD_ORDERS
from droidkv.serve.objects import ObjectName
from droidkv.serve.opening import open_store
from droidkv.serve.settings import LOAD_MODES

pytestmark = pytest.mark.vllm

STORE = "memory://test-vllm-engine"
WAYS = [(order, load) for order in LOAD_ORDERS for load in LOAD_MODES]
UNSTORABLE = token_ids(200, seed=40)
CROWD = [token_ids(200 + index, seed=20 + index) for index in range(8)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return make_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def stored(models: Models) -> dict[str, Any]:
    """What a sender's engine stored of PROMPTS and CROWD, and said, before it was stopped."""
    engine = Engine(models.folder, "sender", STORE)
    try:
        # One after the other, so that later ones find earlier ones' blocks in the prefix cache.
        first = engine.answer(PROMPTS[:1], [None])
        first += engine.answer(PROMPTS[1:], [None] * 3)
        with counted_preemptions(engine) as preempted:
            crowd = engine.answer(CROWD, [None] * 8, new=90)
        worker = engine.worker()
        assert worker.flush(30)
        ended = worker._sender.counts()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(open_store(STORE, CHUNK), "_write", _refuse)
            unstored = engine.answer([UNSTORABLE], [None])
            assert worker.flush(30)
        return {
            "namespace": worker._setup.namespace,
            "identity": worker._setup.identity,
            "gaps": sum(ended.values()) - ended["stored"] - ended["present"],
            "present": ended["present"],
            "failed": worker._sender.counts()["failed"],
            "preempted": preempted,
            "answers": [*first, *crowd, *unstored],
        }
    finally:
        engine.stop()


def _refuse(name: ObjectName, buffer: Tensor) -> None:
    raise ConnectionError("gone")


class counted_preemptions:
    """Names of the requests that an engine preempts meanwhile."""

    def __init__(self, engine: Engine) -> None:
        self._scheduler = engine.scheduler()
        self._patch = pytest.MonkeyPatch()
        self._names: list[str] = []

    def __enter__(self) -> list[str]:
        preempt = self._scheduler._preempt_request

        def counting(request: Any, *others: Any, **named: Any) -> Any:
            self._names.append(request.request_id)
            return preempt(request, *others, **named)

        self._patch.setattr(self._scheduler, "_preempt_request", counting)
        return self._names

    def __exit__(self, *error: object) -> None:
        self._patch.undo()


def test_a_sender_stores_what_the_hugging_face_engine_captures(
    models: Models, stored: dict[str, Any]
) -> None:
    assert stored["identity"] == models.sender.fingerprint
    assert stored["gaps"] == 0
    assert stored["present"] >= len(PROMPTS[0]) // CHUNK  # two prompts begin alike
    assert stored["preempted"]
    assert_stored(models, open_store(STORE, CHUNK), stored["namespace"], [*PROMPTS, *CROWD])


def test_a_sender_answers_as_without_a_store_even_if_that_is_down(
    models: Models, stored: dict[str, Any]
) -> None:
    assert stored["failed"] == len(UNSTORABLE) // CHUNK
    asked = [*PROMPTS, *CROWD, UNSTORABLE]
    for answer, prompt in zip(stored["answers"], asked, strict=True):
        assert_same(answer, own_answer(models.sender.model, prompt, len(answer[1])))


@pytest.fixture(scope="module")
def engine(models: Models, stored: dict[str, Any]) -> Iterator[Engine]:
    """A receiver's engine, once the sender's is gone."""
    engine = Engine(models.folder, "receiver", STORE)
    yield engine
    engine.stop()


@pytest.fixture(autouse=True)
def _forget(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every test starts on an empty prefix cache and a store that is asked, and gives all blocks
    back."""
    yield
    if "engine" in request.fixturenames:
        engine = request.getfixturevalue("engine")
        engine.forget()
        rest_no_more(engine)


def change_rules(engine: Engine, patch: pytest.MonkeyPatch, **changes: Any) -> None:
    half = engine.scheduler().connector._receiver_scheduler
    patch.setattr(half, "rules", replace(half.rules, **changes))


def load_so(engine: Engine, patch: pytest.MonkeyPatch, way: tuple[str, str]) -> None:
    order, load = way
    patch.setattr(engine.worker()._receiver, "_order", order)
    change_rules(engine, patch, asynchronous=load == "async")


@pytest.mark.parametrize("plan", [*PLANS, STITCHED])
def test_a_plan_answers_as_the_hugging_face_engine(
    models: Models, engine: Engine, plan: str
) -> None:
    prompt = PROMPTS[0]
    (answer,) = engine.answer([prompt], [plan])
    assert_same(answer, reference(models, prompt, plan))
    record = engine.records()[-1]
    if plan == "all":
        assert record["reason"] == "full_prefill"
    else:
        assert (record["reason"], record["advertised_tokens"]) == (None, 192)
        # Other plans are far from this one, so that the comparison tells them apart.
        full = reference(models, prompt, None)[0]
        assert (answer[0] - full).abs().max() > 100 * TOLERANCE


@pytest.mark.parametrize("way", WAYS)
def test_a_batch_of_plans_and_plain_requests(
    models: Models, engine: Engine, monkeypatch: pytest.MonkeyPatch, way: tuple[str, str]
) -> None:
    load_so(engine, monkeypatch, way)
    plans = [None, *PLANS, STITCHED, None, *PLANS]
    prompts = [PROMPTS[index % len(PROMPTS)] for index in range(len(plans))]
    assert_all_same(models, engine.answer(prompts, plans), prompts, plans)


LENGTHS = sorted(
    {
        border + step
        for border in (CHUNK, 2 * CHUNK, 3 * CHUNK, BLOCK, 3 * BLOCK, 4 * BLOCK)
        for step in (-1, 0, 1)
    }
)


@pytest.mark.parametrize("plan", ["none", "[2,4)", STITCHED])
def test_prompts_around_chunks_and_blocks(models: Models, engine: Engine, plan: str) -> None:
    prompts = [LONG[:length] for length in LENGTHS]
    plans = [plan] * len(prompts)
    assert_all_same(models, engine.answer(prompts, plans), prompts, plans)


def test_mixed_blocks_never_answer_an_exact_request_nor_the_other_way_round(
    models: Models, engine: Engine
) -> None:
    prompt = PROMPTS[1]
    for plan in (None, "none", None, "[2,4)", "none", None, "[2,4)"):
        (answer,) = engine.answer([prompt], [plan])
        assert_same(answer, reference(models, prompt, plan))


def test_only_what_the_engine_lacks_of_a_prefix_is_loaded(models: Models, engine: Engine) -> None:
    prompts = [LONG, LONG, LONG[:288] + token_ids(40, seed=9)]
    for prompt in prompts:
        (answer,) = engine.answer([prompt], ["[2,4)"])
        assert_same(answer, reference(models, prompt, "[2,4)"))
    found = [
        (each["local_tokens"], each["advertised_tokens"], each["recomputed_tokens"])
        for each in engine.records()[-3:]
    ]
    # The last one shares four whole blocks; the fifth holds the end of the prefix.
    assert found == [(0, 288, 288), (288, 0, 0), (256, 32, 32)]


@pytest.mark.parametrize("load", LOAD_MODES)
def test_long_recomputes_wait_while_others_are_answered(
    models: Models, engine: Engine, monkeypatch: pytest.MonkeyPatch, load: str
) -> None:
    load_so(engine, monkeypatch, ("streamed", load))
    prompts, plans = [LONG, PROMPTS[0]], ["[1,4)", "[1,4)"]
    assert_all_same(models, engine.answer(prompts, plans), prompts, plans)
    waited = {each["advertised_tokens"]: each["asynchronous"] for each in engine.records()[-2:]}
    assert waited == {288: True, 192: load == "async"}


@pytest.mark.parametrize("load", LOAD_MODES)
def test_many_requests_for_one_prefix_load_it_once(
    models: Models, engine: Engine, monkeypatch: pytest.MonkeyPatch, load: str
) -> None:
    load_so(engine, monkeypatch, ("streamed", load))
    store = open_store(STORE, CHUNK)
    before = store.stats().gets
    shared = LONG[: 2 * CHUNK]  # whole blocks
    prompts = [shared + token_ids(20 + index, seed=80 + index) for index in range(20)]
    plans = ["[2,4)"] * len(prompts)
    assert_all_same(models, engine.answer(prompts, plans), prompts, plans)
    # KV of the reused layers, and E at the plan's start, of two chunks.
    assert store.stats().gets - before == 2 * (LAYERS - 2 + 1)
    records = engine.records()[-len(prompts) :]
    assert sorted(each["advertised_tokens"] for each in records) == [0] * 19 + [len(shared)]


@pytest.mark.parametrize("load", LOAD_MODES)
def test_preempted_requests_answer_the_same(
    models: Models, engine: Engine, monkeypatch: pytest.MonkeyPatch, load: str
) -> None:
    load_so(engine, monkeypatch, ("streamed", load))
    prompts = [LONG[: 200 + index] for index in range(4)] + CROWD[:4]
    plans: list[str | None] = ["[2,4)", "none", None, "[0,2)"] * 2
    with counted_preemptions(engine) as preempted:
        answers = engine.answer(prompts, plans, new=90)
    assert_all_same(models, answers, prompts, plans, new=90)
    assert preempted


def test_a_request_for_one_token_is_recorded_like_others(models: Models, engine: Engine) -> None:
    (answer,) = engine.answer([PROMPTS[0]], ["[2,4)"], new=1)
    assert_same(answer, reference(models, PROMPTS[0], "[2,4)", new=1))
    record = engine.records()[-1]
    assert (record["reason"], record["recomputed_tokens"]) == (None, 192)
    assert record["loaded_bytes"] > 0


def test_several_samples_of_one_prompt_share_its_plan(models: Models, engine: Engine) -> None:
    (output,) = engine.generate([PROMPTS[0]], ["[2,4)"], n=3, temperature=0.01)
    wanted = reference(models, PROMPTS[0], "[2,4)")[1]
    assert [list(each.token_ids) for each in output.outputs] == [wanted] * 3


def test_a_request_that_reads_no_cached_prefix_is_prefilled(models: Models, engine: Engine) -> None:
    engine.answer([PROMPTS[0]], ["[2,4)"])
    (output,) = engine.generate([PROMPTS[0]], ["[2,4)"], skip_reading_prefix_cache=True)
    assert list(output.outputs[0].token_ids) == reference(models, PROMPTS[0], None)[1]
    assert engine.records()[-1]["reason"] == "opted_out"


def test_structured_output_reuses(models: Models, engine: Engine) -> None:
    from vllm.sampling_params import StructuredOutputsParams

    words = StructuredOutputsParams(choice=["yes", "perhaps"])
    prompt = PROMPTS[0]
    (output,) = engine.generate(
        [prompt], ["[2,4)"], new=12, structured_outputs=words, ignore_eos=False
    )
    decode = engine.llm.get_tokenizer().decode
    chosen = decode(output.outputs[0].token_ids, skip_special_tokens=True)
    assert chosen in ("yes", "perhaps")
    assert engine.records()[-1]["reason"] is None
    # Only the choice of tokens is bound, not what they are chosen by.
    (free,) = engine.answer([prompt], ["[2,4)"])
    assert_same(free, reference(models, prompt, "[2,4)"))


def test_every_step_of_a_beam_search_is_on_the_servers_plan(
    models: Models, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.sampling_params import BeamSearchParams

    change_rules(engine, monkeypatch, choose=lambda prefix, suffix: ReusePlan.of(2, 4))
    before = len(engine.records())
    params = BeamSearchParams(beam_width=1, max_tokens=3, ignore_eos=True)
    (output,) = engine.llm.beam_search([{"prompt_token_ids": PROMPTS[0]}], params)
    wanted = reference(models, PROMPTS[0], "[2,4)", new=3)[1]
    assert output.sequences[0].tokens[len(PROMPTS[0]) :] == wanted
    records = engine.records()[before:]
    assert [(each["reason"], each["plan"]) for each in records] == [(None, "[2,4)")] * 3


def test_the_timeline_of_a_load_that_was_waited_for_has_its_suffix_pass(
    models: Models, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_so(engine, monkeypatch, ("streamed", "async"))
    monkeypatch.setattr(engine.worker()._receiver, "_timeline", True)
    change_rules(engine, monkeypatch, timeline=True)
    for new in (6, 1):  # of one token: the request ends in the step of its suffix pass
        engine.forget()
        (answer,) = engine.answer([PROMPTS[0]], ["[2,4)"], new=new)
        assert_same(answer, reference(models, PROMPTS[0], "[2,4)", new=new))
        record = engine.records()[-1]
        assert (record["reason"], record["asynchronous"]) == (None, True)
        spans = record["spans"]
        suffix = [span for span in spans if span[0] == "suffix"]
        assert [layer for _, layer, _, _ in suffix] == list(range(LAYERS))
        assert min(span[2] for span in suffix) >= max(span[3] for span in spans[: -len(suffix)])


def test_prompt_log_probabilities_are_the_requests_own(models: Models, engine: Engine) -> None:
    prompt, model = PROMPTS[0], models.receiver.model
    engine.answer([prompt], ["[2,4)"])  # its mixed blocks are there to be mistaken for exact ones
    (output,) = engine.generate([prompt], ["[2,4)"], prompt_logprobs=0)
    context = full_prefill(model, torch.tensor([prompt[:1]]))
    hidden = forward_suffix(model, context, torch.tensor([prompt[1:]]))
    wanted = torch.log_softmax(model.logits(hidden)[0], dim=-1)
    found = [output.prompt_logprobs[index][prompt[index]].logprob for index in range(2, 200)]
    expected = wanted[:-1].gather(1, torch.tensor(prompt[2:])[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(found), expected, atol=TOLERANCE, rtol=0)
    assert list(output.outputs[0].token_ids) == reference(models, prompt, None)[1]
    assert engine.records()[-1]["reason"] == "prompt_logprobs"


Fault = Callable[[ObjectName, Tensor | None], Tensor | None]


def absent(name: ObjectName, found: Tensor | None) -> Tensor | None:
    return None


def corrupt(name: ObjectName, found: Tensor | None) -> Tensor | None:
    if found is not None:
        found = found.clone()
        found[-1] ^= 1
    return found


def short(name: ObjectName, found: Tensor | None) -> Tensor | None:
    return None if found is None else found[: found.numel() // 2].clone()


def down(name: ObjectName, found: Tensor | None) -> Tensor | None:
    raise ConnectionError("gone")


FAULTS = [
    (absent, "load_absent"),  # the store said a moment ago that it was there
    (corrupt, "load_corrupt"),
    (short, "load_short"),
    (down, "load_backend_down"),
]
# The place of the fault in a load, and the way of loading: each fault meets each.
PLACES = [
    (("hidden", 2), ("streamed", "sync")),
    (("kv", 0), ("streamed", "sync")),
    (("kv", LAYERS - 1), ("streamed", "sync")),
    (("kv", LAYERS - 1), ("streamed", "async")),
    (("kv", 3), ("all_first", "sync")),
    (("kv", LAYERS - 1), ("reused_first", "async")),
]


@pytest.mark.parametrize(("fault", "reason"), FAULTS)
@pytest.mark.parametrize(("where", "way"), PLACES)
def test_any_fault_gives_the_requests_own_prefill(
    models: Models,
    engine: Engine,
    monkeypatch: pytest.MonkeyPatch,
    fault: Fault,
    reason: str,
    where: tuple[str, int],
    way: tuple[str, str],
) -> None:
    store: Any = open_store(STORE, CHUNK)
    read = store._read
    whole = dict(store._objects)  # the store forgets objects that it finds damaged

    def faulty(
        names: Sequence[ObjectName], deadline: float, lent: ExitStack
    ) -> list[Tensor | None]:
        return [
            fault(name, each) if (name.kind, name.layer) == where and name.key.index == 1 else each
            for name, each in zip(names, read(names, deadline, lent), strict=True)
        ]

    load_so(engine, monkeypatch, way)
    monkeypatch.setattr(store, "_read", faulty)
    # Two that fail, loaded in both ways; one that does not, and a plain one, beside them.
    prompts = [PROMPTS[0], LONG, LONG[:100], PROMPTS[2]]
    answers = engine.answer(prompts, ["[2,4)", "[2,4)", "[2,4)", None])
    assert_all_same(models, answers, prompts, [None, None, "[2,4)", None])
    reasons = [str(each["reason"]) for each in engine.records()[-4:]]
    # The second to come to a damaged object finds it gone.
    expected = {"None", "not_asked", reason}
    assert expected <= set(reasons) <= expected | {"load_absent"}
    assert len([each for each in reasons if each.startswith("load_")]) == 2
    monkeypatch.undo()
    store._objects.update(whole)
    # What the failed requests computed by themselves is not found under the plan's salt.
    for plan in ("[2,4)", None):
        answers = engine.answer(prompts[:2], [plan, plan])
        assert_all_same(models, answers, prompts[:2], [plan, plan])


@pytest.mark.parametrize("load", LOAD_MODES)
def test_a_store_that_fails_always_ends_every_request(
    models: Models, engine: Engine, monkeypatch: pytest.MonkeyPatch, load: str
) -> None:
    load_so(engine, monkeypatch, ("streamed", load))
    store: Any = open_store(STORE, CHUNK)

    def refuse(
        names: Sequence[ObjectName], deadline: float, lent: ExitStack
    ) -> list[Tensor | None]:
        raise ConnectionError("gone")

    monkeypatch.setattr(store, "_read", refuse)
    prompts = [*PROMPTS, *CROWD]
    answers = engine.answer(prompts, ["[2,4)"] * len(prompts))
    assert_all_same(models, answers, prompts, [None] * len(prompts))
    reasons = [each["reason"] for each in engine.records()[-len(prompts) :]]
    assert set(reasons) == {"load_backend_down", "store_resting"}
    assert reasons.count("load_backend_down") >= MOST_FAILURES


@pytest.mark.parametrize("load", LOAD_MODES)
def test_a_store_that_hangs_gives_the_requests_own_prefill_at_the_deadline(
    models: Models, engine: Engine, monkeypatch: pytest.MonkeyPatch, load: str
) -> None:
    load_so(engine, monkeypatch, ("streamed", load))
    with hanging_reads(monkeypatch):
        monkeypatch.setattr(engine.worker()._receiver, "_load_seconds", 3.0)
        change_rules(engine, monkeypatch, load_seconds=3.0)
        prompts = [PROMPTS[0], LONG, LONG, LONG, LONG]
        answers = engine.answer(prompts, ["[2,4)"] * 5)
    assert_all_same(models, answers, prompts, [None] * 5)
    assert [each["reason"] for each in engine.records()[-5:]] == ["load_timeout"] * 5


@pytest.mark.parametrize("load", LOAD_MODES)
def test_a_store_that_hangs_is_not_waited_for_again_and_again(
    models: Models, engine: Engine, monkeypatch: pytest.MonkeyPatch, load: str
) -> None:
    load_so(engine, monkeypatch, ("streamed", load))
    half, now = engine.scheduler().connector._receiver_scheduler, 1000.0
    monkeypatch.setattr(half, "loads", Breaker(clock=lambda: now))
    prompts = [LONG[: 200 + index] for index in range(MOST_FAILURES + 3)]
    with hanging_reads(monkeypatch) as reads:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine.worker()._receiver, "_load_seconds", 0.5)
            for prompt in prompts[:MOST_FAILURES]:
                (answer,) = engine.answer([prompt], ["[2,4)"])
                assert_same(answer, reference(models, prompt, None))
        # From here on a load would hang for two minutes.
        reads.hanging.clear()
        for prompt in prompts[MOST_FAILURES:]:
            (answer,) = engine.answer([prompt], ["[2,4)"])
            assert_same(answer, reference(models, prompt, None))
        assert not reads.hanging.is_set()
    reasons = [each["reason"] for each in engine.records()[-len(prompts) :]]
    assert reasons == ["load_timeout"] * MOST_FAILURES + ["store_resting"] * 3
    now += REST_SECONDS
    for _ in range(2):
        (answer,) = engine.answer([LONG], ["[2,4)"])
        assert_same(answer, reference(models, LONG, "[2,4)"))
        assert engine.records()[-1]["reason"] is None


def test_a_recompute_that_fails_gives_the_requests_own_prefill(
    models: Models, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(engine.worker()._model, "recompute", fail)
    prompts = [PROMPTS[0], LONG, PROMPTS[2]]
    answers = engine.answer(prompts, ["[2,4)", "[2,4)", "none"])
    assert_all_same(models, answers, prompts, [None, None, "none"])
    reasons = [str(each["reason"]) for each in engine.records()[-3:]]
    assert sorted(reasons) == ["None", "recompute_failed", "recompute_failed"]


class hanging_reads:
    """The last layer's KV are not answered while this lasts."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        store: Any = open_store(STORE, CHUNK)
        self.release, self.hanging = threading.Event(), threading.Event()
        read = store._read

        def hang(
            names: Sequence[ObjectName], deadline: float, lent: ExitStack
        ) -> list[Tensor | None]:
            if names[0].kind == "kv" and names[0].layer == LAYERS - 1:
                self.hanging.set()
                self.release.wait(600)
            found: list[Tensor | None] = read(names, deadline, lent)
            return found

        patch.setattr(store, "_read", hang)

    def __enter__(self) -> hanging_reads:
        return self

    def __exit__(self, *error: object) -> None:
        self.release.set()


def test_an_aborted_request_gives_its_blocks_back_and_others_go_on(
    models: Models, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_so(engine, monkeypatch, ("streamed", "async"))
    core: Any = engine.llm.llm_engine
    with hanging_reads(monkeypatch) as reads:
        core.add_request("gone", {"prompt_token_ids": LONG}, sampling_params("[2,4)", 4))
        while not reads.hanging.is_set():
            core.step()
        # Others are answered while it waits, and after it was given up.
        assert_same(engine_answer(engine, "beside", PROMPTS[2]), own(models, PROMPTS[2]))
        core.abort_request(["gone"])
        assert_same(engine_answer(engine, "behind", PROMPTS[0]), own(models, PROMPTS[0]))
    while core.has_unfinished_requests():
        core.step()
    (answer,) = engine.answer([LONG], ["[2,4)"])
    assert_same(answer, reference(models, LONG, "[2,4)"))
    reasons = [each["reason"] for each in engine.records()[-4:]]
    assert sorted(reasons, key=str) == [None, "aborted", "not_asked", "not_asked"]


def test_an_abort_in_the_step_whose_load_fails_leaves_nothing_to_be_found(
    models: Models, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine has the blocks in its cache by then, and frees them before it hears of it."""
    load_so(engine, monkeypatch, ("streamed", "sync"))
    core: Any = engine.llm.llm_engine
    inner = core.engine_core.engine_core
    store: Any = open_store(STORE, CHUNK)
    read = store._read

    def gone(names: Sequence[ObjectName], deadline: float, lent: ExitStack) -> list[Tensor | None]:
        found: list[Tensor | None] = read(names, deadline, lent)
        if names[0].kind == "kv" and names[0].layer == LAYERS - 1:
            inner.aborts_queue.put(list(inner.scheduler.requests))
            return [None] * len(found)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(store, "_read", gone)
        core.add_request("gone", {"prompt_token_ids": LONG}, sampling_params("none", 4))
        core.step()
    core.abort_request(["gone"])
    (answer,) = engine.answer([LONG], ["none"])
    assert_same(answer, reference(models, LONG, "none"))
    records = engine.records()[-2:]
    assert [each["reason"] for each in records] == ["aborted", None]
    assert not records[0]["asynchronous"]
    assert records[1]["advertised_tokens"] > 0  # loaded anew, not found


def own(models: Models, prompt: list[int]) -> Answer:
    return reference(models, prompt, None)


def engine_answer(engine: Engine, name: str, prompt: list[int]) -> Answer:
    """A plain request's answer, beside whatever else is under way."""
    core: Any = engine.llm.llm_engine
    core.add_request(name, {"prompt_token_ids": prompt}, sampling_params(None, 6))
    while True:
        for output in core.step():
            if output.request_id == name and output.finished:
                first = output.outputs[0].logprobs[0]
                logprobs = torch.tensor([first[index].logprob for index in range(len(first))])
                return logprobs, list(output.outputs[0].token_ids)


@pytest.mark.parametrize("reason", ["lookup_timeout", "lookup_backend_down"])
def test_a_store_that_cannot_be_asked_gives_the_requests_own_prefill(
    models: Models, engine: Engine, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    store: Any = open_store(STORE, CHUNK)
    release = threading.Event()

    def count(names: Sequence[ObjectName], deadline: float) -> int:
        if reason == "lookup_timeout":
            release.wait(600)
        raise ConnectionError("gone")

    monkeypatch.setattr(store, "_count_leading", count)
    change_rules(engine, monkeypatch, lookup_seconds=1.0)
    answers = engine.answer(PROMPTS[:2], ["[2,4)", "none"])
    release.set()
    assert_all_same(models, answers, PROMPTS[:2], [None, None])
    assert {each["reason"] for each in engine.records()[-2:]} == {reason}


def test_a_cache_that_no_known_layout_reads_is_refused(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    from droidkv.serve import vllm_engine

    model = engine.worker()._receiver._model
    with torch.inference_mode():
        assert model._find_layout() is model._layout
        others = tuple(each for each in vllm_engine._LAYOUTS if each is not model._layout)
        monkeypatch.setattr(vllm_engine, "_LAYOUTS", others)
        with pytest.raises(UnsupportedModelError, match="to have a known layout"):
            model._find_layout()


def test_what_was_evicted_shortens_the_prefix(models: Models, engine: Engine) -> None:
    store: Any = open_store(STORE, CHUNK)
    whole = dict(store._objects)
    gone = [
        name
        for name in whole
        if (name.kind, name.layer, name.key.index) in {("hidden", 2, 2), ("kv", 1, 2)}
    ]
    prompt = LONG
    try:
        for name in gone:
            del store._objects[name]
        (answer,) = engine.answer([prompt], ["[2,4)"])
    finally:
        store._objects.update(whole)
    record = engine.records()[-1]
    assert (record["reason"], record["advertised_tokens"]) == (None, 2 * CHUNK)
    # As if the prompt's prefix had been two chunks long.
    shorter = reference(models, prompt, "[2,4)", prefix_tokens=2 * CHUNK)
    assert_same(answer, shorter)
    assert (answer[0] - reference(models, prompt, "[2,4)")[0]).abs().max() > 10 * TOLERANCE
