from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from droidkv.errors import MissingExtraError, StorageError
from droidkv.serve.lmcache_settings import REMOTE_SCHEMES, LMCacheSettings


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("local://", LMCacheSettings(None, 16)),
        ("local://?cpu_gib=0.5", LMCacheSettings(None, 16, max_local_cpu_gib=0.5)),
        ("fs:///a/b", LMCacheSettings("fs:///a/b", 16)),
        (
            "fs:///a/b?keep_local=0&disk=/c&disk_gib=2&put_seconds=0.5",
            LMCacheSettings(
                "fs:///a/b",
                16,
                keep_local=False,
                local_disk=Path("/c"),
                max_local_disk_gib=2.0,
                put_seconds=0.5,
            ),
        ),
        ("redis://h:1/2?cpu_gib=3", LMCacheSettings("redis://h:1/2", 16, max_local_cpu_gib=3.0)),
        ("redis://h:1?socket_timeout=9", LMCacheSettings("redis://h:1?socket_timeout=9", 16)),
        ("lm://h:1", LMCacheSettings("lm://h:1", 16)),
    ],
)
def test_an_address_is_read(address: str, expected: LMCacheSettings) -> None:
    assert LMCacheSettings.parse(address, 16) == expected


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("resp://h:1", "Known: fs, lm, redis"),
        ("redi://h:1", "Did you mean 'redis'"),
        ("h:1", "unknown scheme"),
        ("lm://h", "lm://host:port"),
        ("fs://folder", "absolute"),
        ("fs://some/folder", "absolute"),
        ("fs:folder", "absolute"),
        ("unix://run/redis", "unix:///socket"),
        ("redis://", "redis://host:port"),
        ("redis://h:99999", "redis://host:port"),
        ("rediss://h:x", "rediss://host:port"),
        ("lm://h:x", "lm://host:port"),
        ("local://?cpu_gib=much", "number for cpu_gib"),
        ("local://?cpu_gib=0", "max_local_cpu_gib > 0"),
    ],
)
def test_a_wrong_address_is_named(address: str, message: str) -> None:
    with pytest.raises(StorageError, match=message):
        LMCacheSettings.parse(address, 16)


@pytest.mark.parametrize(
    ("url", "lmcache_url"),
    [
        (None, None),
        ("fs:///a/b", "fs://localhost:0/a/b"),
        ("lm://h:1", "lm://h:1"),
        ("redis://u:p@h:1/2", "redis://u:p@h:1/2?socket_timeout=5.0&socket_connect_timeout=5.0"),
        (
            "unix:///run/redis?socket_timeout=1",
            "unix:///run/redis?socket_timeout=1&socket_connect_timeout=5.0",
        ),
    ],
)
def test_lmcache_gets_the_url_it_wants(url: str | None, lmcache_url: str | None) -> None:
    assert LMCacheSettings(url).lmcache_url == lmcache_url


def test_every_scheme_is_taken() -> None:
    for scheme in REMOTE_SCHEMES:
        host = "" if scheme in ("fs", "unix") else "host:1"
        assert LMCacheSettings(f"{scheme}://{host}/path").scheme == scheme


def test_importing_the_store_does_not_import_lmcache() -> None:
    code = (
        "import sys, os; import droidkv.serve.lmcache_store, droidkv.serve.verbs;"
        "assert 'torch' in sys.modules;"
        "print([name for name in sys.modules if name.split('.')[0] == 'lmcache'])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ
    )
    assert result.stdout.strip() == "[]"


def test_without_lmcache_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from droidkv.serve.lmcache_store import LMCacheStore

    for module in ("lmcache", "lmcache.utils"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtraError, match=r"droidkv\[store\]"):
        LMCacheStore(LMCacheSettings(chunk_tokens=16))
