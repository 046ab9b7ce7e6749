from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command_line import error_of, run, run_json

from droidkv.content import record_base
from droidkv.serve.connector_plan import AuditRecord, Fallback, LoadReport, Span
from droidkv.serve.settings import ServeSettings


def started(*arguments: object) -> dict[str, Any]:
    """The machine-readable form; a machine without vLLM is not fit, and says so by its code."""
    from droidkv.serve.launch import vllm_version

    code = 0 if vllm_version() is not None else 1
    value: dict[str, Any] = json.loads(
        run("serve", arguments[0], "--json", *arguments[1:], code=code).stdout
    )
    assert value["fit"] == (code == 0)
    return value


def settings_of(value: dict[str, Any]) -> ServeSettings:
    return ServeSettings.from_table(value["kv_transfer_config"]["kv_connector_extra_config"])


def test_a_receiver_is_shown(profiled: Path) -> None:
    value = started(
        *("receiver", "tiny", "--profile", profiled, "--plan", "[1,3)", "--store", "memory://x"),
        *("--order", "reused_first", "--load-deadline", "500ms", "--audit", "audit.jsonl"),
        *("--print", "--", "--port", "8002"),
    )
    settings = settings_of(value)
    assert (settings.role, settings.plan, settings.order) == ("receiver", "[1,3)", "reused_first")
    assert settings.load_seconds == 0.5
    assert settings.audit == str(Path("audit.jsonl").absolute())
    assert value["command"][-2:] == ["--port", "8002"]
    assert value["names"][0] == "tiny"
    assert {"plan", "model"} <= {c["name"] for c in value["checks"] if c["status"] != "fail"}


def test_a_sender_is_shown(profiled: Path) -> None:
    base = ("sender", "tiny", "--store", "memory://x", "--print")
    by_profile = settings_of(started(*base, "--profile", profiled))
    assert by_profile.profiles == (str(profiled),)
    by_plan = settings_of(started(*base, "--plan", "[1,3)", "--plan", "[2,4)"))
    assert (by_plan.profiles, by_plan.hidden_layers) == ((), (1, 2))


def test_a_server_that_would_fail_is_not_started(profiled: Path) -> None:
    options = ("--profile", profiled, "--store", "memory://x", "--", "--tensor-parallel-size", "2")
    shown = run("serve", "sender", "tiny", *options, code=1)
    assert "tensor_parallel_size" in shown.stdout


def icarus_pair(folder: Path, **made: Any) -> Path:
    """A pair file with a decoder of a tiny base."""
    pytest.importorskip("peft")
    from serve.made_decoders import make_base, make_decoder

    base = folder / "base"
    adapter = make_decoder(base if base.exists() else make_base(folder), "one", **made)
    path = folder / "one.toml"
    path.write_text(
        f"""schema_version = 1
description = "A decoder."
tasks = ["records"]
[sender]
model = "{base}"
[receiver]
model = "{base}"
adapter = "{adapter}"
apply = "icarus"
"""
    )
    return path


def test_decoders_are_shown(tmp_path: Path) -> None:
    value = started("icarus", icarus_pair(tmp_path), "--print", "--", "--port", "8003")
    config = value["kv_transfer_config"]
    assert config["kv_connector"] == "IcarusConnector"
    assert config["kv_connector_extra_config"]["decoders"] == {"one": str(tmp_path / "one")}
    assert value["command"][-2:] == ["--port", "8003"]
    assert value["environment"]["DROIDKV_DECODERS"] == '["one"]'
    checks = {check["name"]: check for check in value["checks"]}
    assert checks["decoder one"]["found"].startswith("rank 2")


def test_a_decoder_that_does_not_fit_is_not_started(tmp_path: Path) -> None:
    shown = run("serve", "icarus", icarus_pair(tmp_path, targets=("q_proj", "v_proj")), code=1)
    assert "k_proj or v_proj" in shown.stdout
    refused = ("serve", "icarus", icarus_pair(tmp_path), "--", "--enable-lora")
    assert "LoRA of vLLM's own" in run(*refused, code=1).stdout
    assert "apply = 'icarus'" in error_of("serve", "icarus", "tiny")


def prefillshare_pair(folder: Path, architecture: str = "llama") -> Path:
    """A pair file with an adapter that reads a tiny base's KV."""
    pytest.importorskip("peft")
    from serve.made_decoders import make_base, make_decoder

    base = folder / "base"
    if not base.exists():
        make_base(folder, architecture)
    adapter = make_decoder(base, "one", mode="prefillshare")
    path = folder / "one.toml"
    model = f'model = "{base}"'
    path.write_text(
        f"""schema_version = 1
description = "An adapter."
tasks = ["records"]
[sender]
{model}
[receiver]
{model}
adapter = "{adapter}"
[reference]
{model}
"""
    )
    return path


