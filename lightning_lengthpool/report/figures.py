"""Figures of step records: pure functions from arrays to a Matplotlib `Figure`.

The HTML page, the PNGs beside it and the loggers share them. Nothing here touches pyplot or Matplotlib's global
backend, so drawing in the middle of a training changes nothing for the user's own figures. All colours are told apart
with the common colour-vision deficiencies (Okabe and Ito), and one colour means one thing in all figures.
"""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib import colormaps, style
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator
from numpy.typing import NDArray

from lightning_lengthpool.report.summary import FIGURES
from lightning_lengthpool.runs.steps.records import by_step
from lightning_lengthpool.runs.steps.steps_file import read_steps

Array = NDArray[np.float64]

WORK, FAINT, WAIT, SLOWEST = "#0072B2", "#A9D3F0", "#F2C39B", "#222222"
RUN, BASELINE, CHANCE = "#0072B2", "#777777", "#DDDDDD"
CAUSES = {  # field of a window -> (what the legend calls it, colour)
    "lengths": ("lengths differ", "#E69F00"),
    "slow_rank": ("speeds differ", "#C1440E"),
    "data": ("waiting for data", "#56B4E9"),
    "rest": ("the rest", "#B8B8B8"),
}
FEW_RANKS = 8  # up to here every rank is drawn, above them their spread
WIDTH = 9.6
DPI = 150
_POINTS = 200  # of a distribution's line

# A decorator. Over Matplotlib's own defaults: a style that the user has set is for the user's figures.
styled = style.context(
    [
        "default",
        {
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.titlesize": 11,
            "axes.labelsize": 10,
            "legend.frameon": False,
            "legend.fontsize": 9.5,
            "xtick.labelsize": 9,
            "ytick.labelsize": 9,
            "text.parse_math": False,  # a '$' in the name of a folder is a '$'
        },
    ]
)


@dataclass(frozen=True)
class Panel:
    """Steps in a row of a run: `costs` is what they cost each rank, shape `[steps, ranks]`."""

    title: str
    step: Array
    costs: Array


def png(figure: Figure) -> bytes:
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi="figure")
    return file.getvalue()


def draw_ranks(axes: Axes, step: Array, costs: Array) -> None:
    """Draw ranks over one another, with what they wait for the slowest one shaded."""
    slowest, mean = costs.max(axis=1), costs.mean(axis=1)
    few = costs.shape[1] <= FEW_RANKS
    if few:
        axes.fill_between(
            step, costs.min(axis=1), slowest, color=WAIT, linewidth=0, label="waiting for the slowest rank"
        )
        axes.plot(step, costs[:, 0], color=WORK, linewidth=0.9, label="each rank")
        axes.plot(step, costs[:, 1:], color=WORK, linewidth=0.9)
    else:
        axes.fill_between(step, mean, slowest, color=WAIT, linewidth=0, label="waiting for the slowest rank (mean)")
        low, middle, high = np.quantile(costs, (0.1, 0.5, 0.9), axis=1)
        axes.fill_between(step, low, high, color=FAINT, linewidth=0, label="80 % of the ranks")
        axes.plot(step, middle, color=WORK, linewidth=1.0, label="median rank")
    axes.plot(step, slowest, color=SLOWEST, linewidth=1.0, label="slowest rank")
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))


@styled
def compute_figure(step: Array, costs: Array, ranks: Sequence[int], unit: str) -> Figure:
    """Draw what each rank does at each step: work, then waiting for the slowest rank.

    Up to `FEW_RANKS` ranks have a strip each. Of more ranks the mean, the fastest and the slowest one of each step are
    drawn, and the rank that is the slowest one most often. The steps, shape `[steps]`, are in a row; `costs`, shape
    `[steps, ranks]`, are NaN where not measured; `unit` labels the y axis, say 'own compute [s]'.
    """
    slowest = costs.max(axis=1)
    if len(ranks) > FEW_RANKS:
        figure = new_figure(WIDTH, 4.2)
        axes = figure.add_subplot()
        mean = costs.mean(axis=1)
        _bars(axes, step, np.zeros(len(step)), mean, WORK, "own work (mean of the ranks)")
        _bars(axes, step, mean, slowest, WAIT, "waiting for the slowest rank")
        axes.plot(step, costs.min(axis=1), drawstyle="steps-mid", color=FAINT, linewidth=0.9, label="fastest rank")
        measured = np.isfinite(slowest)
        times = np.bincount(costs[measured].argmax(axis=1), minlength=len(ranks))
        slow = int(times.argmax())
        often = 100 * times[slow] / max(measured.sum(), 1)
        label = f"rank {ranks[slow]}: the slowest in {often:.0f} % of these steps"
        axes.plot(step, costs[:, slow], drawstyle="steps-mid", color=SLOWEST, linewidth=0.9, label=label)
        axes.set(xlabel="step", ylabel=unit, ylim=(0, None), xlim=(step[0] - 0.5, step[-1] + 0.5))
        figure.legend(loc="outside upper center", ncols=2)
        return figure
    figure = new_figure(WIDTH, 1.3 + max(0.75 * len(ranks), 1.6))
    strips = figure.subplots(len(ranks), sharex=True, sharey=True, squeeze=False)[:, 0]
    for axes, rank, values in zip(strips, ranks, costs.T, strict=True):
        _bars(axes, step, np.zeros(len(step)), values, WORK, "own work")
        _bars(axes, step, values, slowest, WAIT, "waiting for the slowest rank")
        axes.set_ylabel(f"rank {rank}", rotation=0, ha="right", va="center")
        axes.yaxis.set_major_locator(MaxNLocator(3))
        if np.nanmax(slowest, initial=0) > 1000:
            axes.yaxis.set_major_formatter(FuncFormatter(_thousands))
    strips[-1].set(xlabel="step", ylim=(0, None), xlim=(step[0] - 0.5, step[-1] + 0.5))
    figure.supylabel(unit, fontsize=10)
    figure.legend(*strips[0].get_legend_handles_labels(), loc="outside upper center", ncols=2)
    return figure


