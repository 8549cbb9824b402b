"""Sums of step records -> tables and JSON."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from lightning_lengthpool.runs.steps.records import summarize
from lightning_lengthpool.runs.steps.steps_file import read_steps

SHOWN_RANKS = 16

# figure -> (heading, factor, decimals, unit), in the order of the tables
FIGURES = {
    "idle_fraction_compute": ("idle by compute seconds", 100.0, 1, " %"),
    "idle_fraction_tokens": ("idle by tokens", 100.0, 1, " %"),
    "padding_fraction": ("padding", 100.0, 1, " %"),
    "useful_fraction": ("useful", 100.0, 1, " %"),
    "tokens_per_second": ("tokens per second", 1.0, 0, ""),
    "seconds_per_step": ("seconds per step", 1.0, 3, " s"),
    "data_wait_seconds": ("waiting for data", 1.0, 2, " s"),
    "seconds_to_first_batch": ("seconds to the first batch", 1.0, 2, " s"),
    "val_loss": ("validation loss", 1.0, 4, ""),
}
_SECONDS = ("compute_seconds", "wait_seconds", "data_seconds")
COMPARED = tuple(name for name in FIGURES if name not in ("useful_fraction", "data_wait_seconds"))


def compare_runs(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """Summarize for each policy its runs, each with `steps_csv` (a path) and, if there is one, `val_loss`.

    The result is JSON-ready: `{"policies": [{"policy", "repeats", "mean", "std", "runs"}, ...]}` in the order given.
    `mean` and `std` hold the figures named in `COMPARED`; `std` is the sample standard deviation, None with one run; a
    figure that a run lacks is None. `runs` holds the summaries, with their `steps_csv` and `val_loss`.
    """
    policies = []
    for policy, repeats in runs.items():
        summaries = [
            {
                "steps_csv": str(run["steps_csv"]),
                "val_loss": run.get("val_loss"),
                **summarize(read_steps(run["steps_csv"])),
            }
            for run in repeats
        ]
        values = {name: [_number(summary[name]) for summary in summaries] for name in COMPARED}
        policies.append(
            {
                "policy": policy,
                "repeats": len(summaries),
                "mean": {name: float(np.mean(v)) for name, v in values.items()},
                "std": {name: float(np.std(v, ddof=1)) if len(v) > 1 else None for name, v in values.items()},
                "runs": summaries,
            }
        )
    result: dict[str, Any] = _plain({"policies": policies})
    return result


def _number(value: float | None) -> float:
    return np.nan if value is None else float(value)


def _plain(value: Any) -> Any:
    """JSON has no NaN: it becomes None."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_json(result: Mapping[str, Any], path: str | Path) -> None:
    """Write a summary or comparison as JSON, with None where a figure is NaN."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(_plain(result), indent=2, allow_nan=False) + "\n")


def _shown(name: str, value: float | None, std: float | None = None) -> str:
    _, factor, decimals, unit = FIGURES[name]
    if value is None or math.isnan(value):
        return "-"
    deviation = "" if std is None else f" ± {std * factor:,.{decimals}f}"
    shown = round(value * factor, decimals) + 0.0  # no "-0.0" from rounding errors
    return f"{shown:,.{decimals}f}{deviation}{unit}"


def figure_rows(summary: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """A run's figures as text: heading, value, and a note or ''."""
    steps, measured = summary["steps"], summary["compute_steps"]
    notes = {
        "idle_fraction_compute": f"compute: {measured} of {steps} steps",
        "idle_fraction_tokens": f"tokens: {steps} of {steps} steps",
        "tokens_per_second": "all ranks, without the first step",
        "seconds_per_step": "without the first step",
        "data_wait_seconds": "slowest rank of each step",
    }
    rows = [
        (heading, _shown(name, summary[name]), notes.get(name, ""))
        for name, (heading, *_) in FIGURES.items()
        if name in summary
    ]
    if summary["misses"]:
        rows.append(("batches of another class", f"{summary['misses']:,}", "of all ranks; see class_shares"))
    return rows


def rank_rows(summary: Mapping[str, Any]) -> tuple[list[str], list[list[str]], int]:
    """Headings, a row of text for each rank, and how many ranks are left out.

    Of more than 16 ranks these are the 8 most and the 8 least busy, sorted from the busiest to the least busy.
    """
    by = "compute" if summary["compute_steps"] else "tokens"
    headings = ["rank", "samples", "tokens", "compute s", "wait s", "data wait s", f"idle by {by}"]
    rows = summary["ranks"]
    hidden = max(0, len(rows) - SHOWN_RANKS)
    if hidden:
        rows = sorted(rows, key=lambda row: row["idle_fraction"])
        rows = [*rows[: SHOWN_RANKS // 2], *rows[-SHOWN_RANKS // 2 :]]
    shown = [
        [
            str(row["rank"]),
            f"{row['samples']:,}",
            f"{row['tokens']:,.0f}",
            *("-" if math.isnan(_number(row[name])) else f"{row[name]:,.2f}" for name in _SECONDS),
            _shown("idle_fraction_tokens", row["idle_fraction"]),
        ]
        for row in rows
    ]
    return headings, shown, hidden


def hidden_note(hidden: int) -> str:
    """What stands below a table of ranks that leaves some out."""
    return f"The {SHOWN_RANKS // 2} most and the {SHOWN_RANKS // 2} least busy ranks; {hidden} are not shown."


def steps_table(summary: Mapping[str, Any]) -> RenderableType:
    """A run's figures and a row for each rank; of more than 16 ranks the 8 most and the 8 least busy."""
    title = f"Synchronisation, {len(summary['ranks'])} rank(s), {summary['steps']} step(s)"
    figures = Table(box=None, show_header=False, title=title)
    figures.add_column(style="bold")
    figures.add_column(justify="right")
    figures.add_column(style="dim")
    for figure in figure_rows(summary):
        figures.add_row(*figure)

    headings, rows, hidden = rank_rows(summary)
    table = Table(box=box.SIMPLE_HEAD)
    for heading in headings:
        table.add_column(heading, justify="right")
    for i, row in enumerate(rows):
        table.add_row(*row, end_section=hidden > 0 and i == SHOWN_RANKS // 2 - 1)
    return Group(figures, table, *([Text(hidden_note(hidden))] if hidden else []))


def compare_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """`compare_runs(...)["policies"]` side by side: mean, and ± sample standard deviation of several runs."""
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("")
    for row in rows:
        table.add_column(f"{row['policy']} (n={row['repeats']})", justify="right")
    for name in COMPARED:
        table.add_row(FIGURES[name][0], *(_shown(name, row["mean"][name], row["std"][name]) for row in rows))
    return table


def print_table(table: RenderableType) -> None:
    """Print a table; without colours and 110 columns wide where the output is not a terminal."""
    console = Console()
    if not console.is_terminal:  # without colours by itself
        console.width = 110
    console.print(table)
