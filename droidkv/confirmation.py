"""Which measurements plans are picked from: a profile's own, or those on fresh items.

The best of many plans looks better on the items that chose it than on others. So where
`NAME.confirm.json` or, with a trained map, `NAME.refined.confirm.json` lies beside `NAME.json` and
is of the same models and task, these count. Each file's stitched plans go through its own map.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from droidkv.differences import differences
from droidkv.errors import ProfileError
from droidkv.plan import ReusePlan
from droidkv.profile import Profile, read_profile

_SUFFIX = ".confirm.json"


@dataclass(frozen=True)
class Evidence:
    """Measurements to pick a plan from.

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

    def map_file(self, plan: ReusePlan) -> Path | None:
        """The stitching map that the plan went through; None = the plan copies."""
        stitch = self.profile.stitch
        if plan.operator == "copy" or stitch is None:
            return None
        return self.path.with_name(stitch.file)


def confirmation_path(profile_file: Path) -> Path:
    """Where the confirmation of a profile lies: `NAME.confirm.json` beside `NAME.json`."""
    return profile_file.with_name(f"{profile_file.stem}{_SUFFIX}")


def refined_path(profile_file: Path) -> Path:
    """Where plans are confirmed through a trained map: `NAME.refined.confirm.json` beside it."""
    return profile_file.with_name(f"{profile_file.stem}.refined{_SUFFIX}")


def shared_map(output: Path, profile_file: Path, profile: Profile) -> Path | None:
    """The profile's map, where a confirmation written to `output` names it too: in its folder."""
    if profile.stitch is None:
        return None
    file = profile_file.with_name(profile.stitch.file)
    return file if file.resolve().parent == output.resolve().parent else None


def require_unconfirmed(path: Path) -> None:
    """Refuse to confirm a confirmation: the items that chose its plans are not among its own.

    Raises:
        ProfileError: The file is one; names the profile that it is of.
    """
    if path.name.endswith(_SUFFIX):
        name = path.name.removesuffix(_SUFFIX).removesuffix(".refined")
        raise ProfileError(
            f"expected a profile, got the confirmation {path}, whose plans other items have "
            f"chosen; name the profile itself, {path.with_name(name + '.json')}"
        )


def all_evidence(path: Path, profile: Profile) -> list[Evidence]:
    """The confirmations beside a profile that fit it; the profile itself if none does.

    Args:
        path: The profile's file; a confirmation's own file is its own evidence.
        profile: What it holds.

    Raises:
        ProfileError: A file that lies there is damaged.
        StorageError: It could not be read.
    """
    own = own_evidence(path, profile)
    if path.name.endswith(_SUFFIX):
        return [own]
    found: list[Evidence] = []
    advice: list[str] = []
    for made_by, each in (("confirm", confirmation_path(path)), ("refine", refined_path(path))):
        if not each.exists():
            continue
        confirmed = read_profile(each)
        if fields := _mismatches(profile, confirmed, has_own_map=made_by == "refine"):
            advice.append(
                f"{each} is no confirmation of it, for it differs in {', '.join(fields)}: "
                f"run `droidkv {made_by} {path} --overwrite`"
            )
        else:
            remark = f"picked by {confirmed.num_items} fresh items, in {each}"
            found.append(Evidence(each, confirmed, True, remark))
    if not found:
        found = [own]
        if not own.is_confirmed and not advice:
            advice = [f"`droidkv confirm {path}` measures that"]
    if advice:
        more = "; ".join(advice)
        found = [dataclasses.replace(each, remark=f"{each.remark}: {more}") for each in found]
    return found


def own_evidence(path: Path, profile: Profile) -> Evidence:
    """The profile itself, whatever lies beside it."""
    if path.name.endswith(_SUFFIX):
        return Evidence(path, profile, True, f"picked by {profile.num_items} fresh items")
    if profile.reference is not None:  # full share: two plans, named before anything was measured
        remark = f"picked by {profile.num_items} items, which chose no plan"
        return Evidence(path, profile, True, remark)
    remark = f"picked by {profile.num_items} items as the best of many plans; others may lose more"
    return Evidence(path, profile, False, remark)


def trained_for(plan: ReusePlan, evidence: Sequence[Evidence]) -> Evidence | None:
    """The measurements whose map was trained for this very plan, if there are any."""
    for each in evidence:
        if each.profile.stitch is not None and str(plan) in each.profile.stitch.refined:
            return each
    return None


def _mismatches(profile: Profile, confirmed: Profile, has_own_map: bool) -> list[str]:
    """Names of the fields by which one is no confirmation of the other."""
    found = [each.field for each in differences(_kind(profile), _kind(confirmed))]
    for role in ("sender", "receiver", "reference"):
        mine, theirs = (getattr(each, role) for each in (profile, confirmed))
        if mine is None or theirs is None:
            found += [role] if mine != theirs else []
        else:
            differing = mine.fingerprint.differences(theirs.fingerprint)
            found += [f"{role}.{each.field}" for each in differing]
    if confirmed.stitch is not None and not has_own_map:
        fitted = profile.stitch.sha256 if profile.stitch else None
        found += ["stitch.sha256"] if confirmed.stitch.sha256 != fitted else []
    if {item.id for item in profile.items} & {item.id for item in confirmed.items}:
        found.append("items, of which some are in both")
    return found


def _kind(profile: Profile) -> dict[str, Any]:
    task = dataclasses.asdict(profile.task)
    return {"pair": profile.pair, **{f"task.{name}": value for name, value in task.items()}}
