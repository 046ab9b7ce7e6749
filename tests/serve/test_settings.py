from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import made_profiles
import pytest
import torch

from droidkv.calibration_file import MeasuredCalibration, write_calibration
from droidkv.confirmation import Evidence, own_evidence, refined_path
from droidkv.errors import CalibrationError, IdentityError, PlanError, ServeError
from droidkv.identity import Fingerprint
from droidkv.jsonio import write_json
from droidkv.plan import ReusePlan
from droidkv.profile import ModelRecord, Profile, write_profile
from droidkv.records import StitchRecord
from droidkv.serve.settings import (
    ReceiverPair,
    ServeSettings,
    needed_hidden_layers,
    own_tokens_limit,
    plan_chooser,
    receiver_pair,
    with_miss_policy,
)
from droidkv.stitch import StitchMap

SENDER, RECEIVER = made_profiles.fingerprint(10), made_profiles.fingerprint(11)
BASE = {"role": "receiver", "store": "memory://x"}


def settings(**table: Any) -> ServeSettings:
    return ServeSettings.from_table({**BASE, **table})


def profile_file(folder: Path, **changes: Any) -> str:
    path = folder / "tiny.json"
    write_profile(path, made_profiles.profile(**{"stitch": None, **changes}))
    return str(path)


def evidence(profile: Profile) -> Evidence:
    return own_evidence(Path("tiny.json"), profile)


def nobody(name: str) -> Fingerprint:
    raise AssertionError(f"no identity was to be taken of {name}")


def test_defaults() -> None:
    assert settings() == ServeSettings("receiver", "memory://x")


@pytest.mark.parametrize(
    ("table", "named"),
    [
        ({"role": "both"}, "role"),
        ({"stores": "x"}, "stores"),
        ({"chunk_tokens": 0}, "chunk_tokens"),
        ({"order": "first"}, "order"),
        ({"load": True}, "load"),
        ({"profiles": "x.json"}, "profiles"),
        ({"profiles": ["a.json", "b.json"]}, "one profile"),
        ({"load_seconds": 0}, "load_seconds"),
        ({"on_miss": "wait"}, "on_miss"),
        ({"own_tokens": 0}, "own_tokens"),
    ],
)
def test_a_mistake_is_named(table: dict[str, Any], named: str) -> None:
    with pytest.raises(ServeError, match=named):
        settings(**table)


def test_a_receiver_without_a_profile_needs_consent() -> None:
    with pytest.raises(IdentityError, match="allow_unprofiled"):
        receiver_pair(settings(sender="/base"), RECEIVER, lambda name: SENDER)
    pair = receiver_pair(
        settings(sender="/base", allow_unprofiled=True), RECEIVER, lambda name: SENDER
    )
    assert (pair.sender, pair.evidence) == (SENDER, None)
    # A model reuses its own cache as it likes.
    assert receiver_pair(settings(sender="/me"), RECEIVER, lambda name: RECEIVER).evidence is None


def test_a_receiver_must_say_whose_cache() -> None:
    with pytest.raises(ServeError, match="whose caches"):
        receiver_pair(settings(), RECEIVER, nobody)


def test_a_profile_is_consent_for_its_own_pair_only(tmp_path: Path) -> None:
    path = profile_file(tmp_path)
    pair = receiver_pair(settings(profiles=[path]), RECEIVER, nobody)
    assert pair.sender == SENDER
    with pytest.raises(IdentityError, match="weights"):
        receiver_pair(settings(profiles=[path]), SENDER, nobody)
    with pytest.raises(IdentityError, match="weights"):
        receiver_pair(settings(profiles=[path], sender="/x"), RECEIVER, lambda name: RECEIVER)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("cache_dtype", "bfloat16"),
        ("tensor_parallel", 2),
        ("rope", (("rope_theta", 500000),)),
        ("architecture", (("hidden_size", 128), ("model_type", "llama"))),
        ("vocabulary", made_profiles.sha(9)),
    ],
)
def test_caches_of_another_kind_are_refused_by_field(field: str, value: Any) -> None:
    sender = replace(SENDER, **{field: value})
    with pytest.raises(IdentityError, match=field):
        receiver_pair(
            settings(sender="/base", allow_unprofiled=True), RECEIVER, lambda name: sender
        )


