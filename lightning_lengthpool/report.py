"""Sums of step records -> tables, JSON and a figure."""

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

from lightning_lengthpool.records import by_step, read_steps, summarize

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
COMPARED = tuple(name for name in FIGURES if name not in ("useful_fraction", "data_wait_seconds"))


def compare_runs(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """Summarize several runs of several policies.

    Args:
        runs: For each policy its runs, each with `steps_csv` (a path) and, if there is one, `val_loss`.

    Returns:
        JSON-ready: `{"policies": [{"policy", "repeats", "mean", "std", "runs"}, ...]}` in the order given.
        `mean` and `std` hold the figures named in `COMPARED`; `std` is the sample standard deviation, None
        with one run; a figure that a run lacks is None. `runs` holds the summaries, with their `steps_csv`
        and `val_loss`.
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
    return _plain({"policies": policies})


def _number(value: float | None) -> float:
    return np.nan if value is None else float(value)


def _plain(value: Any) -> Any:
    """NaN has no place in JSON: it becomes None."""
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


def steps_table(summary: Mapping[str, Any]) -> RenderableType:
    """A run's figures and a row for each rank; of more than 16 ranks the 8 most and the 8 least busy."""
    steps, measured = summary["steps"], summary["compute_steps"]
    figures = Table(
        box=None, show_header=False, title=f"Synchronisation, {len(summary['ranks'])} rank(s), {steps} step(s)"
    )
    figures.add_column(style="bold")
    figures.add_column(justify="right")
    figures.add_column(style="dim")
    notes = {
        "idle_fraction_compute": f"compute: {measured} of {steps} steps",
        "idle_fraction_tokens": f"tokens: {steps} of {steps} steps",
        "tokens_per_second": "all ranks, without the first step",
        "seconds_per_step": "without the first step",
        "data_wait_seconds": "slowest rank of each step",
    }
    for name, (heading, *_) in FIGURES.items():
        if name in summary:
            figures.add_row(heading, _shown(name, summary[name]), notes.get(name, ""))

    by = "compute" if measured else "tokens"
    table = Table(box=box.SIMPLE_HEAD)
    for heading in ("rank", "samples", "tokens", "compute s", "wait s", "data wait s", f"idle by {by}"):
        table.add_column(heading, justify="right")
    rows = summary["ranks"]
    hidden = len(rows) - SHOWN_RANKS
    if hidden > 0:
        rows = sorted(rows, key=lambda row: row["idle_fraction"])
        rows = [*rows[: SHOWN_RANKS // 2], *rows[-SHOWN_RANKS // 2 :]]
    for i, row in enumerate(rows):
        seconds = (row["compute_seconds"], row["wait_seconds"], row["data_seconds"])
        table.add_row(
            str(row["rank"]),
            f"{row['samples']:,}",
            f"{row['tokens']:,.0f}",
            *("-" if math.isnan(_number(value)) else f"{value:,.2f}" for value in seconds),
            _shown("idle_fraction_tokens", row["idle_fraction"]),
            end_section=hidden > 0 and i == SHOWN_RANKS // 2 - 1,
        )
    if hidden <= 0:
        return Group(figures, table)
    return Group(figures, table, Text(f"The 8 most and the 8 least busy ranks; {hidden} are not shown."))


def compare_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Policies side by side: mean, and ± sample standard deviation where a policy has several runs.

    Args:
        rows: The entries of `compare_runs(...)["policies"]`.
    """
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
    (console if console.is_terminal else Console(width=110, color_system=None)).print(table)


def compare_figure(results: Mapping[str, Any], path: str | Path, window: int = 60) -> None:
    """Draw the policies side by side as a PNG.

    Above, for each policy's first run, the compute seconds of every rank over the last `window` steps, with
    the time that the ranks wait for the slowest shaded (padded tokens where compute was not measured). Below,
    idle and padding.

    Args:
        results: What `compare_runs` returned; its `steps_csv` files are read again.
        path: The file to write.
        window: Number of steps shown.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # no global backend, no display
    from matplotlib.figure import Figure

    policies = results["policies"]
    tables = [by_step(read_steps(entry["runs"][0]["steps_csv"])) for entry in policies]
    measured = all(not np.isnan(table["compute_seconds"]).all() for table in tables)
    column, unit = ("compute_seconds", "own compute [s]") if measured else ("padded_tokens", "padded tokens")

    figure = Figure(figsize=(max(3.4 * len(policies), 6.0), 6.4), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(2, len(policies), height_ratios=[3, 2])
    top = None
    for i, (entry, table) in enumerate(zip(policies, tables, strict=True)):
        own, step = (
            table[column][1:][-window:],
            table["step"][1:][-window:],
        )  # the first step contains the start-up
        slowest = own.max(axis=1)
        axes = top = figure.add_subplot(grid[0, i], sharey=top)
        for rank in range(own.shape[1]):
            axes.fill_between(step, own[:, rank], slowest, color="tab:red", alpha=0.5 / own.shape[1], linewidth=0)
        axes.plot(step, own, linewidth=0.9, color="tab:blue", alpha=max(0.25, 0.9 / own.shape[1] ** 0.5))
        axes.plot(step, slowest, linewidth=1.1, color="black")
        idle = entry["mean"]["idle_fraction_compute" if measured else "idle_fraction_tokens"]
        axes.set(title=f"{entry['policy']}: {100 * _number(idle):.1f} % idle", xlabel="step", ylim=(0, None))
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelleft=i == 0)
        if i == 0:
            axes.set_ylabel(unit)
    handles = [
        *figure.axes[0].plot([], [], color="black", label="slowest rank"),
        *figure.axes[0].plot([], [], color="tab:blue", label="each rank"),
        figure.axes[0].fill_between([], [], color="tab:red", alpha=0.3, label="waiting for the slowest"),
    ]
    figure.legend(handles=handles, loc="outside upper center", ncols=3, frameon=False)

    bars = figure.add_subplot(grid[1, :])
    names = ("idle_fraction_compute", "idle_fraction_tokens", "padding_fraction")
    for k, (name, colour) in enumerate(zip(names, ("tab:red", "tab:orange", "tab:gray"), strict=True)):
        heights = [100 * _number(entry["mean"][name]) for entry in policies]
        errors = [100 * _number(entry["std"][name]) for entry in policies]
        places = np.arange(len(policies)) + (k - 1) * 0.27
        drawn = bars.bar(places, heights, 0.25, yerr=errors, color=colour, capsize=3, label=FIGURES[name][0])
        bars.bar_label(drawn, [f"{h:.1f}" if np.isfinite(h) else "" for h in heights], padding=2, fontsize=9)
    bars.set_xticks(range(len(policies)), [entry["policy"] for entry in policies])
    bars.set_ylabel("% (lower is better)")
    bars.margins(y=0.15)
    bars.spines[["top", "right"]].set_visible(False)
    bars.legend(frameon=False, ncols=3, loc="upper right", bbox_to_anchor=(1, 1.16))
    figure.savefig(path, dpi=150)
