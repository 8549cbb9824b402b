"""Rank zero's account of a run: from all ranks' step records to the loggers, the files, the table and the alert."""

import contextlib
import csv
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from numpy.typing import NDArray

from lightning_lengthpool.monitor.run_folder import claim
from lightning_lengthpool.ordering import efficiency
from lightning_lengthpool.report import tables
from lightning_lengthpool.runs.causes import CauseTracker, Window
from lightning_lengthpool.runs.findings import findings
from lightning_lengthpool.runs.records import COLUMNS, RunTotals, by_step
from lightning_lengthpool.runs.run_json import About, write_about
from lightning_lengthpool.runs.steps_file import StepsFile, TakenError

Array = NDArray[np.float64]

HIDDEN = (
    "SyncMonitor: the compute seconds of some steps are left out (empty cells in steps.csv), so their idle fraction "
    "comes from padded tokens. The likely cause is communication before the last gradient, when a rank's own work "
    "cannot be told from waiting: self.log(..., sync_dist=True) in training_step (use sync_dist=False there), "
    "SyncBatchNorm, an all_reduce or all_gather in the forward pass, in the backward pass, in a hook, or between two "
    "backward passes (DDP itself has one there in the first step). Or else a step without a backward pass, or with "
    "loss.backward() in place of self.manual_backward(loss)."
)