@styled
def lengths_figure(panels: Sequence[Panel], unit: str = "padded tokens") -> Figure:
    """Draw lengths per rank and step, one panel for each order of the samples, on a shared y axis."""
    figure = new_figure(WIDTH, 4.0)
    grid = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axes, panel in zip(grid, panels, strict=True):
        draw_ranks(axes, panel.step, panel.costs)
        axes.set_title(panel.title)
        axes.set_xlabel("step")
    grid[0].set(ylabel=unit, ylim=(0, None))
    grid[0].yaxis.set_major_formatter(FuncFormatter(_thousands))
    figure.legend(*grid[0].get_legend_handles_labels(), loc="outside upper center", ncols=5)
    return figure


@styled
def causes_figure(windows: Mapping[str, Sequence[Any]]) -> Figure:
    """Draw the idle time over the course of runs, split by cause: each title has its windows (`causes.Window`)."""
    figure = new_figure(WIDTH, 3.9)
    grid = figure.subplots(1, len(windows), sharey=True, squeeze=False)[0]
    for axes, (title, rows) in zip(grid, windows.items(), strict=True):
        first = np.array([row.first_step for row in rows])
        edges = np.append(first, rows[-1].last_step + 1)
        bottom = np.zeros(len(rows))
        for field, (label, colour) in CAUSES.items():
            # what was not measured takes no room; the idle time then is what the other causes make up
            top = bottom + np.nan_to_num([100 * getattr(row, field) for row in rows])
            lower, upper = (np.append(values, values[-1]) for values in (bottom, top))
            axes.fill_between(
                edges, lower, upper, step="post", facecolor=colour, edgecolor="white", linewidth=0.4, label=label
            )
            bottom = top
        idle = 100 * np.array([row.idle for row in rows])
        axes.stairs(idle, edges, color=SLOWEST, linewidth=1.1, baseline=None, label="idle in all")
        axes.set(xlabel="step", title=title, xlim=(edges[0], edges[-1]))
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    grid[0].set(ylabel="share of the ranks' time [%]", ylim=(0, None))
    figure.legend(*grid[0].get_legend_handles_labels(), loc="outside upper center", ncols=5)
    return figure


@styled
def distribution_figure(costs: Array, ranks: Sequence[int], unit: str, title: str = "") -> Figure:
    """Draw how the micro-batches' costs, shape `[micro-batches, ranks]`, are distributed on each rank."""
    figure = new_figure(WIDTH, 4.0)
    axes = figure.add_subplot()
    levels = np.linspace(0, 1, min(_POINTS, max(len(costs), 2)))
    quantiles = np.quantile(np.maximum(costs, 1), levels, axis=0)  # a logarithmic axis has no 0
    share = 100 * levels
    if len(ranks) <= FEW_RANKS:
        colours = colormaps["viridis"](np.linspace(0, 0.9, len(ranks)))
        for values, rank, colour in zip(quantiles.T, ranks, colours, strict=True):
            axes.plot(values, share, color=colour, linewidth=1.5, label=f"rank {rank}")
    else:
        low, high = quantiles.min(axis=1), quantiles.max(axis=1)
        axes.fill_betweenx(share, low, high, color=FAINT, linewidth=0, label=f"range of {len(ranks)} ranks")
        axes.plot(np.median(quantiles, axis=1), share, color=WORK, linewidth=1.5, label="median of the ranks")
        mean = costs.mean(axis=0)
        for index, word, colour in ((mean.argmax(), "longest", SLOWEST), (mean.argmin(), "shortest", "#009E73")):
            label = f"rank {ranks[index]}: the {word} on average"
            axes.plot(quantiles[:, index], share, color=colour, linewidth=1.1, label=label)
    axes.set(xscale="log", xlabel=unit, ylabel="share of the micro-batches [%]", ylim=(0, 100), title=title)
    axes.xaxis.set_major_formatter(FuncFormatter(_thousands))
    axes.xaxis.set_minor_formatter(FuncFormatter(_few_minor(quantiles.min(), quantiles.max())))
    axes.tick_params(axis="x", which="both", length=3.5, pad=3.5, labelsize=9)
    axes.grid(alpha=0.3)
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))
    return figure


