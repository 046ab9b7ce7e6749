"""Adapters that one engine runs beside their base: who brings them, what is looked at before."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from droidkv.check import Check
from droidkv.content import adapter_sha256
from droidkv.doctor import check_broken_companions, check_processor
from droidkv.errors import DroidKVError, PairError
from droidkv.model_identity import weights_identity
from droidkv.pair import ModelRef, Pair
from droidkv.serve.preflight import check_dtype, check_flags, check_plugin, check_vllm
from droidkv.sources import adapter_folder

_SEE = "see the message"


def adapters_of(
    pairs: Sequence[Pair], fits: Callable[[Pair], bool], wanted: str
) -> tuple[ModelRef, dict[str, Path]]:
    """The base that pairs share, and the adapter that each brings, by the pair's name.

    Args:
        pairs: One or more.
        fits: Whether a pair's receiver is one that the engine can run.
        wanted: What such a receiver is, and how to get one.

    Raises:
        PairError: A receiver is none, or the senders differ.
        LoadError: An adapter cannot be had.
    """
    base = pairs[0].sender
    for pair in pairs:
        receiver = pair.receiver
        if receiver.adapter is None or not fits(pair):
            raise PairError(f"expected pairs whose receiver is {wanted}; got {pair.name}")
        if pair.sender != base:
            raise PairError(
                f"expected pairs with one sender, got {pairs[0].name} with {base.name} and "
                f"{pair.name} with {pair.sender.name}; start one server for each base"
            )
        if (receiver.model, receiver.revision) != (base.model, base.revision) or base.adapter:
            raise PairError(
                f"expected the sender of {pair.name} to be the base of its receiver, got "
                f"{base.name} and an adapter on {receiver.model}; it reads that base's KV"
            )
    return base, {pair.name: adapter_folder(pair.receiver).absolute() for pair in pairs}


def preflight_adapters(
    kind: str,
    adapters: Mapping[str, Path],
    look: Callable[[str, Path, str], str],
    folder: Path,
    dtype: str,
    passed: Sequence[str] = (),
    lora: str | None = None,
) -> list[Check]:
    """Look at all that a server with a base and adapters needs, without starting it.

    Args:
        kind: What adapters are called here.
        adapters: Name -> folder.
        look: Says something of an adapter, by name, folder and the base's weights; raises
            `DroidKVError` if it cannot be served.
        folder: The base's.
        dtype: Of weights and cache.
        passed: Flags for vLLM.
        lora: As in `check_flags`.
    """
    checks = [check_vllm(), check_plugin(), check_broken_companions(), check_processor()]
    checks += [check_dtype(dtype), *check_flags(passed, lora)]
    return [*checks, *_check_adapters(kind, adapters, look, folder)]


def _check_adapters(
    kind: str,
    adapters: Mapping[str, Path],
    look: Callable[[str, Path, str], str],
    folder: Path,
) -> Iterator[Check]:
    try:
        weights = weights_identity(folder, content_hash=True)
    except DroidKVError as error:
        yield Check("model", "fail", str(error), _SEE)
        return
    yield Check("model", "ok", f"{folder}; {weights[:23]}")
    for name, adapter in adapters.items():
        try:
            said = [look(name, adapter, weights), adapter_sha256(adapter)[:23]]
        except DroidKVError as error:
            yield Check(f"{kind} {name}", "fail", str(error), _SEE)
        else:
            yield Check(f"{kind} {name}", "ok", "; ".join(said))
