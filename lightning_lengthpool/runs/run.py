"""Find, load and fit what `SyncMonitor` left of a run, finished or still going."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_lengthpool.ordering.lengths_file import read_lengths
from lightning_lengthpool.ordering.local_paths import local_path
from lightning_lengthpool.runs.causes import CauseTracker, Summary, Window
from lightning_lengthpool.runs.distribution import Difference, difference_of_ranks
from lightning_lengthpool.runs.findings import difference_in, findings
from lightning_lengthpool.runs.run_json import About, read_about
from lightning_lengthpool.runs.speed_fit import MIN_MICRO_BATCHES, Fit
from lightning_lengthpool.runs.steps.records import by_step, step_starts, summarize
from lightning_lengthpool.runs.steps.steps_file import read_steps, thinned

Array = NDArray[np.float64]

_LISTED = 10  # files named in an error
_NAME = 36  # characters of a run's name, which stands in titles of figures
_WINDOW, _WINDOWS = 50, 150  # steps of a window of causes at least; windows of a run at most


@dataclass(frozen=True)
class Run:
    """A run's records and what comes of them."""

    path: Path
    """Its `steps.csv`."""
    name: str
    """Short, from the folders in which it lies."""
    table: dict[str, Array]
    """See `records.by_step`."""
    costs: Array
    """Padded tokens of each micro-batch, shape `[micro-batches, ranks]`."""
    starts: NDArray[np.int64]
    """The first micro-batch of each step, shape `[steps]`."""
    summary: dict[str, Any]
    """See `records.RunTotals.summary`."""
    windows: list[Window]
    causes: Summary
    """Where its time went, over all steps."""
    difference: Difference | None
    """How differently the ranks' lengths are distributed; None if that cannot be told."""
    findings: list[str]
    every: int
    """See `steps_file.thinned`."""
    about: About
    """What its `run.json` tells."""

    @property
    def ranks(self) -> list[int]:
        return [int(rank) for rank in self.table["rank"]]


def find_steps(path: str | Path) -> Path:
    """Find the one `steps.csv` at or below a path; raise `ValueError` if there is none, or several."""
    path = local_path(path, "the run")
    if path.is_file():
        return path
    if not path.is_dir():
        raise ValueError(f"there is no file or folder {path}")
    if not os.access(path, os.R_OK | os.X_OK):  # rglob would find nothing and say nothing
        raise ValueError(f"the folder {path} cannot be read: permission denied")
    files = sorted(path.rglob("steps.csv"), key=lambda file: (file.stat().st_mtime, file))
    if not files:
        raise ValueError(f"there is no steps.csv in {path} or any folder below it; SyncMonitor writes one during fit")
    if len(files) > 1:
        shown = "".join(f"\n  {file}" for file in files[-_LISTED:])
        more = f"\n  {len(files) - _LISTED} older ones, and" if len(files) > _LISTED else ""
        raise ValueError(f"{len(files)} runs lie below {path}, name one of them (the newest comes last):{more}{shown}")
    return files[0]


