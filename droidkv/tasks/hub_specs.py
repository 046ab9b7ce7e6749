"""Where the papers' data sets lie on the hub, and what is prefix and suffix in their rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from droidkv.errors import TaskError
from droidkv.tasks.base import Split
from droidkv.tasks.row_template import Row, RowTemplate

_PASSAGES_PREFIX = "The following are given passages.\n{context}"
_PASSAGES_SUFFIX = (
    "Answer the question based on the given passages. Give only the answer and no other words.\n"
    "Question: {question}"
)
_TEXT_QA_SUFFIX = (
    "Answer the following question based on the above text. Give only the answer and no other "
    "words.\nQuestion: {input}"
)
_NEXT_LINE = "Write only the next line of this code."


@dataclasses.dataclass(frozen=True, kw_only=True)
class HubSpec:
    """One data set.

    Attributes:
        hub_id: Repository on the hub.
        config: Configuration in the repository.
        archive: A zip file in the repository with one JSONL file per configuration, where the
            repository is no table itself.
        hub_splits: The hub's split from which each of ours draws.
        shares: Weight of each of our splits among those that draw from the same hub split.
        columns: Columns that the rows must have.
        made_columns: Columns that `prepare` adds.
        prepare: Makes the added columns of a row.
        template: How a row becomes prefix, suffix and answer.
        metric: The usual metric of the data set.
        max_new_tokens: Enough to write any answer.
    """

    hub_id: str
    config: str
    archive: str | None = None
    hub_splits: Mapping[Split, str]
    shares: Mapping[Split, int]
    columns: tuple[str, ...]
    made_columns: tuple[str, ...] = ()
    prepare: Callable[[Row], Row] | None = None
    template: RowTemplate
    metric: str
    max_new_tokens: int

    @property
    def config_file(self) -> str:
        """Path of the configuration's file in the archive."""
        return f"data/{self.config}.jsonl"


def _long_bench(
    config: str, *, prefix: str, suffix: str, metric: str, max_new_tokens: int
) -> HubSpec:
    """A data set in the form of LongBench (https://arxiv.org/abs/2308.14508), about 200 rows."""
    return HubSpec(
        hub_id="THUDM/LongBench",
        config=config,
        archive="data.zip",
        hub_splits={"train": "test", "calibration": "test", "eval": "test"},
        # It was made to evaluate with: few rows are spared for the rest.
        shares={"train": 2, "calibration": 2, "eval": 6},
        columns=("context", "input", "answers"),
        template=RowTemplate(prefix, suffix, "answers"),
        metric=metric,
        max_new_tokens=max_new_tokens,
    )


def _passages_qa(config: str) -> HubSpec:
    return _long_bench(
        config,
        prefix=_PASSAGES_PREFIX,
        suffix=_PASSAGES_SUFFIX.format(question="{input}"),
        metric="token_f1",
        max_new_tokens=32,
    )


def _join_passages(row: Row) -> Row:
    """HotpotQA's passages as text; in a row they are parallel lists of titles and sentences."""
    context = row["context"]
    try:
        passages = zip(context["title"], context["sentences"], strict=True)
        texts = [f"{title}\n{''.join(sentences)}" for title, sentences in passages]
    except (KeyError, TypeError, ValueError) as error:
        raise TaskError(
            "The column 'context' must be a table of 'title' (texts) and 'sentences' (lists of "
            f"texts) of one length, got {str(context)[:200]!r}."
        ) from error
    return {
        "passages": [f"Passage {index}:\n{text}" for index, text in enumerate(texts, start=1)],
    }


HUB_SPECS: dict[str, HubSpec] = {
    "hotpotqa": _passages_qa("hotpotqa"),
    "2wikimqa": _passages_qa("2wikimqa"),
    "musique": _passages_qa("musique"),
    "multifieldqa_en": _long_bench(
        "multifieldqa_en",
        prefix="Read the following text.\n{context}",
        suffix=_TEXT_QA_SUFFIX,
        metric="token_f1",
        max_new_tokens=64,
    ),
    "repobench-p": _long_bench(
        "repobench-p",
        prefix="context",
        suffix=f"{{input}}\n{_NEXT_LINE}",
        metric="line_edit_similarity",
        max_new_tokens=64,
    ),
    "lcc": _long_bench(
        "lcc",
        prefix="context",
        suffix=_NEXT_LINE,
        metric="line_edit_similarity",
        max_new_tokens=64,
    ),
    "gov_report": _long_bench(
        "gov_report",
        prefix="Read the following report.\n{context}",
        suffix="Write a one-page summary of the report.",
        metric="rouge_l",
        max_new_tokens=512,
    ),
    "multi_news": _long_bench(
        "multi_news",
        prefix="Read the following news passages.\n{context}",
        suffix="Write a one-page summary of all the news.",
        metric="rouge_l",
        max_new_tokens=512,
    ),
    # The original data set with its training rows, which DroidSpeak's profiles come from.
    "hotpotqa_distractor": HubSpec(
        hub_id="hotpotqa/hotpot_qa",
        config="distractor",
        hub_splits={"train": "train", "calibration": "train", "eval": "validation"},
        shares={"train": 8, "calibration": 2, "eval": 2},
        columns=("context", "question", "answer"),
        made_columns=("passages",),
        prepare=_join_passages,
        template=RowTemplate(
            "The following are given passages.\n{passages}",
            _PASSAGES_SUFFIX,
            "answer",
        ),
        metric="token_f1",
        max_new_tokens=32,
    ),
    "gsm8k": HubSpec(
        hub_id="openai/gsm8k",
        config="main",
        hub_splits={"train": "train", "calibration": "train", "eval": "test"},
        shares={"train": 8, "calibration": 2, "eval": 2},
        columns=("question", "answer"),
        template=RowTemplate(
            "question",
            "Solve this problem step by step. End with '#### ' and the number that is the answer.",
            "answer",
        ),
        metric="number_match",
        max_new_tokens=512,
    ),
}
