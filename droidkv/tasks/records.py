"""Questions over records in context: who lives where, works as what, keeps which pet.

The names of the three splits are disjoint, so no context of one split can occur in another.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from typing import ClassVar

from droidkv.errors import TaskError
from droidkv.tasks.base import Item, Split, Task, stable_seed

_NAMES: dict[Split, tuple[str, ...]] = {
    "train": tuple(
        "Alice Bruno Carla David Elena Felix Grace Hector Irene Jonas Karen Louis Maria "
        "Nadia Oscar Paula Quentin Rosa Simon Tania Ursula Victor Wendy Xavier Yvonne "
        "Zoltan Amber Basil Celia Dario Edith Fabio Greta Hugo Ingrid Jasper Kira Leon Mona "
        "Nils Olive Pedro Rita Stefan Thea Vera Walter Yasmin".split()
    ),
    "calibration": tuple(
        "Abel Brenda Cyril Donna Emil Flora Gavin Hilda Isaac Joyce Kevin Lydia Milton "
        "Norma Otto Petra Ralph Selma Tobias Wanda".split()
    ),
    "eval": tuple(
        "Anton Bella Conrad Daisy Ernest Fiona George Helen Igor Julia Kurt Laura Marcus "
        "Nina Oliver Peter Robert Sarah Thomas Violet Arthur Claire Edgar Judith".split()
    ),
}
_CITIES = tuple(
    "Lisbon Oslo Cairo Lima Paris Tokyo Boston Madrid Dublin Vienna Athens Quebec Nairobi Berlin "
    "Geneva Seoul Delhi Havana Prague Warsaw".split()
)
_JOBS = tuple(
    "baker pilot nurse farmer lawyer painter teacher plumber dentist singer tailor chemist waiter "
    "miner sailor writer dancer butcher judge barber".split()
)
_PETS = tuple(
    "cat dog horse parrot rabbit hamster turtle snake goat pony lizard ferret duck pigeon mouse "
    "spider canary frog donkey sheep".split()
)
_QUESTIONS = (
    ("city", "Where does {name} live?"),
    ("job", "What is the job of {name}?"),
    ("pet", "Which pet does {name} keep?"),
)


@dataclasses.dataclass(frozen=True)
class RecordsTask(Task):
    """One question over a list of short records; the answer is one word in capitals.

    Attributes:
        num_records: Records per context, 1 to 20. Eight make a prefix of about 130 tokens.
        questions_per_context: Questions asked over one context before the next is made.
    """

    name: ClassVar[str] = "records"
    version: ClassVar[int] = 1
    metric: ClassVar[str] = "exact_match"
    max_new_tokens: ClassVar[int] = 12

    num_records: int = 8
    questions_per_context: int = 1

    def __post_init__(self) -> None:
        limit = min(len(pool) for pool in (*_NAMES.values(), _CITIES, _JOBS, _PETS))
        if not 1 <= self.num_records <= limit:
            raise TaskError(f"num_records must be 1 to {limit}, got {self.num_records}.")
        most = self.num_records * len(_QUESTIONS)
        if not 1 <= self.questions_per_context <= most:
            raise TaskError(
                f"questions_per_context must be 1 to {most} for {self.num_records} records, "
                f"got {self.questions_per_context}."
            )

    def generate(self, split: Split, seed: int) -> Iterator[Item]:
        """Yield endless items; see `Task.generate`."""
        rng = random.Random(stable_seed("records", self.version, split, seed))
        context_index = 0
        while True:
            yield from self._context(split, seed, context_index, rng)
            context_index += 1

    def _context(
        self, split: Split, seed: int, context_index: int, rng: random.Random
    ) -> Iterator[Item]:
        columns = [rng.sample(pool, self.num_records) for pool in (_CITIES, _JOBS, _PETS)]
        names = rng.sample(_NAMES[split], self.num_records)
        records = [
            {"name": name, "city": city, "job": job, "pet": pet}
            for name, city, job, pet in zip(names, *columns, strict=True)
        ]
        prefix = "\n".join(
            "{name} lives in {city}, works as a {job} and keeps a {pet}.".format(**record)
            for record in records
        )
        asked = [(record, field, text) for record in records for field, text in _QUESTIONS]
        for index, (record, field, text) in enumerate(
            rng.sample(asked, self.questions_per_context)
        ):
            yield Item(
                id=f"records-{split}-{seed}-{context_index}-{index}",
                prefix=prefix,
                suffix=text.format(name=record["name"]) + " Answer with one word in capitals.",
                answer=record[field].upper(),
            )

    def score(self, item: Item, prediction: str) -> float:
        """1 if the answer is the word in capitals (a final full stop is forgiven), else 0."""
        return float(prediction.strip().rstrip(".") == item.answer)
