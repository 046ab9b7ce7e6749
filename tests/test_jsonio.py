from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
import time
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

import pytest
from hypothesis import given
from hypothesis import strategies as st

from droidkv import jsonio
from droidkv.errors import PairError, ProfileError, StorageError
from droidkv.jsonio import (
    canonical_json,
    read_json,
    read_toml,
    replacing,
    sha256_file,
    write_json,
    write_text,
    writing_into,
)

JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text('aé"\\[{', max_size=3), inner)
    ),
    max_leaves=20,
)


@given(value=JSON_VALUES)
def test_what_is_written_is_read_back(
    tmp_path_factory: pytest.TempPathFactory, value: object
) -> None:
    path = tmp_path_factory.mktemp("json") / "value.json"
    write_json(path, value)
    assert read_json(path, ProfileError) == value


def test_a_failing_writer_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    write_text(path, "old")
    for failure in (KeyboardInterrupt, ZeroDivisionError):
        with pytest.raises(failure), replacing(path) as temporary:
            temporary.write_text("half of the n")
            raise failure
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["profile.json"]


@pytest.mark.parametrize("place", ["fsync", "replace"])
def test_a_full_disk_leaves_the_old_file_and_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    path = tmp_path / "profile.json"
    write_text(path, "old")

    def full(*_: object) -> NoReturn:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, place, full)
    with pytest.raises(StorageError, match=r"profile\.json.*disk is full: free some space"):
        write_text(path, "new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["profile.json"]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_writer_with_its_own_exception_type_on_a_full_disk(tmp_path: Path) -> None:
    class SafetensorError(Exception):
        pass

    with pytest.raises(StorageError, match="disk is full"), replacing(tmp_path / "x") as temporary:
        try:
            Path("/dev/full").write_bytes(b"x" * 10**6)
        except OSError as cause:
            temporary.write_bytes(b"half")
            raise SafetensorError(f"I/O error: {cause.strerror} (os error 28)") from cause
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("raised", "seen", "free_blocks"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), StorageError, 0),
        (
            RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos"),
            StorageError,
            0,
        ),
        (RuntimeError("[enforce fail at inline_container.cc] bad"), RuntimeError, 1),
        (FileNotFoundError(errno.ENOENT, "No such file"), FileNotFoundError, 0),
        (PairError("x"), PairError, 0),
        (ValueError("x"), ValueError, 0),
    ],
)
def test_only_what_the_file_system_refused_a_library_is_a_storage_error(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    raised: Exception,
    seen: type[Exception],
    free_blocks: int,
) -> None:
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=free_blocks))
    with pytest.raises(seen) as caught, writing_into(tmp_path):
        raise raised
    assert (caught.value is raised) == (seen is not StorageError)
    assert seen is not StorageError or "disk is full" in str(caught.value)


def test_a_path_through_a_file_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="not a folder: choose another path"):
        write_text(tmp_path / "file" / "x.json", "new")


def test_missing_folders_are_made_and_links_and_modes_kept(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "real.json"
    write_json(path, {})
    link = tmp_path / "link.json"
    link.symlink_to(path)
    with replacing(link) as temporary:
        temporary.unlink()  # as a writer does that renames a private file into place
        temporary.write_text("new")
        temporary.chmod(0o600)
    assert link.is_symlink() and path.read_text() == "new"
    plain = tmp_path / "plain"
    plain.touch()
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE(plain.stat().st_mode)


def test_numbers_that_json_does_not_have_are_never_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="JSON compliant"):
        write_json(tmp_path / "x.json", {"loss": float("nan")})
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", r"line 1, column 1: expected JSON"),
        (b'{"a": 1,\n "b": [1, 2', r"line 2, column 12: expected JSON"),
        (b'{"a": 1} {"a": 2}', r"line 1, column 10.*Extra data"),
        (b'{"a":\n  NaN}', r"line 2, column 3: expected a finite number, got NaN"),
        (b"[1, -Infinity]", r"line 1, column 5: expected a finite number, got -Infinity"),
        (b"[1e999]", r"got 1e999"),
        (b'{"a": 1, "b": 2, "a": 3}', r"each key once in an object, got 'a' twice"),
        (b"[" * 40 + b"]" * 40, r"line 1, column 33: expected at most 32 nested levels"),
        (b'{"a":' * 100_000, r"expected at most 32 nested levels"),
        (b'{"a": "\xff"}', r"byte 7: expected UTF-8 text, got the byte 0xff"),
        (b'["\\ud800"]', r"lone surrogate"),
        (b"[" + b"9" * 5000 + b"]", r"sensible length"),
        (b'"' + b'\\"' * 500_000, r"expected JSON"),
        (b"\xef\xbb\xbf{}", r"BOM"),
        (b"[" + b"1," * 600, r"expected at most 1024 bytes"),
    ],
)
def test_bad_json_names_file_and_position(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "bad.json"
    path.write_bytes(data)
    limit = 1024 if "1024" in message else jsonio.MAX_JSON_BYTES
    started = time.monotonic()
    with pytest.raises(ProfileError, match=message) as caught:
        read_json(path, ProfileError, max_bytes=limit)
    assert str(path) in str(caught.value)
    assert time.monotonic() - started < 5


def test_brackets_and_constants_inside_strings_are_text(tmp_path: Path) -> None:
    value = ["[" * 100, "NaN", 'a "quoted" {', "\\", "-Infinity"]
    (tmp_path / "x.json").write_text(json.dumps(value))
    assert read_json(tmp_path / "x.json", ProfileError) == value


def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(ProfileError, match="expected a regular file"):
            read_json(path, ProfileError)
    with pytest.raises(ProfileError, match="there is none"):
        read_json(tmp_path / "missing.json", ProfileError)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a = 1\na = 2\nb = 3", r"line 2"),
        ("a = [1,\n2", r"end of document"),
        ("a = nan", r"finite number for 'a'"),
        ("[t]\nb = [1.0, inf]", r"finite number for 't.b'"),
        ("a = " + "[" * 4_000, r"nested levels"),
        (".".join(["a"] * 40) + " = 1", r"at most 32 nested levels"),
        ("\n" + ".".join(["a"] * 30_000) + " = 1", r"line 2: expected at most 4096 characters"),
        ("# " + "x" * 70_000, r"expected at most 65536 bytes"),
    ],
)
def test_bad_toml_names_the_file(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(text)
    started = time.monotonic()
    with pytest.raises(PairError, match=message) as caught:
        read_toml(path, PairError)
    assert str(path) in str(caught.value)
    assert time.monotonic() - started < 5


def test_canonical_json_has_one_text_per_value() -> None:
    assert canonical_json({"b": [1.5, None], "a": "é"}) == '{"a":"\\u00e9","b":[1.5,null]}'
    assert canonical_json({"x": 1, "y": 2}) == canonical_json({"y": 2, "x": 1})


def test_sha256_file(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"abc")
    assert sha256_file(tmp_path / "x") == hashlib.sha256(b"abc").hexdigest()
    with pytest.raises(StorageError, match="expected to read"):
        sha256_file(tmp_path / "y")