def test_a_sender_stores_what_its_receivers_frontiers_need(tmp_path: Path) -> None:
    records = [
        made_profiles.record(ReusePlan.of(0, 0), [0.0] * 4, kl=2.0),
        made_profiles.record(ReusePlan.of(2, 3), [1.0, 1.0, 0.0, 0.0], kl=1.0),
        made_profiles.record(ReusePlan.of(1, 3), [0.0] * 4, kl=3.0),  # dominated
        made_profiles.record(ReusePlan.of(0, 4), [1.0] * 4, kl=0.0),
    ]
    path = profile_file(tmp_path, measurements=records)
    sender = ServeSettings("sender", "memory://x", profiles=(path,), hidden_layers=(3,))
    assert needed_hidden_layers(sender, SENDER) == (2, 3)
    with pytest.raises(IdentityError, match="weights"):
        needed_hidden_layers(sender, RECEIVER)


def test_a_number_that_is_none_is_refused() -> None:
    table = {"role": "receiver", "store": "memory://x", "max_loss": float("nan")}
    with pytest.raises(ServeError, match="max_loss to be a finite number, got nan"):
        ServeSettings.from_table(table)


def test_the_servers_choice_comes_from_the_profile(tmp_path: Path) -> None:
    records = [
        made_profiles.record(ReusePlan.of(0, 0), [0.0] * 4),
        made_profiles.record(ReusePlan.of(2, 3), [1.0] * 4),
        made_profiles.record(ReusePlan.of(0, 4), [1.0] * 4),
    ]
    profile = made_profiles.profile(records, stitch=None)
    pair = ReceiverPair(SENDER, evidence(profile), None)
    choose = plan_chooser(settings(), pair, 4)
    assert choose is not None
    assert choose(1000, 30) == ReusePlan.of(2, 3)
    lossless = made_profiles.profile([records[0], records[2]], stitch=None)
    choose = plan_chooser(settings(), ReceiverPair(SENDER, evidence(lossless), None), 4)
    assert choose is not None
    assert choose(1000, 30) is None


def test_a_calibration_as_calibrate_writes_it_weighs_the_lengths(tmp_path: Path) -> None:
    records = [
        made_profiles.record(ReusePlan.of(0, 0), [1.0] * 4),
        made_profiles.record(ReusePlan.of(0, 4), [1.0] * 4),
    ]
    pair = ReceiverPair(SENDER, evidence(made_profiles.profile(records, stitch=None)), None)
    # A load costs as much as computing thousands of tokens.
    slow = replace(made_profiles.FAST_LOAD, load_fixed_seconds=0.1)
    measured = MeasuredCalibration(slow, made_profiles.SHAPE, (), 1.0, 1.0, 1.0, 4096, 3, {})
    path = write_calibration(measured, tmp_path / "calibration.json")
    choose = plan_chooser(settings(calibration=str(path)), pair, 4)
    assert choose is not None
    assert choose(64, 30) is None
    assert choose(100_000, 30) == ReusePlan.of(0, 0)
    shape = replace(made_profiles.SHAPE, num_layers=40)
    other = replace(slow, shape_digest=shape.digest)
    write_calibration(replace(measured, calibration=other, shape=shape), path)
    with pytest.raises(CalibrationError, match="shape"):
        plan_chooser(settings(calibration=str(path)), pair, 4)
    write_json(path, slow.to_json())
    with pytest.raises(CalibrationError, match=r"calibration\.json"):
        plan_chooser(settings(calibration=str(path)), pair, 4)


def test_a_confirmation_beside_the_profile_decides_on_both_sides(tmp_path: Path) -> None:
    records = [
        made_profiles.record(ReusePlan.of(0, 0), [0.0] * 4, kl=2.0),
        made_profiles.record(ReusePlan.of(2, 3), [1.0] * 4),
        made_profiles.record(ReusePlan.of(1, 3), [1.0] * 4),
        made_profiles.record(ReusePlan.of(0, 4), [1.0] * 4, kl=0.0),
    ]
    path = profile_file(tmp_path, measurements=records)
    fresh = tuple(replace(made_profiles.item(index), id=f"fresh/{index}") for index in range(4))
    records[1] = made_profiles.record(ReusePlan.of(2, 3), [0.0] * 4, kl=2.5)
    confirmed = made_profiles.profile(records, stitch=None, items=fresh)
    write_profile(tmp_path / "tiny.confirm.json", confirmed)
    told = settings(profiles=[path])
    pair = receiver_pair(told, RECEIVER, nobody)
    assert pair.evidence is not None and pair.evidence.profile == confirmed
    choose = plan_chooser(told, pair, 4)
    assert choose is not None
    assert choose(1000, 30) == ReusePlan.of(1, 3)
    sender = ServeSettings("sender", "memory://x", profiles=(path,))
    assert needed_hidden_layers(sender, SENDER) == (1,)


