from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command_line import error_of, run_json
from pair_files import write_pair

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")

from droidkv.alora import active_from, exact_prefix_tokens, invocation_tokens  # noqa: E402
from droidkv.capture import capture  # noqa: E402
from droidkv.errors import LoadError  # noqa: E402
from droidkv.loading import load_model  # noqa: E402
from droidkv.models import DecoderModel  # noqa: E402
from droidkv.pair import ModelRef  # noqa: E402

BASE = "tiny:llama?layers=2"


def write_adapter(folder: Path, tokens: list[int]) -> Any:
    """A random activated adapter on the tiny base, saved by PEFT."""
    model = load_model(ModelRef(BASE)).model.model
    config = peft.LoraConfig(
        r=2,
        target_modules=["q_proj", "k_proj", "v_proj"],
        alora_invocation_tokens=tokens,
        task_type="CAUSAL_LM",
        init_lora_weights=False,
    )
    tuned = peft.get_peft_model(model, config).eval()
    tuned.save_pretrained(folder)
    return tuned


def with_adapter(folder: Path, sender: str = BASE) -> Path:
    return write_pair(folder / "mine.toml", sender, BASE, "./adapter", '["records"]')


def test_the_last_occurrence_counts() -> None:
    assert (active_from([1, 7, 8, 7, 8], [7, 8]), active_from([8, 7], [7, 8])) == (3, None)
    assert exact_prefix_tokens([1, 2, 3], [7, 8, 4], [7, 8]) == 3
    assert exact_prefix_tokens([1, 7, 8, 3], [7, 8, 4], [7, 8]) == 4
    assert exact_prefix_tokens([1, 7, 8, 3], [4], [7, 8]) == 1
    assert exact_prefix_tokens([1, 2, 7], [8, 4], [7, 8]) == 2
    assert exact_prefix_tokens([1, 2], [3], [7, 8]) == 2
    assert exact_prefix_tokens([1], [], [7, 8]) == 1


def test_before_the_invocation_kv_are_the_bases_and_after_it_not(tmp_path: Path) -> None:
    """What the check claims, by PEFT's own forward pass."""

    tuned = write_adapter(tmp_path / "adapter", [7, 8])
    ids = [5, 6, 9, 7, 8, 10, 11]
    exact = exact_prefix_tokens(ids[:5], ids[5:], [7, 8])
    with torch.no_grad():
        cache = tuned(torch.tensor([ids]), use_cache=True).past_key_values
    base = capture(DecoderModel(load_model(ModelRef(BASE)).model.model), torch.tensor([ids]))
    for layer in range(2):
        mine = cache.layers[layer].keys
        torch.testing.assert_close(mine[:, :, :exact], base.keys[layer][:, :, :exact])
        assert (mine[:, :, exact:] - base.keys[layer][:, :, exact:]).abs().max() > 1e-3


def test_pair_check_recognises_it(tmp_path: Path) -> None:
    # The chat template's generation prompt opens the suffix's end, as aLoRA's tokens do.
    tokenizer = load_model(ModelRef(BASE)).tokenizer
    opening = tokenizer.encode("<|im_start|>assistant", add_special_tokens=False)
    write_adapter(tmp_path / "adapter", opening)
    assert invocation_tokens(tmp_path / "adapter") == tuple(opening)
    value = run_json("pair", "check", with_adapter(tmp_path))
    assert value["passed"]
    assert "0 layers" in value["checks"][-1]["detail"]
    assert "nothing to profile" in error_of("profile", tmp_path / "mine.toml")
    value = run_json("pair", "check", with_adapter(tmp_path, f"{BASE}&noise=0.1"), code=1)
    assert "weights" in value["checks"][-1]["detail"]


def test_pair_check_refuses_a_prefix_that_reaches_past_it(tmp_path: Path) -> None:
    tokenizer = load_model(ModelRef(BASE)).tokenizer
    opening = tokenizer.encode("<|im_start|>user", add_special_tokens=False)
    write_adapter(tmp_path / "adapter", opening)
    value = run_json("pair", "check", with_adapter(tmp_path), code=1)
    assert "stand at token 0" in value["checks"][-1]["detail"]


def test_damaged_settings_are_refused(tmp_path: Path) -> None:
    write_adapter(tmp_path / "adapter", [7])
    config = tmp_path / "adapter" / "adapter_config.json"
    text = config.read_text(encoding="utf-8")

    config.write_text(json.dumps({**json.loads(text), "alora_invocation_tokens": ["a"]}))
    with pytest.raises(LoadError, match="list of token ids"):
        invocation_tokens(tmp_path / "adapter")
    config.write_text(json.dumps({**json.loads(text), "alora_invocation_tokens": None}))
    assert invocation_tokens(tmp_path / "adapter") is None