def test_adapters_that_read_the_bases_kv_are_shown(tmp_path: Path) -> None:
    pair = prefillshare_pair(tmp_path)
    value = started(
        *("prefillshare", pair, "--own-tokens", 48, "--audit", "audit.jsonl", "--print"),
        *("--", "--block-size", "32", "--port", "8004"),
    )
    config = value["kv_transfer_config"]
    assert (config["kv_connector"], config["kv_load_failure_policy"]) == (
        "BasePrefixConnector",
        "fail",
    )
    assert config["kv_connector_extra_config"] == {
        "own_tokens": 48,
        "audit": str(Path("audit.jsonl").absolute()),
    }
    command = value["command"]
    assert command[command.index("--lora-modules") + 1] == f"one={tmp_path / 'one'}"
    assert command[command.index("--max-loras") + 1] == "2"  # one stays empty
    assert command[-2:] == ["--port", "8004"]
    assert "adapter one" in {check["name"] for check in value["checks"]}


def test_adapters_that_cannot_read_it_are_not_started(tmp_path: Path) -> None:
    assert "train prefillshare" in error_of("serve", "prefillshare", "tiny")
    assert "train prefillshare" in error_of("serve", "prefillshare", icarus_pair(tmp_path))
    pair = prefillshare_pair(tmp_path)
    shown = run("serve", "prefillshare", pair, "--", "--enable-lora", code=2)
    assert "--enable-lora" in shown.stderr
    shown = run("serve", "prefillshare", pair, "--", "--block-size", "x", code=1)
    assert "no number" in shown.stdout
    small = ("prefillshare", pair, "--own-tokens", 16, "--", "--block-size", 32)
    assert "--own-tokens 32" in run("serve", *small, code=1).stdout
    assert "nowhere" in error_of("serve", "prefillshare", pair, "--audit", "nowhere/a.jsonl")
    record_base(tmp_path / "one", "sha256:" + "0" * 64, "prefillshare")
    shown = run("serve", "prefillshare", pair, code=1)
    assert "adapter one" in shown.stdout
    (tmp_path / "gemma").mkdir()
    shown = run("serve", "prefillshare", prefillshare_pair(tmp_path / "gemma", "gemma2"), code=1)
    assert "Gemma2ForCausalLM" in shown.stdout


def test_a_receiver_says_what_becomes_of_a_miss(profiled: Path) -> None:
    named = ("receiver", "tiny", "--profile", profiled, "--store", "memory://x")
    base = (*named, "--max-loss", 10, "--print")
    for options, on_miss, policy in (
        ((), "own", "recompute"),
        (("--on-miss", "error", "--own-tokens", 300), "error", "fail"),
    ):
        value = started(*base, *options)
        assert settings_of(value).on_miss == on_miss
        assert value["kv_transfer_config"]["kv_load_failure_policy"] == policy
        (check,) = (each for each in value["checks"] if each["name"] == "on miss")
        assert ("300 tokens" in check["found"]) == (on_miss == "error")
    shown = run("serve", *base, "--on-miss", "own", "--own-tokens", 300, code=1).stdout
    assert "leave own_tokens out" in shown
    assert "profile this pair" not in shown


def test_mistakes_are_named(profiled: Path) -> None:
    refused = ("serve", "sender", "tiny", "--profile", profiled, "--", "--kv-transfer-config", "{}")
    assert "--kv-transfer-config" in run(*refused, code=2).stderr
    assert "one sender" in error_of("serve", "sender", "tiny", "smollm2-records")
    assert "exclude" in error_of(
        *("serve", "sender", "tiny", "--profile", profiled, "--plan", "[0,0)")
    )
    assert "--audit" in error_of("serve", "receiver", "tiny", "--timeline")
    assert "lm://" in error_of("serve", "purge", "tiny", "--store", "lm://127.0.0.1:1")


def test_a_namespace_is_purged(tmp_path: Path) -> None:
    value = run_json("serve", "purge", "tiny", "--store", f"fs://{tmp_path}")
    assert value["removed"] == 0
    (tmp_path / f"{value['namespace']}@1@0@ff@uint8@0.data").touch()
    assert run_json("serve", "purge", "tiny", "--store", f"fs://{tmp_path}")["removed"] == 1


