"""What is looked at before a server with several decoders starts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from droidkv.check import Check
from droidkv.content import adapter_sha256
from droidkv.doctor import check_broken_companions, check_processor
from droidkv.errors import DroidKVError
from droidkv.model_identity import load_config, weights_identity
from droidkv.pair import ModelRef
from droidkv.serve.decoders import read_decoder
from droidkv.serve.icarus import IcarusSettings
from droidkv.serve.preflight import check_dtype, check_flags, check_plugin, check_vllm


def preflight_decoders(
    settings: IcarusSettings, folder: Path, dtype: str, passed: Sequence[str] = ()
) -> list[Check]:
    """Look at all that the server needs, without starting it.

    Args:
        settings: The decoders.
        folder: The base's.
        dtype: Of weights and cache.
        passed: Flags for vLLM.
    """
    checks = [check_vllm(), check_plugin(), check_broken_companions(), check_processor()]
    checks += [check_dtype(dtype), *check_flags(passed, "LoRA of vLLM's own beside decoders")]
    return [*checks, *_check_decoders(settings, folder)]


def _check_decoders(settings: IcarusSettings, folder: Path) -> Iterator[Check]:
    try:
        config = load_config(ModelRef(str(folder.absolute())))
        weights = weights_identity(folder, settings.content_hash)
    except DroidKVError as error:
        yield Check("model", "fail", str(error), "see the message")
        return
    yield Check("model", "ok", f"{folder}; {weights[:23]}")
    for name, adapter in settings.decoders.items():
        try:
            decoder = read_decoder(name, Path(adapter), config, weights)
            digest = adapter_sha256(decoder.folder)[:23]
        except DroidKVError as error:
            yield Check(f"decoder {name}", "fail", str(error), "see the message")
        else:
            yield Check(f"decoder {name}", "ok", f"rank {decoder.rank}; {digest}")
