"""From a `ModelRef` to a model that runs, its tokenizer, and who it is."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peft
import torch
import transformers

from droidkv.alora import invocation_tokens
from droidkv.content import (
    ADAPTER_WEIGHTS,
    adapter_sha256,
    check_base,
    dtype_name,
    read_adapter_config,
    state_sha256,
    trained_mode,
)
from droidkv.errors import LoadError, PairError, UnsupportedModelError, unknown_name
from droidkv.identity import NONE, Fingerprint
from droidkv.model_identity import (
    as_load_error,
    fingerprint_of,
    load_config,
    load_tokenizer,
    weights_identity,
)
from droidkv.models import DecoderModel, TwoStreamModel, check_supported
from droidkv.pair import ModelRef, Pair, check_compatible, check_vocabularies
from droidkv.safetensors_file import read_entries
from droidkv.sources import adapter_folder, model_folder, quiet
from droidkv.tiny import TinySpec, tiny_model, tiny_tokenizer

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A model ready to run.

    Attributes:
        model: The model, layer by layer.
        tokenizer: Its Hugging Face tokenizer.
        fingerprint: Its identity, by content.
        name: Its name, for people.
        eos_ids: Tokens that end an answer.
    """

    model: DecoderModel
    tokenizer: Any
    fingerprint: Fingerprint
    name: str
    eos_ids: tuple[int, ...]


def load_model(
    ref: ModelRef, dtype: str = "float32", device: str = "cpu", content_hash: bool = True
) -> LoadedModel:
    """Load a model, apply its adapter, and take its identity.

    Args:
        ref: Where it comes from.
        dtype: `float32`, `bfloat16` or `float16`, of weights and caches.
        device: A torch device.
        content_hash: As `droidkv.model_identity.weights_identity`.

    Raises:
        LoadError: A file cannot be had, is damaged, or does not fit the rest; or there is no such
            dtype or device.
        IdentityError: The adapter was trained on another base.
        UnsupportedModelError: The architecture or the adapter's kind cannot be served.
        StorageError: A file could not be read or written.
    """
    check_place(dtype, device)
    config = load_config(ref)
    check_supported(config)
    adapter = NONE
    if ref.source == "tiny":
        model = tiny_model(TinySpec.parse(ref.model), DTYPES[dtype], device)
        weights = state_sha256(model.state_dict())
        tokenizer = tiny_tokenizer()
    else:
        folder = model_folder(ref)
        weights = weights_identity(folder, content_hash)
        tokenizer = load_tokenizer(ref, folder)
        model = _read_weights(folder, config, ref, DTYPES[dtype]).to(device)
    if ref.adapter is not None:
        adapter_at = adapter_folder(ref)
        adapter = adapter_sha256(adapter_at)
        check_base(adapter_at, weights, as_icarus=ref.apply == "icarus")
        model = _apply_adapter(model, adapter_at, ref)
    model.eval()
    fingerprint = fingerprint_of(
        config, tokenizer, weights, dtype_name(model.dtype), adapter=adapter
    )
    runs_as = TwoStreamModel if ref.adapter is not None and ref.apply == "icarus" else DecoderModel
    return LoadedModel(runs_as(model), tokenizer, fingerprint, ref.name, _eos_ids(model, tokenizer))


def load_pair(
    pair: Pair, dtype: str = "float32", device: str = "cpu", content_hash: bool = True
) -> tuple[LoadedModel, LoadedModel]:
    """Load sender and receiver, after checking that they can share a cache.

    The configurations are compared before any weights are fetched or read.

    Raises:
        PairError: The two cannot share a cache; names each differing field.
        LoadError, IdentityError, UnsupportedModelError, StorageError: As `load_model`.
    """
    check_pair_configs(pair)
    sender = load_model(pair.sender, dtype, device, content_hash)
    receiver = load_model(pair.receiver, dtype, device, content_hash)
    _check_reference(pair)
    check_vocabularies(
        sender.tokenizer.get_vocab(), receiver.tokenizer.get_vocab(), pair.allow_extra_tokens
    )
    return sender, receiver


def _check_reference(pair: Pair) -> None:
    """Refuse to hold a receiver against its own prefill if it was not trained to do one."""
    if pair.reference is not None or pair.receiver.adapter is None:
        return
    if trained_mode(adapter_folder(pair.receiver)) == "prefillshare":
        raise PairError(
            f"expected a [reference] in pair {pair.name!r}, got none: its receiver was trained to "
            "read the sender's KV and has no prefill of its own that would be right; name the "
            "ordinary fine-tune as [reference], as `droidkv train prefillshare` does"
        )


