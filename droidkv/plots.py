"""Plots of a profile as PNG files. Draws on figures of its own; no global state of matplotlib."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from droidkv.errors import ProfileError, require_extra
from droidkv.frontier import Measurement, pareto_front
from droidkv.jsonio import replacing
from droidkv.objectives import (
    COST_LABELS,
    OBJECTIVE_LABELS,
    Cost,
    Objective,
    Workload,
    measure,
)
from droidkv.plan import Operator, ReusePlan
from droidkv.profile import Profile
from droidkv.sharing import SharingPoint

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's palette, told apart by colour-blind readers too.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
COLOURS: dict[Operator, str] = {"copy": PALETTE[0], "stitch": PALETTE[1]}
GREY = "#BBBBBB"
Points = Sequence[tuple[float, float]]
# Losses that span orders of magnitude; linear below this, so that zero has a place.
LINEAR_BELOW: dict[Objective, float] = {"kl": 1e-4, "nll": 1e-4}


def plot_frontier(
    profile: Profile,
    path: str | os.PathLike[str],
    objective: Objective = "score",
    cost: Cost = "layers",
    workload: Workload | None = None,
) -> Figure:
    """Loss against cost: dominated plans grey, the frontier with its intervals, baselines named.

    Each family has its own frontier and colour, so that copying and stitching can be compared.

    Args:
        profile: The profile.
        path: The PNG file to write.
        objective: What the loss is.
        cost: What the cost is.
        workload: The request whose cost it is; None = as long as the items are on average.

    Returns:
        The figure that was written.

    Raises:
        MissingExtraError: matplotlib is not installed.
        StorageError: The file could not be written.
        ProfileError: See `droidkv.objectives.measure`.
    """
    figure = _new_figure(7.0, 4.5)
    axes = figure.add_subplot()
    points = measure(profile, objective, cost, workload)
    if not points:
        raise ProfileError(
            f"expected measurements to draw, but this profile of {profile.pair!r} has none"
        )
    fronts = {
        operator: pareto_front(measure(profile, objective, cost, workload, [operator]))
        for operator in COLOURS
        if operator == "copy" or any(p.plan.operator == operator for p in points)
    }
    on_front = {point.plan for front in fronts.values() for point in front}
    dominated = [point for point in points if point.plan not in on_front]
    axes.scatter(
        [p.cost for p in dominated],
        [p.loss for p in dominated],
        s=9,
        color=GREY,
        label=f"dominated ({len(dominated)})",
        zorder=1,
    )
    for operator, front in fronts.items():
        axes.errorbar(
            [p.cost for p in front],
            [p.loss for p in front],
            yerr=_error_bars(front),
            color=COLOURS[operator],
            marker="o",
            markersize=4,
            linewidth=1,
            drawstyle="steps-post",  # between two plans there is no third
            capsize=2,
            label=f"{operator} frontier",
            zorder=2,
        )
    baselines = {
        ReusePlan.of(0, 0): "full reuse",
        ReusePlan.of(0, profile.num_layers): "full prefill",
    }
    middle = (min(p.cost for p in points) + max(p.cost for p in points)) / 2
    for point in points:
        if point.plan in baselines:
            right = point.cost > middle  # write towards the middle, not over the edge
            axes.plot([point.cost], [point.loss], "ks", markersize=6, zorder=3)
            axes.annotate(
                baselines[point.plan],
                (point.cost, point.loss),
                xytext=(-6 if right else 6, 6),
                textcoords="offset points",
                horizontalalignment="right" if right else "left",
            )
    if objective in LINEAR_BELOW:
        axes.set_yscale("symlog", linthresh=LINEAR_BELOW[objective])
    _label(axes, COST_LABELS[cost], OBJECTIVE_LABELS[objective], _title(profile))
    return _write(figure, path)


def plot_heat_map(
    profile: Profile,
    path: str | os.PathLike[str],
    operator: Operator = "copy",
    objective: Objective = "kl",
) -> Figure:
    """Loss of every group by its start and its stop, for one family.

    Args:
        profile: The profile.
        path: The PNG file to write.
        operator: The family; groups that start at layer 0 read no E and belong to both.
        objective: What the loss is.

    Returns:
        The figure that was written.

    Raises:
        MissingExtraError: matplotlib is not installed.
        StorageError: The file could not be written.
        ProfileError: The profile has no plan of the family, or see `measure`.
    """
    losses = np.full((profile.num_layers, profile.num_layers), np.nan)
    num_family = 0
    for point in measure(profile, objective, operators=[operator]):
        if point.plan.num_recomputed:
            losses[point.plan.group.start, point.plan.group.stop - 1] = point.loss
            num_family += point.plan.operator == operator
    if not num_family:
        raise ProfileError(
            f"expected plans with the operator {operator!r}, but this profile of {profile.pair!r} "
            f"has none; profile the pair with them"
        )
    figure = _new_figure(6.0, 5.0)
    axes = figure.add_subplot()
    norm = None
    if objective in LINEAR_BELOW:
        colors = require_extra("matplotlib.colors", "plots")
        low = LINEAR_BELOW[objective]
        norm = colors.LogNorm(low, max(float(np.nanmax(losses)), 10 * low), clip=True)
    # A cell is the group from its row's layer up to, not including, its column's stop.
    border = profile.num_layers + 0.5
    image = axes.imshow(
        losses,
        norm=norm,
        cmap="viridis_r",
        extent=(0.5, border, profile.num_layers - 0.5, -0.5),
        interpolation="nearest",
    )
    figure.colorbar(image, label=OBJECTIVE_LABELS[objective])
    axes.set_xlabel("stop of the recomputed group")
    axes.set_ylabel("start of the recomputed group")
    axes.set_title(f"{_title(profile)}, {operator}")
    return _write(figure, path)


def plot_critical_layers(
    reuse_one: Sequence[float],
    recompute_one: Sequence[float],
    path: str | os.PathLike[str],
    title: str = "",
    label: str = OBJECTIVE_LABELS["kl"],
) -> Figure:
    """Two bar charts by layer: what reusing it alone costs, what recomputing it alone leaves.

    Args:
        reuse_one: Loss when only this layer's KV is the sender's, one per layer.
        recompute_one: Loss when only this layer's KV is the receiver's, one per layer.
        path: The PNG file to write.
        title: Title of the figure.
        label: What the loss is.

    Returns:
        The figure that was written.

    Raises:
        MissingExtraError: matplotlib is not installed.
        StorageError: The file could not be written.
        ProfileError: The lists are of different lengths.
    """
    if len(reuse_one) != len(recompute_one):
        raise ProfileError(
            f"expected both probes to have one loss per layer, got {len(reuse_one)} and "
            f"{len(recompute_one)}"
        )
    figure = _new_figure(8.0, 5.0)
    upper, lower = figure.subplots(2, 1, sharex=True)
    for axes, losses, name, colour in (
        (upper, reuse_one, "only this layer is reused", COLOURS["stitch"]),
        (lower, recompute_one, "only this layer is recomputed", COLOURS["copy"]),
    ):
        axes.bar(range(len(losses)), losses, color=colour)
        axes.set_title(name, fontsize=9)
    lower.set_xlabel("layer")
    figure.supylabel(label, fontsize=9)
    figure.suptitle(title)
    return _write(figure, path)


def plot_curve(
    train: Mapping[str, Points],
    held_out: Mapping[str, Points],
    path: str | os.PathLike[str],
    title: str = "",
) -> Figure:
    """Learning curves: loss by step, dots where held-out items were evaluated.

    Args:
        train: Name of a run -> its training losses by step.
        held_out: The same of its held-out losses; may be empty.
        path: The PNG file to write.
        title: Title of the figure.

    Returns:
        The figure that was written.

    Raises:
        MissingExtraError: matplotlib is not installed.
        StorageError: The file could not be written.
    """
    figure = _new_figure(7.0, 4.5)
    axes = figure.add_subplot()
    for colour, (name, points) in zip(itertools.cycle(PALETTE), train.items(), strict=False):
        axes.plot(*zip(*points, strict=True), color=colour, linewidth=0.8, label=name)
        if held_out.get(name):
            axes.plot(
                *zip(*held_out[name], strict=True),
                color=colour,
                marker="o",
                linestyle="none",
                label=f"{name}, held out",
            )
    axes.set_yscale("log")
    _label(axes, "optimiser step", "loss, nats per answer token", title)
    return _write(figure, path)


def plot_sharing(
    curves: Mapping[str, Sequence[SharingPoint]],
    path: str | os.PathLike[str],
    title: str = "",
    label: str = "score",
) -> Figure:
    """Quality by the share of layers that read the base's KV, with intervals.

    Args:
        curves: Name of a receiver -> its points.
        path: The PNG file to write.
        title: Title of the figure.
        label: What the score is.

    Returns:
        The figure that was written.

    Raises:
        MissingExtraError: matplotlib is not installed.
        StorageError: The file could not be written.
    """
    figure = _new_figure(7.0, 4.5)
    axes = figure.add_subplot()
    for colour, (name, points) in zip(itertools.cycle(PALETTE), curves.items(), strict=False):
        below = [max(0.0, point.score - point.interval.low) for point in points]
        above = [max(0.0, point.interval.high - point.score) for point in points]
        axes.errorbar(
            [point.share_percent for point in points],
            [point.score for point in points],
            yerr=[below, above],
            color=colour,
            marker="o",
            markersize=4,
            linewidth=1,
            capsize=2,
            label=name,
        )
    axes.set_ylim(bottom=0)
    _label(axes, "layers that read the base's KV, %", label, title)
    return _write(figure, path)


def plot_link(
    rows: Sequence[Mapping[str, Any]],
    path: str | os.PathLike[str],
    title: str = "",
) -> Figure:
    """Time to the first token over a slow link: each order of loading, measured and predicted.

    Args:
        rows: `rows` of the `link` table of `droidkv bench ttft`.
        path: The PNG file to write.
        title: Title of the figure.

    Returns:
        The figure that was written.

    Raises:
        MissingExtraError: matplotlib is not installed.
        StorageError: The file could not be written.
    """
    figure = _new_figure(7.0, 4.5)
    axes = figure.add_subplot()
    orders = dict.fromkeys(row["order"] for row in rows)
    for colour, order in zip(PALETTE, orders, strict=False):
        own = sorted(
            (row for row in rows if row["order"] == order), key=lambda r: r["load_seconds"]
        )
        loads = [row["load_seconds"] for row in own]
        measured = [row["seconds"] for row in own]
        axes.plot(loads, measured, color=colour, marker="o", linestyle="none", label=order)
        predicted = [row["predicted_seconds"] for row in own]
        axes.plot(loads, predicted, color=colour, linewidth=1, label=f"{order}, predicted")
    bounds = {r["load_seconds"]: max(r["load_seconds"], r["compute_seconds"]) for r in rows}
    loads = sorted(bounds)
    axes.plot(
        loads,
        [bounds[load] for load in loads],
        color=GREY,
        linestyle="--",
        label="max(load, compute)",
    )
    axes.set_xscale("log")
    axes.set_xticks(loads, [f"{load:.2g}" for load in loads])
    axes.minorticks_off()
    _label(axes, "load time over the link, s", "time to the first token, s", title)
    return _write(figure, path)


def _label(axes: Any, x: str, y: str, title: str) -> None:
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.set_title(title)
    axes.legend(frameon=False)


def _new_figure(width: float, height: float) -> Any:
    # A bare Figure draws with Agg and is known to no window system, unlike pyplot's.
    figure = require_extra("matplotlib.figure", "plots")
    return figure.Figure(figsize=(width, height), layout="constrained")


def _error_bars(front: Sequence[Measurement]) -> list[list[float]]:
    # The noise floor may have moved a loss to the border of its interval or past it.
    below = [max(0.0, p.loss - p.interval.low) for p in front]
    above = [max(0.0, p.interval.high - p.loss) for p in front]
    return [below, above]


def _title(profile: Profile) -> str:
    return f"{profile.pair} on {profile.task.name} (n = {profile.num_items})"


def _write(figure: Any, path: str | os.PathLike[str]) -> Figure:
    with replacing(path) as temporary:
        # Without the version of matplotlib, so that the same profile gives the same file.
        figure.savefig(temporary, format="png", dpi=120, metadata={"Software": None})
    written: Figure = figure
    return written
