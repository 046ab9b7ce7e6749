"""Identity by content: weights, adapters and tokenizers, whatever their names say."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from droidkv.errors import IdentityError, LoadError
from droidkv.fields import Fields
from droidkv.identity import content_digest
from droidkv.jsonio import canonical_json, read_json, write_json
from droidkv.recipe import MODES, Mode
from droidkv.safetensors_file import combine, hash_tensors, headers_digest

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
BASE_RECORD = "droidkv.json"

_INDEX = "model.safetensors.index.json"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
# Ways to begin a LoRA that leave the base as it is; others take a part out of its weights.
_PLAIN_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")
# Bookkeeping and training settings of an adapter: they do not change what it computes, but for a
# start that rewrites the base.
ADAPTER_IRRELEVANT = frozenset(
    """
    auto_mapping base_model_name_or_path corda_config ensure_weight_tying eva_config
    inference_mode init_lora_weights loftq_config lora_dropout peft_version qalora_group_size
    revision runtime_config task_type
    """.split()
)
_SAFETENSORS_NAMES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}


def cache_folder() -> Path:
    """Where droidkv keeps what it can make anew: `DROIDKV_CACHE`, or `~/.cache/droidkv`."""
    named = os.environ.get("DROIDKV_CACHE")
    return Path(named).expanduser() if named else Path.home() / ".cache" / "droidkv"


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model folder, all of them if the weights are sharded.

    Raises:
        LoadError: There are none (files that only pickle can read do not count), or the list of
            shards is damaged.
    """
    single = folder / "model.safetensors"
    if single.exists():
        return [single]
    if (folder / _INDEX).exists():
        index = Fields(read_json(folder / _INDEX, LoadError), str(folder / _INDEX), LoadError)
        names = sorted({str(name) for name in index.take("weight_map", dict).values()})
        for name in names:
            if Path(name).name != name:
                raise LoadError(
                    f"{folder / _INDEX}: expected names of files beside it, got {name!r}"
                )
        return [folder / name for name in names]
    pickled = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
    what = f"only {', '.join(pickled[:3])}, which can run code when read" if pickled else "none"
    raise LoadError(
        f"{folder}: expected weights as model.safetensors, got {what}; save the model anew with "
        f"save_pretrained(safe_serialization=True), or choose a revision that has safetensors"
    )


def weights_sha256(folder: Path, remember: bool = True) -> str:
    """`sha256:...` over every tensor's name, dtype, shape and bytes, sorted by name.

    The same weights in other shards, or with other metadata, have the same hash.

    Args:
        folder: A model folder.
        remember: Keep the hashes of unchanged files in `cache_folder()`.

    Raises:
        LoadError: The files are missing or damaged.
        StorageError: A file could not be read.
    """
    cache = cache_folder() if remember else None
    return combine(each for path in weight_files(folder) for each in hash_tensors(path, cache))


def weights_headers(folder: Path) -> str:
    """`headers:...`: the cheap identity by file sizes, times and headers, declared as such.

    Raises:
        LoadError: The files are missing or damaged.
    """
    return headers_digest(weight_files(folder))


def state_sha256(state: Mapping[str, Any]) -> str:
    """What `weights_sha256` would say of a model in memory (`model.state_dict()`)."""
    import torch

    tensors = []
    for name, tensor in state.items():
        data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        dtype = _SAFETENSORS_NAMES[dtype_name(tensor.dtype)]
        tensors.append([name, dtype, list(tensor.shape), hashlib.sha256(data).hexdigest()])
    return combine(tensors)


def adapter_sha256(folder: Path) -> str:
    """`sha256:...` of a PEFT adapter: its tensors and the settings that change what it computes.

    Raises:
        LoadError: A file is missing or damaged; an adapter as `.bin` is refused.
        StorageError: A file could not be read.
    """
    table = read_adapter_config(folder)
    settings = {
        name: value
        for name, value in table.items()
        # Settings that are off say the same as settings a version does not have.
        if name not in ADAPTER_IRRELEVANT and value
    }
    if rewrites_base(start := table.get("init_lora_weights")):
        settings["init_lora_weights"] = start
    for name in ("target_modules", "modules_to_save"):
        if isinstance(settings.get(name), list):
            settings[name] = sorted(settings[name])  # PEFT writes a set, in any order
    weights = folder / ADAPTER_WEIGHTS
    if not weights.exists() and any(folder.glob("*.bin")):
        raise LoadError(
            f"{folder}: expected {ADAPTER_WEIGHTS}, got only a .bin file, which can run code when "
            f"read; save the adapter anew with save_pretrained"
        )
    return content_digest({"settings": settings, "tensors": hash_tensors(weights, None)})