class Journal:
    """Keep the account of one `fit`, in bounded memory.

    Args:
        base: Where the folder of `steps.csv`, `run.json` and `lengths.csv` lies, see `run_folder.claim`; None to
            write nothing.
        loggers: Loggers to write to.
        hosts: Host name of each data rank.
        workers: Worker processes of each data rank; None where that is not known.
        settings: What is known of the data module: `policy`, `pool_size`, `batch_size`, `num_workers`.
        max_rows: Cap of `steps.csv`, see `StepsFile`.
        alert_idle: Idle fraction that is worth a warning; None for no warning.
        alert_windows: Number of windows in a row with that idle fraction before the warning comes.
        measured: Whether compute seconds are expected; if so a warning says once that some are absent.
    """

    def __init__(
        self,
        base: Path | None,
        *,
        loggers: Sequence[Logger],
        hosts: Sequence[str],
        workers: Sequence[int | None],
        settings: Mapping[str, Any],
        max_rows: int | None,
        alert_idle: float | None,
        alert_windows: int,
        measured: bool,
    ) -> None:
        self.totals = RunTotals()
        self.causes = CauseTracker()
        self._loggers, self._hosts, self._workers, self._settings = loggers, hosts, workers, settings
        self._alert_idle, self._alert_windows = alert_idle, alert_windows
        self._idle_windows: list[Window] = []
        self._warn_hidden = measured
        self._lengths: list[Array] | None = None
        self._last_step = -math.inf
        self._base, self._max_rows = base, max_rows
        self._file: StepsFile | None = None
        self.run: str | None = None
        """Names the run's records, for a checkpoint: see `run_json.About`."""

    def start(self, step: int, run: str | None = None) -> None:
        """Begin the files.

        Args:
            step: Number of the first step.
            run: `run` of the checkpoint that this fit goes on from, None if there is none. Its records are continued,
                but for the rows of `step` and later ones, which are replaced.
        """
        run = run if step > 0 else None
        with self._writing():
            self._open(step, run)
        if self._file is not None and step > 0 and self.run != run:
            rank_zero_info(
                f"SyncMonitor: {self._base} holds no records of the run that this one goes on from. Those from step "
                f"{step} on go to {self._file.path}"
            )

    def _open(self, step: int, run: str | None) -> None:
        if self._base is None:
            return
        folder, self.run = claim(self._base, run)
        self._file = StepsFile(folder / "steps.csv", self._max_rows)
        self._file.start(step, ranks=len(self._hosts))
        self._write_about(folder)

    def _write_about(self, folder: Path) -> None:
        write_about(folder, About(self.run, list(self._hosts), list(self._workers), dict(self._settings)))

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """A file that cannot be written must not end the training: one warning, and the run goes on without files."""
        try:
            yield
        except (OSError, ValueError) as error:
            self._base = self._file = None
            rank_zero_warn(f"SyncMonitor goes on without its files: {error}")

    def add(self, rows: Array) -> float:
        """Take in the records of some steps.

        Args:
            rows: Shape `[ranks, micro-batches, columns]`, the columns as in `COLUMNS`. Steps that were added before are
                passed over.

        Returns:
            The share of these steps' time that the ranks waited for each other and for data, NaN if none is new.
        """
        rows = rows[:, rows[0, :, 0] > self._last_step]
        if not rows.shape[1]:
            return math.nan
        self._last_step = rows[0, -1, 0]
        # two ranks with one data rank (tensor parallelism) train on the same batches: the first stands for both
        _, firsts = np.unique(rows[:, 0, COLUMNS.index("rank")], return_index=True)
        columns = rows[firsts].transpose(2, 1, 0).reshape(rows.shape[2], -1)
        steps = dict(zip(COLUMNS, columns, strict=True))
        self.totals.add(steps)
        windows = self.causes.add(steps)
        self._append(steps)
        if self._warn_hidden and np.isnan(steps["compute_seconds"]).any():
            self._warn_hidden = False
            rank_zero_warn(HIDDEN)
        self._alert(windows)
        return self._log(by_step(steps), windows)

    def _append(self, steps: Mapping[str, Array]) -> None:
        if self._file is None or self._base is None:
            return
        with self._writing():
            try:
                self._file.append(steps)
            except TakenError as error:
                folder, self.run = claim(self._base, None)
                self._file.move(folder / "steps.csv")
                self._write_about(folder)
                rank_zero_warn(
                    f"SyncMonitor: {error}, which went on from a checkpoint of this one. The records of this run, "
                    f"earlier ones too, are now in {self._file.path}"
                )
                self._file.append(steps)

    def close(self, lengths: Sequence[Array]) -> None:
        """End the account.

        Args:
            lengths: Of each data rank a sample of its samples' lengths in tokens; `lengths.csv` keeps them.
        """
        windows = self.causes.finish()
        self._alert(windows)
        self._log_windows(windows)
        self._lengths = list(lengths)
        if self._file is not None and any(map(len, lengths)):
            with self._writing():
                self._write_lengths(self._file)

    def _write_lengths(self, steps: StepsFile) -> None:
        if steps.is_taken():
            return  # the folder is another run's
        with steps.path.with_name("lengths.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(("rank", "tokens"))
            writer.writerows((rank, f"{n:.15g}") for rank, own in enumerate(self._lengths or ()) for n in own)

    def findings(self) -> list[str]:
        """Why the ranks waited and what to do, in plain words."""
        return findings(self.causes.summary(), hosts=self._hosts, lengths=self._lengths, settings=self._settings)

    def print(self) -> None:
        """Print the table of the run, the findings, and where the records are."""
        if self.totals.steps:
            tables.print_table(tables.steps_table(self.totals.summary()))
            for sentence in self.findings():
                print(f"- {sentence}")
            if self._file is not None:
                print(f"Step records: {self._file.path}")

    def log_figures(self) -> None:
        """Give the figures of the report to the loggers that take figures; they are drawn from `steps.csv`."""
        if self._file is None or self.totals.steps < 2:
            return
        from lightning_lengthpool import runs  # Matplotlib takes its time to load
        from lightning_lengthpool.monitor import figure_loggers
        from lightning_lengthpool.report import page

        try:
            run = runs.load_run(self._file.path)
            drawn = {f"sync/{drawing.name}": drawing.figure for drawing in page.draw(run)}
        except ValueError as error:  # a file that was capped to a step or two, say
            rank_zero_warn(f"SyncMonitor draws no figures: {error}")
            return
        figure_loggers.log_figures(self._loggers, drawn, step=int(run.table["step"][-1]))

    def _log(self, table: dict[str, Array], windows: Sequence[Window]) -> float:
        """Log each step under its own number; returns what `add` does."""
        complete = np.isfinite(table["compute_seconds"]).all(axis=1)
        for i, step in enumerate(table["step"]):
            row = {name: table[name][i : i + 1] for name in table if name not in ("step", "rank")}
            values = {
                "idle_fraction": efficiency.idle_fraction(row["compute_seconds" if complete[i] else "padded_tokens"]),
                "padding_fraction": efficiency.padding_fraction(row["tokens"], row["padded_tokens"]),
                "useful_fraction": efficiency.useful_fraction(row["tokens"], row["padded_tokens"]),
                "data_wait_seconds_max": row["data_seconds"].max(),
            }
            for name in ("compute_seconds", "tokens"):
                own = row[name]
                values |= {f"{name}_mean": own.mean(), f"{name}_min": own.min(), f"{name}_max": own.max()}
                values[f"{name}_variance"] = own.var()
            self._write(values, int(step))
        self._log_windows(windows)
        if not complete.any():
            return efficiency.idle_fraction(table["padded_tokens"])
        compute, data, step = (table[f"{name}_seconds"][complete] for name in ("compute", "data", "step"))
        total = float((compute.max(axis=1) + efficiency.data_seconds_lost(compute, data, step)).sum())
        return float(efficiency.rank_idle_fractions(compute.sum(axis=0), total).mean())

    def _log_windows(self, windows: Sequence[Window]) -> None:
        for window in windows:
            shares = {
                "lengths": window.lengths,
                "slow_rank": window.slow_rank,
                "data": window.data,
                "rest": window.rest,
            }
            self._write({f"idle_by_{cause}": share for cause, share in shares.items()}, window.last_step)

    def _write(self, values: Mapping[str, float], step: int) -> None:
        logged = {f"sync/{name}": float(value) for name, value in values.items() if not np.isnan(value)}
        for logger in self._loggers:
            logger.log_metrics(logged, step=step)

    def _alert(self, windows: Sequence[Window]) -> None:
        """Warn once, when the ranks have waited too long for some windows in a row."""
        for window in windows:
            if self._alert_idle is None:
                return
            self._idle_windows = [*self._idle_windows, window] if window.idle >= self._alert_idle else []
            if len(self._idle_windows) == self._alert_windows:
                parts = ("idle", "lengths", "slow_rank", "data", "rest")
                means = {part: float(np.mean([getattr(idle, part) for idle in self._idle_windows])) for part in parts}
                last = {name: getattr(window, name) for name in ("by", "uneven", "data_ranks")}
                found = findings(
                    replace(self.causes.summary(), **means, **last), hosts=self._hosts, settings=self._settings
                )
                rank_zero_warn(
                    f"SyncMonitor: the ranks waited {means['idle']:.0%} of the time in steps "
                    f"{self._idle_windows[0].first_step} to {window.last_step} (alert_idle is {self._alert_idle:g}): "
                    + "; ".join(found)
                )
                self._alert_idle = None
