"""One engine: a base, and adapters that were trained to read its KV (PrefillShare). No vLLM here.

The base's blocks are found by the adapters' requests too, so all of them share one prefix. What an
adapter's own request computes is found by that adapter only.

The engine's request must tell its blocks' hashes as vLLM does: one per whole block, chained, with
the adapter's name in them where it has one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from droidkv.errors import PlanError, ServeError
from droidkv.fields import Fields
from droidkv.plan import ReusePlan
from droidkv.serve.connector_plan import Ask, AuditRecord, Fallback, parse_ask, reusable_tokens


class HashedRequest(Protocol):
    """What is asked of an engine's request."""

    lora_request: Any
    block_hashes: list[Any]

    def update_block_hashes(self) -> None:
        """Append the hashes of whole blocks that have none yet."""


@dataclass(frozen=True)
class BasePrefixSettings:
    """`kv_connector_extra_config` of such an engine.

    Attributes:
        own_tokens: Longest end of a prompt that an adapter may compute itself, where the request
            does not say how long its prefix is; requests behind less of the base's KV end in an
            error. None = one block.
        audit: File that gets one JSON line per request of an adapter.
    """

    own_tokens: int | None = None
    audit: str | None = None

    @classmethod
    def from_table(cls, table: Mapping[str, Any]) -> BasePrefixSettings:
        """Read `kv_connector_extra_config`.

        Raises:
            ServeError: A value is of the wrong kind, or a key is unknown.
        """
        fields = Fields(table, "kv_connector_extra_config", ServeError)
        settings = cls(fields.optional("own_tokens", int, minimum=1), fields.optional("audit", str))
        fields.done()
        return settings


def hash_behind_base(request: HashedRequest, num_blocks: int) -> None:
    """Hash the first blocks of an adapter's request as the base's, the others as its own."""
    adapter = request.lora_request
    request.block_hashes.clear()
    if num_blocks:
        request.lora_request = None
        try:
            request.update_block_hashes()
        finally:
            request.lora_request = adapter
        del request.block_hashes[num_blocks:]
    request.update_block_hashes()


@dataclass
class _Tracked:
    request: HashedRequest
    record: AuditRecord
    base_blocks: int
    most_own_tokens: int
    wants_own: bool = False

    def is_refused(self) -> bool:
        """Whether it ends in an error: nothing is reused, and its own prefill was not asked for."""
        return self.record.reason is not None and not self.wants_own


class BasePrefixScheduler:
    """The half in the scheduler: whose blocks a request may find, and which requests are refused.

    Args:
        num_layers: Decoder layers of the base.
        block_tokens: Tokens of one block.
        most_adapters: Requests of more adapters than that are refused.
        own_tokens: As in `BasePrefixSettings`.
        on_record: Called with the record of every adapter's request that ended.
    """

    def __init__(
        self,
        num_layers: int,
        block_tokens: int,
        most_adapters: int,
        own_tokens: int | None,
        on_record: Callable[[AuditRecord], None],
    ) -> None:
        self._num_layers = num_layers
        self._most_adapters = most_adapters
        self._adapters: set[Hashable] = set()
        self._block_tokens = block_tokens
        self._own_tokens = block_tokens if own_tokens is None else own_tokens
        self._on_record = on_record
        self._requests: dict[str, _Tracked] = {}
        self._refused: list[str] = []

    def admit(
        self,
        request_id: str,
        request: HashedRequest,
        prompt_tokens: int,
        params: Mapping[str, Any] | None = None,
        obstacle: Fallback | None = None,
    ) -> None:
        """A request arrived; the base's own need nothing.

        Args:
            request_id: The engine's name for it.
            request: The engine's.
            prompt_tokens: Length of its prompt.
            params: Its `kv_transfer_params`; see `droidkv.serve.connector_plan.Ask`.
            obstacle: What makes reuse impossible for a request of its kind.
        """
        if request.lora_request is None:
            return
        record = AuditRecord(request_id, prompt_tokens=prompt_tokens, plan=str(ReusePlan.of(0, 0)))
        tracked = _Tracked(request, record, 0, self._own_tokens)
        self._requests[request_id] = tracked
        self._adapters.add(request.lora_request)
        has_room = len(self._adapters) <= self._most_adapters
        try:
            ask = parse_ask(params, self._num_layers)
        except PlanError:
            record.reason = Fallback.BAD_PLAN
            return
        wish = self._wish(ask)
        tracked.wants_own = has_room and wish in (Fallback.OPTED_OUT, Fallback.FULL_PREFILL)
        record.reason = (wish or obstacle) if has_room else Fallback.LORA
        if record.reason is not None:
            return
        prefix = prompt_tokens if ask.prefix_tokens is None else ask.prefix_tokens
        # The block that holds the last token is never found: a token has to be computed.
        reusable = reusable_tokens(prompt_tokens, prefix, self._block_tokens)
        if reusable == 0:
            record.reason = Fallback.TOO_SHORT
            return
        if ask.prefix_tokens is not None:
            tracked.most_own_tokens = prompt_tokens - reusable
        tracked.base_blocks = reusable // self._block_tokens
        hash_behind_base(request, tracked.base_blocks)

    def _wish(self, ask: Ask) -> Fallback | None:
        """What a request wants instead of the base's KV, if anything."""
        if not ask.reuse:
            return Fallback.OPTED_OUT
        recomputed = 0 if ask.plan is None else ask.plan.num_recomputed
        if recomputed == self._num_layers:
            return Fallback.FULL_PREFILL
        return Fallback.BAD_PLAN if recomputed else None

    def refuses(self, request_id: str) -> bool:
        """Whether it is known already that the request ends in an error."""
        tracked = self._requests.get(request_id)
        return tracked is not None and tracked.is_refused()

    def match(self, request_id: str, found_tokens: int) -> bool:
        """The engine found so many tokens in its cache; whether it is to fail the request.

        Blocks behind those that were found will be computed by the adapter, so none but the
        adapter may find them.
        """
        tracked = self._requests.get(request_id)
        if tracked is None:
            return False
        record = tracked.record
        if record.reason is None:
            found = found_tokens // self._block_tokens
            if found < tracked.base_blocks:
                tracked.base_blocks = found
                hash_behind_base(tracked.request, found)
            record.local_tokens = tracked.base_blocks * self._block_tokens
            if record.local_tokens == 0:
                record.reason = Fallback.NOT_COVERED
            elif record.prompt_tokens - record.local_tokens > tracked.most_own_tokens:
                record.reason = Fallback.PARTLY_COVERED
        record.refused = tracked.is_refused()
        return record.refused

    def allocate(self, request_id: str) -> None:
        """The engine gave the request blocks, which a refused one needs to fail."""
        if self.refuses(request_id):
            self._refused.append(request_id)

    def take_refused(self) -> list[str]:
        """Requests to tell the worker of in this step."""
        refused, self._refused = self._refused, []
        return refused

    def finish(self, request_id: str, is_aborted: bool = False) -> None:
        """The request ended."""
        tracked = self._requests.pop(request_id, None)
        if tracked is None:
            return
        record = tracked.record
        record.ended = time.time()
        if is_aborted:
            record.reason, record.refused = Fallback.ABORTED, False
        self._on_record(record)