@styled
def correlation_figure(runs: Mapping[str, Array], band: float) -> Figure:
    """Draw how much the lengths of neighbouring steps have in common.

    `runs` gives by title the correlations at the lags 1, 2, ...; the second is the baseline. 95 % of random orders stay
    below `band`, in absolute value.
    """
    figure = new_figure(WIDTH, 3.4)
    axes = figure.add_subplot()
    lags = np.arange(1, 1 + max(len(values) for values in runs.values()))
    axes.axhspan(-band, band, color=CHANCE, linewidth=0, label="95 % of random orders")
    axes.axhline(0, color=SLOWEST, linewidth=0.6)
    styles = ((RUN, "o", "-"), (BASELINE, "s", "--"))
    for (title, values), (colour, marker, line) in zip(runs.items(), styles, strict=False):
        axes.plot(lags[: len(values)], values, color=colour, marker=marker, linestyle=line, linewidth=1.2, label=title)
    axes.set(xlabel="steps apart", ylabel="correlation of lengths")
    axes.margins(y=0.15)
    axes.set_xticks(lags)
    axes.grid(axis="y", alpha=0.3)
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))
    return figure


@styled
def compare_figure(results: Mapping[str, Any], window: int = 60) -> Figure:
    """Draw policies side by side, from what `report.compare_runs` returned; its `steps_csv` files are read again.

    Above, for each policy's first run, the compute seconds of every rank over the last `window` steps, with
    the time that the ranks wait for the slowest shaded (padded tokens where compute was not measured). Below,
    idle and padding.
    """
    policies = results["policies"]
    tables = [by_step(read_steps(entry["runs"][0]["steps_csv"])) for entry in policies]
    measured = all(not np.isnan(table["compute_seconds"]).all() for table in tables)
    column, unit = ("compute_seconds", "own compute [s]") if measured else ("padded_tokens", "padded tokens")

    figure = new_figure(max(3.4 * len(policies), 6.0), 6.4)
    grid = figure.add_gridspec(2, len(policies), height_ratios=[3, 2])
    top = None
    for i, (entry, table) in enumerate(zip(policies, tables, strict=True)):
        axes = top = figure.add_subplot(grid[0, i], sharey=top)
        draw_ranks(axes, table["step"][1:][-window:], table[column][1:][-window:])  # the first step holds the start-up
        idle = _percent(entry["mean"]["idle_fraction_compute" if measured else "idle_fraction_tokens"])
        axes.set(title=f"{entry['policy']}: {idle:.1f} % idle", xlabel="step", ylim=(0, None))
        axes.tick_params(labelleft=i == 0)
        if i == 0:
            axes.set_ylabel(unit)
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=5)

    bars = figure.add_subplot(grid[1, :])
    names = ("idle_fraction_compute", "idle_fraction_tokens", "padding_fraction")
    colours = (WORK, CAUSES["lengths"][1], CAUSES["rest"][1])
    for k, (name, colour) in enumerate(zip(names, colours, strict=True)):
        heights = [_percent(entry["mean"][name]) for entry in policies]
        errors = [_percent(entry["std"][name]) for entry in policies]
        x = np.arange(len(policies)) + (k - 1) * 0.27
        drawn = bars.bar(x, heights, 0.25, yerr=errors, color=colour, capsize=3, label=FIGURES[name][0])
        bars.bar_label(drawn, [f"{h:.1f}" if np.isfinite(h) else "" for h in heights], padding=2, fontsize=9)
    bars.set_xticks(range(len(policies)), [entry["policy"] for entry in policies])
    bars.set_ylabel("% (lower is better)")
    bars.margins(y=0.15)
    bars.legend(ncols=3, loc="upper right", bbox_to_anchor=(1, 1.16))
    return figure


def new_figure(width: float, height: float) -> Figure:
    """An empty figure; its size is in inches."""
    figure = Figure(figsize=(width, height), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _bars(axes: Axes, step: Array, low: Array, high: Array, colour: str, label: str) -> None:
    """Fill from `low` to `high`, a step wide around each step."""
    edges = np.append(step, step[-1] + 1) - 0.5
    low, high = np.append(low, low[-1]), np.append(high, high[-1])
    axes.fill_between(edges, low, high, step="post", color=colour, linewidth=0, label=label)


def _percent(value: float | None) -> float:
    return np.nan if value is None else 100 * value


def _thousands(value: float, _: int) -> str:
    return f"{value:,.0f}"


def _few_minor(low: float, high: float) -> Any:
    """Label 2 and 5 between the powers of ten, where less than two of those are in sight."""
    digits = (2, 5) if high / low < 300 else ()
    return lambda value, _: f"{value:,.0f}" if round(value / 10 ** np.floor(np.log10(value))) in digits else ""