def load_run(path: str | Path) -> Run:
    """Load a run, of a `steps.csv` or a folder with one somewhere below it.

    Raises `ValueError` if there is not exactly one, it is not a step record file or holds more than one run, it has
    less than two steps yet, or `run.json` or `lengths.csv` beside it cannot be used.
    """
    file = find_steps(path)
    steps = read_steps(file)
    try:
        table = by_step(steps)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None
    if len(table["step"]) < 2:  # the first one contains the start-up, and is no use for most figures
        count = "no steps" if not len(table["step"]) else "only one step"
        raise ValueError(f"{file} has {count} yet; a run writes them every_n_steps (of SyncMonitor) at a time")
    width = len(table["rank"])
    costs = steps["padded_tokens"].reshape(-1, width)
    starts = step_starts(steps["step"].reshape(-1, width)[:, 0])
    tracker = CauseTracker(window=max(_WINDOW, -(-len(table["step"]) // _WINDOWS)))
    windows = [*tracker.add(steps), *tracker.finish()]
    about = read_about(file.parent)
    lengths = _read_lengths(file.with_name("lengths.csv"), table["rank"])
    if lengths is None and steps["samples"].max() <= 1:  # then every sample has a row of its own
        lengths = [*steps["longest"].reshape(-1, width).T]
    hosts = about.hosts if about.hosts is not None and len(about.hosts) == width else None
    causes = tracker.summary()
    try:
        if lengths is None:
            difference = difference_of_ranks([*costs.T])
        else:
            difference = difference_in(causes, lengths, about.settings)
        sentences = findings(causes, hosts=hosts, lengths=lengths, settings=about.settings, difference=difference)
    except ValueError as error:
        raise ValueError(f"{file.parent}: {error}") from None
    return Run(
        path=file,
        name=_name(file),
        table=table,
        costs=costs,
        starts=starts,
        summary=summarize(steps),
        windows=windows,
        causes=causes,
        difference=difference,
        findings=sentences,
        every=thinned(steps),
        about=about,
    )


def fit_of(path: str | Path, name: str) -> Fit:
    """Fit a run's typical rank: what a micro-batch takes by its cost. The path is as for `load_run`.

    Raises `ValueError`, beginning with `name` (of the one who asks), if the run has no measured compute, fewer than 20
    measured micro-batches, or a time that hardly grows with tokens, as when all batches are of one size.
    """
    file = find_steps(path)
    steps = read_steps(file)
    measured = np.isfinite(steps["compute_seconds"])
    count = np.count_nonzero(measured)
    if not count:
        raise ValueError(
            f"{name}: in {file} no compute seconds were measured, so there is nothing to fit. SyncMonitor measures "
            "them on a single device and under DDP, if no collective runs within the step."
        )
    if count < MIN_MICRO_BATCHES:
        raise ValueError(f"{name}: {file} has {count} measured micro-batches, expected at least {MIN_MICRO_BATCHES}")
    tracker = CauseTracker(window=max(_WINDOW, -(-len(np.unique(steps["step"])) // 20)))  # so that all steps count
    tracker.add(steps)
    tracker.finish()
    fit = tracker.summary().reference
    if fit is None:
        raise ValueError(f"{name}: {file} has one step only, which contains the start-up")
    # each rank was fitted by itself, so only what differs within a rank tells what a token costs
    seconds, rank = fit.seconds(steps["padded_tokens"], steps["longest"]), steps["rank"]
    by_rank = [seconds[measured & (rank == number)] for number in np.unique(rank[measured])]
    low, high = np.quantile(np.concatenate([values / np.median(values) for values in by_rank]), [0.05, 0.95])
    if not (fit.b > 0 and high - low > 0.05):
        raise ValueError(
            f"{name}: in {file} the time of a batch hardly grows with its tokens (a rank's are {low:.2f} to {high:.2f} "
            "times its median), so what a token costs cannot be told. Measure a run whose batches differ in size "
            "(policy 'none', no token budget), on a model that is not bound by its overhead."
        )
    return fit


def _name(file: Path) -> str:
    folder = file.resolve().parent
    folder = folder.parent if folder.name == "sync" else folder
    name = "/".join(folder.parts[-2:]).encode("utf-8", "backslashreplace").decode()  # any byte may stand in a path
    return name if len(name) <= _NAME else "…" + name[-_NAME + 1 :]


def _read_lengths(path: Path, ranks: Array) -> list[Array] | None:
    """Lengths of each rank's samples, if the monitor kept some of every rank."""
    if not path.is_file():
        return None
    try:
        rows = read_lengths(path, "the run's file of lengths", has_ranks=True)
        if rows.ranks is None:
            raise ValueError("it has no column 'rank'")
    except ValueError as error:
        raise ValueError(f"{path} cannot be read ({error}), expected the columns tokens,rank; move it away") from None
    lengths = [rows.tokens[rows.ranks == rank] for rank in ranks]
    return lengths if all(len(of_rank) for of_rank in lengths) else None
