"""One engine of vLLM in a process of its own, told by JSON lines what to generate, and timed.

vLLM keeps one connector per process, so that engines which are compared need a process each. Run
by `droidkv.serve.ttft_bench`: `python -m droidkv.serve.vllm_timed < commands > answers`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from droidkv.serve.audit import read_audit
from droidkv.serve.opening import lend_store, open_store
from droidkv.serve.throttled import ThrottledStore

_LENT = "memory://droidkv-throttled"
_FLUSH_SECONDS = 300.0


class TimedEngine:
    """An engine that generates one token at a time.

    Args:
        setup: `folder`, `dtype`, `max_tokens` and, for an engine with the connector, `transfer`
            (the value of `--kv-transfer-config`).
    """

    def __init__(self, setup: Mapping[str, Any]) -> None:
        import vllm

        transfer = setup["transfer"]
        self._throttled: ThrottledStore | None = None
        self._audit: Path | None = None
        options: dict[str, Any] = {}
        if transfer is not None:
            table = transfer["kv_connector_extra_config"]
            self._audit = Path(table["audit"]) if "audit" in table else None
            if table["role"] == "receiver":
                self._throttled = ThrottledStore(
                    partial(open_store, table["store"], table["chunk_tokens"]),
                    table["chunk_tokens"],
                )
                lend_store(_LENT, self._throttled)
                table = {**table, "store": _LENT}
            options["kv_transfer_config"] = {**transfer, "kv_connector_extra_config": table}
        self._sampling = vllm.SamplingParams
        self._llm = vllm.LLM(
            model=setup["folder"],
            dtype=setup["dtype"],
            max_model_len=setup["max_tokens"],
            max_num_batched_tokens=setup["max_tokens"],  # a prefill in one step
            max_num_seqs=4,
            enforce_eager=True,
            async_scheduling=False,
            disable_log_stats=True,
            **options,
        )

    def answer(self, command: Mapping[str, Any]) -> dict[str, Any]:
        """Do what a command says."""
        if command["do"] == "flush":
            from vllm.distributed.kv_transfer import get_kv_transfer_group

            connector = get_kv_transfer_group()
            flushed = connector.flush(_FLUSH_SECONDS)
            return {"flushed": flushed, "present": connector.saved_chunks().get("present", 0)}
        if self._throttled is not None:
            self._throttled.limit(command["bandwidth"])
        asked = command["ask"]
        params = self._sampling(
            max_tokens=1,
            temperature=0,
            ignore_eos=True,
            extra_args=None if asked is None else {"kv_transfer_params": {"droidkv": asked}},
        )
        prompt = {"prompt_token_ids": command["prompt"], "cache_salt": command["salt"]}
        began = time.perf_counter()
        self._llm.generate([prompt], params, use_tqdm=False)
        seconds = time.perf_counter() - began
        record = None
        if self._audit is not None and asked is not None:
            record = read_audit(self._audit)[-1].to_json()
        return {"seconds": seconds, "record": record}


def main() -> None:
    """Read a setup and then commands from stdin, and answer each on stdout."""
    answers: TextIO = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what vLLM prints goes with the log

    def say(value: Mapping[str, Any]) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    engine = TimedEngine(json.loads(sys.stdin.readline()))
    import torch

    say({"threads": torch.get_num_threads()})
    for line in sys.stdin:
        say(engine.answer(json.loads(line)))
    os._exit(0)  # threads of vLLM and LMCache would take seconds to end


if __name__ == "__main__":
    main()
