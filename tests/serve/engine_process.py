"""An engine in a process of its own: reads what to do as JSON, says what came of it as JSON.

Run as a program: `python engine_process.py SPEC ANSWERS`, two files. Vllm's own worker process is
started or not as the environment says.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, __file__.rpartition("/serve/")[0])


def main(spec_file: str, answers_file: str) -> None:
    from serve.engines import Engine

    spec: dict[str, Any] = json.loads(Path(spec_file).read_text())
    engine = Engine(
        Path(spec["folder"]), spec["role"], spec["store"], spec["options"], **spec["extra"]
    )
    answers = []
    for prompts, plans in spec["batches"]:
        answered = engine.answer(prompts, plans)
        answers += [[logprobs.tolist(), tokens] for logprobs, tokens in answered]
    engine.stop()
    Path(answers_file).write_text(json.dumps(answers))


if __name__ == "__main__":  # a worker process imports this file
    main(*sys.argv[1:])
