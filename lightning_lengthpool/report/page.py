"""`report`: one self-contained HTML page about a run, and its figures as PNGs."""

import base64
import time
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from lightning_lengthpool import __version__
from lightning_lengthpool.ordering import efficiency
from lightning_lengthpool.report import figures
from lightning_lengthpool.report.out_folder import make_out
from lightning_lengthpool.report.tables import figure_rows, hidden_note, rank_rows
from lightning_lengthpool.runs.distribution import neighbour_correlation, non_iid
from lightning_lengthpool.runs.run import Run, find_steps, load_run
from lightning_lengthpool.runs.steps_file import BLOCK

Array = NDArray[np.float64]

DRAWINGS = ("compute", "lengths", "causes", "distribution", "correlation")  # each becomes a PNG
STEPS = 120  # the newest ones, which are shown step by step
LAGS = 10
_CHECKED = 500_000  # costs that the check for equal distributions takes at most
_SEED = 0  # of the orders that are simulated


@dataclass(frozen=True)
class Drawing:
    """A figure, and what to say about it."""

    name: str
    title: str
    figure: Figure
    alt: str
    """The figure in words, with its numbers."""
    caption: str
    """How to read it."""


def report(
    run: str | Path, baseline: str | Path | None = None, out: str | Path | None = None, steps: int = STEPS
) -> Path:
    """Write the page about a run, and its figures beside it; print where, and the findings.

    Args:
        run: A `steps.csv`, or a folder with one somewhere below it, of a finished or a running job.
        baseline: The same of a run to compare with, say one without a pool.
        out: Folder for the page; None for `report` beside the `steps.csv`.
        steps: How many of the newest steps the figures of single steps show.

    Returns:
        The page.

    Raises:
        ValueError: If `steps` is less than 2, a run cannot be found or read, or has less than two steps, or the folder
            cannot be written to.
    """
    if steps < 2:
        raise ValueError(f"steps is {steps}, expected an integer of at least 2")
    folder = find_steps(run).parent / "report" if out is None else Path(out)
    page = make_out(folder, ["report.html", *(f"{name}.png" for name in DRAWINGS)]) / "report.html"
    loaded = load_run(run)
    other = None if baseline is None else load_run(baseline)
    drawings = draw(loaded, other, steps)
    images = [figures.png(drawing.figure) for drawing in drawings]
    for drawing, image in zip(drawings, images, strict=True):
        (folder / f"{drawing.name}.png").write_bytes(image)
    # a path may hold bytes that are no text
    page.write_bytes(render(loaded, other, drawings, images).encode("utf-8", "backslashreplace"))
    print(f"Written: {page} and its {len(drawings)} figures as PNGs beside it")
    for sentence in loaded.findings:
        print(f"- {sentence}")
    return page


