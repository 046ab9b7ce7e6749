"""What the engine's connector decides and says, as records and pure functions. No engine here.

A request's prefix is `[0, num_tokens)`: whole chunks that the sender has stored, and at least one
token less than the prompt, since an engine needs a token to compute. Of it the engine may hold
`[0, start)` already; `[start, num_tokens)` is loaded and recomputed into the request's blocks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, get_args

from droidkv.errors import PlanError
from droidkv.jsonio import canonical_json
from droidkv.plan import ReusePlan

PARAMS_KEY = "droidkv"
# a: everything, then recompute. b: reused layers, then recompute. c: E, recompute at once, reused
# layers stream in behind it and the suffix pass waits for them layer by layer.
LoadOrder = Literal["all_first", "reused_first", "streamed"]
LOAD_ORDERS: tuple[LoadOrder, ...] = get_args(LoadOrder)
_SALT_PREFIX = "droidkv:"
OVERWRITE = "overwrite"
ASK_KEYS = {"plan", "reuse", "order", "prefix_tokens"}
SpanKind = Literal["load", "enter", "recompute", "wait", "suffix"]


class Fallback(StrEnum):
    """Why a request was answered by the receiver's own prefill, or refused. A closed list."""

    NOT_ASKED = "not_asked"
    OPTED_OUT = "opted_out"
    BAD_PLAN = "bad_plan"
    NO_STITCH = "no_stitch"
    FULL_PREFILL = "full_prefill"
    NOT_CHOSEN = "not_chosen"
    TOO_SHORT = "too_short"
    NOT_COVERED = "not_covered"
    PARTLY_COVERED = "partly_covered"
    LORA = "lora"
    MULTIMODAL = "multimodal"
    PROMPT_EMBEDS = "prompt_embeds"
    PROMPT_LOGPROBS = "prompt_logprobs"
    POOLING = "pooling"
    STREAMED_INPUT = "streamed_input"
    LOOKUP_TIMEOUT = "lookup_timeout"
    LOOKUP_BACKEND_DOWN = "lookup_backend_down"
    STORE_RESTING = "store_resting"
    LOAD_ABSENT = "load_absent"
    LOAD_SHORT = "load_short"
    LOAD_CORRUPT = "load_corrupt"
    LOAD_TIMEOUT = "load_timeout"
    LOAD_BACKEND_DOWN = "load_backend_down"
    LOAD_WRONG_NAMESPACE = "load_wrong_namespace"
    LOAD_WRONG_SHAPE = "load_wrong_shape"
    RECOMPUTE_FAILED = "recompute_failed"
    WEIGHTS_CHANGED = "weights_changed"
    ABORTED = "aborted"


@dataclass(frozen=True)
class Ask:
    """What a request says about reuse in its `kv_transfer_params`.

    Attributes:
        plan: The plan it wants; None = what the server would choose.
        reuse: False = the request's own prefill, whatever the server would choose.
        order: How to arrange loading and recomputing; None = as the server does.
        prefix_tokens: Tokens that both models share: no more is reused, and by a receiver without
            an own prefill no less. None = whatever the sender has read.
    """

    plan: ReusePlan | None = None
    reuse: bool = True
    order: LoadOrder | None = None
    prefix_tokens: int | None = None


@dataclass(frozen=True)
class RequestView:
    """What the connector reads of an engine's request.

    Attributes:
        request_id: The engine's name for it.
        token_ids: Its prompt.
        params: Its `kv_transfer_params`.
        cache_salt: The salt its sender asked for, if any.
        obstacle: What makes reuse impossible for a request of its kind.
    """

    request_id: str
    token_ids: Sequence[int]
    params: Mapping[str, Any] | None = None
    cache_salt: str | None = None
    obstacle: Fallback | None = None


@dataclass(frozen=True)
class LoadJob:
    """Scheduler to worker: supply a request's prefix.

    Attributes:
        request_id: The request.
        plan: Which layers to recompute, and the operator on E.
        token_ids: The prefix, `[0, num_tokens)`.
        start: Tokens that the engine holds already.
        block_ids: Blocks of its page table, the first one for token 0.
        asynchronous: The request waits while the engine goes on with others.
        order: How to arrange loading and recomputing; None = as the server does.
    """

    request_id: str
    plan: ReusePlan
    token_ids: tuple[int, ...]
    start: int
    block_ids: tuple[int, ...]
    asynchronous: bool = False
    order: LoadOrder | None = None

    @property
    def stop(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True)
class SaveJob:
    """Scheduler to worker: store whole chunks of a request, filled by the end of this step.

    Attributes:
        request_id: The request.
        token_ids: Its tokens up to the end of the last chunk to store.
        first_chunk: Number of the first chunk to store.
        block_ids: Blocks of its page table, the first one for token 0.
        overwrite: Store what is there already, too.
    """

    request_id: str
    token_ids: tuple[int, ...]
    first_chunk: int
    block_ids: tuple[int, ...]
    overwrite: bool = False


