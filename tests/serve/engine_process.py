"""An engine in a process of its own: reads what to do as JSON, says what came of it as JSON.

Run as a program: `python engine_process.py FOLDER`, where `spec.json` lies. Vllm's own worker
process is started or not as the environment says. The process has to end by itself.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, __file__.rpartition("/serve/")[0])
from serve.engines import ENVIRONMENT, Answer, Engine

SECONDS = 500


def run_engine(
    folder: Path, spec: dict[str, Any], environment: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    """Start an engine of `make_models`' in `folder`, let it answer, and wait for its end.

    Args:
        folder: The models'.
        spec: `role`, `store`, `options`, `extra`: as `Engine`; `batches` of prompts and plans.
        environment: Over this one's.
    """
    (folder / "answers.json").unlink(missing_ok=True)
    (folder / "spec.json").write_text(json.dumps(spec))
    unseeded = {k: v for k, v in os.environ.items() if k != "PYTHONHASHSEED"}
    return subprocess.run(
        [sys.executable, __file__, str(folder)],
        env={**unseeded, **ENVIRONMENT, "TMPDIR": str(folder), **environment},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )


def answers_of(folder: Path) -> list[Answer]:
    """What the engine answered, batch after batch."""
    table = json.loads((folder / "answers.json").read_text())
    return [(torch.tensor(logprobs), tokens) for logprobs, tokens in table]


def main(folder: Path) -> None:
    spec: dict[str, Any] = json.loads((folder / "spec.json").read_text())
    engine = Engine(folder, spec["role"], spec["store"], spec["options"], **spec["extra"])
    answers = []
    for prompts, plans in spec["batches"]:
        answered = engine.answer(prompts, plans)
        answers += [[logprobs.tolist(), tokens] for logprobs, tokens in answered]
    engine.stop()
    (folder / "answers.json").write_text(json.dumps(answers))


if __name__ == "__main__":  # a worker process imports this file
    main(Path(sys.argv[1]))
