"""Where the commands look for profiles and put what they make."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import droidkv
from droidkv.errors import PairError, ProfileError, StorageError, unknown_name

if TYPE_CHECKING:
    from droidkv.confirmation import Evidence
    from droidkv.pair import Pair, TaskRef
    from droidkv.profile import Profile
    from droidkv.records import TaskRecord

FOLDER = Path("profiles")
_PROBE = ".probe.json"


def profile_folders() -> list[Path]:
    """Where profiles are looked for by name: `profiles/` here, then that of the checkout."""
    shipped = Path(droidkv.__file__).resolve().parent.parent / FOLDER
    return list(dict.fromkeys([Path.cwd() / FOLDER, shipped]))


def known_profiles() -> dict[str, Path]:
    """Name and file of every profile that can be had by name; one found twice is the first."""
    known: dict[str, Path] = {}
    for folder in profile_folders():
        for path in sorted(folder.glob("*.json")):
            if not path.name.endswith(_PROBE):
                known.setdefault(path.stem, path)
    return known


def find_profile(name_or_path: str) -> Path:
    """The file of a profile, by path (it ends in `.json` or has a slash) or by name.

    Raises:
        ProfileError: There is no profile of that name, or it is a probe's.
    """
    if name_or_path.endswith(_PROBE):
        raise ProfileError(
            f"expected a profile, got the probe {name_or_path}; `droidkv probe --compare` reads it"
        )
    if name_or_path.endswith(".json") or "/" in name_or_path:
        return Path(name_or_path)
    known = known_profiles()
    if name_or_path not in known:
        looked = ", ".join(map(str, profile_folders()))
        raise ProfileError(
            f"{unknown_name('profile', name_or_path, known)}. Looked in: {looked}; "
            f"`droidkv profile PAIR` makes one"
        )
    return known[name_or_path]


def read_named_profile(name_or_path: str) -> tuple[Path, Profile]:
    """A profile and its file.

    Raises:
        ProfileError: See `find_profile` and `droidkv.profile.read_profile`.
    """
    from droidkv.profile import read_profile

    path = find_profile(name_or_path)
    return path, read_profile(path)


def pair_of(profile: Profile, pair_name: str | None) -> Pair:
    """The pair that is named, or else the one the profile names.

    Raises:
        PairError: See `read_pair`; the profile's pair may lie where no name leads to.
    """
    from droidkv.pair import read_pair

    if pair_name is not None:
        return read_pair(pair_name)
    try:
        return read_pair(profile.pair)
    except PairError as error:
        raise PairError(f"{error}; name the pair's file with --pair") from error


def named_evidence(name_or_path: str, unconfirmed: bool) -> tuple[Path, Profile, list[Evidence]]:
    """A profile, its file, and the files of measurements to pick a plan from.

    Args:
        name_or_path: See `find_profile`.
        unconfirmed: The profile's own measurements, whatever lies beside it.

    Raises:
        ProfileError: See `read_named_profile`; or a confirmation is damaged.
    """
    from droidkv.confirmation import all_evidence, own_evidence

    path, profile = read_named_profile(name_or_path)
    evidence = [own_evidence(path, profile)] if unconfirmed else all_evidence(path, profile)
    return path, profile, evidence


def output_stem(pair: Pair, task: TaskRef) -> str:
    """Name of what is made from a pair: the pair's, and the task's where it is not the main one."""
    return pair.name if task == pair.tasks[0] else f"{pair.name}.{task.name}"


def require_writable(path: Path) -> None:
    """Refuse, before any work, a path in a folder that is none, or that is not to be written.

    Raises:
        StorageError: It is such a path.
    """
    there = next(parent for parent in path.absolute().parents if parent.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise StorageError(f"expected a folder to write {path.name!r} in, got {there}")


def check_output(
    target: Path, overwrite: bool, *inputs: object, beside: Sequence[Path] = ()
) -> None:
    """Refuse, before any work, to write over what would be missed.

    Args:
        target: The file to be written when all is done.
        overwrite: Whether files that are there may be replaced.
        inputs: Files that the command reads, which are never replaced; None = there is none.
        beside: Files that are written with it. An unfinished run may have left its own.

    Raises:
        StorageError: A file is an input or is there already, or the target cannot be written.
    """
    require_writable(target)
    read = {os.path.realpath(str(each)) for each in inputs if each is not None}
    for file in (target, *beside):
        if os.path.realpath(file) in read:
            raise StorageError(
                f"expected an output that is no input, got {file}, which this command reads; "
                "choose another file"
            )
    is_begun = target.with_suffix(".run").exists()
    for file in [target] if is_begun else [target, *beside]:
        if file.exists() and not overwrite:
            raise StorageError(
                f"expected no file at {file}, but one is there; give --overwrite to replace it, or "
                "choose another file by -o"
            )


def files_of(pair: Pair, task: TaskRef | TaskRecord) -> tuple[object, object]:
    """What a command reads for a pair and a task: the pair's file and the task's table, if any."""
    return pair.path, task.options.get("path")


def files_of_profile(path: Path, profile: Profile, pair: Pair) -> tuple[object, ...]:
    """What a command reads that goes by a profile: it, its map, and what `files_of` names."""
    fitted = None if profile.stitch is None else path.with_name(profile.stitch.file)
    return path, fitted, *files_of(pair, profile.task)
