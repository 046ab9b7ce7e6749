from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from made_profiles import profile, record, smooth_profile

from droidkv.errors import MissingExtraError, ProfileError, StorageError
from droidkv.frontier import pareto_front
from droidkv.objectives import measure
from droidkv.plan import Operator, ReusePlan, all_plans
from droidkv.plots import plot_critical_layers, plot_frontier, plot_heat_map

pytest.importorskip("matplotlib")
PNG = b"\x89PNG\r\n\x1a\n"
FAMILIES: tuple[Operator, ...] = ("copy", "stitch")
PROFILE = smooth_profile(num_layers=5, num_items=8)


def only_axes(figure: Any) -> Any:
    """The first axes; untyped, since matplotlib's stubs call most of what artists hold unknown."""
    return figure.axes[0]


def test_frontier_shows_every_plan_once_and_each_family_in_its_colour(tmp_path: Path) -> None:
    path = tmp_path / "frontier.png"
    figure = plot_frontier(PROFILE, path, "kl")
    assert path.read_bytes().startswith(PNG)
    axes = only_axes(figure)
    bars = {str(c.get_label()): c for c in axes.containers}
    assert set(bars) == {"copy frontier", "stitch frontier"}
    drawn = set()
    for operator in FAMILIES:
        front = pareto_front(measure(PROFILE, "kl", operators=[operator]))
        line = bars[f"{operator} frontier"].lines[0]
        assert line.get_xydata().tolist() == [[m.cost, m.loss] for m in front]
        drawn |= {m.plan for m in front}
    colours = {b.lines[0].get_color() for b in bars.values()}
    assert len(colours) == 2
    dominated = axes.collections[0]
    assert len(dominated.get_offsets()) + len(drawn) == len(PROFILE.measurements)
    assert {t.get_text() for t in axes.texts} == {"full reuse", "full prefill"}
    assert axes.get_yscale() == "symlog"
    assert "n = 8" in axes.get_title()


def test_frontier_draws_the_intervals(tmp_path: Path) -> None:
    figure = plot_frontier(PROFILE, tmp_path / "frontier.png", "score")
    axes = only_axes(figure)
    front = pareto_front(measure(PROFILE, "score", operators=["copy"]))
    (bars,) = axes.containers[0].lines[2]
    spans = [segment[:, 1].tolist() for segment in bars.get_segments()]
    assert np.allclose(spans, [[m.interval.low, m.interval.high] for m in front])


def test_a_profile_without_stitched_plans_has_one_frontier(tmp_path: Path) -> None:
    figure = plot_frontier(profile(stitch=None), tmp_path / "frontier.png")
    labels = [str(c.get_label()) for c in only_axes(figure).containers]
    assert labels == ["copy frontier"]


def test_heat_map_puts_each_loss_at_its_start_and_stop(tmp_path: Path) -> None:
    records = [
        record(p, [1.0], kl=float(f"0.{p.group.start}{p.group.stop}1")) for p in all_plans(4)
    ]
    path = tmp_path / "map.png"
    figure = plot_heat_map(profile(records), path)
    assert path.read_bytes().startswith(PNG)
    image: Any = figure.axes[0].images[0]
    shown = np.ma.filled(image.get_array(), np.nan)
    left, right, bottom, top = image.get_extent()
    assert (left, right, bottom, top) == (0.5, 4.5, 3.5, -0.5)
    for start in range(4):
        for stop in range(1, 5):
            # The cell that is drawn around the point (stop, start).
            cell = shown[start, stop - 1]
            if start < stop:
                assert cell == pytest.approx(float(f"0.{start}{stop}1"))
            else:
                assert np.isnan(cell)


def test_heat_map_of_a_family_that_was_not_measured_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="operator 'stitch'"):
        plot_heat_map(profile(stitch=None), tmp_path / "map.png", "stitch")
    assert list(tmp_path.iterdir()) == []


def test_heat_map_of_a_profile_without_any_loss(tmp_path: Path) -> None:
    records = [record(plan, [1.0], kl=0.0) for plan in all_plans(3)]
    plot_heat_map(profile(records, num_layers=3), tmp_path / "map.png")
    assert (tmp_path / "map.png").stat().st_size > 1000


def test_critical_layers_have_a_bar_per_layer_and_probe(tmp_path: Path) -> None:
    path = tmp_path / "layers.png"
    figure = plot_critical_layers([0.1, 0.5, 0.0], [2.0, 1.0, 3.0], path, "pair")
    assert path.read_bytes().startswith(PNG)
    heights = [[bar.get_height() for bar in axes.patches] for axes in cast(Any, figure.axes)]
    assert heights == [[0.1, 0.5, 0.0], [2.0, 1.0, 3.0]]
    with pytest.raises(ProfileError, match="got 1 and 2"):
        plot_critical_layers([1.0], [1.0, 2.0], path)


def test_the_same_profile_gives_the_same_file(tmp_path: Path) -> None:
    for name in ("a.png", "b.png"):
        plot_frontier(PROFILE, tmp_path / name)
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()


def test_an_unwritable_path_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError):
        plot_frontier(PROFILE, tmp_path / "file" / "frontier.png")


def test_plots_leave_pyplot_and_its_backend_alone() -> None:
    code = (
        "import sys, tempfile, pathlib; from droidkv.plots import plot_critical_layers as plot\n"
        "plot([1.0], [1.0], pathlib.Path(tempfile.mkdtemp()) / 'x.png')\n"
        "assert 'matplotlib.figure' in sys.modules\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_without_matplotlib_the_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingExtraError, match=r"droidkv\[plots\]"):
        plot_frontier(PROFILE, tmp_path / "x.png")


def test_costs_other_than_layers_are_labelled(tmp_path: Path) -> None:
    figure = plot_frontier(PROFILE, tmp_path / "x.png", cost="bytes")
    assert only_axes(figure).get_xlabel() == "bytes loaded"
    cost = {m.plan: m.cost for m in measure(PROFILE, cost="bytes")}
    baselines = {
        line.get_xdata()[0] for line in only_axes(figure).lines if line.get_marker() == "s"
    }
    assert baselines == {cost[ReusePlan.of(0, 0)], cost[ReusePlan.of(0, 5)]}


def test_an_empty_profile_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="has none"):
        plot_frontier(profile([]), tmp_path / "x.png")
