from __future__ import annotations

import json
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest

from droidkv.errors import ServeError
from droidkv.serve.launch import launch, passed_value, settings_table, transfer_config
from droidkv.serve.settings import OnMiss, ServeSettings

SENDER = ServeSettings("sender", "fs:///store", profiles=("/p.json",), hidden_layers=(3, 5))
RECEIVER = ServeSettings("receiver", "fs:///store", profiles=("/p.json",), order="all_first")
FOLDER = Path("/models/a b")


def test_settings_survive_the_journey_through_the_command() -> None:
    for settings in (SENDER, RECEIVER):
        started = launch(settings, FOLDER, "float32")
        text = started.command[started.command.index("--kv-transfer-config") + 1]
        config = json.loads(text)
        assert config == transfer_config(settings)
        assert ServeSettings.from_table(config["kv_connector_extra_config"]) == settings


def test_what_is_as_by_default_is_not_said() -> None:
    assert settings_table(ServeSettings("sender", "fs:///s")) == {
        "role": "sender",
        "store": "fs:///s",
    }


def test_only_a_synchronous_receiver_gives_up_asynchronous_scheduling() -> None:
    flag = "--no-async-scheduling"
    asynchronous = ServeSettings("receiver", "fs:///store", load="async")
    assert flag in launch(RECEIVER, FOLDER, "float32").command
    assert flag not in launch(asynchronous, FOLDER, "float32").command
    assert flag not in launch(SENDER, FOLDER, "float32").command
    assert launch(RECEIVER, FOLDER, "float32").environment["VLLM_USE_V2_MODEL_RUNNER"] == "0"
    assert "VLLM_USE_V2_MODEL_RUNNER" not in launch(SENDER, FOLDER, "float32").environment


def test_what_becomes_of_a_failed_load_is_what_becomes_of_a_miss() -> None:
    policies: dict[OnMiss | None, str] = {None: "recompute", "own": "recompute", "error": "fail"}
    for on_miss, policy in policies.items():
        config = transfer_config(replace(RECEIVER, on_miss=on_miss))
        assert config["kv_load_failure_policy"] == policy


def test_a_receiver_that_refuses_says_why() -> None:
    flag = "--middleware"
    refuses = launch(replace(RECEIVER, on_miss="error"), FOLDER, "float32").command
    module, _, name = refuses[refuses.index(flag) + 1].rpartition(".")
    assert callable(getattr(import_module(module), name))
    for settings in (SENDER, RECEIVER, replace(RECEIVER, on_miss="own")):
        assert flag not in launch(settings, FOLDER, "float32").command


def test_flags_pass_through_untouched_and_last() -> None:
    passed = ("--port", "8001", "--max-model-len=4096")
    started = launch(SENDER, FOLDER, "bfloat16", ("name", "alias"), passed)
    assert started.command[-3:] == passed
    at = started.command.index("--served-model-name")
    assert started.command[at : at + 3] == ("--served-model-name", "name", "alias")
    assert started.command[started.command.index("--dtype") + 1] == "bfloat16"
    own = launch(SENDER, FOLDER, "float32", ("name",), ("--served-model-name", "mine"))
    assert own.command.count("--served-model-name") == 1


@pytest.mark.parametrize(
    "flag", ["--kv-transfer-config={}", "--dtype", "--async-scheduling", "--kv_transfer_config"]
)
def test_flags_that_droidkv_sets_are_refused(flag: str) -> None:
    with pytest.raises(ServeError, match=flag.partition("=")[0].replace("_", "-")):
        launch(SENDER, FOLDER, "float32", (), (flag, "x"))


def test_the_shell_line_is_quoted() -> None:
    line = launch(SENDER, FOLDER, "float32").shell_line()
    assert "'/models/a b'" in line
    assert line.startswith("LMCACHE_TRACK_USAGE=false ")


def test_the_value_of_a_passed_flag() -> None:
    passed = ("-tp", "2", "--enable-lora", "--block-size=32", "--block_size", "64")
    assert passed_value(passed, "--tensor-parallel-size", "-tp") == "2"
    assert passed_value(passed, "--enable-lora") == ""
    assert passed_value(passed, "--block-size") == "64"
    assert passed_value(passed, "--port") is None
