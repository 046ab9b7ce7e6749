"""What vLLM calls in every process (entry point `vllm.general_plugins`): registers the models.

The models are registered by name and imported only when one is served, so that vLLM without a
DroidKV connector starts no slower.
"""

from __future__ import annotations

PLUGIN_GROUP, PLUGIN_NAME = "vllm.general_plugins", "droidkv"
ARCHITECTURE_CLASSES = {
    "LlamaForCausalLM": "DroidKVLlama",
    "MistralForCausalLM": "DroidKVMistral",
    "Qwen2ForCausalLM": "DroidKVQwen2",
    "Qwen3ForCausalLM": "DroidKVQwen3",
    "MixtralForCausalLM": "DroidKVMixtral",
    "Qwen3MoeForCausalLM": "DroidKVQwen3Moe",
}
# The same models with several decoders beside the base; `--hf-overrides` asks for them by name.
ICARUS_CLASSES = {
    "IcarusLlamaForCausalLM": "IcarusLlama",
    "IcarusQwen2ForCausalLM": "IcarusQwen2",
    "IcarusQwen3ForCausalLM": "IcarusQwen3",
}


def register() -> None:
    """Register subclasses of vLLM's models: under its own names, and with several decoders."""
    from vllm import ModelRegistry

    for architecture, name in ARCHITECTURE_CLASSES.items():
        ModelRegistry.register_model(architecture, f"droidkv.serve.vllm_models:{name}")
    for architecture, name in ICARUS_CLASSES.items():
        ModelRegistry.register_model(architecture, f"droidkv.serve.vllm_streams:{name}")
