"""`droidkv frontier`: show, plot, pick from and compare what a profile has measured."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from droidkv.errors import CalibrationError

from . import exits
from .console import Console
from .framework import Group
from .frontier_table import diff_lines, frontier_rows, header_lines, point_lines
from .options import (
    choose_objective,
    objective_option,
    operator_option,
    output_folder,
    profile_argument,
    unconfirmed_option,
    workload_of,
    workload_options,
)
from .places import named_evidence, read_named_profile
from .units import SECONDS

if TYPE_CHECKING:
    from droidkv.profile import Profile

cost_option = click.option(
    "--cost",
    help="What a plan costs: layers, flops, bytes or ttft. Default: layers.",
    default="layers",
)
only_operator_option = operator_option("Only plans of this family.")


@click.group(cls=Group)
def frontier() -> None:
    """Show, plot, compare a profile's frontier, and pick from it.

    The frontier is the plans that no other plan beats on both loss and cost. PROFILE is a file,
    or the name of one in ./profiles or in the checkout.
    """


@frontier.command(
    examples="""
    droidkv frontier show smollm2-records
    droidkv frontier show smollm2-records --cost ttft --bandwidth 10Gbit/s --prefix-tokens 4000
    droidkv frontier show profiles/smollm2-records.json --all --objective kl --json
    """
)
@profile_argument
@objective_option
@cost_option
@only_operator_option
@unconfirmed_option
@workload_options
@click.option("--all", "show_all", is_flag=True, help="Every measured plan, not only the frontier.")
@click.pass_obj
def show(
    console: Console,
    profile_name: str,
    objective: str | None,
    cost: Any,
    operators: Any,
    unconfirmed: bool,
    prefix_tokens: int | None,
    suffix_tokens: int | None,
    bandwidth: float | None,
    calibration_file: Path | None,
    show_all: bool,
) -> None:
    """Print the frontier as a table, cheapest plan first.

    The full prefill stands in it even where a cheaper plan loses nothing either. Below it stand
    the plans that were measured again on fresh items, in NAME.confirm.json and
    NAME.refined.confirm.json.
    """
    from droidkv.objectives import measure

    path, profile, evidence = named_evidence(profile_name, unconfirmed)
    chosen = choose_objective(profile, objective)
    workload, notes = workload_of(
        console, profile, prefix_tokens, suffix_tokens, bandwidth, calibration_file
    )

    def rows_of(measured: Profile) -> list[dict[str, Any]]:
        points = measure(measured, chosen, cost, workload, operators)
        return frontier_rows(measured, points, workload, show_all)

    rows = rows_of(profile)
    lines = [*header_lines(path, profile, workload), "", *point_lines(rows, chosen)]
    confirmed = []
    for each in evidence:
        if each.path == path:
            continue
        fresh = rows_of(each.profile)
        confirmed.append(
            {"profile": str(each.path), "num_items": each.profile.num_items, "plans": fresh}
        )
        lines += ["", f"{each.path}: n = {each.profile.num_items} fresh items", ""]
        lines += point_lines(fresh, chosen)
    value = {
        "profile": str(path),
        "pair": profile.pair,
        "task": profile.task.name,
        "num_items": profile.num_items,
        "objective": chosen,
        "cost": cost,
        "prefix_tokens": workload.prefix_tokens,
        "suffix_tokens": workload.suffix_tokens,
        "plans": rows,
        "confirmed": confirmed,
        "notes": notes,
    }
    remarks = [f"plans are {each.remark}" for each in evidence]
    console.result(value, [*lines, "", *remarks])


@frontier.command(
    examples="""
    droidkv frontier plot smollm2-records
    droidkv frontier plot profiles/smollm2-records.json --output plots --objective kl
    """
)
@profile_argument
@objective_option
@cost_option
@workload_options
@click.option("-o", "--output", type=output_folder, help="Folder. Default: beside the profile.")
@click.pass_obj
def plot(
    console: Console,
    profile_name: str,
    objective: str | None,
    cost: Any,
    prefix_tokens: int | None,
    suffix_tokens: int | None,
    bandwidth: float | None,
    calibration_file: Path | None,
    output: Path | None,
) -> None:
    """Draw the frontier and a heat map as PNG files.

    The heat maps, one per family, show the loss of every group by start and stop.
    """
    from droidkv.plan import OPERATORS
    from droidkv.plots import plot_frontier, plot_heat_map

    path, profile = read_named_profile(profile_name)
    chosen = choose_objective(profile, objective)
    workload, notes = workload_of(
        console, profile, prefix_tokens, suffix_tokens, bandwidth, calibration_file
    )
    folder = output or path.parent
    files = [folder / f"{path.stem}.frontier.png"]
    plot_frontier(profile, files[0], chosen, cost, workload)
    for operator in OPERATORS:
        if any(r.plan.operator == operator and r.plan.group for r in profile.measurements):
            files.append(folder / f"{path.stem}.{operator}.png")
            plot_heat_map(profile, files[-1], operator)
    value = {"profile": str(path), "files": [str(file) for file in files], "notes": notes}
    console.result(value, map(str, files))


@frontier.command(
    examples="""
    droidkv frontier pick smollm2-records
    droidkv frontier pick smollm2-records --max-loss 2
    droidkv frontier pick smollm2-records --unconfirmed
    droidkv frontier pick smollm2-records --slo-ttft 500ms --bandwidth 10Gbit/s --prefix-tokens 8000
    """
)
@profile_argument
@click.option("--max-loss", type=float, help="Largest loss; in percent for score. Default: 5.")
@click.option("--slo-ttft", type=SECONDS, help="Longest time to the first token: 0.5s, 500ms.")
@objective_option
@only_operator_option
@unconfirmed_option
@workload_options
@click.pass_obj
def pick(
    console: Console,
    profile_name: str,
    max_loss: float | None,
    slo_ttft: float | None,
    objective: str | None,
    operators: Any,
    unconfirmed: bool,
    prefix_tokens: int | None,
    suffix_tokens: int | None,
    bandwidth: float | None,
    calibration_file: Path | None,
) -> int:
    """Choose the plan to run.

    It is the cheapest within the loss; with an SLO, the one of least loss within both. Where
    `droidkv confirm` or `droidkv refine` measured plans on fresh items, picks among these, and
    says by which file; where not, says what a plan picked by half of the items loses on the other
    half. Says what bound the choice, and when reuse does not pay. Exits with 1 if no plan meets the
    bounds.
    """
    from droidkv.optimism import loss_of_such_picks
    from droidkv.policy import pick as pick_plan
    from droidkv.policy import pick_among

    path, profile, evidence = named_evidence(profile_name, unconfirmed)
    chosen = choose_objective(profile, objective)
    workload, notes = workload_of(
        console, profile, prefix_tokens, suffix_tokens, bandwidth, calibration_file
    )
    picked, choice = pick_among(
        evidence,
        lambda measured: pick_plan(
            measured,
            max_loss,
            slo_ttft,
            bandwidth,
            workload.prefix_tokens,
            workload.suffix_tokens,
            workload.calibration,
            operators,
            chosen,
        ),
    )
    elsewhere = None
    if not picked.is_confirmed:
        elsewhere = loss_of_such_picks(picked.profile, chosen, choice.max_loss, operators)
    map_file = picked.map_file(choice.plan)
    value = {
        "profile": str(path),
        "picked_from": str(picked.path),
        "is_confirmed": picked.is_confirmed,
        "loss_of_such_picks": elsewhere,
        "map": None if map_file is None else str(map_file),
        "pair": profile.pair,
        "notes": notes,
        **choice.to_json(),
    }
    lines = [*choice.message, picked.remark]
    if elsewhere is not None:
        lines.append(
            f"a plan within the limit on half of these items loses {choice.amount(elsewhere)} on "
            "the other half, in the mean"
        )
    lines += [] if map_file is None else [f"its stitching map is {map_file}"]
    console.result(value, lines)
    met = choice.meets_max_loss and choice.meets_slo is not False
    return exits.OK if met else exits.CHECK_FAILED


@frontier.command(
    examples="""
    droidkv frontier diff old.json profiles/smollm2-records.json
    """
)
@click.argument("before_name", metavar="BEFORE")
@click.argument("after_name", metavar="AFTER")
@objective_option
@click.option("--cost", default="layers", help="layers, flops or bytes. Default: layers.")
@click.pass_obj
def diff(
    console: Console, before_name: str, after_name: str, objective: str | None, cost: Any
) -> None:
    """Show which plans entered or left the frontier.

    Between two profiles: of one pair over time, or of two pairs.
    """
    from droidkv.objectives import diff_fronts

    if cost == "ttft":
        raise CalibrationError(
            "expected a cost that needs no calibration, got 'ttft'; use layers, flops or bytes"
        )
    (before_path, before), (after_path, after) = (
        read_named_profile(name) for name in (before_name, after_name)
    )
    if before.pair != after.pair:
        console.note(f"of two pairs: {before.pair!r} before, {after.pair!r} after")
    chosen = choose_objective(before, objective)
    changes = diff_fronts(before, after, chosen, cost)
    value = {
        "before": str(before_path),
        "after": str(after_path),
        "objective": chosen,
        "cost": cost,
        "changes": [
            {
                "plan": str(change.plan),
                "was_on_front": change.was_on_front,
                "is_on_front": change.is_on_front,
                "loss_before": change.before.loss if change.before else None,
                "loss_after": change.after.loss if change.after else None,
            }
            for change in changes
        ],
    }
    console.result(value, diff_lines(changes, before, after))
