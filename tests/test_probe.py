from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from made_profiles import fingerprint, item
from tiny import ARCHITECTURES, NUM_LAYERS, VOCAB_SIZE, tiny_model

import droidkv.probe
from droidkv.cache import CapturedCache
from droidkv.capture import capture
from droidkv.errors import PlanError, ProfileError
from droidkv.evaluate import TeacherForced, TokenItem, compare, evaluate_plan, full_prefill_answer
from droidkv.models import DecoderModel
from droidkv.pair import TaskRef, read_pair
from droidkv.plan import ReusePlan
from droidkv.plots import plot_critical_layers
from droidkv.prefill import forward_suffix, partial_prefill
from droidkv.probe import ProbeSettings, compare_probes, probe_item, probe_pair
from droidkv.probe_record import (
    LayerRecord,
    Probe,
    probe_from_json,
    probe_to_json,
    read_probe,
    write_probe,
)
from droidkv.records import ModelRecord, Provenance, TaskRecord

TOLERANCE = 1e-4
SETTINGS = ProbeSettings(TaskRef("records", {"num_records": 2}), num_items=3)


def tokens(n: int) -> list[int]:
    return torch.randint(3, VOCAB_SIZE, (n,)).tolist()


def fixture(
    architecture: str, noise: float = 0.03
) -> tuple[DecoderModel, CapturedCache, TokenItem]:
    sender, receiver = tiny_model(architecture), tiny_model(architecture, noise=noise)
    answered = full_prefill_answer(receiver, tokens(21), tokens(4), 5, {2})
    captured = capture(sender, answered.prefix_ids[None], hidden_layers=range(NUM_LAYERS))
    return receiver, captured, answered


def close(left: TeacherForced, right: TeacherForced) -> bool:
    return (
        left.kl == pytest.approx(right.kl, abs=TOLERANCE)
        and left.nll == pytest.approx(right.nll, abs=TOLERANCE)
        and (left.top1, left.agrees) == (right.top1, right.agrees)
    )


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_recomputing_one_layer_is_the_plan_of_that_layer(architecture: str) -> None:
    receiver, captured, answered = fixture(architecture)
    probed = probe_item(receiver, captured, answered)
    for layer, result in enumerate(probed.recompute_one):
        plan = ReusePlan.of(layer, layer + 1)
        assert close(result, evaluate_plan(receiver, captured, answered, plan)), layer
    assert close(probed.full_reuse, evaluate_plan(receiver, captured, answered, ReusePlan.of(0, 0)))


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "gemma2", "mixtral"])
def test_reusing_one_layer_is_the_full_prefill_with_that_layer_replaced(architecture: str) -> None:
    """Built the other way round: the receiver's own layers put into the sender's cache."""
    receiver, captured, answered = fixture(architecture)
    own = capture(receiver, answered.prefix_ids[None])
    results = probe_item(receiver, captured, answered).reuse_one
    assert len(results) == NUM_LAYERS
    for layer, result in enumerate(results):
        mixed = CapturedCache(
            [captured.keys[i] if i == layer else own.keys[i] for i in range(NUM_LAYERS)],
            [captured.values[i] if i == layer else own.values[i] for i in range(NUM_LAYERS)],
            {},
            captured.axis,
        )
        context = partial_prefill(receiver, answered.prefix_ids[None], mixed, ReusePlan.of(0, 0))
        hidden = forward_suffix(receiver, context, answered.forced_ids)
        assert close(result, compare(hidden, receiver, answered)[0]), layer
    kls = [result.kl for result in results]
    assert max(kls) > 100 * TOLERANCE, "layers must differ for this test to mean anything"


def test_a_sender_that_is_the_receiver_loses_nothing_by_reusing() -> None:
    receiver, captured, answered = fixture("llama", noise=0.0)
    probed = probe_item(receiver, captured, answered)
    for result in (probed.full_reuse, *probed.reuse_one, *probed.recompute_one):
        assert result.kl < TOLERANCE and result.agrees


def test_the_senders_cache_is_left_as_it_was() -> None:
    receiver, captured, answered = fixture("llama")
    before = copy.deepcopy(captured)
    probe_item(receiver, captured, answered)
    for name in ("keys", "values"):
        for left, right in zip(getattr(before, name), getattr(captured, name), strict=True):
            assert torch.equal(left, right)


def test_a_cache_without_e_is_refused() -> None:
    receiver, captured, answered = fixture("llama")
    with pytest.raises(PlanError, match="needs the sender's E"):
        probe_item(receiver, dataclasses.replace(captured, hidden={}), answered)


