"""What vLLM loads for an engine with a base and adapters that read its KV: a connector.

    {"kv_connector": "BasePrefixConnector",
     "kv_connector_module_path": "droidkv.serve.vllm_base_prefix",
     "kv_role": "kv_both", "kv_load_failure_policy": "fail",
     "kv_connector_extra_config": {see droidkv.serve.base_prefix.BasePrefixSettings}}

Beside it `--enable-lora --lora-modules NAME=FOLDER ...`, and `--middleware` to tell clients why
they are refused (`droidkv.serve.refusals`); the base is asked first, with the prompt and
`max_tokens` 1, then an adapter by its name. The connector moves no KV. It only says which blocks an
adapter's request may find, and fails a request that would find too few.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vllm import envs
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorRole,
    KVConnectorTransferResults,
)
from vllm.v1.engine import FinishReason

from droidkv.errors import ServeError
from droidkv.serve.base_prefix import BasePrefixScheduler, BasePrefixSettings
from droidkv.serve.connector_plan import AuditRecord, StepJobs
from droidkv.serve.vllm_connector import (
    DroidKVMetadata,
    append_record,
    reader_obstacle,
)
from droidkv.serve.vllm_parts import CountsRequests, MovesNoKV


class BasePrefixConnector(CountsRequests, MovesNoKV):
    """Lets adapters' requests find the base's blocks.

    Raises:
        DroidKVError: The engine is set up in a way that cannot work, or was never tested.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        from droidkv.serve.vllm_models import ARCHITECTURES
        from droidkv.serve.vllm_refusals import check_cache, check_common

        check_common(vllm_config, ARCHITECTURES)
        table = vllm_config.kv_transfer_config.kv_connector_extra_config
        settings = BasePrefixSettings.from_table(table)
        block_tokens = check_cache(kv_cache_config).block_size
        check_engine(vllm_config, settings.own_tokens, block_tokens)
        self._audit = None if settings.audit is None else Path(settings.audit)
        self._ended: list[dict[str, Any]] = []
        self._failed: set[str] = set()
        num_layers = vllm_config.model_config.hf_text_config.num_hidden_layers
        self._scheduler = BasePrefixScheduler(
            num_layers,
            block_tokens,
            vllm_config.lora_config.max_loras - 1,
            settings.own_tokens,
            self._on_record,
        )

    # Seen from outside.

    def get_kv_connector_stats(self) -> Any:
        if not self._ended:
            return None
        stats = self.build_kv_connector_stats()
        stats.data["requests"], self._ended = self._ended, []
        return stats

    def _on_record(self, record: AuditRecord) -> None:
        self._ended.append(append_record(self._audit, record))

    # Scheduler side.

    def on_new_request(self, request: Any) -> None:
        self._scheduler.admit(
            request.request_id,
            request,
            request.num_prompt_tokens,
            request.kv_transfer_params,
            reader_obstacle(request),
        )
        if self._scheduler.refuses(request.request_id):
            # Else vLLM would not ask for tokens, and answer it.
            request.skip_reading_prefix_cache = False

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        # An engine fails a request only for a load that fails, so one token is promised.
        is_refused = self._scheduler.match(request.request_id, num_computed_tokens)
        return (1, True) if is_refused else (0, False)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            self._scheduler.allocate(request.request_id)

    def build_connector_meta(self, scheduler_output: Any) -> DroidKVMetadata:
        return DroidKVMetadata(StepJobs(refused=self._scheduler.take_refused()))

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        is_aborted = request.get_finished_reason() == FinishReason.ABORT
        self._scheduler.finish(request.request_id, is_aborted)
        return False, None

    # Worker side.

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._failed.update(self._get_connector_metadata().jobs.refused)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        failed, self._failed = self._failed, set()
        return KVConnectorTransferResults(finished_recving=failed, failed_recving=set(failed))


def check_engine(vllm_config: Any, own_tokens: int | None, block_tokens: int) -> None:
    """Refuse what cannot work, or was never tested.

    Raises:
        ServeError: Names the setting, what it is and what it has to be.
    """
    policy = vllm_config.kv_transfer_config.kv_load_failure_policy
    wrong = [
        (vllm_config.lora_config is None, "--enable-lora, since modules are adapters of the base"),
        (
            envs.VLLM_ALLOW_RUNTIME_LORA_UPDATING,
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING to be unset: one of vLLM's places for adapters has "
            "to stay empty",
        ),
        (
            not vllm_config.cache_config.enable_prefix_caching,
            "--enable-prefix-caching, by which adapters find the base's blocks",
        ),
        (
            policy != "fail",
            f"kv_load_failure_policy 'fail' in --kv-transfer-config, got {policy!r}, with which "
            "an adapter would answer by its own prefill",
        ),
        (
            own_tokens is not None and own_tokens < block_tokens,
            f"own_tokens of a block ({block_tokens} tokens) or more, got {own_tokens}: only whole "
            "blocks are found, and never a prompt's last token",
        ),
    ]
    if not wrong[0][0] and vllm_config.lora_config.max_loras < 2:
        wrong.append((True, "--max-loras of one more than there are adapters, got 1"))
    if named := [wanted for is_wrong, wanted in wrong if is_wrong]:
        raise ServeError(f"expected {named[0]}")
