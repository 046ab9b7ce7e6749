from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from made_profiles import (
    fingerprint,
    item,
    profile,
    profiles,
    record,
    smooth_profile,
    stitch,
)

from droidkv.errors import IdentityError, ProfileError
from droidkv.plan import ReusePlan, all_plans
from droidkv.profile import (
    ModelRecord,
    NoiseFloor,
    Profile,
    TaskRecord,
    profile_from_json,
    profile_to_json,
    read_profile,
    require_identity,
    require_reference,
    write_profile,
)


@given(profiles())
def test_json_round_trip(original: Profile) -> None:
    assert profile_from_json(profile_to_json(original)) == original
    text = json.dumps(profile_to_json(original))
    assert profile_from_json(json.loads(text)) == original


def test_file_round_trip_one_line_per_plan_and_small(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    original = smooth_profile(num_layers=30, num_items=16)
    write_profile(path, original)
    text = path.read_text()
    assert len(text) < 1_000_000
    assert sum(line.startswith('  {"plan":') for line in text.splitlines()) == 901
    first = read_profile(path)
    write_profile(path, first)
    assert path.read_text() == text
    for before, after in zip(original.measurements, first.measurements, strict=True):
        assert after.plan == before.plan
        assert after.kl == pytest.approx(before.kl, rel=1e-5)


def test_a_failed_write_leaves_the_old_profile(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    write_profile(path, profile())
    before = path.read_bytes()
    broken = dataclasses.replace(profile().provenance, packages={"torch": float("nan")})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_profile(path, profile(provenance=broken))
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def edit(*path: str | int, to: Any) -> Callable[[Any], None]:
    def apply(table: Any) -> None:
        for step in path[:-1]:
            table = table[step]
        table[path[-1]] = to

    return apply


def drop(*path: str | int) -> Callable[[Any], None]:
    def apply(table: Any) -> None:
        for step in path[:-1]:
            table = table[step]
        del table[path[-1]]

    return apply


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (edit("schema_version", to=99), "p.json: expected schema_version 1, got 99; update"),
        (edit("schema_version", to=0), "got 0; profile the pair anew"),
        (drop("schema_version"), "p.json: expected 'schema_version' .* missing"),
        (drop("task", "seed"), "p.json, task: expected 'seed' .* missing"),
        (drop("measurements", 3, "kl"), r"p.json, measurements\[3\]: expected 'kl'.*missing"),
        (edit("colour", to=1), "p.json: unknown key 'colour'"),
        (edit("items", 1, "full_scored", to=1.0), r"items\[1\]: unknown key 'full_scored'"),
        (edit("measurements", 2, "kl", 1, to="x"), r"measurements\[2\]: expected kl\[1\]"),
        (edit("measurements", 2, "kl", 1, to=float("nan")), r"\[2\]: .*kl\[1\].*finite.*nan"),
        (edit("measurements", 2, "nll", 0, to=float("inf")), r"\[2\]: .*nll\[0\].*finite.*inf"),
        (edit("measurements", 2, "score", 0, to=1.5), r"score\[0\] .* \[0, 1\], got 1.5"),
        (edit("measurements", 2, "score", 0, to=True), r"score\[0\] to be a number, got True"),
        (edit("measurements", 2, "top1", 0, to=-0.1), r"top1\[0\] .* \[0, 1\], got -0.1"),
        (edit("measurements", 2, "agrees", 0, to=1), r"agrees\[0\] to be true or false"),
        (edit("measurements", 2, "nll", to=[1.0]), r"nll .*like kl, which has 4, got 1"),
        (edit("measurements", 0, "agrees", 3, to=True), r"score\[3\].*agrees\[3\].*got null"),
        (edit("measurements", 2, "plan", to="[1,5)"), r"measurements\[2\]: .*within \[0,4\)"),
        (edit("measurements", 2, "plan", to="3"), r"measurements\[2\]: expected a plan like"),
        (edit("measurements", 2, "plan", to="[0,1)"), r"each plan once, got \[0,1\) twice"),
        (edit("measurements", to={}), "measurements to be a list"),
        (edit("measurements", 0, to=[]), r"measurements\[0\]: expected a table"),
        (edit("items", to=[]), "at least 1 item, got none"),
        (edit("items", 1, "id", to="eval/0/0"), "each item id once, got eval/0/0 twice"),
        (edit("items", 0, "prefix_tokens", to=0), r"items\[0\]: expected prefix_tokens"),
        (edit("items", 0, "prefix_tokens", to=1.0), "prefix_tokens to be a whole number"),
        (edit("num_layers", to=5), "num_layers to be shape.num_layers = 4, got 5"),
        (edit("shape", "head_dim", to=0), "p.json, shape: .*head_dim"),
        (edit("noise_floor", to={"kl": 0.0}), "p.json, noise_floor: expected 'nll'"),
        (edit("noise_floor", to={}), "p.json, noise_floor: expected 'kl'"),
        (edit("sender", "fingerprint", "weights", to="x"), "weights"),
        (drop("receiver", "fingerprint", "rope"), "p.json, receiver, fingerprint: .*'rope'"),
        (edit("stitch", "calibration_ids", to=["a", "eval/0/2"]), "got eval/0/2; fit"),
        (edit("stitch", "file", to="../map.safetensors"), "beside the profile"),
        (edit("stitch", "rank", to=0), "p.json, stitch: expected rank"),
        (edit("provenance", "seconds", to=-1), "p.json, provenance: expected seconds"),
        (edit("provenance", "git_commit", to=7), "git_commit to be a text, got 7"),
    ],
)
def test_a_wrong_field_is_named_with_its_place(change: Callable[[Any], None], message: str) -> None:
    table = copy.deepcopy(profile_to_json(profile()))
    change(table)
    with pytest.raises(ProfileError, match=message):
        profile_from_json(table, "p.json")


