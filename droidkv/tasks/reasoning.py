"""Tasks of the reasoning-gym package whose question stands after a shared text.

Items come from the package's own generators and are scored by its own verifiers.
"""

from __future__ import annotations

import dataclasses
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

from droidkv.errors import TaskError, require_extra, unknown_name
from droidkv.tasks.base import Item, Split, Task, split_of, stable_seed

_SHARES: dict[Split, int] = {"train": 6, "calibration": 2, "eval": 2}
_CHUNK = 256


@dataclasses.dataclass(frozen=True)
class _Family:
    """How the package's question text divides into prefix and suffix.

    Attributes:
        question: Matches the suffix within the package's question text.
        config: Options of the package's generator that keep the prefix short.
        ask: Makes a (suffix, answer) of each fact of a prefix; None where it has no such facts.
    """

    question: str
    config: Mapping[str, int]
    ask: Callable[[str], list[tuple[str, str]]] | None = None


def _ask_statements(prefix: str) -> list[tuple[str, str]]:
    """Every question a haystack can answer with one name, in the package's own wording."""
    facts = [statement.split(" ", 1) for statement in prefix.rstrip(". ").split(". ")]
    count = Counter(rest for _, rest in facts)
    return [
        (f"Who {rest}? Reply only with a name.", name) for name, rest in facts if count[rest] == 1
    ]


_FAMILIES: dict[str, _Family] = {
    "family_relationships": _Family(
        r"\n\n(?=[^\n]+\Z)", {"min_family_size": 6, "max_family_size": 8}
    ),
    "needle_haystack": _Family(
        r" ?\n(?=Who [^\n]+\Z)",
        {"min_num_statements": 14, "max_num_statements": 18},
        _ask_statements,
    ),
}


@dataclasses.dataclass(frozen=True)
class ReasoningTask(Task):
    """One reasoning-gym family.

    Attributes:
        family: Name of the data set in reasoning-gym.
        questions_per_context: Questions asked over one prefix before the next is made. The package
            makes one; more are its question put to the other facts of the same prefix.
    """

    name: ClassVar[str] = "reasoning"
    version: ClassVar[int] = 1
    metric: ClassVar[str] = "verifier_score"
    max_new_tokens: ClassVar[int] = 16

    family: str = "needle_haystack"
    questions_per_context: int = 1

    def __post_init__(self) -> None:
        if self.family not in _FAMILIES:
            raise TaskError(unknown_name("reasoning family", self.family, list(_FAMILIES)))
        if self.questions_per_context < 1:
            raise TaskError(
                f"questions_per_context must be at least 1, got {self.questions_per_context}."
            )
        if self.questions_per_context > 1 and _FAMILIES[self.family].ask is None:
            raise TaskError(f"Family {self.family!r} has one question per context; leave it at 1.")

    def generate(self, split: Split, seed: int) -> Iterator[Item]:
        """Yield endless items; see `Task.generate`."""
        family = _FAMILIES[self.family]
        chunk_index = 0
        while True:
            # The package adds an item's index to its seed, so chunks must be far apart.
            chunk_seed = stable_seed("reasoning", self.family, split, seed, chunk_index) >> 8
            dataset = self._dataset(seed=chunk_seed, size=_CHUNK, **family.config)
            for index, entry in enumerate(dataset):
                prefix, suffix = re.split(family.question, entry["question"].strip(), maxsplit=1)
                # Seeds alone do not prove that a text occurs in one split only.
                if split_of(prefix, _SHARES) != split:
                    continue
                questions = [(suffix, str(entry["answer"]))]
                if family.ask and self.questions_per_context > 1:
                    others = [pair for pair in family.ask(prefix) if pair[0] != suffix]
                    random.Random(chunk_seed + index).shuffle(others)
                    questions += others[: self.questions_per_context - 1]
                context = f"{self.family}-{split}-{seed}-{chunk_index * _CHUNK + index}"
                for number, (question, answer) in enumerate(questions):
                    yield Item(f"{context}-{number}", prefix, question, answer)
            chunk_index += 1

    def score(self, item: Item, prediction: str) -> float:
        """The package's own verifier; a final full stop is forgiven."""
        entry = {"answer": item.answer, "question": item.suffix, "metadata": dict(item.metadata)}
        verifier = self._dataset(seed=0, size=1)
        return float(verifier.score_answer(prediction.strip().rstrip("."), entry))

    def _dataset(self, **config: int) -> Any:
        reasoning_gym = require_extra("reasoning_gym", "tasks")
        return reasoning_gym.create_dataset(self.family, **config)
