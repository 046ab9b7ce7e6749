"""An ICaRus adapter in vLLM, on the items of the accuracy table: the same answers as there?

    make install-serve
    .venv-serve/bin/python experiments/full_share/icarus_engine.py smollm2-records \
        --table experiments/full_share/smollm2-records-960-steps.json

One engine answers every item twice over one prefix cache: first the decoder, then the base, which
hits the blocks of the decoder's request. Scores are put beside those of the table, which the
Hugging Face engine made.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import shlex
import sys
import time
from pathlib import Path
from typing import Any

from droidkv.serve.processes import IN_PROCESS

os.environ |= IN_PROCESS

import vllm

from droidkv.content import adapter_sha256
from droidkv.encode import encode
from droidkv.errors import ProfileError
from droidkv.jsonio import read_json, write_json
from droidkv.model_identity import load_config, load_tokenizer
from droidkv.pair import ModelRef, read_pair
from droidkv.provenance import provenance
from droidkv.servable import servable_folder
from droidkv.serve.icarus import IcarusSettings
from droidkv.serve.icarus_launch import ask, engine_arguments, engine_environment, pair_decoders
from droidkv.tasks import get_task


def main() -> None:
    """Answer the table's items, and write scores and agreement."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pair", help="the pair of the ordinary fine-tune")
    parser.add_argument("--table", type=Path, required=True, help="what table.py wrote")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    table = read_json(options.table, ProfileError)
    output = options.output or options.table.with_suffix(".vllm.json")
    pair = read_pair(f"{options.pair}-icarus")
    task = get_task(pair.tasks[0].name, **pair.tasks[0].options)
    num_items = table["skip"] + len(table["ids"])
    items = task.items("eval", num_items, options.seed)[table["skip"] :]
    if [item.id for item in items] != table["ids"]:
        sys.exit(f"{options.table} is of other items; use its seed and task")
    started = time.monotonic()
    base, adapters = pair_decoders([pair])
    if adapter_sha256(adapters[pair.name]) != table["arms"]["icarus"]["adapter"]:
        sys.exit(f"{options.table} is of another adapter than {adapters[pair.name]}")
    folder = servable_folder(base, "float32")
    settings = IcarusSettings({pair.name: str(adapters[pair.name])})
    os.environ |= engine_environment(settings)
    llm = vllm.LLM(
        model=str(folder),
        dtype="float32",
        max_model_len=2048,
        **engine_arguments(settings, load_config(base).architectures[0]),
    )
    tokenizer = load_tokenizer(ModelRef(str(folder.absolute())), folder)
    encoded = [encode(item, tokenizer, pair.chat) for item in items]
    prompts = [{"prompt_token_ids": [*each.prefix_ids, *each.suffix_ids]} for each in encoded]
    rows: dict[str, Any] = {}
    for arm, decoder in (("icarus", pair.name), ("base", None)):
        params = vllm.SamplingParams(
            temperature=0,
            max_tokens=task.max_new_tokens,
            extra_args=None if decoder is None else {"kv_transfer_params": ask(decoder)},
        )
        answers = llm.generate(prompts, params)
        texts = [answer.outputs[0].text.strip() for answer in answers]
        scores = [task.score(item, text) for item, text in zip(items, texts, strict=True)]
        there = table["arms"][arm]["scores"]
        rows[arm] = {
            "scores": scores,
            "mean": sum(scores) / len(scores),
            "mean_in_table": sum(there) / len(there),
            "same_scores": sum(mine == other for mine, other in zip(scores, there, strict=True)),
            "prompt_tokens": sum(len(each["prompt_token_ids"]) for each in prompts),
            "cached_tokens": sum(answer.num_cached_tokens for answer in answers),
        }
        print(f"{arm}: {rows[arm]['mean']:.3f}, in the table {rows[arm]['mean_in_table']:.3f}")
    seconds = time.monotonic() - started
    made = provenance(shlex.join(["python", *sys.argv]), options.seed, "cpu", "float32", seconds)
    key = {"pair": pair.name, "table": options.table.name, "num_items": len(items)}
    write_json(output, {**key, "arms": rows, "provenance": dataclasses.asdict(made)})


if __name__ == "__main__":
    main()
