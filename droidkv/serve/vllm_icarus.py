"""What vLLM loads for an engine with several ICaRus decoders: the connector and a request check.

    {"kv_connector": "IcarusConnector",
     "kv_connector_module_path": "droidkv.serve.vllm_icarus",
     "kv_role": "kv_both",
     "kv_connector_extra_config": {see droidkv.serve.icarus.IcarusSettings}}

The connector moves no KV. It tells the model (`droidkv.serve.vllm_streams`), step by step,
which tokens go through which decoder. Block hashes know nothing of decoders, so all of them hit
the same blocks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from vllm import SamplingParams
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorRole,
)
from vllm.v1.sample.logits_processor import LogitsProcessor

from droidkv.serve.icarus import (
    DecodedRows,
    IcarusScheduler,
    IcarusSettings,
    Turn,
    decoder_asked,
    known_decoders,
)
from droidkv.serve.vllm_parts import MovesNoKV


@dataclass
class IcarusMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """Scheduler to worker, once per step."""

    rows: DecodedRows = field(default_factory=DecodedRows)


class IcarusConnector(MovesNoKV):
    """Carries from the scheduler to the model who decodes what.

    Raises:
        DroidKVError: The engine is set up in a way that cannot work, or was never tested.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        from droidkv.serve.vllm_decoders import check_engine
        from droidkv.serve.vllm_refusals import check_cache

        table = vllm_config.kv_transfer_config.kv_connector_extra_config
        settings = IcarusSettings.from_table(table)
        check_engine(vllm_config, settings)
        block_tokens = check_cache(kv_cache_config).block_size
        self._requests: dict[str, Any] = {}
        self._scheduler = IcarusScheduler(list(settings.decoders), block_tokens)

    # Scheduler side.

    def on_new_request(self, request: Any) -> None:
        sampling = request.sampling_params
        all_tokens = sampling is not None and sampling.prompt_logprobs is not None
        self._scheduler.admit(request.request_id, request.kv_transfer_params, all_tokens)
        self._requests[request.request_id] = request

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        pass

    def build_connector_meta(self, scheduler_output: Any) -> IcarusMetadata:
        starts = {
            each.req_id: each.num_computed_tokens for each in scheduler_output.scheduled_new_reqs
        }
        cached = scheduler_output.scheduled_cached_reqs
        starts |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        blocks = scheduler_output.kv_connector_block_state
        turns = [
            Turn(
                request_id,
                blocks.get_block_ids(request_id)[0],
                starts[request_id],
                starts[request_id] + num_tokens,
                self._requests[request_id].num_tokens,
            )
            for request_id, num_tokens in scheduler_output.num_scheduled_tokens.items()
        ]
        return IcarusMetadata(self._scheduler.step(turns))

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._scheduler.finish(request.request_id)
        self._requests.pop(request.request_id, None)
        return False, None

    # Worker side.

    @property
    def rows(self) -> DecodedRows | None:
        """What the decoders do in the step that runs now; None = a warm-up run."""
        if not self.has_connector_metadata():
            return None
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, IcarusMetadata)
        return metadata.rows


class DecoderExists(LogitsProcessor):  # type: ignore[misc]
    """Refuses a request for a decoder that is not there, before it reaches the engine.

    vLLM lets its users check requests in a logits processor only; logits are left alone.
    """

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        params = (sampling_params.extra_args or {}).get("kv_transfer_params")
        decoder_asked(params, known_decoders())

    def __init__(self, vllm_config: Any, device: Any, is_pin_memory: bool) -> None:
        pass

    def apply(self, logits: Tensor) -> Tensor:
        return logits

    def is_argmax_invariant(self) -> bool:
        return True

    def update_state(self, batch_update: Any) -> None:
        pass