def draw(run: Run, baseline: Run | None = None, steps: int = STEPS) -> list[Drawing]:
    """Draw the five figures of a run."""
    rng = np.random.default_rng(_SEED)
    return [
        _draw_compute(run, steps),
        _draw_lengths(run, baseline, max(2, steps // 2), rng),
        _draw_causes(run, baseline),
        _draw_distribution(run, rng),
        _draw_correlation(run, baseline),
    ]


def _draw_compute(run: Run, steps: int) -> Drawing:
    rows = _newest(run, steps)
    step, own = run.table["step"][rows], run.table["compute_seconds"][rows]
    title, unit = "Computing and waiting, step by step", "own compute [s]"
    if not np.isfinite(own).all(axis=1).any():
        title, unit, own = "Work and waiting by tokens, step by step", "padded tokens", run.table["padded_tokens"][rows]
    measured = own[np.isfinite(own).all(axis=1)]
    idle = efficiency.idle_fraction(measured)
    slowest = run.ranks[np.bincount(measured.argmax(axis=1), minlength=len(run.ranks)).argmax()]
    alt = (
        f"Work ({unit}) of {_ranks(run)} at {_span(step)}, with the waiting for the slowest rank above it: "
        f"{_percent(idle)} of the ranks' time. Rank {slowest} is the slowest most often."
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
    return Drawing("compute", title, figures.compute_figure(step, own, run.ranks, unit), alt, caption)


def _draw_lengths(run: Run, baseline: Run | None, steps: int, rng: np.random.Generator) -> Drawing:
    rows = _newest(run, steps)
    step, own = run.table["step"][rows], run.table["padded_tokens"][rows]
    idle = run.summary["idle_fraction_tokens"]
    if baseline is None:
        # each rank keeps its own batches; only which of them meet at a step is left to chance
        shuffled = np.add.reduceat(rng.permuted(run.costs, axis=0), run.starts)
        before = efficiency.idle_fraction(shuffled)
        title = f"simulated: the same batches in random order\n{_percent(before)} idle by tokens"
        left = figures.Panel(title, step, shuffled[rows])
        said = "simulated, each rank's own batches of this run in random order"
    else:
        before = baseline.summary["idle_fraction_tokens"]
        shown = _newest(baseline, steps)
        title = f"baseline {baseline.name}\n{_percent(before)} idle by tokens"
        left = figures.Panel(title, baseline.table["step"][shown], baseline.table["padded_tokens"][shown])
        said = f"the baseline {baseline.name}"
    right = figures.Panel(f"{run.name}\n{_percent(idle)} idle by tokens", step, own)
    alt = (
        f"Padded tokens of each rank at each step, two panels on one scale. Left: {said}, {_percent(before)} idle by "
        f"tokens. Right: {run.name}, {_span(step)}, {_percent(idle)}."
    )
    caption = (
        "Where the ranks' lines lie on one another, all ranks have samples of the same length at the same step and "
        "nobody waits; the shaded part is waiting that the lengths alone cause. The percentages are of all steps."
    )
    if baseline is None:
        caption += (
            " The left panel is a prediction, not a measurement; --baseline shows a run without a pool in its place."
        )
    return Drawing("lengths", "Lengths on the ranks, step by step", figures.lengths_figure([left, right]), alt, caption)


def _draw_causes(run: Run, baseline: Run | None) -> Drawing:
    runs = {run.name: run.windows}
    if baseline is not None:
        runs = {f"baseline {baseline.name}": baseline.windows, **runs}
    last = run.windows[-1]
    parts = ", ".join(
        f"{label} {_percent(getattr(last, field))}"
        for field, (label, _) in figures.CAUSES.items()
        if np.isfinite(getattr(last, field))
    )
    alt = (
        f"Idle share of the ranks' time over {len(run.windows)} windows of steps, split by cause. In the last one, "
        f"steps {last.first_step} to {last.last_step}: {_percent(last.idle)} in all ({parts})."
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


def _draw_distribution(run: Run, rng: np.random.Generator) -> Drawing:
    costs = run.table["padded_tokens"]
    if costs.size > _CHECKED:  # sorted many times below
        costs = costs[np.sort(rng.choice(len(costs), max(_CHECKED // len(run.ranks), 2), replace=False))]
    check = non_iid(costs, rng)
    flag = "The ranks' lengths are alike: what differs is within chance" if len(run.ranks) > 1 else "One rank"
    if check.differs:
        flag = f"The ranks' lengths differ: {100 * check.excess:.1f} points of idle time that no order can remove"
    median = np.median(run.costs, axis=0)
    alt = (
        f"Cumulative distribution of padded tokens per micro-batch for {_ranks(run)}. The ranks' medians lie from "
        f"{median.min():,.0f} to {median.max():,.0f}. {flag}."
    )
    caption = (
        "A point says which share of a rank's micro-batches are at most that long. Lines on one another are what a "
        "pool needs: it can match the ranks' lengths only if they have the same ones. If a line lies apart, deal the "
        "data out to the ranks anew, shuffled; no pool_size makes up for it."
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


def _newest(run: Run, steps: int) -> slice:
    """The longest stretch of steps in a row among the newest ones; never the first step, which holds the start-up."""
    step = run.table["step"]
    start = max(len(step) - steps, 1)
    bounds = [start, *(np.flatnonzero(np.diff(step[start:]) > 1) + start + 1), len(step)]
    return max((slice(a, b) for a, b in zip(bounds, bounds[1:], strict=False)), key=lambda rows: rows.stop - rows.start)


def _ranks(run: Run) -> str:
    return f"{len(run.ranks)} rank{'s' if len(run.ranks) > 1 else ''}"


def _span(step: Array) -> str:
    return f"steps {step[0]:.0f} to {step[-1]:.0f}"


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.1f} %" if np.isfinite(fraction) else "an unknown share"


def render(run: Run, baseline: Run | None, drawings: Sequence[Drawing], images: Sequence[bytes]) -> str:
    """Return the page: it needs no other file and no network.

    Args:
        run: The run.
        baseline: The run to compare with.
        drawings: Its figures.
        images: The same as PNGs.
    """
    parts = [
        f"<h1>Where the time goes <small>{escape(run.name)}</small></h1>",
        f'<p class="facts">{_facts(run)}</p>',
    ]
    if baseline is not None:
        parts.append(f'<p class="facts">Baseline: {_facts(baseline)}</p>')
    parts += ["<h2>Findings</h2>", _items(run.findings)]
    if baseline is not None and baseline.findings:
        parts += ["<h3>Of the baseline</h3>", _items(baseline.findings)]
    parts += ["<h2>The whole run in numbers</h2>", _figures_table(run, baseline)]
    for drawing, image in zip(drawings, images, strict=True):
        data = base64.b64encode(image).decode("ascii")
        parts.append(
            f'<h2 id="{drawing.name}">{escape(drawing.title)}</h2>\n<figure><div class="scroll">'
            f'<img alt="{escape(drawing.alt)}" src="data:image/png;base64,{data}"></div>\n'
            f"<figcaption>{escape(drawing.caption)}</figcaption></figure>"
        )
    headings, rows, hidden = rank_rows(run.summary)
    parts += ["<h2>The ranks</h2>", _table(headings, rows)]
    if hidden:
        parts.append(f"<p>{escape(hidden_note(hidden))}</p>")
    written = time.strftime("%Y-%m-%d %H:%M")
    parts.append(f"<footer>lightning_lengthpool {escape(__version__)}, written {written}</footer>")
    return _PAGE.format(title=escape(f"{run.name}: where the time goes"), style=_STYLE, body="\n".join(parts))


def _facts(run: Run) -> str:
    step = run.table["step"]
    kept = f"{len(step):,} steps ({step[0]:.0f} to {step[-1]:.0f})"
    if run.every > 1:
        kept += f", thinned: one block of {BLOCK} steps in {run.every} was kept"
    return f"<code>{escape(str(run.path))}</code> · {_ranks(run)} · {kept}"


def _items(sentences: Sequence[str]) -> str:
    return "<ul>\n" + "\n".join(f"<li>{escape(s[:1].upper() + s[1:])}.</li>" for s in sentences) + "\n</ul>"


def _figures_table(run: Run, baseline: Run | None) -> str:
    rows = figure_rows(run.summary)
    if baseline is None:
        return _table(["", run.name, ""], rows, "notes")
    joined = []
    for (heading, value, note), (_, other, other_note) in zip(rows, figure_rows(baseline.summary), strict=True):
        joined.append([heading, other, value, note if note == other_note else f"{note}; baseline {other_note}"])
    return _table(["", f"baseline {baseline.name}", run.name, ""], joined, "notes")


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]], kind: str = "numbers") -> str:
    """A table of text; the first column holds the rows' headings, and in one of `notes` the last one remarks."""
    head = "".join(f'<th scope="col">{escape(heading)}</th>' if heading else "<td></td>" for heading in headings)
    body = "\n".join(
        f'<tr><th scope="row">{escape(row[0])}</th>' + "".join(f"<td>{escape(cell)}</td>" for cell in row[1:]) + "</tr>"
        for row in rows
    )
    return (
        f'<div class="scroll"><table class="{kind}">\n<thead><tr>{head}</tr></thead>\n'
        f"<tbody>\n{body}\n</tbody>\n</table></div>"
    )


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<main>
{body}
</main>
</body>
</html>
"""

# The figures stay on white in the dark as well: their colours are chosen for it.
_STYLE = """
:root { color-scheme: light dark; --page: #fbfbfa; --text: #1c1e21; --dim: #5b616b; --line: #d9dce1; --card: #fff; }
@media (prefers-color-scheme: dark) {
  :root { --page: #16181b; --text: #e6e8ea; --dim: #a2a9b3; --line: #363a40; --card: #1f2226; }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--text); font: 16px/1.55 system-ui, sans-serif; }
main { max-width: 62rem; margin: 0 auto; padding: 1.5rem 1rem 3rem; }
h1 { font-size: 1.7rem; line-height: 1.25; margin: 0 0 .5rem; overflow-wrap: anywhere; }
h1 small { color: var(--dim); font-weight: 400; }
h2 { font-size: 1.2rem; margin: 2.2rem 0 .6rem; }
h3 { font-size: 1rem; margin: 1rem 0 .3rem; }
.facts, footer { color: var(--dim); margin: .2rem 0; overflow-wrap: anywhere; }
footer { margin-top: 2.5rem; font-size: .85rem; }
ul, img { border: 1px solid var(--line); border-radius: 8px; }
ul { margin: 0; padding: .8rem 1rem .8rem 2rem; background: var(--card); }
li + li { margin-top: .35rem; }
figure { margin: 0; }
.scroll { overflow-x: auto; }
img { display: block; width: 100%; min-width: 38rem; background: #fff; }
figcaption { margin-top: .5rem; color: var(--dim); max-width: 48rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .28rem .9rem .28rem 0; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--line); }
th[scope=row], td:first-child { text-align: left; font-weight: 600; }
thead th { color: var(--dim); font-size: .9rem; white-space: normal; vertical-align: bottom; }
@media (max-width: 40rem) {
  th, td { padding-right: .6rem; }
  .notes th[scope=row] { white-space: normal; min-width: 8rem; }
}
.notes td:last-child { text-align: left; color: var(--dim); padding-right: 0; }
"""
