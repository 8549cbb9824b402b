"""Rank zero's part of one fit: what the run log holds goes to the loggers, the files and the terminal."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_warn
from numpy.typing import NDArray

from lightning_lengthpool.monitor.run_files import RunFiles
from lightning_lengthpool.monitor.run_log import RunLog
from lightning_lengthpool.report import summary
from lightning_lengthpool.runs.causes import Window
from lightning_lengthpool.runs.run import load_run
from lightning_lengthpool.runs.run_json import About

Array = NDArray[np.float64]

HIDDEN = (
    "SyncMonitor: the compute seconds of some steps are left out (empty cells in steps.csv), so their idle fraction "
    "comes from padded tokens. The likely cause is communication before the last gradient, when a rank's own work "
    "cannot be told from waiting: self.log(..., sync_dist=True) in training_step (use sync_dist=False there), "
    "SyncBatchNorm, an all_reduce or all_gather in the forward pass, in the backward pass, in a hook, or between two "
    "backward passes (DDP itself has one there in the first step). Or else a step without a backward pass, or with "
    "loss.backward() in place of self.manual_backward(loss)."
)


class RunWriter:
    """Write what comes of all ranks' records; where compute is `measured`, warn once that some seconds are absent."""

    def __init__(self, log: RunLog, files: RunFiles, loggers: Sequence[Logger], about: About, measured: bool) -> None:
        self.log, self.files = log, files
        self._loggers, self._about = loggers, about
        self._warn_hidden = measured

    def start(self, step: int, run: str | None, settings: Mapping[str, Any]) -> None:
        """Begin at a step, with the checkpoint's `run` (see `RunFiles.start`) and the data module's settings."""
        self.log.settings = settings
        self.files.start(step, replace(self._about, run=run, settings=dict(settings)))

    def add(self, rows: Array) -> float:
        """Take in the records of some steps, see `RunLog.add`, and return their `idle`, NaN if none is new."""
        new = self.log.add(rows)
        if new is None:
            return math.nan
        self.files.append(new.records)
        if self._warn_hidden and np.isnan(new.records["compute_seconds"]).any():
            self._warn_hidden = False
            rank_zero_warn(HIDDEN)
        for step, figures in new.figures:
            self._log(figures, step)
        self._add_windows(new.windows)
        return new.idle

    def close(self, lengths: Sequence[Array]) -> None:
        """End, with a sample of each data rank's lengths in tokens, which `lengths.csv` keeps."""
        self._add_windows(self.log.finish(lengths))
        self.files.write_lengths(lengths)

    def print(self) -> None:
        """Print the table of the run, the findings, and where the records are."""
        if self.log.totals.steps:
            summary.print_table(summary.steps_table(self.log.totals.summary()))
            for sentence in self.log.findings():
                print(f"- {sentence}")
            if self.files.steps_csv is not None:
                print(f"Step records: {self.files.steps_csv}")

    def log_figures(self) -> None:
        """Give the figures of the report to the loggers that take figures; they are drawn from `steps.csv`."""
        if self.files.steps_csv is None or self.log.totals.steps < 2:
            return
        from lightning_lengthpool.monitor import figure_loggers  # Matplotlib takes its time to load
        from lightning_lengthpool.report.drawings import draw

        try:
            run = load_run(self.files.steps_csv)
            drawn = {f"sync/{drawing.name}": drawing.figure for drawing in draw(run)}
        except ValueError as error:  # a file that was capped to a step or two, say
            rank_zero_warn(f"SyncMonitor draws no figures: {error}")
            return
        figure_loggers.log_figures(self._loggers, drawn, step=int(run.table["step"][-1]))

    def _add_windows(self, windows: Sequence[Window]) -> None:
        if (warning := self.log.alert(windows)) is not None:
            rank_zero_warn(warning)
        for window in windows:
            causes = ("lengths", "slow_rank", "data", "rest")
            self._log({f"idle_by_{cause}": getattr(window, cause) for cause in causes}, window.last_step)

    def _log(self, figures: Mapping[str, float], step: int) -> None:
        logged = {f"sync/{name}": value for name, value in figures.items() if not math.isnan(value)}
        for logger in self._loggers:
            logger.log_metrics(logged, step=step)
