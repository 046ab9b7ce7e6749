from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny import tiny_model
from torch import Tensor

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


def ones(num_tokens: int, value: float = 1.0) -> Tensor:
    return torch.full((1, 1, num_tokens, 4), value)


@given(lengths=st.lists(st.integers(1, 90), min_size=1, max_size=6), fork_at=st.integers(0, 5))
def test_growing_is_concatenation_and_changes_nothing_seen_before(
    lengths: list[int], fork_at: int
) -> None:
    caches = {"first": KVCache.empty(1)}
    wanted: dict[str, list[Tensor]] = {"first": []}
    seen: list[tuple[Tensor, Tensor]] = []
    for step, num_tokens in enumerate(lengths):
        if step == fork_at:
            caches["fork"] = caches["first"].fork()
            wanted["fork"] = list(wanted["first"])
        for name, cache in caches.items():
            new = torch.rand(1, 1, num_tokens, 4)
            wanted[name].append(new)
            keys, values = cache.update(new, -new, 0)
            assert torch.equal(keys, torch.cat(wanted[name], dim=2))
            assert torch.equal(values, -keys)
            seen.append((keys, keys.clone()))
    assert all(torch.equal(tensor, before) for tensor, before in seen)


def test_a_cache_whose_tensors_were_replaced_grows_from_the_new_ones() -> None:
    cache = KVCache.empty(1)
    for _ in range(3):
        cache.update(ones(2), ones(2), 0)
    cache.keys[0], cache.values[0] = ones(1, 5.0), ones(1, 6.0)
    keys, values = cache.update(ones(1), ones(1), 0)
    assert keys[0, 0, :, 0].tolist() == [5.0, 1.0]
    assert values[0, 0, :, 0].tolist() == [6.0, 1.0]


def test_a_cache_grows_in_inference_mode_and_out_of_it() -> None:
    cache = KVCache.empty(1)
    with torch.inference_mode():
        cache.update(ones(1), ones(1), 0)
        cache.update(ones(1, 2.0), ones(1, 2.0), 0)
    cache.update(ones(1, 3.0), ones(1, 3.0), 0)
    with torch.inference_mode():
        keys, _ = cache.update(ones(1, 4.0), ones(1, 4.0), 0)
    assert keys[0, 0, :, 0].tolist() == [1.0, 2.0, 3.0, 4.0]


def test_gradients_reach_what_was_appended() -> None:
    cache = KVCache.empty(1)
    first, second = ones(1).requires_grad_(), ones(1).requires_grad_()
    cache.update(first, ones(1), 0)
    keys, _ = cache.update(second, ones(1), 0)
    loss = keys.square().sum()  # needs the keys as they are now
    cache.update(ones(1), ones(1), 0)
    loss.backward()  # type: ignore[no-untyped-call]
    assert first.grad is not None and second.grad is not None


def test_a_fork_grows_by_itself() -> None:
    cache = KVCache.empty(1)
    cache.update(torch.ones(1, 1, 2, 4), torch.ones(1, 1, 2, 4), 0)
    fork = cache.fork()
    fork.update(torch.ones(1, 1, 3, 4), torch.ones(1, 1, 3, 4), 0)
    assert (cache.layer(0)[0].shape[2], fork.layer(0)[0].shape[2]) == (2, 5)
