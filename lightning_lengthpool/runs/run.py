"""Find and load what `SyncMonitor` left of a run, finished or still going."""

import csv
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_lengthpool.ordering.local_paths import local_path
from lightning_lengthpool.runs.causes import CauseTracker, Summary, Window
from lightning_lengthpool.runs.findings import findings
from lightning_lengthpool.runs.records import by_step, step_starts, summarize
from lightning_lengthpool.runs.run_json import About, read_about
from lightning_lengthpool.runs.steps_file import read_steps, thinned

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
    findings: list[str]
    every: int
    """See `steps_file.thinned`."""
    about: About
    """What its `run.json` tells."""

    @property
    def ranks(self) -> list[int]:
        return [int(rank) for rank in self.table["rank"]]


def find_steps(path: str | Path) -> Path:
    """Find the one `steps.csv` at or below a path.

    Raises:
        ValueError: If there is none, or several: the message says where it looked, or lists them. Also for a URL of
            storage elsewhere.
    """
    path = local_path(path, "the run")
    if path.is_file():
        return path
    if not path.is_dir():
        raise ValueError(f"there is no file or folder {path}")
    if not os.access(path, os.R_OK | os.X_OK):  # rglob would find nothing and say nothing
        raise ValueError(f"the folder {path} cannot be read: permission denied")
    found = sorted(path.rglob("steps.csv"), key=lambda file: (file.stat().st_mtime, file))
    if not found:
        raise ValueError(f"there is no steps.csv in {path} or any folder below it; SyncMonitor writes one during fit")
    if len(found) > 1:
        shown = "".join(f"\n  {file}" for file in found[-_LISTED:])
        more = f"\n  {len(found) - _LISTED} older ones, and" if len(found) > _LISTED else ""
        raise ValueError(f"{len(found)} runs lie below {path}, name one of them (the newest comes last):{more}{shown}")
    return found[0]


def load_run(path: str | Path) -> Run:
    """Load a run.

    Args:
        path: A `steps.csv`, or a folder with one somewhere below it.

    Raises:
        ValueError: If there is not exactly one, it is not a step record file or holds more than one run, it has less
            than two steps yet, or `run.json` or `lengths.csv` beside it cannot be used.
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
        said = findings(causes, hosts=hosts, lengths=lengths, settings=about.settings)
    except ValueError as error:
        raise ValueError(f"{file.parent}: {error}") from None
    return Run(file, _name(file), table, costs, starts, summarize(steps), windows, causes, said, thinned(steps), about)


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
        text = path.read_text(encoding="utf-8")
        lines = [line for line in text.splitlines(keepends=True) if line.endswith("\n")]  # not a part of one
        rows = np.array([(float(row["rank"]), float(row["tokens"])) for row in csv.DictReader(lines)]).reshape(-1, 2)
        if not (np.isfinite(rows).all() and (rows >= 0).all()):
            raise ValueError
    except (KeyError, TypeError, ValueError):
        raise ValueError(
            f"{path} cannot be read, expected the columns rank,tokens and numbers of at least 0; move it away"
        ) from None
    lengths = [rows[rows[:, 0] == rank, 1] for rank in ranks]
    return lengths if all(len(own) for own in lengths) else None
