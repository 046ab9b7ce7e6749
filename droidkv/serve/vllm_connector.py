"""The connector that vLLM loads by `kv_connector_module_path`: a shell around the two halves.

    {"kv_connector": "DroidKVConnector",
     "kv_connector_module_path": "droidkv.serve.vllm_connector",
     "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
     "kv_connector_extra_config": {see droidkv.serve.settings.ServeSettings}}

With `on_miss` = `error`, as for receivers that were trained to read the sender's KV, the policy
is `fail`: requests that cannot reuse are made to wait for a load, which then fails.

Everything heavy is imported when a connector is made, since vLLM imports this module while it still
builds its configuration.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
)
from vllm.v1.engine import FinishReason

from droidkv.serve.connector_plan import (
    AuditRecord,
    Fallback,
    LoadReport,
    RequestView,
    Span,
    StepJobs,
)
from droidkv.serve.refusals import note_refusal
from droidkv.serve.vllm_parts import CountsRequests

_LOG = logging.getLogger(__name__)


@dataclass
class DroidKVMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """Scheduler to worker, once per step."""

    jobs: StepJobs = field(default_factory=StepJobs)


@dataclass
class DroidKVWorkerMetadata(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """Worker to scheduler, once per step: how loads went, and timelines of suffix passes."""

    reports: dict[str, LoadReport] = field(default_factory=dict)
    suffixes: dict[str, list[Span]] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> DroidKVWorkerMetadata:
        assert isinstance(other, DroidKVWorkerMetadata)
        merged = dict(self.reports)
        for request_id, report in other.reports.items():
            mine = merged.get(request_id)
            merged[request_id] = report if mine is None else mine.merge(report)
        return DroidKVWorkerMetadata(merged, self.suffixes | other.suffixes)


class DroidKVConnector(CountsRequests, KVConnectorBase_V1):  # type: ignore[misc]
    """Forwards to a scheduler half or a worker half, of a sender or of a receiver.

    Raises:
        DroidKVError: The engine is set up in a way that cannot work, or was never tested.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        from droidkv.serve.sender_scheduler import SenderScheduler
        from droidkv.serve.vllm_setup import read_setup, receiver_scheduler

        self._setup = read_setup(vllm_config, kv_cache_config)
        self._is_sender = self._setup.settings.role == "sender"
        self._requests: dict[str, Any] = {}
        self._ended: list[dict[str, Any]] = []
        self._sender_scheduler: Any = None
        self._receiver_scheduler: Any = None
        self._model: Any = None
        self._sender: Any = None
        self._receiver: Any = None
        self._result: Any = None
        self._is_idle = False
        self._is_shut = False
        if role == KVConnectorRole.SCHEDULER:
            if self._is_sender:
                self._sender_scheduler = SenderScheduler(self._setup.store.chunk_tokens)
            else:
                self._receiver_scheduler = receiver_scheduler(self._setup, self._on_record)

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Waits per layer, which a full graph's replay would skip."""
        return True

    @property
    def requires_kv_delivery(self) -> bool:
        """A cache on best effort: what is not stored is a later miss."""
        return False

    # Seen from outside.

    def get_kv_connector_stats(self) -> Any:
        """Requests that ended (in the scheduler) and chunks that were stored (beside the model)."""
        ended, self._ended = self._ended, []
        saves, rests = {}, {}
        if self._sender is not None:
            saves = self._sender.new_counts()
            rests["save"] = self._sender.puts.new_rests()
        if self._receiver_scheduler is not None:
            rests["lookup"] = self._receiver_scheduler.lookups.new_rests()
            rests["load"] = self._receiver_scheduler.loads.new_rests()
        stats = self.build_kv_connector_stats({"requests": ended, "saves": saves, "rests": rests})
        for what in (each for each, count in rests.items() if count):
            _LOG.warning(
                "the store %s failed several times in a row at every %s; it is not asked for a "
                "while, see droidkv_store_rests_total",
                self._setup.settings.store,
                what,
            )
        return None if stats.is_empty() else stats

    def _on_record(self, record: AuditRecord) -> None:
        audit = self._setup.settings.audit
        self._ended.append(append_record(None if audit is None else Path(audit), record))

    # Scheduler side.

    def on_new_request(self, request: Any) -> None:
        self._requests[request.request_id] = request
        if self._is_sender:
            self._sender_scheduler.admit(_view(request, _sender_obstacle(request)))
        else:
            view = _view(request, _receiver_obstacle(request))
            self._receiver_scheduler.admit(view, _salter(request))
            if self._receiver_scheduler.refuses(request.request_id):
                # Else vLLM would not ask for tokens, and answer it.
                request.skip_reading_prefix_cache = False

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        if self._is_sender:
            return 0, False
        matched: tuple[int | None, bool] = self._receiver_scheduler.match(
            request.request_id, num_computed_tokens, _salter(request)
        )
        return matched

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if not self._is_sender:
            self._receiver_scheduler.allocate(
                request.request_id, blocks.get_block_ids()[0], num_external_tokens
            )

    def build_connector_meta(self, scheduler_output: Any) -> DroidKVMetadata:
        if self._is_sender:
            saves = self._sender_scheduler.step(_scheduled(scheduler_output))
            return DroidKVMetadata(StepJobs(saves=saves))
        jobs = self._receiver_scheduler.take_jobs()
        jobs.suffixes = self._receiver_scheduler.take_suffixes(
            scheduler_output.num_scheduled_tokens
        )
        return DroidKVMetadata(jobs)

    def update_connector_output(self, connector_output: Any) -> None:
        reported = connector_output.kv_connector_worker_meta
        if reported is None or self._is_sender:
            return
        for request_id, report in reported.reports.items():
            salter = _salter(self._requests.get(request_id))
            own = self._receiver_scheduler.report(request_id, report, salter)
            if own and self._kv_cache_manager is not None:
                # Cached under the salt when they were allocated, about to hold exact KV.
                (block_ids,) = self._kv_cache_manager.get_block_ids(request_id)
                self._kv_cache_manager.evict_blocks(set(block_ids))
        for request_id, spans in reported.suffixes.items():
            self._receiver_scheduler.report_suffix(request_id, spans)

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._requests.pop(request.request_id, None)
        if self._is_sender:
            self._sender_scheduler.finish(request.request_id)
        else:
            how = request.get_finished_reason()
            unknown = self._receiver_scheduler.finish(
                request.request_id, how == FinishReason.ABORT, how == FinishReason.ERROR
            )
            if unknown and self._kv_cache_manager is not None:
                self._kv_cache_manager.evict_blocks(set(block_ids))
        return False, None

    # Worker side.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        from droidkv.serve.vllm_setup import paged_model, receiver_worker, sender_worker

        with torch.inference_mode():
            self._model = paged_model(self._setup, kv_caches)
        if self._is_sender:
            self._sender = sender_worker(self._setup, self._model)
        else:
            self._receiver = receiver_worker(self._setup, self._model)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        if self._receiver is not None:
            assert isinstance(connector_metadata, DroidKVMetadata)
            self._receiver.begin_step(connector_metadata.jobs.suffixes)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        jobs = self._get_connector_metadata().jobs
        self._is_idle = not forward_context.attn_metadata
        if self._receiver is not None:
            self._receiver.start(jobs.loads, jobs.dropped, jobs.refused)

    def wait_for_layer_load(self, layer_name: str) -> None:
        if self._model is None:
            return
        if self._model.is_recomputing:
            self._model.before_attention(layer_name)
        elif self._receiver is not None:
            self._receiver.wait_for_layer(self._model.layer_of(layer_name))

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Nothing: whole chunks are saved at the end of the step."""

    def wait_for_save(self) -> None:
        if self._sender is not None:
            self._sender.save(self._get_connector_metadata().jobs.saves)
        elif self._receiver is not None:
            self._result = self._receiver.end_step(self._is_idle)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        if self._result is None:
            return KVConnectorTransferResults()
        return KVConnectorTransferResults(
            finished_recving=self._result.finished, failed_recving=self._result.failed
        )

    def get_block_ids_with_load_errors(self) -> set[int]:
        if self._result is None:
            return set()
        invalid: set[int] = self._result.invalid_block_ids
        return invalid

    def build_connector_worker_meta(self) -> DroidKVWorkerMetadata | None:
        if self._result is None or not (self._result.reports or self._result.suffixes):
            return None
        return DroidKVWorkerMetadata(self._result.reports, self._result.suffixes)

    def flush(self, seconds: float) -> bool:
        """Sender: wait until receivers can read all that was stored; False if it takes longer."""
        return self._sender is None or bool(self._sender.flush(seconds))

    def saved_chunks(self) -> dict[str, int]:
        """Sender: chunks so far, by what came of them."""
        return {} if self._sender is None else self._sender.counts()

    def shutdown(self) -> None:
        from droidkv.serve.opening import release_store

        for half in (self._receiver_scheduler, self._receiver, self._sender):
            if half is not None:
                half.close()
        if not self._is_shut:
            self._is_shut = True
            release_store(self._setup.settings.store)


def append_record(audit: Path | None, record: AuditRecord) -> dict[str, Any]:
    """Write a request's audit line, if there is a file for it; returns what metrics need of it."""
    table = record.to_json()
    if record.refused:
        _LOG.warning("request %s is refused: %s", record.request_id, record.reason)
        try:
            note_refusal(record)
        except OSError as error:
            _LOG.warning("the client of %s is not told why: %s", record.request_id, error)
    if audit is not None:
        try:
            with audit.open("a", encoding="utf-8") as file:
                file.write(json.dumps(table, allow_nan=False) + "\n")
        except OSError as error:  # a full disk is no reason to stop serving
            _LOG.warning("the audit line of %s is lost: %s", record.request_id, error)
    del table["spans"]
    return table


