"""Real engines of vLLM for tests, tiny models for them, and the Hugging Face engine beside them."""

from __future__ import annotations

import gc
import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from droidkv.capture import capture
from droidkv.loading import LoadedModel, load_model
from droidkv.models import DecoderModel
from droidkv.pair import ModelRef
from droidkv.plan import ReusePlan
from droidkv.prefill import Context, forward_suffix, full_prefill, generate, partial_prefill
from droidkv.serve.processes import IN_PROCESS
from droidkv.serve.store import Store, chunk_keys, deadline_in, namespace_digest
from droidkv.stitch import StitchMap, fit_stitch
from droidkv.tiny import TinySpec, tiny_model, tiny_tokenizer

# Of whoever imports this; another process may be told otherwise.
ENVIRONMENT = {**IN_PROCESS, "VLLM_NO_USAGE_STATS": "1"}
COMPILED = os.environ.get("DROIDKV_TEST_COMPILED") == "1"
if COMPILED:
    os.environ["TORCHDYNAMO_DISABLE"] = "0"
for _name, _value in ENVIRONMENT.items():
    os.environ.setdefault(_name, _value)
vllm = pytest.importorskip("vllm", reason="vLLM is not installed (make test-serve)")

# Chunks and blocks do not fit one another, so that prefixes end inside a block.
LAYERS, CHUNK, BLOCK = 5, 96, 64
# Longer recomputes wait while the engine goes on, so that both ways of loading are tested.
TOKENS_PER_STEP = 200
NUM_IDS = 259
TOLERANCE = 1e-4
# Of a layer's KV or E, as a part of its largest value.
CAPTURE_TOLERANCE = 1e-5
PLANS = ["none", "all", "[0,2)", "[2,4)", "[3,5)", "[2,3)"]
STITCHED = "[2,4)+stitch"
NEW_TOKENS = 6

Answer = tuple[Tensor, list[int]]


def token_ids(num_tokens: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, NUM_IDS, (num_tokens,), generator=generator).tolist()


LONG = token_ids(330, seed=1)
PROMPTS = [LONG[:200], LONG[:330], token_ids(150, seed=2), LONG[:100] + token_ids(120, seed=3)]


@dataclass(frozen=True)
class Models:
    """The two models, as folders for vLLM and loaded for the Hugging Face engine."""

    folder: Path
    sender: LoadedModel
    receiver: LoadedModel
    stitch: StitchMap | None


def make_models(folder: Path, architecture: str = "llama") -> Models:
    """A base and its fine-tune, in `folder/sender` and `folder/receiver`, and a map between."""
    loaded = {}
    for name, noise in (("sender", 0.0), ("receiver", 0.1)):
        spec = TinySpec(architecture, layers=LAYERS, noise=noise)
        model = tiny_model(spec, torch.float32, "cpu")
        model.config.sliding_window = None  # engines with a window are refused
        model.save_pretrained(folder / name)
        tiny_tokenizer().save_pretrained(folder / name)
        loaded[name] = load_model(ModelRef(str(folder / name)))
    return with_map(folder, loaded["sender"], loaded["receiver"])


def with_map(folder: Path, sender: LoadedModel, receiver: LoadedModel) -> Models:
    """Two models, with a map between them in `folder`."""
    stitch = fit_stitch(sender.model, receiver.model, [LONG], rank=8)
    stitch.save(folder / "stitch.safetensors")
    return Models(folder, sender, receiver, stitch)


def connector(folder: Path, role: str, store: str, **extra: Any) -> dict[str, Any]:
    """The `kv_transfer_config` of a role in the pair of `make_models`."""
    fails = extra.get("on_miss") == "error"
    table: dict[str, Any] = {"role": role, "store": store, "chunk_tokens": CHUNK}
    if role == "sender":
        table["hidden_layers"] = list(range(1, LAYERS))
    else:
        table |= {
            "sender": str(folder / "sender"),
            "allow_unprofiled": True,
            "stitch": str(folder / "stitch.safetensors"),
            # No load here takes so long, however busy the machine.
            "load_seconds": 120.0,
            "lookup_seconds": 120.0,
            "tokens_per_step": TOKENS_PER_STEP,
        }
    return {
        "kv_connector": "DroidKVConnector",
        "kv_connector_module_path": "droidkv.serve.vllm_connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "fail" if fails else "recompute",
        "kv_connector_extra_config": {
            **table,
            "audit": str(folder / f"{role}.jsonl"),
            **extra,
        },
    }


