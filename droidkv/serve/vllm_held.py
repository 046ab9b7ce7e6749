"""One engine of vLLM in a process of its own that says how many KV blocks it holds for N models.

vLLM keeps one connector per process. Run by `droidkv.serve.memory_bench`:
`python -m droidkv.serve.vllm_held < setup > blocks`.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from droidkv.serve.base_prefix import BasePrefixSettings
from droidkv.serve.base_prefix_launch import engine_arguments, lora_arguments
from droidkv.serve.icarus import IcarusSettings
from droidkv.serve.icarus_launch import ask
from droidkv.serve.icarus_launch import engine_arguments as icarus_arguments
from droidkv.serve.icarus_launch import engine_environment as icarus_environment


class HeldBlocks:
    """An engine whose models all answer behind one prefix.

    Args:
        setup: `mode`, `folder`, `architecture`, `dtype`, `adapters` (name -> folder),
            `block_tokens`, `prefix`, `questions` (one per model), `new_tokens`.
    """

    def __init__(self, setup: Mapping[str, Any]) -> None:
        self._setup = setup
        self._names = list(setup["adapters"])
        adapters = {name: Path(folder) for name, folder in setup["adapters"].items()}
        arguments: dict[str, Any]
        match setup["mode"]:
            case "baseline":
                arguments = lora_arguments(adapters)
            case "prefillshare":
                own_tokens = setup["block_tokens"] + max(map(len, setup["questions"]))
                arguments = engine_arguments(BasePrefixSettings(own_tokens), adapters)
            case _:
                decoders = IcarusSettings(setup["adapters"])
                os.environ.update(icarus_environment(decoders))
                arguments = icarus_arguments(decoders, setup["architecture"])
        import vllm

        num_models = len(adapters)
        per_model = len(setup["prefix"]) + len(setup["questions"][0]) + setup["new_tokens"]
        tokens = per_model + 2 * setup["block_tokens"]
        self._sampling = vllm.SamplingParams
        self._llm = vllm.LLM(
            model=setup["folder"],
            dtype=setup["dtype"],
            block_size=setup["block_tokens"],
            max_model_len=tokens,
            # All requests' prompts in one step, and room for what each keeps to itself.
            max_num_batched_tokens=num_models * tokens,
            num_gpu_blocks_override=2 * num_models * -(-tokens // setup["block_tokens"]),
            max_num_seqs=num_models,
            async_scheduling=False,
            disable_log_stats=True,
            **{"enforce_eager": True, **arguments},
        )

    def counts(self) -> Iterator[int]:
        """Blocks held for the first one, two, ... of the models."""
        from droidkv.serve.vllm_blocks import held_by

        setup, new_tokens = self._setup, self._setup["new_tokens"]
        loras = self._loras()
        self._read_prefix(loras)
        for number in range(1, len(self._names) + 1):
            prompts = [setup["prefix"] + question for question in setup["questions"][:number]]
            params = [self._params(name, new_tokens + 8) for name in self._names[:number]]
            yield held_by(self._llm, prompts, params, new_tokens, loras[:number])

    def _loras(self) -> list[Any]:
        """What each model's requests bring along; None = nothing."""
        if self._setup["mode"] == "icarus":
            return [None] * len(self._names)
        from vllm.lora.request import LoRARequest

        return [
            LoRARequest(name, index, self._setup["adapters"][name])
            for index, name in enumerate(self._names, start=1)
        ]

    def _params(self, name: str, max_tokens: int) -> Any:
        is_icarus = self._setup["mode"] == "icarus"
        extra = {"kv_transfer_params": ask(name)} if is_icarus else None
        return self._sampling(
            max_tokens=max_tokens, temperature=0, ignore_eos=True, extra_args=extra
        )

    def _read_prefix(self, loras: list[Any]) -> None:
        """As it is before a switch: the prefix was read by the base, or else by each model."""
        prompt = {"prompt_token_ids": [*self._setup["prefix"], self._setup["questions"][0][0]]}
        readers = loras if self._setup["mode"] == "baseline" else [None]
        for lora in readers:
            params = self._sampling(max_tokens=1, temperature=0)
            self._llm.generate([prompt], params, use_tqdm=False, lora_request=lora)


def main() -> None:
    """Read a setup from stdin, and write the counts to stdout."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what vLLM prints goes with the log
    for held in HeldBlocks(json.load(sys.stdin)).counts():
        answers.write(f"{held}\n")
        answers.flush()
    os._exit(0)  # threads of vLLM would take seconds to end


if __name__ == "__main__":
    main()
