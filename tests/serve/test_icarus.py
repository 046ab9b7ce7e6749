from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from droidkv.errors import ServeError, UnsupportedModelError
from droidkv.serve.icarus import (
    NAMES_VARIABLE,
    DecodedRows,
    IcarusScheduler,
    IcarusSettings,
    Turn,
    decoder_asked,
    known_decoders,
)
from droidkv.serve.icarus_launch import ask, engine_arguments, engine_environment, launch_decoders

SETTINGS = IcarusSettings({"one": "/adapters/one", "two": "/adapters/two"})


def test_settings_survive_the_journey_through_the_command() -> None:
    started = launch_decoders(SETTINGS, Path("/base"), "LlamaForCausalLM", "float32", ("b",))
    command = list(started.command)
    config = json.loads(command[command.index("--kv-transfer-config") + 1])
    assert IcarusSettings.from_table(config["kv_connector_extra_config"]) == SETTINGS
    overrides = json.loads(command[command.index("--hf-overrides") + 1])
    assert overrides == {"architectures": ["IcarusLlamaForCausalLM"]}
    assert "--enforce-eager" in command
    assert json.loads(started.environment[NAMES_VARIABLE]) == ["one", "two"]


@pytest.mark.parametrize(
    "table", [{}, {"decoders": {}}, {"decoders": {"one": 1}}, {"decoders": {"a": "/b"}, "c": 1}]
)
def test_settings_that_make_no_sense_are_refused(table: dict[str, Any]) -> None:
    with pytest.raises(ServeError, match="kv_connector_extra_config"):
        IcarusSettings.from_table(table)


def test_what_droidkv_sets_is_refused_as_a_flag() -> None:
    for flag in ("--hf-overrides={}", "--logits-processors", "--no-enforce-eager", "--dtype"):
        with pytest.raises(ServeError, match=flag.partition("=")[0]):
            launch_decoders(SETTINGS, Path("/b"), "LlamaForCausalLM", "float32", (), (flag, "x"))
    with pytest.raises(UnsupportedModelError, match="Known: LlamaForCausalLM"):
        engine_arguments(SETTINGS, "MixtralForCausalLM")


def test_a_request_names_its_decoder() -> None:
    assert decoder_asked(ask("two"), ["one", "two"]) == "two"
    bare: list[Any] = [None, {}, {"other": 1}, {"droidkv": {}}, {"droidkv": {"decoder": None}}]
    for params in bare:
        assert decoder_asked(params, ["one"]) is None
    with pytest.raises(ServeError, match="Did you mean 'one'"):
        decoder_asked(ask("oen"), ["one", "two"])
    for wrong in ({"droidkv": {"plan": "[0,0)"}}, {"droidkv": "one"}, ask("one") | {"droidkv": 1}):
        with pytest.raises(ServeError, match="kv_transfer_params, droidkv"):
            decoder_asked(wrong, ["one"])


def test_the_names_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in engine_environment(SETTINGS).items():
        monkeypatch.setenv(name, value)
    assert known_decoders() == ["one", "two"]
    monkeypatch.setenv(NAMES_VARIABLE, "one,two")
    with pytest.raises(ServeError, match="droidkv serve icarus"):
        known_decoders()
    monkeypatch.delenv(NAMES_VARIABLE)
    with pytest.raises(ServeError, match="got None"):
        known_decoders()


def turn(name: str, start: int, stop: int, num_tokens: int, first_block: int = 0) -> Turn:
    return Turn(name, range(first_block, first_block + 8), start, stop, num_tokens)


def test_only_tokens_whose_logits_are_used_are_decoded() -> None:
    scheduler = IcarusScheduler(["one", "two"], block_tokens=4)
    scheduler.admit("a", ask("two"), all_tokens=False)
    scheduler.admit("base", None, all_tokens=False)
    scheduler.admit("c", ask("one"), all_tokens=False)
    # The first chunk of a prompt of 10 tokens; then its last one, beside others.
    assert scheduler.step([turn("a", 0, 8, 10)]) == DecodedRows()
    others = [turn("base", 5, 6, 6), turn("c", 3, 4, 4, first_block=16)]
    step = scheduler.step([turn("a", 8, 10, 10, first_block=8), *others])
    assert step == DecodedRows(((0, 1), (1, 1)), (67, 41))
    # Generated tokens, whose number the scheduler may not know yet.
    assert scheduler.step([turn("a", 10, 11, 10)]) == DecodedRows(((1, 1),), (10,))
    # A preempted request is prefilled anew, its generated tokens too.
    assert scheduler.step([turn("a", 0, 8, 11)]) == DecodedRows()
    scheduler.finish("a")
    assert scheduler.step([turn("a", 10, 11, 11)]) == DecodedRows()


def test_a_prompt_whose_log_probabilities_are_wanted_is_decoded_whole() -> None:
    scheduler = IcarusScheduler(["one"], block_tokens=4)
    scheduler.admit("a", ask("one"), all_tokens=True)
    assert scheduler.step([turn("a", 0, 3, 10)]) == DecodedRows(((0, 3),), (0, 1, 2))
