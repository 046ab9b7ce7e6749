"""Which measurements plans are picked from: a profile's own, or their confirmation on fresh items.

The best of many plans looks better on the items that chose it than on others. So where
`NAME.confirm.json` lies beside `NAME.json` and is of the same models, task and map, it counts.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from droidkv.differences import differences
from droidkv.profile import Profile, read_profile

_SUFFIX = ".confirm.json"


@dataclass(frozen=True)
class Evidence:
    """The measurements to pick a plan from.

    Attributes:
        path: Their file.
        profile: What it holds.
        is_confirmed: Whether they are of items that did not choose the plans.
        remark: Which ones these are, and what would make them better, in words.
    """

    path: Path
    profile: Profile
    is_confirmed: bool
    remark: str


def confirmation_path(profile_file: Path) -> Path:
    """Where the confirmation of a profile lies: `NAME.confirm.json` beside `NAME.json`."""
    return profile_file.with_name(f"{profile_file.stem}{_SUFFIX}")


def best_evidence(path: Path, profile: Profile) -> Evidence:
    """The confirmation beside a profile where there is one that fits, else the profile itself.

    Args:
        path: The profile's file; a confirmation's own file is its own best evidence.
        profile: What it holds.

    Raises:
        ProfileError: The file that lies there is damaged.
        StorageError: It could not be read.
    """
    own = own_evidence(path, profile)
    confirmed_path = confirmation_path(path)
    if own.is_confirmed:
        return own
    if not confirmed_path.exists():
        return _with_remark(own, f"`droidkv confirm {path}` measures that")
    confirmed = read_profile(confirmed_path)
    if found := _mismatches(profile, confirmed):
        return _with_remark(
            own,
            f"{confirmed_path} is no confirmation of it, for it differs in {', '.join(found)}: "
            f"run `droidkv confirm {path}` again",
        )
    remark = f"picked by {confirmed.num_items} fresh items, in {confirmed_path}"
    return Evidence(confirmed_path, confirmed, True, remark)


def own_evidence(path: Path, profile: Profile) -> Evidence:
    """The profile itself, whatever lies beside it."""
    if path.name.endswith(_SUFFIX):
        return Evidence(path, profile, True, f"picked by {profile.num_items} fresh items")
    remark = f"picked by {profile.num_items} items as the best of many plans; others may lose more"
    return Evidence(path, profile, False, remark)


def _with_remark(own: Evidence, more: str) -> Evidence:
    return dataclasses.replace(own, remark=f"{own.remark}: {more}")


def _mismatches(profile: Profile, confirmed: Profile) -> list[str]:
    """Names of the fields by which one is no confirmation of the other."""
    found = [each.field for each in differences(_kind(profile), _kind(confirmed))]
    for role in ("sender", "receiver"):
        mine, theirs = (getattr(each, role).fingerprint for each in (profile, confirmed))
        found += [f"{role}.{each.field}" for each in mine.differences(theirs)]
    if confirmed.stitch is not None:
        fitted = profile.stitch.sha256 if profile.stitch else None
        found += ["stitch.sha256"] if confirmed.stitch.sha256 != fitted else []
    if {item.id for item in profile.items} & {item.id for item in confirmed.items}:
        found.append("items, of which some are in both")
    return found


def _kind(profile: Profile) -> dict[str, Any]:
    task = dataclasses.asdict(profile.task)
    return {"pair": profile.pair, **{f"task.{name}": value for name, value in task.items()}}
