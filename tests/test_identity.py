from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from droidkv.differences import UNKNOWN, Difference
from droidkv.errors import IdentityError
from droidkv.identity import DTYPE_NAMES, Fingerprint, content_digest, settings

# Of `golden()` below. A change here means that no profile and no stored object is found again.
GOLDEN_DIGEST = "fd469df0f5f2e7c228b727de23cea508f86841f29f8436bcd080b75c481e7091"


def golden(**changes: Any) -> Fingerprint:
    fields: dict[str, Any] = {
        "weights": "sha256:" + "1" * 64,
        "architecture": settings(
            {"model_type": "llama", "hidden_size": 576, "layer_types": ["full", "sliding"]}
        ),
        "rope": settings({"rope_type": "default", "rope_theta": 100000.0}),
        "vocabulary": "sha256:" + "2" * 64,
        "tokenizer": "sha256:" + "3" * 64,
        "added_tokens": "sha256:" + "4" * 64,
        "weight_dtype": "float32",
        "cache_dtype": "float32",
        "quantisation": "none",
        "adapter": "none",
        "tensor_parallel": 1,
    }
    return Fingerprint(**(fields | changes))


FIELD_NAMES = [field.name for field in dataclasses.fields(Fingerprint)]
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(-1e300, 1e300) | st.text()
TABLES = st.dictionaries(st.text("abc_", min_size=1), SCALARS | st.lists(SCALARS, max_size=3))
DIGESTS = st.integers(0, 16**64 - 1).map(lambda number: f"sha256:{number:064x}")
FORMS: dict[str, st.SearchStrategy[Any]] = {
    "weights": DIGESTS | DIGESTS.map(lambda text: text.replace("sha256", "headers")),
    "architecture": TABLES.map(settings),
    "rope": TABLES.map(settings),
    "vocabulary": DIGESTS,
    "tokenizer": DIGESTS,
    "added_tokens": DIGESTS,
    "weight_dtype": st.sampled_from(DTYPE_NAMES),
    "cache_dtype": st.sampled_from(DTYPE_NAMES),
    "quantisation": st.just("none") | st.text(min_size=1),
    "adapter": st.just("none") | DIGESTS,
    "tensor_parallel": st.integers(1, 64),
    "format_version": st.integers(1, 9),
}
FINGERPRINTS = st.builds(Fingerprint, **FORMS)


def test_every_field_has_a_strategy() -> None:
    assert sorted(FORMS) == sorted(FIELD_NAMES)


@given(first=FINGERPRINTS, second=FINGERPRINTS, name=st.sampled_from(FIELD_NAMES))
def test_changing_one_field_changes_the_digest_and_is_named(
    first: Fingerprint, second: Fingerprint, name: str
) -> None:
    changed = dataclasses.replace(first, **{name: getattr(second, name)})
    found = first.differences(changed)
    assert {each.field.split(".")[0] for each in found} <= {name}
    assert (first.digest() == changed.digest()) == (found == [])
    assert (first.to_json() == changed.to_json()) == (found == [])


@given(fingerprint=FINGERPRINTS)
def test_json_round_trip(fingerprint: Fingerprint) -> None:
    text = json.dumps(fingerprint.to_json())
    again = Fingerprint.from_json(json.loads(text))
    assert again == fingerprint
    assert hash(again) == hash(fingerprint)
    assert again.digest() == fingerprint.digest()
    assert fingerprint.differences(again) == []


@given(fingerprint=FINGERPRINTS, name=st.sampled_from(FIELD_NAMES[:-1]))
def test_unknown_is_never_the_same_not_even_as_itself(fingerprint: Fingerprint, name: str) -> None:
    changes: dict[str, Any] = {name: None}
    unknown = dataclasses.replace(fingerprint, **changes)
    assert [each.field for each in unknown.differences(unknown)] == [name]
    assert [each.field for each in unknown.differences(fingerprint)] == [name]
    assert fingerprint.differences(unknown)[0].theirs is UNKNOWN
    with pytest.raises(IdentityError, match=f"unknown: {name}"):
        unknown.digest()
    with pytest.raises(IdentityError, match=f"- {name}: .*unknown"):
        fingerprint.require_same(unknown)
    assert Fingerprint.from_json(unknown.to_json()) == unknown


