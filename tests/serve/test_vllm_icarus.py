"""A real engine of vLLM with two decoders, against the Hugging Face twin and its own cache."""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from serve.engines import (
    BLOCK,
    LONG,
    OPTIONS,
    PROMPTS,
    TOLERANCE,
    Answer,
    assert_same,
    own_answer,
    token_ids,
    vllm,
)
from serve.made_decoders import CLASSES, LAYERS, asked, make_decoder, make_decoders, twins
from torch import Tensor

from droidkv.errors import DroidKVError
from droidkv.prefill import forward_suffix, full_prefill
from droidkv.serve.icarus import IcarusSettings
from droidkv.serve.icarus_launch import engine_arguments, engine_environment
from droidkv.serve.vllm_blocks import held_blocks, held_by

pytestmark = pytest.mark.vllm

MIXED: list[str | None] = ["one", "two", None, "one"]
CROWD = [token_ids(200 + index, seed=20 + index) for index in range(8)]
WHOLE = LONG[: 4 * BLOCK]
CHUNKED = {
    "architectures": ["IcarusLlamaForCausalLM"],
    "dual_chunk_attention_config": {"chunk_size": 8},
}


class Engine:
    """An engine with the decoders of `make_decoders`."""

    def __init__(self, folder: Path, architecture: str = "llama") -> None:
        self.settings = make_decoders(folder, architecture)
        os.environ.update(engine_environment(self.settings))
        arguments = engine_arguments(self.settings, CLASSES[architecture])
        self.llm = vllm.LLM(model=str(folder / "base"), **{**OPTIONS, **arguments})
        self.twins = twins(self.settings)

    def generate(
        self,
        prompts: Sequence[list[int]],
        decoders: Sequence[str | None],
        new: int = 6,
        **sampling: Any,
    ) -> list[Any]:
        """vLLM's own outputs."""
        params = [sampling_params(decoder, new, **sampling) for decoder in decoders]
        requests = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs: list[Any] = self.llm.generate(requests, params, use_tqdm=False)
        return outputs

    def assert_twins(
        self, outputs: Sequence[Any], decoders: Sequence[str | None], new: int = 6
    ) -> None:
        """Each answer is the Hugging Face twin's."""
        for output, decoder in zip(outputs, decoders, strict=True):
            expected = own_answer(self.twins[decoder].model, output.prompt_token_ids, new)
            assert_same(answer_of(output), expected)

    def scheduler(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core.scheduler

    def model(self) -> Any:
        return self.llm.llm_engine.model_executor.driver_worker.worker.model_runner.model

    def forget(self) -> None:
        """Empty the prefix cache."""
        assert self.llm.reset_prefix_cache()

    def stop(self) -> None:
        from vllm.distributed import cleanup_dist_env_and_memory
        from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown

        self.llm.llm_engine.engine_core.shutdown()
        ensure_kv_transfer_shutdown()
        del self.llm
        gc.collect()
        cleanup_dist_env_and_memory()


def sampling_params(decoder: str | None, new: int, **sampling: Any) -> Any:
    return vllm.SamplingParams(
        **{"max_tokens": new, "logprobs": -1, "ignore_eos": True, "temperature": 0, **sampling},
        extra_args=asked(decoder),
    )


def answer_of(output: Any) -> Answer:
    return logprobs_of(output.outputs[0].logprobs[0]), list(output.outputs[0].token_ids)


def logprobs_of(table: Any) -> Tensor:
    return torch.tensor([table[index].logprob for index in range(len(table))])


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    engine = Engine(tmp_path_factory.mktemp("llama"))
    yield engine
    engine.stop()


@pytest.fixture(autouse=True)
def _forget(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every test with the shared engine starts on an empty prefix cache, and gives blocks back."""
    if "engine" in request.fixturenames:
        request.getfixturevalue("engine").forget()
    yield
    if "engine" in request.fixturenames:
        assert held_blocks(request.getfixturevalue("engine").llm) == 0


def test_mixed_decoders_in_one_batch_are_their_twins(engine: Engine) -> None:
    outputs = engine.generate(PROMPTS, MIXED)
    engine.assert_twins(outputs, MIXED)
    # Prompts that begin alike, answered one after the other, hit one another's blocks.
    assert [output.num_cached_tokens for output in engine.generate(PROMPTS, MIXED)] == [
        (len(prompt) - 1) // BLOCK * BLOCK for prompt in PROMPTS
    ]
    one, two = (own_answer(engine.twins[name].model, LONG)[0] for name in ("one", "two"))
    assert (one - two).abs().max() > 100 * TOLERANCE  # else any decoder would do


def test_a_decoder_hits_what_another_ones_request_wrote(engine: Engine) -> None:
    (first,) = engine.generate([LONG], ["one"], new=70)
    # The answer's KV are the encoder's too.
    followed = LONG + list(first.outputs[0].token_ids) + token_ids(5, seed=9)
    for decoder in ("two", None, "one"):
        (output,) = engine.generate([followed], [decoder])
        assert output.num_cached_tokens == (len(LONG) + 69) // BLOCK * BLOCK
        engine.assert_twins([output], [decoder])


def test_blocks_are_bit_identical_whoever_decodes(engine: Engine) -> None:
    written = {}
    for decoder in ("one", "two"):
        engine.forget()
        written[decoder] = blocks_of(engine, WHOLE, decoder)
    assert len(written["one"]) == LAYERS
    for mine, theirs in zip(written["one"], written["two"], strict=True):
        assert mine.shape[0] == len(WHOLE) // BLOCK and mine.abs().max() > 0
        assert torch.equal(mine, theirs)
    engine.forget()
    for mine, theirs in zip(written["one"], blocks_of(engine, WHOLE, None), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)


def blocks_of(engine: Engine, prompt: list[int], decoder: str | None) -> list[Tensor]:
    """The prompt's blocks, layer by layer, as a request of its own wrote them."""
    connector, held = engine.scheduler().connector, []
    with pytest.MonkeyPatch.context() as patch:
        finished = connector.request_finished

        def noting(request: Any, block_ids: list[int]) -> Any:
            held.append(block_ids)
            return finished(request, block_ids)

        patch.setattr(connector, "request_finished", noting)
        (output,) = engine.generate([prompt], [decoder], new=1)
    assert output.num_cached_tokens == 0
    layers = engine.model().model.layers
    return [layer.self_attn.attn.attention.kv_cache[held[0]].clone() for layer in layers]


def test_only_tokens_whose_logits_are_used_have_a_decoder_row(engine: Engine) -> None:
    rows: list[int] = []
    layer = engine.model().model.layers[0]
    hook = layer.register_forward_pre_hook(lambda _, args: rows.append(len(args[1])))
    try:
        engine.generate([LONG], ["one"], new=3)
        engine.forget()
        engine.generate([LONG], [None], new=3)
    finally:
        hook.remove()
    # 330 tokens in steps of 96, then one by one.
    assert rows == [96, 96, 96, 43, 2, 2, 96, 96, 96, 42, 1, 1]


def test_a_prompts_own_log_probabilities_are_the_decoders(engine: Engine) -> None:
    outputs = engine.generate([LONG[:150]] * 2, ["two", None], new=1, prompt_logprobs=-1)
    for output, decoder in zip(outputs, ("two", None), strict=True):
        model = engine.twins[decoder].model
        with torch.no_grad():
            context = full_prefill(model, torch.tensor([LONG[:1]]))
            hidden = forward_suffix(model, context, torch.tensor([LONG[1:150]]))
            expected = torch.log_softmax(model.logits(hidden)[0], dim=-1)
        found = torch.stack([logprobs_of(each) for each in output.prompt_logprobs[2:]])
        torch.testing.assert_close(found, expected[:-1], atol=TOLERANCE, rtol=0)


def test_preempted_requests_are_their_twins(engine: Engine) -> None:
    decoders = (MIXED * 2)[: len(CROWD)]
    preempted = []
    with pytest.MonkeyPatch.context() as patch:
        scheduler = engine.scheduler()
        preempt = scheduler._preempt_request

        def counting(request: Any, *others: Any, **named: Any) -> Any:
            preempted.append(request.request_id)
            return preempt(request, *others, **named)

        patch.setattr(scheduler, "_preempt_request", counting)
        outputs = engine.generate(CROWD, decoders, new=90)
    assert preempted
    engine.assert_twins(outputs, decoders, new=90)


def test_an_unknown_decoder_is_refused_and_the_engine_goes_on(engine: Engine) -> None:
    from vllm.exceptions import VLLMValidationError

    with pytest.raises(VLLMValidationError, match=r"unknown decoder 'oen'.*Known: one, two"):
        engine.generate([LONG], ["oen"])
    engine.assert_twins(engine.generate([LONG], ["one"]), ["one"])


def test_decoders_hold_the_prefix_once(engine: Engine) -> None:
    shared, own, new = 3 * BLOCK, BLOCK // 2, BLOCK
    prompts = [LONG[:shared] + token_ids(own, seed=50 + index) for index in range(4)]
    engine.generate([LONG[: shared + 1]], [None], new=1)
    for count in (1, 2, 4):
        decoders = (["one", "two"] * 2)[:count]
        params = [sampling_params(decoder, new + 8) for decoder in decoders]
        held = held_by(engine.llm, prompts[:count], params, new)
        assert held == 3 + count * 2  # half a block of prompt and a block of answer: two blocks


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3"])
def test_other_architectures_are_their_twins(architecture: str, tmp_path: Path) -> None:
    engine = Engine(tmp_path, architecture)
    try:
        outputs = engine.generate(PROMPTS, MIXED)
        engine.assert_twins(outputs, MIXED)
    finally:
        engine.stop()


def check(settings: IcarusSettings, changed: dict[str, Any]) -> None:
    """What the model does first, with the configuration of an engine that is not started."""
    from droidkv.serve.vllm_decoders import read_decoders

    arguments = {**OPTIONS, **engine_arguments(settings, "LlamaForCausalLM"), **changed}
    base = Path(next(iter(settings.decoders.values()))).with_name("base")
    read_decoders(vllm.EngineArgs(model=str(base), **arguments).create_engine_config())


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> IcarusSettings:
    settings = make_decoders(tmp_path)
    for name, value in engine_environment(settings).items():
        monkeypatch.setenv(name, value)
    return settings


def test_what_cannot_work_does_not_start(
    settings: IcarusSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(settings, {})
    for changed, named in (
        ({"enforce_eager": False}, "--enforce-eager"),
        ({"enable_lora": True}, "LoRA of vLLM's own"),
        ({"logits_processors": None}, "--logits-processors"),
        ({"kv_transfer_config": None}, "kv_connector 'IcarusConnector'"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size = 1"),
        ({"enable_prompt_embeds": True}, "enable_prompt_embeds"),
        ({"hf_overrides": CHUNKED}, "its folder holds"),
    ):
        with pytest.raises(DroidKVError, match=named):
            check(settings, changed)
    config = tmp_path / "base" / "config.json"
    plain = config.read_text(encoding="utf-8")
    config.write_text(json.dumps({**json.loads(plain), **CHUNKED}), encoding="utf-8")
    with pytest.raises(DroidKVError, match="dual_chunk_attention_config"):
        check(settings, {})
    config.write_text(plain, encoding="utf-8")
    monkeypatch.setenv("DROIDKV_DECODERS", '["one"]')
    with pytest.raises(DroidKVError, match="name the decoders one, two, got one"):
        check(settings, {})


def test_an_adapter_that_is_no_decoder_does_not_start(
    settings: IcarusSettings, tmp_path: Path
) -> None:
    make_decoder(tmp_path / "base", "two", targets=("q_proj", "v_proj"))
    with pytest.raises(DroidKVError, match="k_proj or v_proj"):
        check(settings, {})