def read_adapter_config(folder: Path) -> dict[str, Any]:
    """The settings of a PEFT adapter.

    Raises:
        LoadError: The file is missing or damaged.
    """
    path = folder / ADAPTER_CONFIG
    if not path.exists():
        raise LoadError(
            f"{folder}: expected a PEFT adapter ({ADAPTER_CONFIG}), but there is none; if it is to "
            f"be trained from its recipe, run: droidkv train MODE PAIR"
        )
    table = read_json(path, LoadError)
    if not isinstance(table, dict):
        raise LoadError(f"{path}: expected a table of settings")
    return table


def rewrites_base(init_lora_weights: object) -> bool:
    """Whether PEFT changes the base's own weights when it loads an adapter that began this way."""
    return init_lora_weights not in _PLAIN_STARTS


def record_base(folder: Path, weights: str, mode: Mode = "plain") -> None:
    """Write beside an adapter which weights it was trained on, and what KV it learned to read.

    Args:
        folder: The adapter.
        weights: Identity of the base (`Fingerprint.weights`).
        mode: As `Recipe.mode`.

    Raises:
        StorageError: The file could not be written.
    """
    write_json(folder / BASE_RECORD, {"schema_version": 1, "base_weights": weights, "mode": mode})


def trained_mode(folder: Path) -> Mode | None:
    """What KV an adapter learned to read, or None if nobody recorded it.

    Raises:
        LoadError: The record is damaged.
        StorageError: It could not be read.
    """
    record = _read_base(folder)
    return None if record is None else record[1]


def check_base(folder: Path, weights: str, as_icarus: bool = False) -> None:
    """Do nothing if an adapter was trained on these weights, or if nobody recorded on which.

    Args:
        folder: The adapter.
        weights: Identity of the base it is to be applied to.
        as_icarus: Whether it is to run as a logical decoder beside the base.

    Raises:
        IdentityError: It was trained on others, or to be applied in the other way.
        LoadError: The record is damaged.
    """
    record = _read_base(folder)
    if record is None:
        return
    trained_on, trained_as = record
    if trained_on != weights:
        raise IdentityError(
            f"{folder}: expected the base this adapter was trained on (weights: {trained_on}), "
            f"got another (weights: {weights}); load it on its own base, or train it anew"
        )
    if (trained_as == "icarus") != as_icarus:
        raise IdentityError(
            f"{folder}: expected apply = 'icarus' for an adapter trained as 'icarus' and for no "
            f"other, but this one was trained as {trained_as!r}; change apply in the pair file, "
            f"or train it anew with `droidkv train icarus`"
        )


def _read_base(folder: Path) -> tuple[str, Mode] | None:
    """What `record_base` wrote, or None."""
    path = folder / BASE_RECORD
    if not path.exists():
        return None
    fields = Fields(read_json(path, LoadError), str(path), LoadError)
    fields.take_version(1, "train the adapter anew")
    weights = fields.take("base_weights", str)
    mode: Mode = fields.take("mode", str, "plain", choices=MODES)  # type: ignore[arg-type]
    fields.done()
    return weights, mode


def tokenizer_digests(tokenizer: Any) -> tuple[str, str | None, str]:
    """The fields `vocabulary`, `tokenizer` and `added_tokens` of a fingerprint.

    Args:
        tokenizer: A Hugging Face tokenizer. One without a `tokenizers` backend has an unknown
            pipeline, so nothing made with it is reused.
    """
    flags = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")
    added = [
        [index, *(getattr(token, flag) for flag in flags)]
        for index, token in sorted(tokenizer.added_tokens_decoder.items())
    ]
    backend = getattr(tokenizer, "backend_tokenizer", None)
    pipeline = None
    if backend is not None:
        table = json.loads(backend.to_str())
        # The first two change with every call of the tokenizer; the third has its own field.
        for name in ("padding", "truncation", "added_tokens"):
            table.pop(name, None)
        pipeline = content_digest(table)
    vocabulary = content_digest(sorted(tokenizer.get_vocab().items()))
    return vocabulary, pipeline, content_digest(added)


def quantisation_of(config: Any) -> str:
    """The field `quantisation`: canonical JSON of a configuration's, `none` if there is none."""
    settings = getattr(config, "quantization_config", None)
    if settings is None:
        return "none"
    return canonical_json(settings if isinstance(settings, dict) else settings.to_dict())


def dtype_name(dtype: Any) -> str:
    """Name of a torch dtype as fingerprints have it: `bfloat16`."""
    return str(dtype).removeprefix("torch.")
