"""How many KV blocks an engine really holds, read from its own pool. The engine is in this process.

    VLLM_ENABLE_V1_MULTIPROCESSING=0

Works on any `vllm.LLM` with one group of layers, with decoders or without.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from droidkv.errors import ServeError


def held_blocks(llm: Any) -> int:
    """Blocks that running requests hold now, one for all that share it.

    Blocks that are only kept for later hits count as free, as in vLLM.
    """
    manager = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager
    pool = manager.block_pool
    # One block is vLLM's own, for none; it is never in the queue of free ones.
    held: int = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()
    return held


def held_by(
    llm: Any,
    prompts: Sequence[Sequence[int]],
    params: Sequence[Any],
    new_tokens: int,
    loras: Sequence[Any] | None = None,
) -> int:
    """Blocks held once each request's KV are its prompt and `new_tokens` generated tokens.

    All requests run at once and are given up afterwards. One that starts later makes the others
    wait with more tokens of their own, so let the engine have answered a shared prefix before, and
    give it room for all of them in one step.

    Args:
        llm: A `vllm.LLM`; nothing else runs on it meanwhile.
        prompts: Token ids of each request.
        params: Sampling parameters of each; `max_tokens` above `new_tokens + 1`, `ignore_eos` set.
        new_tokens: Generated tokens of each request whose KV are counted.
        loras: vLLM's `LoRARequest` of each request; None = of none.

    Raises:
        ServeError: A request ended before.
    """
    engine = llm.llm_engine
    names = [f"held-{index}" for index in range(len(prompts))]
    loras = [None] * len(prompts) if loras is None else loras
    for name, prompt, each, lora in zip(names, prompts, params, loras, strict=True):
        engine.add_request(name, {"prompt_token_ids": list(prompt)}, each, lora_request=lora)
    generated = dict.fromkeys(names, 0)
    # The KV of a token are written in the step after the one that gave it.
    while min(generated.values()) < new_tokens + 1:
        for output in engine.step():
            generated[output.request_id] = len(output.outputs[0].token_ids)
            if output.finished:
                raise ServeError(
                    f"expected requests that go on past {new_tokens + 1} tokens, got one that "
                    f"ended after {generated[output.request_id]}; raise max_tokens"
                )
    held = held_blocks(llm)
    engine.abort_request(names)
    return held
