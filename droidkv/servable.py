"""From a `ModelRef` to a folder that a server can serve: adapters merged, tiny models written."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import filelock

from droidkv.content import adapter_sha256, cache_folder, weights_sha256
from droidkv.errors import DroidKVError, StorageError, UnsupportedModelError
from droidkv.identity import content_digest
from droidkv.loading import load_model
from droidkv.merged import record_merged
from droidkv.pair import ModelRef
from droidkv.sources import adapter_folder, model_folder, quiet


def servable_folder(ref: ModelRef, dtype: str) -> Path:
    """A folder with the whole model as plain safetensors, adapter included.

    A model without an adapter is served from where it lies. One with an adapter is merged once, in
    the dtype it is served in, and kept in the cache folder under the contents of both.

    Args:
        ref: The model.
        dtype: Name of the dtype it will be served in.

    Raises:
        LoadError, IdentityError, UnsupportedModelError: As `droidkv.loading.load_model`.
        StorageError: The cache folder cannot be written.
    """
    if ref.adapter is not None and ref.apply == "icarus":
        raise UnsupportedModelError(
            f"{ref.name}: expected an adapter that can be merged into the weights, got one that "
            "runs as a second stream (apply = 'icarus'); start it by `droidkv serve icarus`"
        )
    if ref.source == "tiny" and ref.adapter is None:
        name = content_digest([ref.model, dtype]).removeprefix("sha256:")
        return _made_once("tiny", name, lambda folder: _save(ref, dtype, folder))
    base = model_folder(ref)
    if ref.adapter is None:
        return base
    weights, adapter = weights_sha256(base), adapter_sha256(adapter_folder(ref))
    name = content_digest([weights, adapter, dtype]).removeprefix("sha256:")

    def make(folder: Path) -> None:
        _save(replace(ref, apply="merge"), dtype, folder)
        for path in base.iterdir():  # configuration and tokenizer stay the base's, byte for byte
            is_weights = path.suffix == ".safetensors" or path.name.endswith(".index.json")
            if path.is_file() and not is_weights:
                shutil.copyfile(path, folder / path.name)
        record_merged(folder, weights, adapter)

    return _made_once("merged", name, make)


def _save(ref: ModelRef, dtype: str, folder: Path) -> None:
    loaded = load_model(ref, dtype)
    with quiet():
        loaded.model.model.save_pretrained(folder)
        loaded.tokenizer.save_pretrained(folder)


def _made_once(kind: str, name: str, make: Callable[[Path], None]) -> Path:
    """A folder in the cache, made by whoever asks first; a killed run leaves nothing half done."""
    target = cache_folder() / kind / name[:32]
    if target.is_dir():
        return target
    with _as_storage_error(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(target.with_name(f"{target.name}.lock")):
            if not target.is_dir():
                with tempfile.TemporaryDirectory(prefix=".making-", dir=target.parent) as made:
                    folder = Path(made) / "model"
                    folder.mkdir()
                    make(folder)
                    os.rename(folder, target)
    return target


@contextmanager
def _as_storage_error(target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as cause:
        if isinstance(cause, DroidKVError):
            raise
        raise StorageError(
            f"expected to write the model to {target}, but: {cause}; free some space, or name "
            f"another folder in DROIDKV_CACHE"
        ) from cause
