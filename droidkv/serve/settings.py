"""What a serving process is told by `kv_connector_extra_config`, read strictly. No engine here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, get_args

from droidkv.calibration_file import read_calibration
from droidkv.confirmation import Evidence, all_evidence, own_evidence, trained_for
from droidkv.errors import IdentityError, ServeError
from droidkv.fields import Fields
from droidkv.frontier import pareto_front
from droidkv.identity import Fingerprint
from droidkv.objectives import default_objective, measure
from droidkv.plan import ReusePlan
from droidkv.policy import Choice, pick, pick_among
from droidkv.profile import Profile, read_profile
from droidkv.serve.connector_plan import LOAD_ORDERS, LoadOrder
from droidkv.stitch import StitchMap

Role = Literal["sender", "receiver"]
ROLES: tuple[Role, ...] = get_args(Role)
LoadMode = Literal["sync", "async"]
LOAD_MODES: tuple[LoadMode, ...] = get_args(LoadMode)
OnMiss = Literal["own", "error"]
ON_MISS: tuple[OnMiss, ...] = get_args(OnMiss)
DEFAULT_CHUNK_TOKENS = 256


@dataclass(frozen=True)
class ServeSettings:
    """One serving process's part in reuse.

    Attributes:
        role: `sender` stores what it prefills, `receiver` reuses it.
        store: Where caches lie: `memory://NAME`, `fs:///FOLDER`, `redis://HOST:PORT`,
            `lm://HOST:PORT`.
        chunk_tokens: Tokens in one chunk of the store; the same for all who share it.
        profiles: Sender: profiles whose plans need E. Receiver: the one profile of its pair.
        hidden_layers: Sender: layers whose E is stored beside those the profiles need.
        sender: Receiver: the sender's model, a folder or hub id; needed only without a profile.
        allow_unprofiled: Receiver: reuse another model's cache without a profile, on request.
        plan: Receiver: the plan of every request that does not ask for one.
        max_loss: Receiver: the largest loss a plan may have that the server picks; None = 5 % of
            the score, and needed where the profile's items have none.
        calibration: Receiver: the machine's, as `droidkv calibrate` wrote it; with it the server
            weighs each request's length, and below the break-even length reuses nothing.
        bandwidth_bytes_per_second: Receiver: the link, if slower than the calibrated load.
        stitch: Receiver: the stitching map, if not the profile's.
        order: Receiver: how loading and recomputing are arranged.
        load: Receiver: `sync` loads within the engine's step, `async` lets requests wait.
        load_seconds: Receiver: longest time one load may take.
        lookup_seconds: Receiver: longest time the store may take to say what it has.
        tokens_per_step: Receiver: most prefix tokens recomputed in one engine step.
        on_miss: Receiver: what becomes of a request that cannot reuse: `own` = the receiver's own
            prefill, `error` = it ends in an error. None = `error` if the profile has another model
            as reference, since such a receiver was trained to read the sender's KV; else `own`.
        own_tokens: Receiver, with `error`: longest end of a prompt that it may compute itself. None
            = one chunk more than the longest suffix that the profile measured.
        content_hash: Take models' identities by content; False = by file sizes and times.
        audit: File that gets one JSON line per request.
        timeline: Receiver: audit lines hold each load's timeline.
    """

    role: Role
    store: str
    chunk_tokens: int = DEFAULT_CHUNK_TOKENS
    profiles: tuple[str, ...] = ()
    hidden_layers: tuple[int, ...] = ()
    sender: str | None = None
    allow_unprofiled: bool = False
    plan: str | None = None
    max_loss: float | None = None
    calibration: str | None = None
    bandwidth_bytes_per_second: float | None = None
    stitch: str | None = None
    order: LoadOrder = "streamed"
    load: LoadMode = "sync"
    load_seconds: float = 30.0
    lookup_seconds: float = 2.0
    tokens_per_step: int = 4096
    on_miss: OnMiss | None = None
    own_tokens: int | None = None
    content_hash: bool = True
    audit: str | None = None
    timeline: bool = False

    @classmethod
    def from_table(cls, table: Mapping[str, Any]) -> ServeSettings:
        """Read `kv_connector_extra_config`.

        Raises:
            ServeError: A value is missing, of the wrong kind or out of range, or a key is unknown.
        """
        fields = Fields(table, "kv_connector_extra_config", ServeError)
        settings = cls(
            role=fields.take("role", str, choices=ROLES),  # type: ignore[arg-type]
            store=fields.take("store", str),
            chunk_tokens=fields.take("chunk_tokens", int, cls.chunk_tokens, minimum=1),
            profiles=fields.take_list("profiles", str, ()),
            hidden_layers=fields.take_list("hidden_layers", int, ()),
            sender=fields.optional("sender", str),
            allow_unprofiled=fields.take("allow_unprofiled", bool, False),
            plan=fields.optional("plan", str),
            max_loss=fields.optional("max_loss", float, minimum=0.0),
            calibration=fields.optional("calibration", str),
            bandwidth_bytes_per_second=fields.optional("bandwidth_bytes_per_second", float),
            stitch=fields.optional("stitch", str),
            order=fields.take("order", str, cls.order, choices=LOAD_ORDERS),  # type: ignore[arg-type]
            load=fields.take("load", str, cls.load, choices=LOAD_MODES),  # type: ignore[arg-type]
            load_seconds=fields.take("load_seconds", float, cls.load_seconds, minimum=0.001),
            lookup_seconds=fields.take("lookup_seconds", float, cls.lookup_seconds, minimum=0.001),
            tokens_per_step=fields.take("tokens_per_step", int, cls.tokens_per_step, minimum=1),
            on_miss=fields.optional("on_miss", str, choices=ON_MISS),  # type: ignore[arg-type]
            own_tokens=fields.optional("own_tokens", int, minimum=1),
            content_hash=fields.take("content_hash", bool, True),
            audit=fields.optional("audit", str),
            timeline=fields.take("timeline", bool, False),
        )
        fields.done()
        if settings.role == "receiver" and len(settings.profiles) > 1:
            raise ServeError(
                f"expected at most one profile for a receiver, got {len(settings.profiles)}; "
                "a receiver reads one sender's caches"
            )
        return settings


def needed_hidden_layers(settings: ServeSettings, identity: Fingerprint | None) -> tuple[int, ...]:
    """Layers whose E a sender stores: those of every plan on its receivers' frontiers.

    Args:
        settings: The sender's.
        identity: The sender's; None = not known yet, and checked by another call.

    Raises:
        IdentityError: A profile is another sender's.
        ProfileError: A profile is damaged.
    """
    layers = set(settings.hidden_layers)
    for path in settings.profiles:
        profile = read_profile(path)
        if identity is not None:
            profile.sender.fingerprint.require_same(
                identity, mine=f"the sender of {path}", theirs="the model being served"
            )
        for evidence in all_evidence(Path(path), profile):
            points = measure(evidence.profile, default_objective(evidence.profile))
            layers |= {
                point.plan.transition
                for point in pareto_front(points)
                if point.plan.transition is not None
            }
    return tuple(sorted(layers))


@dataclass(frozen=True)
class ReceiverPair:
    """The pair a receiver serves.

    Attributes:
        sender: Identity of the model whose caches it reads.
        evidence: What plans are picked from, if there is a profile: it, or the one of the
            confirmations beside it that has the best plan.
        stitch: The map its stitched plans go through, if there is one.
    """

    sender: Fingerprint
    evidence: Evidence | None
    stitch: StitchMap | None

    @property
    def profile(self) -> Profile | None:
        """The measurements that plans are picked from, if there are any."""
        return None if self.evidence is None else self.evidence.profile


def receiver_pair(
    settings: ServeSettings,
    receiver: Fingerprint,
    identify: Callable[[str], Fingerprint],
) -> ReceiverPair:
    """The pair of a receiver, checked: never another sender's cache without consent.

    Args:
        settings: The receiver's.
        receiver: Identity of the model being served.
        identify: Takes the identity of a model by its folder or hub id.

    Raises:
        IdentityError: The profile is another receiver's, or two models differ without a profile.
        ServeError: Nothing says whose caches to read.
        StitchError: The map is not the profile's.
    """
    evidence = stitch = None
    if settings.profiles:
        profile = read_profile(settings.profiles[0])
        profile.receiver.fingerprint.require_same(
            receiver,
            mine=f"the receiver of {settings.profiles[0]}",
            theirs="the model being served",
            way_out="profile this pair of models, or serve the one that was profiled",
        )
        sender = profile.sender.fingerprint
        if settings.sender is not None:
            sender.require_same(
                identify(settings.sender),
                mine=f"the sender of {settings.profiles[0]}",
                theirs=f"the model {settings.sender!r}",
            )
        evidence = _evidence(settings, profile)
        own = own_evidence(Path(settings.profiles[0]), profile)
        # Copied plans can be confirmed without the map that requests may ask for.
        stitch = _stitch_of(settings, evidence if evidence.profile.stitch else own)
    elif settings.sender is not None:
        sender = identify(settings.sender)
        if sender.differences(receiver) and not settings.allow_unprofiled:
            raise IdentityError(
                f"expected a profile to reuse the cache of {settings.sender!r} by another model, "
                "got none; profile the pair and name the file in 'profiles', or accept an unknown "
                "loss with 'allow_unprofiled': true"
            )
        if settings.stitch is not None:
            stitch = StitchMap.load(Path(settings.stitch))
    else:
        raise ServeError(
            "expected 'profiles' or 'sender' to say whose caches to read, got neither; "
            "name the pair's profile"
        )
    _require_same_cache(sender, receiver)
    return ReceiverPair(sender, evidence, stitch)


def _evidence(settings: ServeSettings, profile: Profile) -> Evidence:
    """What this receiver picks plans from: one file, for a server has one map.

    A fixed plan that a map was trained for decides; else the file with the best plan for requests
    as long as the profile's items.
    """
    path = Path(settings.profiles[0])
    evidence = all_evidence(path, profile)
    if settings.plan is not None:
        plan = ReusePlan.parse(settings.plan, profile.num_layers)
        return trained_for(plan, evidence) or own_evidence(path, profile)
    return pick_among(evidence, lambda measured: server_choice(settings, measured))[0]


def server_choice(settings: ServeSettings, profile: Profile) -> Choice:
    """What a receiver's server picks for requests as long as the profile's items.

    Raises:
        ProfileError: The profile's items have no score, and the settings no `max_loss`.
    """
    return pick(profile, settings.max_loss, objective=default_objective(profile))


def _require_same_cache(sender: Fingerprint, receiver: Fingerprint) -> None:
    """Whatever a profile says: the sender's cache must have the receiver's shape and meaning."""
    replace(
        sender,
        weights=receiver.weights,
        weight_dtype=receiver.weight_dtype,
        tokenizer=receiver.tokenizer,
        added_tokens=receiver.added_tokens,
        quantisation=receiver.quantisation,
        adapter=receiver.adapter,
    ).require_same(
        receiver,
        mine="the sender's cache",
        theirs="the receiver's",
        way_out="serve both with one dtype, one tensor-parallel size and one context scaling",
    )


def own_tokens_limit(settings: ServeSettings, profile: Profile | None) -> int | None:
    """Longest end of a prompt that a receiver may compute itself; more ends in an error.

    Args:
        settings: The receiver's.
        profile: The pair's.

    Returns:
        None = any: the receiver's own prefill is a way out.

    Raises:
        ServeError: A limit that nothing could keep, or that would not be kept.
    """
    if _on_miss(settings, profile) == "own":
        if settings.own_tokens is not None:
            raise ServeError(
                "expected on_miss = 'error' beside own_tokens, got 'own', with which a receiver "
                "computes any prompt itself; leave own_tokens out"
            )
        return None
    if settings.own_tokens is None:
        suffixes = [] if profile is None else [item.suffix_tokens for item in profile.items]
        return settings.chunk_tokens + max(suffixes, default=0)
    if settings.own_tokens < settings.chunk_tokens:
        raise ServeError(
            f"expected own_tokens of a chunk ({settings.chunk_tokens} tokens) or more, got "
            f"{settings.own_tokens}: only whole chunks are reused, and never a prompt's last token"
        )
    return settings.own_tokens


def with_miss_policy(settings: ServeSettings) -> ServeSettings:
    """A receiver's settings that say what becomes of a miss, as its profile has it.

    Raises:
        ProfileError: The profile is damaged.
    """
    if settings.role == "sender" or settings.on_miss is not None or not settings.profiles:
        return settings
    return replace(settings, on_miss=_on_miss(settings, read_profile(settings.profiles[0])))


def _on_miss(settings: ServeSettings, profile: Profile | None) -> OnMiss:
    if settings.on_miss is not None:
        return settings.on_miss
    return "own" if profile is None or profile.reference is None else "error"


def plan_chooser(
    settings: ServeSettings, pair: ReceiverPair, num_layers: int
) -> Callable[[int, int], ReusePlan | None] | None:
    """The server's own choice of plan for a request, by tokens reusable and not; None = none.

    Raises:
        CalibrationError: The calibration is of another model's shape.
    """
    if settings.plan is not None:
        plan = ReusePlan.parse(settings.plan, num_layers)
        return lambda prefix_tokens, suffix_tokens: plan
    if pair.evidence is None:
        return None
    profile = pair.evidence.profile
    objective = default_objective(profile)
    calibration = None
    if settings.calibration is not None:
        calibration = read_calibration(Path(settings.calibration)).calibration

    @lru_cache(maxsize=4096)
    def choose(prefix_tokens: int, suffix_tokens: int) -> ReusePlan | None:
        choice = pick(
            profile,
            max_loss=settings.max_loss,
            bandwidth_bytes_per_second=settings.bandwidth_bytes_per_second,
            prefix_tokens=prefix_tokens,
            suffix_tokens=suffix_tokens,
            calibration=calibration,
            objective=objective,
            order="overlap" if settings.order == "streamed" else "serial",
        )
        return choice.plan if choice.reuses else None

    if calibration is None:  # the choice depends on the profile alone
        return lambda prefix_tokens, suffix_tokens: choose(1, 1)
    step = settings.chunk_tokens
    choose(step, step)  # a calibration of another model is refused now, not at every request
    # Rounded up, so that few different requests are ever weighed.
    return lambda prefix_tokens, suffix_tokens: choose(
        prefix_tokens, -(-suffix_tokens // step) * step
    )


def _stitch_of(settings: ServeSettings, evidence: Evidence) -> StitchMap | None:
    record = evidence.profile.stitch
    if record is None:
        return None if settings.stitch is None else StitchMap.load(Path(settings.stitch))
    file = settings.stitch or evidence.path.with_name(record.file)
    return StitchMap.load(Path(file), record.sha256)
