"""The identical-cache model: one fused pass equals two, and KV never depend on the decoder."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")

from tiny import VOCAB_SIZE, tiny_model  # noqa: E402
from torch import Tensor  # noqa: E402

from droidkv.bench.prefill import bench_prefill  # noqa: E402
from droidkv.cache import TokenAxis  # noqa: E402
from droidkv.capture import capture  # noqa: E402
from droidkv.errors import UnsupportedModelError  # noqa: E402
from droidkv.models import DecoderModel, TwoStreamModel  # noqa: E402
from droidkv.oracles import Oracles  # noqa: E402
from droidkv.plan import ReusePlan, all_plans  # noqa: E402
from droidkv.prefill import (  # noqa: E402
    Context,
    forward,
    forward_suffix,
    full_prefill,
    generate,
    partial_prefill,
    read_only,
)

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3", "gemma3_text")
TARGETS = ("q_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def adapted(
    architecture: str = "llama",
    targets: tuple[str, ...] = TARGETS,
    names: tuple[str, ...] = ("one",),
) -> Any:
    """A PEFT model with random adapters on the tiny base."""
    config = peft.LoraConfig(r=2, target_modules=list(targets), init_lora_weights=False)
    torch.manual_seed(1)
    tuned = peft.get_peft_model(tiny_model(architecture).model, config, adapter_name=names[0])
    for name in names[1:]:
        tuned.add_adapter(name, config)
    return tuned.eval()


def fused(tuned: Any, *adapters: str) -> TwoStreamModel:
    return TwoStreamModel(tuned.get_base_model(), adapters)


def tokens(batch: int, length: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    ids: Tensor = torch.randint(3, VOCAB_SIZE, (batch, length), generator=generator)
    return ids


def two_passes(architecture: str, name: str, prefix: Tensor, new: Tensor) -> tuple[Tensor, Context]:
    """Logits of `new`, token by token: the base writes KV, the merged decoder reads them."""
    base = tiny_model(architecture)
    tuned = adapted(architecture, names=("one", "two"))
    tuned.set_adapter(name)
    decoder = DecoderModel(tuned.merge_and_unload().eval())
    context = full_prefill(base, prefix)
    logits = []
    for index in range(new.shape[1]):
        ids = new[:, index : index + 1]
        axis = TokenAxis(context.axis.next_position)
        forward(base, context, base.embed(ids), axis)
        logits.append(decoder.logits(read_only(decoder, context, decoder.embed(ids), axis)))
    return torch.cat(logits, dim=1).detach(), context


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_one_fused_pass_equals_two(architecture: str, batch: int) -> None:
    prefix, new = tokens(batch, 11), tokens(batch, 6, seed=1)
    model = fused(adapted(architecture, names=("one", "two")), "one")
    context = full_prefill(model, prefix)
    stepwise = torch.cat(
        [model.logits(forward_suffix(model, context, new[:, i : i + 1])) for i in range(6)], dim=1
    )
    at_once = full_prefill(model, prefix)
    together = model.logits(forward_suffix(model, at_once, new))
    expected, written = two_passes(architecture, "one", prefix, new)
    torch.testing.assert_close(stepwise, expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(together, expected, atol=1e-4, rtol=1e-4)
    for layer in range(model.num_layers):
        for mine, theirs in zip(
            context.cache.layer(layer), written.cache.layer(layer), strict=True
        ):
            torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)
    other, _ = two_passes(architecture, "two", prefix, new)
    assert (expected - other).abs().max() > 1e-2  # else any decoder would do


def test_kv_are_bit_identical_whatever_decodes() -> None:
    prefix, new = tokens(1, 9), tokens(1, 5, seed=1)
    model = fused(adapted(names=("one", "two")))
    contexts = []
    for name in ("one", "two"):
        model.adapters = (name,)
        context = full_prefill(model, prefix)
        for index in range(new.shape[1]):
            hidden = forward_suffix(model, context, new[:, index : index + 1])
        contexts.append((context, model.logits(hidden)))
    (first, first_logits), (second, second_logits) = contexts
    for layer in range(6):
        assert all(map(torch.equal, first.cache.layer(layer), second.cache.layer(layer)))
    assert not torch.equal(first_logits, second_logits)


def test_each_row_goes_through_its_own_adapter() -> None:
    prefix, new = tokens(1, 9).expand(2, -1), tokens(1, 3, seed=1).expand(2, -1)
    tuned = adapted(names=("one", "two"))
    model = fused(tuned, "one", "two")
    context = full_prefill(model, prefix)
    both = model.logits(forward_suffix(model, context, new))
    for row, name in enumerate(("one", "two")):
        expected, _ = two_passes("llama", name, prefix[:1], new[:1])
        torch.testing.assert_close(both[row : row + 1], expected, atol=1e-4, rtol=1e-4)
    for layer in range(6):
        for part in context.cache.layer(layer):
            assert torch.equal(part[0], part[1])
    with pytest.raises(UnsupportedModelError, match="one for each of 3 rows"):
        forward_suffix(model, full_prefill(model, tokens(3, 4)), tokens(3, 1))


def test_what_it_captures_is_the_base_s_own() -> None:
    prefix = tokens(2, 9)
    mask = torch.ones_like(prefix)
    mask[0, :3] = 0
    mine = capture(fused(adapted(), "one"), prefix, mask, hidden_layers=[0, 3])
    base = capture(tiny_model(), prefix, mask, hidden_layers=[0, 3])
    pairs = [*zip(mine.keys, base.keys, strict=True), *zip(mine.values, base.values, strict=True)]
    pairs += [(mine.hidden[layer], base.hidden[layer]) for layer in (0, 3)]
    for one, two in pairs:
        torch.testing.assert_close(
            one * mask_of(mask, one), two * mask_of(mask, two), atol=1e-5, rtol=1e-5
        )


def mask_of(mask: Tensor, like: Tensor) -> Tensor:
    return mask[:, None, :, None] if like.ndim == 4 else mask[:, :, None]


def test_every_plan_is_the_full_prefill_because_the_base_is_the_encoder() -> None:
    prefix, suffix = tokens(1, 9), tokens(1, 4, seed=1)
    base = tiny_model()
    captured = capture(base, prefix, hidden_layers=range(6))
    model = fused(adapted(), "one")
    answers = []
    for plan in (*all_plans(6, 2), ReusePlan.of(0, 6)):
        context = partial_prefill(model, prefix, captured, plan)
        answers.append(generate(model, context, suffix, 5, [2]))
    assert all(answer == answers[0] for answer in answers)


def test_what_needs_a_model_of_its_own_refuses_a_second_stream() -> None:
    model = fused(adapted(), "one")
    with pytest.raises(UnsupportedModelError, match="forward pass of its own"):
        Oracles(tiny_model(), model, [], [], None, [2])
    with pytest.raises(UnsupportedModelError, match="prefill of its own"):
        bench_prefill(tiny_model(), model)


def test_what_cannot_be_two_streams_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="LoRA adapter"):
        TwoStreamModel(tiny_model().model)
    with pytest.raises(UnsupportedModelError, match="k_proj or v_proj"):
        fused(adapted(targets=("q_proj", "v_proj")))
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], lora_bias=True)
    with pytest.raises(UnsupportedModelError, match="a variant of it"):
        fused(peft.get_peft_model(tiny_model().model, config).eval())
    with pytest.raises(UnsupportedModelError, match="soft-capped"):
        fused(adapted("gemma2"))


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"target_modules": ["q_proj", "lm_head"]}, "changes lm_head"),
        ({"target_modules": ["q_proj", "embed_tokens"]}, "changes model.embed_tokens"),
        ({"modules_to_save": ["norm"]}, "changes model.layers.0.input_layernorm"),
        ({"bias": "all"}, "bias = 'all'"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights = 'pissa'"),
    ],
)
def test_an_adapter_that_changes_more_than_the_decoder_is_refused(
    more: dict[str, Any], named: str
) -> None:
    config = peft.LoraConfig(**{"r": 2, "target_modules": ["q_proj"], **more})
    with pytest.raises(UnsupportedModelError, match=named):
        fused(peft.get_peft_model(tiny_model("qwen2").model, config).eval())
