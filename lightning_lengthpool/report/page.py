"""`report`: one self-contained HTML page about a run, and its figures as PNGs."""

import base64
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from lightning_lengthpool import __version__
from lightning_lengthpool.report.drawings import DRAWINGS, STEPS, Drawing, draw
from lightning_lengthpool.report.figures import png
from lightning_lengthpool.report.out_folder import make_out
from lightning_lengthpool.report.summary import figure_rows, hidden_note, rank_rows
from lightning_lengthpool.runs.formatting import ranks
from lightning_lengthpool.runs.run import Run, find_steps, load_run
from lightning_lengthpool.runs.steps.steps_file import BLOCK


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
    drawings = {drawing: png(drawing.figure) for drawing in draw(loaded, other, steps)}
    for drawing, image in drawings.items():
        (folder / f"{drawing.name}.png").write_bytes(image)
    # a path may hold bytes that are no text
    page.write_bytes(render(loaded, other, drawings).encode("utf-8", "backslashreplace"))
    print(f"Written: {page} and its {len(drawings)} figures as PNGs beside it")
    for sentence in loaded.findings:
        print(f"- {sentence}")
    return page


def render(run: Run, baseline: Run | None, drawings: Mapping[Drawing, bytes]) -> str:
    """Return the page, from drawings and their PNGs: it needs no other file and no network."""
    headings, rows, hidden = rank_rows(run.summary)
    templates = Environment(
        loader=PackageLoader("lightning_lengthpool.report", ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return templates.get_template("page.html.jinja").render(
        run=run,
        baseline=baseline,
        facts=_facts,
        figures_table=_figures_table(run, baseline),
        ranks_table=(headings, rows),
        hidden_note=hidden_note(hidden) if hidden else "",
        drawings=[(drawing, base64.b64encode(image).decode("ascii")) for drawing, image in drawings.items()],
        version=__version__,
        written=time.strftime("%Y-%m-%d %H:%M"),
    )


def _facts(run: Run) -> str:
    """What stands behind a run's path."""
    step = run.table["step"]
    kept = f"{ranks(len(run.ranks))} · {len(step):,} steps ({step[0]:.0f} to {step[-1]:.0f})"
    return kept + (f", thinned: one block of {BLOCK} steps in {run.every} was kept" if run.every > 1 else "")


def _figures_table(run: Run, baseline: Run | None) -> tuple[list[str], Sequence[tuple[str, ...]]]:
    """Headings and rows of the figures; the last column remarks."""
    rows = figure_rows(run.summary)
    if baseline is None:
        return ["", run.name, ""], rows
    joined = []
    for (heading, value, note), (_, other, other_note) in zip(rows, figure_rows(baseline.summary), strict=True):
        joined.append((heading, other, value, note if note == other_note else f"{note}; baseline {other_note}"))
    return ["", f"baseline {baseline.name}", run.name, ""], joined
