"""Random tiny models and their tokenizer, made in a second and offline: `tiny:llama?seed=0`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl

import tokenizers
import torch
import transformers

from droidkv.errors import PairError, unknown_name

_SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# head_dim is 32: the smallest that servers' attention kernels on a CPU take.
_SIZES: Mapping[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    # Large enough for attention to be far from uniform, so that other weights show.
    "initializer_range": 0.15,
    "tie_word_embeddings": False,
}
_EXPERTS: Mapping[str, Any] = {"num_experts_per_tok": 2, "num_local_experts": 4}
# Architecture -> configuration class and what it needs beyond the sizes. A window of 64 tokens is
# short enough for tests to reach past it.
_ARCHITECTURES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "mistral": ("MistralConfig", {"sliding_window": 64}),
    "mixtral": ("MixtralConfig", {**_EXPERTS, "sliding_window": None}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {}),
    "qwen3_moe": ("Qwen3MoeConfig", {**_EXPERTS, "moe_intermediate_size": 96}),
    "gemma2": ("Gemma2Config", {"sliding_window": 64, "query_pre_attn_scalar": 32}),
    "gemma3": ("Gemma3TextConfig", {"sliding_window": 64, "query_pre_attn_scalar": 32}),
}


@dataclass(frozen=True)
class TinySpec:
    """What to make.

    Attributes:
        architecture: One of `tiny_architectures()`.
        seed: Seed of the weights.
        noise: Standard deviation of the noise added to every matrix, relative to its own. Two
            models of one seed, one with noise, are a base and its fine-tune.
        noise_seed: Seed of the noise.
        layers: Number of decoder layers.
    """

    architecture: str
    seed: int = 0
    noise: float = 0.0
    noise_seed: int = 1
    layers: int = 4

    def __post_init__(self) -> None:
        if self.architecture not in _ARCHITECTURES:
            raise PairError(unknown_name("tiny architecture", self.architecture, _ARCHITECTURES))
        if not 1 <= self.layers <= 256 or not 0 <= self.noise <= 100:
            raise PairError(
                f"expected 1 to 256 layers and noise from 0 to 100, got {self.layers} and "
                f"{self.noise}"
            )

    @classmethod
    def parse(cls, text: str) -> TinySpec:
        """Read `tiny:ARCHITECTURE` or `tiny:ARCHITECTURE?seed=0&noise=0.05&layers=6`.

        Raises:
            PairError: The architecture or an option is unknown, or a value is not a number.
        """
        name, _, query = text.removeprefix("tiny:").partition("?")
        kinds = {"seed": int, "noise": float, "noise_seed": int, "layers": int}
        options: dict[str, Any] = {}
        for key, value in parse_qsl(query, keep_blank_values=True):
            if key not in kinds:
                raise PairError(f"{text}: {unknown_name('option', key, kinds)}")
            try:
                options[key] = kinds[key](value)
            except ValueError as cause:
                raise PairError(f"{text}: expected a number for {key}, got {value!r}") from cause
        return cls(name, **options)


def tiny_architectures() -> list[str]:
    """Names that may follow `tiny:`."""
    return sorted(_ARCHITECTURES)


def tiny_config(spec: TinySpec) -> Any:
    """The configuration of a tiny model."""
    class_name, extra = _ARCHITECTURES[spec.architecture]
    special = {name: index for index, name in enumerate(_SPECIAL_TOKENS)}
    if spec.architecture.startswith("gemma"):  # a window in every other layer
        kinds = ("sliding_attention", "full_attention")
        extra = {**extra, "layer_types": [kinds[layer % 2] for layer in range(spec.layers)]}
    config = getattr(transformers, class_name)(
        **{**_SIZES, **extra},
        num_hidden_layers=spec.layers,
        vocab_size=len(_SPECIAL_TOKENS) + 256,
        bos_token_id=special["<|im_start|>"],
        eos_token_id=special["<|im_end|>"],
        pad_token_id=special["<|endoftext|>"],
    )
    config._attn_implementation = "sdpa"
    return config


def tiny_model(spec: TinySpec, dtype: torch.dtype, device: str) -> Any:
    """A causal LM in eval mode; the same weights for the same spec, whatever ran before."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(spec.seed)
        make: Any = transformers.AutoModelForCausalLM.from_config
        model = make(tiny_config(spec), dtype=torch.float32)
    noise = torch.Generator().manual_seed(spec.noise_seed)
    with torch.no_grad():
        for _, matrix in sorted(model.named_parameters()):
            if matrix.ndim >= 2:
                delta = torch.randn(matrix.shape, generator=noise)
                matrix += spec.noise * matrix.std() * delta
    return model.to(device=device, dtype=dtype).eval()


def tiny_tokenizer() -> Any:
    """A byte-level tokenizer: every text has tokens, one per UTF-8 byte, and comes back whole."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*_SPECIAL_TOKENS, *alphabet])}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    wrap: Any = transformers.PreTrainedTokenizerFast
    return wrap(
        tokenizer_object=backend,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=_CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
