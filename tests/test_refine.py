from __future__ import annotations

from pathlib import Path

import pytest
import torch
from command_line import SMALL, error_of, run_json
from tiny import NUM_LAYERS, VOCAB_SIZE, tiny_model

from droidkv.capture import capture
from droidkv.errors import StitchError
from droidkv.evaluate import evaluate_plan, full_prefill_states
from droidkv.models import DecoderModel
from droidkv.plan import ReusePlan
from droidkv.profile import read_profile
from droidkv.profile_job import load_map
from droidkv.refine import RefineItem, RefineSettings, _kl, check_refinable, refine_stitch
from droidkv.stitch import StitchMap, fit_stitch

PLAN = ReusePlan.of(1, NUM_LAYERS, "stitch")


def made_items(sender: DecoderModel, receiver: DecoderModel, count: int) -> list[RefineItem]:
    items = []
    for _ in range(count):
        ids = torch.randint(3, VOCAB_SIZE, (24,)).tolist()
        answer, hidden = full_prefill_states(receiver, ids[:20], ids[20:], 4, [])
        captured = capture(sender, answer.prefix_ids[None], hidden_layers=range(1, NUM_LAYERS))
        items.append(RefineItem(answer, captured, hidden))
    return items


def mean_kl(receiver: DecoderModel, stitch: StitchMap, items: list[RefineItem]) -> float:
    each = [evaluate_plan(receiver, i.captured, i.answer, PLAN, stitch).kl for i in items]
    return sum(each) / len(each)


@pytest.fixture(scope="module")
def pair() -> tuple[DecoderModel, DecoderModel, StitchMap]:
    torch.manual_seed(0)
    sender, receiver = tiny_model(), tiny_model(noise=0.03)
    prefixes = torch.randint(3, VOCAB_SIZE, (8, 20)).tolist()
    return sender, receiver, fit_stitch(sender, receiver, prefixes, rank=4)


# On other items random models gain nothing; real pairs do, see `profiles/*.refined.confirm.json`.
def test_training_brings_answers_nearer_to_the_full_prefill(
    pair: tuple[DecoderModel, DecoderModel, StitchMap],
) -> None:
    sender, receiver, stitch = pair
    items = made_items(sender, receiver, 16)
    weights = {name: weight.clone() for name, weight in receiver.model.named_parameters()}
    asked = [weight.requires_grad for weight in receiver.model.parameters()]
    settings = RefineSettings(steps=60, learning_rate=1e-2)
    seen: list[int] = []
    refined = refine_stitch(
        receiver, stitch, PLAN, items, settings, lambda done, _: seen.append(done)
    )
    before, after = (mean_kl(receiver, each, items) for each in (stitch, refined))
    assert after < 0.8 * before
    assert seen == list(range(1, 61))
    # Only the map of the plan's start has changed; the receiver has not.
    for start in stitch.starts:
        assert torch.equal(stitch.up[start], refined.up[start]) == (start != PLAN.group.start)
    assert asked == [weight.requires_grad for weight in receiver.model.parameters()]
    assert all(torch.equal(weights[n], w) for n, w in receiver.model.named_parameters())
    assert all(weight.grad is None for weight in receiver.model.parameters())


def test_what_is_trained_is_what_is_evaluated(
    pair: tuple[DecoderModel, DecoderModel, StitchMap],
) -> None:
    sender, receiver, stitch = pair
    (item,) = made_items(sender, receiver, 1)
    trained, _ = _kl(receiver, PLAN, stitch, item)
    evaluated = evaluate_plan(receiver, item.captured, item.answer, PLAN, stitch).kl
    assert float(trained.detach()) == pytest.approx(evaluated, rel=1e-3)


def test_the_same_seed_gives_the_same_map(
    pair: tuple[DecoderModel, DecoderModel, StitchMap],
) -> None:
    sender, receiver, stitch = pair
    items = made_items(sender, receiver, 3)
    maps = [
        refine_stitch(receiver, stitch, PLAN, items, RefineSettings(steps=3, seed=seed)).sha256
        for seed in (0, 0, 1)
    ]
    assert maps[0] == maps[1] != maps[2]


@pytest.mark.parametrize(
    "plans", [[], [ReusePlan.of(1, 2)], [PLAN, ReusePlan.of(1, 2, "stitch")]], ids=str
)
def test_plans_no_map_can_be_trained_for_are_refused(plans: list[ReusePlan]) -> None:
    with pytest.raises(StitchError, match="different starts above 0"):
        check_refinable(plans)
    with pytest.raises(StitchError, match="steps >= 1"):
        RefineSettings(steps=0)


def test_the_command_writes_a_map_of_its_own_and_measures_it_on_fresh_items(
    tmp_path: Path,
) -> None:
    run_json("profile", "tiny", *SMALL, "-o", tmp_path / "a.json")
    profile = read_profile(tmp_path / "a.json")
    value = run_json(
        *("refine", tmp_path / "a.json", "--plan", "[1,3)", "--items", 2),
        *("--calibration-items", 3, "--steps", 2),
    )
    output = tmp_path / "a.refined.confirm.json"
    assert value["profile"] == str(output)
    made = read_profile(output)
    assert [str(record.plan) for record in made.measurements] == [
        *("[0,0)", "[0,4)", "[1,3)", "[1,3)+stitch")
    ]
    assert made.stitch is not None and profile.stitch is not None
    assert made.stitch.refined == ("[1,3)+stitch",) and profile.stitch.refined == ()
    assert len(made.stitch.calibration_ids) == 3
    old, new = load_map(tmp_path / "a.json", profile), load_map(output, made)
    assert not torch.equal(old.up[1], new.up[1]) and torch.equal(old.up[2], new.up[2])
    assert not {item.id for item in made.items} & {item.id for item in profile.items}


def test_refining_what_has_no_map_is_refused(tmp_path: Path) -> None:
    run_json("profile", "tiny", *SMALL, "--operator", "copy", "-o", tmp_path / "a.json")
    message = error_of("refine", tmp_path / "a.json", "--plan", "[1,3)")
    assert "stitching map" in message
    assert not list(tmp_path.glob("*.run"))
