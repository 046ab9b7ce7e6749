"""Two real engines of vLLM, a sender's and then a receiver's, against the Hugging Face engine.

One engine lives at a time, in this process, and all tests share the two: starting one takes long.
Run with `pytest -m vllm`. Prompts are chunked (96 tokens a step) and blocks are scarce, so that
chunked prefill happens in every test and preemption in some.
"""

from __future__ import annotations

import gc
import json
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from droidkv.capture import capture
from droidkv.loading import LoadedModel, load_model
from droidkv.pair import ModelRef
from droidkv.plan import ReusePlan
from droidkv.prefill import Context, forward_suffix, full_prefill, generate, partial_prefill
from droidkv.serve.objects import ObjectName
from droidkv.serve.opening import open_store
from droidkv.serve.store import chunk_keys, deadline_in
from droidkv.stitch import StitchMap, fit_stitch
from droidkv.tiny import TinySpec, tiny_model, tiny_tokenizer

# Other runs of the same tests: an architecture of `tiny:`, torch.compile, another way of loading.
ARCHITECTURE = os.environ.get("DROIDKV_TEST_ARCHITECTURE", "llama")
COMPILED = os.environ.get("DROIDKV_TEST_COMPILED") == "1"
ORDER = os.environ.get("DROIDKV_TEST_ORDER", "streamed")
LOAD = os.environ.get("DROIDKV_TEST_LOAD", "sync")

if not COMPILED:  # vLLM compiles parts of its sampler with a C++ compiler even in eager mode
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
vllm = pytest.importorskip("vllm", reason="vLLM is not installed")

pytestmark = pytest.mark.vllm

# Chunks and blocks do not fit one another, so that prefixes end inside a block.
LAYERS, CHUNK, BLOCK = 5, 96, 64
# Longer recomputes wait while the engine goes on, so that both ways of loading are tested.
TOKENS_PER_STEP = 200
NUM_IDS = 259
TOLERANCE = 1e-4
STORE = "memory://test-vllm-engine"
PLANS = ["none", "all", "[0,2)", "[2,4)", "[3,5)", "[2,3)"]
NEW_TOKENS = 6


def token_ids(num_tokens: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, NUM_IDS, (num_tokens,), generator=generator).tolist()


LONG = token_ids(330, seed=1)


@dataclass(frozen=True)
class Models:
    """The two models, as folders for vLLM and loaded for the Hugging Face engine."""

    folder: Path
    sender: LoadedModel
    receiver: LoadedModel
    stitch: StitchMap


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    folder = tmp_path_factory.mktemp("models")
    loaded = {}
    for name, noise in (("sender", 0.0), ("receiver", 0.1)):
        spec = TinySpec(ARCHITECTURE, layers=LAYERS, noise=noise)
        tiny_model(spec, torch.float32, "cpu").save_pretrained(folder / name)
        tiny_tokenizer().save_pretrained(folder / name)
        loaded[name] = load_model(ModelRef(str(folder / name)))
    stitch = fit_stitch(loaded["sender"].model, loaded["receiver"].model, [LONG], rank=8)
    stitch.save(folder / "stitch.safetensors")
    return Models(folder, loaded["sender"], loaded["receiver"], stitch)


