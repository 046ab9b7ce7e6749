from __future__ import annotations

import dataclasses
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import droidkv.profile_job
from droidkv.cache import CapturedCache
from droidkv.capture import capture
from droidkv.errors import ProfileError, StitchError
from droidkv.jsonio import sha256_file
from droidkv.loading import load_pair
from droidkv.objectives import measure
from droidkv.pair import TaskRef, read_pair
from droidkv.plan import ReusePlan, all_plans
from droidkv.profile import Profile, read_profile, require_identity
from droidkv.profile_job import ProfileSettings, load_map
from droidkv.profiler import confirm_plans, profile_pair, refine_plans
from droidkv.stitch import StitchMap
from droidkv.tasks import Item, Split
from droidkv.tasks.records import RecordsTask

SETTINGS = ProfileSettings(
    TaskRef("records", {"num_records": 2}), num_items=3, calibration_items=2, rank=4
)


def run(output: Path, settings: ProfileSettings = SETTINGS) -> Profile:
    return profile_pair(read_pair("tiny"), settings, output)


def same_measurements(left: Profile, right: Profile) -> bool:
    return left.items == right.items and left.measurements == right.measurements


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Profile, Path]:
    output = tmp_path_factory.mktemp("profile") / "tiny.json"
    return run(output), output


def test_a_profile_holds_every_plan_and_reads_back(finished: tuple[Profile, Path]) -> None:
    profile, output = finished
    plans = all_plans(profile.num_layers, operators=("copy", "stitch"))
    assert [record.plan for record in profile.measurements] == plans
    read = read_profile(output)
    assert [m.plan for m in read.measurements] == plans
    assert profile.record(ReusePlan.of(0, 0)).kl[0] > 0.01, "naive reuse must hurt"
    full = profile.record(ReusePlan.of(0, profile.num_layers))
    assert max(full.kl) < 1e-4 and all(full.agrees)
    assert len(measure(read, "kl")) == len(plans)
    sender, receiver = load_pair(read_pair("tiny"))
    require_identity(read, sender.fingerprint, receiver.fingerprint)


def test_the_map_lies_beside_the_profile_and_the_run_folder_is_gone(
    finished: tuple[Profile, Path],
) -> None:
    profile, output = finished
    assert profile.stitch is not None
    map_file = output.parent / profile.stitch.file
    assert sha256_file(map_file) == profile.stitch.sha256 == StitchMap.load(map_file).sha256
    assert sorted(path.name for path in output.parent.iterdir()) == [
        "tiny.json",
        "tiny.stitch.safetensors",
    ]


def test_calibration_items_are_never_evaluated_ones(finished: tuple[Profile, Path]) -> None:
    profile, _ = finished
    assert profile.stitch is not None and len(profile.stitch.calibration_ids) == 2
    assert not {item.id for item in profile.items} & set(profile.stitch.calibration_ids)


def test_what_is_decoded(tmp_path: Path) -> None:
    decoded = {}
    for decode in ("none", "frontier", "all"):
        profile = run(tmp_path / f"{decode}.json", dataclasses.replace(SETTINGS, decode=decode))
        decoded[decode] = sum(s is not None for m in profile.measurements for s in m.score)
        total = sum(len(m.score) for m in profile.measurements)
    assert decoded["none"] < decoded["frontier"] < decoded["all"] == total


