from __future__ import annotations

import click
import pytest

from droidkv.cli.table import num_bytes, table
from droidkv.cli.units import BANDWIDTH, SECONDS


@pytest.mark.parametrize(
    ("text", "bytes_per_second"),
    [("8", 8), ("10Gbit/s", 1.25e9), ("2 GB/s", 2e9), ("1.5MB", 1.5e6), ("1e3kbit", 125e3)],
)
def test_bandwidth(text: str, bytes_per_second: float) -> None:
    assert BANDWIDTH.convert(text, None, None) == bytes_per_second


def test_seconds() -> None:
    assert SECONDS.convert("500ms", None, None) == SECONDS.convert("0.5", None, None) == 0.5


@pytest.mark.parametrize(
    "text", ["", "fast", "-1", "0", "10Gb/s", "1 parsec", "nan", "inf", "1e999"]
)
def test_what_is_no_bandwidth(text: str) -> None:
    with pytest.raises(click.BadParameter, match="expected a number"):
        BANDWIDTH.convert(text, None, None)


def test_table_aligns_words_left_and_numbers_right() -> None:
    lines = table(("plan", "layers"), [("[0,10)", "10"), ("[0,2)", "2")])
    assert lines == ["plan    layers", "------  ------", "[0,10)      10", "[0,2)        2"]


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (3e12, "3e+03 GB")]
)
def test_num_bytes(count: float, text: str) -> None:
    assert num_bytes(count) == text
