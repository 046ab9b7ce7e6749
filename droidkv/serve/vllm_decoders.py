"""From vLLM's configuration to an engine's decoders, or a refusal that says why."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vllm.config import CompilationMode

from droidkv.errors import ServeError, UnsupportedModelError
from droidkv.model_identity import weights_identity
from droidkv.serve.decoders import Decoder, read_decoder
from droidkv.serve.icarus import NAMES_VARIABLE, REQUEST_CHECK, IcarusSettings, known_decoders
from droidkv.serve.vllm_plugin import ICARUS_CLASSES
from droidkv.serve.vllm_refusals import check_common, refuse_set
from droidkv.serve.vllm_setup import model_ref
from droidkv.sources import model_folder


def check_engine(vllm_config: Any, settings: IcarusSettings) -> None:
    """Refuse what cannot work, or was never tested.

    Raises:
        UnsupportedModelError: The architecture is not served.
        ServeError: Names the setting, what it is and what it has to be.
    """
    check_common(vllm_config, ICARUS_CLASSES)
    refuse_set("lora_config", vllm_config.lora_config, "LoRA of vLLM's own beside decoders")
    if vllm_config.compilation_config.mode != CompilationMode.NONE:
        raise ServeError(
            "expected eager mode, got torch.compile, which cannot follow how many tokens decode; "
            "start with --enforce-eager"
        )
    config = vllm_config.model_config
    if getattr(config.hf_text_config, "dual_chunk_attention_config", None):
        raise UnsupportedModelError(
            "expected plain attention, got dual_chunk_attention_config in the base's config.json, "
            "which two streams cannot share; take it out, or serve another base"
        )
    if config.enable_prompt_embeds:
        raise ServeError(
            "expected prompts of tokens, got enable_prompt_embeds, which was never tested here; "
            "leave --enable-prompt-embeds out"
        )
    if vllm_config.use_v2_model_runner:
        raise ServeError(
            "expected the V1 model runner, got V2, on which decoders were never tested; set "
            "VLLM_USE_V2_MODEL_RUNNER=0"
        )
    if REQUEST_CHECK not in (config.logits_processors or ()):
        raise ServeError(
            f"expected --logits-processors {REQUEST_CHECK}, which refuses requests for unknown "
            "decoders, got none; start the engine by `droidkv serve icarus`"
        )
    if sorted(known_decoders()) != sorted(settings.decoders):
        raise ServeError(
            f"expected {NAMES_VARIABLE} to name the decoders {', '.join(settings.decoders)}, got "
            f"{', '.join(known_decoders())}; start the engine by `droidkv serve icarus`"
        )


def read_decoders(vllm_config: Any) -> list[Decoder]:
    """An engine's decoders, in the order of their index, each checked against the base.

    Raises:
        DroidKVError: The engine is set up in a way that cannot work, or a decoder does not fit.
    """
    transfer = vllm_config.kv_transfer_config
    if transfer is None or transfer.kv_connector != "IcarusConnector":
        raise ServeError(
            "expected kv_connector 'IcarusConnector' with an architecture of "
            f"{', '.join(ICARUS_CLASSES)}, got {transfer and transfer.kv_connector!r}; start the "
            "engine by `droidkv serve icarus`"
        )
    settings = IcarusSettings.from_table(transfer.kv_connector_extra_config)
    check_engine(vllm_config, settings)
    config = vllm_config.model_config
    base = model_folder(model_ref(config.model, config.revision))
    weights = weights_identity(base, settings.content_hash)
    return [
        read_decoder(name, Path(folder), config.hf_text_config, weights)
        for name, folder in settings.decoders.items()
    ]
