"""One small request that reuses a cache, end to end, with proof that it did."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from droidkv.cache import CapturedCache
from droidkv.capture import capture
from droidkv.check import Check
from droidkv.errors import DroidKVError
from droidkv.loading import LoadedModel, load_pair
from droidkv.oracles import TOLERANCES
from droidkv.pair import ModelRef, Pair, TaskRef
from droidkv.plan import ReusePlan
from droidkv.prefill import forward_suffix, full_prefill, partial_prefill
from droidkv.profile import read_profile, require_identity

_PREFIX = "The harbour opens at six. The ferry to the island leaves at nine, on Sundays at ten. "
_SUFFIX = "When does the ferry leave on Sundays?"


def check_models(
    pair: Pair | None, profiles: Sequence[Path], dtype: str, device: str
) -> list[Check]:
    """Load a pair's models, hold its profiles against them, and reuse one cache.

    Args:
        pair: The pair; None = two tiny models made on the spot.
        profiles: Those of the pair's name are held against its models.
        dtype: Of the models.
        device: Of the models.
    """
    subject = pair or _tiny_pair()
    try:
        sender, receiver = load_pair(subject, dtype, device)
    except DroidKVError as error:
        return [Check(f"models of {subject.name}", "fail", str(error), "see the message")]
    checks = []
    if pair is not None:
        checks += [
            _names("sender", pair.sender, sender),
            _names("receiver", pair.receiver, receiver),
            *_check_identity(profiles, pair, sender, receiver),
        ]
    return [*checks, canary(sender, receiver)]


@torch.no_grad()
def canary(sender: LoadedModel, receiver: LoadedModel) -> Check:
    """Capture, keep and read a cache, recompute one group, and prove that the rest was reused.

    Proof: the mixed cache holds the sender's keys and values bit for bit outside the group and
    other ones inside; recomputing all layers instead gives the receiver's own prefill.
    """
    model, num_layers = receiver.model, receiver.model.num_layers
    prefix = torch.tensor([receiver.tokenizer.encode(_PREFIX, add_special_tokens=False)])
    suffix = torch.tensor([receiver.tokenizer.encode(_SUFFIX, add_special_tokens=False)])
    plan = ReusePlan.of(num_layers // 3, max(num_layers // 3 + 1, 2 * num_layers // 3))
    try:
        with tempfile.TemporaryDirectory(prefix="droidkv-doctor-") as folder:
            path = Path(folder) / "cache.safetensors"
            capture(sender.model, prefix, hidden_layers={plan.group.start}).save(path)
            stored = CapturedCache.load(path)
        mixed = partial_prefill(model, prefix, stored, plan)
        own = full_prefill(model, prefix)
        expected = model.logits(forward_suffix(model, own, suffix)).float().log_softmax(dim=-1)
        again = partial_prefill(model, prefix, stored, ReusePlan.of(0, num_layers))
        got = model.logits(forward_suffix(model, again, suffix)).float().log_softmax(dim=-1)
    except DroidKVError as error:
        return Check("reuse", "fail", str(error), "see the message")
    reused = {
        layer
        for layer in range(num_layers)
        if torch.equal(mixed.cache.layer(layer)[0].cpu(), stored.keys[layer])
        and torch.equal(mixed.cache.layer(layer)[1].cpu(), stored.values[layer])
    }
    outside = {layer for layer in range(num_layers) if layer not in plan.group}
    distance = float((got - expected).abs().max())
    found = (
        f"{receiver.name} took {len(reused)} of {num_layers} layers of {prefix.shape[1]} tokens "
        f"from {sender.name} and recomputed {plan}; recomputing all is {distance:.1g} nats off its "
        f"own prefill"
    )
    same_model = not sender.fingerprint.differences(receiver.fingerprint)
    if reused != outside and not (same_model and outside <= reused):
        advice = f"expected the layers outside {plan} to be reused, and no others; please report it"
        return Check("reuse", "fail", found, advice)
    if not distance <= TOLERANCES[model.dtype]:
        advice = "the two should agree: run `droidkv verify PAIR` for figures"
        return Check("reuse", "fail", found, advice)
    return Check("reuse", "ok", found)


def _names(role: str, ref: ModelRef, loaded: LoadedModel) -> Check:
    aliases = f", also called {', '.join(ref.aliases)}" if ref.aliases else ""
    digest = loaded.fingerprint.digest()[:16]
    return Check(role, "ok", f"{loaded.name}{aliases}; identity {digest}")


def _check_identity(
    paths: Sequence[Path], pair: Pair, sender: LoadedModel, receiver: LoadedModel
) -> Iterator[Check]:
    """Those profiles that are the pair's; unreadable ones are another check's matter."""
    for path in paths:
        try:
            profile = read_profile(path)
        except DroidKVError:
            continue
        if profile.pair != pair.name:
            continue
        name = f"identity in {path.name}"
        try:
            require_identity(profile, sender.fingerprint, receiver.fingerprint)
        except DroidKVError as error:
            yield Check(name, "fail", str(error), f"run `droidkv profile {pair.name} --overwrite`")
        else:
            yield Check(name, "ok", "of these very models")


def _tiny_pair() -> Pair:
    return Pair(
        name="tiny",
        description="",
        sender=ModelRef("tiny:llama"),
        receiver=ModelRef("tiny:llama?noise=0.1"),
        tasks=(TaskRef("records"),),
    )
