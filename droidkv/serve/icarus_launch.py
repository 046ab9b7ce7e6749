"""How an engine with several decoders is started: by a command, or within a process.

A server: `launch_decoders`. Within a process, before anything of vLLM's is imported:

    settings = IcarusSettings({"records": "/path/to/adapter", "tools": "/path/to/another"})
    os.environ |= engine_environment(settings)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"   # the engine in this very process
    llm = vllm.LLM(model=folder, dtype="float32", **engine_arguments(settings, architecture))
    params = vllm.SamplingParams(max_tokens=16, extra_args={"kv_transfer_params": ask("records")})
    llm.generate([{"prompt_token_ids": ids}], params)

`folder` is the base's (`droidkv.servable.servable_folder`), `architecture` the first of its
config.json, such as `LlamaForCausalLM`. `droidkv.serve.vllm_blocks` counts the blocks it holds.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from droidkv.errors import UnsupportedModelError, unknown_name
from droidkv.serve.connector_plan import PARAMS_KEY
from droidkv.serve.icarus import NAMES_VARIABLE, REQUEST_CHECK, IcarusSettings
from droidkv.serve.launch import (
    SHARED_FLAGS,
    V1_RUNNER,
    Launch,
    connector_config,
    server_command,
)
from droidkv.serve.vllm_plugin import ICARUS_CLASSES

CONNECTOR_MODULE = "droidkv.serve.vllm_icarus"
_PREFIX = "Icarus"
_OWN_FLAGS = {
    **SHARED_FLAGS,
    "--hf-overrides": "the base's config.json",
    "--logits-processors": "a request's own settings",
    "--no-enforce-eager": "nothing: decoders run in eager mode",
}


def ask(decoder: str) -> dict[str, Any]:
    """`kv_transfer_params` of a request for a decoder."""
    return {PARAMS_KEY: {"decoder": decoder}}


def engine_arguments(settings: IcarusSettings, architecture: str) -> dict[str, Any]:
    """What `vllm.LLM` needs for decoders, beside the model and its dtype.

    Args:
        settings: The decoders.
        architecture: The base's, as its config.json has it.

    Raises:
        UnsupportedModelError: No two streams of it can run.
    """
    if _PREFIX + architecture not in ICARUS_CLASSES:
        known = [name.removeprefix(_PREFIX) for name in ICARUS_CLASSES]
        raise UnsupportedModelError(unknown_name("architecture", architecture, known))
    return {
        "hf_overrides": {"architectures": [_PREFIX + architecture]},
        "kv_transfer_config": connector_config(
            "IcarusConnector",
            CONNECTOR_MODULE,
            {"decoders": dict(settings.decoders), "content_hash": settings.content_hash},
        ),
        "logits_processors": [REQUEST_CHECK],
        "enforce_eager": True,
    }


def engine_environment(settings: IcarusSettings) -> dict[str, str]:
    """Variables that every process of the engine needs."""
    return {NAMES_VARIABLE: json.dumps(list(settings.decoders)), **V1_RUNNER}


def launch_decoders(
    settings: IcarusSettings,
    folder: Path,
    architecture: str,
    dtype: str,
    names: Sequence[str] = (),
    passed: Sequence[str] = (),
) -> Launch:
    """The command of a server with several decoders.

    Args:
        settings: The decoders.
        folder: The base's.
        architecture: The base's, as its config.json has it.
        dtype: Of weights and cache.
        names: What clients may call the model.
        passed: Flags for vLLM, as they are.

    Raises:
        UnsupportedModelError: As `engine_arguments`.
        ServeError: A passed flag is one that droidkv sets.
    """
    arguments = engine_arguments(settings, architecture)
    own = ["--enforce-eager", "--logits-processors", *arguments["logits_processors"]]
    for flag, name in (
        ("--hf-overrides", "hf_overrides"),
        ("--kv-transfer-config", "kv_transfer_config"),
    ):
        own += [flag, json.dumps(arguments[name], allow_nan=False)]
    return Launch(
        server_command(folder, dtype, names, own, passed, _OWN_FLAGS),
        engine_environment(settings),
        arguments["kv_transfer_config"],
    )