# Prompts come in chunks (96 tokens a step) and blocks are scarce, so that chunked prefill happens
# in every test and preemption in some.
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": not COMPILED,
    "max_model_len": 512,
    "max_num_batched_tokens": 96,
    "max_num_seqs": 8,
    "block_size": BLOCK,
    "num_gpu_blocks_override": 28,
    "async_scheduling": False,
    "max_logprobs": -1,
}


class Engine:
    """One engine of vLLM with the connector.

    Args:
        folder: What `make_models` made.
        role: `sender` or `receiver`.
        store: The store's address.
        options: Of vLLM, over `OPTIONS`.
        extra: Of the connector.
    """

    def __init__(
        self,
        folder: Path,
        role: str,
        store: str,
        options: dict[str, Any] | None = None,
        **extra: Any,
    ) -> None:
        transfer = connector(folder, role, store, **extra)
        self.audit = Path(transfer["kv_connector_extra_config"]["audit"])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tempfile, "tempdir", str(folder))  # vLLM leaves files there
            self.llm = vllm.LLM(
                model=str(folder / role),
                **{"kv_transfer_config": transfer, **OPTIONS, **(options or {})},
            )

    def answer(
        self,
        prompts: Sequence[list[int]],
        plans: Sequence[str | None],
        new: int = NEW_TOKENS,
        lora_request: Any = None,
    ) -> list[Answer]:
        """Log-probabilities of the first new token, and greedy tokens, of each prompt."""
        outputs = self.generate(prompts, plans, new, lora_request)
        answers = []
        for output in outputs:
            first = output.outputs[0].logprobs[0]
            logprobs = torch.tensor([first[index].logprob for index in range(len(first))])
            answers.append((logprobs, list(output.outputs[0].token_ids)))
        return answers

    def generate(
        self,
        prompts: Sequence[list[int]],
        plans: Sequence[str | None],
        new: int = NEW_TOKENS,
        lora_request: Any = None,
        **sampling: Any,
    ) -> list[Any]:
        """vLLM's own outputs."""
        params = [sampling_params(plan, new, **sampling) for plan in plans]
        requests = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs: list[Any] = self.llm.generate(
            requests, params, use_tqdm=False, lora_request=lora_request
        )
        return outputs

    def records(self) -> list[dict[str, Any]]:
        """The audit file."""
        return [json.loads(line) for line in self.audit.read_text().splitlines()]

    def worker(self) -> Any:
        """The connector beside the model, if it is in this process."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return get_kv_transfer_group()

    def scheduler(self) -> Any:
        """vLLM's scheduler, if it is in this process."""
        return self.llm.llm_engine.engine_core.engine_core.scheduler

    def forget(self) -> None:
        """Empty the engine's own prefix cache."""
        assert self.llm.reset_prefix_cache()

    def stop(self) -> None:
        """Let go of everything, so that the next engine can start in this process."""
        self.llm.llm_engine.engine_core.shutdown()
        del self.llm
        clean_up()


def clean_up() -> None:
    """What an engine that was shut down leaves in this process."""
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown

    ensure_kv_transfer_shutdown()
    gc.collect()
    cleanup_dist_env_and_memory()


def sampling_params(plan: str | None, new: int, **sampling: Any) -> Any:
    """Greedy, with all log-probabilities, at a plan; None = a plain request."""
    return vllm.SamplingParams(
        max_tokens=new,
        logprobs=-1,
        extra_args={"kv_transfer_params": {"droidkv": {"plan": plan}}} if plan else None,
        **{"temperature": 0, "ignore_eos": True, **sampling},
    )


def rest_no_more(engine: Engine) -> None:
    """The engine asks the store again, whatever failed before."""
    half = engine.scheduler().connector._receiver_scheduler
    half.lookups.succeeded()
    half.loads.succeeded()


