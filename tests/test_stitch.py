from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny import NUM_LAYERS, VOCAB_SIZE, tiny_model

from droidkv.capture import capture
from droidkv.errors import StitchError, StorageError
from droidkv.stitch import StitchMap, _Moments, fit_stitch


def prefixes(count: int, length: int = 40) -> list[list[int]]:
    return torch.randint(3, VOCAB_SIZE, (count, length)).tolist()


def test_a_low_rank_affine_change_is_recovered() -> None:
    torch.manual_seed(0)
    source = torch.randn(1, 4000, 24)
    change = torch.randn(24, 3) @ torch.randn(3, 24) * 0.1
    target = source + source @ change + torch.randn(24)
    moments = _Moments(24)
    moments.add(source, target)
    down, up, bias = moments.solve(rank=3, ridge=1e-9)
    assert torch.allclose(source + source @ down @ up + bias, target, atol=1e-3)


def test_rank_bounds_what_can_be_recovered_and_ridge_shrinks() -> None:
    torch.manual_seed(0)
    source = torch.randn(1, 4000, 24)
    target = source + source @ torch.randn(24, 24) * 0.1
    moments = _Moments(24)
    moments.add(source, target)

    def error(rank: int, ridge: float) -> float:
        down, up, bias = moments.solve(rank, ridge)
        return float((source + source @ down @ up + bias - target).square().mean())

    unmapped = float((source - target).square().mean())
    assert error(24, 1e-9) < 1e-6 < error(12, 1e-9) < error(4, 1e-9) < unmapped
    assert error(24, 1e-9) < error(24, 1.0) < error(24, 100.0) < unmapped


def test_the_map_brings_held_out_hidden_states_nearer_to_the_receivers() -> None:
    sender, receiver = tiny_model(), tiny_model(noise=0.02)
    stitch = fit_stitch(sender, receiver, prefixes(30), rank=16)
    held_out = torch.tensor(prefixes(1, 60))
    starts = range(1, NUM_LAYERS)
    source = capture(sender, held_out, hidden_layers=starts).hidden
    target = capture(receiver, held_out, hidden_layers=starts).hidden
    assert stitch.starts == list(starts) and stitch.rank == 16
    for start in starts:
        copied = (source[start] - target[start]).square().mean()
        stitched = (stitch.apply(start, source[start]) - target[start]).square().mean()
        assert stitched < copied, start


def test_models_that_are_the_same_need_no_map() -> None:
    model = tiny_model()
    stitch = fit_stitch(model, model, prefixes(4), rank=4)
    hidden = torch.randn(1, 5, 64)
    for start in stitch.starts:
        assert torch.allclose(stitch.apply(start, hidden), hidden, atol=1e-6)


def test_a_saved_map_is_the_same_map(tmp_path: Path) -> None:
    stitch = fit_stitch(tiny_model(), tiny_model(noise=0.02), prefixes(3), rank=4)
    stitch.save(tmp_path / "map.safetensors")
    loaded = StitchMap.load(tmp_path / "map.safetensors")
    assert loaded.sha256 == stitch.sha256
    hidden = torch.randn(2, 3, 64)
    assert torch.equal(loaded.apply(3, hidden), stitch.apply(3, hidden))
    other = fit_stitch(tiny_model(), tiny_model(noise=0.03), prefixes(3), rank=4)
    assert other.sha256 != stitch.sha256


@pytest.mark.parametrize("damage", ["missing", "truncated", "text", "incomplete", "version"])
def test_a_damaged_map_is_refused(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "map.safetensors"
    stitch = fit_stitch(tiny_model(), tiny_model(noise=0.02), prefixes(2), rank=4)
    if damage == "incomplete":
        stitch = StitchMap(stitch.down, stitch.up, {1: stitch.bias[1]})
    if damage != "missing":
        stitch.save(path)
    content = path.read_bytes() if path.exists() else b""
    if damage == "truncated":
        path.write_bytes(content[:-10])
    if damage == "text":
        path.write_text("not a map")
    if damage == "version":
        path.write_bytes(content.replace(b'"format_version":"1"', b'"format_version":"9"'))
    with pytest.raises(StorageError, match="again"):
        StitchMap.load(path)


def test_bad_fits_are_refused() -> None:
    model = tiny_model()
    with pytest.raises(StitchError, match="at least one calibration prefix"):
        fit_stitch(model, model, [])
    with pytest.raises(StitchError, match="rank=65"):
        fit_stitch(model, model, prefixes(1), rank=65)
    with pytest.raises(StitchError, match="ridge=0"):
        fit_stitch(model, model, prefixes(1), ridge=0)
    with pytest.raises(StitchError, match="start 9"):
        fit_stitch(model, model, prefixes(1), rank=2).apply(9, torch.zeros(1, 1, 64))
