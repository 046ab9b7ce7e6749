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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from droidkv.check import Check
from droidkv.errors import UnsupportedModelError, unknown_name
from droidkv.model_identity import load_config
from droidkv.pair import ModelRef, Pair
from droidkv.serve.beside_base import adapters_of, preflight_adapters
from droidkv.serve.connector_plan import PARAMS_KEY
from droidkv.serve.decoders import read_decoder
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


def pair_decoders(pairs: Sequence[Pair]) -> tuple[ModelRef, dict[str, Path]]:
    """The base that pairs share, and the adapter that each brings, by the pair's name.

    Raises:
        PairError: A receiver is no decoder of the sender's, or the senders differ.
        LoadError: An adapter cannot be had.
    """
    return adapters_of(
        pairs,
        lambda pair: pair.receiver.apply == "icarus",
        "an adapter with apply = 'icarus', made by `droidkv train icarus`",
    )


def check_decoders(
    adapters: Mapping[str, Path], folder: Path, dtype: str, passed: Sequence[str] = ()
) -> list[Check]:
    """What `preflight_adapters` says of a server with these decoders.

    Args:
        adapters: Name -> folder.
        folder: The base's.
        dtype: Of weights and cache.
        passed: Flags for vLLM.
    """

    def look(name: str, adapter: Path, weights: str) -> str:
        config = load_config(ModelRef(str(folder.absolute())))
        return f"rank {read_decoder(name, adapter, config, weights).rank}"

    lora = "LoRA of vLLM's own beside decoders"
    return preflight_adapters("decoder", adapters, look, folder, dtype, passed, lora)


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