@dataclass
class StepJobs:
    """All that the worker is told in one step.

    Attributes:
        loads: Prefixes to supply.
        saves: Chunks to store.
        dropped: Requests whose jobs are to be given up.
        suffixes: Requests that waited for their load, and whose suffix pass is to be timed now.
        refused: Requests that wait for a load, to be told that it failed.
    """

    loads: list[LoadJob] = field(default_factory=list)
    saves: list[SaveJob] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    suffixes: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Span:
    """One piece of a request's timeline.

    Attributes:
        kind: `load`: a layer's KV, or E, comes from the store. `enter`: E is turned into what
            enters the group. `recompute`: one layer runs over the prefix. `wait`: the engine
            stands still for want of data. `suffix`: the engine's forward pass from one layer's
            attention to the next one's.
        layer: Which; None where it is about no layer.
        start: Seconds since 1970.
        stop: Seconds since 1970.
    """

    kind: SpanKind
    layer: int | None
    start: float
    stop: float


@dataclass
class LoadReport:
    """Worker to scheduler: how one load went.

    Attributes:
        loaded_bytes: Bytes of KV and E that came from the store.
        recomputed_tokens: Prefix tokens that ran through the group.
        load_seconds: From the first read to the last write.
        recompute_seconds: In the group's layers.
        wait_seconds: For which the engine stood still for want of data.
        reason: Why it failed; None if it did not.
        spans: Its timeline, if the receiver keeps any.
    """

    loaded_bytes: int = 0
    recomputed_tokens: int = 0
    load_seconds: float = 0.0
    recompute_seconds: float = 0.0
    wait_seconds: float = 0.0
    reason: Fallback | None = None
    spans: list[Span] = field(default_factory=list)

    def merge(self, other: LoadReport) -> LoadReport:
        """Two reports of one load: bytes add up, the slower one counts."""
        return LoadReport(
            self.loaded_bytes + other.loaded_bytes,
            max(self.recomputed_tokens, other.recomputed_tokens),
            max(self.load_seconds, other.load_seconds),
            max(self.recompute_seconds, other.recompute_seconds),
            max(self.wait_seconds, other.wait_seconds),
            self.reason or other.reason,
            self.spans + other.spans,
        )


@dataclass
class AuditRecord:
    """What happened to one request; one line of the audit file.

    Attributes:
        request_id: The engine's name for it.
        plan: The plan that was chosen, as text; None if none was.
        prompt_tokens: Length of the prompt.
        covered_tokens: Tokens from 0 on that the store can supply to the plan.
        advertised_tokens: Tokens that the engine was promised; 0 after a fallback.
        local_tokens: Of the prefix, those the engine held already.
        recomputed_layers: Layers of the group.
        num_loads: How often its prefix was loaded; more than once if it was preempted.
        lookup_seconds: Until the store had answered.
        asynchronous: Whether the request waited while the engine went on.
        ended: When the request ended, in seconds since 1970.
        report: The worker's part.
        reason: Why the request was answered by its own prefill; None if it reused.
        refused: Whether it ended in an error instead, for that reason.
    """

    request_id: str
    plan: str | None = None
    prompt_tokens: int = 0
    covered_tokens: int = 0
    advertised_tokens: int = 0
    local_tokens: int = 0
    recomputed_layers: int = 0
    num_loads: int = 0
    lookup_seconds: float = 0.0
    asynchronous: bool = False
    ended: float = 0.0
    report: LoadReport = field(default_factory=LoadReport)
    reason: Fallback | None = None
    refused: bool = False

    def to_json(self) -> dict[str, Any]:
        """The record as JSON values, flat."""
        table = {**vars(self), **vars(self.report)}
        del table["report"]
        table["reason"] = None if self.reason is None else str(self.reason)
        table["spans"] = [[each.kind, each.layer, each.start, each.stop] for each in table["spans"]]
        return table


@dataclass(frozen=True)
class Piece:
    """Part of one chunk, and where it belongs in the range that is wanted.

    Attributes:
        chunk: Number of the chunk.
        inside: `[start, stop)` within the chunk.
        at: `[start, stop)` within the wanted range.
    """

    chunk: int
    inside: tuple[int, int]
    at: tuple[int, int]


