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
from serve.senders import a_sender

from droidkv.errors import IdentityError, PlanError
from droidkv.identity import Fingerprint, settings
from droidkv.serve.keys import ChunkKey, chunk_hashes, chunk_keys, namespace_digest, reused_layers

CHANGES: dict[str, list[Any]] = {
    "weights": ["sha256:" + "1" * 63 + "2", "headers:" + "1" * 64],
    "architecture": [settings({"model_type": "llama", "hidden_size": 577}), settings({})],
    "rope": [settings({"rope_type": "default", "rope_theta": 100001.0})],
    "vocabulary": ["sha256:" + "3" * 64],
    "tokenizer": ["sha256:" + "2" * 64],
    "added_tokens": ["sha256:" + "5" * 64],
    "weight_dtype": ["bfloat16", "float16"],
    "cache_dtype": ["bfloat16", "float8_e4m3fn"],
    "quantisation": ['{"bits":4}'],
    "adapter": ["sha256:" + "6" * 64, "sha256:" + "7" * 64],
    "tensor_parallel": [2, 4],
    "format_version": [2],
}
SENDER = a_sender()

# A change of any of these means that nothing that was stored is found again: raise
# STORE_FORMAT_VERSION instead, which says so.
GOLDEN_NAMESPACE = "140c4010d6953169674328c5064b8a7dda888171cd642c2d31a18c25c214f101"
GOLDEN_CHUNKS = {
    (0, 4): [],
    (4, 4): ["af05154b77329c83b9e35d69634b3cb3560f356d67e88e7a6c516f12609a978a"],
    (9, 4): [
        "af05154b77329c83b9e35d69634b3cb3560f356d67e88e7a6c516f12609a978a",
        "fed8032d601caa3ddc5e5bb26acc1b3f18873597c57a7ee2b07f5540e9dd1324",
    ],
    (9, 3): [
        "30e6b02f91ae3d52a28f21104308f0bbde96cddc14fc1efca8f164f8da67718b",
        "c097ae4b0c9c838777ceefdee0bafb0f78722f49f964b61c014a4371409becea",
        "76039d62a1e9eed23b9590cb95ea4c43a821089ff833997fd913cee85b0d863e",
    ],
}
TOKEN_IDS = st.lists(st.integers(0, 200_000), max_size=40)
SIZES = st.integers(1, 9)


def test_golden_namespace() -> None:
    assert namespace_digest(SENDER) == GOLDEN_NAMESPACE


@pytest.mark.parametrize(("num_tokens", "chunk_tokens"), GOLDEN_CHUNKS)
def test_golden_chunks(num_tokens: int, chunk_tokens: int) -> None:
    token_ids = [1000 * index for index in range(num_tokens)]
    assert chunk_hashes(token_ids, chunk_tokens) == GOLDEN_CHUNKS[num_tokens, chunk_tokens]


def test_every_identity_field_is_covered_here() -> None:
    assert set(CHANGES) == {field.name for field in dataclasses.fields(Fingerprint)}


@pytest.mark.parametrize(
    ("field", "value"), [(field, value) for field, values in CHANGES.items() for value in values]
)
def test_a_changed_field_is_another_namespace(field: str, value: Any) -> None:
    other = dataclasses.replace(SENDER, **{field: value})
    assert namespace_digest(other) != namespace_digest(SENDER)


@pytest.mark.parametrize("field", [name for name in CHANGES if name != "format_version"])
def test_an_unknown_field_has_no_namespace(field: str) -> None:
    unknown: dict[str, Any] = {field: None}
    with pytest.raises(IdentityError, match=field):
        namespace_digest(dataclasses.replace(SENDER, **unknown))


def test_each_rank_has_its_own_namespace() -> None:
    two = dataclasses.replace(SENDER, tensor_parallel=2)
    assert namespace_digest(two, 0) != namespace_digest(two, 1)
    for rank in (-1, 2):
        with pytest.raises(PlanError, match=r"within \[0,2\)"):
            namespace_digest(two, rank)
    with pytest.raises(PlanError, match=r"within \[0,1\)"):
        namespace_digest(SENDER, 1)


@given(TOKEN_IDS, SIZES)
def test_only_whole_chunks_have_a_key(token_ids: list[int], chunk_tokens: int) -> None:
    keys = chunk_keys("ab" * 32, token_ids, chunk_tokens)
    assert len(keys) == len(token_ids) // chunk_tokens
    assert [key.index for key in keys] == list(range(len(keys)))
    assert len({key.chunk_hash for key in keys}) == len(keys)


@given(TOKEN_IDS, TOKEN_IDS, SIZES)
def test_chunks_are_shared_as_far_as_the_tokens_are(
    one: list[int], other: list[int], chunk_tokens: int
) -> None:
    mine, theirs = chunk_hashes(one, chunk_tokens), chunk_hashes(other, chunk_tokens)
    for index, (a, b) in enumerate(zip(mine, theirs, strict=False)):
        stop = (index + 1) * chunk_tokens
        assert (a == b) == (one[:stop] == other[:stop])


@given(TOKEN_IDS, TOKEN_IDS, SIZES)
def test_a_longer_prefix_keeps_the_hashes_of_a_shorter_one(
    head: list[int], tail: list[int], chunk_tokens: int
) -> None:
    short = chunk_hashes(head, chunk_tokens)
    assert chunk_hashes(head + tail, chunk_tokens)[: len(short)] == short


@given(st.lists(st.integers(0, 9), min_size=12, max_size=24), SIZES, SIZES)
def test_chunks_of_another_size_never_meet(token_ids: list[int], one: int, other: int) -> None:
    if one != other:
        assert not set(chunk_hashes(token_ids, one)) & set(chunk_hashes(token_ids, other))


@pytest.mark.parametrize("token_id", [-1, 2**63])
def test_a_token_id_fits_its_field(token_id: int) -> None:
    with pytest.raises(PlanError, match="token ids from 0"):
        chunk_hashes([token_id], 1)


def test_numbers_of_any_kind_are_the_same_tokens() -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.arange(8)
    assert chunk_hashes(tensor, 4) == chunk_hashes(range(8), 4)
    assert chunk_hashes(tensor.tolist(), 4) == chunk_hashes(range(8), 4)


@pytest.mark.parametrize("hash_seed", [None, "0", "7"])
def test_keys_are_the_same_in_every_process(hash_seed: str | None) -> None:
    code = (
        "import json; from droidkv.identity import Fingerprint;"
        "from droidkv.serve.keys import chunk_keys, namespace_digest;"
        "sender = Fingerprint.from_json(json.loads(input()));"
        "keys = chunk_keys(namespace_digest(sender), range(9), 4);"
        "print(json.dumps([[k.namespace, k.index, k.chunk_hash] for k in keys]))"
    )
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONHASHSEED"}
    if hash_seed is not None:
        environment["PYTHONHASHSEED"] = hash_seed
    result = subprocess.run(
        [sys.executable, "-c", code],
        input=json.dumps(SENDER.to_json()),
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    found = [ChunkKey(*fields) for fields in json.loads(result.stdout)]
    assert found == chunk_keys(namespace_digest(SENDER), range(9), 4)


def test_layers_that_are_reused_are_those_outside_the_group() -> None:
    assert reused_layers(5, range(1, 3)) == [0, 3, 4]
    assert reused_layers(3, range(0)) == [0, 1, 2]
    assert reused_layers(3, range(3)) == []