class Engine:
    """One engine of vLLM with the connector."""

    def __init__(self, models: Models, role: str, **extra: Any) -> None:
        self.audit = models.folder / f"{role}.jsonl"
        table = {"role": role, "store": STORE, "chunk_tokens": CHUNK, **extra}
        self.llm = vllm.LLM(
            model=str(models.folder / role),
            dtype="float32",
            enforce_eager=not COMPILED,
            max_model_len=512,
            max_num_batched_tokens=96,
            max_num_seqs=8,
            block_size=BLOCK,
            num_gpu_blocks_override=28,
            async_scheduling=False,
            max_logprobs=NUM_IDS,
            kv_transfer_config={
                "kv_connector": "DroidKVConnector",
                "kv_connector_module_path": "droidkv.serve.vllm_connector",
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": {**table, "audit": str(self.audit)},
            },
        )

    def answer(
        self, prompts: Sequence[list[int]], plans: Sequence[str | None], new: int = NEW_TOKENS
    ) -> list[tuple[Tensor, list[int]]]:
        """Log-probabilities of the first new token, and greedy tokens, of each prompt."""
        params = [
            vllm.SamplingParams(
                max_tokens=new,
                temperature=0,
                logprobs=NUM_IDS,
                ignore_eos=True,
                extra_args={"kv_transfer_params": {"droidkv": {"plan": plan}}} if plan else None,
            )
            for plan in plans
        ]
        requests = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = self.llm.generate(requests, params, use_tqdm=False)
        answers = []
        for output in outputs:
            first = output.outputs[0].logprobs[0]
            logprobs = torch.tensor([first[index].logprob for index in range(NUM_IDS)])
            answers.append((logprobs, list(output.outputs[0].token_ids)))
        return answers

    def records(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.audit.read_text().splitlines()]

    def worker(self) -> Any:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return get_kv_transfer_group()

    def forget(self) -> None:
        assert self.llm.reset_prefix_cache()

    def stop(self) -> None:
        from vllm.distributed import cleanup_dist_env_and_memory
        from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown

        self.llm.llm_engine.engine_core.shutdown()
        ensure_kv_transfer_shutdown()
        del self.llm
        gc.collect()
        cleanup_dist_env_and_memory()


PROMPTS = [LONG[:200], LONG[:330], token_ids(150, seed=2), LONG[:100] + token_ids(120, seed=3)]


@pytest.fixture(scope="module")
def stored(models: Models) -> dict[str, Any]:
    """What a sender's engine stored of PROMPTS before it was stopped."""
    engine = Engine(models, "sender", hidden_layers=list(range(1, LAYERS)))
    try:
        # One after the other, so that later ones find earlier ones' blocks in the prefix cache.
        engine.answer(PROMPTS[:1], [None])
        engine.answer(PROMPTS[1:], [None] * 3)
        worker = engine.worker()
        assert worker.flush(30)
        return {
            "namespace": worker._setup.namespace,
            "identity": worker._setup.identity,
            "gaps": worker._sender.chunks_without_hidden + worker._sender.chunks_failed,
        }
    finally:
        engine.stop()


def test_a_sender_stores_what_the_hugging_face_engine_captures(
    models: Models, stored: dict[str, Any]
) -> None:
    assert stored["identity"] == models.sender.fingerprint
    assert stored["gaps"] == 0
    store = open_store(STORE, CHUNK)
    compared = 0
    for prompt in PROMPTS:
        layers = range(1, LAYERS)
        cache = capture(models.sender.model, torch.tensor([prompt]), hidden_layers=layers)
        keys = chunk_keys(stored["namespace"], prompt, CHUNK)
        assert len(keys) == len(prompt) // CHUNK
        for key in keys:
            part = slice(key.index * CHUNK, (key.index + 1) * CHUNK)
            for layer in range(LAYERS):
                found = store.get_kv(key, layer, deadline_in(5))
                for mine, theirs in zip(
                    found, (cache.keys[layer], cache.values[layer]), strict=True
                ):
                    torch.testing.assert_close(mine, theirs[0, :, part], atol=1e-4, rtol=1e-4)
                if layer:
                    entering = store.get_hidden(key, layer, deadline_in(5))
                    wanted = cache.hidden[layer][0, part]
                    torch.testing.assert_close(entering, wanted, atol=1e-4, rtol=1e-4)
                compared += 1
    assert compared == LAYERS * (2 + 3 + 1 + 2)


