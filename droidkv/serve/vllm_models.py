"""vLLM's own models, subclassed only to hand out the hidden state that enters some layers (E).

Registered through the entry point `vllm.general_plugins` under their own names. Where no DroidKV
connector is configured they are vLLM's models, unchanged.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from vllm.config import CompilationMode
from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.model_executor.models.mistral import MistralForCausalLM
from vllm.model_executor.models.mixtral import MixtralForCausalLM
from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM
from vllm.model_executor.models.qwen3_moe import Qwen3MoeForCausalLM

from droidkv.errors import ServeError, UnsupportedModelError
from droidkv.serve.settings import ServeSettings, needed_hidden_layers
from droidkv.serve.vllm_refusals import check_engine

HASHED_KEY = "droidkv_hidden_layers"
_CONNECTOR = "DroidKVConnector"

# Attention modules of a model -> the model: how a connector finds the model of its own engine.
_models: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def model_of(attention_modules: Mapping[str, Any]) -> Any:
    """The model that owns these attention modules.

    Raises:
        UnsupportedModelError: It is none of the architectures below.
    """
    wanted = set(map(id, attention_modules.values()))
    for model in list(_models):
        if wanted & set(map(id, model.modules())):
            return model
    raise UnsupportedModelError(
        "expected a model of the architectures "
        f"{', '.join(sorted(ARCHITECTURES))}, got another one, or the plugin 'droidkv' was not "
        "loaded; check VLLM_PLUGINS, and serve one of these"
    )


class EntersLayers:
    """Mixin: a causal LM of vLLM that tells a listener the hidden state entering some layers.

    Attributes:
        hidden_layers: Layers whose entering hidden state is handed out, ascending.
        on_hidden: Called in every forward pass with `[num_tokens, hidden_size]` per layer.
        num_weight_loads: How often weights were loaded; engines may load others while they run.
    """

    hidden_layers: tuple[int, ...] = ()
    num_weight_loads: int = 0
    on_hidden: Callable[[dict[int, Tensor]], None] | None = None

    def __init__(self, *, vllm_config: Any, prefix: str = "", **others: Any) -> None:
        layers = _wanted_layers(vllm_config)
        if layers:
            # vLLM's cache of compiled graphs does not know which layers hand out their input.
            vllm_config.additional_config[HASHED_KEY] = list(layers)
        super().__init__(vllm_config=vllm_config, prefix=prefix, **others)  # type: ignore[call-arg]
        if _is_droidkv(vllm_config):
            _models.add(self)  # type: ignore[arg-type]
        if layers:
            self.hidden_layers = layers
            self._hand_out(vllm_config)

    def _hand_out(self, vllm_config: Any) -> None:
        self.model._set_aux_hidden_state_layers(self.hidden_layers)  # type: ignore[attr-defined]

    def load_weights(self, *args: Any, **kwargs: Any) -> Any:
        """vLLM's, counted."""
        self.num_weight_loads += 1
        return super().load_weights(*args, **kwargs)  # type: ignore[misc]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """vLLM's forward pass; what it hands out besides goes to the listener."""
        output = super().forward(*args, **kwargs)  # type: ignore[misc]
        if not self.hidden_layers or not isinstance(output, tuple):
            return output
        hidden, entering = output
        if self.on_hidden is not None:
            self.on_hidden(dict(zip(self.hidden_layers, entering, strict=True)))
        return hidden


class EntersLayersByHook(EntersLayers):
    """The same for models of vLLM that cannot hand out hidden states; eager mode only."""

    def _hand_out(self, vllm_config: Any) -> None:
        if vllm_config.compilation_config.mode != CompilationMode.NONE:
            raise UnsupportedModelError(
                f"expected eager mode to capture E of {type(self).__name__}, got torch.compile, "
                "under which hooks see garbage; start the sender with --enforce-eager"
            )
        self._entering: dict[int, Tensor] = {}
        for layer in self.hidden_layers:
            module = self.model.layers[layer]  # type: ignore[attr-defined]
            module.register_forward_pre_hook(self._hook(layer))

    def _hook(self, layer: int) -> Callable[[nn.Module, Any], None]:
        def keep(module: nn.Module, arguments: Any) -> None:
            _, hidden, residual = arguments
            self._entering[layer] = hidden if residual is None else hidden + residual

        return keep

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        if self.hidden_layers and self.on_hidden is not None:
            self.on_hidden(dict(self._entering))
        return output


class DroidKVLlama(EntersLayers, LlamaForCausalLM):  # type: ignore[misc]
    """Llama."""


class DroidKVMistral(EntersLayers, MistralForCausalLM):  # type: ignore[misc]
    """Mistral."""


class DroidKVQwen2(EntersLayers, Qwen2ForCausalLM):  # type: ignore[misc]
    """Qwen2."""


class DroidKVQwen3(EntersLayers, Qwen3ForCausalLM):  # type: ignore[misc]
    """Qwen3."""


class DroidKVMixtral(EntersLayersByHook, MixtralForCausalLM):  # type: ignore[misc]
    """Mixtral."""


class DroidKVQwen3Moe(EntersLayers, Qwen3MoeForCausalLM):  # type: ignore[misc]
    """Qwen3-MoE."""


ARCHITECTURES: Mapping[str, type] = {
    "LlamaForCausalLM": DroidKVLlama,
    "MistralForCausalLM": DroidKVMistral,
    "Qwen2ForCausalLM": DroidKVQwen2,
    "Qwen3ForCausalLM": DroidKVQwen3,
    "MixtralForCausalLM": DroidKVMixtral,
    "Qwen3MoeForCausalLM": DroidKVQwen3Moe,
}


def _is_droidkv(vllm_config: Any) -> bool:
    # Of an engine's parts only the model sees in what a connector is wrapped.
    config = vllm_config.kv_transfer_config
    if config is None or not config.has_connector(_CONNECTOR):
        return False
    if config.kv_connector != _CONNECTOR:
        raise ServeError(
            f"expected {_CONNECTOR} to be an engine's only connector, got it inside "
            f"{config.kv_connector}: another one beside it would store caches that two models "
            f"have a part in as this model's own; start with {_CONNECTOR} alone"
        )
    return True


def _wanted_layers(vllm_config: Any) -> tuple[int, ...]:
    if not _is_droidkv(vllm_config):
        return ()
    table = vllm_config.kv_transfer_config.kv_connector_extra_config
    settings = ServeSettings.from_table(table)
    check_engine(vllm_config, settings, ARCHITECTURES)  # before weights are loaded
    if settings.role != "sender":
        return ()
    # Whose profiles these are is checked by the connector, which knows the model's identity.
    layers = needed_hidden_layers(settings, identity=None)
    num_layers = vllm_config.model_config.hf_text_config.num_hidden_layers
    if bad := [layer for layer in layers if not 0 <= layer < num_layers]:
        raise UnsupportedModelError(f"expected E layers within [0,{num_layers}), got {bad}")
    return layers
