from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from droidkv.cache import CapturedCache
from droidkv.capture import capture
from droidkv.encode import EncodedItem
from droidkv.errors import PlanError
from droidkv.loading import LoadedModel, load_model
from droidkv.oracles import TOLERANCES, Oracles, VerifyResult
from droidkv.pair import ModelRef
from droidkv.plan import ReusePlan
from droidkv.prefill import partial_prefill
from droidkv.stitch import fit_stitch
from droidkv.sweep import sweep
from droidkv.verify import spread_plans, verify_pair


def tokens(num_tokens: int, seed: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(3, 250, (num_tokens,), generator=generator).tolist())


ITEMS = [
    EncodedItem("a", tokens(40, 0), tokens(6, 1)),
    EncodedItem("b", tokens(25, 2), tokens(4, 3)),
]


def tiny(options: str = "", architecture: str = "llama", dtype: str = "float32") -> LoadedModel:
    return load_model(ModelRef(f"tiny:{architecture}?layers=4{options}"), dtype)


def failed(results: list[VerifyResult]) -> list[str]:
    return [result.oracle for result in results if not result.passed]


@pytest.fixture(scope="module")
def pair() -> tuple[LoadedModel, LoadedModel]:
    return tiny(), tiny("&noise=0.1")


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "mixtral"])
def test_a_sound_pair_passes_every_oracle(architecture: str) -> None:
    sender, receiver = tiny("", architecture), tiny("&noise=0.1", architecture)
    calls: list[tuple[int, int]] = []
    results = verify_pair(
        sender, receiver, ITEMS, on_progress=lambda _, done, total: calls.append((done, total))
    )
    assert failed(results) == []
    assert len(results) == 9 == len({result.oracle for result in results})
    assert calls == [(done, 9) for done in range(10)]
    # With a real pair's rounding they are of this size, far from the tolerance.
    assert all(result.error < 1e-4 for result in results[1:])


def test_stitched_plans_and_a_single_item_are_verified_too(
    pair: tuple[LoadedModel, LoadedModel],
) -> None:
    sender, receiver = pair
    stitch = fit_stitch(sender.model, receiver.model, [list(tokens(60, 7))], rank=4)
    assert any(plan.operator == "stitch" for plan in spread_plans(4, stitched=True))
    assert failed(verify_pair(sender, receiver, ITEMS[:1], stitch=stitch)) == []


def test_a_pair_that_cannot_tell_one_cache_from_another_is_said_to_prove_nothing(
    pair: tuple[LoadedModel, LoadedModel],
) -> None:
    sender, _ = pair
    results = verify_pair(sender, sender, ITEMS[:1])
    assert failed(results) == ["naive reuse differs from the full prefill"]
    assert "prove little" in results[0].detail


def test_bfloat16_has_a_tolerance_of_its_own() -> None:
    results = verify_pair(tiny(dtype="bfloat16"), tiny("&noise=0.5", dtype="bfloat16"), ITEMS[:1])
    assert failed(results) == []
    assert results[1].tolerance > 0.1


def oracles(pair: tuple[LoadedModel, LoadedModel]) -> Oracles:
    sender, receiver = pair
    return Oracles(sender.model, receiver.model, ITEMS, [ReusePlan.of(1, 3)], None, (2,))


