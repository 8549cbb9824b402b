from types import SimpleNamespace

import matplotlib
import numpy as np
import pytest
from matplotlib import pyplot

from helpers.figures import drawn, size
from lightning_lengthpool.report import figures, summary
from lightning_lengthpool.runs.steps.columns import COLUMNS
from lightning_lengthpool.runs.steps.steps_file import StepsFile


def costs(steps: int, ranks: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).lognormal(0, 0.5, (steps, ranks))


def top(collection) -> float:
    return collection.get_paths()[0].vertices[:, 1].max()


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_work_and_waiting_of_each_rank_reach_up_to_the_slowest(ranks):
    own = costs(30, ranks)
    figure = drawn(figures.compute_figure(np.arange(5.0, 35.0), own, range(ranks), "own compute [s]"))
    assert [axes.get_ylabel() for axes in figure.axes] == [f"rank {rank}" for rank in range(ranks)]
    for axes, values in zip(figure.axes, own.T, strict=True):
        work, wait = axes.collections
        assert top(work) == values.max() and top(wait) == own.max()
    assert figure.axes[-1].get_xlabel() == "step" and figure.get_supylabel() == "own compute [s]"


def test_steps_that_were_not_measured_stay_empty():
    own = costs(30, 3)
    own[10:15, 1] = np.nan
    figure = drawn(figures.compute_figure(np.arange(30.0), own, range(3), "s"))
    spans = [path.get_extents().intervalx for path in figure.axes[1].collections[0].get_paths()]
    assert len(spans) == 2 and spans[0][1] <= 9.5 and spans[1][0] >= 14.5


def test_many_ranks_are_a_few_lines_and_the_one_that_holds_the_others_up():
    own = costs(60, 512)
    own[:, 77] *= 20
    figure = drawn(figures.compute_figure(np.arange(60.0), own, range(512), "s"))
    (axes,) = figure.axes
    labels = axes.get_legend_handles_labels()[1]
    assert len(axes.lines) == 2 and any("rank 77: the slowest in" in label for label in labels)
    figure = drawn(figures.lengths_figure([figures.Panel("x", np.arange(60.0), own)]))
    assert len(figure.axes[0].lines) == 2
    figure = drawn(figures.distribution_figure(own, range(512), "tokens"))
    labels = figure.axes[0].get_legend_handles_labels()[1]
    assert len(figure.axes[0].lines) == 3 and "rank 77: the longest on average" in labels


def test_two_orders_share_a_y_axis():
    panels = [
        figures.Panel("simulated", np.arange(9.0), costs(9, 4)),
        figures.Panel("b", np.arange(9.0), costs(9, 4) * 9),
    ]
    left, right = drawn(figures.lengths_figure(panels)).axes
    assert left.get_ylim() == right.get_ylim() and left.get_ylim()[0] == 0
    assert (left.get_title(), right.get_title()) == ("simulated", "b")


def test_causes_are_stacked_up_to_the_idle_fraction():
    parts = {"lengths": 0.1, "slow_rank": 0.05, "data": 0.02, "rest": 0.03}
    measured = SimpleNamespace(first_step=1, last_step=50, idle=0.2, **parts)
    unknown = dict.fromkeys(parts, np.nan) | {"lengths": 0.3}
    tokens = SimpleNamespace(first_step=51, last_step=80, idle=0.3, **unknown)
    figure = drawn(figures.causes_figure({"run": [measured, tokens], "baseline": [measured]}))
    tops = [top(collection) for collection in figure.axes[1].collections]
    assert tops == pytest.approx([10, 15, 17, 20])
    assert top(figure.axes[0].collections[-1]) == pytest.approx(30)
    assert figure.axes[0].get_xlim() == (1, 81)
    assert len({colour for _, colour in figures.CAUSES.values()}) == 4


def test_distribution_of_each_rank_is_its_quantiles():
    values = np.stack([np.arange(1.0, 102), 10 * np.arange(1.0, 102)], axis=1)
    (axes,) = drawn(figures.distribution_figure(values, [0, 1], "tokens", "they differ")).axes
    assert axes.get_xscale() == "log" and axes.get_title() == "they differ"
    for line, factor in zip(axes.lines, (1, 10), strict=True):
        middle = np.interp(50, line.get_ydata(), line.get_xdata())
        assert middle == pytest.approx(51 * factor, rel=0.02)


def test_correlation_has_the_band_of_a_random_order():
    (axes,) = drawn(figures.correlation_figure({"run": np.full(10, 0.3), "base": np.full(10, np.nan)}, 0.1)).axes
    labels = axes.get_legend_handles_labels()[1]
    assert labels == ["95 % of random orders", "run", "base"]
    low, high = axes.get_ylim()
    assert low < -0.1 and high > 0.3


def test_a_users_style_and_figures_are_left_alone():
    with pyplot.style.context("dark_background"):
        before = dict(matplotlib.rcParams)
        figure = figures.compute_figure(np.arange(9.0), costs(9, 2), [0, 1], "$x$ [s]")
        assert dict(matplotlib.rcParams) == before and not pyplot.get_fignums()
        drawn(figure)
    assert figure.get_facecolor() == (1, 1, 1, 1)


@pytest.mark.parametrize("absent", [False, True])
def test_compare_figure(tmp_path, absent):
    runs: dict[str, list] = {}
    for policy in ("none", "pool"):
        own = costs(80, 4) * 100
        grid = {name: np.ones((80, 4)) for name in COLUMNS} | {"padded_tokens": own, "longest": own}
        grid |= {"step": np.repeat(np.arange(80.0)[:, None], 4, axis=1), "rank": np.tile(np.arange(4.0), (80, 1))}
        grid["compute_seconds"] = np.full((80, 4), np.nan) if absent else own / 1000
        file = StepsFile(tmp_path / f"{policy}.csv")
        file.start(0)
        file.append({name: values.ravel() for name, values in grid.items()})
        runs[policy] = [{"steps_csv": file.path, "val_loss": 1.0}]
    figure = figures.compare_figure(summary.compare_runs(runs))
    width, height = size(figures.png(figure))
    assert width > 900 and height > 900
    assert figure.axes[0].get_ylabel() == ("padded tokens" if absent else "own compute [s]")
