from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from droidkv.errors import ProfileError, RunGoneError
from droidkv.jsonio import read_json, write_json
from droidkv.run_folder import RunFolder


def begun(folder: Path, seed: int = 0) -> RunFolder:
    return RunFolder(folder / "x.run", {"seed": seed})


def test_who_waits_for_a_run_that_ends_does_nothing_of_it_anew(tmp_path: Path) -> None:
    """Two survivors: one is at the last step, the other waits for it."""
    waits, redone = threading.Event(), list[int]()
    first, second = begun(tmp_path), begun(tmp_path)
    output = tmp_path / "x.json"

    def last_step(_: int) -> str:
        assert waits.wait(60)
        return "first"

    def measure() -> None:
        write_json(output, first.complete("sweep", 1, last_step)[0])

    thread = threading.Thread(target=lambda: first.finish(output, measure, lambda path: None))
    thread.start()
    while not list(tmp_path.glob("x.run/sweep-*.lock")):
        time.sleep(0.01)

    def told(stage: str, done: int, total: int) -> None:
        if not waits.is_set():
            waits.set()
            thread.join()

    found = second.finish(
        output,
        lambda: str(second.complete("sweep", 1, redone.append, told)),
        lambda path: str(read_json(path, ProfileError)),
    )
    assert (found, redone) == ("first", [])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.json"]


def test_nothing_is_written_where_the_folder_was_deleted_or_is_anothers(tmp_path: Path) -> None:
    output = tmp_path / "x.json"
    write_json(output, "of an earlier run")
    folder = begun(tmp_path)

    def deleted_at(_: int) -> str:
        folder.remove()
        return "late"

    with pytest.raises(RunGoneError, match="give the same command again"):
        folder.finish(output, lambda: folder.complete("sweep", 1, deleted_at), lambda path: [])
    assert not (tmp_path / "x.run").exists()

    folder, other = begun(tmp_path), tmp_path / "x.run"
    folder.remove()
    begun(tmp_path, seed=1)
    with pytest.raises(RunGoneError):
        folder.complete("sweep", 1, lambda _: "mine")
    folder.remove()
    assert not list(other.glob("sweep-*.json")) and (other / "settings.json").exists()


def test_steps_of_unknown_settings_are_refused(tmp_path: Path) -> None:
    write_json(tmp_path / "x.run" / "sweep-00000.json", "of whom?")
    with pytest.raises(ProfileError, match=r"got sweep-00000\.json and no settings.*delete"):
        begun(tmp_path)