@pytest.fixture(scope="module")
def engine(models: Models, stored: dict[str, Any]) -> Iterator[Engine]:
    """A receiver's engine, once the sender's is gone."""
    engine = Engine(
        models,
        "receiver",
        sender=str(models.folder / "sender"),
        allow_unprofiled=True,
        stitch=str(models.folder / "stitch.safetensors"),
        # No load here takes so long, however busy the machine.
        load_seconds=120.0,
        lookup_seconds=120.0,
        order=ORDER,
        load=LOAD,
        tokens_per_step=TOKENS_PER_STEP,
    )
    yield engine
    engine.stop()


@pytest.fixture(autouse=True)
def _forget(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "engine" in request.fixturenames:
        request.getfixturevalue("engine").forget()


def reference(
    models: Models, prompt: list[int], plan: str | None, new: int = NEW_TOKENS
) -> tuple[Tensor, list[int]]:
    """The Hugging Face engine's answer at a plan; None = its own full prefill."""
    num_tokens = (len(prompt) - 1) // CHUNK * CHUNK
    receiver = models.receiver.model
    context: Context
    if plan is None or num_tokens == 0:
        num_tokens = len(prompt) - 1
        context = full_prefill(receiver, torch.tensor([prompt[:num_tokens]]))
    else:
        prefix = torch.tensor([prompt[:num_tokens]])
        cache = capture(models.sender.model, prefix, hidden_layers=range(LAYERS))
        parsed = ReusePlan.parse(plan, LAYERS)
        context = partial_prefill(receiver, prefix, cache, parsed, models.stitch)
    suffix = torch.tensor([prompt[num_tokens:]])
    hidden = forward_suffix(receiver, context.fork(), suffix)
    logprobs = torch.log_softmax(receiver.logits(hidden)[0, -1], dim=-1)
    return logprobs, generate(receiver, context, suffix, new, set())[0]


def assert_same(mine: tuple[Tensor, list[int]], theirs: tuple[Tensor, list[int]]) -> None:
    torch.testing.assert_close(mine[0], theirs[0], atol=TOLERANCE, rtol=0)
    assert mine[1] == theirs[1]


@pytest.mark.parametrize("plan", [*PLANS, "[2,4)+stitch"])
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


def test_a_batch_of_plans_and_plain_requests(models: Models, engine: Engine) -> None:
    plans = [None, *PLANS, "[2,4)+stitch", None, *PLANS]
    prompts = [PROMPTS[index % len(PROMPTS)] for index in range(len(plans))]
    answers = engine.answer(prompts, plans)
    for answer, prompt, plan in zip(answers, prompts, plans, strict=True):
        assert_same(answer, reference(models, prompt, plan))


LENGTHS = sorted(
    {
        border + step
        for border in (CHUNK, 2 * CHUNK, 3 * CHUNK, BLOCK, 3 * BLOCK)
        for step in (-1, 0, 1)
    }
)


def test_prompts_around_chunks_and_blocks(models: Models, engine: Engine) -> None:
    prompts = [LONG[:length] for length in LENGTHS]
    answers = engine.answer(prompts, ["[2,4)"] * len(prompts))
    for answer, prompt in zip(answers, prompts, strict=True):
        assert_same(answer, reference(models, prompt, "[2,4)"))


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


def test_long_recomputes_wait_while_others_are_answered(models: Models, engine: Engine) -> None:
    answers = engine.answer([LONG, PROMPTS[0]], ["[1,4)", "[1,4)"])
    for answer, prompt in zip(answers, [LONG, PROMPTS[0]], strict=True):
        assert_same(answer, reference(models, prompt, "[1,4)"))
    waited = {each["advertised_tokens"]: each["asynchronous"] for each in engine.records()[-2:]}
    assert waited == {288: True, 192: LOAD == "async"}


def test_preempted_requests_answer_the_same(
    models: Models, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = engine.llm.llm_engine.engine_core.engine_core.scheduler
    preempt, preempted = scheduler._preempt_request, []

    def counting(request: Any, *others: Any, **named: Any) -> Any:
        preempted.append(request.request_id)
        return preempt(request, *others, **named)

    monkeypatch.setattr(scheduler, "_preempt_request", counting)
    prompts = [LONG[: 200 + index] for index in range(8)]
    plans: list[str | None] = ["[2,4)", "none", None, "[0,2)"] * 2
    answers = engine.answer(prompts, plans, new=90)
    for answer, prompt, plan in zip(answers, prompts, plans, strict=True):
        assert_same(answer, reference(models, prompt, plan, new=90))
    assert preempted


Fault = Callable[[ObjectName, Tensor | None], Tensor | None]


def absent(name: ObjectName, found: Tensor | None) -> Tensor | None:
    return None


def corrupt(name: ObjectName, found: Tensor | None) -> Tensor | None:
    if found is not None:
        found[-1] ^= 1
    return found


def short(name: ObjectName, found: Tensor | None) -> Tensor | None:
    return None if found is None else found[: found.numel() // 2].clone()


def down(name: ObjectName, found: Tensor | None) -> Tensor | None:
    raise ConnectionError("gone")


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (absent, "load_absent"),
        (corrupt, "load_corrupt"),
        (short, "load_short"),
        (down, "load_backend_down"),
    ],
)
@pytest.mark.parametrize("where", [("hidden", 2), ("kv", 0), ("kv", LAYERS - 1)])
def test_any_fault_gives_the_requests_own_prefill(
    models: Models,
    engine: Engine,
    monkeypatch: pytest.MonkeyPatch,
    fault: Fault,
    reason: str,
    where: tuple[str, int],
) -> None:
    store: Any = open_store(STORE, CHUNK)
    read = store._read
    whole = dict(store._objects)  # the store forgets objects that it finds damaged

    def faulty(names: Sequence[ObjectName], deadline: float) -> list[Tensor | None]:
        return [
            fault(name, each) if (name.kind, name.layer) == where and name.key.index == 1 else each
            for name, each in zip(names, read(names, deadline), strict=True)
        ]

    monkeypatch.setattr(store, "_read", faulty)
    # Two that fail, loaded in both ways; one that does not, and a plain one, beside them.
    prompts = [PROMPTS[0], LONG, LONG[:100], PROMPTS[2]]
    answers = engine.answer(prompts, ["[2,4)", "[2,4)", "[2,4)", None])
    for answer, prompt, plan in zip(answers, prompts, [None, None, "[2,4)", None], strict=True):
        assert_same(answer, reference(models, prompt, plan))
    reasons = [str(each["reason"]) for each in engine.records()[-4:]]
    # The second to come to a damaged object finds it gone.
    assert (
        {"None", "not_asked", reason}
        <= set(reasons)
        <= {
            "None",
            "not_asked",
            reason,
            "load_absent",
        }
    )
    assert len([each for each in reasons if each.startswith("load_")]) == 2
    monkeypatch.undo()
    store._objects.update(whole)
    # What the failed requests computed by themselves is not found under the plan's salt.
    for plan in ("[2,4)", None):
        answers = engine.answer(prompts[:2], [plan, plan])
        for answer, prompt in zip(answers, prompts, strict=False):
            assert_same(answer, reference(models, prompt, plan))


def test_a_store_that_hangs_gives_the_requests_own_prefill_at_the_deadline(
    models: Models, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    store: Any = open_store(STORE, CHUNK)
    release = threading.Event()
    read = store._read

    def hang(names: Sequence[ObjectName], deadline: float) -> list[Tensor | None]:
        if names[0].kind == "kv" and names[0].layer == LAYERS - 1:
            release.wait(600)
        found: list[Tensor | None] = read(names, deadline)
        return found

    monkeypatch.setattr(store, "_read", hang)
    monkeypatch.setattr(engine.worker()._receiver, "_load_seconds", 3.0)
    answers = engine.answer([PROMPTS[0], LONG], ["[2,4)", "[2,4)"])
    release.set()
    for answer, prompt in zip(answers, (PROMPTS[0], LONG), strict=True):
        assert_same(answer, reference(models, prompt, None))
    assert [each["reason"] for each in engine.records()[-2:]] == ["load_timeout"] * 2
