"""How close a decoded answer is to a reference: a value in [0, 1], 1 the best."""

from __future__ import annotations

import collections
import decimal
import functools
import re
import string
from collections.abc import Callable, Iterable
from typing import Any

from droidkv.errors import TaskError, require_extra, unknown_name

Metric = Callable[[str, str], float]
"""Takes the prediction, then the reference."""

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
# A hyphen right after a word or number is an operator or a dash, not a sign.
_NUMBER = re.compile(r"(?:(?<![\w)])-)?(?:\d[\d,]*(?:\.\d+)?|\.\d+)", re.ASCII)
_NO_CODE_MARKS = ("`", "#", "//")


def exact_match(prediction: str, reference: str) -> float:
    """1 if the two texts are equal but for blanks at their ends, else 0."""
    return float(prediction.strip() == reference.strip())


def squad_exact_match(prediction: str, reference: str) -> float:
    """Exact match after SQuAD's normalisation: no case, punctuation, articles, extra blanks.

    Source: https://arxiv.org/abs/1606.05250, its evaluation script.
    """
    return float(_squad_tokens(prediction) == _squad_tokens(reference))


def token_f1(prediction: str, reference: str) -> float:
    """F1 over the words of both texts, normalised and counted as in SQuAD.

    Two texts without any word left are equal: 1, as in SQuAD 2.0.
    """
    predicted, referred = _squad_tokens(prediction), _squad_tokens(reference)
    if not predicted or not referred:
        return float(predicted == referred)
    num_common = (collections.Counter(predicted) & collections.Counter(referred)).total()
    return 2 * num_common / (len(predicted) + len(referred))


def rouge_l(prediction: str, reference: str) -> float:
    """F-measure of the longest common subsequence of words, without stemming.

    The package counts words of latin letters and digits only; where a text has none, two texts
    score 1 if they are equal, else 0.

    Raises:
        MissingExtraError: If rouge-score is not installed.
    """
    if prediction.strip() == reference.strip():
        return 1.0
    return float(_rouge_scorer().score(reference, prediction)["rougeL"].fmeasure)


def edit_similarity(prediction: str, reference: str) -> float:
    """Share of characters kept by the best edit of one text into the other (no substitutions).

    Raises:
        MissingExtraError: If rapidfuzz is not installed.
    """
    fuzz = require_extra("rapidfuzz.fuzz", "tasks")
    return float(fuzz.ratio(prediction, reference)) / 100


def line_edit_similarity(prediction: str, reference: str) -> float:
    """Edit similarity of the prediction's first line of code, for next-line completion.

    A line with a comment or code-fence mark is not counted as code, as in LongBench's scores for
    RepoBench-P and LCC (https://arxiv.org/abs/2308.14508). Unlike there, blank lines are not
    either, and indentation is not compared, since chat models drop it. A prediction without a line
    of code is empty.

    Raises:
        MissingExtraError: If rapidfuzz is not installed.
    """
    lines = (line.strip() for line in prediction.split("\n"))
    code = (line for line in lines if line and not any(mark in line for mark in _NO_CODE_MARKS))
    return edit_similarity(next(code, ""), reference.strip())


def number_match(prediction: str, reference: str) -> float:
    """1 if the last number in both texts is the same, as usual for GSM8K, else 0.

    Thousands' commas are dropped and 18.00 is 18. A text without a number matches nothing.
    """
    predicted, referred = _last_number(prediction), _last_number(reference)
    return float(predicted is not None and predicted == referred)


METRICS: dict[str, Metric] = {
    "exact_match": exact_match,
    "squad_exact_match": squad_exact_match,
    "token_f1": token_f1,
    "rouge_l": rouge_l,
    "edit_similarity": edit_similarity,
    "line_edit_similarity": line_edit_similarity,
    "number_match": number_match,
}


def get_metric(name: str) -> Metric:
    """The metric of a name.

    Raises:
        TaskError: If no metric has that name.
    """
    if name not in METRICS:
        raise TaskError(unknown_name("metric", name, METRICS))
    return METRICS[name]


def best_score(metric: Metric, prediction: str, references: Iterable[str]) -> float:
    """The score against the reference that fits best, for items with several right answers.

    Raises:
        TaskError: If there is no reference.
    """
    scores = [metric(prediction, reference) for reference in references]
    if not scores:
        raise TaskError("A score needs at least one reference answer, but there is none.")
    return max(scores)


def _squad_tokens(text: str) -> list[str]:
    return _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split()


def _last_number(text: str) -> decimal.Decimal | None:
    numbers = _NUMBER.findall(text)
    return decimal.Decimal(numbers[-1].replace(",", "")) if numbers else None


@functools.lru_cache(maxsize=1)
def _rouge_scorer() -> Any:
    rouge_scorer = require_extra("rouge_score.rouge_scorer", "tasks")
    return rouge_scorer.RougeScorer(["rougeL"], use_stemmer=False)