def parse_ask(params: Mapping[str, Any] | None, num_layers: int) -> Ask:
    """Read `{"droidkv": {"plan": "[12,24)"}}` and the other fields of `Ask`.

    Args:
        params: A request's `kv_transfer_params`; keys of other connectors are left alone.
        num_layers: Decoder layers of the receiver.

    Raises:
        PlanError: The value is no table, has another key, or the plan does not fit the model.
    """
    value = (params or {}).get(PARAMS_KEY)
    if value is None:
        return Ask()
    if not isinstance(value, Mapping) or not set(value) <= ASK_KEYS:
        raise PlanError(
            f"expected kv_transfer_params[{PARAMS_KEY!r}] to be a table with some of "
            f"{', '.join(sorted(ASK_KEYS))}, got {value!r}"
        )
    plan, reuse = value.get("plan"), value.get("reuse", True)
    if not isinstance(reuse, bool) or not isinstance(plan, str | None):
        raise PlanError(
            f"expected 'plan' to be a text like '[12,24)' and 'reuse' to be true or false, "
            f"got {value!r}"
        )
    order = value.get("order")
    if order is not None and order not in LOAD_ORDERS:
        raise PlanError(f"expected 'order' to be one of {', '.join(LOAD_ORDERS)}, got {order!r}")
    prefix = value.get("prefix_tokens")
    if prefix is not None and (type(prefix) is not int or prefix < 0):
        raise PlanError(f"expected 'prefix_tokens' to be a number of tokens, got {prefix!r}")
    parsed = None if plan is None else ReusePlan.parse(plan, num_layers)
    return Ask(parsed, reuse, order, prefix)


def wants_overwrite(params: Mapping[str, Any] | None) -> bool:
    """Whether a sender's request says `{"droidkv": {"overwrite": true}}`: store damaged KV anew."""
    value = (params or {}).get(PARAMS_KEY)
    return isinstance(value, Mapping) and value.get(OVERWRITE) is True


def reusable_tokens(prompt_tokens: int, covered_tokens: int, chunk_tokens: int) -> int:
    """Longest prefix to reuse: whole chunks that are covered, and shorter than the prompt.

    Args:
        prompt_tokens: Length of the prompt.
        covered_tokens: Tokens from 0 on that the store can supply: min(KV, E).
        chunk_tokens: Tokens in one chunk of the store.
    """
    most = min(covered_tokens, prompt_tokens - 1)
    return max(most, 0) // chunk_tokens * chunk_tokens


def slots_of(block_ids: Sequence[int], block_tokens: int, start: int, stop: int) -> list[int]:
    """Slots of the paged cache that hold tokens `[start, stop)` of a request.

    Raises:
        PlanError: The request's blocks do not reach that far.
    """
    if stop > len(block_ids) * block_tokens:
        raise PlanError(
            f"expected blocks for {stop} tokens, got {len(block_ids)} blocks of {block_tokens}"
        )
    return [
        block_ids[token // block_tokens] * block_tokens + token % block_tokens
        for token in range(start, stop)
    ]


def chunk_pieces(start: int, stop: int, chunk_tokens: int) -> list[Piece]:
    """The chunks, and their parts, that make up tokens `[start, stop)`, in order."""
    pieces: list[Piece] = []
    if start >= stop:
        return pieces
    for chunk in range(start // chunk_tokens, -(-stop // chunk_tokens)):
        first = chunk * chunk_tokens
        low, high = max(start, first), min(stop, first + chunk_tokens)
        pieces.append(Piece(chunk, (low - first, high - first), (low - start, high - start)))
    return pieces


def filled_chunks(
    saved_chunks: int, computed_tokens: int, most_tokens: int, chunk_tokens: int
) -> range:
    """Chunks that became whole and are not stored yet.

    Args:
        saved_chunks: Chunks from 0 on that are stored or under way.
        computed_tokens: Tokens of the request whose KV is in the paged cache.
        most_tokens: Tokens to store at most: the prompt.
        chunk_tokens: Tokens in one chunk of the store.
    """
    whole = min(computed_tokens, most_tokens) // chunk_tokens
    return range(saved_chunks, max(whole, saved_chunks))


def mixed_salt(
    namespace: str,
    plan: ReusePlan,
    stitch_sha256: str | None,
    last_chunk_hash: str,
    num_tokens: int,
    cache_salt: str | None,
) -> str:
    """Salt of the block hashes of a request whose prefix is mixed KV.

    Requests share mixed blocks only if all of this is the same. Without a salt the receiver's own
    prefix cache would answer exact requests from mixed KV, and the other way round.

    Args:
        namespace: The sender's.
        plan: The plan.
        stitch_sha256: Identity of the stitching map, if the plan uses one.
        last_chunk_hash: Hash over all tokens of the prefix.
        num_tokens: Length of the prefix.
        cache_salt: The salt that the request brought along.
    """
    fields = [namespace, str(plan), stitch_sha256, last_chunk_hash, num_tokens, cache_salt]
    return _SALT_PREFIX + hashlib.sha256(canonical_json(fields).encode("ascii")).hexdigest()