@pytest.fixture
def audit(tmp_path: Path) -> Path:
    report = LoadReport(1000, 64, 0.1, 0.1, 0.25, spans=[Span("load", 0, 1.0, 1.5)])
    records = [
        AuditRecord("cmpl-1", "[1,3)", advertised_tokens=64, num_loads=1, report=report),
        AuditRecord("cmpl-2", reason=Fallback.TOO_SHORT),
    ]
    path = tmp_path / "audit.jsonl"
    path.write_text("".join(json.dumps(record.to_json()) + "\n" for record in records))
    return path


def test_stats_count_and_trace(audit: Path, tmp_path: Path) -> None:
    value = run_json("stats", audit)
    assert value["num_requests"] == 2
    assert [(each["name"], each["num_requests"]) for each in value["outcomes"]] == [
        ("reused", 1),
        ("too_short", 1),
    ]
    assert value["plans"][0]["wait_seconds"]["p50"] == 0.25
    shown = run("stats", audit, "--request", "cmpl-1", "--trace", tmp_path / "t.json").stdout
    assert "[1,3)" in shown and "too_short" not in shown
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert "--timeline" in error_of(
        *("stats", audit, "--request", "cmpl-2", "--trace", tmp_path / "u.json")
    )


def test_stats_notes_what_was_cut_short(audit: Path) -> None:
    audit.write_text(audit.read_text() + '{"request_id": "cmpl-3"')
    shown = run("stats", audit)
    assert shown.stdout.startswith("2 requests") and "cut short" in shown.stderr


def test_a_trace_is_written_over_no_input_and_nothing_else(audit: Path, tmp_path: Path) -> None:
    renamed = audit.rename(tmp_path / "audit.json")
    text = renamed.read_text()
    assert "no input" in error_of("stats", renamed, "--trace", tmp_path / "." / "audit.json")
    assert "ends in .json" in error_of("stats", renamed, "--trace", tmp_path / "audit.toml")
    assert renamed.read_text() == text
    for _ in range(2):
        run("stats", renamed, "--trace", "t.json")


def test_a_benchmark_is_shown_and_drawn_from_its_file(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    row = {
        "load_seconds": 1.0,
        "compute_seconds": 0.9,
        "seconds": 1.2,
        "predicted_seconds": 1.1,
        "over_bound": 1.2,
    }
    overhead = {
        "overhead_percent": 1.0,
        "overhead_percent_low": -0.5,
        "overhead_percent_high": 2.5,
    }
    result = {
        "pair": "tiny",
        "lengths": [
            {
                "prefix_tokens": 512,
                "full_seconds": 2.0,
                "local": {"seconds": 0.25, "ratio": 8.0},
                "plans": [{"plan": "[0,0)", "layers": 0, "seconds": 0.5, "ratio": 4.0}],
            }
        ],
        "overheads": [
            {"prefix_tokens": 512, "num_pairs": 20, "no_match": overhead, "sender": overhead}
        ],
        "link": {
            "plan": "[1,3)",
            "prefix_tokens": 512,
            "compute_seconds": 1.0,
            "rows": [{**row, "order": order} for order in ("all_first", "streamed")],
            "prediction_median_percent": 2.0,
            "prediction_max_percent": 3.0,
        },
    }
    source = tmp_path / "ttft.json"
    source.write_text(json.dumps(result))
    shown = run("bench", "ttft", "--from", source, "--plot", tmp_path / "link.png").stdout
    assert (
        "4.00x" in shown
        and "8.00x" in shown
        and "+1.0 % [-0.5, +2.5]" in shown
        and "2.0 % median error" in shown
    )
    assert (tmp_path / "link.png").read_bytes().startswith(b"\x89PNG")
    copy = source.rename(tmp_path / "ttft.png")
    assert "no input" in error_of("bench", "ttft", "--from", copy, "--plot", copy)
    assert "ends in .png" in error_of("bench", "ttft", "--from", copy, "--plot", source)
    source.write_text("{}")
    assert "bench ttft --json" in error_of("bench", "ttft", "--from", source)
    for older in result["link"]["rows"]:  # type: ignore[index]
        del older["compute_seconds"]
    source.write_text(json.dumps(result))
    assert "older version" in error_of("bench", "ttft", "--from", source)


@pytest.mark.parametrize("command", [("bench", "ttft"), ("bench", "memory"), ("serve", "demo")])
def test_without_vllm_nothing_is_started(
    command: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("droidkv.serve.preflight.vllm_version", lambda: None)
    pair = ("tiny",) if command == ("serve", "demo") else ("--pair", "tiny")
    folder = tmp_path / "made"
    assert "make install-serve" in error_of(*command, *pair, "-o", folder)
    assert not folder.exists()


def test_flags_for_vllm_are_in_the_usage() -> None:
    for role in ("sender", "receiver", "icarus", "prefillshare"):
        assert "[-- VLLM FLAGS]" in run("serve", role, "--help").stdout
