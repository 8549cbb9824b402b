"""What the figures of a run show, in words and numbers: for the page, and for loggers."""

from dataclasses import dataclass

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from lightning_lengthpool.ordering import efficiency
from lightning_lengthpool.report import figures
from lightning_lengthpool.runs.distribution import neighbour_correlation
from lightning_lengthpool.runs.formatting import percent, ranks
from lightning_lengthpool.runs.run import Run

Array = NDArray[np.float64]

DRAWINGS = ("compute", "lengths", "causes", "distribution", "correlation")
STEPS = 120  # the newest ones, which are shown step by step
LAGS = 10
SEED = 0  # of the orders that are simulated


@dataclass(frozen=True)
class Drawing:
    """A figure, and what to say about it."""

    name: str
    title: str
    figure: Figure
    alt: str  # the figure in words, with its numbers
    caption: str  # how to read it


def draw(run: Run, baseline: Run | None = None, steps: int = STEPS) -> list[Drawing]:
    """Draw the five figures of a run."""
    return [
        _draw_compute(run, steps),
        _draw_lengths(run, baseline, max(2, steps // 2)),
        _draw_causes(run, baseline),
        _draw_distribution(run),
        _draw_correlation(run, baseline),
    ]


def _draw_compute(run: Run, steps: int) -> Drawing:
    rows = newest(run, steps)
    step, costs = run.table["step"][rows], run.table["compute_seconds"][rows]
    title, unit = "Computing and waiting, step by step", "own compute [s]"
    if not np.isfinite(costs).all(axis=1).any():
        title, unit, costs = (
            "Work and waiting by tokens, step by step",
            "padded tokens",
            run.table["padded_tokens"][rows],
        )
    measured = costs[np.isfinite(costs).all(axis=1)]
    idle = efficiency.idle_fraction(measured)
    slowest = run.ranks[np.bincount(measured.argmax(axis=1), minlength=len(run.ranks)).argmax()]
    alt = (
        f"Work ({unit}) of {ranks(len(run.ranks))} at {_span(step)}, with the waiting for the slowest rank above it: "
        f"{percent(idle)} of the ranks' time. Rank {slowest} is the slowest most often."
    )
    caption = (
        "Every bar is one step. It is as high as the slowest rank's work, for all ranks wait for that one: blue is a "
        "rank's own work, the light part above it is lost. Much light in one and the same rank means that it has "
        "less to do or is faster than the others; a rank with none is the one that they wait for."
    )
    if len(run.ranks) > figures.FEW_RANKS:
        caption = (
            "Every bar is one step. It is as high as the slowest rank's work, for all ranks wait for that one: blue is "
            "the work of the ranks on average, the light part above it is lost. A black line that often reaches the "
            "top is a rank that holds the others up."
        )
    return Drawing("compute", title, figures.compute_figure(step, costs, run.ranks, unit), alt, caption)


def _draw_lengths(run: Run, baseline: Run | None, steps: int) -> Drawing:
    rows = newest(run, steps)
    step, costs = run.table["step"][rows], run.table["padded_tokens"][rows]
    idle = run.summary["idle_fraction_tokens"]
    if baseline is None:
        # each rank keeps its own batches; only which of them meet at a step is left to chance
        shuffled = np.add.reduceat(np.random.default_rng(SEED).permuted(run.costs, axis=0), run.starts)
        before = efficiency.idle_fraction(shuffled)
        title = f"simulated: the same batches in random order\n{percent(before)} idle by tokens"
        left = figures.Panel(title, step, shuffled[rows])
        order = "simulated, each rank's own batches of this run in random order"
    else:
        before = baseline.summary["idle_fraction_tokens"]
        shown = newest(baseline, steps)
        title = f"baseline {baseline.name}\n{percent(before)} idle by tokens"
        left = figures.Panel(title, baseline.table["step"][shown], baseline.table["padded_tokens"][shown])
        order = f"the baseline {baseline.name}"
    right = figures.Panel(f"{run.name}\n{percent(idle)} idle by tokens", step, costs)
    alt = (
        f"Padded tokens of each rank at each step, two panels on one scale. Left: {order}, {percent(before)} idle by "
        f"tokens. Right: {run.name}, {_span(step)}, {percent(idle)}."
    )
    caption = (
        "Where the ranks' lines lie on one another, all ranks have samples of the same length at the same step and "
        "nobody waits; the shaded part is waiting that the lengths alone cause. The percentages are of all steps."
    )
    if baseline is None:
        caption += " The left panel is a prediction, not a measurement; --baseline shows a run without a pool instead."
    return Drawing("lengths", "Lengths on the ranks, step by step", figures.lengths_figure([left, right]), alt, caption)


def _draw_causes(run: Run, baseline: Run | None) -> Drawing:
    runs = {run.name: run.windows}
    if baseline is not None:
        runs = {f"baseline {baseline.name}": baseline.windows, **runs}
    last = run.windows[-1]
    parts = ", ".join(
        f"{label} {percent(getattr(last, field))}"
        for field, (label, _) in figures.CAUSES.items()
        if np.isfinite(getattr(last, field))
    )
    alt = (
        f"Idle share of the ranks' time over {len(run.windows)} windows of steps, split by cause. In the last one, "
        f"steps {last.first_step} to {last.last_step}: {percent(last.idle)} in all ({parts})."
    )
    width = run.windows[0].last_step - run.windows[0].first_step + 1
    caption = (
        f"Each stretch is a window of about {width:,} steps. 'Lengths differ' is what a length pool can save; 'speeds "
        "differ' is what one rank's hardware, or a neighbour on its machine, costs the others; 'waiting for data' is "
        "what more workers or faster storage can save."
    )
    if all(window.by == "tokens" for window in run.windows):
        caption += " Compute seconds were not measured in this run, so only what the lengths cost can be told."
    return Drawing("causes", "Why the ranks wait, over the run", figures.causes_figure(runs), alt, caption)


def _draw_distribution(run: Run) -> Drawing:
    difference = run.difference
    flag = "One rank" if len(run.ranks) == 1 else "Too few samples to tell whether the ranks' lengths differ"
    if difference is not None:
        flag = "The ranks' lengths are alike: what differs is within chance"
        if difference.is_sure:
            points = f"{100 * difference.excess:.1f} points of idle time that no order can remove"
            flag = f"The ranks' lengths differ: {points}"
    median = np.median(run.costs, axis=0)
    alt = (
        f"Cumulative distribution of padded tokens per micro-batch for {ranks(len(run.ranks))}. The ranks' medians lie "
        f"from {median.min():,.0f} to {median.max():,.0f}. {flag}."
    )
    caption = (
        "A point says which share of a rank's micro-batches are at most that long. Lines on one another are what a "
        "pool needs: it can match the ranks' lengths only if they have the same ones. If a line lies apart, deal the "
        "data to the ranks again, shuffled; no pool_size makes up for it."
    )
    figure = figures.distribution_figure(run.costs, run.ranks, "padded tokens of a micro-batch", flag)
    return Drawing("distribution", "Lengths of each rank", figure, alt, caption)


def _draw_correlation(run: Run, baseline: Run | None) -> Drawing:
    runs = {run.name: run} | ({} if baseline is None else {f"baseline {baseline.name}": baseline})
    # in a thinned file a few pairs lie across a gap: of those k steps apart, k in BLOCK
    values = {name: neighbour_correlation(one.table["padded_tokens"].mean(axis=1), LAGS) for name, one in runs.items()}
    band = 1.96 / np.sqrt(min(len(one.table["step"]) for one in runs.values()))
    first = "; ".join(f"{name} {lags[0]:.2f}" if np.isfinite(lags[0]) else f"{name} -" for name, lags in values.items())
    alt = (
        f"Correlation of the lengths of steps 1 to {LAGS} apart. One step apart: {first}. In a random order 95 % lie "
        f"within {band:.2f} of 0."
    )
    caption = (
        "Points within the grey band are what a random order gives. Points above it say that long steps follow long "
        "ones: neighbouring gradients then come from similar samples. A pool should not raise it above the baseline."
    )
    figure = figures.correlation_figure(values, float(band))
    return Drawing("correlation", "Are neighbouring steps alike?", figure, alt, caption)


def newest(run: Run, steps: int) -> slice:
    """The longest stretch of steps in a row among the newest ones; never the first step, which holds the start-up."""
    step = run.table["step"]
    start = max(len(step) - steps, 1)
    bounds = [start, *(np.flatnonzero(np.diff(step[start:]) > 1) + start + 1), len(step)]
    return max((slice(a, b) for a, b in zip(bounds, bounds[1:], strict=False)), key=lambda rows: rows.stop - rows.start)


def _span(step: Array) -> str:
    return f"steps {step[0]:.0f} to {step[-1]:.0f}"
