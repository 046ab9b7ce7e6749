"""Full-share receivers on the frontier: held against the ordinary fine-tune, at every share."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from pair_files import write_pair

torch = pytest.importorskip("torch")
pytest.importorskip("peft")

from droidkv.errors import IdentityError, PairError, PlanError, ProfileError  # noqa: E402
from droidkv.loading import load_pair  # noqa: E402
from droidkv.pair import Pair, read_pair  # noqa: E402
from droidkv.plan import ReusePlan  # noqa: E402
from droidkv.policy import pick  # noqa: E402
from droidkv.probe import ProbeSettings, probe_pair  # noqa: E402
from droidkv.profile import read_profile  # noqa: E402
from droidkv.profile_job import ProfileSettings  # noqa: E402
from droidkv.profiler import confirm_plans, profile_pair  # noqa: E402
from droidkv.sharing import sharing_curves, sharing_plans  # noqa: E402
from droidkv.sharing_sweep import sharing_sweep  # noqa: E402
from droidkv.training.pairs import full_share_pair, train_pair  # noqa: E402

NONE, FULL = ReusePlan.of(0, 0), ReusePlan.of(0, 3)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Pair]:
    folder = tmp_path_factory.mktemp("pairs")
    recipe = """task = "records"
options = { num_records = 2, questions_per_context = 2 }
steps = 12
learning_rate = 0.02
rank = 4
batch_size = 4"""
    base = "tiny:llama?layers=3"
    path = write_pair(folder / "small.toml", base, base, "./adapters/small", train=recipe)
    plain = read_pair(path)
    found = {"plain": plain}
    for mode in ("prefillshare", "icarus"):
        found[mode] = full_share_pair(plain, mode)
    for pair in found.values():
        train_pair(pair)
    return found


def settings(pair: Pair, **changes: object) -> ProfileSettings:
    base = ProfileSettings(task=pair.tasks[0], num_items=3, calibration_items=2)
    return dataclasses.replace(base, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", ["prefillshare", "icarus"])
def test_its_empty_plan_carries_its_loss_against_the_plain_fine_tune(
    pairs: dict[str, Pair], mode: str, tmp_path: Path
) -> None:
    pair, plain = pairs[mode], pairs["plain"]
    made = profile_pair(pair, settings(pair), tmp_path / "shared.json")
    assert read_profile(tmp_path / "shared.json").reference == made.reference
    assert made.reference is not None and made.stitch is None
    assert [record.plan for record in made.measurements] == [NONE, FULL]
    own = profile_pair(plain, settings(plain, granularity=3), tmp_path / "plain.json")
    assert own.reference is None
    assert made.reference.fingerprint == own.receiver.fingerprint
    assert [item.full_nll for item in made.items] == [item.full_nll for item in own.items]
    assert [item.full_score for item in made.items] == [item.full_score for item in own.items]
    assert made.noise_floor is not None and made.noise_floor.kl < 1e-4
    assert min(made.record(NONE).kl) > 1e-3  # it is another model than the reference
    same = made.record(NONE).kl == pytest.approx(made.record(FULL).kl, abs=1e-4)
    assert same == (mode == "icarus")  # whose own prefill is the base's
    choice = pick(made, objective="kl", max_loss=1e6)
    assert choice.plan == NONE
    assert choice.full.loss == pytest.approx(sum(made.record(FULL).kl) / 3, rel=1e-5)
    assert pick(made, objective="kl", max_loss=0).claim_holds is False
    confirmed = confirm_plans(pair, tmp_path / "shared.json", [NONE], 2, tmp_path / "c.json")
    assert confirmed.reference == made.reference
    other = dataclasses.replace(pair, reference=pair.sender)
    with pytest.raises(IdentityError, match="losses are against"):
        confirm_plans(other, tmp_path / "shared.json", [NONE], 2, tmp_path / "c.json")


def test_without_a_reference_its_own_prefill_is_not_taken_for_one(
    pairs: dict[str, Pair], tmp_path: Path
) -> None:
    pair = dataclasses.replace(pairs["prefillshare"], reference=None)
    with pytest.raises(PairError, match=r"expected a \[reference\] in pair"):
        profile_pair(pair, settings(pair), tmp_path / "x.json")
    load_pair(dataclasses.replace(pairs["icarus"], reference=None))  # its own prefill is the base's


def test_there_are_no_layers_to_choose(pairs: dict[str, Pair], tmp_path: Path) -> None:
    pair = pairs["prefillshare"]
    with pytest.raises(ProfileError, match="no layers to choose"):
        probe_pair(pair, ProbeSettings(task=pair.tasks[0], num_items=2), tmp_path / "probe.json")


def test_a_reference_of_other_tokens_is_refused(pairs: dict[str, Pair], tmp_path: Path) -> None:
    pair = pairs["prefillshare"]
    assert pair.reference is not None
    other = dataclasses.replace(pair.reference, model="tiny:llama?layers=2", adapter=None)
    with pytest.raises(PairError, match="num_hidden_layers"):
        profile_pair(
            dataclasses.replace(pair, reference=other), settings(pair), tmp_path / "x.json"
        )
    assert not list(tmp_path.iterdir())


def test_quality_by_share(pairs: dict[str, Pair], tmp_path: Path) -> None:
    pair = pairs["prefillshare"]
    target = tmp_path / "sharing.json"
    profiles = sharing_sweep(pair, settings(pair), target, num_steps=3)
    assert read_profile(target.with_suffix(".naive.json")).receiver == profiles["naive"].receiver
    curves = sharing_curves(profiles)
    for points in curves.values():
        assert [point.shared_layers for point in points] == [0, 1, 2, 3]
        assert points[-1].share_percent == 100
        assert all(p.interval.low <= p.score <= p.interval.high for p in points)
    assert curves["naive"][0].kl == pytest.approx(0, abs=1e-4)
    assert curves["naive"][3].kl > curves["naive"][0].kl
    sender, receiver = load_pair(pair)
    assert profiles["trained"].receiver.fingerprint == receiver.fingerprint
    assert profiles["naive"].sender.fingerprint == sender.fingerprint
    assert profiles["naive"].items == profiles["trained"].items
    with pytest.raises(PairError, match=r"\[reference\] table"):
        sharing_sweep(pairs["plain"], settings(pair), tmp_path / "x.json")


def test_shares_of_the_layers() -> None:
    assert sharing_plans(4, 2) == [ReusePlan.of(0, 4), ReusePlan.of(2, 4), ReusePlan.of(0, 0)]
    assert len(sharing_plans(3, 10)) == 4
    with pytest.raises(PlanError, match="at least 1 step"):
        sharing_plans(4, 0)