def _view(request: Any, obstacle: Fallback | None) -> RequestView:
    return RequestView(
        request.request_id,
        list(request.prompt_token_ids or ()),
        request.kv_transfer_params,
        request.cache_salt,
        obstacle,
    )


def _sender_obstacle(request: Any) -> Fallback | None:
    """Why what the sender computes for a request is not this model's cache of these tokens."""
    return Fallback.LORA if request.lora_request is not None else _input_obstacle(request)


def _input_obstacle(request: Any) -> Fallback | None:
    if request.mm_features:
        return Fallback.MULTIMODAL
    if request.prompt_embeds is not None:
        return Fallback.PROMPT_EMBEDS
    return Fallback.STREAMED_INPUT if request.resumable else None


def _receiver_obstacle(request: Any) -> Fallback | None:
    return Fallback.LORA if request.lora_request is not None else reader_obstacle(request)


def reader_obstacle(request: Any) -> Fallback | None:
    """Why a request cannot be answered behind KV that it did not compute."""
    if (reason := _input_obstacle(request)) is not None:
        return reason
    if request.pooling_params is not None:
        return Fallback.POOLING
    if request.sampling_params.prompt_logprobs is not None:
        return Fallback.PROMPT_LOGPROBS
    return Fallback.OPTED_OUT if request.skip_reading_prefix_cache else None


def _salter(request: Any | None) -> Callable[[str | None], None]:
    """Sets a request's salt; None = it has ended, and none is set."""

    def set_salt(salt: str | None) -> None:
        if request is None:
            return
        request.cache_salt = salt
        request.block_hashes.clear()
        request.update_block_hashes()

    return set_salt


def _scheduled(output: Any) -> list[Any]:
    """Requests of a step, with the tokens whose KV are in the cache when it ends."""
    from droidkv.serve.sender_scheduler import Scheduled

    before = {each.req_id: each.num_computed_tokens for each in output.scheduled_new_reqs}
    cached = output.scheduled_cached_reqs
    before |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    state = output.kv_connector_block_state
    return [
        Scheduled(
            request_id,
            state.get_block_ids(request_id)[0],
            before[request_id] + num_tokens,
        )
        for request_id, num_tokens in output.num_scheduled_tokens.items()
    ]
