from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("peft")

from tiny import tiny_model  # noqa: E402

from droidkv.bench.icarus import Models, bench_icarus  # noqa: E402
from droidkv.errors import PlanError  # noqa: E402


def test_it_says_what_is_asked_for_every_setting() -> None:
    result: dict[str, Any] = bench_icarus(tiny_model(), (1, 2), (2, 3), 8, 1, 1)
    rows = [*result["by_batch"], *result["by_decoders"]]
    assert [(row["rows"], row["decoders"]) for row in rows] == [(1, 1), (2, 1), (2, 2), (3, 3)]
    for row in rows:
        seconds = row["seconds"]
        assert set(seconds) == {"fused", "two_passes", "two_passes_one_copy", "plain"}
        ratio = seconds["two_passes"] / seconds["fused"]
        assert row["two_passes_ratio"] == pytest.approx(ratio, rel=1e-2)
        overhead = seconds["fused"] / seconds["plain"]
        assert row["overhead_over_plain"] == pytest.approx(overhead, rel=1e-2)


@pytest.mark.parametrize("num_rows", [1, 3])
def test_all_ways_but_the_plain_one_give_the_same_logits(num_rows: int) -> None:
    base = tiny_model()
    before = {name: weight.clone() for name, weight in base.model.named_parameters()}
    ways = Models(base, 1, seed=0).ways(torch.randint(3, 97, (1, 9)), num_rows, 1)
    with torch.no_grad():
        for _ in range(2):
            logits = {name: step(torch.tensor([[5]])) for name, step in ways.items()}
    assert logits["fused"].shape == (num_rows, 1, 97)
    for name in ("two_passes", "two_passes_one_copy"):
        torch.testing.assert_close(logits[name], logits["fused"], atol=1e-4, rtol=1e-4)
    assert (logits["plain"] - logits["fused"]).abs().max() > 1e-2
    after = dict(base.model.named_parameters())
    assert after.keys() == before.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_decoders_differ_and_share_one_step() -> None:
    ways = Models(tiny_model(), 3, seed=0).ways(torch.randint(3, 97, (1, 9)), 3, 3)
    with torch.no_grad():
        fused = ways["fused"](torch.tensor([[5]]))
        two_passes = ways["two_passes"](torch.tensor([[5]]))  # all by the first decoder's weights
    assert (fused[0] - fused[1]).abs().max() > 1e-2
    torch.testing.assert_close(two_passes[0], fused[0], atol=1e-4, rtol=1e-4)


def test_plain_models_have_kv_of_their_own() -> None:
    plain = Models(tiny_model(), 3, seed=0).ways(torch.randint(3, 97, (1, 9)), 3, 3)["plain"]
    with torch.no_grad():
        for token in (5, 6):
            rows = plain(torch.tensor([[token]]))
            assert rows.shape == (3, 1, 97)
            torch.testing.assert_close(rows, rows[:1].expand_as(rows))


def test_numbers_out_of_range_are_refused() -> None:
    with pytest.raises(PlanError, match="at least 1"):
        bench_icarus(tiny_model(), batches=(0,))