@torch.no_grad()
def own_answer(model: DecoderModel, prompt: list[int], new: int = NEW_TOKENS) -> Answer:
    """The Hugging Face engine's answer by a model's own full prefill."""
    context = full_prefill(model, torch.tensor([prompt[:-1]]))
    return _answer_on(model, context, prompt[-1:], new)


@torch.no_grad()
def reference(
    models: Models,
    prompt: list[int],
    plan: str | None,
    new: int = NEW_TOKENS,
    prefix_tokens: int | None = None,
) -> Answer:
    """The Hugging Face engine's answer at a plan; None = the receiver's own full prefill."""
    num_tokens = prefix_tokens or (len(prompt) - 1) // CHUNK * CHUNK
    receiver = models.receiver.model
    if plan is None or num_tokens == 0:
        return own_answer(receiver, prompt, new)
    prefix = torch.tensor([prompt[:num_tokens]])
    cache = capture(models.sender.model, prefix, hidden_layers=range(receiver.num_layers))
    parsed = ReusePlan.parse(plan, receiver.num_layers)
    context = partial_prefill(receiver, prefix, cache, parsed, models.stitch)
    return _answer_on(receiver, context, prompt[num_tokens:], new)


def _answer_on(model: DecoderModel, context: Context, suffix: list[int], new: int) -> Answer:
    asked = torch.tensor([suffix])
    hidden = forward_suffix(model, context.fork(), asked)
    logprobs = torch.log_softmax(model.logits(hidden)[0, -1], dim=-1)
    return logprobs, generate(model, context, asked, new, set())[0]


def assert_same(mine: Answer, theirs: Answer) -> None:
    torch.testing.assert_close(mine[0], theirs[0], atol=TOLERANCE, rtol=0)
    assert mine[1] == theirs[1]


def assert_all_same(
    models: Models,
    answers: Sequence[Answer],
    prompts: Sequence[list[int]],
    plans: Sequence[str | None],
    new: int = NEW_TOKENS,
) -> None:
    """Each answer is the Hugging Face engine's at its plan."""
    for answer, prompt, plan in zip(answers, prompts, plans, strict=True):
        assert_same(answer, reference(models, prompt, plan, new))


def store_captured(models: Models, store: Store, prompts: list[list[int]]) -> None:
    """What a sender's engine would store of these prompts, by the Hugging Face engine."""
    namespace = namespace_digest(models.sender.fingerprint)
    layers = range(LAYERS)
    for prompt in prompts:
        cache = capture(models.sender.model, torch.tensor([prompt]), hidden_layers=layers)
        for key in chunk_keys(namespace, prompt, CHUNK):
            part = slice(key.index * CHUNK, (key.index + 1) * CHUNK)
            for layer in layers:
                pair = (cache.keys[layer][0, :, part], cache.values[layer][0, :, part])
                assert store.put_kv(key, layer, *pair)
                assert store.put_hidden(key, layer, cache.hidden[layer][0, part])


def assert_stored(models: Models, store: Store, namespace: str, prompts: list[list[int]]) -> None:
    """Every whole chunk's KV and E are what the Hugging Face engine captures."""
    layers = range(1, LAYERS)
    for prompt in prompts:
        cache = capture(models.sender.model, torch.tensor([prompt]), hidden_layers=layers)
        keys = chunk_keys(namespace, prompt, CHUNK)
        assert len(keys) == len(prompt) // CHUNK
        for key in keys:
            part = slice(key.index * CHUNK, (key.index + 1) * CHUNK)
            for layer in range(LAYERS):
                found = list(store.get_kv(key, layer, deadline_in(5)))
                wanted = [cache.keys[layer][0, :, part], cache.values[layer][0, :, part]]
                if layer in layers:
                    found.append(store.get_hidden(key, layer, deadline_in(5)))
                    wanted.append(cache.hidden[layer][0, part])
                for mine, theirs in zip(found, wanted, strict=True):
                    atol = CAPTURE_TOLERANCE * float(theirs.abs().max())
                    torch.testing.assert_close(mine, theirs, atol=atol, rtol=0)
