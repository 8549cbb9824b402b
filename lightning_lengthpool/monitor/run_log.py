"""The aggregate of one fit: all ranks' step records, added up in bounded memory. It writes nothing."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_lengthpool.ordering import efficiency
from lightning_lengthpool.runs.causes import CauseTracker, Window
from lightning_lengthpool.runs.findings import findings
from lightning_lengthpool.runs.steps.columns import COLUMNS
from lightning_lengthpool.runs.steps.records import RunTotals, by_step

Array = NDArray[np.float64]


class NewSteps(NamedTuple):
    """What some steps have added."""

    records: dict[str, Array]  # see `columns.COLUMNS`
    figures: list[tuple[int, dict[str, float]]]  # for each step its number and what to log of it
    windows: list[Window]  # that these steps complete
    idle: float  # the share of their time that the ranks waited for each other and for data


class RunLog:
    """Totals, causes and the alert of one fit; `hosts` has the host name of each data rank."""

    def __init__(self, hosts: Sequence[str], alert_idle: float | None = None, alert_windows: int = 3) -> None:
        self.totals = RunTotals()
        self.causes = CauseTracker()
        self.settings: Mapping[str, Any] = {}  # what is known of the data module, see `run_json.About`
        self.lengths: list[Array] | None = None  # of each data rank a sample of its samples' lengths, once known
        self._hosts = hosts
        self._alert_idle, self._alert_windows = alert_idle, alert_windows
        self._idle_windows: list[Window] = []
        self._last_step = -math.inf

    def add(self, rows: Array) -> NewSteps | None:
        """Add the records of some steps and return what is new, None if nothing is.

        `rows` has shape `[ranks, micro-batches, columns]`, the columns as in `COLUMNS`. Steps that were added before
        are passed over.
        """
        rows = rows[:, rows[0, :, 0] > self._last_step]
        if not rows.shape[1]:
            return None
        self._last_step = rows[0, -1, 0]
        # two ranks with one data rank (tensor parallelism) train on the same batches: the first stands for both
        _, firsts = np.unique(rows[:, 0, COLUMNS.index("rank")], return_index=True)
        columns = rows[firsts].transpose(2, 1, 0).reshape(rows.shape[2], -1)
        records = dict(zip(COLUMNS, columns, strict=True))
        self.totals.add(records)
        table = by_step(records)
        return NewSteps(records, _figures(table), self.causes.add(records), _idle(table))

    def finish(self, lengths: Sequence[Array]) -> list[Window]:
        """Keep a sample of each data rank's lengths in tokens; the steps left over are a window of their own."""
        self.lengths = list(lengths)
        return self.causes.finish()

    def findings(self) -> list[str]:
        """Why the ranks waited and what to do, in plain words."""
        return findings(self.causes.summary(), hosts=self._hosts, lengths=self.lengths, settings=self.settings)

    def alert(self, windows: Sequence[Window]) -> str | None:
        """A warning, once, when the ranks have waited too long for some windows in a row; takes the new windows."""
        for window in windows:
            if self._alert_idle is None:
                break
            self._idle_windows = [*self._idle_windows, window] if window.idle >= self._alert_idle else []
            if len(self._idle_windows) == self._alert_windows:
                limit, self._alert_idle = self._alert_idle, None
                return self._alert_text(window, limit)
        return None

    def _alert_text(self, last: Window, limit: float) -> str:
        mean = {
            part: float(np.mean([getattr(window, part) for window in self._idle_windows]))
            for part in ("idle", "lengths", "slow_rank", "data", "rest")
        }
        changes: dict[str, Any] = mean | {name: getattr(last, name) for name in ("by", "uneven", "data_ranks")}
        causes = findings(replace(self.causes.summary(), **changes), hosts=self._hosts, settings=self.settings)
        return (
            f"SyncMonitor: the ranks waited {mean['idle']:.0%} of the time in steps "
            f"{self._idle_windows[0].first_step} to {last.last_step} (alert_idle is {limit:g}): {'; '.join(causes)}"
        )


def _figures(table: Mapping[str, Array]) -> list[tuple[int, dict[str, float]]]:
    """For each step its number and its figures; NaN where not measured."""
    figures = []
    for index, step in enumerate(table["step"]):
        row = {name: table[name][index : index + 1] for name in table if name not in ("step", "rank")}
        by = "compute_seconds" if np.isfinite(row["compute_seconds"]).all() else "padded_tokens"
        values = {
            "idle_fraction": efficiency.idle_fraction(row[by]),
            "padding_fraction": efficiency.padding_fraction(row["tokens"], row["padded_tokens"]),
            "useful_fraction": efficiency.useful_fraction(row["tokens"], row["padded_tokens"]),
            "data_wait_seconds_max": float(row["data_seconds"].max()),
        }
        for name in ("compute_seconds", "tokens"):
            for statistic, of in (("mean", np.mean), ("min", np.min), ("max", np.max), ("variance", np.var)):
                values[f"{name}_{statistic}"] = float(of(row[name]))
        figures.append((int(step), values))
    return figures


def _idle(table: Mapping[str, Array]) -> float:
    complete = np.isfinite(table["compute_seconds"]).all(axis=1)
    if not complete.any():
        return efficiency.idle_fraction(table["padded_tokens"])
    compute, data, step = (table[f"{name}_seconds"][complete] for name in ("compute", "data", "step"))
    total = float((compute.max(axis=1) + efficiency.data_seconds_lost(compute, data, step)).sum())
    return float(efficiency.rank_idle_fractions(compute.sum(axis=0), total).mean())