def test_a_probe_of_a_pair_reads_back(tmp_path: Path) -> None:
    output = tmp_path / "tiny.probe.json"
    steps: list[tuple[str, int, int]] = []
    probe = probe_pair(
        read_pair("tiny"), SETTINGS, output, lambda *step: steps.append(step), "droidkv probe tiny"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.probe.json"]
    assert steps[0] == ("probe", 0, 3) and steps[-1] == ("probe", 3, 3)
    read = read_probe(output)
    assert read.items == tuple(
        dataclasses.replace(i, full_nll=float(f"{i.full_nll:.6g}")) for i in probe.items
    )
    assert read.mean("reuse_one") == pytest.approx(probe.mean("reuse_one"), rel=1e-5)
    assert read.critical_layers() == probe.critical_layers() != []
    assert read.provenance.command == "droidkv probe tiny"
    assert probe.full_reuse_loss() > 0.01, "naive reuse must hurt"
    assert max(probe.mean("reuse_one")) < probe.full_reuse_loss()
    plot_critical_layers(
        read.mean("reuse_one"), read.mean("recompute_one"), tmp_path / "tiny.probe.png"
    )
    assert (tmp_path / "tiny.probe.png").stat().st_size > 1000


def test_a_probe_that_was_stopped_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "tiny.probe.json"
    calls: list[int] = []
    original = droidkv.probe.probe_item

    def stopped_once(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return original(*arguments)

    monkeypatch.setattr(droidkv.probe, "probe_item", stopped_once)
    with pytest.raises(KeyboardInterrupt):
        probe_pair(read_pair("tiny"), SETTINGS, output)
    assert not output.exists()
    with pytest.raises(ProfileError, match="num_items"):
        probe_pair(read_pair("tiny"), dataclasses.replace(SETTINGS, num_items=2), output)
    probe = probe_pair(read_pair("tiny"), SETTINGS, output)
    assert len(calls) == 4, "the two finished items are not probed again"
    monkeypatch.setattr(droidkv.probe, "probe_item", original)
    assert probe_pair(read_pair("tiny"), SETTINGS, output).reuse_one == probe.reuse_one


def test_who_is_overtaken_takes_what_the_other_process_wrote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "tiny.probe.json"

    def overtaken(*_: object) -> None:
        monkeypatch.undo()
        probe_pair(read_pair("tiny"), SETTINGS, output)

    monkeypatch.setattr(droidkv.probe, "estimate_items", overtaken)
    assert probe_pair(read_pair("tiny"), SETTINGS, output) == read_probe(output)
    assert [path.name for path in tmp_path.iterdir()] == [output.name]


def layer(*kls: float) -> LayerRecord:
    return LayerRecord(
        kls, tuple(kl + 0.25 for kl in kls), (1.0,) * len(kls), tuple(kl < 0.5 for kl in kls)
    )


def made(reuse_one: list[LayerRecord], **changes: Any) -> Probe:
    num_items = len(reuse_one[0].kl)
    parts: dict[str, Any] = {
        "pair": "tiny",
        "sender": ModelRecord("base", fingerprint(10)),
        "receiver": ModelRecord("tuned", fingerprint(11)),
        "num_layers": len(reuse_one),
        "task": TaskRecord("records", 1, "exact_match", "eval", 0, {}),
        "items": tuple(item(index) for index in range(num_items)),
        "full_reuse": layer(*(2.0,) * num_items),
        "reuse_one": tuple(reuse_one),
        "recompute_one": tuple(layer(*(1.5,) * num_items) for _ in reuse_one),
        "provenance": Provenance("2025-01-01", "droidkv probe", 0, None, {}, "m", "cpu", "f", 1.0),
    }
    return Probe(**(parts | changes))


def test_critical_layers_are_those_above_the_share() -> None:
    probe = made([layer(0.0, 0.0), layer(0.08, 0.1), layer(0.1, 0.12), layer(0.3, 0.9)])
    assert probe.critical_layers() == [2, 3]
    assert probe.critical_layers(share=0.04) == [1, 2, 3]
    assert probe.critical_layers(share=1.0) == []
    assert probe.critical_layers(loss="disagreement") == [3]
    assert probe.mean("reuse_one", "nll") == pytest.approx(probe.mean("reuse_one"))
    low, high = probe.intervals("reuse_one")[3].low, probe.intervals("reuse_one")[3].high
    assert low == pytest.approx(0.3) and high == pytest.approx(0.9)
    with pytest.raises(ProfileError, match="share above 0"):
        probe.critical_layers(share=0)


def test_probes_of_two_tasks_are_compared() -> None:
    one = made([layer(0.0, 0.0), layer(0.2, 0.2), layer(0.3, 0.1), layer(0.9, 0.9)])
    two = made([layer(0.2), layer(0.1), layer(0.5), layer(0.6)])
    agreement = compare_probes(one, two, share=0.06)
    assert agreement.spearman == pytest.approx(3 / (4.5 * 5) ** 0.5)
    assert agreement.shared_layers == (2, 3)
    assert agreement.critical_overlap == pytest.approx(2 / 4)
    assert agreement.num_items == (2, 1)
    assert one.stability().num_items == 2
    with pytest.raises(ProfileError, match="got 4 and 2"):
        compare_probes(one, made([layer(0.1), layer(0.2)]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema_version": 2}, "expected schema_version 1, got 2"),
        ({"pair": None}, "pair"),
        ({"items": []}, "at least 1 item"),
        ({"num_layers": 3}, "one record for each of 3 layers"),
        ({"extra": 1}, "unknown key 'extra'"),
        ({"full_reuse": {"kl": [1.0], "nll": [1.0, 2.0], "top1": [1.0], "agrees": [True]}}, "nll"),
        ({"full_reuse": {"kl": [1.0], "nll": [1.0], "top1": [1.0], "agrees": [1]}}, "agrees"),
    ],
)
def test_a_file_that_is_no_probe_is_refused(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    file = tmp_path / "p.probe.json"
    write_probe(file, made([layer(0.1), layer(0.2)]))
    table = json.loads(file.read_text())
    file.write_text(json.dumps(table | change))
    with pytest.raises(ProfileError, match=message):
        read_probe(file)


def test_a_probe_survives_its_json() -> None:
    probe = made([layer(0.123456789, 0.2), layer(0.0, 0.01)])
    again = probe_from_json(json.loads(json.dumps(probe_to_json(probe))))
    assert again.reuse_one[1] == probe.reuse_one[1]
    assert again.reuse_one[0].kl == (0.123457, 0.2)
    assert again.sender == probe.sender and again.items == probe.items