def test_golden_vector() -> None:
    assert golden().digest() == GOLDEN_DIGEST


def test_the_digest_is_the_same_in_every_process() -> None:
    program = (
        "import json, sys; from droidkv.identity import Fingerprint;"
        "print(Fingerprint.from_json(json.load(sys.stdin)).digest())"
    )
    for seed in ("0", "1"):
        done = subprocess.run(
            [sys.executable, "-c", program],
            input=json.dumps(golden().to_json()),
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.strip() == GOLDEN_DIGEST


def test_the_message_names_every_differing_field_with_both_values() -> None:
    other = golden(
        weights="sha256:" + "9" * 64,
        rope=settings({"rope_type": "default", "rope_theta": 10000.0}),
        cache_dtype="bfloat16",
    )
    with pytest.raises(IdentityError) as caught:
        golden().require_same(other, "the profile's sender", "the loaded sender")
    message = str(caught.value)
    assert f"weights: the profile's sender has sha256:{'1' * 64}, the loaded sender has" in message
    assert (
        "rope.rope_theta: the profile's sender has 100000, the loaded sender has 10000" in message
    )
    assert (
        "cache_dtype: the profile's sender has float32, the loaded sender has bfloat16" in message
    )
    assert message.count("\n  - ") == 3
    assert "Nothing is reused" in message


def test_the_same_weights_by_headers_only_are_not_the_same() -> None:
    cheap = golden(weights="headers:" + "1" * 64)
    assert [each.field for each in golden().differences(cheap)] == ["weights"]
    assert cheap.differences(golden(weights="headers:" + "1" * 64)) == []


def test_two_dtypes_of_one_width_differ() -> None:
    half, brain = golden(cache_dtype="float16"), golden(cache_dtype="bfloat16")
    assert half.differences(brain) == [Difference("cache_dtype", "float16", "bfloat16")]


def test_settings_have_one_form() -> None:
    assert settings({"a": {"b": 1.0, "c": [1, 2.0]}}) == (("a.b", 1), ("a.c", (1, 2)))
    assert golden(rope=settings({"x": True})).differences(golden(rope=settings({"x": 1}))) != []
    nested = golden(rope=settings({"x": [True]})), golden(rope=settings({"x": [1]}))
    assert nested[0].differences(nested[1]) != []
    with pytest.raises(IdentityError, match=r"two for 'a\.b'"):
        settings({"a.b": 1, "a": {"b": 2}})
    with pytest.raises(IdentityError, match="finite"):
        settings({"a": float("nan")})
    with pytest.raises(IdentityError, match="JSON value"):
        settings({"a": object()})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weights": "1" * 64}, "weights"),
        ({"weights": "sha256:xyz"}, "weights"),
        ({"weights": 7}, "weights"),
        ({"adapter": "my-adapter"}, "adapter"),
        ({"vocabulary": "headers:" + "1" * 64}, "vocabulary"),
        ({"weight_dtype": "half"}, "unknown weight_dtype 'half'"),
        ({"cache_dtype": 2}, "cache_dtype"),
        ({"tensor_parallel": 0}, "tensor_parallel"),
        ({"tensor_parallel": True}, "tensor_parallel"),
        ({"format_version": None}, "format_version"),
        ({"quantisation": 4}, "quantisation"),
        ({"rope": [1, 2]}, "rope"),
        ({"extra": 1}, "unknown key 'extra'"),
        ({"adaptor": "none", "adapter": ...}, "'adapter', but it is missing"),
    ],
)
def test_json_that_is_not_a_fingerprint_is_refused(change: dict[str, Any], message: str) -> None:
    value = golden().to_json() | change
    value = {name: each for name, each in value.items() if each is not ...}
    with pytest.raises(IdentityError, match=message):
        Fingerprint.from_json(value)


def test_json_that_is_no_table_is_refused() -> None:
    values: list[object] = [None, [], "text", 3]
    for value in values:
        with pytest.raises(IdentityError):
            Fingerprint.from_json(value)


def test_content_digest_depends_on_structure_not_on_joined_text() -> None:
    assert content_digest(["ab", "c"]) != content_digest(["a", "bc"])
    assert content_digest({"a": 1, "b": 2}) == content_digest({"b": 2, "a": 1})