def test_every_column_must_have_one_value_per_item() -> None:
    table = profile_to_json(profile())
    for name in ("kl", "nll", "top1", "agrees", "score"):
        table["measurements"][1][name].pop()
    with pytest.raises(ProfileError, match=r"plan \[0,1\): expected one value for each of 4 items"):
        profile_from_json(table)


@pytest.mark.parametrize("end", [0, 1, 500, -20, -2])
def test_a_truncated_file_is_refused(tmp_path: Path, end: int) -> None:
    path = tmp_path / "p.json"
    write_profile(path, profile())
    path.write_text(path.read_text()[:end])
    with pytest.raises(ProfileError, match=str(path)):
        read_profile(path)


def test_a_file_with_nan_or_without_an_object_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    write_profile(path, profile())
    path.write_text(path.read_text().replace('"full_nll":0.25', '"full_nll":NaN', 1))
    with pytest.raises(ProfileError, match="finite number, got NaN"):
        read_profile(path)
    path.write_text("[1]")
    with pytest.raises(ProfileError, match="expected a table"):
        read_profile(path)
    with pytest.raises(ProfileError, match="there is none"):
        read_profile(tmp_path / "none.json")


def test_a_stitched_plan_needs_a_map() -> None:
    stitched = record(ReusePlan.of(1, 2, "stitch"), [1.0])
    assert profile([stitched]).measurements == (stitched,)
    with pytest.raises(ProfileError, match=r"'stitch'.*\[1,2\)\+stitch"):
        profile([stitched], stitch=None)


def test_calibration_items_are_never_evaluated_items() -> None:
    with pytest.raises(ProfileError, match="eval/0/0"):
        profile(stitch=stitch("calib/0/0", "eval/0/0"))


def test_task_options_are_as_json_gives_them_back() -> None:
    task = TaskRecord("records", 1, "exact_match", "eval", 0, {"sizes": (1, 2)})
    assert task.options == {"sizes": [1, 2]}
    with pytest.raises(ProfileError, match="options that JSON can hold"):
        TaskRecord("records", 1, "exact_match", "eval", 0, {"sizes": {1, 2}})


def test_record_of_a_plan() -> None:
    original = profile()
    for plan in all_plans(4):
        assert original.record(plan).plan == plan
    with pytest.raises(ProfileError, match=r"\[1,2\)\+stitch.*has none"):
        original.record(ReusePlan.of(1, 2, "stitch"))


def test_identity_of_both_models_is_required() -> None:
    original = profile()
    sender, receiver, other = fingerprint(10), fingerprint(11), fingerprint(12)
    require_identity(original, sender, receiver)
    with pytest.raises(IdentityError, match=r"profile's sender 'base'[\s\S]*weights"):
        require_identity(original, other, receiver)
    with pytest.raises(IdentityError, match=r"profile's receiver 'tuned'[\s\S]*weights"):
        require_identity(original, sender, other)
    with pytest.raises(IdentityError, match="the other way round"):
        require_identity(original, receiver, sender)
    unknown = dataclasses.replace(receiver, rope=None)
    with pytest.raises(IdentityError, match="rope"):
        require_identity(original, sender, unknown)


def test_the_model_that_losses_are_against_is_required() -> None:
    receiver, reference = fingerprint(11), fingerprint(12)
    require_reference(profile(), receiver)
    shared = profile(reference=ModelRecord("plain", reference))
    require_reference(shared, reference)
    with pytest.raises(IdentityError, match=r"'tuned' that the profile's losses[\s\S]*weights"):
        require_reference(profile(), reference)
    for other in (receiver, fingerprint(13)):
        with pytest.raises(IdentityError, match=r"'plain' that the profile's losses"):
            require_reference(shared, other)


def test_a_self_pair_is_no_swapped_pair() -> None:
    model = profile().sender
    original = profile(receiver=model)
    require_identity(original, fingerprint(10), fingerprint(10))


def test_negative_noise_floor_is_refused() -> None:
    with pytest.raises(ProfileError, match="kl"):
        NoiseFloor(-1e-9, 0, 0, 0)


def test_item_without_an_answer_is_refused() -> None:
    with pytest.raises(ProfileError, match="answer_tokens"):
        dataclasses.replace(item(0), answer_tokens=0)
