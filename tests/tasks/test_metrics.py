"""Metrics: known values, and range, identity and symmetry for all texts."""

from __future__ import annotations

import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from droidkv.errors import MissingExtraError, TaskError
from droidkv.tasks import metrics
from droidkv.tasks.metrics import METRICS, best_score, get_metric

pytest.importorskip("rapidfuzz")
pytest.importorskip("rouge_score")

TEXT = st.text(max_size=30) | st.text(alphabet="ab the.,1-`#\n", max_size=30)
SYMMETRIC = [name for name in METRICS if name != "line_edit_similarity"]
# A text without a number has no last number; a comment is no line of code.
EQUAL_TO_ITSELF = [name for name in SYMMETRIC if name != "number_match"]


@pytest.mark.parametrize("name", METRICS)
@settings(deadline=None)
@given(prediction=TEXT, reference=TEXT)
def test_range(name: str, prediction: str, reference: str) -> None:
    score = METRICS[name](prediction, reference)
    assert isinstance(score, float)
    assert 0.0 <= score <= 1.0


@pytest.mark.parametrize("name", EQUAL_TO_ITSELF)
@settings(deadline=None)
@given(text=TEXT)
def test_identity(name: str, text: str) -> None:
    assert METRICS[name](text, text) == 1.0


@pytest.mark.parametrize("name", SYMMETRIC)
@settings(deadline=None)
@given(left=TEXT, right=TEXT)
def test_symmetry(name: str, left: str, right: str) -> None:
    assert METRICS[name](left, right) == pytest.approx(METRICS[name](right, left), abs=1e-12)


@given(number=st.integers(-10_000, 10_000), words=st.text(alphabet="ab =$.", max_size=10))
def test_number_is_found_after_words(number: int, words: str) -> None:
    assert METRICS["number_match"](f"7 then {words} {number}", f"#### {number}") == 1.0
    assert METRICS["number_match"](f"7 then {words} {number}", f"#### {number + 1}") == 0.0


@given(line=st.text(alphabet="ab = ()", max_size=20).filter(str.strip))
def test_line_of_code_is_equal_to_itself(line: str) -> None:
    fenced = f"```python\n# the next line:\n\n    {line}\nmore = 1\n```"
    assert METRICS["line_edit_similarity"](fenced, line) == 1.0


@pytest.mark.parametrize(
    ("name", "prediction", "reference", "expected"),
    [
        ("exact_match", " Rome\n", "Rome", 1),
        ("exact_match", "rome", "Rome", 0),
        ("squad_exact_match", "The  ROME.", "rome", 1),
        ("squad_exact_match", "Rome, Italy", "Rome", 0),
        # 2 common words of 3 and of 4.
        ("token_f1", "cat sat down", "a cat sat up there", 4 / 7),
        ("token_f1", "cat cat", "cat", 2 / 3),
        ("token_f1", "the", "dog", 0),
        ("token_f1", "the", "a", 1),
        # Longest common subsequence: a c d, of 4 and of 5 words.
        ("rouge_l", "a c b d", "a b e c d", 2 * 3 / 9),
        ("rouge_l", "x", "y", 0),
        # 3 of 4 and 3 of 3 characters are kept.
        ("edit_similarity", "abcd", "abc", 6 / 7),
        ("edit_similarity", "ab", "cd", 0),
        ("line_edit_similarity", "x = 1\ny = 2", "x = 1", 1),
        ("line_edit_similarity", "```\n# only a comment\n```", "x = 1", 0),
        ("number_match", "So 1,234.00 apples", "#### 1234", 1),
        ("number_match", "10-4", "4", 1),
        ("number_match", "it is -4", "4", 0),
        ("number_match", "none", "none", 0),
    ],
)
def test_known_values(name: str, prediction: str, reference: str, expected: float) -> None:
    assert METRICS[name](prediction, reference) == pytest.approx(expected)


def test_best_of_several_references() -> None:
    assert best_score(METRICS["token_f1"], "red car", ["blue bus", "red car", "car"]) == 1.0
    with pytest.raises(TaskError, match="at least one reference"):
        best_score(METRICS["token_f1"], "red car", [])


def test_unknown_metric_names_the_known() -> None:
    with pytest.raises(TaskError, match=r"Did you mean 'token_f1'.*rouge_l"):
        get_metric("token_f")


@pytest.mark.parametrize(
    ("name", "module"),
    [("rouge_l", "rouge_score.rouge_scorer"), ("edit_similarity", "rapidfuzz.fuzz")],
)
def test_missing_package_names_the_extra(
    name: str, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    metrics._rouge_scorer.cache_clear()
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtraError, match=r"droidkv\[tasks\]"):
        METRICS[name]("one", "two")
