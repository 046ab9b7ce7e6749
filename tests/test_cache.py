from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny import tiny_model

from droidkv.cache import CapturedCache, KVCache
from droidkv.capture import capture
from droidkv.errors import StorageError
from droidkv.plan import ReusePlan
from droidkv.prefill import generate, partial_prefill


def test_a_saved_cache_answers_as_the_captured_one(tmp_path: Path) -> None:
    sender, receiver = tiny_model(), tiny_model(noise=0.04)
    prefix, suffix = torch.randint(3, 90, (2, 9)), torch.randint(3, 90, (2, 3))
    mask = torch.tensor([[1] * 9, [0] * 3 + [1] * 6])
    captured = capture(sender, prefix, mask, hidden_layers=[2], fingerprint={"weights": "abc"})
    captured.save(tmp_path / "cache.safetensors")
    loaded = CapturedCache.load(tmp_path / "cache.safetensors")
    assert loaded.fingerprint == {"weights": "abc"}
    plan = ReusePlan.of(2, 5)
    answers = [
        generate(receiver, partial_prefill(receiver, prefix, cache, plan), suffix, 4, {2})
        for cache in (captured, loaded)
    ]
    assert answers[0] == answers[1]


@pytest.mark.parametrize("damage", ["missing", "truncated", "empty", "text", "version"])
def test_a_damaged_cache_is_refused(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "cache.safetensors"
    if damage != "missing":
        capture(tiny_model(), torch.randint(3, 90, (1, 4))).save(path)
        content = path.read_bytes()
        path.write_bytes(
            {
                "truncated": content[:-1],
                "empty": b"",
                "text": b"{}",
                "version": content.replace(b'"format_version":"1"', b'"format_version":"2"'),
            }[damage]
        )
    with pytest.raises(StorageError, match="capture the prefix again"):
        CapturedCache.load(path)


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "cache.safetensors"
    captured = capture(tiny_model(), torch.randint(3, 90, (1, 4)))
    captured.save(path)
    before = path.read_bytes()
    broken = CapturedCache(captured.keys, captured.values, {0: object()}, captured.axis)  # type: ignore[dict-item]
    with pytest.raises(AttributeError):
        broken.save(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_fork_grows_by_itself() -> None:
    cache = KVCache.empty(1)
    cache.update(torch.ones(1, 1, 2, 4), torch.ones(1, 1, 2, 4), 0)
    fork = cache.fork()
    fork.update(torch.ones(1, 1, 3, 4), torch.ones(1, 1, 3, 4), 0)
    assert (cache.layer(0)[0].shape[2], fork.layer(0)[0].shape[2]) == (2, 5)