def test_a_plan_of_a_trained_map_brings_its_own_map(tmp_path: Path) -> None:
    records = [
        made_profiles.record(ReusePlan.of(0, 0), [0.0] * 4, kl=2.0),
        made_profiles.record(ReusePlan.of(1, 3), [1.0] * 4),
        made_profiles.record(ReusePlan.of(0, 4), [1.0] * 4, kl=0.0),
    ]
    maps = {name: random_map(seed) for seed, name in enumerate(("fitted", "trained"))}
    kinds = {}
    for name, each in maps.items():
        each.save(tmp_path / f"{name}.safetensors")
        kinds[name] = StitchRecord(f"{name}.safetensors", each.sha256, 2, 0.1, ("calib/0",))
    path = profile_file(tmp_path, measurements=records, stitch=kinds["fitted"])
    fresh = tuple(replace(made_profiles.item(index), id=f"fresh/{index}") for index in range(4))
    records[1] = made_profiles.record(ReusePlan.of(2, 3, "stitch"), [1.0] * 4)
    refined = made_profiles.profile(
        records, items=fresh, stitch=replace(kinds["trained"], refined=("[2,3)+stitch",))
    )
    write_profile(refined_path(Path(path)), refined)
    for told in (settings(profiles=[path]), settings(profiles=[path], plan="[2,3)+stitch")):
        pair = receiver_pair(told, RECEIVER, nobody)
        assert pair.evidence is not None and pair.evidence.profile == refined
        assert pair.stitch is not None and pair.stitch.sha256 == maps["trained"].sha256
        choose = plan_chooser(told, pair, 4)
        assert choose is not None
        assert choose(1000, 30) == ReusePlan.of(2, 3, "stitch")
    other = receiver_pair(settings(profiles=[path], plan="[1,3)+stitch"), RECEIVER, nobody)
    assert other.stitch is not None and other.stitch.sha256 == maps["fitted"].sha256
    sender = ServeSettings("sender", "memory://x", profiles=(path,))
    assert needed_hidden_layers(sender, SENDER) == (2,)


def random_map(seed: int) -> StitchMap:
    random = torch.Generator().manual_seed(seed)
    down, up, bias = (
        {start: torch.randn(*shape, generator=random) for start in (1, 2, 3)}
        for shape in ((64, 2), (2, 64), (64,))
    )
    return StitchMap(down, up, bias)


def test_a_fixed_plan_wins_and_is_checked() -> None:
    pair = ReceiverPair(SENDER, None, None)
    assert plan_chooser(settings(), pair, 4) is None
    choose = plan_chooser(settings(plan="[1,3)"), pair, 4)
    assert choose is not None
    assert choose(1, 1) == ReusePlan.of(1, 3)
    with pytest.raises(PlanError):
        plan_chooser(settings(plan="[1,9)"), pair, 4)


def test_a_receiver_trained_on_the_senders_kv_has_no_own_prefill(tmp_path: Path) -> None:
    trained = made_profiles.profile(
        stitch=None, reference=ModelRecord("fine-tune", made_profiles.fingerprint(12))
    )
    write_profile(tmp_path / "trained.json", trained)
    suffix = max(item.suffix_tokens for item in trained.items)
    asked = settings(profiles=[str(tmp_path / "trained.json")], chunk_tokens=16)
    assert with_miss_policy(asked).on_miss == "error"
    assert own_tokens_limit(asked, trained) == 16 + suffix
    assert own_tokens_limit(replace(asked, own_tokens=40), trained) == 40
    assert own_tokens_limit(replace(asked, on_miss="own"), trained) is None
    usual = settings(profiles=[profile_file(tmp_path)])
    assert with_miss_policy(usual).on_miss == "own"
    assert own_tokens_limit(usual, made_profiles.profile()) is None
    assert own_tokens_limit(replace(usual, on_miss="error"), None) == usual.chunk_tokens
    with pytest.raises(ServeError, match="a chunk"):
        own_tokens_limit(replace(asked, own_tokens=15), trained)
    with pytest.raises(ServeError, match="on_miss = 'error'"):
        own_tokens_limit(replace(usual, own_tokens=300), None)