def load_reference(
    pair: Pair, receiver: LoadedModel, dtype: str = "float32", device: str = "cpu"
) -> LoadedModel | None:
    """The model that a pair's losses are against, or None where it is the receiver.

    Args:
        pair: The pair.
        receiver: Its receiver, whose tokens the reference must read alike.
        dtype: As `load_model`.
        device: As `load_model`.

    Raises:
        PairError: Its architecture or vocabulary is not the receiver's.
        LoadError, IdentityError, UnsupportedModelError, StorageError: As `load_model`.
    """
    if pair.reference is None:
        return None
    check_compatible(receiver.model.config, load_config(pair.reference), pair.allow_extra_tokens)
    reference = load_model(pair.reference, dtype, device)
    check_vocabularies(
        receiver.tokenizer.get_vocab(), reference.tokenizer.get_vocab(), pair.allow_extra_tokens
    )
    return reference


def check_pair_configs(pair: Pair) -> None:
    """Do nothing if both architectures can be served and share a cache. Needs no weights.

    Raises:
        PairError: The two cannot share a cache; names each differing field.
        UnsupportedModelError: One of them cannot be served.
        LoadError: A configuration cannot be had.
    """
    sender, receiver = load_config(pair.sender), load_config(pair.receiver)
    check_supported(sender)
    check_supported(receiver)
    check_compatible(sender, receiver, pair.allow_extra_tokens)


def check_place(dtype: str, device: str) -> None:
    """Do nothing if a model can run in a dtype and on a device.

    Raises:
        LoadError: There is no such dtype, or PyTorch has no such device here.
    """
    if dtype not in DTYPES:
        raise LoadError(unknown_name("dtype", dtype, DTYPES))
    try:
        torch.empty(1, device=device).sum().item()
    except (RuntimeError, AssertionError, NotImplementedError) as cause:
        raise LoadError(
            f"expected a device that PyTorch has here, such as 'cpu' or, with an NVIDIA GPU, "
            f"'cuda', got {device!r}: {str(cause).splitlines()[0]}"
        ) from cause


def _read_weights(folder: Path, config: Any, ref: ModelRef, dtype: torch.dtype) -> Any:
    with quiet(), as_load_error(f"{ref.name}: its weights"):
        read: Any = transformers.AutoModelForCausalLM.from_pretrained
        model, report = read(
            folder,
            config=config,
            dtype=dtype,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # so that they can be named below
            attn_implementation="sdpa",
            trust_remote_code=ref.trust_remote_code,
        )
    # transformers fills these with random numbers and goes on.
    reshaped = [
        f"{name} {list(has)} for {list(wants)}" for name, has, wants in report["mismatched_keys"]
    ]
    wrong = [*sorted(report["missing_keys"]), *sorted(reshaped)]
    if wrong:
        raise LoadError(
            f"{ref.name}: expected all weights of its configuration, but {len(wrong)} are missing "
            f"or of another shape, such as {', '.join(wrong[:3])}; fetch the model anew"
        )
    return model


def _apply_adapter(model: Any, folder: Path, ref: ModelRef) -> Any:
    table = read_adapter_config(folder)
    kind = table.get("peft_type")
    if kind != "LORA":
        raise UnsupportedModelError(
            f"{folder}: expected an adapter of type LORA, got {kind!r}; others are not served"
        )
    if invocation_tokens(folder):
        raise UnsupportedModelError(
            f"{folder}: expected a LoRA that is always on, got an activated one "
            f"(alora_invocation_tokens), which merging or plain LoRA would get wrong; before these "
            f"tokens its KV is the base's, so there is nothing to recompute and nothing to profile "
            f"(see `droidkv pair check`)"
        )
    written = {entry.name for entry in read_entries(folder / ADAPTER_WEIGHTS)}
    hint = (
        f"it was trained on {table.get('base_model_name_or_path')!r}, here it is on {ref.model!r}"
    )
    with warnings.catch_warnings(), as_load_error(f"{folder}, the adapter ({hint})"):
        warnings.simplefilter("ignore")  # what PEFT only warns of is checked below
        tuned = peft.PeftModel.from_pretrained(model, str(folder))
    wanted = set(peft.get_peft_model_state_dict(tuned, save_embedding_layers=False))
    if wrong := sorted(wanted ^ written):
        raise LoadError(
            f"{folder}: expected the adapter's tensors to fit the model one by one, but "
            f"{len(wrong)} do not, such as {', '.join(wrong[:3])}; {hint}"
        )
    if ref.apply == "merge":
        return tuned.merge_and_unload()
    return tuned.get_base_model()


def _eos_ids(model: Any, tokenizer: Any) -> tuple[int, ...]:
    configured = model.generation_config.eos_token_id
    listed = configured if isinstance(configured, list) else [configured]
    found = {index for index in [*listed, tokenizer.eos_token_id] if index is not None}
    return tuple(sorted(found))
