from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from command_line import run, run_json

import droidkv
from droidkv.cli.main import main
from droidkv.objectives import COSTS, OBJECTIVES


def commands(group: click.Group, *path: str) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from commands(command, *path, name)
        else:
            yield (*path, name), command


COMMANDS = dict(commands(main))


def test_every_command_of_the_requirement_is_there() -> None:
    names = {" ".join(path) for path in COMMANDS}
    assert {f"pair {name}" for name in ("list", "show", "check")} <= names
    assert {f"train {name}" for name in ("plain", "prefillshare", "icarus")} <= names
    assert {f"frontier {name}" for name in ("show", "plot", "pick", "diff")} <= names
    assert {"profile", "stitch", "probe", "verify", "calibrate", "doctor", "search", "ask"} <= names
    assert {
        f"serve {name}"
        for name in ("sender", "receiver", "icarus", "prefillshare", "demo", "purge")
    } <= names
    assert {"bench sweep", "bench prefill", "bench icarus", "bench memory", "stats"} <= names


@pytest.mark.parametrize("path", COMMANDS)
def test_help_has_examples_of_this_very_command(path: tuple[str, ...]) -> None:
    shown = run(*path, "--help").stdout
    assert "--json" in shown and "-q, --quiet" in shown
    examples = shown.partition("Examples:\n")[2].strip().splitlines()
    assert examples
    for line in examples:
        assert f"droidkv {' '.join(path)}" in line


@pytest.mark.parametrize("name", ["profile", "confirm", "refine", "probe", "search", "sharing"])
def test_examples_do_not_write_over_what_is_shipped(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else they are refused where the README says to run them."""

    def ended(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("droidkv.loading.load_model", ended)
    monkeypatch.setattr("droidkv.cli.probe._require_same_layers", lambda *_: None)
    (tmp_path / "profiles").symlink_to(Path(__file__).parents[2] / "profiles")
    for example in re.split(r"[\n&]", getattr(COMMANDS[(name,)], "examples", "").strip()):
        arguments = shlex.split(example, comments=True)[1:]
        assert "--overwrite" not in CliRunner().invoke(main, arguments).output


@pytest.mark.parametrize("path", COMMANDS)
def test_options_of_the_examples_exist(path: tuple[str, ...]) -> None:
    command = COMMANDS[path]
    known = {name for parameter in command.params for name in parameter.opts}
    examples: str = getattr(command, "examples", "")
    own = [line.partition(" -- ")[0] for line in examples.splitlines()]
    for word in " ".join(own).split():
        if word.startswith("--"):
            assert word in known, word


def test_help_lists_every_command_without_cutting_its_sentence() -> None:
    shown = run("--help").stdout
    groups = {path[:-1] for path in COMMANDS}
    assert {(), ("frontier",), ("bench",)} <= groups
    for group in groups:
        assert "..." not in run(*group, "--help").stdout.partition("Commands:")[2], group
    assert "Exit codes: 0 ok" in shown


def test_objectives_and_costs_in_the_help_are_the_librarys() -> None:
    shown = " ".join(run("frontier", "show", "--help").stdout.split())
    for name in (*OBJECTIVES, *COSTS):
        assert name in shown


def test_version() -> None:
    assert run("--version").stdout.split()[-1] == droidkv.__version__


def test_no_command_is_wrong_usage() -> None:
    assert "Commands:" in run(code=2).output


def test_the_command_starts_without_heavy_packages() -> None:
    code = (
        "import sys; from droidkv.cli.main import main\n"
        "try: main(['profile', '--help'])\n"
        "except SystemExit: print(' '.join({m.split('.')[0] for m in sys.modules}))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"},
    )
    loaded = set(result.stdout.splitlines()[-1].split())
    assert "click" in loaded
    assert not loaded & {"torch", "transformers", "numpy", "matplotlib", "optuna", "datasets"}


@pytest.mark.parametrize(
    "arguments", [["frontier", "pick"], ["nonsense"], ["pair", "list", "--nonsense"]]
)
def test_wrong_usage_is_told_in_json_too(arguments: list[str]) -> None:
    shown = run(*arguments, code=2)
    assert shown.stdout == "" and "Try: " in shown.stderr
    error = run_json(*arguments, code=2)["error"]
    assert error["exit_code"] == 2
    assert f"Error: {error['message']}" in shown.stderr


def test_what_nobody_foresaw_is_a_bug_with_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("boom")

    monkeypatch.setattr("droidkv.pair.list_pairs", broken)
    shown = run("pair", "list", code=3)
    assert "Traceback" in shown.stderr and "bug in droidkv" in shown.stderr
    assert run_json("pair", "list", code=3)["error"]["type"] == "ZeroDivisionError"


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_a_command_that_is_ended_from_outside_says_so(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = signal.Signals[name]
    before = signal.signal(number, signal.SIG_DFL)
    monkeypatch.setattr("droidkv.pair.list_pairs", lambda: os.kill(os.getpid(), number))
    try:
        shown = run("pair", "list", code=128 + number)
        assert shown.stdout == "" and f"ended by {name}" in shown.stderr
        assert run_json("pair", "list", code=128 + number)["error"]["exit_code"] == 128 + number
    finally:
        signal.signal(number, before)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_command_that_is_ended_from_outside_ends_its_servers(
    tmp_path: Path, number: signal.Signals
) -> None:
    # What is started under nohup ignores SIGHUP, and so does all it starts.
    program = f"""
import signal, sys, time
from pathlib import Path
from droidkv.cli.framework import _end_in_order
from droidkv.serve.launch import Launch
from droidkv.serve.processes import serving
signal.signal({int(number)}, signal.SIG_DFL)
_end_in_order()
sleeper = Launch((sys.executable, "-c", "import time; time.sleep(600)"), {{}}, {{}})
with serving(sleeper, 1, Path({str(tmp_path / "log")!r})) as server:
    print(server.process.pid, flush=True)
    time.sleep(600)
"""
    command = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert command.stdout is not None
    server = int(command.stdout.readline())
    os.kill(server, 0)  # it is there
    command.send_signal(number)
    command.communicate(timeout=60)
    assert command.returncode == 128 + number
    with pytest.raises(ProcessLookupError):
        os.kill(server, 0)