def test_a_killed_run_resumes_without_redoing_items(
    tmp_path: Path, finished: tuple[Profile, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "tiny.json"
    swept: list[int] = []
    sweep_item = droidkv.profile_job.Job.sweep_item

    def counted(job: object, index: int, stitch: object) -> object:
        if len(swept) == 2:
            raise KeyboardInterrupt
        swept.append(index)
        return sweep_item(job, index, stitch)  # type: ignore[arg-type]

    monkeypatch.setattr(droidkv.profile_job.Job, "sweep_item", counted)
    with pytest.raises(KeyboardInterrupt):
        run(output)
    assert not output.exists() and swept == [0, 1]

    def recorded(job: object, index: int, stitch: object) -> object:
        swept.append(index)
        return sweep_item(job, index, stitch)  # type: ignore[arg-type]

    monkeypatch.setattr(droidkv.profile_job.Job, "sweep_item", recorded)
    profile = run(output)
    assert swept == [0, 1, 2]
    assert same_measurements(profile, finished[0])


def test_a_run_does_not_go_on_with_other_items(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the same names, as in a file that was edited meanwhile."""
    output = tmp_path / "tiny.json"
    monkeypatch.setattr(droidkv.profile_job.Job, "sweep_item", _interrupt)
    with pytest.raises(KeyboardInterrupt):
        run(output)
    monkeypatch.undo()
    generate = RecordsTask.generate

    def edited(task: RecordsTask, split: Split, seed: int) -> Iterator[Item]:
        for item in generate(task, split, seed):
            yield dataclasses.replace(item, answer="EDITED")

    monkeypatch.setattr(RecordsTask, "generate", edited)
    with pytest.raises(ProfileError, match="items: this run has sha256"):
        run(output)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def test_an_estimate_counts_what_is_missing_and_costs_no_second_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answered: list[str] = []
    monkeypatch.setattr("droidkv.estimate.prefill_seconds", lambda *_: 1.0)
    answer = droidkv.profile_job.Job._answer

    def counted(job: droidkv.profile_job.Job, item: Item) -> object:
        answered.append(item.id)
        if len(answered) == 3:
            raise KeyboardInterrupt
        return answer(job, item)

    monkeypatch.setattr(droidkv.profile_job.Job, "_answer", counted)
    output = tmp_path / "tiny.json"
    told: list[float] = []
    with pytest.raises(KeyboardInterrupt):
        profile_pair(read_pair("tiny"), SETTINGS, output, on_estimate=told.append)
    profile_pair(read_pair("tiny"), SETTINGS, output, on_estimate=told.append)
    first, second, third, again = answered
    assert again == third and len({first, second, third}) == 3
    whole, rest = told
    assert rest == pytest.approx(whole / 3, rel=0.1)


def test_a_run_with_other_settings_is_not_mixed_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(droidkv.profile_job.Job, "sweep_item", interrupted)
        run(tmp_path / "tiny.json")
    with pytest.raises(ProfileError, match=r"settings\.seed.*\n.*Delete the folder"):
        run(tmp_path / "tiny.json", dataclasses.replace(SETTINGS, seed=1))
    plain = dataclasses.replace(read_pair("tiny"), chat=not read_pair("tiny").chat)
    with pytest.raises(ProfileError, match=r"chat: .*\n.*Delete the folder"):
        profile_pair(plain, SETTINGS, tmp_path / "tiny.json")


def test_workers_share_a_run_and_survive_the_death_of_one(
    tmp_path: Path, finished: tuple[Profile, Path]
) -> None:
    output = tmp_path / "tiny.json"
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=run, args=(output,)) for _ in range(2)]
    for worker in workers:
        worker.start()
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob("tiny.run/sweep-*")) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert workers[0].pid is not None
    os.kill(workers[0].pid, signal.SIGKILL)
    for worker in workers:
        worker.join(120)
    assert workers[1].exitcode == 0
    assert same_measurements(read_profile(output), read_profile(finished[1]))


def test_who_is_overtaken_takes_what_the_other_process_wrote(
    tmp_path: Path, finished: tuple[Profile, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between sweeping and decoding another process does all the rest."""
    output = tmp_path / "tiny.json"
    plans_to_decode = droidkv.profile_job.Job.plans_to_decode

    def overtaken(job: droidkv.profile_job.Job, swept: Sequence[dict[str, Any]]) -> object:
        monkeypatch.undo()
        run(output)
        return plans_to_decode(job, swept)

    monkeypatch.setattr(droidkv.profile_job.Job, "plans_to_decode", overtaken)
    profile = run(output)
    assert profile == read_profile(output) and same_measurements(profile, read_profile(finished[1]))
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "tiny.json",
        "tiny.stitch.safetensors",
    ]


def test_results_that_are_no_numbers_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the sender overflows in half precision."""

    def overflowing(*arguments: Any, **options: Any) -> CapturedCache:
        captured = capture(*arguments, **options)
        captured.values[-1].fill_(float("nan"))
        return captured

    monkeypatch.setattr(droidkv.profile_job, "capture", overflowing)
    with pytest.raises(ProfileError, match=r"plan \[0,0\) on the item \S+, got KL nan and NLL nan"):
        run(tmp_path / "tiny.json")
    assert not list(tmp_path.glob("tiny.run/sweep-*.json"))


def test_bad_settings_are_refused() -> None:
    with pytest.raises(ProfileError, match="num_items >= 1"):
        dataclasses.replace(SETTINGS, num_items=0)
    with pytest.raises(ProfileError, match="at least one operator"):
        dataclasses.replace(SETTINGS, operators=())
    with pytest.raises(ProfileError, match="Known: all, frontier, none"):
        dataclasses.replace(SETTINGS, decode="some")  # type: ignore[arg-type]


def test_a_plan_is_confirmed_on_items_that_did_not_choose_it(
    finished: tuple[Profile, Path], tmp_path: Path
) -> None:
    profile, file = finished
    plans = [ReusePlan.of(1, 3), ReusePlan.of(1, 3, "stitch")]
    confirmed = confirm_plans(read_pair("tiny"), file, plans, 4, tmp_path / "confirm.json")
    assert load_map(tmp_path / "confirm.json", confirmed).rank == 4
    beside = confirm_plans(read_pair("tiny"), file, plans, 1, file.with_name("tiny.confirm.json"))
    assert beside.stitch is not None and beside.stitch.file == "tiny.stitch.safetensors"
    assert {m.plan for m in confirmed.measurements} == {
        *plans,
        ReusePlan.of(0, 0),
        ReusePlan.of(0, profile.num_layers),
    }
    assert len(confirmed.items) == 4
    assert not {item.id for item in confirmed.items} & {item.id for item in profile.items}
    assert confirmed.stitch is not None and profile.stitch is not None
    assert confirmed.stitch.sha256 == profile.stitch.sha256
    assert confirmed.stitch.calibration_ids == profile.stitch.calibration_ids
    assert all(score is not None for m in confirmed.measurements for score in m.score)


@pytest.mark.parametrize(("questions", "num_known"), [(2, 0), (6, 2)])
def test_items_over_other_texts_are_fresher(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, questions: int, num_known: int
) -> None:
    task = TaskRef("records", {"num_records": 2, "questions_per_context": questions})
    settings = ProfileSettings(task, num_items=1, granularity=4, operators=("copy",))
    profile = run(tmp_path / "tiny.json", settings)
    plans = [ReusePlan.of(0, 0)]
    confirmed = confirm_plans(
        read_pair("tiny"), tmp_path / "tiny.json", plans, 2, tmp_path / "tiny.confirm.json"
    )
    known = [item for item in confirmed.items if item.group == profile.items[0].group]
    assert len(confirmed.items) == 2 and len(known) == num_known
    assert (f"{num_known} items ask about a text" in caplog.text) == (num_known > 0)


@pytest.mark.parametrize("name", ["tiny.confirm.json", "tiny.refined.confirm.json"])
def test_a_confirmation_cannot_be_confirmed(
    finished: tuple[Profile, Path], tmp_path: Path, name: str
) -> None:
    """The items that chose its plans are not those it holds."""
    file = tmp_path / name
    file.write_bytes(finished[1].read_bytes())
    pair, plans = read_pair("tiny"), [ReusePlan.of(1, 3, "stitch")]
    says = rf"itself, {tmp_path}/tiny\.json"
    with pytest.raises(ProfileError, match=says):
        confirm_plans(pair, file, plans, 1, tmp_path / "new.json")
    with pytest.raises(ProfileError, match=says):
        refine_plans(pair, file, plans, 1, tmp_path / "new.json", 1, 1)


def test_a_map_that_was_not_measured_is_refused(
    finished: tuple[Profile, Path], tmp_path: Path
) -> None:
    profile, file = finished
    assert profile.stitch is not None
    other = tmp_path / file.name
    other.write_bytes(file.read_bytes())
    changed = StitchMap.load(file.parent / profile.stitch.file)
    changed.bias[1].add_(1.0)
    changed.save(tmp_path / profile.stitch.file)
    with pytest.raises(StitchError, match="restore it or profile anew"):
        load_map(other, profile)
