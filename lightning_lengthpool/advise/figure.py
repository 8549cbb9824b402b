"""The figure of an advice: what each setting would leave idle."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from lightning_lengthpool.advise.advice import Advice
from lightning_lengthpool.report.figures import BASELINE, WIDTH, new_figure, styled
from lightning_lengthpool.simulation.predict import Prediction

_POLICIES = {
    ("pool", False): ("pool", "#0072B2", "o"),
    ("blocks", False): ("blocks", "#E69F00", "s"),
    ("stream", False): ("stream", "#009E73", "^"),
    ("stream", True): ("stream + reference", "#CC79A7", "D"),
}
"""Policy, and whether it aims at reference lengths -> (what the legend calls it, colour, marker)."""
_TODAY: dict[str, Any] = {"marker": "*", "markersize": 13, "color": "#222222", "label": "today", "zorder": 5}
_RECOMMENDED: dict[str, Any] = {
    "marker": "o",
    "markersize": 13,
    "markerfacecolor": "none",
    "markeredgecolor": "#222222",
    "markeredgewidth": 1.4,
    "label": "recommended",
    "zorder": 6,
}
_PANELS = 3  # beside one another


@styled
def advice_figure(advice: Advice) -> Figure:
    """Draw what `advisor.advise` predicts: idle against pool_size, a panel for each world size, a line for each policy.

    Bands are 90 % intervals; today's setting and the recommended one are marked.
    """
    worlds = list(dict.fromkeys(found.case.world_size for found in advice.predictions))
    wide = min(len(worlds), _PANELS)
    figure = new_figure(WIDTH, 1.0 + 3.4 * -(-len(worlds) // wide))
    grid = figure.subplots(-(-len(worlds) // wide), wide, sharex=True, sharey=True, squeeze=False)
    sizes = [found.case.pool_size for found in advice.predictions if found.case.pool_size]
    known = [found.idle for found in advice.predictions if np.isfinite(found.idle.mean)]
    lowest = min((100 * idle.low for idle in known), default=0.0)
    for axes, world in zip(grid.flat, worlds, strict=False):
        rows = [found for found in advice.predictions if found.case.world_size == world]
        _draw_idle(axes, rows, (min(sizes), max(sizes)))
        for case, look in ((advice.today.case, _TODAY), (advice.recommendation.case, _RECOMMENDED)):
            marked = [found for found in rows if found.case == case]
            axes.plot(
                [found.case.pool_size or min(sizes) for found in marked],
                [100 * found.idle.mean for found in marked],
                linestyle="",
                **look,
            )
        axes.set_title(f"{world:,} rank{'' if world == 1 else 's'}")
        axes.set_xscale("log")
        if lowest >= 0.02:  # else some lines would be below a logarithmic axis
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(LogLocator(10, (1, 2, 5)))
            axes.yaxis.set_minor_locator(NullLocator())
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        else:
            axes.set_ylim(0, None)
        ticks = _apart(sorted(set(sizes)))
        axes.set_xticks(ticks, [_short(size) for size in ticks])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.tick_params(axis="x", labelbottom=True)  # there may be no panel below
        axes.grid(alpha=0.3)
    for axes in grid.flat[len(worlds) :]:
        axes.set_visible(False)
    figure.supxlabel("pool_size", fontsize=10)
    figure.supylabel("idle [%], predicted", fontsize=10)
    handles: dict[str, Any] = {}
    for axes in grid.flat[: len(worlds)]:
        handles |= {str(handle.get_label()): handle for handle in axes.get_legend_handles_labels()[0]}
    figure.legend(handles.values(), handles.keys(), loc="outside upper center", ncols=min(len(handles), 7))
    return figure


def _draw_idle(axes: Axes, rows: Sequence[Prediction], span: tuple[int, int]) -> None:
    for found in (row for row in rows if row.case.policy == "none"):
        mean, low, high = (100 * value for value in found.idle)
        axes.plot(span, [mean, mean], color=BASELINE, linestyle="--", linewidth=1.2, label="no pool")
        axes.fill_between(span, low, high, color=BASELINE, alpha=0.2, linewidth=0)
    for (policy, has_reference), (label, colour, marker) in _POLICIES.items():
        line = [row for row in rows if (row.case.policy, row.case.has_reference) == (policy, has_reference)]
        line.sort(key=lambda row: row.case.pool_size)
        if line:
            size = [row.case.pool_size for row in line]
            mean, low, high = 100 * np.array([row.idle for row in line]).T
            axes.fill_between(size, low, high, color=colour, alpha=0.2, linewidth=0)
            axes.plot(size, mean, color=colour, marker=marker, markersize=4.5, linewidth=1.3, label=label)


def _apart(sizes: Sequence[int], factor: float = 1.7) -> list[int]:
    """Those of ascending sizes that have room for a label on a logarithmic axis."""
    kept: list[int] = []
    for size in sizes:
        if not kept or size >= factor * kept[-1]:
            kept.append(size)
    return kept


def _short(size: int) -> str:
    return f"{size / 1000:g}k" if size >= 1000 else str(size)
