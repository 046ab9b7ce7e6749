"""Runs `droidkv` in this process, for tests."""

from __future__ import annotations

import json
from typing import Any

from click.testing import CliRunner, Result

from droidkv.cli.main import main

# What keeps profiling the tiny pair within a second or two.
SMALL = ("--task-option", "num_records=2", "--items", "2", "--calibration-items", "2")


def run(*arguments: object, code: int = 0) -> Result:
    """Run the command, which must exit with `code`."""
    result = CliRunner().invoke(main, [str(each) for each in arguments])
    assert result.exit_code == code, result.output
    return result


def run_json(*arguments: object, code: int = 0) -> Any:
    """The same with `--json`: stdout must be one JSON document, which is returned."""
    return json.loads(run(*arguments, "--json", code=code).stdout)


def error_of(*arguments: object, code: int = 2) -> str:
    """The message of a command that must fail; people and `--json` get the same one."""
    shown = run(*arguments, code=code)
    assert "Traceback" not in shown.output
    assert shown.stdout == ""
    error = run_json(*arguments, code=code)["error"]
    assert error["exit_code"] == code
    assert error["message"] in shown.stderr
    return str(error["message"])