def test_what_the_stock_model_is_off_itself_is_rounding_too(
    pair: tuple[LoadedModel, LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert oracles(pair).tolerance == TOLERANCES[torch.float32]
    stock = Oracles._stock
    monkeypatch.setattr(Oracles, "_stock", lambda self, index: stock(self, index) + 0.01)
    checked = oracles(pair)
    assert checked.tolerance == pytest.approx(0.02, rel=0.01)
    assert checked.noise_floor().tolerance == pytest.approx(1e-4)  # a mean is not off by that


def test_a_plan_that_is_not_carried_out_is_found(
    pair: tuple[LoadedModel, LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    def always(plan: ReusePlan) -> Callable[..., Any]:
        return lambda model, ids, captured, _, *rest: partial_prefill(
            model, ids, captured, plan, *rest
        )

    monkeypatch.setattr("droidkv.oracles.partial_prefill", always(ReusePlan.of(0, 0)))
    assert not oracles(pair).full_prefill().passed
    monkeypatch.setattr("droidkv.oracles.partial_prefill", always(ReusePlan.of(0, 4)))
    assert not oracles(pair).empty_plan().passed
    assert not oracles(pair).discriminates().passed


def test_a_captured_cache_that_is_wrong_is_found(
    pair: tuple[LoadedModel, LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong_hidden(*args: Any, **extra: Any) -> CapturedCache:
        captured = capture(*args, **extra)
        hidden = {layer: state + 1 for layer, state in captured.hidden.items()}
        return dataclasses.replace(captured, hidden=hidden)

    monkeypatch.setattr("droidkv.oracles.capture", wrong_hidden)
    assert not oracles(pair).same_model().passed
    assert not oracles(pair).noise_floor().passed


def test_padding_that_is_read_is_found(
    pair: tuple[LoadedModel, LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "droidkv.oracles.capture",
        lambda model, ids, attention_mask=None, **extra: capture(model, ids, **extra),
    )
    assert not oracles(pair).padding().passed
    assert oracles(pair).chunks().passed


def test_a_chunk_that_is_lost_is_found(
    pair: tuple[LoadedModel, LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    def forgets_the_first(
        model: Any, ids: Any, chunk_tokens: int | None = None, **extra: Any
    ) -> CapturedCache:
        captured = capture(model, ids, chunk_tokens=chunk_tokens, **extra)
        if chunk_tokens is not None:
            captured.keys[0][:, :, :chunk_tokens] = 0
        return captured

    monkeypatch.setattr("droidkv.oracles.capture", forgets_the_first)
    assert not oracles(pair).chunks().passed
    assert oracles(pair).padding().passed


def test_a_sweep_that_disagrees_is_found(
    pair: tuple[LoadedModel, LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    def mixes_plans_up(*args: Any) -> Any:
        results = sweep(*args)
        return dict(zip(results, reversed(results.values()), strict=True))

    monkeypatch.setattr("droidkv.oracles.sweep", mixes_plans_up)
    assert not oracles(pair).sweep().passed


@pytest.mark.parametrize("figure", ["kl", "nll"])
def test_one_sweep_that_is_no_number_is_found(
    pair: tuple[LoadedModel, LoadedModel], monkeypatch: pytest.MonkeyPatch, figure: str
) -> None:
    nan: dict[str, Any] = {figure: float("nan")}

    def loses_one(*args: Any) -> Any:
        results = sweep(*args)
        last = list(results)[-1]
        return {**results, last: dataclasses.replace(results[last], **nan)}

    monkeypatch.setattr("droidkv.oracles.sweep", loses_one)
    assert not oracles(pair).sweep().passed
    assert not oracles(pair).noise_floor().passed


def test_a_model_that_was_touched_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    sender, receiver = tiny(), tiny("&noise=0.1")

    def touches(*args: Any, **extra: Any) -> CapturedCache:
        next(iter(sender.model.model.parameters())).data[0, 0] += 1e-6
        return capture(*args, **extra)

    monkeypatch.setattr("droidkv.oracles.capture", touches)
    last = verify_pair(sender, receiver, ITEMS[:1], plans=[])[-1]
    assert not last.passed and last.error == 1


def test_what_does_not_fit_is_refused(pair: tuple[LoadedModel, LoadedModel]) -> None:
    with pytest.raises(PlanError, match="at least one item"):
        verify_pair(*pair, [])
    with pytest.raises(PlanError, match="within"):
        verify_pair(*pair, ITEMS, plans=[ReusePlan.of(3, 5)])


@pytest.mark.parametrize("num_layers", [1, 2, 3, 4, 30, 80])
def test_spread_plans_fit_any_depth(num_layers: int) -> None:
    for plan in spread_plans(num_layers, stitched=True):
        assert plan.check(num_layers).group
