"""A budgeted search over a real pair: what `droidkv.search` evaluates, and what it leaves."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

from droidkv.cache import CapturedCache
from droidkv.capture import capture
from droidkv.evaluate import TeacherForced, TokenItem, evaluate_plan
from droidkv.loading import load_pair
from droidkv.pair import Pair
from droidkv.plan import ReusePlan
from droidkv.profile import Profile, write_profile
from droidkv.profile_job import Job, ProfileSettings
from droidkv.profiler import get_map, keep_map
from droidkv.run_folder import Progress, RunFolder
from droidkv.search import BudgetedSearch, SearchResult, SearchSettings, SearchSpace
from droidkv.tasks import get_task

# Plans race over the items in turn, so a few prefilled items serve most evaluations.
MAX_ITEMS_IN_MEMORY = 8


class SearchRun:
    """One process's part in a search.

    Args:
        pair: The ordered pair.
        settings: As for a profile.
        output: The profile's file; the study and the map lie beside it.
        on_progress: Told after each step.
    """

    def __init__(
        self, pair: Pair, settings: ProfileSettings, output: Path, on_progress: Progress
    ) -> None:
        self._started = time.monotonic()
        self._output = output
        self._on_progress = on_progress
        task = get_task(settings.task.name, **settings.task.options)
        self._job = Job(pair, settings, task, *load_pair(pair, settings.dtype, settings.device))
        self._plans = list(self._job.plans)
        self._memory: OrderedDict[int, tuple[TokenItem, CapturedCache]] = OrderedDict()
        self.study_file = output.with_suffix(".study.db")
        self._folder = RunFolder(output.with_suffix(".run"), self._job.key())
        self._stitch = (
            get_map(self._job, self._folder, on_progress)
            if "stitch" in settings.operators
            else None
        )

    @property
    def num_evaluations(self) -> int:
        """What the exact search would take."""
        return len(self._plans) * len(self._job.items)

    def seconds_per_evaluation(self) -> float:
        """About how long one evaluation takes: that of a middling plan, timed here."""
        by_layers = sorted(self._plans, key=lambda plan: plan.num_recomputed)
        plan = by_layers[len(by_layers) // 2]
        self.evaluate(plan, 0)  # prefills the item
        started = time.monotonic()
        self.evaluate(plan, 0)
        return time.monotonic() - started

    def evaluate(self, plan: ReusePlan, index: int) -> TeacherForced:
        """One plan on one item."""
        item, captured = self._prefilled(index)
        return evaluate_plan(self._job.receiver.model, captured, item, plan, self._stitch)

    def search(
        self,
        budget: int,
        search_settings: SearchSettings,
        first_plans: Sequence[ReusePlan] = (),
    ) -> SearchResult:
        """Search until the study has used up the budget.

        Args:
            budget: Evaluations of a plan on an item.
            search_settings: How to search.
            first_plans: Tried before anything is sampled; those out of the space are left out.
        """
        settings = self._job.settings
        space = SearchSpace(
            self._job.receiver.model.num_layers, settings.operators, settings.granularity
        )
        budgeted = BudgetedSearch(
            space,
            self.evaluate,
            len(self._job.items),
            search_settings,
            self.study_file,
            [plan for plan in first_plans if plan in self._plans],
            identity=self._job.key(),
        )
        return budgeted.run(budget, self._on_progress)

    def write(self, result: SearchResult, command: str) -> Profile:
        """Decode the found plans near the frontier, and write them as a profile."""
        job = self._job
        job.plans = [found.plan for found in result.found]
        swept = [
            job.row(
                index,
                job.answer(index),
                {found.plan: TeacherForced(**vars(found.drifts[index])) for found in result.found},
            )
            for index in range(len(job.items))
        ]
        wanted = job.plans_to_decode(swept)
        scores = []
        for index in range(len(job.items)):
            scores.append(job.decode_item(index, swept[index], wanted, self._stitch))
            self._on_progress("decode", index + 1, len(job.items))
        map_file = keep_map(job, self._stitch, self._output) if self._stitch is not None else None
        profile = job.assemble(swept, scores, map_file, command, self._started)
        write_profile(self._output, profile)
        self._folder.remove()  # other processes have read the map by now; the study stays
        return profile

    def _prefilled(self, index: int) -> tuple[TokenItem, CapturedCache]:
        """An item's answer and the sender's cache, made anew if it was not used for a while."""
        if index not in self._memory:
            item = self._job.answer(index)
            starts = {plan.transition for plan in self._plans if plan.transition is not None}
            self._memory[index] = (
                item,
                capture(self._job.sender.model, item.prefix_ids[None], hidden_layers=starts),
            )
        self._memory.move_to_end(index)
        if len(self._memory) > MAX_ITEMS_IN_MEMORY:
            self._memory.popitem(last=False)
        return self._memory[index]
