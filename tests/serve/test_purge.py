from __future__ import annotations

from pathlib import Path

import pytest
import torch
from serve.servers import free_port, redis_server

from droidkv.errors import ServeError, StorageError
from droidkv.serve.keys import chunk_keys
from droidkv.serve.purge import purge, remove_store
from droidkv.serve.store import deadline_in

MINE, OTHERS = "a" * 64, "b" * 64


def test_a_folder_is_emptied_of_one_namespace_only(tmp_path: Path) -> None:
    for name in (f"{MINE}@1@0@ff@uint8@0.data", f"{MINE}@1@0@ff@uint8@1.data", f"{OTHERS}@1.data"):
        (tmp_path / name).touch()
    half_written = tmp_path / ".writing-1" / f"{MINE}@1@0@ff@uint8@2.data"
    half_written.parent.mkdir()
    half_written.touch()
    assert purge(f"fs://{tmp_path}", MINE) == 3
    assert [path.name for path in tmp_path.rglob("*.data")] == [f"{OTHERS}@1.data"]
    with pytest.raises(StorageError, match=r"there is none at .*/none"):
        purge(f"fs://{tmp_path}/none", MINE)
    with pytest.raises(StorageError, match="absolute"):
        purge("fs://some/folder", MINE)


def test_a_folder_is_removed_only_if_stores_wrote_all_of_it(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    remove_store(folder)
    (folder / ".writing-1").mkdir(parents=True)
    (folder / f"{MINE}@1@0@ff@uint8@0.data").touch()
    thesis = folder / "thesis.tex"
    thesis.touch()
    with pytest.raises(StorageError, match=r"'thesis\.tex'"):
        remove_store(folder)
    assert len(list(folder.iterdir())) == 3
    thesis.unlink()
    remove_store(folder)
    assert not folder.exists()


@pytest.mark.parametrize("address", ["lm://127.0.0.1:1", "local://", "memory://x"])
def test_what_cannot_be_purged_is_said(address: str) -> None:
    with pytest.raises(ServeError, match="expected a store"):
        purge(address, MINE)


def test_a_namespace_is_no_pattern(tmp_path: Path) -> None:
    (tmp_path / f"{OTHERS}@1.data").touch()
    with pytest.raises(ServeError, match="64 hexadecimal"):
        purge(f"fs://{tmp_path}", "*")
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("scheme", ["fs", "redis"])
def test_what_lmcache_stored_is_found_and_removed(scheme: str, tmp_path: Path) -> None:
    pytest.importorskip("lmcache", reason="LMCache is not installed")
    if scheme == "fs":
        _purge_real(f"fs://{tmp_path / 'store'}")
        return
    with redis_server(tmp_path) as server:
        _purge_real(server.url)
    with pytest.raises(StorageError, match="running"):
        purge(f"redis://127.0.0.1:{free_port()}", MINE)


def _purge_real(address: str) -> None:
    from droidkv.serve.lmcache_store import open_lmcache

    store = open_lmcache(f"{address}?keep_local=0&cpu_gib=0.1", chunk_tokens=4)
    try:
        keys = [chunk_keys(namespace, [1, 2, 3, 4], 4)[0] for namespace in (MINE, OTHERS)]
        for key in keys:
            assert store.put_hidden(key, 0, torch.ones(4, 8))
        assert store.flush(deadline_in(60))
        assert purge(address, MINE) >= 1
        present = [store.contains_hidden(key, [0], deadline_in(60)) for key in keys]
        assert present == [False, True]
    finally:
        store.close()
