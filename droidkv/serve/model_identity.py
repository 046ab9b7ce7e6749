"""Identity of a model that an engine serves from a folder, without loading its weights."""

from __future__ import annotations

from typing import Any

import transformers

from droidkv.architecture import architecture_settings, rope_settings
from droidkv.content import (
    quantisation_of,
    tokenizer_digests,
    weights_headers,
    weights_sha256,
)
from droidkv.identity import NONE, Fingerprint, settings
from droidkv.pair import ModelRef
from droidkv.sources import model_folder


def fingerprint_of(
    ref: ModelRef,
    dtype: str,
    cache_dtype: str | None = None,
    tensor_parallel: int = 1,
    content_hash: bool = True,
) -> Fingerprint:
    """What `droidkv.loading.load_model` would say of the same model, from its files alone.

    Args:
        ref: A folder or hub id, without an adapter.
        dtype: Name of the dtype it computes in.
        cache_dtype: Name of the dtype of its caches; None = the same.
        tensor_parallel: Number of ranks that its KV heads are split over.
        content_hash: Hash every weight; False = the cheap identity by file sizes and times.

    Raises:
        LoadError: A file cannot be had or is damaged.
        StorageError: A file could not be read.
    """
    folder = model_folder(ref)
    kind: Any = transformers.AutoConfig
    config = kind.from_pretrained(folder, trust_remote_code=ref.trust_remote_code)
    reader: Any = transformers.AutoTokenizer
    tokenizer = reader.from_pretrained(folder, trust_remote_code=ref.trust_remote_code)
    vocabulary, pipeline, added_tokens = tokenizer_digests(tokenizer)
    return Fingerprint(
        weights=weights_sha256(folder) if content_hash else weights_headers(folder),
        architecture=settings(architecture_settings(config)),
        rope=settings(rope_settings(config)),
        vocabulary=vocabulary,
        tokenizer=pipeline,
        added_tokens=added_tokens,
        weight_dtype=dtype,
        cache_dtype=cache_dtype or dtype,
        quantisation=quantisation_of(config),
        adapter=NONE,
        tensor_parallel=tensor_parallel,
    )
