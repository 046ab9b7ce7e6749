from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import made_profiles
import pytest
from made_profiles import fingerprint, item, record

from droidkv.confirmation import (
    Evidence,
    all_evidence,
    confirmation_path,
    own_evidence,
    refined_path,
    trained_for,
)
from droidkv.errors import ProfileError
from droidkv.plan import ReusePlan
from droidkv.profile import ModelRecord, Profile, write_profile

PROFILE = made_profiles.profile()
FRESH = tuple(item(index) for index in range(50, 56))


def confirmation(**changes: Any) -> Profile:
    """A fitting one: two plans on six fresh items."""
    records = [record(ReusePlan.of(*borders), [1.0] * 6) for borders in ((0, 0), (0, 4))]
    return made_profiles.profile(records, **{"items": FRESH, **changes})


def written(folder: Path, confirmed: Profile) -> Path:
    path = folder / "tiny.json"
    write_profile(path, PROFILE)
    write_profile(confirmation_path(path), confirmed)
    return path


def best_evidence(path: Path, profile: Profile) -> Evidence:
    (only,) = all_evidence(path, profile)
    return only


def refined(**changes: Any) -> Profile:
    """One of a trained map, with two stitched plans, on as many fresh items."""
    trained = dataclasses.replace(
        made_profiles.stitch(),
        file="trained.safetensors",
        sha256=made_profiles.sha(7),
        refined=("[2,3)+stitch",),
    )
    plans = [ReusePlan.of(0, 0), ReusePlan.of(2, 3, "stitch"), ReusePlan.of(0, 4)]
    records = [record(plan, [1.0] * 6) for plan in plans]
    return made_profiles.profile(records, **{"items": FRESH, "stitch": trained, **changes})


def test_a_trained_map_counts_beside_the_confirmation(tmp_path: Path) -> None:
    path = written(tmp_path, confirmation())
    write_profile(refined_path(path), refined())
    first, second = all_evidence(path, PROFILE)
    assert (first.profile, second.profile) == (confirmation(), refined())
    assert second.is_confirmed and "tiny.refined.confirm.json" in second.remark
    stitched = ReusePlan.of(2, 3, "stitch")
    assert second.map_file(stitched) == tmp_path / "trained.safetensors"
    assert first.map_file(stitched) == tmp_path / "tiny.safetensors"
    assert second.map_file(ReusePlan.of(2, 3)) is None
    assert trained_for(stitched, [first, second]) is second
    assert trained_for(ReusePlan.of(1, 3, "stitch"), [first, second]) is None
    assert [each.path for each in all_evidence(refined_path(path), refined())] == [
        refined_path(path)
    ]


def test_a_trained_map_of_other_models_is_left_out_and_named(tmp_path: Path) -> None:
    path = written(tmp_path, confirmation())
    write_profile(refined_path(path), refined(receiver=ModelRecord("tuned", fingerprint(12))))
    evidence = best_evidence(path, PROFILE)
    assert evidence.profile == confirmation()
    assert "tiny.refined.confirm.json is no confirmation" in evidence.remark
    assert (
        f"differs in receiver.weights: run `droidkv refine {path} --overwrite`" in evidence.remark
    )


def test_a_confirmation_beside_the_profile_counts(tmp_path: Path) -> None:
    path = written(tmp_path, confirmation())
    evidence = best_evidence(path, PROFILE)
    assert evidence.path == tmp_path / "tiny.confirm.json"
    assert evidence.profile == confirmation() and evidence.is_confirmed
    assert "6 fresh items" in evidence.remark
    own = own_evidence(path, PROFILE)
    assert (own.path, own.profile, own.is_confirmed) == (path, PROFILE, False)


def test_a_confirmation_of_copied_plans_needs_no_map(tmp_path: Path) -> None:
    path = written(tmp_path, confirmation(stitch=None))
    assert best_evidence(path, PROFILE).is_confirmed


def test_without_a_confirmation_the_profile_counts_and_says_so(tmp_path: Path) -> None:
    path = tmp_path / "tiny.json"
    evidence = best_evidence(path, PROFILE)
    assert evidence.profile is PROFILE and not evidence.is_confirmed
    assert f"droidkv confirm {path}" in evidence.remark


def test_a_confirmation_is_its_own_evidence(tmp_path: Path) -> None:
    evidence = best_evidence(tmp_path / "tiny.confirm.json", confirmation())
    assert evidence.is_confirmed and "6 fresh items" in evidence.remark


def test_a_full_share_profile_chose_no_plan(tmp_path: Path) -> None:
    shared = made_profiles.profile(reference=ModelRecord("tuned", fingerprint(13)))
    evidence = own_evidence(tmp_path / "tiny.json", shared)
    assert evidence.is_confirmed and "chose no plan" in evidence.remark
    assert best_evidence(tmp_path / "tiny.json", shared) == evidence
    path = written(tmp_path, confirmation(reference=shared.reference))
    assert best_evidence(path, shared).path == confirmation_path(path)


def test_losses_against_another_reference_confirm_nothing(tmp_path: Path) -> None:
    shared = made_profiles.profile(reference=ModelRecord("tuned", fingerprint(13)))
    path = written(tmp_path, confirmation())
    assert best_evidence(path, shared).path == path
    assert "differs in reference: run" in best_evidence(path, shared).remark
    path = written(tmp_path, confirmation(reference=ModelRecord("tuned", fingerprint(14))))
    assert "differs in reference.weights" in best_evidence(path, shared).remark
    assert "differs in reference: run" in best_evidence(path, PROFILE).remark


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"pair": "another"}, "pair"),
        ({"sender": ModelRecord("base", fingerprint(12))}, "sender.weights"),
        ({"receiver": ModelRecord("tuned", fingerprint(12))}, "receiver.weights"),
        ({"task": dataclasses.replace(PROFILE.task, seed=1)}, "task.seed"),
        ({"task": dataclasses.replace(PROFILE.task, options={"num_records": 9})}, "task.options"),
        (
            {"stitch": dataclasses.replace(made_profiles.stitch(), sha256=made_profiles.sha(6))},
            "stitch.sha256",
        ),
        ({"items": (*FRESH[:-1], PROFILE.items[0])}, "items"),
    ],
)
def test_a_file_that_confirms_another_profile_does_not_count(
    tmp_path: Path, changes: dict[str, Any], field: str
) -> None:
    evidence = best_evidence(written(tmp_path, confirmation(**changes)), PROFILE)
    assert evidence.profile is PROFILE and not evidence.is_confirmed
    assert f"differs in {field}" in evidence.remark


def test_a_damaged_confirmation_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "tiny.confirm.json").write_text("{")
    with pytest.raises(ProfileError, match="truncated"):
        best_evidence(tmp_path / "tiny.json", PROFILE)
