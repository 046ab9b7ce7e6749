"""Blocks that real engines hold, by `droidkv bench memory`."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import run_json

from droidkv.serve.memory_bench import MODES, MemorySettings, memory_row


def test_held_blocks_stand_beside_what_the_formula_promises() -> None:
    settings = MemorySettings(
        folder=Path(),
        prefix_tokens=320,
        question_tokens=50,
        new_tokens=14,
        block_tokens=32,
    )
    alone = memory_row("baseline", 3, 36, settings)
    assert (alone["held_tokens"], alone["formula_tokens"]) == (1152, 3 * 384)
    assert alone["relative_error_percent"] == 0
    shared = memory_row("icarus", 3, 17, settings)
    assert (shared["held_tokens"], shared["formula_tokens"]) == (544, 320 + 3 * 64)
    assert shared["relative_error_percent"] == pytest.approx(6.25)


@pytest.mark.vllm
@pytest.mark.slow
def test_engines_share_a_prefix_or_do_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed")
    monkeypatch.setenv("DROIDKV_CACHE", str(tmp_path / "cache"))
    value = run_json(
        *("bench", "memory", "--pair", "tiny", "--models", 2, "--prefix-tokens", 256),
        *("--question-tokens", 40, "--new-tokens", 10, "--output", tmp_path),
    )
    found = {(row["mode"], row["models"]): row["held_blocks"] for row in value["rows"]}
    # 8 blocks of prefix, 2 of each model's own.
    assert found == {
        ("baseline", 1): 10,
        ("baseline", 2): 20,
        ("prefillshare", 1): 10,
        ("prefillshare", 2): 12,
        ("icarus", 1): 10,
        ("icarus", 2): 12,
    }
    assert {row["mode"] for row in value["rows"]} == set(MODES)
