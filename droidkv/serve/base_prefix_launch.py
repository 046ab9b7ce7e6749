"""How an engine with a base and adapters that read its KV is started."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from droidkv.check import Check
from droidkv.content import check_base, read_adapter_config
from droidkv.errors import UnsupportedModelError
from droidkv.model_identity import load_config
from droidkv.pair import ModelRef, Pair
from droidkv.serve.base_prefix import BasePrefixSettings
from droidkv.serve.beside_base import adapters_of, preflight_adapters
from droidkv.serve.launch import SHARED_FLAGS, Launch, connector_config, server_command
from droidkv.serve.preflight import NO_BLOCK_SIZE, block_size, check_architecture
from droidkv.serve.refusals import MIDDLEWARE
from droidkv.serve.vllm_plugin import ARCHITECTURE_CLASSES

CONNECTOR_MODULE = "droidkv.serve.vllm_base_prefix"
_FINE_BLOCK_TOKENS = 32
# What vLLM takes as --max-lora-rank.
_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
_OWN_FLAGS = {
    **SHARED_FLAGS,
    **dict.fromkeys(
        ("--enable-lora", "--lora-modules", "--max-loras", "--max-lora-rank"), "pair files"
    ),
    "--no-enable-prefix-caching": "nothing, since adapters find the base's blocks by it",
}


def pair_adapters(pairs: Sequence[Pair]) -> tuple[ModelRef, dict[str, Path]]:
    """The base that pairs share, and the adapter that each brings, by the pair's name.

    Raises:
        PairError: A receiver is no adapter that reads the sender's KV, or the senders differ.
        LoadError: An adapter cannot be had.
    """
    return adapters_of(
        pairs,
        lambda pair: pair.reference is not None and pair.receiver.apply != "icarus",
        "an adapter that was trained to read the sender's KV by `droidkv train prefillshare`",
    )


def launch_adapters(
    settings: BasePrefixSettings,
    adapters: Mapping[str, Path],
    folder: Path,
    dtype: str,
    names: Sequence[str] = (),
    passed: Sequence[str] = (),
) -> Launch:
    """The command of a server with a base and adapters that read its KV.

    Args:
        settings: The engine's.
        adapters: Name -> folder; clients call an adapter by its name.
        folder: The base's.
        dtype: Of weights and cache.
        names: What clients may call the base.
        passed: Flags for vLLM, as they are.

    Raises:
        LoadError: An adapter's settings cannot be read.
        UnsupportedModelError: An adapter's rank is more than vLLM takes.
        ServeError: A passed flag is one that droidkv sets.
    """
    arguments = engine_arguments(settings, adapters)
    config = arguments["kv_transfer_config"]
    own = ["--enable-lora", "--enable-prefix-caching", "--middleware", MIDDLEWARE]
    own += ["--max-loras", str(arguments["max_loras"])]
    own += ["--max-lora-rank", str(arguments["max_lora_rank"])]
    own += ["--kv-transfer-config", json.dumps(config, allow_nan=False)]
    own += ["--lora-modules", *(f"{name}={path}" for name, path in adapters.items())]
    return Launch(server_command(folder, dtype, names, own, passed, _OWN_FLAGS), {}, config)


def check_adapters(
    settings: BasePrefixSettings,
    adapters: Mapping[str, Path],
    folder: Path,
    dtype: str,
    passed: Sequence[str] = (),
) -> list[Check]:
    """What `preflight_adapters` says of such a server, and what of its blocks.

    Args:
        settings: The engine's.
        adapters: Name -> folder.
        folder: The base's.
        dtype: Of weights and cache.
        passed: Flags for vLLM.
    """

    def look(name: str, adapter: Path, weights: str) -> str:
        check_base(adapter, weights)
        return f"rank {read_adapter_config(adapter).get('r')}"

    checks = preflight_adapters("adapter", adapters, look, folder, dtype, passed)
    architecture = check_architecture(load_config(ModelRef(str(folder))), ARCHITECTURE_CLASSES)
    return [architecture, *checks, _check_blocks(settings.own_tokens, passed)]


def _check_blocks(own_tokens: int | None, passed: Sequence[str]) -> Check:
    """Only whole blocks are shared; what is left of a prefix, an adapter computes itself."""
    block_tokens = block_size(passed)
    if block_tokens is None:
        return NO_BLOCK_SIZE
    found = f"of {block_tokens} tokens"
    if own_tokens is not None and own_tokens < block_tokens:
        advice = f"an adapter may have to compute one block: --own-tokens {block_tokens} or more"
        return Check("blocks", "fail", f"{found}, --own-tokens {own_tokens}", advice)
    if block_tokens > _FINE_BLOCK_TOKENS:
        advice = (
            "an adapter loses with each token of the prefix that it computes itself: "
            f"--block-size {_FINE_BLOCK_TOKENS} after '--'"
        )
        return Check("blocks", "warn", found, advice)
    return Check("blocks", "ok", found)


def engine_arguments(settings: BasePrefixSettings, adapters: Mapping[str, Path]) -> dict[str, Any]:
    """What `vllm.LLM` needs beside the base and its dtype.

    Args:
        settings: The engine's.
        adapters: Name -> folder of each adapter; requests bring them as vLLM's `LoRARequest`.

    Raises:
        LoadError: An adapter's settings cannot be read.
        UnsupportedModelError: An adapter's rank is more than vLLM takes.
    """
    return {
        **lora_arguments(adapters),
        "enable_prefix_caching": True,
        "kv_transfer_config": transfer_config(settings),
    }


def lora_arguments(adapters: Mapping[str, Path]) -> dict[str, Any]:
    """What `vllm.LLM` needs to have all these adapters at once.

    Raises:
        LoadError: An adapter's settings cannot be read.
        UnsupportedModelError: An adapter's rank is more than vLLM takes.
    """
    rank = max(int(read_adapter_config(folder).get("r", 0)) for folder in adapters.values())
    if rank > _RANKS[-1]:
        raise UnsupportedModelError(
            f"expected adapters of rank {_RANKS[-1]} or less, got {rank}, which vLLM does not take"
        )
    return {
        "enable_lora": True,
        # One more than there are: on a CPU vLLM runs the base's requests, where adapters' stand
        # beside them in a batch, through the last place, which must stay empty.
        "max_loras": len(adapters) + 1,
        "max_lora_rank": next(each for each in _RANKS if each >= rank),
    }


def transfer_config(settings: BasePrefixSettings) -> dict[str, Any]:
    """The value of vLLM's `--kv-transfer-config`."""
    table = {"own_tokens": settings.own_tokens, "audit": settings.audit}
    given = {name: value for name, value in table.items() if value is not None}
    return connector_config("BasePrefixConnector", CONNECTOR_MODULE, given, "fail")
