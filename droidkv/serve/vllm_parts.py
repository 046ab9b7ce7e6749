"""What more than one of our vLLM connectors is made of."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1


class CountsRequests:
    """Mixin: a connector whose requests are counted by `droidkv.serve.vllm_metrics`.

    That module is imported when it is needed, since vLLM imports connectors while it still builds
    its configuration.
    """

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Any:
        from droidkv.serve.vllm_metrics import DroidKVStats

        return DroidKVStats(data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> Any:
        from droidkv.serve.vllm_metrics import DroidKVPromMetrics

        return DroidKVPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


class MovesNoKV(KVConnectorBase_V1):  # type: ignore[misc]
    """A connector that only tells scheduler and model something; no layer's KV come or go."""

    @property
    def requires_kv_delivery(self) -> bool:
        return False

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        pass

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(
        self, layer_name: str, kv_layer: Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        pass

    def wait_for_save(self) -> None:
        pass
