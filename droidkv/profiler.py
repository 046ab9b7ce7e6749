"""From a pair and a task to a profile: every plan on every item.

The flow: fit the stitching map on calibration items; sweep each evaluated item; decode the
diverging plans whose score the frontier needs; assemble. Each step is kept in a run folder beside
the output, so a killed run resumes and several processes calling `profile_pair` share the work.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from droidkv.confirmation import require_unconfirmed, shared_map
from droidkv.estimate import estimate_items, sweep_prefills
from droidkv.loading import load_pair, load_reference
from droidkv.pair import Pair, TaskRef
from droidkv.plan import ReusePlan
from droidkv.profile import Profile, map_path, read_profile, write_profile
from droidkv.profile_job import Job, ProfileSettings, load_map
from droidkv.refine import RefineItem, RefineSettings, check_refinable, refine_stitch
from droidkv.run_folder import Progress, RunFolder, no_progress
from droidkv.stitch import StitchMap, fit_stitch
from droidkv.tasks import get_task


def profile_pair(
    pair: Pair,
    settings: ProfileSettings,
    output: Path,
    on_progress: Progress = no_progress,
    command: str = "",
    on_estimate: Callable[[float], None] | None = None,
) -> Profile:
    """Profile a pair on a task, and write the profile and its stitching map.

    Args:
        pair: The ordered pair.
        settings: What is measured.
        output: The profile's file, `NAME.json`; the map is written beside it as
            `NAME.stitch.safetensors`, and an unfinished run lies in `NAME.run/`.
        on_progress: Told after each step.
        command: What reproduces this, for the provenance.
        on_estimate: Told, before the sweep, about how many seconds it will take.

    Raises:
        ProfileError: An unfinished run with other settings lies in the way.
        DroidKVError: The pair, task or models are wrong; nothing was written.
    """
    started = time.monotonic()
    task = get_task(settings.task.name, **settings.task.options)
    sender, receiver = load_pair(pair, settings.dtype, settings.device)
    reference = load_reference(pair, receiver, settings.dtype, settings.device)
    job = Job(pair, settings, task, sender, receiver, reference)
    folder = RunFolder(output.with_suffix(".run"), job.key())
    estimate_items(
        job,
        folder.missing("sweep", len(job.items)),
        lambda item: sweep_prefills(item, job.plans, receiver.model.num_layers),
        on_estimate,
    )

    def measure() -> Profile:
        stitch = get_map(job, folder, on_progress) if job.stitches else None
        swept = folder.complete(
            "sweep", len(job.items), lambda i: job.sweep_item(i, stitch), on_progress
        )
        wanted = job.plans_to_decode(swept)
        scores = folder.complete(
            "decode",
            len(job.items),
            lambda i: job.decode_item(i, swept[i], wanted, stitch),
            on_progress,
        )
        map_file = keep_map(job, stitch, output) if stitch is not None else None
        profile = job.assemble(swept, scores, map_file, command, started)
        write_profile(output, profile)
        return profile

    return folder.finish(output, measure, read_profile)


def keep_map(job: Job, stitch: StitchMap, output: Path) -> Path:
    """The map's file beside the output: the confirmed profile's own where that lies there too."""
    if job.confirmed is not None and not job.settings.refine:
        shared = shared_map(output, Path(job.settings.confirms or ""), job.confirmed)
        if shared is not None:
            return shared
    map_file = map_path(output)
    stitch.save(map_file)
    return map_file


def confirm_plans(
    pair: Pair,
    profile_file: Path,
    plans: Sequence[ReusePlan],
    num_items: int,
    output: Path,
    on_progress: Progress = no_progress,
    command: str = "",
    on_estimate: Callable[[float], None] | None = None,
) -> Profile:
    """Measure a few plans of a profile on items that did not choose them.

    The best of many plans looks better on the items that chose it than on others; an interval
    without that bias needs fresh items. The full and the empty plan are always measured too.

    Args:
        pair: The pair of the profile.
        profile_file: The profile whose plans are confirmed; its stitching map lies beside it.
        plans: Plans to measure.
        num_items: Fresh items.
        output: The file of the new profile.
        on_progress: Told after each step.
        command: What reproduces this.
        on_estimate: Told, before the sweep, about how many seconds it will take.

    Raises:
        IdentityError: The pair's models are not those of the profile.
        ProfileError: It is a confirmation itself.
        TaskError: The task has no fresh item left.
    """
    settings = _fresh_settings(profile_file, plans, num_items)
    return profile_pair(pair, settings, output, on_progress, command, on_estimate)


def refine_plans(
    pair: Pair,
    profile_file: Path,
    plans: Sequence[ReusePlan],
    num_items: int,
    output: Path,
    refine_items: int,
    refine_steps: int,
    on_progress: Progress = no_progress,
    command: str = "",
    on_estimate: Callable[[float], None] | None = None,
) -> Profile:
    """Train a profile's map for a few stitched plans, and confirm these on fresh items.

    Args:
        pair: As in `confirm_plans`.
        profile_file: The profile whose map the training starts from.
        plans: Stitched plans of different starts; their copied twins are measured too.
        num_items: Fresh items.
        output: The file of the new profile; the trained map is written beside it.
        refine_items: Calibration items to train on; never evaluated ones.
        refine_steps: Steps per plan.
        on_progress: Told after each step.
        command: What reproduces this.
        on_estimate: Told, before the sweep, about how many seconds it will take.

    Raises:
        StitchError: The profile has no map, or the plans are not such.
        IdentityError, ProfileError, TaskError: As `confirm_plans`.
    """
    require_unconfirmed(profile_file)
    check_refinable(plans)
    load_map(profile_file, read_profile(profile_file))  # refused before anything is written
    twins = [ReusePlan.of(plan.group.start, plan.group.stop) for plan in plans]
    settings = dataclasses.replace(
        _fresh_settings(profile_file, [*plans, *twins], num_items),
        refine=tuple(map(str, plans)),
        refine_items=refine_items,
        refine_steps=refine_steps,
    )
    return profile_pair(pair, settings, output, on_progress, command, on_estimate)


def _fresh_settings(
    profile_file: Path, plans: Sequence[ReusePlan], num_items: int
) -> ProfileSettings:
    """Settings that measure a few plans of a profile, and both baselines, on other items."""
    require_unconfirmed(profile_file)
    profile = read_profile(profile_file)
    baselines = [ReusePlan.of(0, 0), ReusePlan.of(0, profile.num_layers)]
    kept = sorted({*plans, *baselines})
    stitch = profile.stitch
    return ProfileSettings(
        task=TaskRef(profile.task.name, profile.task.options),
        num_items=num_items,
        seed=profile.task.seed,
        operators=tuple(sorted({plan.operator for plan in kept})),
        decode="all",
        calibration_items=len(stitch.calibration_ids) if stitch else 1,
        rank=stitch.rank if stitch else 1,
        ridge=stitch.ridge if stitch else 1e-3,
        confirms=str(profile_file),
        plans=tuple(map(str, kept)),
        dtype=profile.provenance.dtype,
        device=profile.provenance.device,
    )


def get_map(job: Job, folder: RunFolder, on_progress: Progress) -> StitchMap:
    """The confirmed profile's map, or one fitted once per run by whichever process is first."""
    file = folder.path / "map.safetensors"

    def fit(_: int) -> dict[str, str]:
        if job.confirmed is not None:
            stitch = load_map(Path(job.settings.confirms or ""), job.confirmed)
            if job.settings.refine:
                stitch = _refined(job, folder, stitch, on_progress)
        else:
            total = len(job.calibration)
            done = itertools.count(1)
            stitch = fit_stitch(
                job.sender.model,
                job.receiver.model,
                [list(job.encode(item).prefix_ids) for item in job.calibration],
                job.settings.rank,
                job.settings.ridge,
                on_prefix=lambda _: on_progress("stitch", next(done), total),
            )
        stitch.save(file)
        return {"sha256": stitch.sha256}

    folder.complete("map", 1, fit)
    return StitchMap.load(file)


def _refined(job: Job, folder: RunFolder, stitch: StitchMap, on_progress: Progress) -> StitchMap:
    """The map, trained at the starts of the plans that the settings name; each plan is kept."""
    plans = [ReusePlan.parse(text, job.receiver.model.num_layers) for text in job.settings.refine]
    files = [folder.path / f"refine-{index:05d}.safetensors" for index in range(len(plans))]
    settings = RefineSettings(steps=job.settings.refine_steps, seed=job.settings.seed)
    total = len(plans) * settings.steps
    items: list[RefineItem] = []

    def train(index: int) -> None:
        for item in job.calibration[len(items) :]:
            items.append(job.refine_item(item, [plan.group.start for plan in plans]))
            on_progress("calibration", len(items), len(job.calibration))

        def on_step(done: int, _: float) -> None:
            on_progress("refine", index * settings.steps + done, total)

        model = job.receiver.model
        refine_stitch(model, stitch, plans[index], items, settings, on_step).save(files[index])

    folder.complete("refine", len(plans), train)
    for plan, file in zip(plans, files, strict=True):
        stitch = stitch.with_start(StitchMap.load(file), plan.group.start)
    return stitch
