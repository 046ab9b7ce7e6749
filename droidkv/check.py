"""One thing that `droidkv doctor` looked at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Check:
    """One thing that was looked at.

    Attributes:
        name: What.
        status: `ok`, `warn` (something will not work, or slowly) or `fail` (nothing will).
        found: What is there.
        advice: What to do; empty where nothing need be done.
    """

    name: str
    status: Status
    found: str
    advice: str = ""
