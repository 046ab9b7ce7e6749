"""From vLLM's configuration to the halves of the connector, or a refusal that says why."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from droidkv.content import dtype_name
from droidkv.identity import Fingerprint
from droidkv.model_identity import identify
from droidkv.pair import ModelRef
from droidkv.serve.connector_plan import AuditRecord
from droidkv.serve.opening import open_store
from droidkv.serve.receiver_scheduler import ReceiverRules, ReceiverScheduler
from droidkv.serve.receiver_worker import ReceiverWorker
from droidkv.serve.sender_worker import SenderWorker
from droidkv.serve.settings import (
    ReceiverPair,
    ServeSettings,
    needed_hidden_layers,
    own_tokens_limit,
    plan_chooser,
    receiver_pair,
)
from droidkv.serve.store import Store, namespace_digest
from droidkv.serve.vllm_engine import VllmPagedModel
from droidkv.serve.vllm_models import ARCHITECTURES, model_of
from droidkv.serve.vllm_refusals import check_cache, check_engine, check_failure_policy


@dataclass(frozen=True)
class Setup:
    """One engine's part in reuse, checked.

    Attributes:
        vllm_config: The engine's configuration.
        kv_cache_spec: Of the one group of layers.
        settings: What the user asked for.
        store: Where caches lie.
        identity: The model being served.
        pair: Receiver: the pair.
        hidden_layers: Sender: layers whose E is stored.
    """

    vllm_config: Any
    kv_cache_spec: Any
    settings: ServeSettings
    store: Store
    identity: Fingerprint
    pair: ReceiverPair | None
    hidden_layers: tuple[int, ...]

    @property
    def num_layers(self) -> int:
        layers: int = self.vllm_config.model_config.hf_text_config.num_hidden_layers
        return layers

    @property
    def namespace(self) -> str:
        """The sender's, in the store."""
        return namespace_digest(self.identity if self.pair is None else self.pair.sender)


def read_setup(vllm_config: Any, kv_cache_config: Any) -> Setup:
    """Check the engine and open the store.

    Raises:
        DroidKVError: The engine is set up in a way that cannot work, or was never tested.
    """
    settings = ServeSettings.from_table(vllm_config.kv_transfer_config.kv_connector_extra_config)
    check_engine(vllm_config, settings, ARCHITECTURES)
    spec = check_cache(kv_cache_config)
    identity = _identify(vllm_config, settings, vllm_config.model_config.model)
    pair = None
    hidden_layers: tuple[int, ...] = ()
    if settings.role == "sender":
        hidden_layers = needed_hidden_layers(settings, identity)
    else:
        pair = receiver_pair(
            settings, identity, lambda name: _identify(vllm_config, settings, name)
        )
        check_failure_policy(vllm_config, own_tokens_limit(settings, pair.profile))
    store = open_store(settings.store, settings.chunk_tokens)
    return Setup(vllm_config, spec, settings, store, identity, pair, hidden_layers)


def receiver_scheduler(setup: Setup, on_record: Callable[[AuditRecord], None]) -> ReceiverScheduler:
    """A receiver's half in the scheduler."""
    assert setup.pair is not None
    settings, stitch = setup.settings, setup.pair.stitch
    rules = ReceiverRules(
        num_layers=setup.num_layers,
        namespace=setup.namespace,
        stitch_sha256=None if stitch is None else stitch.sha256,
        stitch_starts=frozenset(() if stitch is None else stitch.starts),
        choose=plan_chooser(settings, setup.pair, setup.num_layers),
        lookup_seconds=settings.lookup_seconds,
        load_seconds=settings.load_seconds,
        asynchronous=settings.load == "async",
        tokens_per_step=settings.tokens_per_step,
        timeline=settings.timeline,
        own_tokens=own_tokens_limit(settings, setup.pair.profile),
    )
    return ReceiverScheduler(rules, setup.store, on_record)


def paged_model(setup: Setup, kv_caches: Mapping[str, Tensor]) -> VllmPagedModel:
    """The engine's model and cache."""
    modules = setup.vllm_config.compilation_config.static_forward_context
    return VllmPagedModel(
        setup.vllm_config,
        setup.kv_cache_spec,
        kv_caches,
        model_of({name: modules[name] for name in kv_caches}),
        setup.hidden_layers,
    )


def receiver_worker(setup: Setup, model: VllmPagedModel) -> ReceiverWorker:
    """A receiver's half beside the model."""
    assert setup.pair is not None
    settings = setup.settings
    return ReceiverWorker(
        model,
        setup.store,
        setup.namespace,
        settings.order,
        settings.load_seconds,
        settings.tokens_per_step,
        setup.pair.stitch,
        settings.timeline,
    )


def sender_worker(setup: Setup, model: VllmPagedModel) -> SenderWorker:
    """A sender's half beside the model."""
    return SenderWorker(model, setup.store, setup.namespace, setup.hidden_layers)


def model_ref(name: str, revision: str | None) -> ModelRef:
    """A model as vLLM names it: a folder or a hub id."""
    return ModelRef(str(Path(name).absolute()) if Path(name).is_dir() else name, revision=revision)


def _identify(vllm_config: Any, settings: ServeSettings, name: str) -> Fingerprint:
    config = vllm_config.model_config
    ref = model_ref(name, config.revision if name == config.model else None)
    cache_dtype = vllm_config.cache_config.cache_dtype
    dtype = dtype_name(config.dtype)
    return identify(
        ref,
        dtype,
        dtype if cache_dtype == "auto" else cache_dtype,
        vllm_config.parallel_config.tensor_parallel_size,
        settings.content_hash,
    )
