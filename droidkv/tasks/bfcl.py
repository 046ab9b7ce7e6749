"""Tool calls with the data of the Berkeley Function Calling Leaderboard (package bfcl-eval).

The prefix holds a few function signatures, the suffix is a user's request, the answer is one call.
Data: the single-call Python sets of bfcl-eval (Apache-2.0), read as package data. Functions are
divided among the splits by name, so no function of one split is seen in another.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.resources
import json
import random
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from droidkv.errors import MissingExtraError, TaskError
from droidkv.tasks.base import Item, Split, Task, split_of, stable_seed
from droidkv.tasks.calls import call_text, matches

_FILES = ("BFCL_v4_simple_python.json", "BFCL_v4_multiple.json", "BFCL_v4_live_simple.json")
_SHARES: dict[Split, int] = {"train": 6, "calibration": 1, "eval": 3}
_MAX_CHARS = {"question": 300, "signature": 280, "answer": 72}
_HEADER = "You can call these functions:"
_ORDER = "\nReply with one function call."


@dataclasses.dataclass(frozen=True)
class _Request:
    """One question of the data set with the function it needs."""

    question: str
    function: str
    signature: str
    answer: str
    parameters: tuple[str, ...]
    allowed: Mapping[str, list[Any]]


@dataclasses.dataclass(frozen=True)
class BfclTask(Task):
    """One function call that answers a request.

    Attributes:
        num_functions: Functions in the prefix, the needed one among them; 1 to 8.
        questions_per_context: Requests put to one prefix, each needing another of its functions;
            at most `num_functions`.
    """

    name: ClassVar[str] = "bfcl"
    version: ClassVar[int] = 1
    metric: ClassVar[str] = "call_match"
    max_new_tokens: ClassVar[int] = 40

    num_functions: int = 3
    questions_per_context: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.num_functions <= 8:
            raise TaskError(f"num_functions must be 1 to 8, got {self.num_functions}.")
        if not 1 <= self.questions_per_context <= self.num_functions:
            raise TaskError(
                f"questions_per_context must be 1 to {self.num_functions} (num_functions), "
                f"got {self.questions_per_context}."
            )

    def generate(self, split: Split, seed: int) -> Iterator[Item]:
        """Yield one item per request; see `Task.generate`.

        The train split is endless: each pass has another order and other functions beside the
        needed one. The others end after one pass.
        """
        requests = _requests()[split]
        rng = random.Random(stable_seed("bfcl", self.version, split, seed))
        num_contexts = 0
        while True:
            for first in rng.sample(requests, len(requests)):
                yield from self._context(
                    f"bfcl-{split}-{seed}-{num_contexts}", first, requests, rng
                )
                num_contexts += 1
            if split != "train":
                return

    def _context(
        self, context_id: str, first: _Request, requests: list[_Request], rng: random.Random
    ) -> Iterator[Item]:
        chosen = {first.function: first}
        while len(chosen) < self.num_functions:
            other = rng.choice(requests)
            chosen.setdefault(other.function, other)
        asked = list(chosen.values())
        shown = rng.sample(asked, len(asked))
        prefix = "\n".join([_HEADER, *(request.signature for request in shown)])
        for index, request in enumerate(asked[: self.questions_per_context]):
            yield Item(
                id=f"{context_id}-{index}",
                prefix=prefix,
                suffix=request.question + _ORDER,
                answer=request.answer,
                metadata={
                    "function": request.function,
                    "parameters": list(request.parameters),
                    "allowed": dict(request.allowed),
                },
            )

    def score(self, item: Item, prediction: str) -> float:
        """1 if the call names the function and every argument has an allowed value, else 0."""
        meta: Mapping[str, Any] = item.metadata
        return float(matches(prediction, meta["function"], meta["parameters"], meta["allowed"]))


@functools.cache
def _requests() -> dict[Split, list[_Request]]:
    """All usable requests by split, in the order of the files."""
    seen: dict[str, Split] = {}
    requests: dict[Split, list[_Request]] = {split: [] for split in _SHARES}
    for file in _FILES:
        for entry, truth in zip(_lines(file), _lines(f"possible_answer/{file}"), strict=False):
            if entry["id"] != truth["id"]:
                raise TaskError(f"bfcl-eval's {file} and its answers differ at {entry['id']!r}.")
            request = _usable(entry, truth["ground_truth"])
            if request is None:
                continue
            split = split_of(request.function, _SHARES)
            # A question may be put to functions of two splits; it stays where it came first.
            if seen.setdefault(request.question, split) == split:
                requests[split].append(request)
    return requests


def _lines(file: str) -> list[dict[str, Any]]:
    try:
        data = importlib.resources.files("bfcl_eval") / "data"
    except ImportError as error:
        # No extra brings it: only its data are used, and its dependencies are many and pinned.
        raise MissingExtraError(
            f"expected the package 'bfcl_eval', but importing it failed ({error}); "
            "install it without its dependencies: pip install --no-deps bfcl-eval"
        ) from error
    text = data.joinpath(*file.split("/")).read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines() if line.strip()]


def _usable(entry: Mapping[str, Any], truth: list[dict[str, Any]]) -> _Request | None:
    """A short single call with plain values asked in one user turn, or None."""
    (turns,) = entry["question"]
    (call,) = truth
    ((function, allowed),) = call.items()
    if len(turns) != 1 or turns[0]["role"] != "user":
        return None
    document = next((doc for doc in entry["function"] if doc["name"] == function), None)
    plain = all(map(_is_plain, allowed.values()))
    if document is None or not plain or not all(allowed.values()):
        return None
    question = " ".join(turns[0]["content"].split())
    signature = _signature(document)
    answer = call_text(function, allowed, question)
    sizes = {"question": len(question), "signature": len(signature), "answer": len(answer)}
    text = question + signature + answer
    if not text.isascii() or any(sizes[part] > most for part, most in _MAX_CHARS.items()):
        return None
    parameters = tuple(document["parameters"]["properties"])
    request = _Request(question, function, signature, answer, parameters, allowed)
    # A name that is no Python name cannot be written as a call.
    return request if matches(answer, function, parameters, allowed) else None


def _is_plain(value: object) -> bool:
    if isinstance(value, list):
        return all(_is_plain(element) for element in value)
    return isinstance(value, str | int | float)


def _signature(document: Mapping[str, Any]) -> str:
    """`area(base: integer, unit: string = optional): Area of a triangle.`"""
    required = document["parameters"].get("required", [])
    parts = []
    for name, spec in document["parameters"]["properties"].items():
        kind = "|".join(map(str, spec["enum"])) if "enum" in spec else spec["type"]
        parts.append(f"{name}: {kind}" + ("" if name in required else " = optional"))
    first_sentence = document["description"].split(". ")[0].strip().rstrip(".")
    return f"{document['name']}({', '.join(parts)}): {first_sentence}."
