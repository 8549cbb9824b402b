"""Step records: what is kept of each micro-batch on each rank, and their sums.

A step record is one micro-batch on one rank, with the figures `COLUMNS`. Records are a dict of columns, one
array each, sorted by step, micro-batch and rank; with gradient accumulation several records of a rank share a
step. NaN is a figure that could not be measured. Their file is in `steps_file.py`, all formulas in `efficiency.py`.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_lengthpool.ordering import efficiency
from lightning_lengthpool.runs.steps.columns import COLUMNS, Array

SUMMARY = (
    "idle_fraction_compute",
    "idle_fraction_tokens",
    "padding_fraction",
    "useful_fraction",
    "tokens_per_second",
    "seconds_per_step",
    "data_wait_seconds",
    "seconds_to_first_batch",
)
"""The figures of a whole run, see `RunTotals.summary`."""


def by_step(steps: Mapping[str, Array]) -> dict[str, Array]:
    """Sum the micro-batches of each step: what lies between two gradient reductions counts as one.

    Returns `step`, shape `[steps]`, `rank`, shape `[ranks]`, and all other columns but `longest`, shape `[steps,
    ranks]`. A sum with a NaN in it is NaN. Raises `ValueError` if not every micro-batch has one row for each rank.
    """
    ranks = np.unique(steps["rank"])
    rows, width = len(steps["rank"]), max(len(ranks), 1)
    if rows % width or (steps["rank"].reshape(-1, width) != ranks).any():
        raise ValueError(
            f"Every micro-batch needs one row for each of the {len(ranks)} ranks, in order; these records have gaps, "
            "or join runs on different numbers of ranks."
        )
    number = steps["step"].reshape(-1, width)[:, 0] if rows else steps["step"]
    starts = step_starts(number)
    summed = [name for name in COLUMNS if name not in ("step", "rank", "longest")]
    grid = {name: steps[name].reshape(-1, width) for name in summed}
    sums = {name: np.add.reduceat(table, starts) if rows else table for name, table in grid.items()}
    return {"step": number[starts], "rank": ranks, **sums}


def step_starts(step: Array) -> NDArray[np.intp]:
    """Where each step begins among the numbers of rows in order."""
    return np.flatnonzero(np.diff(step, prepend=np.nan) != 0)


class RunTotals:
    """Running sums over the steps of a run: add chunks of records as they come, then ask for the summary."""

    def __init__(self) -> None:
        self.steps = self.compute_steps = 0
        self._ranks: Array | None = None
        self._sums: dict[str, Array] = {}  # per rank, over all steps (the two of compute: over those that have them)
        self._slowest = {"compute_seconds": 0.0, "padded_tokens": 0.0, "data_seconds": 0.0}
        self._first_batch = np.nan
        self._timed = {"tokens": 0.0, "seconds": 0.0}  # without the first step, which contains the start-up

    def add(self, steps: Mapping[str, Array]) -> None:
        """Add records; a step's micro-batches must come in one call."""
        table = by_step(steps)
        if not len(table["step"]):
            return
        if self._ranks is None:
            self._ranks = table["rank"]
            self._first_batch = float(steps["data_seconds"][: len(self._ranks)].max())
            self._sums = {name: np.zeros(len(self._ranks)) for name in table if name not in ("step", "rank")}
        complete = np.isfinite(table["compute_seconds"]).all(axis=1)
        first = 1 if self.steps == 0 else 0
        self.steps += len(table["step"])
        self.compute_steps += int(np.count_nonzero(complete))
        for name, sums in self._sums.items():
            rows = table[name][complete] if name in ("compute_seconds", "wait_seconds") else table[name]
            sums += rows.sum(axis=0)
            if name in self._slowest:
                self._slowest[name] += float(rows.max(axis=1).sum())
        self._timed["tokens"] += float(table["tokens"][first:].sum())
        self._timed["seconds"] += float(table["step_seconds"][first:].max(axis=1).sum())

    def summary(self) -> dict[str, Any]:
        """The figures of the run so far; NaN where nothing was measured.

        They are `steps`, those in `SUMMARY`, and more. `compute_steps` are steps in which every rank's compute was
        measured; the other steps are left out of the compute figures. `tokens_per_second` (all ranks) and
        `seconds_per_step` leave out the first step. `data_wait_seconds` is the sum over steps of the longest wait for
        data, `misses` the batches of all ranks that are not of the class that was meant; `ranks` has for each rank a
        dict of its sums and its `idle_fraction`.
        """
        if self._ranks is None:
            return dict.fromkeys(SUMMARY, np.nan) | {"steps": 0, "compute_steps": 0, "misses": 0, "ranks": []}
        sums, count = self._sums, len(self._ranks)
        idle_tokens = efficiency.rank_idle_fractions(sums["padded_tokens"], self._slowest["padded_tokens"])
        idle_compute = np.full(count, np.nan)
        if self.compute_steps:
            idle_compute = efficiency.rank_idle_fractions(sums["compute_seconds"], self._slowest["compute_seconds"])
        slowest = np.full((1, count), self._slowest["padded_tokens"])
        timed_steps, seconds = self.steps - 1, self._timed["seconds"]
        return {
            "steps": self.steps,
            "compute_steps": self.compute_steps,
            "idle_fraction_compute": float(idle_compute.mean()),
            "idle_fraction_tokens": float(idle_tokens.mean()),
            "padding_fraction": efficiency.padding_fraction(sums["tokens"], sums["padded_tokens"]),
            "useful_fraction": efficiency.useful_fraction(sums["tokens"][None], slowest),
            "tokens_per_second": self._timed["tokens"] / seconds if seconds > 0 else np.nan,
            "seconds_per_step": seconds / timed_steps if timed_steps else np.nan,
            "seconds_to_first_batch": self._first_batch,
            "data_wait_seconds": self._slowest["data_seconds"],
            "misses": int(sums["misses"].sum()),
            "ranks": [
                {
                    "rank": int(rank),
                    "samples": int(sums["samples"][i]),
                    "tokens": float(sums["tokens"][i]),
                    "compute_seconds": float(sums["compute_seconds"][i]) if self.compute_steps else np.nan,
                    "wait_seconds": float(sums["wait_seconds"][i]) if self.compute_steps else np.nan,
                    "data_seconds": float(sums["data_seconds"][i]),
                    "idle_fraction": float((idle_compute if self.compute_steps else idle_tokens)[i]),
                }
                for i, rank in enumerate(self._ranks)
            ],
        }


def summarize(steps: Mapping[str, Array]) -> dict[str, Any]:
    """The figures of a run's records; see `RunTotals.summary`."""
    totals = RunTotals()
    totals.add(steps)
    return totals.summary()
