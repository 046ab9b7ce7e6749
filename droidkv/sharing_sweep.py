"""The naive and the trained receiver measured at every share of reused layers."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from droidkv.errors import PairError
from droidkv.model_identity import load_config
from droidkv.pair import Pair
from droidkv.profile import Profile, read_profile
from droidkv.profile_job import ProfileSettings
from droidkv.profiler import profile_pair
from droidkv.run_folder import Progress, no_progress
from droidkv.sharing import naive_path, sharing_plans


def sharing_sweep(
    pair: Pair,
    settings: ProfileSettings,
    output: Path,
    num_steps: int = 10,
    on_progress: Progress = no_progress,
    command: str = "",
) -> dict[str, Profile]:
    """Measure the naive and the trained receiver at every share, on the same items.

    Args:
        pair: The pair of a full-share receiver.
        settings: What is measured; its plans and operators are set here.
        output: Profile of the trained receiver; that of the naive one, `NAME.naive.json`, lies
            beside it. A killed run goes on.
        num_steps: Steps from 0 to 100 %.
        on_progress: Told after each step.
        command: What reproduces this.

    Returns:
        `naive` and `trained`.

    Raises:
        PairError: The pair has no reference, so there is nothing to compare with.
        DroidKVError: As `profile_pair`.
    """
    if pair.reference is None:
        raise PairError(
            f"expected the pair of a full-share receiver, which has a [reference] table, got "
            f"{pair.name!r}; make one with `droidkv train prefillshare` or `droidkv train icarus`"
        )
    plans = sharing_plans(int(load_config(pair.sender).num_hidden_layers), num_steps)
    settings = dataclasses.replace(
        settings, operators=("copy",), decode="all", plans=tuple(map(str, plans))
    )
    naive = dataclasses.replace(pair, receiver=pair.reference, reference=None)

    def measured(each: Pair, file: Path) -> Profile:
        return profile_pair(each, settings, file, on_progress, command)

    naive_file = naive_path(output)
    # A trained half is begun behind its naive one, and goes on only with the same settings.
    is_halfway = output.with_suffix(".run").exists() and naive_file.exists()
    return {
        "naive": read_profile(naive_file) if is_halfway else measured(naive, naive_file),
        "trained": measured(pair, output),
    }
