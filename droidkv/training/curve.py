"""The learning curve of a training run: loss by step, on what is learned and on held-out items."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from droidkv.errors import PairError
from droidkv.fields import Fields
from droidkv.jsonio import read_json, write_json
from droidkv.records import rounded

CURVE_FILE = "curve.json"
SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Curve:
    """Losses in nats per answer token.

    Attributes:
        mode: What the receiver read (see `Recipe.mode`).
        train: `(step, loss)` after every optimiser step, on that step's items.
        held_out: `(step, loss)` whenever the run was evaluated, on items of another split; the mean
            of its batches.
        held_out_items: How many these are.
        seconds: Of the run that finished, preparation included.
        command: What was run; empty if it was no command.
    """

    mode: str
    train: tuple[tuple[int, float], ...]
    held_out: tuple[tuple[int, float], ...]
    held_out_items: int
    seconds: float
    command: str = ""

    @classmethod
    def of_log(cls, mode: str, log: Iterable[Mapping[str, Any]], **rest: Any) -> Curve:
        """From the log that transformers' Trainer keeps in its state."""
        entries = list(log)
        return cls(
            mode=mode,
            train=tuple((e["step"], rounded(e["loss"])) for e in entries if "loss" in e),
            held_out=tuple(
                (e["step"], rounded(e["eval_loss"])) for e in entries if "eval_loss" in e
            ),
            **rest,
        )

    def mean_loss(self, part: slice) -> float:
        """Mean training loss over some of the steps."""
        losses = [loss for _, loss in self.train[part]]
        return sum(losses) / len(losses)

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the curve as JSON.

        Raises:
            StorageError: The file could not be written.
        """
        write_json(path, {"schema_version": SCHEMA_VERSION, **asdict(self)}, indent=None)

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Curve:
        """Read what `write` wrote.

        Raises:
            PairError: It is no learning curve.
            StorageError: It could not be read.
        """
        where = str(path)
        fields = Fields(read_json(path, PairError), where, PairError)
        fields.take_version(SCHEMA_VERSION, "train anew")
        curve = cls(
            mode=fields.take("mode", str),
            train=_points(fields, "train", where),
            held_out=_points(fields, "held_out", where),
            held_out_items=fields.take("held_out_items", int, minimum=0),
            seconds=fields.take("seconds", float, minimum=0.0),
            command=fields.take("command", str),
        )
        fields.done()
        return curve


def _points(fields: Fields, name: str, where: str) -> tuple[tuple[int, float], ...]:
    points = []
    for row in fields.take_list(name, list):
        if len(row) != 2 or not isinstance(row[0], int) or not isinstance(row[1], int | float):
            raise PairError(f"{where}: expected rows of a step and a loss in {name}, got {row}")
        points.append((row[0], float(row[1])))
    return tuple(points)
