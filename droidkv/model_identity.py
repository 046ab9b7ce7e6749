"""Who a model is, from its files alone: configuration, tokenizer, weights. Nothing is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import transformers

from droidkv.architecture import architecture_settings, rope_settings
from droidkv.content import quantisation_of, tokenizer_digests, weights_headers, weights_sha256
from droidkv.errors import DroidKVError, LoadError, UnsupportedModelError
from droidkv.identity import NONE, Fingerprint, settings
from droidkv.jsonio import read_json
from droidkv.merged import merged_from
from droidkv.pair import ModelRef
from droidkv.sources import config_folder, model_folder
from droidkv.tiny import TinySpec, tiny_config


def load_config(ref: ModelRef) -> Any:
    """The model's configuration; no weights are fetched or read.

    Raises:
        LoadError: It cannot be had, or is damaged.
        UnsupportedModelError: Nobody knows such an architecture.
    """
    if ref.source == "tiny":
        return tiny_config(TinySpec.parse(ref.model))
    folder = config_folder(ref)
    table = read_json(folder / "config.json", LoadError)
    kind = table.get("model_type") if isinstance(table, dict) else None
    if not isinstance(kind, str):
        raise LoadError(f"{folder}/config.json: expected a table with a text as model_type")
    if kind not in transformers.CONFIG_MAPPING and not ref.trust_remote_code:
        raise UnsupportedModelError(
            f"{ref.name}: expected an architecture that transformers {transformers.__version__} "
            f"knows, got {kind!r}; install a version that does, or, if you trust the model's own "
            f"code, say trust_remote_code = true in the pair file"
        )
    with as_load_error(f"{ref.name}: its configuration"):
        return transformers.AutoConfig.from_pretrained(
            folder, trust_remote_code=ref.trust_remote_code
        )


def load_tokenizer(ref: ModelRef, folder: Path) -> Any:
    """The model's Hugging Face tokenizer.

    Raises:
        LoadError: It is damaged, or there is none.
    """
    read: Any = transformers.AutoTokenizer.from_pretrained
    with as_load_error(f"{ref.name}: its tokenizer"):
        return read(folder, trust_remote_code=ref.trust_remote_code)


def weights_identity(folder: Path, content_hash: bool) -> str:
    """The field `weights` of a fingerprint.

    Args:
        folder: A model folder.
        content_hash: Hash every weight (remembered for unchanged files). False = the cheap
            identity by file sizes, times and headers, which never equals a content hash.

    Raises:
        LoadError: The files are missing or damaged.
        StorageError: A file could not be read.
    """
    return weights_sha256(folder) if content_hash else weights_headers(folder)


def fingerprint_of(
    config: Any,
    tokenizer: Any,
    weights: str,
    dtype: str,
    cache_dtype: str | None = None,
    adapter: str = NONE,
    tensor_parallel: int = 1,
) -> Fingerprint:
    """A model's identity, put together.

    Args:
        config: Its Hugging Face configuration.
        tokenizer: Its Hugging Face tokenizer.
        weights: From `weights_identity`, or of a model in memory.
        dtype: Name of the dtype it computes in.
        cache_dtype: Name of the dtype of its caches; None = the same.
        adapter: Identity of the adapter applied to it.
        tensor_parallel: Number of ranks that its KV heads are split over.
    """
    vocabulary, pipeline, added_tokens = tokenizer_digests(tokenizer)
    return Fingerprint(
        weights=weights,
        architecture=settings(architecture_settings(config)),
        rope=settings(rope_settings(config)),
        vocabulary=vocabulary,
        tokenizer=pipeline,
        added_tokens=added_tokens,
        weight_dtype=dtype,
        cache_dtype=cache_dtype or dtype,
        quantisation=quantisation_of(config),
        adapter=adapter,
        tensor_parallel=tensor_parallel,
    )


def identify(
    ref: ModelRef,
    dtype: str,
    cache_dtype: str | None = None,
    tensor_parallel: int = 1,
    content_hash: bool = True,
) -> Fingerprint:
    """What `droidkv.loading.load_model` would say of a model, from its folder alone.

    Args:
        ref: A folder or hub id, without an adapter but the one merged into it by
            `droidkv.servable.servable_folder`.
        dtype: As `fingerprint_of`.
        cache_dtype: As `fingerprint_of`.
        tensor_parallel: As `fingerprint_of`.
        content_hash: As `weights_identity`.

    Raises:
        LoadError: A file cannot be had or is damaged.
        UnsupportedModelError: Nobody knows such an architecture.
        StorageError: A file could not be read.
    """
    folder = model_folder(ref)
    weights, adapter = merged_from(folder, weights_identity(folder, content_hash))
    return fingerprint_of(
        load_config(ref),
        load_tokenizer(ref, folder),
        weights,
        dtype,
        cache_dtype,
        adapter,
        tensor_parallel,
    )


@contextmanager
def as_load_error(what: str) -> Iterator[None]:
    """Say which file was being read, whatever type of exception the libraries chose."""
    try:
        yield
    except DroidKVError:
        raise
    except Exception as cause:
        text = str(cause).strip()
        raise LoadError(
            f"{what}: expected files that can be read, but {type(cause).__name__}: {text[:600]}; "
            "fetch or save it anew"
        ) from cause
